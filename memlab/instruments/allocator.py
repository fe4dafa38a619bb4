"""A model of PyTorch's CUDA caching allocator: the bytes a card reserves for a run of allocations.

Pure Python, no torch. The rules are those of torch 2.11 to 2.13 with default settings, one stream
(c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h):

* a request is rounded up to 512 B; up to 1 MiB it belongs to the small pool, above to the large;
* the smallest free block that fits is taken, the lowest address among equals (see `addresses`); its
  low end is used;
* the rest of the block stays free if it has at least 512 B (small pool, or expandable segments) or
  more than 1 MiB (large pool); else it goes with the request, and counts as allocated;
* a freed block merges with the free neighbours in its segment, which stays reserved;
* when no block fits, a segment is reserved: 2 MiB for the small pool; 20 MiB for requests below
  10 MiB; else the request rounded up to 2 MiB;
* with expandable segments each pool has one range of addresses, backed by pages of 2 MiB (small) or
  20 MiB (large) from the lowest address where the request fits, a free block before it included;
  a free block that can still grow counts, in the search for a fit, as what it can grow to;
* over capacity, wholly free segments (expandable: pages) are released and the request is retried.

Not modelled: side streams, `record_stream`, pools of CUDA graphs, garbage-collection thresholds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from memlab.errors import MemlabError
from memlab.instruments.addresses import Addresses

KIB, MIB = 1 << 10, 1 << 20
ROUNDING = 512  # every request is a multiple of this many bytes
SMALL_LIMIT = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB  # requests from here on get a segment of their own
OWN_SEGMENT_ROUNDING = 2 * MIB


class OutOfMemory(MemlabError):
    """A request that fits neither the cache nor the capacity; its figures are in bytes."""

    def __init__(self, requested: int, allocated: int, reserved: int, capacity: int) -> None:
        self.requested, self.allocated = requested, allocated
        self.reserved, self.capacity = reserved, capacity
        super().__init__(
            f"out of memory: tried to allocate {_human(requested)}; of a capacity of "
            f"{_human(capacity)}, {_human(allocated)} are allocated and "
            f"{_human(reserved - allocated)} reserved but unallocated; "
            "a smaller step, or expandable segments against fragmentation, would help"
        )


@dataclass(frozen=True)
class Block:
    """A piece of a segment, `offset` bytes into it; `key` names the allocation that it holds."""

    offset: int
    bytes: int
    allocated: bool
    key: Hashable = None


@dataclass(frozen=True)
class Segment:
    """A contiguous range of reserved memory, filled by its blocks in order of address."""

    address: int
    bytes: int
    small: bool
    blocks: tuple[Block, ...]


class _Block:
    __slots__ = ("address", "allocated", "key", "mapped", "next", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: _Pool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.allocated = False
        self.key: Hashable = None
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Keep the low `size` bytes; return the rest, a new neighbour that is in no list yet."""
        rest = _Block(self.address + size, self.size - size, self.pool, mapped=self.mapped)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if self.next is not None:
            self.next.prev = self

    def joins(self, other: _Block | None) -> bool:
        return other is not None and not other.allocated and other.mapped == self.mapped

    def reach(self) -> int:
        """Bytes that this free block can grow to without moving."""
        after = self.next
        return self.size if after is None or after.mapped else self.size + after.size


class _Pool:
    """The free blocks of a pool, by (size, address), and its unmapped ranges, by address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def put(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: _Block) -> None:
        if block.mapped:
            *_, found = self.free.pop(bisect_left(self.free, (block.size, block.address)))
        else:
            *_, found = self.unmapped.pop(bisect_left(self.unmapped, (block.address,)))
        assert found is block

    def put_joined(self, block: _Block) -> _Block:
        """Merge a block that is in no list with its free neighbours, and list the result."""
        if block.joins(block.next):
            assert block.next is not None
            self.take(block.next)
            block.absorb_next()
        if block.joins(block.prev):
            assert block.prev is not None
            block = block.prev
            self.take(block)
            block.absorb_next()
        self.put(block)
        return block


class CachingAllocator:
    """Replays allocations by key, and counts what a card would report. All figures in bytes.

    `allocated_bytes` and `reserved_bytes` are what `torch.cuda.memory_allocated` and
    `memory_reserved` show; the peaks are since the start or the last `reset_peaks`; `retries`
    counts releases under memory pressure. `capacity_bytes` bounds the reserved (None: no bound).
    An allocation of 0 bytes holds nothing, as in torch. Raises ValueError for a capacity below 1.
    """

    def __init__(
        self, *, expandable_segments: bool = False, capacity_bytes: int | None = None
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ValueError(
                f"capacity_bytes={capacity_bytes}: give at least 1, or None for no limit"
            )
        self.expandable_segments, self.capacity_bytes = expandable_segments, capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._live: dict[Hashable, _Block | None] = {}  # None: an empty tensor, which holds nothing
        self._heads: dict[int, _Block] = {}  # the first block of each segment, by address
        self._addresses = Addresses()
        self._next_range = 0  # expandable segments: their ranges go upwards

    def malloc(self, key: Hashable, nbytes: int) -> None:
        """Allocate `nbytes` under `key`.

        Raises ValueError for a live key or nbytes below 0, OutOfMemory over the capacity.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes} for key {key!r}: must be at least 0")
        if key in self._live:
            raise ValueError(f"key {key!r} is live: free it before it is allocated again")
        if nbytes == 0:
            self._live[key] = None
            return
        size = _round_up(nbytes, ROUNDING)
        pool = self._small if size <= SMALL_LIMIT else self._large
        block = self._best_fit(pool, size) or self._reserve(pool, size)
        rest = block.size - size
        if rest >= ROUNDING if pool.small or self.expandable_segments else rest > SMALL_LIMIT:
            pool.put(block.split(size))
        block.allocated, block.key = True, key
        self._live[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Free what `key` holds; its bytes stay reserved. KeyError: the key is not live."""
        block = self._live.pop(key)
        if block is None:
            return
        block.allocated, block.key = False, None
        self.allocated_bytes -= block.size
        block.pool.put_joined(block)

    def replay(self, events: Iterable[tuple[Hashable, int]]) -> None:
        """Run (key, nbytes) events in order: nbytes >= 0 allocates, below 0 frees the key.

        Raises ValueError and KeyError as `malloc` and `free`.
        """
        for key, nbytes in events:
            if nbytes < 0:
                self.free(key)
            else:
                self.malloc(key, nbytes)

    def where(self, key: Hashable) -> tuple[int, int] | None:
        """Address and bytes of the block that `key` holds; None where it holds none."""
        block = self._live.get(key)
        return None if block is None else (block.address, block.size)

    def small_pool(self) -> tuple[tuple[int, int], ...]:
        """The small pool's free blocks, then its unmapped ranges: address and bytes."""
        free, unmapped = self._small.free, self._small.unmapped
        blocks = [*(block for *_, block in free), *(block for _, block in unmapped)]
        return tuple((block.address, block.size) for block in blocks)

    def rename(self, keys: Iterable[Hashable], new: Iterable[Hashable]) -> None:
        """What each of `keys` holds is held by its new key; a key that is not live stays so."""
        pairs = [*zip(keys, new, strict=True)]
        held = [(now, self._live.pop(key)) for key, now in pairs if key in self._live]
        for key, block in held:
            self._live[key] = block
            if block is not None:
                block.key = key

    def empty_cache(self) -> None:
        """Release every wholly free segment; with expandable segments, every such page."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.take(block)
                    del self._heads[block.address]
                    self.reserved_bytes -= block.size

    def reset_peaks(self) -> None:
        """Start both peaks anew from the present figures."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def snapshot(self) -> tuple[Segment, ...]:
        """Reserved memory in order of address; unmapped gaps part an expandable segment."""
        segments = []
        for _, head in sorted(self._heads.items()):
            run: list[_Block] = []
            block: _Block | None = head
            while block is not None:
                if block.mapped:
                    run.append(block)
                if run and (block.next is None or not block.next.mapped):
                    segments.append(_frozen(run))
                    run = []
                block = block.next
        return tuple(segments)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        free = pool.free
        i = bisect_left(free, (size,))
        if i == len(free):
            return None
        if self.expandable_segments:
            while i + 1 < len(free) and free[i + 1][2].reach() < free[i][2].reach():
                i += 1
        return free.pop(i)[2]

    def _reserve(self, pool: _Pool, size: int) -> _Block:
        """Get at least `size` bytes from the card, if need be by giving the cache back first."""
        grow = self._extend if self.expandable_segments else self._segment
        block = grow(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = grow(pool, size)
        if block is None:
            assert self.capacity_bytes is not None
            raise OutOfMemory(size, self.allocated_bytes, self.reserved_bytes, self.capacity_bytes)
        return block

    def _segment(self, pool: _Pool, size: int) -> _Block | None:
        if size < OWN_SEGMENT_FROM:
            nbytes = pool.page
        else:
            nbytes = _round_up(size, OWN_SEGMENT_ROUNDING)
        return self._new_head(pool, nbytes, mapped=True) if self._count_reserved(nbytes) else None

    def _extend(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages until a free block of the expandable range has `size` bytes."""
        block = self._growable(pool, size)
        while not block.mapped or block.size < size:
            unmapped, missing = (block.next, size - block.size) if block.mapped else (block, size)
            assert unmapped is not None
            mapped = self._map(unmapped, min(missing, unmapped.size))
            if mapped is None:
                return None
            block = mapped
        pool.take(block)
        return block

    def _growable(self, pool: _Pool, size: int) -> _Block:
        """The first block of the lowest run of free and unmapped blocks with room for `size`."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            start = before if before is not None and not before.allocated else unmapped
            room, block = 0, start
            while room < size and block is not None and not block.allocated:
                room += block.size
                block = block.next
            if room >= size:
                return start
        # As many addresses as 1 1/8 of the card's memory.
        addresses = (self.capacity_bytes or 1 << 50) * 9 // 8
        head = self._new_head(pool, _round_up(max(addresses, size), pool.page), mapped=False)
        pool.put(head)
        return head

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Back the first `size` bytes of an unmapped block; returns the free block they join."""
        pool = block.pool
        nbytes = _round_up(size, pool.page)
        if not self._count_reserved(nbytes):
            return None
        pool.take(block)
        if nbytes < block.size:
            pool.put(block.split(nbytes))
        block.mapped = True
        return pool.put_joined(block)

    def _unmap(self, block: _Block) -> None:
        """Give the whole pages of a free block back to the card."""
        pool = block.pool
        offset = block.address - self._origin(block)
        start = _round_up(offset, pool.page)
        end = (offset + block.size) // pool.page * pool.page
        if start >= end:
            return
        pool.take(block)
        middle = block.split(start - offset) if start > offset else block
        if middle is not block:
            pool.put(block)
        if middle.size > end - start:
            pool.put(middle.split(end - start))
        middle.mapped = False
        self.reserved_bytes -= end - start
        middle = pool.put_joined(middle)
        if middle.prev is None and middle.next is None:
            pool.take(middle)
            del self._heads[middle.address]

    @staticmethod
    def _origin(block: _Block) -> int:
        while block.prev is not None:
            block = block.prev
        return block.address

    def _new_head(self, pool: _Pool, nbytes: int, *, mapped: bool) -> _Block:
        if self.expandable_segments:
            address, self._next_range = self._next_range, self._next_range + nbytes
        else:
            address = self._addresses.place(nbytes)
        head = _Block(address, nbytes, pool, mapped=mapped)
        self._heads[head.address] = head
        return head

    def _count_reserved(self, nbytes: int) -> bool:
        """Count `nbytes` more as reserved; False, and nothing counted, if that is too much."""
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True


def _frozen(run: list[_Block]) -> Segment:
    start = run[0].address
    blocks = tuple(Block(b.address - start, b.size, b.allocated, b.key) for b in run)
    return Segment(start, sum(b.bytes for b in blocks), run[0].pool.small, blocks)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _human(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"
