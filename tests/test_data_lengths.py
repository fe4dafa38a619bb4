"""The committed lengths and label masks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.data import lengths

COUNTS = {"docstrings": 1024, "prompt_completion": 1024, "chat": 512, "chat_like": 4096}


@pytest.mark.parametrize("kind", lengths.KINDS)
def test_rows_are_consistent(kind):
    rows = lengths.rows(kind)
    assert len(rows) == COUNTS[kind]
    for row in rows:
        edges = [edge for span in row.spans for edge in span]
        assert row.spans
        assert edges[0] >= 0
        assert edges[-1] <= row.length <= 8192
        assert edges == sorted(set(edges))  # spans are not empty, do not touch, and are in order
    assert lengths.lengths(kind) == tuple(row.length for row in rows)


@pytest.mark.parametrize("kind", ["docstrings", "chat_like"])
def test_every_label_counts_in_plain_text(kind):
    assert all(row.spans == ((0, row.length),) for row in lengths.rows(kind))


def test_completions_reach_the_end_after_a_prompt():
    for row in lengths.rows("prompt_completion"):
        ((start, end),) = row.spans
        assert 0 < start < end == row.length


def test_chats_have_up_to_four_answers_and_end_in_a_newline():
    rows = lengths.rows("chat")
    assert {len(row.spans) for row in rows} == {1, 2, 3, 4}
    assert all(row.spans[0][0] > 0 and row.spans[-1][1] == row.length - 1 for row in rows)


def test_chat_like_is_its_formula_and_has_a_heavy_tail():
    drawn = lengths.lengths("chat_like")
    assert list(drawn) == lengths.chat_like(4096)
    ordered = sorted(drawn)
    assert 350 < ordered[2048] < 500
    assert ordered[-1] == 8192
    assert sum(ordered[-205:]) > 0.25 * sum(ordered)  # 5 % of the rows hold a quarter of tokens
    assert lengths.chat_like(9, seed=1) != lengths.chat_like(9)


def test_file_is_small_and_as_written():
    stored = (lengths.files("memlab.data") / "lengths.json").read_text("utf-8")
    assert len(stored) < 64_000
    parsed = json.loads(stored)
    assert set(parsed) == {"source", *lengths.KINDS}
    assert lengths._one_line_a_kind(parsed) == stored


@given(st.lists(st.booleans(), min_size=1, max_size=20).filter(any))
def test_stored_masks_come_back(mask):
    row = lengths._row(lengths._item(mask))
    assert row.length == len(mask)
    assert [any(a <= i < b for a, b in row.spans) for i in range(len(mask))] == mask


def test_order_is_pinned():
    assert lengths.shuffled("abcdef", 0) == ["d", "f", "c", "e", "b", "a"]


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind='prose' is unknown; take one of docstrings"):
        lengths.rows("prose")
