"""Generalized knowledge distillation: the loop, plain, on given completions.

Loss of a step: the sum over valid labels of the divergence of teacher and student
(`losses.gkd.generalized_jsd`), divided by the valid labels of the whole step. Completions of the
student's own are an iterator of steps that samples them: a step is asked for when it is due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.losses.gkd import generalized_jsd
from memlab.models.head import HeadParts
from memlab.trainers.loop import (
    Batch,
    Inputs,
    Phase,
    apply_head,
    frozen_head,
    hidden_states,
    padded_inputs,
    run,
    shifted,
    valid_labels,
)
from memlab.trainers.reference import evaluating


def divergence(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    teacher: dict[str, Any],
    num_items_in_batch: int,
    beta: float,
    temperature: float,
) -> Tensor:
    """The loss from all the logits of both models at once, twice (N, V) entries.

    h (N, D) and the head's w (V, D), bias (V,), logit_scale and softcap are the student's; y (N,)
    the labels; `teacher` has the same five of its own, by these names.
    """
    student_logits = _logits(h, w, bias, logit_scale, softcap)
    return generalized_jsd(
        student_logits,
        _logits(**teacher),
        y,
        num_items_in_batch,
        beta=beta,
        temperature=temperature,
    )


def _logits(
    h: Tensor, w: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None
) -> Tensor:  # (N, D), (V, D) -> (N, V), at least fp32
    z = F.linear(h, w, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    teacher: HeadParts,
    divergence: Callable[..., Tensor] = divergence,
    beta: float = 0.5,
    temperature: float = 1.0,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches, each with `input_ids` and `labels` (B, T) on any device;
    `inputs(batch, device)` makes the models' arguments of one. `divergence(h, w, y, ...)` is called
    as the one above. `phase` also names the teacher's part, "reference": it runs before the
    student, and leaves its hidden states, not its logits.

    Raises ValueError when a step holds no valid label at all, when the teacher is the student
    itself, and what `losses.gkd` raises.
    """
    if teacher.backbone is head.backbone:
        raise ValueError("teacher: the student itself; give another model, or a frozen copy")
    device = next(model.parameters()).device

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Tensor, dict[str, Any]]]:
        arguments, targets = inputs(batch, device), shifted(batch["labels"].to(device))
        with phase("reference"), evaluating(teacher.backbone):
            other = frozen_head(teacher, hidden_states(teacher, arguments))
        return arguments, (targets, other)

    def loss_of(
        arguments: dict[str, Any], targets: tuple[Tensor, dict[str, Any]], num_items: int
    ) -> Tensor:
        labels, other = targets
        return apply_head(
            divergence,
            head,
            arguments,
            labels,
            teacher=other,
            num_items_in_batch=num_items,
            beta=beta,
            temperature=temperature,
        )

    counted = ((step, valid_labels(step)) for step in steps)
    return run(model, optimizer, counted, ready=ready, loss_of=loss_of, phase=phase)
