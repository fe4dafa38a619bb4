"""Amounts of memory in words: one unit a table, so that its figures can be compared at a glance."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """What a table counts in."""

    name: str
    size: int  # bytes

    def of(self, size: float) -> str:
        """Bytes in this unit, two decimals, without its name."""
        return f"{round(size / self.size, 2) + 0:.2f}"  # + 0: no "-0.00"


GB, MB = Unit("GB", 10**9), Unit("MB", 10**6)
LEAST_GB = 10**8  # bytes: below it, two decimals of a GB say next to nothing


def unit_of(*sizes: int | None) -> Unit:
    """GB (1e9 bytes), or MB (1e6 bytes) where even the largest of `sizes` is below 0.1 GB."""
    return GB if max((size or 0 for size in sizes), default=0) >= LEAST_GB else MB
