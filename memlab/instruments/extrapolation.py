"""What a meter would count over many generated tokens, from a few of them that are run.

From the second on, each token runs the same operations, and each storage that they make has as many
bytes as it had a token before, or a fixed number more, where it is of the cache. So on a simulated
GPU the first three tokens are run, and, set apart, the last two, on a cache that nobody computed.
When the third token and the last did the same in the same order, and the bytes of every storage lie
on one straight line (before they are rounded up), so do the tokens between them: their births and
deaths are written into the ledger without running them. The ledger is then the one of a whole run,
event for event. When they differ (a sliding window fills up on the way), all tokens are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memlab.instruments.ledger import Birth, Ledger, Workspaces
from memlab.instruments.meter import Meter

FIRST, LAST = 3, 2  # tokens that are run

Tokens = Callable[[int], Iterator[Tensor]]


class _Deeds(NamedTuple):
    """What the ledger holds of one token, with births counted from the token's first."""

    first: int  # birth
    asked: list[int]  # bytes of each birth
    made: list[tuple[int, str]]  # category and operation of each birth
    events: list[tuple[bool, int]]  # birth or death, and of what: below 0 is the token's before
    workspaces: list[tuple[int, tuple[int, ...]]]  # after which event, bytes
    host: int  # bytes on the host at most, above what was there before
    closed: bool  # no phase began, no workspace was kept, and the host holds what it held

    def like(self, other: _Deeds) -> bool:
        return self.closed and self[2:] == other[2:]


class Extrapolation:
    """A `take` of `trainers.generate` for the rollouts of one model under one meter.

    A rollout like one before, with as long prompts and completions, needs only its first tokens.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._known: list[tuple[object, list[int] | None]] = []  # what was run, how tokens grow

    def __call__(self, tokens: Tokens, limit: int) -> list[Tensor]:
        """The first `limit` of `tokens(0)`; the ledger is left as by running them all.

        `tokens(n)` are those after n others; on a simulated device, where no value matters, any
        cache will do for that. A token that is not run is an empty tensor like the others, with a
        storage of its own.

        Raises RuntimeError when the tokens that were set apart leave a storage behind.
        """
        running = tokens(0)
        taken, deeds = _run(self.meter, running, min(limit, FIRST))
        missing = limit - len(taken)
        if len(taken) == FIRST and missing > LAST:
            growth = self._growth(deeds[-1], tokens, missing)
            own = self.meter.birth_of(taken[-1])
            if growth is not None and own is not None and _else_dead(deeds[-1], own):
                return [*taken, *_skip(self.meter, taken[-1], own, deeds[-1], growth, missing)]
        return [*taken, *islice(running, missing)]

    def _growth(self, third: _Deeds, tokens: Tokens, missing: int) -> list[int] | None:
        ran = missing, third[1:]
        for before, growth in self._known:
            if before == ran:
                return growth
        last = _set_apart(self.meter, tokens, FIRST + missing - LAST)
        growth = _growth(third, last, missing)
        self._known.append((ran, growth))
        return growth


def _run(meter: Meter, running: Iterator[Tensor], count: int) -> tuple[list[Tensor], list[_Deeds]]:
    ledger, taken, deeds = meter.ledger, [], []
    for _ in range(count):
        start, host, peak = ledger.mark(), meter.host_bytes, meter.host_peak_bytes
        meter.host_peak_bytes = host
        taken += islice(running, 1)
        highest, meter.host_peak_bytes = meter.host_peak_bytes, max(peak, meter.host_peak_bytes)
        births, inside = ledger.births[start.births :], ledger.workspaces[start.workspaces :]
        still = meter.host_bytes == host and len(ledger.phases) == start.phases
        deeds.append(
            _Deeds(
                first=start.births,
                asked=[birth.asked for birth in births],
                made=[(birth.category, birth.op) for birth in births],
                events=[(k >= 0, max(k, ~k) - start.births) for k in ledger.events[start.events :]],
                workspaces=[(work.before_event - start.events, work.nbytes) for work in inside],
                host=highest - host,
                closed=still and not any(work.kept for work in inside),
            )
        )
    return taken, deeds


def _set_apart(meter: Meter, tokens: Tokens, after: int) -> list[_Deeds]:
    """The deeds of the last tokens, of which nothing stays in the ledger."""
    start, host = meter.ledger.mark(), meter.host_peak_bytes
    deeds = _run(meter, tokens(after), LAST)[1]
    meter.host_peak_bytes = host
    if left := meter.alive(start.births):
        ops = {meter.ledger.births[birth].op for birth in left}
        raise RuntimeError(f"tokens run apart left storages behind, made by {', '.join(ops)}")
    meter.ledger.back_to(start)
    return deeds


def _growth(third: _Deeds, last: list[_Deeds], distance: int) -> list[int] | None:
    """Bytes that each birth grows by, a token; None where the tokens do not repeat."""
    before, end = last
    if not third.like(end) or before.made != end.made:
        return None
    growth = [b - a for a, b in zip(before.asked, end.asked, strict=True)]
    line = [a + distance * more for a, more in zip(third.asked, growth, strict=True)]
    return growth if line == end.asked else None


def _else_dead(deeds: _Deeds, own: int) -> bool:
    """Does all that a token makes, but itself, die before the next token has ended?"""
    count = len(deeds.made)
    dead = {which for birth, which in deeds.events if not birth}
    known = all(-count <= which for which in dead)
    return known and {*range(count)} - {which % count for which in dead} == {own - deeds.first}


def _skip(
    meter: Meter, token: Tensor, own: int, deeds: _Deeds, growth: list[int], count: int
) -> list[Tensor]:
    """Write `count` more tokens like the one of `deeds` into the ledger, and return stand-ins."""
    ledger, size = meter.ledger, len(deeds.made)
    kept = {birth: birth + count * size for birth in meter.alive(deeds.first) if birth != own}
    start = ledger.mark()
    stand_ins = [torch.empty_like(token) for _ in range(count)]
    for number, stand_in in enumerate(stand_ins, 1):
        birth = meter.birth_of(stand_in)
        assert birth is not None
        kept[birth] = own + number * size
    ledger.back_to(start)
    _write(ledger, deeds, growth, count)
    meter.renumber(kept)
    return stand_ins


def _write(ledger: Ledger, deeds: _Deeds, growth: list[int], count: int) -> None:
    """Deeds repeated `count` times, each time with births so much larger."""
    size, model = len(deeds.made), ledger.births[deeds.first :]
    brief = {which for birth, which in deeds.events if not birth}  # of no category to come
    changing = [at for at in range(size) if growth[at] or at not in brief]
    born, which = (np.array(column) for column in zip(*deeds.events, strict=True))
    for number in range(1, count + 1):
        start, births = len(ledger.events), model.copy()
        for at in changing:
            asked = deeds.asked[at] + number * growth[at]
            births[at] = Birth.of(asked, *deeds.made[at])
        ledger.births += births
        these = which + deeds.first + number * size
        ledger.events += np.where(born, these, ~these).tolist()
        ledger.workspaces += [Workspaces(start + at, w, kept=False) for at, w in deeds.workspaces]
