"""Replaying with repetitions left out leaves the allocator as replaying everything does."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import Recipe
from memlab.experiments.simulation import simulated_run
from memlab.instruments import replaying
from memlab.instruments.allocator import CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
SIZES = (512, 700, 4 * KIB, 16 * KIB, 48 * KIB, 700 * KIB, 3 * MIB)


def facts(allocator):
    return (
        allocator.allocated_bytes,
        allocator.peak_allocated_bytes,
        allocator.reserved_bytes,
        allocator.peak_reserved_bytes,
        allocator.retries,
        allocator.snapshot(),
    )


def replayed(replay, parts, **options):
    """The facts after each part, with peaks of that part."""
    allocator, found = CachingAllocator(**options), []
    for keys, nbytes in parts:
        allocator.reset_peaks()
        try:
            replay(allocator, keys, nbytes)
        except OutOfMemory as error:
            return [*found, str(error)]
        found.append(facts(allocator))
    return found


def plainly(allocator, keys, nbytes):
    allocator.replay(zip(keys.tolist(), nbytes.tolist(), strict=True))


class Written:
    """Events; each birth dies so many births later (None: never)."""

    def __init__(self):
        self.keys, self.nbytes, self.due, self.numbers = [], [], {}, count()

    def born(self, nbytes, lifetime):
        key = next(self.numbers)
        self.keys.append(key)
        self.nbytes.append(nbytes)
        if lifetime is not None:
            self.due.setdefault(key + lifetime, []).append((key, nbytes))
        for dead, size in self.due.pop(key, []):
            self.keys.append(dead)
            self.nbytes.append(-size)

    def parts(self, *cuts):
        keys, nbytes = (np.array(c, dtype=np.int64) for c in (self.keys, self.nbytes))
        cuts = sorted(int(cut * len(keys)) for cut in cuts)
        return [*zip(np.split(keys, cuts), np.split(nbytes, cuts), strict=True)]


@st.composite
def runs(draw):
    """Fragments, then tokens of layers, a growing cache in each, and a small block that stays."""
    written = Written()
    size = st.sampled_from(SIZES)
    for nbytes, lifetime in draw(
        st.lists(st.tuples(size, st.none() | st.integers(0, 400)), max_size=40)
    ):
        written.born(nbytes, lifetime)
    layer = draw(st.lists(st.tuples(size, st.integers(0, 12)), min_size=2, max_size=10))
    layers, tokens = draw(st.integers(4, 12)), draw(st.integers(1, 6))
    cache, more = draw(st.sampled_from([(2 * MIB, 100 * KIB), (9 * MIB, MIB), (8 * KIB, 512)]))
    stays = draw(st.booleans())
    for token in range(tokens):
        for _ in range(layers):
            for nbytes, lifetime in layer:
                written.born(nbytes, lifetime)
            written.born(cache + token * more, layers * (len(layer) + 1))
        if stays:
            written.born(64, None)
    return written.parts(draw(st.floats(0, 1)))


@settings(max_examples=300, deadline=None)
@given(runs(), st.booleans(), st.none() | st.floats(0.5, 1))
def test_the_allocator_is_left_as_by_replaying_everything(parts, expandable, share):
    options = {"expandable_segments": expandable}
    if share is not None:  # over a capacity, free segments of the small pool are given back
        most = max(found[3] for found in replayed(plainly, parts, **options))
        options["capacity_bytes"] = max(1, int(share * most))
    assert replayed(replaying.replay, parts, **options) == replayed(plainly, parts, **options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 9)), max_size=200))
def test_runs_that_do_not_repeat_are_replayed_too(births):
    written = Written()
    for nbytes, lifetime in births:
        written.born(nbytes, lifetime)
    parts = written.parts(0.5)
    assert replayed(replaying.replay, parts) == replayed(plainly, parts)


def layers(*layer, number=500, grows=0):
    """So many times these (nbytes, lifetime), after a few blocks that stay; the last one grows."""
    written = Written()
    for _ in range(8):
        written.born(512, None)
    for step in range(number):
        *small, (nbytes, lifetime) = layer
        for block in small:
            written.born(*block)
        written.born(nbytes + step * grows, lifetime)
    return written.parts()


def counting(monkeypatch):
    """A list that fills with the events that allocators replay one by one."""
    seen, replay = [], CachingAllocator.replay

    def counted(allocator, events):
        events = [*events]
        seen.extend(events)
        replay(allocator, events)

    monkeypatch.setattr(CachingAllocator, "replay", counted)
    return seen


def test_what_repeats_is_left_out_of_the_small_pool_only(monkeypatch):
    (run,) = layers((4 * KIB, 2), (512, 3), (16 * KIB, 2), (2 * MIB, 1))
    seen = counting(monkeypatch)
    replayed(replaying.replay, [run])
    large = [nbytes for _, nbytes in seen if abs(nbytes) > MIB]
    assert large == [nbytes for nbytes in run[1].tolist() if abs(nbytes) > MIB]
    assert len(seen) - len(large) < 60  # of 3000


@pytest.fixture(scope="module")
def ledger():
    """Two GRPO steps of 28 layers, of so many sampled tokens that most are not run."""
    recipe = Recipe.defaults(trainer="grpo", max_length=512, max_completion_length=24)
    return simulated_run(recipe).ledger


@pytest.mark.parametrize("expandable", [False, True])
def test_a_step_of_grpo(ledger, expandable, monkeypatch):
    parts = [ledger.flow(to_event=ledger.step_start), ledger.flow(from_event=ledger.step_start)]
    options = {"expandable_segments": expandable}
    seen = counting(monkeypatch)
    quick = replayed(replaying.replay, parts, **options)
    assert len(seen) < 0.4 * sum(len(keys) for keys, _ in parts)
    assert quick == replayed(plainly, parts, **options)


def test_the_peak_may_lie_in_what_is_left_out():
    parts = layers((700, 2), (4 * KIB, 1), (2 * MIB, 0), grows=512, number=60)
    assert replayed(replaying.replay, parts) == replayed(plainly, parts)


def test_over_a_capacity_everything_is_replayed():
    """There the small pool gives segments back, in the middle of what repeats."""
    small = ((900 * KIB, 2), (900 * KIB, 2), (900 * KIB, 1), (512, 1))
    parts = layers(*small, (12 * MIB, 5), grows=2 * MIB, number=40)
    options = {"capacity_bytes": 200 * MIB}
    found = replayed(plainly, parts, **options)
    assert found[0][4] > 0  # retries
    assert replayed(replaying.replay, parts, **options) == found
