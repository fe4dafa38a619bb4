"""Completions: rows of prompt and answer, of which only the answer's tokens count.

A batch of them is what a collate function makes of `labelled` rows: `input_ids` and `labels`
(B, T), padded on the right, or (1, N), laid end to end, with `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memlab.losses.sft import IGNORED
from memlab.models.head import HeadParts
from memlab.trainers.loop import (
    Batch,
    HeadFunction,
    apply_head,
    frozen_head,
    hidden_states,
    shifted,
)

Row = Mapping[str, Any]
Collate = Callable[[Sequence[Row]], Batch]


def labelled(rows: Sequence[Row], prefix: str = "") -> list[dict[str, Tensor]]:
    """`input_ids` and `labels` (T,) of `{prefix}input_ids` and `{prefix}completion_mask`, each row.

    The label of a token of the prompt is -100. Raises ValueError for missing columns, unequal
    lengths or no token of a completion: without labels a row of SFT or GKD adds nothing to the
    loss, but here its 0 would be judged as if it were log p(completion). (TRL lets it.)
    """
    names, made = (f"{prefix}input_ids", f"{prefix}completion_mask"), []
    for i, row in enumerate(rows):
        if not row.keys() >= {*names}:
            raise ValueError(f"columns of row {i} are {sorted(row)}; give {' and '.join(names)}")
        ids = torch.as_tensor(row[names[0]], dtype=torch.int64)
        mask = torch.as_tensor(row[names[1]], dtype=torch.bool)
        if ids.ndim != 1 or ids.shape != mask.shape:
            shapes = f"{tuple(ids.shape)} and {tuple(mask.shape)}"
            raise ValueError(f"{' and '.join(names)} of row {i}: one a token, not {shapes}")
        if not mask.any():
            raise ValueError(f"{names[1]} of row {i} has no 1: give a completion, or drop the row")
        made.append({"input_ids": ids, "labels": ids.masked_fill(~mask, IGNORED)})
    return made


def num_rows(batch: Batch) -> int:
    """Rows of a batch; laid end to end, a tail of padding counts as one more."""
    flattened = "cu_seqlens" in batch
    return len(batch["cu_seqlens"]) - 1 if flattened else len(batch["input_ids"])


@dataclass(frozen=True)
class Completions:
    """The targets of a batch on a device, and the row that each belongs to."""

    targets: Tensor  # (N,) int64, -100 where there is no loss
    row_of: Tensor | None  # (N,) int64; None: N / rows of them each, one row after the other
    rows: int

    @staticmethod
    def of(batch: Batch, device: torch.device) -> Completions:
        rows, row_of = num_rows(batch), None
        if "cu_seqlens" in batch:
            ends = batch["cu_seqlens"][1:].to(torch.int64)
            positions = torch.arange(batch["labels"].shape[1])
            row_of = torch.bucketize(positions, ends, right=True).to(device)
        return Completions(shifted(batch["labels"].to(device)), row_of, rows)

    def sums(self, values: Tensor) -> Tensor:  # (N,) -> (rows,)
        if self.row_of is None:
            return values.view(self.rows, -1).sum(1)
        return values.new_zeros(self.rows).index_add(0, self.row_of, values)

    def lengths(self) -> Tensor:  # (rows,) int64: the targets that count
        return self.sums((self.targets != IGNORED).to(torch.int64))


def completion_logps(
    logprobs: HeadFunction, head: HeadParts, arguments: dict[str, Any], completions: Completions
) -> Tensor:
    """log p(completion | prompt) of each row (rows,): the sum of its tokens', at least fp32.

    `logprobs` gives those of the tokens, see `loop.apply_head`.
    """
    return completions.sums(apply_head(logprobs, head, arguments, completions.targets))


def referred(
    logprobs: HeadFunction,
    fused_loss: HeadFunction | None,
    frozen: HeadParts,
    arguments: dict[str, Any],
    completions: Completions,
) -> Any:
    """What a loss takes of the reference: `completion_logps`, or for a fused one its hidden states.

    The latter as `loop.frozen_head` has them.
    """
    if fused_loss is None:
        return completion_logps(logprobs, frozen, arguments, completions)
    return frozen_head(frozen, hidden_states(frozen, arguments))


def fused(
    fused_loss: HeadFunction,
    head: HeadParts,
    arguments: dict[str, Any],
    completions: Completions,
    **options: Any,
) -> Tensor:
    """`fused_loss(h, w, y, *, rows, ...)`, head and loss of `rows` rows of as many targets each.

    h (N, D) and y (N,) as in `loop.apply_head`. Raises ValueError for rows laid end to end.
    """
    if completions.row_of is not None:
        raise ValueError(
            "padding_free=True with a fused loss: it takes rows of one length; give "
            "padding_free=False, or no fused loss"
        )
    rows = completions.rows
    return apply_head(fused_loss, head, arguments, completions.targets, rows=rows, **options)
