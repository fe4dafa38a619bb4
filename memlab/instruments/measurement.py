"""What every instrument returns: one training step's memory, by category and over time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from memlab.errors import MemlabError

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "logits",
    "kv_cache",
    "temporaries",
)


@dataclass(frozen=True)
class Sample:
    """One moment of the last step.

    `event` counts allocations and frees since the step began; `bytes` are the live bytes by
    category, in the order of `CATEGORIES`.
    """

    event: int
    phase: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Live bytes of all categories."""
        return sum(self.bytes)


@dataclass(frozen=True)
class Measurement:
    """Peak memory of a training step (its last one, where several were run), in bytes.

    `metered_peak_bytes` counts live storages, each rounded up to 512 B: it is the same integer on a
    card and simulated; `by_category` and `by_op` (the operation that made a storage) split it.
    `peak_allocated_bytes` and `peak_reserved_bytes` are the caching allocator's: read from the
    card, or predicted when `simulated`. `step_ms` is None when nothing was timed.
    """

    metered_peak_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    by_category: dict[str, int]
    by_op: dict[str, int]
    timeline: tuple[Sample, ...]
    host_peak_bytes: int
    step_ms: float | None
    device: str
    simulated: bool
    versions: dict[str, str]

    @property
    def peak(self) -> Sample:
        """The moment of the metered peak."""
        return max(self.timeline, key=lambda sample: sample.total)

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back to an equal Measurement."""
        fields = asdict(self)
        fields["timeline"] = [[s.event, s.phase, list(s.bytes)] for s in self.timeline]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Read what `to_json` wrote.

        Raises MemlabError when the text is not a whole recording.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["timeline"] = tuple(
                Sample(int(event), str(phase), tuple(int(n) for n in live))
                for event, phase, live in fields["timeline"]
            )
            measurement = cls(**fields)
            figures = (measurement.peak_allocated_bytes, measurement.peak_reserved_bytes or 0)
            whole = (
                all(isinstance(figure, int) for figure in figures)
                and tuple(measurement.by_category) == CATEGORIES
                and sum(measurement.by_category.values()) == measurement.metered_peak_bytes
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MemlabError(
                f"corrupt recording ({error}): delete it, and it is made again"
            ) from None
        if not whole:
            raise MemlabError(
                "corrupt recording (its categories do not add up to its peak): delete it, "
                "and it is made again"
            )
        return measurement
