"""Milliseconds a slider step takes, picture included: python tests/benchmarks/bench_widgets.py"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ipywidgets
from made_steps import made_step

from memlab.data.lengths import chat_like
from memlab.widgets import (
    Grid,
    explore,
    explore_layouts,
    explore_lengths,
    explore_multiples,
    explore_packing,
    scrub,
)
from memlab.widgets.grids import folder


def median_ms(move: object, values: list[int]) -> tuple[float, float]:
    """Median and slowest of setting each value in turn."""
    times = []
    for value in values:
        start = time.perf_counter()
        move(value)  # type: ignore[operator]
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times), max(times)


def main() -> None:
    """Moves an `explore` slider and a `scrub` slider (1,200 samples) back and forth, then every
    slider of the sequence lessons' figures over 100,000 rows."""
    chunks = [2**n for n in range(5, 13)]
    steps = {c: made_step(checkpointing=True, logits_mb=c * 6 // 10) for c in chunks}
    explored = explore(steps, axes="chunk")
    scrubbed = scrub(made_step(micro_batches=9))
    there_and_back = [*chunks[1:], *chunks[-2::-1]]
    samples = list(range(0, len(scrubbed.measurement.timeline), 40))
    for name, control, values in (
        ("explore", explored.controls["chunk"], there_and_back),
        ("scrub", scrubbed.slider, samples),
    ):
        median, slowest = median_ms(lambda v, c=control: setattr(c, "value", v), values)
        print(f"{name:<30} {median:6.1f} ms a step (slowest {slowest:.1f})")
    rows = chat_like(100_000)
    for shown in (
        explore_lengths(rows, grid=Grid.load(folder() / "02_lengths.json"), max_length=1024),
        explore_layouts(rows),
        explore_multiples(rows),
        explore_packing(rows),
    ):
        for slider in shown.view.children:
            steps = getattr(slider, "options", ())
            if isinstance(slider, ipywidgets.IntSlider):
                median, slowest = median_ms(
                    lambda v, c=slider: setattr(c, "value", v), [9, 99, 999]
                )
            elif isinstance(slider, ipywidgets.SelectionSlider) and len(steps) > 1:
                order = [*range(len(steps)), slider.index]  # forwards, then back to the start
                median, slowest = median_ms(lambda i, c=slider: setattr(c, "index", i), order)
            else:
                continue
            name = f"{type(shown).__name__} {slider.description}"
            print(f"{name:<30} {median:6.1f} ms a step (slowest {slowest:.1f})")


if __name__ == "__main__":
    main()
