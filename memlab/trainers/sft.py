"""Supervised fine-tuning: the loop, plain.

Loss of a step: the sum over valid labels of -log p(label), divided by the number of valid labels
of the whole step, all micro-batches together; never a mean of means. Techniques arrive as
arguments: the head's loss as a function, checkpointing as a switch of the model, batches already
truncated, padded or packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.models.head import HeadParts
from memlab.trainers.loop import (
    Batch,
    HeadFunction,
    Inputs,
    Phase,
    apply_head,
    padded_inputs,
    run,
    shifted,
    valid_labels,
)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    head_loss: HeadFunction,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches, each with `input_ids` and `labels` (B, T) on any device;
    `inputs(batch, device)` makes the model's arguments of one. `head_loss(h, w, y, ...)` is
    one of `techniques.chunked_loss`; it gets the hidden states (N, D), the head's weight (V, D) and
    the targets (N,). `phase` names the parts of a step to whoever measures them.

    Raises ValueError when a step holds no valid label at all.
    """
    device = next(model.parameters()).device

    def ready(batch: Batch) -> tuple[dict[str, Any], Tensor]:
        return inputs(batch, device), shifted(batch["labels"].to(device))

    def loss_of(arguments: dict[str, Any], targets: Tensor, num_items: int) -> Tensor:
        return apply_head(head_loss, head, arguments, targets, num_items_in_batch=num_items)

    counted = ((step, valid_labels(step)) for step in steps)
    return run(model, optimizer, counted, ready=ready, loss_of=loss_of, phase=phase)
