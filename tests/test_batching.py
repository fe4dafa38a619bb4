"""From a recipe to its micro-batches: truncated, packed, padded or flattened."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.data import lengths
from memlab.data.rows import DATASETS
from memlab.experiments import Recipe
from memlab.experiments.batching import micro_batches

IGNORE = -100


def made(count: int, *, fill: str = "zeros", **switches):
    recipe = Recipe.of(**switches)
    return micro_batches(recipe, count=count, vocab_size=9, fill=fill)  # type: ignore[arg-type]


def test_shapes_and_masks_are_pinned():
    """Metered figures stand on these: when this changes, every one of them does."""
    digest = hashlib.sha256()
    for dataset in DATASETS:
        for batch in made(8, dataset=dataset, per_device_train_batch_size=4, max_length=1024):
            digest.update(str(batch["labels"].tolist()).encode())
    assert digest.hexdigest()[:16] == "aadaabce3c4f7f17"


@settings(max_examples=20)
@given(
    dataset=st.sampled_from(DATASETS),
    size=st.integers(1, 5),
    max_length=st.integers(40, 2000),
    multiple=st.none() | st.integers(1, 70),
    seed=st.integers(0, 3),
)
def test_padded_and_padding_free_hold_the_same_tokens(dataset, size, max_length, multiple, seed):
    switches = {
        "dataset": dataset,
        "per_device_train_batch_size": size,
        "max_length": max_length,
        "pad_to_multiple_of": multiple,
        "seed": seed,
    }
    for padded, flat in zip(
        made(2, fill="text", **switches),
        made(2, fill="text", padding_free=True, **switches),
        strict=True,
    ):
        lengths_there = padded["attention_mask"].sum(1)
        slots = padded["input_ids"].numel()
        assert padded["input_ids"].shape == (size, slots // size)
        assert slots // size % (multiple or 1) == 0
        tokens = padded["input_ids"][padded["attention_mask"].bool()]
        assert torch.equal(flat["input_ids"][0, : len(tokens)], tokens)
        assert flat["input_ids"].numel() % (multiple or 1) == 0
        assert flat["cu_seqlens"][1 : size + 1].tolist() == lengths_there.cumsum(0).tolist()
        assert lengths_there.max() <= max_length


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_fill_their_bins(strategy):
    switches = {"dataset": "docstrings", "max_length": 512, "per_device_train_batch_size": 4}
    (packed,) = made(1, packing=True, packing_strategy=strategy, **switches)
    (plain,) = made(1, padding_free=True, **switches)
    tokens, slots = (packed["labels"] != IGNORE).sum(), packed["labels"].numel()
    assert slots <= 4 * 512
    assert tokens > 1.5 * (plain["labels"] != IGNORE).sum()
    if strategy == "wrapped":
        assert packed["input_ids"].shape == (4, 512)
    else:
        assert packed["input_ids"].shape[0] == 1
        assert len(packed["cu_seqlens"]) - 1 > 4  # documents, not bins
        assert packed["max_seqlen"] <= 512


def test_packing_is_global_and_loses_nothing_when_split():
    total = sum(lengths.lengths("docstrings"))
    bins = -(-total // 512)
    batches = made(
        bins,
        dataset="docstrings",
        max_length=512,
        per_device_train_batch_size=1,
        packing=True,
        packing_strategy="wrapped",
    )
    assert sum(batch["labels"].numel() for batch in batches) == total


def test_the_order_is_the_seeds():
    switches = {"dataset": "docstrings", "per_device_train_batch_size": 4}
    for packing in (False, True):
        one, same, other = (
            made(1, seed=seed, packing=packing, **switches)[0]["labels"] for seed in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_packed_rows_are_filled_up_to_a_multiple_too():
    switches = {"dataset": "docstrings", "max_length": 500, "pad_to_multiple_of": 64}
    (flat,) = made(1, packing=True, **switches)
    assert flat["input_ids"].shape[1] % 64 == 0
    (wrapped,) = made(1, packing=True, packing_strategy="wrapped", **switches)
    assert wrapped["input_ids"].shape == (4, 512)


def test_packed_rows_without_any_label_are_refused():
    with pytest.raises(ValueError, match=r"max_length=2 cuts every label.*take at least 5"):
        made(1, dataset="prompt_completion", max_length=2, packing=True)


def test_rows_wrap_around():
    total = len(lengths.rows("chat"))
    batches = made(total + 2, dataset="chat", per_device_train_batch_size=1, max_length=9000)
    for key in ("labels", "attention_mask"):
        assert torch.equal(batches[total][key], batches[0][key])
        assert torch.equal(batches[total + 1][key], batches[1][key])


def test_rows_are_whole_without_a_max_length():
    batches = made(
        512, dataset="chat", per_device_train_batch_size=2, max_length=None, padding_free=True
    )
    assert sum(b["input_ids"].numel() for b in batches) == 2 * sum(lengths.lengths("chat"))


def test_rows_without_a_label_are_dropped(monkeypatch):
    shapes = (lengths.Row(5, ((3, 5),)), lengths.Row(3, ((1, 3),)))
    monkeypatch.setattr("memlab.data.lengths.rows", lambda kind: shapes)
    switches = {"dataset": "chat", "per_device_train_batch_size": 1}
    assert [b["labels"].tolist() for b in made(3, max_length=3, **switches)] == [[[-100, 0, 0]]] * 3
    ends = made(2, max_length=3, truncation_mode="keep_end", **switches)
    assert sorted(b["labels"].tolist() for b in ends) == 2 * [[[-100, 0, 0]]]
    monkeypatch.setattr("memlab.data.lengths.rows", lambda kind: shapes[:1])
    with pytest.raises(ValueError, match=r"max_length=3 cuts every label.*take at least 4"):
        made(1, max_length=3, **switches)
