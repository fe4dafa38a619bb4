"""A data set's list columns as flat values and offsets, and back."""

import subprocess
import sys
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st

from memlab.data import arrow
from memlab.data.arrow import Ragged, from_ragged, map_ragged, to_ragged
from memlab.techniques.packing import STRATEGIES, pack

ROWS = [[1, 2, 3, 4, 5], [], [6, 7], [8, 9, 10], [11]]


def rows_of(column):
    return [column.values[a:b].tolist() for a, b in zip(column.starts, column.stops, strict=True)]


def of_table(**columns):
    return Dataset(pa.table(columns))


def null_rows(kind):
    return pa.array([[1, 2], None, [3], None], kind)


DATASETS = {
    "plain": lambda: Dataset.from_dict({"input_ids": ROWS}),
    "large lists": lambda: of_table(input_ids=pa.array(ROWS, pa.large_list(pa.int32()))),
    "chunks": lambda: of_table(
        input_ids=pa.chunked_array([ROWS[:2], [], ROWS[2:]], pa.list_(pa.int64()))
    ),
    "a slice": lambda: of_table(input_ids=pa.array([[0, 0], *ROWS, [99]]).slice(1, 5)),
    "slices": lambda: of_table(
        input_ids=pa.chunked_array(
            [pa.array([[0], *ROWS[:3]]).slice(1), pa.array([*ROWS[3:], [0]]).slice(0, 2)]
        )
    ),
    "a range": lambda: Dataset.from_dict({"input_ids": [[0, 0], *ROWS, [9]]}).select(range(1, 6)),
    "selected": lambda: Dataset.from_dict({"input_ids": ROWS[::-1]}).select([4, 3, 2, 1, 0]),
    "joined": lambda: concatenate_datasets(
        [
            Dataset.from_dict({"input_ids": ROWS[:2]}),
            Dataset.from_dict({"input_ids": [[0], *ROWS[2:]]}).select(range(1, 4)),
        ]
    ),
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_rows_come_out_as_they_are(make):
    dataset = make()
    assert dataset["input_ids"][:] == ROWS  # the test's own data
    column = to_ragged(dataset)["input_ids"]
    assert rows_of(column) == ROWS
    assert column.starts.dtype == column.stops.dtype == np.int64


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_as_lists_do(make, strategy):
    packed = map_ragged(make(), partial(pack, max_length=4, strategy=strategy))
    assert packed[:] == pack(ROWS, 4, strategy=strategy)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_order_of_rows(sizes, random):
    ends = np.cumsum(sizes).tolist()
    rows = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    order = random.choices(range(len(rows)), k=len(rows))
    features = Features({"input_ids": List(Value("int32"))})
    dataset = Dataset.from_dict({"input_ids": rows}, features=features).select(order)
    assert rows_of(to_ragged(dataset)["input_ids"]) == [rows[i] for i in order]


def test_one_chunk_in_order_is_no_copy():
    values = pa.array(range(11))
    dataset = of_table(input_ids=pa.ListArray.from_arrays([0, 5, 5, 7, 11], values))
    column = to_ragged(dataset)["input_ids"]
    assert column.values.ctypes.data == values.buffers()[1].address
    back = from_ragged({"input_ids": column}).data.table["input_ids"].chunk(0)
    assert back.values.buffers()[1].address == values.buffers()[1].address


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_null_rows_are_empty(kind):
    for column in (null_rows(kind), null_rows(kind).slice(1), null_rows(kind).slice(1, 1)):
        wanted = [row or [] for row in column.to_pylist()]
        assert rows_of(to_ragged(of_table(input_ids=column))["input_ids"]) == wanted


@pytest.mark.parametrize(
    "kind", ["int8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64", "bool"]
)
def test_columns_keep_their_type(kind):
    rows = [[1, 0, 1, 1, 1], [0], [1, 0, 0]]
    features = Features({"input_ids": List(Value("int64")), "mask": List(Value(kind))})
    columns = {"input_ids": rows, "mask": [[np.dtype(kind).type(x) for x in r] for r in rows]}
    dataset = Dataset.from_dict(columns, features=features)
    packed = map_ragged(dataset, partial(pack, max_length=4, strategy="bfd_split"))
    assert packed.features == {**features, "seq_lengths": List(Value("int64"))}
    assert packed["mask"][:] == packed["input_ids"][:] == [[1, 0, 1, 1], [1, 0, 0, 1], [0]]


def test_large_lists_stay_large():
    features = Features({"input_ids": LargeList(Value("int32"))})
    dataset = Dataset.from_dict({"input_ids": ROWS}, features=features)
    packed = map_ragged(dataset, partial(pack, max_length=4))
    assert packed.features["input_ids"] == LargeList(Value("int32"))
    assert packed[:] == pack(ROWS, 4)


EMPTY = {
    "no rows": lambda: Dataset.from_dict({"input_ids": [], "labels": []}),
    "no rows left": lambda: Dataset.from_dict({"input_ids": ROWS, "labels": ROWS}).select([]),
    "all filtered": lambda: Dataset.from_dict({"input_ids": ROWS, "labels": ROWS}).filter(
        lambda row: False
    ),
    "empty rows": lambda: Dataset.from_dict({"input_ids": [[], []], "labels": [[], []]}),
    "null rows": lambda: of_table(input_ids=pa.array([None, None]), labels=pa.array([None, None])),
    "no chunks": lambda: of_table(
        **dict.fromkeys(("input_ids", "labels"), pa.chunked_array([], pa.list_(pa.int64())))
    ),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_packs_to_nothing_with_its_columns(make, strategy):  # case 3
    added = [] if strategy == "wrapped" else ["seq_lengths"]
    packed = map_ragged(make(), partial(pack, max_length=4, strategy=strategy))
    assert packed.column_names == ["input_ids", "labels", *added]
    assert len(packed) == 0
    assert packed.features["labels"] == List(Value("int64"))


def test_an_empty_chunk_among_others_changes_nothing():  # case 3
    dataset = concatenate_datasets(
        [
            Dataset.from_dict({"input_ids": ROWS[:2]}),
            Dataset.from_dict({"input_ids": ROWS[2:]}).select([]),
            Dataset.from_dict({"input_ids": ROWS[2:]}),
        ]
    )
    assert map_ragged(dataset, partial(pack, max_length=4))[:] == pack(ROWS, 4)


def test_packed_over_all_rows_not_over_batches():  # case 1
    rows = [[2 * i + 1, 2 * i + 2] for i in range(3001)]
    packed = map_ragged(
        Dataset.from_dict({"input_ids": rows}), partial(pack, max_length=4, strategy="wrapped")
    )
    assert packed["input_ids"][-1] == [6001, 6002]
    assert sum(packed["input_ids"][:-1], []) == list(range(1, 6001))  # noqa: RUF017


def test_format_split_and_info_stay():
    dataset = Dataset.from_dict({"input_ids": ROWS, "labels": ROWS}, split="train")
    dataset.info.description = "five rows"
    shown = dataset.with_format("numpy", columns=["input_ids"], dtype=np.float32)
    packed = map_ragged(shown, partial(pack, max_length=4))
    assert packed.format["type"] == "numpy"
    assert packed.format["columns"] == ["input_ids", "seq_lengths"]
    assert packed[0]["input_ids"].dtype == np.float32
    assert packed.split == "train"
    assert packed.info.description == "five rows"
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    assert "seq_lengths" not in dataset.features  # the first data set is as it was
    assert dataset[:] == {"input_ids": ROWS, "labels": ROWS}


def test_features_that_arrow_does_not_know_stay():
    features = Features({"input_ids": List(Value("int64")), "tags": List(ClassLabel(names=["a"]))})
    dataset = Dataset.from_dict({"input_ids": [[1, 2]], "tags": [[0, 0]]}, features=features)
    packed = map_ragged(dataset, partial(pack, max_length=1, strategy="wrapped"))
    assert packed.features == features


def test_packed_data_sets_go_on_as_data_sets_do(tmp_path):
    packed = map_ragged(Dataset.from_dict({"input_ids": ROWS}), partial(pack, max_length=4))
    assert packed.map(lambda row: {"n": len(row["input_ids"])})["n"][:] == [4, 4, 2]
    assert packed.shuffle(seed=0).select([0, 1]).num_rows == 2
    packed.save_to_disk(tmp_path)
    assert datasets.load_from_disk(tmp_path)[:] == packed[:]
    again = map_ragged(Dataset.from_dict({"input_ids": ROWS}), partial(pack, max_length=5))
    assert again._fingerprint != packed._fingerprint


def test_more_values_than_offsets_count_become_chunks(monkeypatch):
    monkeypatch.setattr(arrow, "_MOST", 6)
    rows = [[1, 2, 3], [4, 5, 6], [], [7], [8, 9, 10, 11, 12, 13], [14]]
    ends = np.cumsum([0, *map(len, rows)])
    column = Ragged(np.arange(1, 15), ends[:-1], ends[1:])
    made = from_ragged({"input_ids": column})
    assert made["input_ids"][:] == rows
    chunks = made.data.table["input_ids"].chunks
    assert [len(chunk.flatten()) for chunk in chunks] == [6, 1, 6, 1]
    assert rows_of(to_ragged(made)["input_ids"]) == rows


def test_a_row_of_more_values_than_offsets_count_is_no_endless_loop(monkeypatch):
    monkeypatch.setattr(arrow, "_MOST", 2)
    made = from_ragged({"input_ids": Ragged(np.arange(4), np.array([0, 1]), np.array([1, 4]))})
    assert made["input_ids"][:] == [[0], [1, 2, 3]]


def test_rows_that_lie_anywhere_are_gathered():
    column = Ragged(np.arange(9), np.array([5, 0, 2, 5]), np.array([8, 2, 2, 6]))
    made = from_ragged({"input_ids": column})
    assert made["input_ids"][:] == [[5, 6, 7], [0, 1], [], [5]]


def test_a_shuffled_data_set_is_not_copied():
    dataset = Dataset.from_dict({"input_ids": ROWS})
    whole = to_ragged(dataset)["input_ids"].values
    assert np.shares_memory(to_ragged(dataset.shuffle(seed=0))["input_ids"].values, whole)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b"]),
        pa.array([1, 2]),
        pa.array([["a"], ["b"]]),
        pa.array([[[1]], [[2]]]),
    ],
)
def test_a_column_of_no_lists_is_named(column):
    dataset = of_table(input_ids=pa.array([[1], [2]]), other=column)
    with pytest.raises(TypeError, match=r"column other .*remove_columns"):
        to_ragged(dataset)


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.float32(), pa.bool_()])
def test_lists_of_a_fixed_size_are_told_how_to_cast(kind):
    dataset = of_table(input_ids=pa.array([[1, 0], [1, 1]], pa.list_(pa.int64(), 2)))
    dataset = Dataset(dataset.data.table.cast(pa.schema({"input_ids": pa.list_(kind, 2)})))
    with pytest.raises(TypeError, match="not lists of numbers: cast_column") as refused:
        to_ragged(dataset)
    advice = str(refused.value).partition("numbers: ")[2]
    cast = eval(f"dataset.{advice}", {"dataset": dataset, "datasets": datasets})
    assert rows_of(to_ragged(cast)["input_ids"]) == [[1, 0], [1, 1]]


def test_lists_of_lists_are_told_to_be_joined():
    with pytest.raises(
        TypeError, match=r"give each row one list of numbers \(map\), or remove_col"
    ):
        to_ragged(of_table(input_ids=pa.array([[[1], [2]], [[3]]])))


def test_a_null_among_numbers_is_refused():
    with pytest.raises(ValueError, match="column input_ids has nulls"):
        to_ragged(of_table(input_ids=pa.array([[1, None], [2]])))
    with pytest.raises(ValueError, match="column input_ids has nulls"):
        to_ragged(of_table(input_ids=pa.array([[None], []])))


@pytest.mark.parametrize("wrong", [{"input_ids": ROWS}, ROWS, datasets.DatasetDict(), None])
def test_what_is_no_data_set(wrong):
    with pytest.raises(TypeError, match=r"give a datasets\.Dataset"):
        to_ragged(wrong)


def test_unequal_columns_of_a_data_set():
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[1], [2, 3]]})
    with pytest.raises(ValueError, match="equally long"):
        map_ragged(dataset, partial(pack, max_length=4))


def test_importing_the_module_is_light():
    script = """
import sys
import memlab.data.arrow
assert not {"datasets", "pyarrow", "torch", "pandas"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
