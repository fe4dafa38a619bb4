"""Where cudaMalloc puts a segment. Addresses decide between free blocks of equal size, only that.

Read from allocation histories of an H200 (driver 580): segments go downwards in slots of 32 MiB,
and what is left in a slot takes a later segment that fits, the lowest slot first. What else a
process has in its address space makes gaps, which can't be known: segments of 1 GiB and more are
therefore taken to lie above the others, which fits the recorded runs but is no rule of the driver.
"""

from __future__ import annotations

SLOT = 32 << 20  # bytes
LARGE = 1 << 30  # bytes


class Addresses:
    """Hands out addresses in bytes; none twice."""

    def __init__(self) -> None:
        self._next, self._next_large = 1 << 52, 1 << 54
        self._rests: list[tuple[int, int]] = []  # (address, bytes) left in slots, lowest last

    def place(self, nbytes: int) -> int:
        """The address of a new segment of `nbytes`."""
        taken = -(-nbytes // SLOT) * SLOT
        if nbytes >= LARGE:
            self._next_large -= taken
            return self._next_large
        for i in reversed(range(len(self._rests))):
            address, left = self._rests[i]
            if nbytes <= left:
                self._rests[i] = (address + nbytes, left - nbytes)
                return address
        self._next -= taken
        self._rests.append((self._next + nbytes, taken - nbytes))
        return self._next
