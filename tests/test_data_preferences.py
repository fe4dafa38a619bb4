"""Rows of prompts and answers: what is whose, and how long."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.data import lengths
from memlab.data.preferences import (
    PROMPTED,
    binary_rows,
    full_prompted_rows,
    preference_rows,
    prompt_rows,
    prompted_rows,
    scored_rows,
)

IGNORE = -100
# one answer; two answers and a tail; an answer of one token
ROWS = [
    {"input_ids": np.array([1, 2, 3]), "labels": np.array([-100, 2, 3])},
    {"input_ids": np.array([4, 5, 6, 7, 8]), "labels": np.array([-100, 5, -100, 7, -100])},
    {"input_ids": np.array([9, 10, 11]), "labels": np.array([-100, -100, 11])},
]


def lists(rows) -> list[dict]:
    return [{k: v if isinstance(v, bool) else v.tolist() for k, v in row.items()} for row in rows]


def test_pairs_have_their_own_answer_and_the_next_rows():
    assert lists(preference_rows(ROWS)) == [
        {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [5]},
        {"prompt_ids": [4], "chosen_ids": [5], "rejected_ids": [11]},
        {"prompt_ids": [9, 10], "chosen_ids": [11], "rejected_ids": [2, 3]},
    ]


def test_scored_rows_have_the_prompt_in_front():
    assert lists(scored_rows(preference_rows(ROWS))) == [
        {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 5]},
        {"chosen_ids": [4, 5], "rejected_ids": [4, 11]},
        {"chosen_ids": [9, 10, 11], "rejected_ids": [9, 10, 2, 3]},
    ]
    (alone,) = scored_rows([{"prompt_ids": [], "chosen_ids": [1], "rejected_ids": [2, 3]}])
    assert {name: side.dtype for name, side in alone.items()} == dict.fromkeys(alone, np.int64)
    assert lists([alone]) == [{"chosen_ids": [1], "rejected_ids": [2, 3]}]


def test_every_second_answer_is_another_rows_and_undesirable():
    assert lists(binary_rows(ROWS)) == [
        {"prompt_ids": [1], "completion_ids": [2, 3], "label": True},
        {"prompt_ids": [4], "completion_ids": [11], "label": False},
        {"prompt_ids": [9, 10], "completion_ids": [11], "label": True},
    ]


def test_prompts_alone():
    assert lists(prompt_rows(ROWS)) == [{"prompt_ids": [n]} for n in (1, 4)] + [
        {"prompt_ids": [9, 10]}
    ]


@pytest.mark.parametrize("dataset", ["prompt_completion", "chat"])
def test_lengths_are_those_of_the_committed_spans(dataset):
    shapes = lengths.rows(dataset)
    firsts = [shape.spans[0] for shape in shapes]
    answers = [end - start for start, end in firsts]
    made = prompted_rows(dataset, vocab_size=9, fill="zeros")
    pairs, judged = preference_rows(made), binary_rows(made)
    for rows in (pairs, judged, prompt_rows(made)):
        assert [len(row["prompt_ids"]) for row in rows] == [start for start, _ in firsts]
    assert [len(row["chosen_ids"]) for row in pairs] == answers
    assert [len(row["rejected_ids"]) for row in pairs] == [*answers[1:], answers[0]]
    assert [len(row["completion_ids"]) for row in judged] == [
        answers[(i + i % 2) % len(answers)] for i in range(len(answers))
    ]
    assert sum(row["label"] for row in judged) == len(judged) / 2


@settings(max_examples=30)
@given(
    count=st.integers(2, 5),
    length=st.integers(2, 40),
    seed=st.integers(0, 2),
    fill=st.sampled_from(("text", "zeros")),
)
def test_full_rows_are_full(count, length, seed, fill):
    rows = full_prompted_rows(count, length, vocab_size=50, fill=fill, seed=seed)
    for row in rows:
        masked = row["labels"] == IGNORE
        assert masked.tolist() == [True] * (length // 2) + [False] * (length - length // 2)
        assert np.array_equal(row["labels"][~masked], row["input_ids"][~masked])
    scored = scored_rows(preference_rows(rows))
    assert {len(side) for pair in scored for side in pair.values()} == {length}
    for row in binary_rows(rows):
        assert len(row["prompt_ids"]) + len(row["completion_ids"]) == length
    assert {len(row["prompt_ids"]) for row in prompt_rows(rows)} == {length // 2}


def test_the_share_of_the_prompt_is_a_choice():
    (row,) = full_prompted_rows(1, 10, prompt_length=7, vocab_size=50)
    assert (row["labels"] == IGNORE).tolist() == [True] * 7 + [False] * 3
    for wrong in (0, 10, -1):
        with pytest.raises(ValueError, match=rf"a prompt of {wrong} tokens in a row of 10"):
            full_prompted_rows(1, 10, prompt_length=wrong, vocab_size=50)
    with pytest.raises(ValueError, match="a prompt of 0 tokens in a row of 1"):
        full_prompted_rows(1, 1, vocab_size=50)


def test_seed_and_fill_change_ids_alone():
    one, same, other, zeros = (
        preference_rows(prompted_rows("chat", vocab_size=500, seed=seed, fill=fill))
        for seed, fill in ((1, "text"), (1, "text"), (2, "text"), (1, "zeros"))
    )
    assert lists(one) == lists(same) != lists(other)
    assert not any(column.any() for row in zeros for column in row.values())
    for a, b in ((one, other), (one, zeros)):
        for x, y in zip(a, b, strict=True):
            assert {k: v.shape for k, v in x.items()} == {k: v.shape for k, v in y.items()}


@pytest.mark.parametrize("dataset", ["docstrings", "chat_like"])
def test_plain_text_is_refused(dataset):
    with pytest.raises(
        ValueError,
        match=rf"dataset='{dataset}' has no prompts; take prompt_completion or chat",
    ):
        prompted_rows(dataset, vocab_size=9, fill="zeros")
    assert dataset not in PROMPTED


@pytest.mark.parametrize("labels", [[1, 2], [-100, -100], [1, -100]])
def test_rows_without_a_prompt_or_an_answer_are_refused(labels):
    bad = {"input_ids": np.array([1, 2]), "labels": np.array(labels)}
    for make in (preference_rows, binary_rows, prompt_rows):
        with pytest.raises(ValueError, match="row 1 is not a prompt"):
            make([ROWS[0], bad])


@pytest.mark.parametrize("make", [preference_rows, binary_rows])
def test_one_row_has_no_worse_answer(make):
    with pytest.raises(ValueError, match="1 rows: a rejected answer is another row's; give 2"):
        make(ROWS[:1])
