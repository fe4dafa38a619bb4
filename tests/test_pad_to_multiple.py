"""Padding to a multiple: values, integers whatever comes in, and the slots of the header."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.techniques.pad_to_multiple import collate, pad, padded_length, shapes, slots

TWO = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]

KINDS = {
    "lists": list,
    "arrays": np.array,
    "read-only arrays": lambda row: np.frombuffer(np.array(row, np.int64).tobytes(), np.int64),
    "int32 tensors": lambda row: torch.tensor(row, dtype=torch.int32),
    "tensors": torch.tensor,  # an empty one is of floats
}

batch_of_rows = st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=5)


def as_rows(ids, kind=list):
    return [{"input_ids": kind(row), "labels": kind(row)} for row in ids]


def test_worked_value():
    batch = collate(TWO, pad_to_multiple_of=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100], [4, 5, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_none_pads_to_the_longest_row():
    batch = collate(TWO, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 7]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, 5, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("multiple", [1, 3])
def test_a_length_that_is_a_multiple_stays(multiple):
    assert collate(TWO, pad_to_multiple_of=multiple)["input_ids"].shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("ids", [[[1, 2], []], [[], [1, 2]], [[]], [[], []]])
@pytest.mark.parametrize("multiple", [None, 4])
def test_case_11_an_empty_row_leaves_whole_numbers(kind, ids, multiple):
    batch = collate(as_rows(ids, kind), pad_to_multiple_of=multiple)
    assert {t.dtype for t in batch.values()} == {torch.int64}
    width = padded_length(max(map(len, ids)), multiple)
    assert {t.shape for t in batch.values()} == {(len(ids), width)}
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in ids]


@settings(deadline=None)
@given(
    ids=batch_of_rows,
    multiple=st.none() | st.integers(1, 12),
    kind=st.sampled_from([*KINDS.values()]),
)
def test_rows_come_back_and_the_rest_is_padding(ids, multiple, kind):
    batch = collate(as_rows(ids, kind), pad_to_multiple_of=multiple, pad_token_id=-7)
    longest, width = max(map(len, ids)), batch["input_ids"].shape[1]
    assert width % (multiple or 1) == 0
    assert longest <= width < longest + (multiple or 1)
    for i, row in enumerate(ids):
        added = width - len(row)
        assert batch["input_ids"][i].tolist() == row + [-7] * added
        assert batch["labels"][i].tolist() == row + [-100] * added
        assert batch["attention_mask"][i].tolist() == [1] * len(row) + [0] * added


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6), multiple=st.integers(1, 12))
def test_slots_and_bytes_are_the_header_s(lengths, multiple):
    batch = collate(as_rows([[1] * n for n in lengths]), pad_to_multiple_of=multiple)
    formula = len(lengths) * multiple * math.ceil(max(lengths) / multiple)
    assert formula == slots(lengths, multiple=multiple) == batch["input_ids"].numel()
    assert sum(t.nbytes for t in batch.values()) == 24 * formula
    plain = collate(as_rows([[1] * n for n in lengths]))
    assert slots(lengths) == plain["input_ids"].numel() == len(lengths) * max(lengths)
    assert sum(t.nbytes for t in plain.values()) == 24 * slots(lengths)


def test_a_multiple_leaves_few_shapes():
    batches = [[n, 5] for n in range(5, 105)]
    assert len(shapes(batches)) == 100
    assert shapes(batches, multiple=64) == {(2, 64), (2, 128)}
    assert shapes([[5], [5, 5], [3], []], multiple=8) == {(1, 8), (2, 8), (0, 0)}


def test_pad_on_the_left_and_of_floats():
    assert pad([[1, 2], [3]], 9, multiple=4, side="left").tolist() == [[9, 9, 1, 2], [9, 9, 9, 3]]
    logps = pad([torch.tensor([-0.5], dtype=torch.float16), torch.tensor([])], 0)
    assert (logps.dtype, logps.tolist()) == (torch.float16, [[-0.5], [0]])
    halves = [torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    for rows in ([*halves, [1]], [[1], *halves[::-1]]):
        assert pad(rows, 0).dtype == torch.float32
    assert pad([[True], []], 0).tolist() == [[1], [0]]
    assert pad([[], [0.5]], 1).tolist() == [[1], [0.5]]


@pytest.mark.parametrize("side", ["left", "right"])
@settings(deadline=None)
@given(ids=batch_of_rows, multiple=st.none() | st.integers(1, 12))
def test_equals_trl(side, ids, multiple):
    trl_pad = pytest.importorskip("trl.trainer.utils").pad
    rows = [torch.tensor(row, dtype=torch.int64) for row in ids]
    expected = trl_pad(rows, 3, side, multiple)
    assert torch.equal(pad(rows, 3, multiple=multiple, side=side), expected)


@settings(deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5),
    multiple=st.none() | st.integers(1, 12),
)
def test_equals_trl_s_collators(ids, multiple):
    """The one for SFT, and the one for KTO by padding its columns one by one."""
    sft = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    kto = pytest.importorskip("trl.trainer.kto_trainer").DataCollatorForUnpairedPreference
    rows = as_rows(ids)
    expected = sft(pad_token_id=5, pad_to_multiple_of=multiple)(rows)
    got = collate(rows, pad_to_multiple_of=multiple, pad_token_id=5)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)

    pairs = [{"prompt_ids": row, "completion_ids": [1, 2], "label": True} for row in ids]
    expected = kto(pad_token_id=5, pad_to_multiple_of=multiple)(pairs)
    joined, masks = [[*row, 1, 2] for row in ids], [[0] * len(row) + [1, 1] for row in ids]
    assert torch.equal(pad(joined, 5, multiple=multiple), expected["input_ids"])
    assert torch.equal(pad(masks, 0, multiple=multiple), expected["completion_mask"])


@pytest.mark.parametrize("multiple", [0, -8])
def test_a_multiple_below_1_is_refused(multiple):
    with pytest.raises(ValueError, match=f"pad_to_multiple_of={multiple}: give at least 1"):
        collate(TWO, pad_to_multiple_of=multiple)
    with pytest.raises(ValueError, match="pad_to_multiple_of"):
        slots([3], multiple=multiple)


@pytest.mark.parametrize("multiple", [True, False, 8.0, "8", np.bool_(True)])
def test_a_multiple_that_is_no_int_is_refused(multiple):
    with pytest.raises(TypeError, match=r"pad_to_multiple_of=.*: give an int, or None"):
        collate(TWO, pad_to_multiple_of=multiple)


def test_a_numpy_multiple_is_taken():
    assert collate(TWO, pad_to_multiple_of=np.int64(8))["labels"].shape == (2, 8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one"),
        ([{"input_ids": [1]}], "row 0 are .*give input_ids, labels"),
        ([TWO[0], {"input_ids": [1, 2], "labels": [1]}], "row 1 has 2 input_ids and 1 labels"),
        (as_rows([[1, 2]], lambda row: torch.tensor([row])), "1-D"),
    ],
)
def test_rows_that_make_no_batch_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        collate(rows)


def test_other_wrong_values_are_refused():
    with pytest.raises(TypeError, match=r"input_ids of dtype .*float32"):
        collate([{"input_ids": [0.5], "labels": [1]}])
    with pytest.raises(ValueError, match="side='middle'"):
        pad([[1]], 0, side="middle")


@pytest.mark.parametrize(
    "row", [[1j], np.array([2**63], np.uint64), [2**63], "text", [1, [2]], [None], None]
)
def test_a_row_of_no_such_numbers_is_refused(row):
    with pytest.raises(TypeError, match=r"a row of .*: give"):
        pad([[1], row], 0)


def test_small_unsigned_numbers_are_taken():
    for dtype in (np.uint8, np.uint64):
        padded = pad([np.array([1, 2], dtype), [3]], 0)
        assert (padded.dtype, padded.tolist()) == (torch.int64, [[1, 2], [3, 0]])


@pytest.mark.parametrize(
    "value", [0.5, math.nan, math.inf, None, "0", 2**63, -(2**63) - 1, np.uint64(2**63), 1e30]
)
def test_a_padding_that_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=r"padding=.*: give a whole number"):
        pad([[1], [2, 3]], value)
    with pytest.raises(TypeError, match=r"padding=.*: give a whole number"):
        collate(TWO, pad_token_id=value)
    assert pad([[1], [2, 3]], np.uint64(7)).tolist() == [[1, 7], [2, 3]]
    assert pad([[1], [2, 3]], 7.0).tolist() == [[1, 7], [2, 3]]


@pytest.mark.parametrize("value", [None, "0", 1j])
def test_a_padding_that_is_no_number_is_refused_around_floats(value):
    with pytest.raises(TypeError, match=r"padding=.*: give a number"):
        pad([[0.5], []], value)
    assert pad([[0.5], []], 2**63).tolist() == [[0.5], [2.0**63]]


def test_rows_may_come_from_a_generator():
    batch = collate(row for row in TWO)
    assert batch["input_ids"].tolist() == collate(TWO)["input_ids"].tolist()
    assert pad(([i] * i for i in (1, 2)), 0).tolist() == [[1, 0], [2, 2]]


def test_inputs_stay_as_they_are():
    rows = as_rows([[1, 2], [3]], torch.tensor)
    batch = collate(rows)
    batch["input_ids"].fill_(9)
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2], [3]]
