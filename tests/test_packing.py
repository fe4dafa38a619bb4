"""Packing: worked values, the faults of others, a slow best fit beside the fast one, bounds."""

import tracemalloc
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_padding_free import SCALAR, alive

from memlab.data.bounds import efficiency, lower_bound
from memlab.data.lengths import chat_like, lengths
from memlab.experiments import Recipe
from memlab.experiments.training import prepare
from memlab.models.build import load_config
from memlab.techniques import packing
from memlab.techniques.packing import STRATEGIES, Ragged, pack, place

FOUR = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
ids_of_rows = st.lists(st.integers(0, 12), max_size=40)


def documents(sizes):
    """Rows of these lengths, every token of all of them different."""
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def slow_best_fit(sizes, max_length):
    """The obvious best-fit decreasing: bins as lists of items, in the order they were opened.

    Of several bins with the least room that suffices, the one touched longest ago is taken.
    """
    bins, rooms, touched = [], [], []
    longest_first = sorted(range(len(sizes)), key=lambda item: -sizes[item])  # sort is stable
    for time, item in enumerate(longest_first):
        fitting = [b for b in range(len(bins)) if rooms[b] >= sizes[item]]
        best = min(fitting, key=lambda b: (rooms[b], touched[b]), default=None)
        if best is None:
            best = len(bins)
            bins.append([])
            rooms.append(max_length)
            touched.append(0)
        bins[best].append(item)
        rooms[best] -= sizes[item]
        touched[best] = time
    return bins


def pieces_of(sizes, max_length, strategy):
    """(row, start, stop) of what bfd keeps, or bfd_split makes, of rows, in input order."""
    found = []
    for row, size in enumerate(sizes):
        cuts = [0] if strategy == "bfd" else range(0, size, max_length)
        found += [(row, cut, min(size, cut + max_length)) for cut in cuts if size]
    return found


def placed_bins(sizes, max_length, strategy):
    """What `place` returns, as a list of bins of (row, start, stop)."""
    rows, starts, stops, offsets = place(sizes, max_length, strategy)
    pieces = list(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True))
    return [pieces[a:b] for a, b in pairwise(offsets)]


@pytest.mark.parametrize(
    ("rows", "max_length", "strategy", "packed", "seq_lengths"),
    [
        (FOUR, 4, "bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]]),
        (FOUR, 4, "bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]]),
        (FOUR, 4, "wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]], None),
        (
            [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10], [11, 12, 13]],
            5,
            "bfd_split",
            [[1, 2, 3, 4, 5], [7, 8, 9, 10, 6], [11, 12, 13]],
            [[5], [4, 1], [3]],
        ),
        (
            [[1, 2, 3, 4, 5], [], [6, 7, 8, 9, 10, 11], [], [12]],  # case 4
            4,
            "bfd_split",
            [[1, 2, 3, 4], [6, 7, 8, 9], [10, 11, 5, 12]],
            [[4], [4], [2, 1, 1]],
        ),
        ([[*range(13)], [*range(11)]], 10, "bfd", [[*range(10)]] * 2, [[10], [10]]),  # case 5
        ([[0, 0], [1, 2, 3], [10]], 1, "bfd_split", [[0], [0], [1], [2], [3], [10]], [[1]] * 6),
        ([[0, 0], [1, 2, 3], [10]], 1, "bfd", [[0], [1], [10]], [[1]] * 3),  # case 6
        ([[0, 0], [1, 2, 3], [10]], 1, "wrapped", [[0], [0], [1], [2], [3], [10]], None),
    ],
)
def test_worked_values(rows, max_length, strategy, packed, seq_lengths):
    wanted = {"input_ids": packed}
    if seq_lengths is not None:
        wanted["seq_lengths"] = seq_lengths
    assert pack(rows, max_length, strategy=strategy) == wanted


def test_bfd_is_the_default():
    assert pack(FOUR, 4) == pack(FOUR, 4, strategy="bfd")
    assert placed_bins([5, 2, 3, 1], 4, "bfd")[0] == [(0, 0, 4)]
    assert place([5, 2, 3, 1], 4).stops.tolist() == place([5, 2, 3, 1], 4, "bfd").stops.tolist()


@pytest.mark.parametrize("rows", [6, 2500])
def test_wrapped_is_one_stream(rows):  # case 1: of batches of rows, none is repeated or lost
    packed = pack([[2 * i + 1, 2 * i + 2] for i in range(rows)], 4, strategy="wrapped")
    assert packed == {"input_ids": np.arange(1, 2 * rows + 1).reshape(-1, 4).tolist()}


@pytest.mark.parametrize("k", range(1, 12))
def test_room_for_just_two_each(k):  # case 2 (k = 3): lengths beside a power of two
    for max_length in (2**k - 1, 2**k, 2**k + 1):
        half = max_length // 2
        if half:
            assert len(pack([[0] * half] * 6, max_length)["input_ids"]) == -(
                -6 // (max_length // half)
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_nothing_packs_to_nothing(rows, strategy):  # case 3
    added = {} if strategy == "wrapped" else {"seq_lengths": []}
    assert pack(rows, 4, strategy=strategy) == {"input_ids": [], **added}
    columns = {"input_ids": rows, "labels": rows}
    assert pack(columns, 4, strategy=strategy) == {"input_ids": [], "labels": [], **added}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_rows_change_nothing(strategy):  # case 3: an empty batch among others
    full = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    sparse = [[], full[0], [], [], full[1], full[2], []]
    assert pack(sparse, 4, strategy=strategy) == pack(full, 4, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_column_travels(strategy):  # case 8
    rows = documents([5, 2, 0, 9, 3, 1, 4])
    columns = {
        "input_ids": rows,
        "labels": [[-100 if i % 3 else i for i in row] for row in rows],
        "completion_mask": [[i % 2 for i in row] for row in rows],
        "weights": [[i / 4 for i in row] for row in rows],
        "counts": [[i % 5 == 0 for i in row] for row in rows],
    }
    packed = pack(columns, 4, strategy=strategy)
    assert list(packed) == [*columns, *(() if strategy == "wrapped" else ["seq_lengths"])]
    for name, of in (
        ("labels", lambda i: -100 if i % 3 else i),
        ("completion_mask", lambda i: i % 2),
        ("weights", lambda i: i / 4),
        ("counts", lambda i: i % 5 == 0),
    ):
        assert packed[name] == [[of(i) for i in row] for row in packed["input_ids"]]
        assert type(packed[name][0][0]) is type(columns[name][0][0])


@given(ids_of_rows, st.integers(1, 14), st.sampled_from(["bfd", "bfd_split"]))
@example([4] * 6, 9, "bfd")
@settings(max_examples=400)
def test_places_as_the_slow_best_fit_does(sizes, max_length, strategy):
    """Contents and order of the bins: so equal lengths keep their order, and best fit is kept."""
    pieces = pieces_of(sizes, max_length, strategy)
    slow = slow_best_fit([stop - start for _, start, stop in pieces], max_length)
    wanted = [[pieces[item] for item in one] for one in slow]
    assert placed_bins(sizes, max_length, strategy) == wanted


@pytest.mark.parametrize("max_length", [97, 512, 70_000])  # 70,000 has more than 16 bits
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_places_many_as_the_slow_best_fit_does(max_length, strategy):
    sizes = [64 * size if max_length > 65_535 else size for size in chat_like(400, seed=1)]
    pieces = pieces_of(sizes, max_length, strategy)
    slow = slow_best_fit([stop - start for _, start, stop in pieces], max_length)
    wanted = [[pieces[item] for item in one] for one in slow]
    assert placed_bins(sizes, max_length, strategy) == wanted


@given(ids_of_rows, st.integers(1, 14), st.sampled_from(STRATEGIES))
@settings(max_examples=300)
def test_no_token_is_lost_repeated_or_invented(sizes, max_length, strategy):
    rows = documents(sizes)
    packed = pack(rows, max_length, strategy=strategy)
    tokens = list(chain(*packed["input_ids"]))
    kept = [row[:max_length] for row in rows] if strategy == "bfd" else rows
    assert sorted(tokens) == list(chain(*kept))
    assert all(1 <= len(row) <= max_length for row in packed["input_ids"])
    if strategy == "wrapped":
        assert tokens == list(chain(*rows))
        assert all(len(row) == max_length for row in packed["input_ids"][:-1])


@given(ids_of_rows, st.integers(1, 14), st.sampled_from(["bfd", "bfd_split"]))
@settings(max_examples=300)
def test_seq_lengths_part_the_documents(sizes, max_length, strategy):  # case 7
    rows = documents(sizes)
    row_of = {token: row for row, tokens in enumerate(rows) for token in tokens}
    packed = pack(rows, max_length, strategy=strategy)
    for tokens, parts in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        assert min(parts) > 0
        assert sum(parts) == len(tokens)
        for start, size in zip(np.cumsum(parts) - parts, parts, strict=True):
            document = tokens[start : start + size]
            assert document == list(range(document[0], document[0] + size))
            assert len({row_of[token] for token in document}) == 1


@given(ids_of_rows, st.integers(1, 14))
def test_pieces_of_wrapped_are_those_of_the_documents(sizes, max_length):
    rows = documents(sizes)
    bins = [
        [token for row, start, stop in one for token in rows[row][start:stop]]
        for one in placed_bins(sizes, max_length, "wrapped")
    ]
    assert bins == pack(rows, max_length, strategy="wrapped")["input_ids"]
    assert all(a < b for one in placed_bins(sizes, max_length, "wrapped") for _, a, b in one)


@given(st.lists(st.integers(0, 9), max_size=30))
def test_bfd_equals_bfd_split_without_overlong_rows(sizes):
    rows = documents(sizes)
    assert pack(rows, 9, strategy="bfd") == pack(rows, 9, strategy="bfd_split")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_room_than_tokens_costs_nothing(strategy):
    sizes = [3, 0, 5]
    huge = place(sizes, 10**15, strategy)
    assert [x.tolist() for x in huge] == [x.tolist() for x in place(sizes, 8, strategy)]


def test_the_placement_takes_a_step_a_length_not_a_row():
    """Ten times the rows: hardly more moves (a length is placed in bulk)."""

    def moves(copies):
        sizes, counts = np.unique(np.minimum(chat_like(20_000), 1024), return_counts=True)
        return len(packing._moves(sizes[::-1], copies * counts[::-1], 1024))

    assert moves(1) < 3000
    assert moves(100) < 1.2 * moves(1)


def test_room_costs_neither_time_nor_memory():
    """Room for a thousand million tokens a row: as quick as for a thousand, and never a table."""
    tracemalloc.start()
    for sizes in ([10**9] * 3, [1000] * 100_000, range(1, 20_000)):
        assert len(place(sizes, 10**9, "bfd").offsets) - 1 == -(-sum(sizes) // 10**9)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_bins_never_more_than_trls():
    from datasets import Dataset
    from trl import data_utils

    drawn = lengths("chat_like")
    rows = Dataset.from_dict({"input_ids": documents(np.minimum(drawn, 1500))})
    table = rows.with_format("arrow")[:]
    for max_length in (100, 512, 1024):
        for strategy, overlong in (("bfd", "truncate"), ("bfd_split", "split")):
            theirs = data_utils._pack_bfd(table, max_length, overlong)
            ours = pack(rows["input_ids"][:], max_length, strategy=strategy)
            assert ours == theirs.to_pydict()  # all rows at once: the same rows, in the same order


@pytest.mark.parametrize("max_length", [512, 1024, 2048, 4096, 8192])
def test_chat_like_lengths_pack_to_the_bound(max_length):
    drawn = lengths("chat_like")
    bins = len(place(drawn, max_length).offsets) - 1
    assert lower_bound(drawn, max_length) <= bins <= 1.0015 * lower_bound(drawn, max_length)


# Kinds of column


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.float32, bool])
def test_arrays_come_back_as_arrays_of_their_dtype(strategy, dtype):
    lists = [[1, 0, 1, 1, 0], [], [1, 1], [0, 0, 1]]
    packed = pack([np.array(row, dtype) for row in lists], 4, strategy=strategy)
    for name, rows in pack(lists, 4, strategy=strategy).items():
        assert all(isinstance(row, np.ndarray) for row in packed[name])
        assert [row.tolist() for row in packed[name]] == rows
    assert {row.dtype for row in packed["input_ids"]} == {np.dtype(dtype)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("skipped", [0, 3])  # a slice of a longer column starts further on
def test_ragged_comes_back_ragged(strategy, skipped):
    sizes = [5, 2, 0, 9, 3, 1, 4]
    values = np.arange(skipped + sum(sizes) + 2, dtype=np.int32)
    ends = skipped + np.append(0, np.cumsum(sizes))
    column = Ragged(values, ends[:-1], ends[1:])
    packed = pack({"input_ids": column}, 4, strategy=strategy)
    rows = [values[a:b].tolist() for a, b in pairwise(ends)]
    wanted = pack(rows, 4, strategy=strategy)
    assert packed.keys() == wanted.keys()
    assert packed["input_ids"].values.dtype == np.int32
    for name, (flat, starts, stops) in packed.items():
        cut = [flat[a:b].tolist() for a, b in zip(starts, stops, strict=True)]
        assert cut == wanted[name]
        assert len(flat) == stops[-1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ragged_rows_may_lie_anywhere(strategy):
    values = np.arange(20)
    column = Ragged(values, np.array([9, 0, 4, 9]), np.array([12, 4, 4, 18]))
    rows = [values[a:b].tolist() for a, b in zip(column.starts, column.stops, strict=True)]
    packed = pack(column, 5, strategy=strategy)["input_ids"]
    cut = [packed.values[a:b].tolist() for a, b in zip(packed.starts, packed.stops, strict=True)]
    assert cut == pack(rows, 5, strategy=strategy)["input_ids"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [">i4", "<u8", "f2", "g", "?"])
def test_ragged_of_any_number_type_and_stride(strategy, dtype):
    values = np.arange(20).astype(dtype)[::2]
    column = Ragged(values, np.array([7, 0, 4]), np.array([10, 4, 9]))
    rows = [values[a:b].tolist() for a, b in zip(column.starts, column.stops, strict=True)]
    packed = pack(column, 4, strategy=strategy)["input_ids"]
    cut = [packed.values[a:b].tolist() for a, b in zip(packed.starts, packed.stops, strict=True)]
    assert cut == pack(rows, 4, strategy=strategy)["input_ids"]
    assert packed.values.dtype == np.dtype(dtype).newbyteorder("=")


def test_the_input_stays_as_it_is():
    arrays = [np.arange(5), np.arange(2)]
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    pack({"a": arrays, "b": rows}, 4, strategy="bfd_split")
    assert [row.tolist() for row in arrays] == [[0, 1, 2, 3, 4], [0, 1]]
    assert rows == [[1, 2, 3, 4, 5], [6, 7]]


def test_tensors_are_read():
    packed = pack([torch.arange(3), torch.arange(1)], 4)
    assert [row.tolist() for row in packed["input_ids"]] == [[0, 1, 2, 0]]


def test_empty_lists_among_ids_leave_integers():
    assert pack([[], [1, 2], []], 4)["input_ids"] == [[1, 2]]
    assert type(pack([[], [1, 2], []], 4)["input_ids"][0][0]) is int
    arrays = pack([np.array([]), np.array([1, 2])], 4)["input_ids"]
    assert arrays[0].dtype == np.int64


# Refusals


def test_the_old_name_is_rewritten():
    with pytest.warns(FutureWarning, match="bfd_split"):
        assert pack(FOUR, 4, strategy="bfd-requeue") == pack(FOUR, 4, strategy="bfd_split")
    with pytest.warns(FutureWarning, match="bfd_split"):
        old = place([5, 2], 4, "bfd-requeue")
    assert old.rows.tolist() == place([5, 2], 4, "bfd_split").rows.tolist()


@pytest.mark.parametrize("max_length", [None, 0, -1])
def test_max_length_must_be_given(max_length):
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        pack(FOUR, max_length)
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        place([1], max_length)


@pytest.mark.parametrize("max_length", [4.0, "4", True, False, np.bool_(True), [4]])
def test_max_length_must_be_an_int(max_length):
    with pytest.raises(TypeError, match=r"max_length=.*: give an int"):
        pack(FOUR, max_length)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_a_numpy_max_length_is_taken(strategy, dtype):
    assert pack(FOUR, dtype(4), strategy=strategy) == pack(FOUR, 4, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ffd", "BFD", "", None])
def test_an_unknown_strategy(strategy):
    with pytest.raises(ValueError, match=r"strategy=.*bfd, bfd_split, wrapped"):
        pack(FOUR, 4, strategy=strategy)


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2], [3]], "labels": [[1], [2, 3]]},  # as many in all
        {"input_ids": [[1, 2], [3]], "labels": [[1, 2]]},
        {"input_ids": [[1, 2], [3]], "labels": [[1, 2], []]},
        {"input_ids": [[1]], "seq_lengths": [[1]]},  # packed already
        {},
    ],
)
def test_unequal_columns(columns):
    with pytest.raises(ValueError, match="equally long in each row"):
        pack(columns, 4)


@pytest.mark.parametrize(
    "rows",
    [
        "text",
        ["text"],
        [1, 2, 3],
        [[1, [2]]],
        [[[1], [2, 3]]],
        [[[1, 2], [3, 4]]],
        [{"input_ids": [1]}],
        [["a"]],
        [[None]],
        5,
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_no_rows_of_numbers(rows, strategy):
    with pytest.raises(TypeError):
        pack(rows, 4, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ragged_must_lie_within_its_values(strategy):
    for starts, stops in (([0, 4], [4, 7]), ([-1], [2]), ([3], [2])):
        column = Ragged(np.arange(5), np.array(starts), np.array(stops))
        with pytest.raises(ValueError, match="input_ids: give 0 <= starts <= stops <= 5"):
            pack(column, 4, strategy=strategy)


@pytest.mark.parametrize(("starts", "stops"), [([0, 2], [3]), ([0], [1, 3]), ([0], []), ([], [1])])
def test_ragged_has_as_many_starts_as_stops(starts, stops):
    with pytest.raises(ValueError, match=r"input_ids: give 0 <= .*, as many of each"):
        pack(Ragged(np.arange(4), np.array(starts, int), np.array(stops, int)), 4)


@pytest.mark.parametrize("wrong", [[0.5], [0.0], [True]])
def test_ragged_starts_and_stops_are_integers(wrong):
    for starts, stops in ((wrong, [3]), ([0], wrong)):
        with pytest.raises(TypeError, match="input_ids: give 1-D lists"):
            pack(Ragged(np.arange(4), np.array(starts), np.array(stops)), 4)


def test_ragged_without_rows():
    packed = pack(Ragged(np.arange(4), *np.zeros((2, 0), int)), 4)["input_ids"]
    assert len(packed.values) == len(packed.starts) == 0


def test_three_arrays_are_three_documents():
    packed = pack({"input_ids": (np.arange(4), np.array([0]), np.array([4]))}, 4)
    assert [row.tolist() for row in packed["seq_lengths"]] == [[4], [1, 1]]


def test_ints_that_only_floats_would_hold_are_refused():
    rows = [np.array([2**60 + 1], np.uint64), np.array([2], np.int64)]
    with pytest.raises(TypeError, match="input_ids: ints would become float64"):
        pack(rows, 4)
    mixed = pack([np.array([1], np.uint8), np.array([-2], np.int8)], 4)["input_ids"]
    assert (mixed[0].dtype, mixed[0].tolist()) == (np.int16, [1, -2])
    assert pack([[1], [0.5]], 4)["input_ids"] == [[1, 0.5]]


def test_ragged_of_lists():
    packed = pack(Ragged([5, 6, 7], [0, 1], [1, 3]), 4)["input_ids"]
    assert packed.values.tolist() == [6, 7, 5]


def test_a_data_frame_is_columns():
    frame = pytest.importorskip("pandas").DataFrame({"input_ids": FOUR, "labels": FOUR})
    assert pack(frame, 4) == pack({"input_ids": FOUR, "labels": FOUR}, 4)


def test_a_data_set_is_told_of_map_ragged():
    dataset = pytest.importorskip("datasets").Dataset.from_dict({"input_ids": FOUR})
    with pytest.raises(TypeError, match="of a data set: map_ragged"):
        pack(dataset, 4)
    with pytest.raises(TypeError, match="input_ids: give 1-D lists or arrays"):
        pack(None, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "lengths", [None, iter([1]), [2**62] * 3, np.array([2**64 - 1], np.uint64)]
)
def test_lengths_that_cannot_be_placed(lengths, strategy):
    with pytest.raises(TypeError, match="lengths: give"):
        place(lengths, 4, strategy)


@pytest.mark.parametrize("wrong", [[1.5], [[1]], [-1], ["1"]])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_no_lengths(wrong, strategy):
    with pytest.raises(TypeError, match="lengths"):
        place(wrong, 4, strategy)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lengths_of_any_integer_type(dtype, strategy):
    narrow = place(np.array([100, 7, 0, 60], dtype), 300, strategy)
    assert [x.tolist() for x in narrow] == [
        x.tolist() for x in place([100, 7, 0, 60], 300, strategy)
    ]


# Bounds


def fewest_bins(sizes, max_length):
    """By trying all placements of a few items."""
    best = len(sizes)

    def put(item, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if item == len(sizes):
            best = len(rooms)
            return
        for i, room in enumerate(rooms):
            if room >= sizes[item]:
                put(item + 1, [*rooms[:i], room - sizes[item], *rooms[i + 1 :]])
        put(item + 1, [*rooms, max_length - sizes[item]])

    put(0, [])
    return best


@given(st.lists(st.integers(1, 11), min_size=1, max_size=7), st.integers(11, 14))
@example([6, 6, 6], 11)  # each over a half: 3, where the tokens would fit in 2
@example([8, 8, 4, 4, 4], 11)  # what is left beside an 8 holds no 4: 4
def test_the_bound_is_between_the_tokens_and_the_fewest_bins(sizes, max_length):
    bound = lower_bound(sizes, max_length)
    assert -(-sum(sizes) // max_length) <= bound <= fewest_bins(sizes, max_length)


@pytest.mark.parametrize(
    ("sizes", "max_length", "bound"),
    [
        ([6, 6, 6], 11, 3),
        ([8, 8, 4, 4, 4], 11, 4),
        ([5, 5, 5, 5], 10, 2),
        ([1] * 21, 10, 3),
        ([0, 0], 10, 0),
        ([], 10, 0),
        ([30, 4], 10, 2),  # cut to 10
        ([1, 2], 10**15, 1),
    ],
)
def test_bounds(sizes, max_length, bound):
    assert lower_bound(sizes, max_length) == bound


def test_bound_of_no_room():
    with pytest.raises(ValueError, match="max_length=0"):
        lower_bound([1], 0)


def test_efficiency():
    assert efficiency(11, 3, 4) == 11 / 12
    assert efficiency(0, 0, 4) == 1


# The file on its own

FILE = Path(packing.__file__)


# ------------------------------------------------------------------------------------------ bytes


def slots_and_bytes(recipe: Recipe) -> tuple[int, float]:
    """The slots of the recipe's batch, and the bytes of activations kept for each of them."""
    ((batch,),) = prepare(recipe, "gpu").steps
    rows, longest = batch["input_ids"].shape
    tables = 2 * 2 * load_config(recipe.model).head_dim * longest  # cos, sin: of positions, bf16
    kept = sum(nbytes for _, nbytes in alive(recipe, "kept") if nbytes >= SCALAR)
    return rows * longest, (kept - tables) / (rows * longest)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_of_the_header(strategy):
    bins, L = 3, 192
    switches = {"model": "memlab/tiny", "dataset": "docstrings", "max_length": L, "max_steps": 1}
    padded = Recipe.off(**switches, per_device_train_batch_size=bins)
    _, a = slots_and_bytes(padded)
    slots, found = slots_and_bytes(padded.replace(packing=True, packing_strategy=strategy))
    assert found == a == int(a)
    assert 0.95 * bins * L < slots <= bins * L
