"""Supervised fine-tuning: the loop, plain.

Loss of a step: the sum over valid labels of -log p(label), divided by the number of valid labels
of the whole step, all micro-batches together; never a mean of means. Techniques arrive as
arguments: the head's loss as a function, checkpointing as a switch of the model, batches already
truncated, padded or packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.models.head import HeadParts

Batch = dict[str, Any]
Phase = Callable[[str], contextlib.AbstractContextManager[object]]


def padded_inputs(batch: Batch, device: torch.device) -> dict[str, Any]:
    """What the model takes of rows padded on the right: causal attention needs no mask for them."""
    return {"input_ids": batch["input_ids"].to(device)}


def shifted(labels: Tensor) -> Tensor:  # (B, T) -> (B*T,)
    """Targets of a causal model: position t learns label t+1, the last one none (-100)."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    head_loss: Callable[..., Tensor],
    inputs: Callable[[Batch, torch.device], dict[str, Any]] = padded_inputs,
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
    for micro_batches in steps:
        num_items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        if num_items == 0:
            raise ValueError(
                "labels: all -100 in every micro-batch of a step; give rows with completions"
            )
        step_loss = torch.zeros((), device=device)
        for batch in micro_batches:
            arguments, targets = inputs(batch, device), shifted(batch["labels"].to(device))
            with phase("forward"):
                hidden = head.backbone(**arguments, use_cache=False).last_hidden_state  # (B, T, D)
                loss = head_loss(
                    hidden.flatten(0, 1),
                    head.head.weight,
                    targets,
                    num_items_in_batch=num_items,
                    bias=head.head.bias,
                    logit_scale=head.logit_scale,
                    softcap=head.softcap,
                )
                del hidden  # what backward needs is saved; the name would keep more alive
            with phase("backward"):
                loss.backward()
            step_loss += loss.detach()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step_loss
