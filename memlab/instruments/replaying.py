"""A long run replayed in the allocator's model, its repetitions in the small pool only once.

A sampled token is thousands of allocations, nearly all of them small, and the same ones in each
layer. Where the small pool's blocks go depends on three things: its free blocks, the blocks that
are yet to be freed, and what is asked for. So when the small pool is found as it was some layers
before, and the same is asked for again, it will be found so again after as many layers, without
another segment. Those layers are left out then, but for what they take from the large pool, which
is replayed in its place. The allocator is left as by replaying everything: figures, peaks, blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from memlab.instruments.allocator import ROUNDING, SMALL_LIMIT, CachingAllocator

LONGEST, LOOKED_AT = 2048, 8192  # small events: of a repetition; to find its length
ALIKE = 0.75  # the share of events that are as those a repetition before
ELSEWHERE = -(1 << 40)  # the number of a block from before the run


def replay(allocator: CachingAllocator, keys: np.ndarray, nbytes: np.ndarray) -> None:
    """`allocator.replay(zip(keys, nbytes))`, sooner. Both are (E,) int64.

    A key is allocated once at most, and freed with the bytes that it was allocated with, below 0.
    """
    run = _Run.of(allocator, keys, nbytes)
    length = _repetition(run.code)
    if length and allocator.capacity_bytes is None:  # over a capacity, the pools share a fate
        for start, end in _stretches(run.code, length):
            run.repeat(start, end, length)
    run.go_on(len(keys))


@dataclass
class _Run:
    """Events and, of the S small ones among them, what a repetition has in common."""

    allocator: CachingAllocator
    keys: np.ndarray  # (E,)
    nbytes: np.ndarray  # (E,)
    live: np.ndarray  # (E + 1,) bytes of the small pool before each event
    at: np.ndarray  # (S + 1,) which events are small, then E
    code: np.ndarray  # (S,) bytes of a birth; of a death, how many births ago, below 0
    births: np.ndarray  # (S + 1,) small births before each small event
    born: np.ndarray  # the key of each small birth
    done: int = 0  # events replayed

    @classmethod
    def of(cls, allocator: CachingAllocator, keys: np.ndarray, nbytes: np.ndarray) -> _Run:
        size = -(-np.abs(nbytes) // ROUNDING) * ROUNDING
        small = (size > 0) & (size <= SMALL_LIMIT)
        at = np.flatnonzero(small)
        birth = nbytes[at] > 0
        births = np.concatenate([[0], birth.cumsum()])
        born = keys[at[birth]]
        lowest = int(keys.min(initial=0))
        number = np.full(int(keys.max(initial=0)) - lowest + 1, ELSEWHERE)
        number[born - lowest] = np.arange(len(born))
        changes = np.where(small, np.where(nbytes > 0, size, -size), 0)
        return cls(
            allocator,
            keys,
            nbytes,
            live=np.concatenate([[0], changes.cumsum()]),
            at=np.append(at, len(keys)),
            code=np.where(birth, size[at], number[keys[at] - lowest] - births[:-1]),
            births=births,
            born=born,
        )

    def go_on(self, end: int) -> None:
        """Replay all events up to `end`."""
        todo = slice(self.done, end)
        self.allocator.replay(
            zip(self.keys[todo].tolist(), self.nbytes[todo].tolist(), strict=True)
        )
        self.done = end

    def repeat(self, start: int, end: int, length: int) -> None:
        """Replay small events from `start` to `end`, each as the one `length` before.

        Once the small pool is as it was, whole rounds are left out, as many as there are.
        """
        before = start - length
        each = int(self.births[start] - self.births[before])
        first = int(self.births[before]) - each  # nothing older may die in a repetition
        deaths = before + np.flatnonzero(self.code[before:start] < 0)
        if first < 0 or (self.births[deaths] + self.code[deaths] < first).any():
            return
        seen: dict[Hashable, int] = {}
        for now in range(start, end - length + 1, length):
            self.go_on(int(self.at[now]))
            state = self._state(now, each)
            if state in seen:
                around = now - seen[state]
                return self._leave_out(now, now + (end - now) // around * around, each)
            seen[state] = now

    def _state(self, now: int, each: int) -> Hashable:
        """All that decides where small blocks go: what is free, and what the last round left."""
        blocks = (self.allocator.where(key) for key in self._latest(now, each))
        return (self.allocator.small_pool(), *blocks)

    def _latest(self, now: int, each: int) -> list[int]:
        births = int(self.births[now])
        return self.born[births - each : births].tolist()

    def _leave_out(self, now: int, end: int, each: int) -> None:
        """Replay what is not small from small event `now` to `end`, and name the blocks anew."""
        if end == now:
            return
        allocator, live, begin = self.allocator, self.live, self.done
        stop = int(self.at[end - 1]) + 1
        large_too = np.ones(stop - begin, dtype=bool)
        large_too[self.at[now:end] - begin] = False
        parts = begin + np.concatenate([[0], np.flatnonzero(large_too)])
        highest = np.maximum.reduceat(live[begin + 1 : stop + 1], parts - begin).tolist()
        large = allocator.allocated_bytes - int(live[begin])
        for part, most in zip(parts.tolist(), highest, strict=True):
            if part > begin:
                allocator.allocated_bytes = large + int(live[part])
                allocator.replay([(int(self.keys[part]), int(self.nbytes[part]))])
                large = allocator.allocated_bytes - int(live[part])
            allocator.peak_allocated_bytes = max(allocator.peak_allocated_bytes, large + most)
        allocator.allocated_bytes = large + int(live[stop])
        allocator.rename(self._latest(now, each), self._latest(end, each))
        self.done = stop


def _repetition(code: np.ndarray) -> int | None:
    """After how many events the middle of a run is as it was; None where it is not."""
    middle = len(code) // 2
    now = code[middle : middle + LOOKED_AT]
    for length in range(2, min(middle, LONGEST) + 1):
        if (now == code[middle - length :][: len(now)]).mean() >= ALIKE:
            return length
    return None


def _stretches(code: np.ndarray, length: int) -> list[tuple[int, int]]:
    """From where to where all events are as those `length` before, for two lengths at least."""
    alike = np.concatenate([[False], code[length:] == code[:-length], [False]])
    starts, ends = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).T + length
    long = ends - starts >= 2 * length
    return [*zip(starts[long].tolist(), ends[long].tolist(), strict=True)]
