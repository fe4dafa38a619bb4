"""What each of several cards would hold of a step, if parameters were spread over them (FSDP)."""

from __future__ import annotations

from dataclasses import replace

from memlab.instruments.measurement import CATEGORIES, Measurement

SPREAD = ("parameters", "gradients", "optimizer_state")  # each card has its share of these
OF = tuple(CATEGORIES.index(category) for category in SPREAD)


def one_of(cards: int, measurement: Measurement) -> Measurement:
    """The highest moment of a step on each of `cards`, every one with this batch; no timeline.

    Arithmetic on the timeline: a share of parameters, gradients and optimizer state, and all of
    the rest. What FSDP gathers for a moment, a layer or the head, is left out. Raises ValueError
    for fewer than 1 card, and without a timeline.
    """
    if cards < 1 or not measurement.timeline:
        raise ValueError(
            f"one_of: cards={cards}: give 1 or more, and a measurement with a timeline"
        )
    moments = [
        [n // cards if at in OF else n for at, n in enumerate(sample.bytes)]
        for sample in measurement.timeline
    ]
    peak = max(moments, key=sum)
    return replace(
        measurement,
        metered_peak_bytes=sum(peak),
        peak_allocated_bytes=sum(peak),
        peak_reserved_bytes=None,
        by_category=dict(zip(CATEGORIES, peak, strict=True)),
        by_op={},
        timeline=(),
    )
