"""Padding-free batches: rows laid end to end in one, each document on its own.

Computes     the loss and gradients of the padded batch of the same rows
Without      a slot for padding: B rows of t_i tokens take sum(t_i) slots, not B * max(t_i)
Memory       every activation and logit, kept or at the peak: times sum(t_i) / (B * max(t_i));
             beside them 4 * (documents + 1) bytes of cu_seqlens and 8 a slot of position_ids
Price        none: padding's share of every product falls away; equal rows save nothing
Use          varlen_attention.register(); model.set_attn_implementation(varlen_attention.NAME)
             batch = collate(rows); model(**model_inputs(batch))
Source       Kundu et al. 2024, arXiv 2407.09105
Unlike       transformers' DataCollatorWithFlattening: a packed row brings its `seq_lengths`, and
             cu_seqlens are made once, on the host, never derived from positions in a layer.
             Apache-2.0; torch 2.11 to 2.13, transformers 5.17 to 5.24
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
    Raises ValueError for no token at all, columns of unequal length, or a multiple below 1.
    """
    if pad_to_multiple_of is not None and (
        type(pad_to_multiple_of) is not int or pad_to_multiple_of < 1
    ):
        raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of!r}: give an int of 1 or more")
    documents = [int(n) for row in rows for n in _documents(row) if n]
    tokens = sum(documents)
    if not tokens:
        raise ValueError("padding_free: the batch has no token; give at least one row that has")
    if padding := -tokens % (pad_to_multiple_of or 1):
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


def _documents(row: Mapping[str, Any]) -> Sequence[int]:
    length = len(row["input_ids"])
    if len(row["labels"]) != length:
        raise ValueError(f"labels: {len(row['labels'])} of them in a row of {length} input_ids")
    documents = row.get("seq_lengths", (length,))
    if sum(documents) != length:
        raise ValueError(f"seq_lengths={list(documents)}: a row of {length} tokens must add up")
    return documents


def _row(rows: Sequence[Mapping[str, Any]], column: str, fill: int, padding: int) -> Tensor:
    parts = [torch.as_tensor(row[column], dtype=torch.int64) for row in rows]  # (N,)
    return torch.cat([*parts, torch.full((padding,), fill)])


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
