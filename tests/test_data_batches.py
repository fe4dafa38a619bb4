"""Batches: shapes and masks that are the same everywhere, whatever fills them."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.data import batches as module
from memlab.data import lengths
from memlab.data.batches import DATASETS, batches, collate

KINDS = st.sampled_from(DATASETS[1:])
SEEDS = st.integers(0, 3)


@settings(max_examples=30)
@given(
    dataset=st.sampled_from(DATASETS),
    batch_size=st.integers(1, 4),
    max_length=st.integers(100, 400),
    count=st.integers(1, 3),
    vocab_size=st.sampled_from([1, 100, 8192, 151_936]),
    seed=SEEDS,
)
def test_properties(dataset, batch_size, max_length, count, vocab_size, seed):
    options = {"batch_size": batch_size, "max_length": max_length, "count": count, "seed": seed}
    text = batches(dataset, vocab_size=vocab_size, **options)
    zeros = batches(dataset, vocab_size=vocab_size, fill="zeros", **options)
    assert len(text) == len(zeros) == count
    for full, empty in zip(text, zeros, strict=True):
        ids, labels, mask = full["input_ids"], full["labels"], full["attention_mask"]
        assert {t.dtype for t in full.values()} == {torch.int64}
        assert {t.shape for t in full.values()} == {ids.shape}
        rows, longest = ids.shape
        assert rows == batch_size
        assert longest == mask.sum(1).max() <= max_length
        assert 0 <= ids.min() <= ids.max() < vocab_size
        assert (mask.diff(dim=1) <= 0).all()  # padding is on the right
        assert (ids[mask == 0] == 0).all()
        valid = labels != -100
        assert valid.any(1).all()
        assert (labels[valid] == ids[valid]).all()
        assert (mask[valid] == 1).all()
        assert empty["input_ids"].count_nonzero() == 0
        assert torch.equal(empty["attention_mask"], mask)
        assert torch.equal(empty["labels"] != -100, valid)


def test_full_rows_are_full():
    (batch,) = batches("full", batch_size=3, max_length=17, count=1, vocab_size=50)
    assert batch["input_ids"].shape == (3, 17)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["attention_mask"].all()


@settings(max_examples=10)
@given(dataset=KINDS, max_length=st.integers(60, 9000), seed=SEEDS)
def test_masks_are_the_committed_ones(dataset, max_length, seed):
    expected = sorted(
        (min(row.length, max_length), sum(min(b, max_length) - a for a, b in left))
        for row in lengths.rows(dataset)
        if (left := [span for span in row.spans if span[0] < max_length])
    )
    made = batches(
        dataset,
        batch_size=1,
        max_length=max_length,
        count=len(expected),
        vocab_size=9,
        fill="zeros",
        seed=seed,
    )
    assert expected == sorted(
        (batch["labels"].shape[1], int((batch["labels"] != -100).sum())) for batch in made
    )


def test_rows_without_a_label_are_dropped_and_the_rest_kept_from_the_start(monkeypatch):
    rows = (lengths.Row(5, ((3, 5),)), lengths.Row(3, ((1, 3),)))
    monkeypatch.setattr(module.lengths, "rows", lambda kind: rows)
    (batch,) = batches("chat", batch_size=1, max_length=3, count=1, vocab_size=9, fill="zeros")
    assert batch["labels"].tolist() == [[-100, 0, 0]]  # techniques: keep_start leaves [8, 9, 10]
    made = batches("chat", batch_size=1, max_length=3, count=4, vocab_size=9, fill="zeros")
    assert len(made) == 4  # wraps around
    with pytest.raises(ValueError, match=r"max_length=1 cuts every label.*take at least 2"):
        batches("chat", batch_size=1, max_length=1, count=1, vocab_size=9, fill="zeros")


def test_rows_wrap_around():
    total = len(lengths.rows("chat"))
    made = batches(
        "chat", batch_size=1, max_length=9000, count=total + 2, vocab_size=9, fill="zeros"
    )
    for key in ("labels", "attention_mask"):
        assert torch.equal(made[total][key], made[0][key])
        assert torch.equal(made[total + 1][key], made[1][key])


def test_text_is_running_prose_that_does_not_depend_on_how_much_is_asked():
    from memlab.data.tokenizer import load_tokenizer

    options = {"batch_size": 2, "max_length": 64, "vocab_size": 151_936}
    short = batches("full", count=1, **options)
    long = batches("full", count=40, **options)
    assert torch.equal(short[0]["input_ids"], long[0]["input_ids"])
    prose = load_tokenizer().decode(long[0]["input_ids"].flatten())
    assert sum(word.isalpha() for word in prose.split()) > 20
    other = batches("full", count=1, seed=1, **options)
    assert not torch.equal(short[0]["input_ids"], other[0]["input_ids"])


def test_zeros_load_no_tokenizer(monkeypatch):
    monkeypatch.setattr(module, "_running_text", lambda *a: pytest.fail("text was made"))
    batches("docstrings", batch_size=2, max_length=64, count=2, vocab_size=9, fill="zeros")


def test_shapes_and_masks_are_pinned():
    """Metered figures stand on these: when this changes, every one of them does."""
    digest = hashlib.sha256()
    for dataset in DATASETS:
        for batch in batches(
            dataset, batch_size=4, max_length=1024, count=8, vocab_size=9, fill="zeros"
        ):
            digest.update(str(batch["labels"].tolist()).encode())
    assert digest.hexdigest()[:16] == "aadaabce3c4f7f17"


def test_collate_pads_on_the_right():
    rows = [(torch.tensor([5, 6, 7]), torch.tensor([-100, 6, 7])), (torch.tensor([8]),) * 2]
    batch = collate(rows, pad_token_id=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 3, 3]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dataset": "c4"}, "dataset='c4' is unknown; take one of full, docstrings"),
        ({"fill": "ones"}, "fill='ones' is unknown; take text or zeros"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"max_length": 0}, "max_length=0 is below 1"),
        ({"count": 0}, "count=0 is below 1"),
        ({"vocab_size": 0}, "vocab_size=0 is below 1"),
        ({"dataset": "prompt_completion", "max_length": 3}, "take at least 5"),
    ],
)
def test_bad_values_are_named(wrong, message):
    good = {"dataset": "full", "batch_size": 1, "max_length": 8, "count": 1, "vocab_size": 9}
    with pytest.raises(ValueError, match=message):
        batches(**(good | {"fill": "zeros"} | wrong))
