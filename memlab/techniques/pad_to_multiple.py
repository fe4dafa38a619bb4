"""Padding to a multiple: fewer different lengths T, each a multiple of m.

Computes  pad_sequence(rows, batch_first=True), T rounded up: m * ceil(max(len) / m) columns
Instead   of padding to the longest row (pad_to_multiple_of=None): a new shape nearly every batch
Memory    slots of a batch: B*T -> B*m*ceil(T/m), so at most B*(m-1) more; bytes of the three
          tensors: 24*B*T -> 24*B*m*ceil(T/m). Kept for backward, peak: they grow with the slots
Use       batch = collate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], pad_to_multiple_of=8)
          ids = pad(rows, 0, multiple=8, side="left")  # any other column or trainer
Price     the added slots are computed, and thrown away; what it buys is fewer shapes: kernels
          chosen or compiled anew, blocks that fit in the allocator, tiles of tensor cores filled
Source    TRL's docs, Padding Sequences to a Multiple; NVIDIA's docs, Matrix Multiplication
Unlike    TRL's collators: the same for every trainer; rows without a token stay whole numbers; 0
          and negative multiples are refused by name. Apache-2.0; torch 2.11 to 2.13
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


def collate(
    rows: Iterable[Mapping[str, Any]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_token_id: int = 0,
) -> dict[str, Tensor]:
    """One batch of rows of `input_ids` and `labels`, each (T,), padded on the right.

    Returns `input_ids`, `labels` (-100 = no loss) and `attention_mask` (1 = token), int64, (B, T).
    ValueError: no rows, columns missing or unequal, a multiple below 1. TypeError: a multiple that
    is no int, or ids that are no whole numbers.
    """
    rows = list(rows)
    for i, row in enumerate(rows):
        if not row.keys() >= {"input_ids", "labels"}:
            raise ValueError(f"columns of row {i} are {sorted(row)}; give input_ids, labels")
        if len(row["input_ids"]) != len(row["labels"]):
            sizes = f"{len(row['input_ids'])} input_ids and {len(row['labels'])} labels"
            raise ValueError(f"row {i} has {sizes}; give one label a token")
    padded = {}
    for name, value in (("input_ids", pad_token_id), ("labels", -100)):
        padded[name] = pad([row[name] for row in rows], value, multiple=pad_to_multiple_of)
        if padded[name].is_floating_point():
            raise TypeError(f"{name} of dtype {padded[name].dtype}: give whole numbers")
    lengths = torch.tensor([len(row["labels"]) for row in rows])
    tokens = torch.arange(padded["labels"].shape[1]) < lengths[:, None]
    return {**padded, "attention_mask": tokens.to(padded["labels"])}


def pad(
    rows: Iterable[Any],
    value: float,
    *,
    multiple: int | None = None,
    side: Literal["left", "right"] = "right",
) -> Tensor:
    """Rows (T,), lists, arrays or tensors, side by side in one tensor (B, T), `value` around them.

    int64, unless a row holds floats: then their dtype. A row without an entry has no say in it.
    ValueError: no rows, a row that is not 1-D, an unknown side, a multiple below 1. TypeError: a
    multiple that is no int, rows that neither int64 nor floats hold, a value that int64 does not.
    """
    if side not in ("left", "right"):
        raise ValueError(f'side={side!r}: give "left" or "right"')
    tensors = [_tensor(row) for row in rows]
    if not tensors:
        raise ValueError("rows is empty: give at least one, it may be empty itself")
    if any(t.ndim != 1 for t in tensors):
        raise ValueError(f"rows of shapes {[tuple(t.shape) for t in tensors]}: give 1-D rows")
    dtype = torch.int64
    for t in tensors:
        if len(t) and t.is_floating_point():
            dtype = t.dtype if dtype == torch.int64 else torch.promote_types(dtype, t.dtype)
    if dtype == torch.int64 and not _whole(value):
        raise TypeError(f"padding={value!r}: give a whole number of int64 around whole numbers")
    width = padded_length(max(len(t) for t in tensors), multiple)
    if not isinstance(value, Real):
        raise TypeError(f"padding={value!r}: give a number")
    fill = int(value) if dtype == torch.int64 else float(value)
    padded = torch.full((len(tensors), width), fill, dtype=dtype, device=tensors[0].device)
    for row, t in zip(padded, tensors, strict=True):
        start = width - len(t) if side == "left" else 0
        row[start : start + len(t)] = t
    return padded


def _tensor(row: Any) -> Tensor:
    try:
        tensor = row if isinstance(row, Tensor) else torch.tensor(row)
    except (TypeError, ValueError, RuntimeError) as fault:  # text, a list in a list, 2**63
        raise TypeError(f"a row of {type(row).__name__}: give 1-D numbers ({fault})") from None
    beyond = tensor.dtype == torch.uint64 and bool((tensor.to(torch.int64) < 0).any())
    if tensor.is_complex() or beyond:
        raise TypeError(f"a row of {tensor.dtype}: give numbers that int64 or a float type holds")
    return tensor


def _whole(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer())
    return whole and -(2**63) <= int(value) < 2**63


def padded_length(length: int, multiple: int | None) -> int:
    """Columns that `length` tokens take: multiple * ceil(length / multiple), None: their number.

    Raises TypeError for a multiple that is no int, ValueError for one below 1.
    """
    if multiple is None:
        return length
    if isinstance(multiple, bool) or not isinstance(multiple, int | np.integer):
        raise TypeError(f"pad_to_multiple_of={multiple!r}: give an int, or None for no multiple")
    if multiple < 1:
        raise ValueError(f"pad_to_multiple_of={multiple}: give at least 1, or None for no multiple")
    return -(-length // int(multiple)) * int(multiple)


def slots(lengths: Sequence[int], *, multiple: int | None = None) -> int:
    """Entries of the batch that rows of these lengths (B,) make: tokens and padding together.

    Raises TypeError and ValueError as `padded_length`.
    """
    return len(lengths) * padded_length(max(lengths, default=0), multiple)


def shapes(
    batches: Iterable[Sequence[int]], *, multiple: int | None = None
) -> set[tuple[int, int]]:
    """The different (B, T) among batches given as lengths: what a compiled model meets.

    Raises TypeError and ValueError as `padded_length`.
    """
    return {(len(b), padded_length(max(b, default=0), multiple)) for b in batches}
