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

    def allocations(self) -> Iterator[tuple[Hashable, int]]:
        """(key, bytes), as in `Ledger.allocations`."""
        keys = [(id(self), number) for number in range(len(self.nbytes))]
        yield from zip(keys, self.nbytes, strict=True)
        if not self.kept:
            yield from ((key, -nbytes) for key, nbytes in zip(keys, self.nbytes, strict=True))


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
        live, phases = self._course()
        for at, phase in enumerate(phases):
            yield Sample(at, phase, tuple(live[at].tolist()))

    def thinned(self, *, points: int = 600) -> tuple[Sample, ...]:
        """About `points` of the samples, in order: of each stretch the highest and the last.

        Each phase has as many stretches as every other, however many operations it takes: a long
        rollout leaves enough for backward.
        """
        live, phases = self._course()
        totals, names = live.sum(1), np.unique(phases, return_inverse=True)[1]
        samples = np.bincount(names)  # of each phase
        stretch = np.maximum(1, samples * len(samples) // points)
        begins = np.diff(names, prepend=-1) != 0  # another phase, another stretch
        entered = np.flatnonzero(begins)[begins.cumsum() - 1]
        begins |= (np.arange(len(names)) - entered) % stretch[names] == 0
        starts = np.flatnonzero(begins).tolist()
        kept = {0}
        for start, end in itertools.pairwise([*starts, len(totals)]):
            kept |= {start + int(totals[start:end].argmax()), end - 1}
        return tuple(Sample(at, phases[at], tuple(live[at].tolist())) for at in sorted(kept))

    def _course(self) -> tuple[np.ndarray, list[str]]:
        """After each event of the last step, its start first: bytes (S, categories), the phase."""
        events = np.array(self.events, dtype=np.int64)
        births = np.where(events < 0, ~events, events)
        nbytes = np.fromiter((birth.nbytes for birth in self.births), np.int64)[births]
        category = np.fromiter((birth.category for birth in self.births), np.int64)[births]
        changes = np.where(events < 0, -nbytes, nbytes)
        live = np.zeros((len(events) - self.step_start + 1, len(CATEGORIES)), dtype=np.int64)
        np.add.at(live[0], category[: self.step_start], changes[: self.step_start])
        live[np.arange(1, len(live)), category[self.step_start :]] = changes[self.step_start :]
        live.cumsum(0, out=live)
        begun, names = zip(*self.phases, strict=True)
        last = np.maximum(np.arange(len(live)) - 1, 0) + self.step_start  # the event, from 0
        entered = np.searchsorted(begun, last, side="right") - 1
        return live, [names[number] for number in entered.tolist()]

    def alive_at(self, event: int) -> dict[str, int]:
        """Bytes alive after `event` of the last step, by the operation that made them."""
        alive: set[int] = set()
        for k in self.events[: self.step_start + event]:
            if k >= 0:
                alive.add(k)
            else:
                alive.discard(~k)
        by_op: dict[str, int] = {}
        for k in alive:
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
        last = len(self.events) if to_event is None else to_event
        inside = (w for w in self.workspaces if from_event < w.before_event <= last)
        upcoming = next(inside, None)
        for at in range(from_event, last):
            event = self.events[at]
            birth = self.births[max(event, ~event)]
            yield (event, birth.nbytes) if event >= 0 else (~event, -birth.nbytes)
            while upcoming and upcoming.before_event <= at + 1:
                yield from upcoming.allocations()
                upcoming = next(inside, None)
