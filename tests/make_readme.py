"""Writes what the README shows of runs: its tables and its picture.

    python tests/make_readme.py

All are simulated (the same integers as on a card); tests/test_readme.py holds the tables to them.
The table technique x trainer is of the cells of tests/test_matrix.py that passed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memlab.experiments import Recipe, measure
from memlab.experiments.trainer_batches import last_step
from memlab.instruments.measurement import Measurement
from memlab.lessons.matrix import show_matrix

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "notebooks" / "images" / "before_after.png"
MATRIX = ROOT / "notebooks" / "measured" / "matrix.json"
OFF = Recipe.off(model="Qwen/Qwen3-1.7B", max_length=2048)
CLIMB = [  # what is switched on, one after the other, and whether TRL has it on
    ("everything off", {}, ""),
    ("chunked cross-entropy", {"loss_type": "chunked_nll"}, "yes"),
    ("gradient checkpointing", {"gradient_checkpointing": True}, "yes"),
    ("expandable segments", {"expandable_segments": True}, "no"),
]
ROWS = Recipe.off(model=OFF.model, dataset="docstrings", per_device_train_batch_size=16)
ROWS_HELD = [  # the same data set, its rows held in other ways; each beside the first, not on top
    ("rows of up to 2048, padded", {"max_length": 2048}),
    ("truncation", {"max_length": 512}),
    ("padding to a multiple", {"max_length": 2048, "pad_to_multiple_of": 64}),
    ("padding-free", {"max_length": 2048, "padding_free": True}),
    (
        "packing, one bin",
        {"max_length": 2048, "packing": True, "per_device_train_batch_size": 1},
    ),
]


def steps() -> list[tuple[str, str, str, Measurement]]:
    """(name, switches, on in TRL, measurement) of each row, each on top of those above it."""
    recipe, rows = OFF, []
    for name, switches, in_trl in CLIMB:
        recipe = recipe.replace(**switches)
        said = ", ".join(f"`{switch}={value}`" for switch, value in switches.items())
        rows.append((name, said, in_trl, measure(recipe, device="simulated")))
    return rows


def table() -> str:
    """The README's table, in Markdown."""
    rows = steps()
    first = rows[0][3].peak_allocated_bytes
    lines = [
        f"{OFF.model}, {OFF.per_device_train_batch_size} x {OFF.max_length} tokens, bf16, AdamW; "
        "each row adds to those above it:",
        "",
        "| technique | switch | on in TRL | peak allocated | peak reserved | saved so far |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, said, in_trl, m in rows:
        saved = 1 - m.peak_allocated_bytes / first
        lines.append(
            f"| {name} | {said} | {in_trl} | {m.peak_allocated_bytes / 1e9:.2f} GB "
            f"| {(m.peak_reserved_bytes or 0) / 1e9:.2f} GB | {f'{saved:.0%}' if saved else ''} |"
        )
    return "\n".join([*lines, "", *sequences()])


def sequences() -> list[str]:
    """The table of the techniques for rows of unequal length, line by line."""
    lines = [
        f"Techniques for rows of unequal length: {ROWS.model}, {ROWS.per_device_train_batch_size} "
        "documentation strings a step, everything else off; each row stands alone, and the last "
        "column is what lies above the weights and the optimizer's state:",
        "",
        "| technique | switches | slots | tokens in them | peak allocated | a token |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, switches in ROWS_HELD:
        recipe = ROWS.replace(**switches)
        (last,) = last_step(recipe)
        m = measure(recipe, device="simulated")
        slots, tokens = last["labels"].numel(), tokens_in(last)
        model = m.by_category["parameters"] + m.by_category["optimizer_state"]
        said = ", ".join(f"`{switch}={value}`" for switch, value in switches.items())
        lines.append(
            f"| {name} | {said} | {slots:,} | {tokens:,} | {m.peak_allocated_bytes / 1e9:.2f} GB "
            f"| {(m.metered_peak_bytes - model) / tokens / 1e6:.1f} MB |"
        )
    return lines


def tokens_in(batch: dict[str, Any]) -> int:
    """Slots of a batch that no padding fills (its rows are not filled up to a multiple)."""
    mask = batch.get("attention_mask")
    return batch["labels"].numel() if mask is None else int(mask.sum())


class Passed:
    """A pytest plugin: the cells that a test says it covers, each once it has passed."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            properties: dict[str, Any] = dict(report.user_properties)
            technique, trainer, cell = properties["cell"]
            self.cells.setdefault(technique, {})[trainer] = cell


def run_matrix(path: Path = MATRIX) -> None:
    """Run the cells' tests and write what they found, technique -> trainer -> cell."""
    passed = Passed()
    pytest.main(["-q", "-k", "test_cell", str(ROOT / "tests" / "test_matrix.py")], [passed])
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in passed.cells.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def with_section(readme: str, name: str, text: str) -> str:
    """The README with `text` between the two marks of this name."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    head, rest = readme.split(start)
    _, tail = rest.split(end)
    return f"{head}{start}\n{text}\n{end}{tail}"


def with_table(readme: str) -> str:
    """The README's text with its table of bytes made anew."""
    return with_section(readme, "table", table())


def picture(path: Path = PICTURE) -> None:
    """The step's timeline, everything off and with TRL's defaults, on one scale."""
    from memlab.widgets import show_timeline

    rows = steps()
    PICTURE.parent.mkdir(exist_ok=True)
    show_timeline({"everything off": rows[0][3], "TRL's defaults": rows[2][3]}).save(path)


if __name__ == "__main__":
    run_matrix()
    readme = ROOT / "README.md"
    text = with_table(readme.read_text(encoding="utf-8"))
    readme.write_text(with_section(text, "matrix", show_matrix().table()), encoding="utf-8")
    picture()
