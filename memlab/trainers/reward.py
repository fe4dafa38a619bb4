"""A reward model: the loop, plain.

Loss of a step: the sum over pairs of `losses.reward.bradley_terry`, divided by the pairs of the
whole step. A batch holds 2B rows, forwarded together: the B chosen ones first, then the B rejected.
A row's score is made of the hidden state of its last token, the only one that has seen it whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memlab.losses.reward import bradley_terry
from memlab.models.head import HeadParts
from memlab.trainers.completions import Collate, Row
from memlab.trainers.loop import Batch, Inputs, Phase, hidden_states, padded_inputs, run
from memlab.trainers.pairs import num_pairs, sides


def collate_pairs(rows: Sequence[Row], collate: Collate) -> Batch:
    """A batch of rows as `techniques.truncation.truncate_reward` gives them, perhaps of `margin`.

    `collate` is that of `techniques.pad_to_multiple` or, without padding, `padding_free`. Raises
    ValueError for a row without `chosen_ids` or `rejected_ids`, for one that is empty, and for a
    margin in some rows only.
    """
    sides = "chosen_ids", "rejected_ids"
    batch = collate([_scored(i, row, name) for name in sides for i, row in enumerate(rows)])
    margins = [row["margin"] for row in rows if "margin" in row]
    if margins and len(margins) < len(rows):
        raise ValueError(f"margin: in {len(margins)} rows of {len(rows)}; give it in each or none")
    return {**batch, "margin": torch.tensor(margins, dtype=torch.float32)} if margins else batch


def _scored(i: int, row: Row, name: str) -> dict[str, Any]:
    if name not in row or len(row[name]) == 0:
        raise ValueError(f"columns of row {i} are {sorted(row)}; give {name}, at least one token")
    return {"input_ids": row[name], "labels": row[name]}


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    center_rewards_coefficient: float | None = None,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches made by `collate_pairs`; `inputs(batch, device)` makes the
    model's arguments of one. `head` has a head (2B, D) -> (2B, 1), see `models.score`. `phase`
    names the parts of a step to whoever measures them.

    Raises ValueError for a head of several outputs, for a batch that does not hold pairs, and what
    `bradley_terry` raises.
    """
    outputs = len(cast(Tensor, head.head.weight))
    if outputs != 1:
        raise ValueError(f"head must have 1 output, a score, not {outputs}: give models.score's")
    device = next(model.parameters()).device

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Tensor, Tensor | None]]:
        margin = batch.get("margin")
        margin = None if margin is None else margin.to(device)
        return inputs(batch, device), (last_tokens(batch).to(device), margin)

    def loss_of(
        arguments: dict[str, Any], targets: tuple[Tensor, Tensor | None], pairs: int
    ) -> Tensor:
        last, margin = targets
        scores = head.head(hidden_states(head, arguments).flatten(0, 1).index_select(0, last))
        return bradley_terry(
            *sides(scores[:, 0]),
            pairs,
            margin=margin,
            center_rewards_coefficient=center_rewards_coefficient,
        )

    counted = ((step, sum(num_pairs(batch) for batch in step)) for step in steps)
    return run(model, optimizer, counted, ready=ready, loss_of=loss_of, phase=phase)


def last_tokens(batch: Batch) -> Tensor:
    """Where each row's last token stands in the flattened batch, (rows,) int64."""
    if "cu_seqlens" in batch:
        return batch["cu_seqlens"][1:].to(torch.int64) - 1
    mask = batch["attention_mask"]
    return torch.arange(len(mask)) * mask.shape[1] + mask.sum(1) - 1
