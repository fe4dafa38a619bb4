"""Micro-batches of a training step, with shapes and label masks that are the same everywhere."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from memlab.data import lengths
from memlab.data.lengths import Row, shuffled

DATASETS = ("full", *lengths.KINDS)

IGNORE = -100


def batches(
    dataset: str,
    *,
    batch_size: int,
    max_length: int,
    count: int,
    vocab_size: int,
    fill: Literal["text", "zeros"] = "text",
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """`count` micro-batches of `batch_size` rows, int64 on the CPU.

    Each has `input_ids` (B, T), `labels` (B, T; -100 = no loss) and `attention_mask` (B, T; 1 =
    token). In "full" each row has exactly max_length tokens and every label counts. The other
    data sets take the committed rows of `memlab.data.lengths`, cut to max_length at the end,
    without those that have no label left, in an order that depends on the seed alone and starts
    over when the rows run out, padded on the right with zeros to the longest of the batch.

    Shapes and the places of labels don't depend on `fill`: "text" puts the ids of running prose
    there, modulo vocab_size, "zeros" puts 0 (no tokenizer is loaded then).

    Raises:
        ValueError: an unknown dataset or fill; batch_size, max_length, count or vocab_size
            below 1; a max_length that leaves no row with a label.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset={dataset!r} is unknown; take one of {', '.join(DATASETS)}")
    if fill not in ("text", "zeros"):
        raise ValueError(f"fill={fill!r} is unknown; take text or zeros")
    for switch, value in (
        ("batch_size", batch_size),
        ("max_length", max_length),
        ("count", count),
        ("vocab_size", vocab_size),
    ):
        if value < 1:
            raise ValueError(f"{switch}={value} is below 1; take 1 or more")

    shapes = _shapes(dataset, max_length, batch_size * count, seed)
    total = sum(row.length for row in shapes)
    if fill == "text":
        tokens = _running_text(total, seed) % vocab_size
    else:
        tokens = torch.zeros(total, dtype=torch.int64)
    filled = [
        (ids, _labels(ids, row))
        for ids, row in zip(tokens.split([row.length for row in shapes]), shapes, strict=True)
    ]
    return [collate(filled[i : i + batch_size]) for i in range(0, len(filled), batch_size)]


def collate(rows: Sequence[tuple[Tensor, Tensor]], *, pad_token_id: int = 0) -> dict[str, Tensor]:
    """Rows of ids and labels, each (T,), padded on the right to one batch as in `batches`."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = zip(*rows, strict=True)
    return {
        "input_ids": pad(list(ids), batch_first=True, padding_value=pad_token_id),
        "labels": pad(list(labels), batch_first=True, padding_value=IGNORE),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
    }


def _shapes(dataset: str, max_length: int, count: int, seed: int) -> list[Row]:
    """The `count` rows to fill, cut to max_length."""
    if dataset == "full":
        return [Row(max_length, ((0, max_length),))] * count
    kept = [cut for row in lengths.rows(dataset) if (cut := _cut(row, max_length)).spans]
    if not kept:
        first = min(row.spans[0][0] for row in lengths.rows(dataset))
        raise ValueError(
            f"max_length={max_length} cuts every label of dataset={dataset!r}; "
            f"take at least {first + 1}"
        )
    order = shuffled(kept, seed)
    return [order[i % len(order)] for i in range(count)]


def _cut(row: Row, max_length: int) -> Row:
    """The first max_length tokens of a row ("keep_start"), with the labels that are in them."""
    spans = tuple((start, min(end, max_length)) for start, end in row.spans if start < max_length)
    return Row(min(row.length, max_length), spans)


def _labels(ids: Tensor, row: Row) -> Tensor:  # (T,) -> (T,)
    labels = torch.full_like(ids, IGNORE)
    for start, end in row.spans:
        labels[start:end] = ids[start:end]
    return labels


def _running_text(count: int, seed: int) -> Tensor:  # -> (count,)
    """`count` token ids of docstrings in a seeded order, one after the other, over and over."""
    stream = _stream(seed, 1 << max(count - 1, 1).bit_length())
    return stream.repeat(-(-count // len(stream)))[:count]


@lru_cache(maxsize=4)
def _stream(seed: int, enough: int) -> Tensor:
    """The ids of whole documents until there are `enough`, or all documents."""
    from memlab.data.text import docstrings, plain_text  # zeros need no tokenizer
    from memlab.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    texts = shuffled(plain_text(docstrings()), seed)
    ids: list[int] = []
    for start in range(0, len(texts), 256):
        for document in tokenizer(texts[start : start + 256])["input_ids"]:
            ids += [*document, tokenizer.eos_token_id]
        if len(ids) >= enough:
            break
    return torch.tensor(ids)
