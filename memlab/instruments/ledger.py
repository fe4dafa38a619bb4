"""The ledger of a metered run: each storage by its birth, its bytes, and what it was for."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memlab.instruments.measurement import CATEGORIES, Sample

TEMPORARIES = CATEGORIES.index("temporaries")
UNIT = 512  # bytes
MOST_WORKSPACES = 64  # of one operation


def rounded(nbytes: int) -> int:
    """Bytes that the allocator takes for a storage of `nbytes`: the next multiple of 512."""
    return -(-nbytes // UNIT) * UNIT


@dataclass(slots=True)
class Birth:
    """One storage, or one stretch of its life with one size: `asked`, rounded up to `nbytes`."""

    nbytes: int
    category: int
    op: str
    asked: int

    @classmethod
    def of(cls, asked: int, category: int, op: str) -> Birth:
        """A birth of a storage of `asked` bytes."""
        return cls(rounded(asked), category, op, asked)


@dataclass(frozen=True)
class Workspaces:
    """What one operation allocates inside itself: seen by the allocator, not by the meter."""

    before_event: int
    nbytes: tuple[int, ...]
    kept: bool

    def allocations(self) -> Iterator[tuple[int, int]]:
        """(which of them, bytes), negative bytes when freed."""
        yield from enumerate(self.nbytes)
        if not self.kept:
            yield from ((which, -nbytes) for which, nbytes in enumerate(self.nbytes))


class Mark(NamedTuple):
    """A moment of a ledger: how much was in each of its lists."""

    births: int
    events: int
    phases: int
    workspaces: int


class Ledger:
    """Allocations and frees in order, under the phases of a training step.

    Categories may be set long after the event: what a tensor was for is often known only later.
    """

    def __init__(self) -> None:
        self.births: list[Birth] = []
        self.events: list[int] = []  # k: birth k is allocated; ~k: it is freed
        self.phases: list[tuple[int, str]] = [(0, "setup")]  # from this event on
        self.workspaces: list[Workspaces] = []
        self.step_start = 0

    @property
    def phase(self) -> str:
        """The phase that the next event belongs to."""
        return self.phases[-1][1]

    def enter(self, phase: str) -> None:
        """The next event belongs to this phase."""
        self.phases.append((len(self.events), phase))

    def born(self, asked: int, category: int, op: str) -> int:
        """Record an allocation of so many bytes, rounded up here; returns the birth's number."""
        self.births.append(Birth.of(asked, category, op))
        self.events.append(len(self.births) - 1)
        return len(self.births) - 1

    def died(self, birth: int) -> None:
        """Record that a birth's storage was freed."""
        self.events.append(~birth)

    def mark(self) -> Mark:
        """The present moment."""
        return Mark(*map(len, (self.births, self.events, self.phases, self.workspaces)))

    def back_to(self, mark: Mark) -> None:
        """Forget what came after `mark`."""
        lists = (self.births, self.events, self.phases, self.workspaces)
        for entries, kept in zip(lists, mark, strict=True):
            del entries[kept:]

    def begin_step(self) -> None:
        """Samples are taken from here on."""
        self.step_start = len(self.events)

    def samples(self) -> Iterator[Sample]:
        """The live bytes by category after each event of the last step, its start first."""
        live, names, number = self._course()
        for at, phase in enumerate(number.tolist()):
            yield Sample(at, names[phase], tuple(live[at].tolist()))

    def thinned(self, *, points: int = 600) -> tuple[Sample, ...]:
        """About `points` of the samples, in order: of each stretch the highest and the last.

        Each phase has as many stretches as every other, however many operations it takes: a long
        rollout leaves enough for backward.
        """
        live, names, phases = self._course()
        totals = live.sum(1)
        samples = np.bincount(phases)  # of each phase
        stretch = np.maximum(1, samples * np.count_nonzero(samples) // points)
        begins = np.diff(phases, prepend=-1) != 0  # another phase, another stretch
        entered = np.flatnonzero(begins)[begins.cumsum() - 1]
        begins |= (np.arange(len(phases)) - entered) % stretch[phases] == 0
        starts = np.flatnonzero(begins).tolist()
        kept = {0}
        for start, end in itertools.pairwise([*starts, len(totals)]):
            kept |= {start + int(totals[start:end].argmax()), end - 1}
        return tuple(Sample(at, names[phases[at]], tuple(live[at].tolist())) for at in sorted(kept))

    def _course(self) -> tuple[np.ndarray, list[str], np.ndarray]:
        """After each event of the last step, its start first: bytes (S, categories), the phase.

        Of the phases the names, and the number of each event's, (S,).
        """
        events = np.array(self.events, dtype=np.int64)
        births = np.where(events < 0, ~events, events)
        nbytes = np.fromiter((birth.nbytes for birth in self.births), np.int64)[births]
        category = np.fromiter((birth.category for birth in self.births), np.int64)[births]
        changes = np.where(events < 0, -nbytes, nbytes)
        live = np.zeros((len(events) - self.step_start + 1, len(CATEGORIES)), dtype=np.int64)
        np.add.at(live[0], category[: self.step_start], changes[: self.step_start])
        live[np.arange(1, len(live)), category[self.step_start :]] = changes[self.step_start :]
        live.cumsum(0, out=live)
        begun, entered = zip(*self.phases, strict=True)
        names = sorted({*entered})
        numbers = np.array([names.index(name) for name in entered])
        last = np.maximum(np.arange(len(live)) - 1, 0) + self.step_start  # the event, from 0
        return live, names, numbers[np.searchsorted(begun, last, side="right") - 1]

    def alive_at(self, event: int) -> dict[str, int]:
        """Bytes alive after `event` of the last step, by the operation that made them."""
        events = np.array(self.events[: self.step_start + event], dtype=np.int64)
        alive = np.zeros(len(self.births), dtype=bool)
        alive[events[events >= 0]] = True
        alive[~events[events < 0]] = False
        by_op: dict[str, int] = {}
        for k in np.flatnonzero(alive).tolist():
            birth = self.births[k]
            by_op[birth.op] = by_op.get(birth.op, 0) + birth.nbytes
        return dict(sorted(by_op.items(), key=lambda item: (-item[1], item[0])))

    def worked(self, nbytes: tuple[int, ...], *, keeps: bool = False) -> None:
        """Record what the last operation allocated inside itself, and freed unless it keeps it."""
        self.workspaces.append(Workspaces(len(self.events), nbytes, keeps))

    def allocations(
        self, *, from_event: int = 0, to_event: int | None = None
    ) -> Iterator[tuple[Hashable, int]]:
        """(key, bytes) for an allocator model, negative bytes when freed; workspaces included."""
        keys, nbytes = self.flow(from_event=from_event, to_event=to_event)
        yield from zip(keys.tolist(), nbytes.tolist(), strict=True)

    def flow(
        self, *, from_event: int = 0, to_event: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The keys and the bytes of `allocations`, (E,) int64 each."""
        last = len(self.events) if to_event is None else to_event
        events = np.array(self.events[from_event:last], dtype=np.int64)
        births = np.where(events < 0, ~events, events)
        sizes = np.fromiter((birth.nbytes for birth in self.births), np.int64)[births]
        inside = [
            (work.before_event - from_event, ~(number * MOST_WORKSPACES + which), nbytes)
            for number, work in enumerate(self.workspaces)
            if from_event < work.before_event <= last
            for which, nbytes in work.allocations()
        ]
        before, keys, nbytes = np.array(inside, dtype=np.int64).reshape(-1, 3).T
        changes = np.where(events < 0, -sizes, sizes)
        return np.insert(births, before, keys), np.insert(changes, before, nbytes)
