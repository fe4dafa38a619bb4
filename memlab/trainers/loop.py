"""What the trainers share: the micro-batches of a step, forward and backward, then the optimizer.

A loss is a sum over what the whole step holds (labels, pairs, rows), divided by the number of it in
the whole step, never a mean of means: how a step is split into micro-batches changes nothing. What
can't be put together from parts (a KL estimate, advantages) is worked out before the split, beside
the divisor: see `run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.models.head import HeadParts

Batch = dict[str, Any]
Inputs = Callable[[Batch, torch.device], dict[str, Any]]
Phase = Callable[[str], contextlib.AbstractContextManager[object]]
HeadFunction = Callable[..., Tensor]  # see `apply_head`
Targets = TypeVar("Targets")
Whole = TypeVar("Whole")


def run(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[tuple[Sequence[Batch], Whole]],
    *,
    ready: Callable[[Batch], tuple[dict[str, Any], Targets]],
    loss_of: Callable[[dict[str, Any], Targets, Whole], Tensor],
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device, at least fp32.

    A step is its micro-batches and what is known of all of them together. It is asked for when the
    one before has ended, so an iterator can make it with the weights as they are then (rollouts).
    `ready(batch)` gives the model's arguments and the targets of a micro-batch, on the device, and
    may run a reference model; `loss_of(arguments, targets, whole)` is its part of the step's loss.
    `phase` names the parts of a step to whoever measures them: forward, backward, optimizer.
    Raises ValueError for float16 weights with an optimizer whose eps is 0 in float16.
    """
    _check_half(optimizer)
    first = next(model.parameters())
    dtype = torch.promote_types(first.dtype, torch.float32)  # as the losses
    for micro_batches, whole in steps:
        optimizer.zero_grad(set_to_none=True)  # of what the caller left there
        step_loss = torch.zeros((), dtype=dtype, device=first.device)
        for batch in micro_batches:
            arguments, targets = ready(batch)
            with phase("forward"):
                loss = loss_of(arguments, targets, whole)
            with phase("backward"):
                loss.backward()
            step_loss += loss.detach()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield step_loss


def _check_half(optimizer: torch.optim.Optimizer) -> None:
    """Adam keeps its states in the weights' dtype, and divides by sqrt(mean of g^2) + eps."""
    for group in optimizer.param_groups:
        half = any(p.dtype == torch.float16 for p in group["params"])
        eps = group.get("eps")
        if half and isinstance(eps, float) and torch.tensor(eps, dtype=torch.float16) == 0:
            raise ValueError(
                f"eps={eps} with weights of float16: it is 0 there, as are the squares of small "
                "gradients: 0 / 0 is a NaN; give weights of bfloat16 or float32, or eps=1e-4"
            )


def padded_inputs(batch: Batch, device: torch.device) -> dict[str, Any]:
    """What the model takes of rows padded on the right: causal attention needs no mask for them."""
    return {"input_ids": batch["input_ids"].to(device)}


def shifted(labels: Tensor) -> Tensor:  # (B, T) -> (B*T,)
    """Targets of a causal model: position t learns label t+1, the last one none (-100)."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()


def valid_labels(step: Sequence[Batch]) -> int:
    """The labels of a whole step that something is learnt from; ValueError where there is none."""
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
    if count == 0:
        raise ValueError(
            "labels: all -100 in every micro-batch of a step; give rows with completions, cut later"
        )
    return count


def hidden_states(head: HeadParts, arguments: dict[str, Any]) -> Tensor:
    """What the decoder gives the head: (B, T, D), of a causal pass without a cache."""
    return head.backbone(**arguments, use_cache=False).last_hidden_state


def apply_head(
    function: HeadFunction,
    head: HeadParts,
    arguments: dict[str, Any],
    targets: Tensor,
    **options: Any,
) -> Tensor:
    """`function(h, w, y, *, bias, logit_scale, softcap, **options)` of what the decoder gives.

    h (N, D) are the hidden states, w (V, D) the head's weight, y (N,) the targets. From them it
    makes a loss (), or the log-probability of each target (N,), 0 where that is -100; from all the
    logits at once, or a chunk at a time.
    """
    return on_hidden(function, head, hidden_states(head, arguments), targets, **options)


def on_hidden(
    function: HeadFunction, head: HeadParts, hidden: Tensor, targets: Tensor, **options: Any
) -> Tensor:
    """As `apply_head`, of hidden states (B, T, D) that are there already; targets (B*T,)."""
    return function(
        hidden.flatten(0, 1),
        head.head.weight,
        targets,
        bias=head.head.bias,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        **options,
    )


def frozen_head(head: HeadParts, hidden: Tensor) -> dict[str, Any]:
    """What a loss over two models takes of the one that is not trained, without gradient.

    h (N, D) of its hidden states (B, T, D), the w (V, D) and bias (V,) of its head, logit_scale and
    softcap, by these names.
    """
    weights: Any = head.head
    return {
        "h": hidden.detach().flatten(0, 1),
        "w": weights.weight.detach(),
        "bias": None if weights.bias is None else weights.bias.detach(),
        "logit_scale": head.logit_scale,
        "softcap": head.softcap,
    }
