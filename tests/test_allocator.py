"""The caching-allocator model: PyTorch's rules by worked examples, and what must always hold."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.errors import MemlabError
from memlab.instruments.addresses import Addresses
from memlab.instruments.allocator import CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


def filled(events, **options):
    allocator = CachingAllocator(**options)
    allocator.replay(events)
    return allocator


def layout(allocator):
    """Per segment: its bytes and its blocks as (key, bytes), "-" for a free one."""
    return [
        (s.bytes, [(b.key if b.allocated else "-", b.bytes) for b in s.blocks])
        for s in allocator.snapshot()
    ]


# ------------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded up before it is compared with 10 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # a rest above 1 MiB is split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of exactly 1 MiB is not split off
    ],
)
def test_first_allocation(nbytes, allocated, reserved):
    allocator = filled([("a", nbytes)])
    assert allocator.allocated_bytes == allocated
    assert allocator.reserved_bytes == reserved


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (19 * MIB, 19 * MIB, 20 * MIB),  # the rest is split off from 512 B on
        (20 * MIB, 20 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_first_allocation_with_expandable_segments(nbytes, allocated, reserved):
    allocator = filled([("a", nbytes)], expandable_segments=True)
    assert allocator.allocated_bytes == allocated
    assert allocator.reserved_bytes == reserved


@pytest.mark.parametrize("expandable", [False, True])
def test_an_empty_tensor_holds_nothing(expandable):
    allocator = filled([("a", 0)], expandable_segments=expandable)
    assert allocator.reserved_bytes == 0
    allocator.free("a")
    with pytest.raises(KeyError):
        allocator.free("a")


def test_the_smallest_fitting_block_is_taken_and_its_low_end_used():
    allocator = filled(
        [("a", 4 * MIB), ("x", 3 * MIB), ("b", 2 * MIB), ("y", 11 * MIB), ("a", -1), ("b", -1)]
    )
    free = [("-", 4 * MIB), ("x", 3 * MIB), ("-", 2 * MIB), ("y", 11 * MIB)]
    assert layout(allocator) == [(20 * MIB, free)]
    allocator.malloc("c", 2 * MIB - 512)  # the rest of 512 B is not split off in the large pool
    allocator.malloc("d", 2 * MIB + 512)
    assert [k for k, _ in layout(allocator)[0][1]] == ["d", "-", "x", "c", "y"]
    assert allocator.allocated_bytes == 18 * MIB + 512


def test_the_lowest_address_among_equals():
    keys = "abcdefgh"
    allocator = filled([*((k, 256 * KIB) for k in keys), ("f", -1), ("b", -1), ("z", 256 * KIB)])
    assert [k for k, _ in layout(allocator)[0][1]] == [*"azcde", "-", *"gh"]


def test_pools_do_not_mix():
    allocator = filled([("a", 2 * MIB), ("a", -1), ("b", 512)])
    assert allocator.reserved_bytes == 22 * MIB
    assert {(s.small, s.bytes) for s in allocator.snapshot()} == {
        (False, 20 * MIB),
        (True, 2 * MIB),
    }


def test_neighbours_merge_on_both_sides():
    events = [("a", 2 * MIB), ("b", 2 * MIB), ("c", 2 * MIB), ("a", -1), ("c", -1), ("b", -1)]
    assert layout(filled(events)) == [(20 * MIB, [("-", 20 * MIB)])]


def test_segments_do_not_merge():
    events = [("a", 20 * MIB), ("b", 20 * MIB), ("a", -1), ("b", -1), ("c", 40 * MIB)]
    assert filled(events).reserved_bytes == 80 * MIB
    assert filled(events, expandable_segments=True).reserved_bytes == 40 * MIB


def test_an_expandable_range_grows_from_its_free_end():
    allocator = filled([("a", 15 * MIB), ("b", 30 * MIB)], expandable_segments=True)
    assert layout(allocator) == [(60 * MIB, [("a", 15 * MIB), ("b", 30 * MIB), ("-", 15 * MIB)])]


def test_a_block_that_can_still_grow_counts_as_what_it_can_grow_to():
    # Free: 6 MiB between a and c, and 5 MiB at the end, which could still grow. Both fit 4 MiB.
    events = [("a", 4 * MIB), ("b", 6 * MIB), ("c", 5 * MIB), ("b", -1), ("d", 4 * MIB)]
    (segment,) = layout(filled(events, expandable_segments=True))
    assert [k for k, _ in segment[1]] == ["a", "d", "-", "c", "-"]


def test_among_blocks_that_can_grow_the_one_that_can_grow_least():
    allocator = filled(
        [("a", 15 * MIB), ("b", 25 * MIB), ("c", 14 * MIB), ("b", -1)], expandable_segments=True
    )
    allocator.empty_cache()  # 5 MiB free before a gap of 20; 6 MiB free at the end
    allocator.malloc("d", 4 * MIB)
    assert layout(allocator)[0] == (20 * MIB, [("a", 15 * MIB), ("d", 4 * MIB), ("-", MIB)])


def test_expandable_segments_can_reserve_more():
    """A page has 20 MiB, and a segment of one request only rounds it up to 2 MiB."""
    events = [("a", 11 * MIB)]
    assert filled(events).reserved_bytes == 12 * MIB
    assert filled(events, expandable_segments=True).reserved_bytes == 20 * MIB


def test_empty_cache_keeps_segments_in_use():
    allocator = filled([("a", 2 * MIB), ("b", 40 * MIB), ("b", -1), ("c", 100), ("c", -1)])
    allocator.empty_cache()
    assert layout(allocator) == [(20 * MIB, [("a", 2 * MIB), ("-", 18 * MIB)])]


def test_empty_cache_unmaps_the_free_pages_of_an_expandable_range():
    allocator = filled(
        [("a", 10 * MIB), ("b", 60 * MIB), ("c", 10 * MIB), ("b", -1)], expandable_segments=True
    )
    allocator.empty_cache()  # b lies from 10 to 70 MiB: the pages from 20 to 60 are free
    assert layout(allocator) == [
        (20 * MIB, [("a", 10 * MIB), ("-", 10 * MIB)]),
        (20 * MIB, [("-", 10 * MIB), ("c", 10 * MIB)]),
    ]
    allocator.malloc("d", 25 * MIB)  # the gap is mapped again, from the free block before it
    assert layout(allocator) == [
        (40 * MIB, [("a", 10 * MIB), ("d", 25 * MIB), ("-", 5 * MIB)]),
        (20 * MIB, [("-", 10 * MIB), ("c", 10 * MIB)]),
    ]
    allocator.malloc("e", 10 * MIB)  # and what was left of the last page is free for use
    assert layout(allocator)[1] == (20 * MIB, [("e", 10 * MIB), ("c", 10 * MIB)])


# ---------------------------------------------------------------------------- capacity and errors


def test_capacity_releases_the_cache_and_retries():
    events = [("a", 30 * MIB), ("a", -1), ("b", 40 * MIB)]
    assert filled(events).reserved_bytes == 70 * MIB
    tight = filled(events, capacity_bytes=64 * MIB)
    assert (tight.reserved_bytes, tight.retries) == (40 * MIB, 1)
    assert tight.peak_reserved_bytes == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_out_of_memory(expandable):
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=64 * MIB)
    allocator.replay([("a", 20 * MIB), ("b", 20 * MIB), ("a", -1)])
    with pytest.raises(OutOfMemory, match=r"tried to allocate 60\.00 MiB") as caught:
        allocator.malloc("c", 60 * MIB)
    error = caught.value
    assert isinstance(error, MemlabError)
    assert "\n" not in str(error)
    assert (error.requested, error.allocated, error.capacity) == (60 * MIB, 20 * MIB, 64 * MIB)
    assert error.reserved == allocator.reserved_bytes
    check(allocator, {"b": 20 * MIB})  # still sound, and usable:
    allocator.malloc("c", 20 * MIB)
    check(allocator, {"b": 20 * MIB, "c": 20 * MIB})


@pytest.mark.parametrize("expandable", [False, True])
def test_wrong_use(expandable):
    allocator = filled([("a", 100)], expandable_segments=expandable)
    with pytest.raises(ValueError, match="'a' is live"):
        allocator.malloc("a", 1)
    with pytest.raises(ValueError, match="nbytes=-3"):
        allocator.malloc("b", -3)
    with pytest.raises(KeyError):
        allocator.free("unknown")
    allocator.free("a")
    with pytest.raises(KeyError):
        allocator.free("a")
    with pytest.raises(ValueError, match="capacity_bytes=0"):
        CachingAllocator(capacity_bytes=0)


# ------------------------------------------------------------------------- addresses of segments


def test_segments_go_downwards_and_share_slots():
    addresses = Addresses()
    first = addresses.place(20 * MIB)
    assert addresses.place(2 * MIB) == first + 20 * MIB
    second = addresses.place(48 * MIB)
    assert second == first - 64 * MIB
    assert addresses.place(10 * MIB) == second + 48 * MIB  # the lowest slot with room
    assert addresses.place(10 * MIB) == first + 22 * MIB
    assert addresses.place(32 * MIB) == second - 32 * MIB
    assert addresses.place(1 << 30) > first  # a choice: gaps above can't be known


@given(st.lists(st.integers(1, 900).map(lambda n: 2 * MIB * n), max_size=60))
def test_addresses_never_overlap(sizes):
    addresses = Addresses()
    taken = sorted((addresses.place(nbytes), nbytes) for nbytes in sizes)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(taken))


# ------------------------------------------------------------------------------- always, any trace


def check(allocator, live):
    """What holds at any moment; `live`: the requested bytes by key."""
    segments = allocator.snapshot()
    found, end = {}, 0
    for segment in segments:
        assert segment.address >= end  # segments do not overlap, and come in order
        end = segment.address + segment.bytes
        offset, after_free = 0, False
        for block in segment.blocks:
            assert block.offset == offset  # neither gaps nor overlaps
            offset += block.bytes
            assert block.bytes > 0
            assert block.bytes % 512 == 0
            assert not (after_free and not block.allocated)  # free neighbours are merged
            after_free = not block.allocated
            if block.allocated:
                found[block.key] = block.bytes
        assert offset == segment.bytes
    assert found.keys() == {key for key, nbytes in live.items() if nbytes}
    assert all(found[key] >= nbytes for key, nbytes in live.items() if nbytes)
    assert allocator.allocated_bytes == sum(found.values())
    assert allocator.reserved_bytes == sum(s.bytes for s in segments)
    assert 0 <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    if allocator.capacity_bytes is not None:
        assert allocator.peak_reserved_bytes <= allocator.capacity_bytes


SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(0, 3 * MIB),
    st.integers(0, 60 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 11 * MIB, 20 * MIB]),
)
STEPS = st.lists(
    st.one_of(SIZES, st.tuples(st.just("free"), st.integers(0, 99)), st.just("empty_cache")),
    max_size=60,
)


@pytest.mark.parametrize("expandable", [False, True])
@given(steps=STEPS, capacity=st.one_of(st.none(), st.integers(20 * MIB, 200 * MIB)))
@settings(max_examples=150)
def test_invariants(expandable, steps, capacity):
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity)
    live, peaks = {}, (0, 0)
    for key, step in enumerate(steps):
        if step == "empty_cache":
            allocator.empty_cache()
        elif isinstance(step, int):
            try:
                allocator.malloc(key, step)
                live[key] = step
            except OutOfMemory:
                assert capacity is not None
        elif live:
            gone = sorted(live)[step[1] % len(live)]
            allocator.free(gone)
            del live[gone]
        check(allocator, live)
        now = (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        assert now[0] >= peaks[0]
        assert now[1] >= peaks[1]
        peaks = now
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.snapshot() == ()
    allocator.reset_peaks()
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 0)


def test_replay_is_the_same_as_the_calls():
    events = [(k, (k * 7919) % (3 * MIB)) for k in range(300)] + [(k, -1) for k in range(0, 300, 2)]
    by_calls = CachingAllocator()
    for key, nbytes in events:
        by_calls.malloc(key, nbytes) if nbytes >= 0 else by_calls.free(key)
    assert filled(events).snapshot() == by_calls.snapshot()
