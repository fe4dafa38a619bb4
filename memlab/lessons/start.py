"""Lesson 00: rounding, units, and what depends on the device."""

from __future__ import annotations

from typing import Any

import torch

from memlab.experiments import Recipe, measure
from memlab.instruments.meter import Meter
from memlab.lessons.judging import Exercise, Finding, is_number, near

SHAPE = (5, 300)  # of 00a's tensor
READINGS = (
    "metered_peak_bytes",
    "by_category",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "step_ms",
)


def _metered(dtype: torch.dtype) -> int:
    """Bytes that the meter counts for 00a's tensor."""
    with Meter("cpu") as meter:
        tensor = torch.empty(SHAPE, dtype=dtype)
        live = meter.live_bytes
    del tensor
    return live


def _judge_rounding(answer: float) -> Finding:
    entries = torch.Size(SHAPE).numel()
    return near(
        answer,
        _metered(torch.bfloat16),
        usual={
            2 * entries: "Those are its entries' bytes, before rounding.",
            entries: "That counts entries; a bf16 entry takes 2 bytes.",
            _metered(torch.float32): "That is fp32; a bf16 entry takes 2 bytes.",
        },
    )


def _why_rounding() -> str:
    n = 2 * torch.Size(SHAPE).numel()
    return (
        f"2 bytes an entry make {n}, rounded up to a multiple of 512: {_metered(torch.bfloat16)}."
    )


def _peak() -> int:
    return measure(Recipe.off(), device="simulated").metered_peak_bytes


def _judge_gib(answer: float) -> Finding:
    n = _peak()
    return near(
        answer,
        n / 2**30,
        within=0.002,
        usual={
            n / 1e9: "That is GB still.",
            n * 2**30 / 1e18: "That multiplies; a GiB is the larger unit, so there are fewer.",
        },
    )


def _why_gib() -> str:
    n = _peak()
    share = 2**30 / 1e9 - 1
    return f"{n} / 2**30 = {n / 2**30:.2f} GiB, and {n / 1e9:.2f} GB: a GiB is {share:.1%} larger."


def _same_everywhere() -> set[str]:
    """The readings of a tiny step that really are equal simulated and on the best device here.

    The two sides also have different allocators, so that a reading of the allocator's differs where
    both are simulated.
    """
    tiny = Recipe.off(model="memlab/tiny", max_length=1536)
    one = measure(tiny, device="simulated")
    other = measure(tiny.replace(expandable_segments=True), device="auto")
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in READINGS}
    return {name for name, (a, b) in pairs.items() if a is not None and a == b}


def _judge_readings(answer: Any) -> Finding:
    said, right = set(answer), _same_everywhere()
    if said == right:
        return Finding(True)
    if wrong := sorted(said - right):
        return Finding(False, f"Not the same everywhere: {', '.join(wrong)}.")
    return Finding(False, f"{len(right - said)} more would be the same.")


def _why_readings() -> str:
    same = _same_everywhere()
    depend = ", ".join(name for name in READINGS if name not in same)
    return (
        f"The same on every device: {', '.join(n for n in READINGS if n in same)}, which count the "
        f"step's own storages. Device, allocator and libraries decide the rest: {depend}."
    )


EXERCISES = {
    "00a": Exercise(
        f"How many bytes does the meter count for a bf16 tensor of shape {SHAPE}?",
        "a whole number of bytes",
        is_number,
        _judge_rounding,
        "Multiply entries by bytes an entry, then round up to a multiple of 512.",
        _why_rounding,
    ),
    "00b": Exercise(
        "How many GiB is the metered peak of `measure(Recipe.off())`?",
        "a number of GiB, two decimals",
        is_number,
        _judge_gib,
        "GB is 10**9 bytes and GiB is 2**30: start from metered_peak_bytes.",
        _why_gib,
    ),
    "00c": Exercise(
        f"Which of these readings are the same on every device: {', '.join(READINGS)}?",
        f"a list of names out of {', '.join(READINGS)}",
        lambda answer: (
            isinstance(answer, list | tuple | set | frozenset)
            and all(name in READINGS for name in answer)
        ),
        _judge_readings,
        "Measure one recipe with expandable_segments off and on, or on a card too: what stays?",
        _why_readings,
    ),
}
