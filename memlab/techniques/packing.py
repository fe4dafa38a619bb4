"""Packing: documents side by side in rows of at most L tokens, where padding would be.

Computes  a placement of n documents in as few rows as best-fit decreasing finds, over all the
          data at once: "bfd" cuts each document to L, "bfd_split" cuts it into pieces of at most
          L and keeps all; "wrapped" (the naive one) cuts the joined stream every L tokens
Instead   of B rows padded to the longest: every position of a row is a token that teaches
Memory    activations of a bytes a position: B*max(lengths)*a -> B*L*a a step, so a fixed number
          of rows costs more; a useful token costs a/share -> a/efficiency (share: useful part)
Use       packed = pack({"input_ids": ids, "labels": labels}, 1024)  # columns of equal rows
          packed["input_ids"], packed["seq_lengths"]  # lengths of the documents in each row
Price     milliseconds once; attention must keep documents apart: see padding-free ("wrapped" mixes)
Source    Ding et al. 2024, Fewer Truncations Improve Language Modeling (best-fit packing)
Unlike    TRL's pack_dataset, which packs each 1000 rows apart and takes a step a document: here a
          step is a distinct length. Same bins as its loop over all rows. Apache-2.0; NumPy 2
"""

import operator
import warnings
from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

STRATEGIES = ("bfd", "bfd_split", "wrapped")


class Ragged(NamedTuple):
    """Rows of unequal length without an object a row: row i is values[offsets[i]:offsets[i+1]]."""

    values: np.ndarray  # (N,)
    offsets: np.ndarray  # (rows + 1,) int64


class Placement(NamedTuple):
    """Pieces of documents, bin after bin: bin b has the pieces offsets[b] to offsets[b + 1]."""

    rows: np.ndarray  # (P,) the document of each piece, and the part of it that it is:
    starts: np.ndarray  # (P,) tokens, from the document's start
    stops: np.ndarray  # (P,) end excluded
    offsets: np.ndarray  # (bins + 1,)


def _moves(lengths: np.ndarray, counts: np.ndarray, L: int) -> np.ndarray:
    """Best fit of `counts` items of each length, longest first: rows of (room, left, bins, each).

    A row says that this many bins that had `room` tokens free took `each` items a bin, and have
    `left` free since. Rows are in time order; the work grows with the lengths, not the items.
    """
    alone = 2 * lengths > L  # these open a bin each
    lone = np.stack([np.full(len(lengths), L), L - lengths, counts, np.ones_like(counts)], 1)[alone]
    waiting = np.bincount(lone[:, 1], lone[:, 2], L + 1).astype(int).tolist()  # bins by room
    waiting[L] = int(counts.sum()) + 1  # new bins: enough
    rooms = [*lone[:, 1].tolist(), L]  # that some bin has, ascending
    moves: list[int] = []
    for length, count in zip(lengths[~alone].tolist(), counts[~alone].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            room = rooms[at]  # the tightest that suffices; a bin then stays so: it takes all it can
            each = room // length
            bins = min(count // each, waiting[room])
            if not bins:
                bins, each = 1, count
            left = room - each * length
            count -= bins * each
            moves += room, left, bins, each
            waiting[room] -= bins
            if not waiting[room]:
                del rooms[at]
            if not waiting[left]:
                insort(rooms, left)
            waiting[left] += bins
    rest = np.frombuffer(array("q", moves), np.int64)
    return np.concatenate((lone, rest.reshape(-1, 4)))


def _best_fit(lengths: np.ndarray, L: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of 1 to L tokens -> their order (n,), bin after bin, and the bins' offsets in it.

    Longest first, equal ones in input order, each into the bin with the least room that suffices:
    among equals the bin that has had this room longest (first in, first out), else a new one.
    """
    small = np.min_scalar_type(L)  # NumPy sorts 16 bits in linear time
    longest_first = np.argsort((L - lengths).astype(small), kind="stable")
    counts = np.bincount(lengths, minlength=L + 1)
    present = np.flatnonzero(counts)[::-1]
    moves = _moves(present, counts[present], L)
    room, left, each = np.repeat(moves[:, [0, 1, 3]], moves[:, 2], axis=0).T  # one a bin touched
    # A room's queue is first in, first out: the j-th touch that takes a bin from a room continues
    # the j-th touch that left that room. Following these links back leads to each bin's first.
    taken = np.argsort(room.astype(small), kind="stable")[: np.count_nonzero(room < L)]
    came = np.argsort(left.astype(small), kind="stable")
    before = [np.cumsum(np.bincount(r, minlength=L + 1)) for r in (left, room)]
    shift = np.concatenate(([0], before[0] - before[1]))
    first = np.arange(len(room))
    first[taken] = came[np.arange(len(taken)) + shift[room[taken]]]
    while not np.array_equal(first, further := first[first]):
        first = further
    bins = (np.cumsum(room == L) - 1)[first]
    of_item = np.repeat(bins, each)
    order = longest_first[np.argsort(of_item, kind="stable")]
    return order, np.concatenate(([0], np.cumsum(np.bincount(of_item))))


def place(lengths: Any, max_length: int | None, strategy: str = "bfd") -> Placement:
    """Where documents of these lengths (rows,) go; bins, and pieces in them, in order.

    Raises as `pack`; TypeError also for lengths that are not integers.
    """
    L, strategy = _check(max_length, strategy)
    lengths = np.asarray(lengths) if len(lengths) else np.zeros(0, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise TypeError(f"lengths of dtype {lengths.dtype}: give one integer >= 0 a row")
    lengths = lengths.astype(np.int64)
    L = min(L, max(1, int(lengths.sum())))  # more room than tokens changes nothing
    if strategy == "wrapped":
        ends = np.cumsum(lengths)
        cuts = np.unique(np.concatenate(([0], ends, np.arange(0, lengths.sum(), L))))
        rows = np.searchsorted(ends, cuts[:-1], side="right")
        starts = cuts[:-1] - (ends - lengths)[rows]
        offsets = np.flatnonzero(np.append(cuts[:-1] % L == 0, True))
        return Placement(rows, starts, starts + np.diff(cuts), offsets)
    if strategy == "bfd":
        rows = np.flatnonzero(lengths)
        starts = np.zeros_like(rows)
    else:
        pieces = -(-lengths // L)
        rows = np.repeat(np.arange(len(lengths)), pieces)
        starts = L * (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    stops = np.minimum(lengths[rows], starts + L)
    order, offsets = _best_fit(stops - starts, L) if len(rows) else (rows, np.zeros(1, np.int64))
    return Placement(rows[order], starts[order], stops[order], offsets)


def _check(max_length: int | None, strategy: str) -> tuple[int, str]:
    if strategy == "bfd-requeue":
        warnings.warn('strategy "bfd-requeue" is now "bfd_split"', FutureWarning, stacklevel=4)
        strategy = "bfd_split"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: give one of {', '.join(STRATEGIES)}")
    if max_length is None:
        raise ValueError("max_length=None: packing needs the tokens of a row, such as 1024")
    if isinstance(max_length, bool) or not hasattr(max_length, "__index__"):
        raise TypeError(f"max_length={max_length!r}: give the tokens of a row, an int")
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: give at least 1 token a row")
    return operator.index(max_length), strategy


def _ragged(name: str, column: Any) -> Ragged:
    if hasattr(column, "offsets"):
        column = Ragged(column.values, np.asarray(column.offsets))
    else:
        if isinstance(column, str | bytes | Mapping) or any(
            isinstance(row, str | bytes | Mapping) or not hasattr(row, "__len__") for row in column
        ):
            raise TypeError(f"{name}: give a sequence of rows, each a list or an array of numbers")
        full = [row for row in column if len(row)] or [np.zeros(0, np.int64)]
        flat = list(chain.from_iterable(full)) if _is_lists(column) else np.concatenate(full)
        column = Ragged(np.array(flat), np.cumsum([0, *map(len, column)]))
    if column.values.ndim != 1 or column.values.dtype.kind not in "biuf":
        raise TypeError(f"{name}: give rows of numbers, each a list or an array of one dimension")
    return column


def _is_lists(column: Any) -> bool:
    return all(isinstance(row, list | tuple) for row in column)


def _like(column: Any, rows: Ragged) -> Any:
    """The rows as what the column is: ragged, lists or arrays."""
    if hasattr(column, "offsets"):
        return type(column)(*rows)
    cut = [rows.values[a:b] for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
    return [row.tolist() for row in cut] if _is_lists(column) else cut


def pack(sequences: Any, max_length: int | None, *, strategy: str = "bfd") -> dict[str, Any]:
    """Columns of packed rows, at most max_length tokens each; empty documents vanish.

    `sequences`: {name: column} with equally long columns in each document (ids, labels, masks), or
    one column, which is then "input_ids". A column is a list of lists or of arrays, or a `Ragged`
    (anything with values and offsets), and comes back as the same; "bfd" and "bfd_split" add
    "seq_lengths", the lengths of the documents in each row, in order.

    Raises:
        ValueError: max_length None or below 1, strategy, a document of unequal columns.
        TypeError: max_length no int, rows that are no 1-D lists or arrays of numbers.
    """
    max_length, strategy = _check(max_length, strategy)
    columns = sequences if isinstance(sequences, Mapping) else {"input_ids": sequences}
    ragged = {name: _ragged(name, column) for name, column in columns.items()}
    if not ragged or "seq_lengths" in ragged:
        raise ValueError(f"columns {list(ragged)}: give input_ids and what goes with it, unpacked")
    name, first = next(iter(ragged.items()))
    lengths = np.diff(first.offsets)
    for other, column in ragged.items():
        if not np.array_equal(np.diff(column.offsets), lengths):
            raise ValueError(f"{other} and {name} differ in a row's length: give equal columns")
    at = place(lengths, max_length, strategy)
    sizes = at.stops - at.starts
    offsets = np.concatenate(([0], np.cumsum(sizes)))[at.offsets]
    packed = {}
    for other, column in ragged.items():
        starts = (column.offsets[at.rows] + at.starts).tolist()
        stops = (column.offsets[at.rows] + at.stops).tolist()
        cut = [column.values[a:b] for a, b in zip(starts, stops, strict=True)]
        values = np.concatenate(cut) if cut else column.values[:0]
        packed[other] = _like(columns[other], Ragged(values, offsets))
    if strategy != "wrapped":
        packed["seq_lengths"] = _like(columns[name], Ragged(sizes, at.offsets))
    return packed


def lower_bound(lengths: Any, max_length: int) -> int:
    """No placement of these lengths, cut to max_length, has fewer bins: the larger of ceil(sum / L)
    and L2 of Martello and Toth 1990 (items over L - a, alone; items up to L/2 in what is left)."""
    L, _ = _check(max_length, "bfd")
    lengths = np.minimum(np.asarray(lengths, np.int64), L)
    L = min(L, max(1, int(lengths.sum())))
    count = np.bincount(lengths, minlength=L + 1)
    count[0] = 0
    items, tokens = np.cumsum(count), np.cumsum(count * np.arange(L + 1))  # of at most so long
    a, half = np.arange(L // 2 + 1), L // 2
    large = items[-1] - items[half]
    free = (items[L - a] - items[half]) * L - (tokens[L - a] - tokens[half])  # beside the large
    small = tokens[half] - np.where(a > 0, tokens[a - 1], 0)  # of at least a
    return int((large + np.maximum(0, -(-(small - free) // L))).max())


def efficiency(placement: Placement, max_length: int) -> float:
    """Tokens / (bins * max_length): 1 when no position is empty, and when there is no bin."""
    bins = len(placement.offsets) - 1
    return int((placement.stops - placement.starts).sum()) / (bins * max_length) if bins else 1.0
