"""memlab estimate: the peak of one training step, and the cards that it fits."""

import argparse
import json

from rich.table import Table

from memlab.cli.batch import other_batches, title
from memlab.cli.compare import side_json
from memlab.cli.show import amount, heading, percent, print_note, print_table, warn_of_cpu, working
from memlab.cli.switches import base_recipe, parse_switches
from memlab.experiments import Recipe, measure
from memlab.instruments.amounts import unit_of
from memlab.instruments.measurement import CATEGORIES, Measurement

# Nominal GB, counted as 1e9 bytes: what a card has above that (a GiB is 7 % more than a GB) is left
# to the CUDA context and the driver.
CARDS_GB = (8, 16, 24, 40, 48, 80, 141)


def main(options: argparse.Namespace) -> int:
    recipe = base_recipe(options, options.base, **parse_switches(options.switches))
    warn_of_cpu(options.device, recipe.model)
    with working(f"measuring {recipe.model}"):
        measurement = measure(recipe, device=options.device)
    if options.json:
        print(json.dumps({**side_json(recipe, measurement), "fits": fits(measurement)}))
    else:
        print_table(estimate_table(recipe, measurement))
        print_table(cards_table(recipe, measurement))
        if note := other_batches(recipe):
            print_note(note)
    return 0


def fits(measurement: Measurement) -> dict[str, str]:
    """Card -> "yes"; "tight", where only giving back cached blocks would do; or "no"."""
    allocated = measurement.peak_allocated_bytes
    reserved = measurement.peak_reserved_bytes or allocated
    return {
        f"{card} GB": "yes"
        if reserved <= card * 1e9
        else "tight"
        if allocated <= card * 1e9
        else "no"
        for card in CARDS_GB
    }


def estimate_table(recipe: Recipe, measurement: Measurement) -> Table:
    unit = unit_of(measurement.metered_peak_bytes)
    table = Table(
        title=title(recipe),
        caption=f"on: {measurement.device}",
    )
    table.add_column(heading(unit))
    table.add_column("peak", justify="right")
    table.add_column("share", justify="right")
    metered = measurement.metered_peak_bytes
    table.add_row("peak allocated", amount(measurement.peak_allocated_bytes, unit), style="bold")
    table.add_row("peak reserved", amount(measurement.peak_reserved_bytes, unit), style="bold")
    table.add_row(
        "peak metered, of which", amount(metered, unit), percent(metered, metered), style="bold"
    )
    for category in CATEGORIES:
        if size := measurement.by_category[category]:
            table.add_row(
                f"  {category.replace('_', ' ')}", amount(size, unit), percent(size, metered)
            )
    return table


def cards_table(recipe: Recipe, measurement: Measurement) -> Table:
    verdicts = fits(measurement)
    caption = "tight: only by giving back cached blocks" if "tight" in verdicts.values() else None
    any_batch = recipe.dataset == "full"  # where rows differ in length, each batch does
    table = Table(title=f"{'' if any_batch else 'this batch '}fits a card of", caption=caption)
    for card in verdicts:
        table.add_column(card, justify="center")
    table.add_row(*verdicts.values())
    return table
