"""Rows of a data set: committed lengths and masks, filled with text or zeros."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.data import lengths
from memlab.data import rows as module
from memlab.data.rows import DATASETS, IGNORE, full_rows, rows


@pytest.mark.parametrize("dataset", lengths.KINDS)
def test_lengths_and_masks_are_the_committed_ones(dataset):
    made = rows(dataset, vocab_size=9, fill="zeros")
    for row, shape in zip(made, lengths.rows(dataset), strict=True):
        counts = np.zeros(shape.length, bool)
        for start, end in shape.spans:
            counts[start:end] = True
        assert row["input_ids"].shape == row["labels"].shape == (shape.length,)
        assert np.array_equal(row["labels"] != IGNORE, counts)


@settings(max_examples=10)
@given(
    dataset=st.sampled_from(("docstrings", "prompt_completion", "chat")),
    vocab_size=st.integers(1, 200_000),
    seed=st.integers(0, 3),
)
def test_text_and_zeros_differ_in_ids_alone(dataset, vocab_size, seed):
    text = rows(dataset, vocab_size=vocab_size, seed=seed)
    zeros = rows(dataset, vocab_size=vocab_size, fill="zeros", seed=seed)
    for a, b in zip(text, zeros, strict=True):
        counts = a["labels"] != IGNORE
        assert a["input_ids"].dtype == a["labels"].dtype == np.int64
        assert a["input_ids"].min() >= 0
        assert a["input_ids"].max() < vocab_size
        assert np.array_equal(a["labels"][counts], a["input_ids"][counts])
        assert np.array_equal(counts, b["labels"] != IGNORE)
        assert not b["input_ids"].any()


def test_full_rows_are_full():
    made = full_rows(3, 17, vocab_size=50)
    assert [row["input_ids"].shape for row in made] == [(17,)] * 3
    assert all(np.array_equal(row["labels"], row["input_ids"]) for row in made)


def test_text_is_running_prose_that_does_not_depend_on_how_much_is_asked():
    from memlab.data.tokenizer import load_tokenizer

    short = full_rows(2, 64, vocab_size=151_936)
    long = full_rows(40, 64, vocab_size=151_936)
    assert np.array_equal(short[0]["input_ids"], long[0]["input_ids"])
    prose = load_tokenizer().decode(np.concatenate([row["input_ids"] for row in long]))
    assert sum(word.isalpha() for word in prose.split()) > 200
    other = full_rows(1, 64, vocab_size=151_936, seed=1)
    assert not np.array_equal(short[0]["input_ids"], other[0]["input_ids"])


def test_zeros_load_no_tokenizer(monkeypatch):
    monkeypatch.setattr(module, "_running_text", lambda *a: pytest.fail("text was made"))
    rows("docstrings", vocab_size=9, fill="zeros")


def test_every_data_set_has_a_way_to_its_rows():
    assert ("full", *lengths.KINDS) == DATASETS


def test_rows_are_pinned():
    """Metered figures stand on these: when this changes, every one of them does."""
    digest = hashlib.sha256()
    for dataset in lengths.KINDS:
        for row in rows(dataset, vocab_size=9, fill="zeros"):
            digest.update(str(row["labels"].tolist()).encode())
    assert digest.hexdigest()[:16] == "9ffb67418de9cc67"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rows("c4", vocab_size=9), "dataset='c4' is unknown; take one of docstrings"),
        (lambda: rows("chat", vocab_size=9, fill="ones"), "fill='ones' is unknown; take text or"),
        (lambda: rows("chat", vocab_size=0), "vocab_size=0 is below 1"),
        (lambda: full_rows(0, 4, vocab_size=9), "count=0 is below 1"),
        (lambda: full_rows(1, 0, vocab_size=9), "length=0 is below 1"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
