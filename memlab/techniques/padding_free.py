"""Padding-free batches: rows laid end to end in one, each document on its own.

Computes     the loss and gradients of the padded batch of the same rows
Without      a slot for padding: B rows of t_i tokens take sum(t_i) slots, not B * max(t_i)
Memory       activations and logits, kept or at the peak: times sum(t_i) / (B * max(t_i)), but the
             rotary cos and sin, in bf16 4 * head_dim bytes a slot, were of max(t_i) slots for all;
             beside them 4 * (documents + 1) bytes of cu_seqlens and 8 a slot of position_ids
Price        none: padding's share of every product falls away; equal rows save nothing
Use          varlen_attention.register(); model.set_attn_implementation(varlen_attention.NAME)
             batch = collate(rows); model(**model_inputs(batch))
Source       Kundu et al. 2024, arXiv 2407.09105
Unlike       transformers' DataCollatorWithFlattening: a packed row brings its `seq_lengths`, and
             cu_seqlens are made once, on the host, never derived from positions in a layer.
             Apache-2.0; torch 2.11 to 2.13, transformers 5.17 to 5.24
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def collate(
    rows: Sequence[Mapping[str, Any]],
    *,
    pad_to_multiple_of: int | None = None,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """Rows of `input_ids` and `labels`, each (T,), as one row of N = sum of T slots.

    A packed row names its documents' lengths in `seq_lengths`; another row is one document. Gives
    `input_ids`, `labels` (-100 at each document's first token: its predecessor is not its own) and
    `position_ids` (from 0 in each document), all (1, N) int64, `cu_seqlens` (documents + 1,) int32
    and `max_seqlen`; no attention mask, for one of ones would let documents see each other.
    Documents of no token leave no trace. Filling up to a multiple makes a last document of padding.
    Raises ValueError for no token at all, columns missing or unequal, lengths that don't add up or
    a multiple below 1; TypeError for what is no whole number.
    """
    rows, multiple = list(rows), _multiple(pad_to_multiple_of)
    if not hasattr(pad_token_id, "__index__"):
        raise TypeError(f"pad_token_id={pad_token_id!r}: give the id of a token, an int")
    documents = [n for i, row in enumerate(rows) for n in _documents(i, row) if n]
    tokens = sum(documents)
    if not tokens:
        raise ValueError("padding_free: the batch has no token; give at least one row that has")
    if padding := -tokens % multiple:
        documents.append(padding)
    lengths = torch.tensor(documents)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    labels = _row(rows, "labels", IGNORE, padding)
    labels[starts] = IGNORE
    return {
        "input_ids": _row(rows, "input_ids", pad_token_id, padding)[None],
        "labels": labels[None],
        "position_ids": (torch.arange(tokens + padding) - starts.repeat_interleave(lengths))[None],
        "cu_seqlens": F.pad(ends, (1, 0)).to(torch.int32),
        "max_seqlen": max(documents),
    }


def _multiple(value: int | None) -> int:
    if isinstance(value, bool) or not (value is None or hasattr(value, "__index__")):
        raise TypeError(f"pad_to_multiple_of={value!r}: give an int of 1 or more, or None")
    if value is not None and value < 1:
        raise ValueError(f"pad_to_multiple_of={value}: give 1 or more, or None")
    return 1 if value is None else operator.index(value)


def _documents(i: int, row: Mapping[str, Any]) -> list[int]:
    """The lengths of row i's documents."""
    if not row.keys() >= {"input_ids", "labels"}:
        raise ValueError(f"columns of row {i} are {sorted(row)}; give input_ids, labels")
    length = len(row["input_ids"])
    if len(row["labels"]) != length:
        raise ValueError(f"row {i} has {length} input_ids and {len(row['labels'])} labels")
    lengths = row.get("seq_lengths", (length,))
    if not np.iterable(lengths):
        raise TypeError(f"seq_lengths={lengths!r} of row {i}: give a list, or leave it out")
    documents = [operator.index(n) for n in lengths]
    if sum(documents) != length or min(documents, default=0) < 0:
        raise ValueError(f"seq_lengths={documents} of row {i}: give the parts of {length} tokens")
    return documents


def _row(rows: Sequence[Mapping[str, Any]], column: str, fill: int, padding: int) -> Tensor:
    parts = [_tensor(row[column]) for row in rows]
    for i, part in enumerate(parts):
        real = not (part.is_floating_point() or part.is_complex())
        if part.ndim != 1 or not (real or part.numel() == 0):
            raise TypeError(f"{column} of row {i}: give whole numbers in one dimension")
    return torch.cat([*(part.long() for part in parts), torch.full((padding,), fill)])


def _tensor(ids: Any) -> Tensor:  # an array may run backwards, which torch does not take
    return torch.as_tensor(np.ascontiguousarray(ids) if isinstance(ids, np.ndarray) else ids)


def model_inputs(batch: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """A collated batch as a transformers model takes it, moved to `device`: call model(**this).

    All four of the names for lengths are needed: with fewer, transformers' own flash attention
    derives documents from positions in every layer, waiting for the device each time.
    """
    cu_seqlens = batch["cu_seqlens"].to(device)
    return {
        "input_ids": batch["input_ids"].to(device),
        "position_ids": batch["position_ids"].to(device),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": batch["max_seqlen"],
        "max_length_k": batch["max_seqlen"],
    }
