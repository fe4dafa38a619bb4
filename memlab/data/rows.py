"""The rows of a data set, with lengths and label masks that are the same everywhere."""

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memlab.data import lengths
from memlab.data.lengths import shuffled

DATASETS = ("full", *lengths.KINDS)

IGNORE = -100

Tokens = NDArray[np.int64]  # (T,)


def full_rows(
    count: int,
    length: int,
    *,
    vocab_size: int,
    fill: Literal["text", "zeros"] = "text",
    seed: int = 0,
) -> list[dict[str, Tokens]]:
    """`count` rows of exactly `length` tokens each, every label counting. See `rows`.

    Raises:
        ValueError: an unknown fill; count, length or vocab_size below 1.
    """
    for switch, value in (("count", count), ("length", length)):
        if value < 1:
            raise ValueError(f"{switch}={value} is below 1; take 1 or more")
    return _filled([lengths.Row(length, ((0, length),))] * count, vocab_size, fill, seed)


def rows(
    dataset: str, *, vocab_size: int, fill: Literal["text", "zeros"] = "text", seed: int = 0
) -> list[dict[str, Tokens]]:
    """The committed rows of a data set, whole: `input_ids`, `labels` (T,), int64, -100 = no loss.

    `dataset` is a kind of `memlab.data.lengths`. Lengths and the places of labels don't depend on
    `fill`: "text" puts the ids of running prose there, modulo vocab_size, from a place that `seed`
    chooses; "zeros" puts 0 (no tokenizer is loaded then).

    Raises:
        ValueError: an unknown dataset or fill; a vocab_size below 1.
    """
    if dataset not in lengths.KINDS:
        known = ", ".join(lengths.KINDS)
        raise ValueError(f"dataset={dataset!r} is unknown; take one of {known}")
    return _filled(list(lengths.rows(dataset)), vocab_size, fill, seed)


def _filled(
    shapes: list[lengths.Row], vocab_size: int, fill: str, seed: int
) -> list[dict[str, Tokens]]:
    if fill not in ("text", "zeros"):
        raise ValueError(f"fill={fill!r} is unknown; take text or zeros")
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size} is below 1; take 1 or more")
    ends = np.cumsum([shape.length for shape in shapes])
    if fill == "text":
        tokens = _running_text(int(ends[-1]), seed) % vocab_size
    else:
        tokens = np.zeros(ends[-1], np.int64)
    return [
        {"input_ids": ids, "labels": _labels(ids, shape)}
        for ids, shape in zip(np.split(tokens, ends[:-1]), shapes, strict=True)
    ]


def _labels(ids: Tokens, shape: lengths.Row) -> Tokens:
    labels = np.full_like(ids, IGNORE)
    for start, end in shape.spans:
        labels[start:end] = ids[start:end]
    return labels


def _running_text(count: int, seed: int) -> Tokens:
    """`count` token ids of docstrings in a seeded order, one after the other, over and over."""
    stream = _stream(seed, 1 << max(count - 1, 1).bit_length())
    return np.resize(stream, count)


@lru_cache(maxsize=4)
def _stream(seed: int, enough: int) -> Tokens:
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
    return np.array(ids)
