"""memlab compare: one training step before and after."""

import argparse
import dataclasses
import json
from typing import Any

from rich.table import Table

from memlab.cli.batch import batch_shape, comparison_notes, title
from memlab.cli.show import (
    amount,
    heading,
    print_note,
    print_table,
    saving,
    warn_of_cpu,
    working,
)
from memlab.cli.switches import base_recipe, parse_switches
from memlab.experiments import Comparison, Recipe, compare
from memlab.instruments.amounts import unit_of
from memlab.instruments.measurement import CATEGORIES, Measurement


def main(options: argparse.Namespace) -> int:
    before, after = sides(options)
    warn_of_cpu(options.device, before.model, after.model)
    with working(f"measuring {before.model}, before and after"):
        comparison = compare(before, after, device=options.device)
    if options.json:
        print(json.dumps(as_json(comparison)))
    else:
        print_table(comparison_table(comparison))
        for note in comparison_notes(before, after):
            print_note(note)
    return 0


def sides(options: argparse.Namespace) -> tuple[Recipe, Recipe]:
    """The recipes before and after; raises ValueError where they would be the same."""
    before = base_recipe(options, options.before)
    switches = parse_switches(options.switches)
    if not switches and options.before == "off":
        return before, base_recipe(options, "defaults")
    after = before.replace(**switches)
    if after == before:
        other = "nll" if before.loss_type == "chunked_nll" else "chunked_nll"
        raise ValueError(
            f"nothing differs from --before {options.before}: give a switch that does, such as "
            f"--set loss_type={other}"
            + (", or --before off" if options.before == "defaults" else "")
        )
    return before, after


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Both sides whole, and what is saved in bytes."""
    return {
        "before": side_json(comparison.before_recipe, comparison.before),
        "after": side_json(comparison.after_recipe, comparison.after),
        "changed": comparison.changed,
        "saved_bytes": comparison.saved_bytes,
        "saved_share": comparison.saved_share,
    }


def side_json(recipe: Recipe, measurement: Measurement) -> dict[str, Any]:
    """The recipe, its batch as (rows, slots a row), and all that was measured."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "batch_shape": batch_shape(recipe),
        **json.loads(measurement.to_json()),
    }


def comparison_table(comparison: Comparison) -> Table:
    before, after = comparison.before, comparison.after
    unit = unit_of(before.metered_peak_bytes, after.metered_peak_bytes)
    changed = ", ".join(f"{k}: {a} -> {b}" for k, (a, b) in comparison.changed.items())
    table = Table(
        title=title(comparison.before_recipe),
        caption=f"{changed}\non: {after.device}",
    )
    table.add_column(heading(unit))
    for side in ("before", "after", "saved"):
        table.add_column(side, justify="right")
    rows = {
        "peak allocated": (before.peak_allocated_bytes, after.peak_allocated_bytes),
        "peak reserved": (before.peak_reserved_bytes, after.peak_reserved_bytes),
        "peak metered, of which": (before.metered_peak_bytes, after.metered_peak_bytes),
    }
    for name, (b, a) in rows.items():
        table.add_row(name, amount(b, unit), amount(a, unit), saving(b, a, unit), style="bold")
    for category in CATEGORIES:
        b, a = before.by_category[category], after.by_category[category]
        if b or a:
            sizes = (amount(size, unit) for size in (b, a, b - a))
            table.add_row(f"  {category.replace('_', ' ')}", *sizes)
    return table
