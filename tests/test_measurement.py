"""Measurements survive JSON, and a ledger's samples survive thinning."""

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.instruments.allocator import CachingAllocator
from memlab.instruments.ledger import Ledger
from memlab.instruments.measurement import CATEGORIES, Measurement, Sample

sizes = st.lists(st.integers(0, 2**50), min_size=len(CATEGORIES), max_size=len(CATEGORIES))
samples = st.builds(
    Sample, st.integers(0, 10**6), st.sampled_from(["forward", "backward"]), sizes.map(tuple)
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    at_peak = draw(sizes)
    return Measurement(
        metered_peak_bytes=sum(at_peak),
        peak_allocated_bytes=draw(st.integers(0, 2**50)),
        peak_reserved_bytes=draw(st.none() | st.integers(0, 2**50)),
        by_category=dict(zip(CATEGORIES, at_peak, strict=True)),
        by_op=draw(st.dictionaries(st.text(max_size=9), st.integers(0, 2**50), max_size=3)),
        timeline=tuple(draw(st.lists(samples, max_size=4))),
        host_peak_bytes=draw(st.integers(0, 2**50)),
        step_ms=draw(st.none() | st.floats(0, 1e6)),
        device=draw(st.text(max_size=9)),
        simulated=draw(st.booleans()),
        versions=draw(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3)),
    )


@given(measurements())
def test_json_round_trip(measurement: Measurement) -> None:
    line = measurement.to_json()
    assert "\n" not in line
    assert Measurement.from_json(line) == measurement


@given(measurements(), st.data())
def test_a_corrupt_recording_is_a_one_line_error(
    measurement: Measurement, data: st.DataObject
) -> None:
    line = measurement.to_json()
    cut = line[: data.draw(st.integers(0, len(line) - 1))]
    with pytest.raises(MemlabError, match="corrupt recording") as error:
        Measurement.from_json(cut)
    assert "\n" not in str(error.value)
    wrong = json.loads(line) | {"metered_peak_bytes": measurement.metered_peak_bytes + 1}
    with pytest.raises(MemlabError, match="do not add up"):
        Measurement.from_json(json.dumps(wrong))


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample(0, "forward", (0,) * 7).event = 1  # type: ignore[misc]


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Random allocations and frees under random phases; the step starts somewhere among them."""
    ledger = Ledger()
    alive: list[int] = []
    start = draw(st.integers(0, 30))
    for number in range(draw(st.integers(1, 120))):
        if number == start:
            ledger.begin_step()
        if draw(st.integers(0, 9)) == 0:
            ledger.enter(draw(st.sampled_from(["forward", "backward", "optimizer"])))
        if alive and draw(st.booleans()):
            ledger.died(alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            category = draw(st.integers(0, len(CATEGORIES) - 1))
            alive.append(ledger.born(512 * draw(st.integers(1, 99)), category, "op"))
    return ledger


@given(ledgers(), st.integers(1, 20))
def test_thinning_keeps_the_peak_of_every_phase(ledger: Ledger, points: int) -> None:
    whole = list(ledger.samples())
    few = ledger.thinned(points=points)
    assert set(few) <= set(whole)
    assert [s.event for s in few] == sorted({s.event for s in few})
    for phase in {s.phase for s in whole}:
        highest = max(s.total for s in whole if s.phase == phase)
        assert max(s.total for s in few if s.phase == phase) == highest


def test_a_long_phase_leaves_points_for_the_others() -> None:
    ledger = Ledger()
    ledger.begin_step()
    for phase, births in (("rollout", 5000), ("forward", 200), ("backward", 300)):
        ledger.enter(phase)
        for _ in range(births):
            ledger.born(512, 0, "op")
    few = ledger.thinned(points=300)
    kept = Counter(sample.phase for sample in few)
    assert min(kept.values()) >= 100, "each has its third"
    assert max(kept.values()) <= 102, "and no more"
    assert few[-1] == list(ledger.samples())[-1]


@given(ledgers())
def test_samples_follow_the_events(ledger: Ledger) -> None:
    whole = list(ledger.samples())
    assert len(whole) == len(ledger.events) - ledger.step_start + 1
    live = [0] * len(CATEGORIES)
    expected = []
    for at, event in enumerate(ledger.events):
        birth = ledger.births[max(event, ~event)]
        live[birth.category] += birth.nbytes if event >= 0 else -birth.nbytes
        phase = [name for start, name in ledger.phases if start <= at][-1]
        expected.append((phase, tuple(live)))
    assert [(s.phase, s.bytes) for s in whole[1:]] == expected[ledger.step_start :]
    if ledger.step_start:
        assert whole[0].bytes == expected[ledger.step_start - 1][1]
    last = whole[-1]
    assert sum(ledger.alive_at(last.event).values()) == last.total
    flow = sum(nbytes for _, nbytes in ledger.allocations())
    assert flow == last.total


def test_workspaces_come_and_go_right_after_their_operation() -> None:
    ledger = Ledger()
    first = ledger.born(512, 6, "a")
    ledger.worked((1024, 2048))
    ledger.worked((4096,), keeps=True)
    ledger.died(first)
    inside = [1024, 2048, -1024, -2048, 4096]
    assert [nbytes for _, nbytes in ledger.allocations()] == [512, *inside, -512]
    assert [nbytes for _, nbytes in ledger.allocations(from_event=1)] == [-512]
    assert [nbytes for _, nbytes in ledger.allocations(to_event=1)] == [512, *inside]
    CachingAllocator().replay(ledger.allocations())  # every key is allocated before it is freed
