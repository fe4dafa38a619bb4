"""Kahneman-Tversky optimization: the loop, plain.

Loss of a step: the sum over rows of `losses.kto`, divided by the rows of the whole step. What each
row's gain is compared with, an estimate of KL(policy || reference), is a mean over the whole step,
cut off at 0: it can't be put together from micro-batches, so it is worked out before the split, by
both models, from prompts beside other rows' completions. (TRL takes a micro-batch's own.)

Example, of `rows` with `prompt_ids`, `completion_ids` and `label`, a step of one micro-batch::

    import torch
    from memlab.models.head import head_parts
    from memlab.techniques import chunked_logprobs, pad_to_multiple, truncation
    from memlab.trainers import kto, reference

    rows = truncation.truncate_kto(kto.mismatched(rows), 512)
    batch = kto.collate_rows(rows, pad_to_multiple.collate)
    options = {"head": head_parts(model), "reference": reference.frozen_copy(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    logprobs = chunked_logprobs.token_logprobs
    for loss in kto.train(model, optimizer, [[batch]], logprobs=logprobs, **options):
        print(loss.item())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.kto import kl_estimate, kto
from memlab.models.head import HeadParts
from memlab.trainers.completions import Completions, completion_logps, fused, referred
from memlab.trainers.loop import Batch, HeadFunction, Inputs, Phase, padded_inputs, run
from memlab.trainers.reference import check, evaluating, referring
from memlab.trainers.unpaired import collate_rows, mismatched, mismatched_part

__all__ = ["collate_rows", "mismatched", "train"]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    logprobs: HeadFunction,
    fused_loss: HeadFunction | None = None,
    reference: HeadParts | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches made by `collate_rows`, of at least 2 rows together;
    `inputs(batch, device)` makes the model's arguments of one. `logprobs(h, w, y, ...)` gives
    log-probabilities of tokens, see `loop.apply_head`. `reference` None is the model with its peft
    adapter off. `beta` and the weights are those of `losses.kto`. `phase` also names the part of
    the reference and of the KL estimate, "reference". `fused_loss(h, w, y, *, rows, reference,
    desirable, kl, num_rows, ...)` works out head and loss together (`techniques.liger_losses`); the
    reference then leaves its hidden states, and `logprobs` is for the KL estimate alone.

    Raises ValueError without a reference, for a step of one row, and what `losses.kto` or the fused
    loss raises, the latter for rows laid end to end too.
    """
    check(model, head, reference)
    device = next(model.parameters()).device

    def reference_logps(arguments: dict[str, Any], completions: Completions) -> Tensor:
        with referring(model, head, reference) as frozen:
            return completion_logps(logprobs, frozen, arguments, completions)

    def whole(step: Sequence[Batch]) -> tuple[Tensor, int]:
        policy, old = [], []
        with phase("reference"):
            for batch in step:
                others, rows = mismatched_part(batch), len(batch["desirable"])
                arguments, completions = inputs(others, device), Completions.of(others, device)
                with evaluating(model):
                    logps = completion_logps(logprobs, head, arguments, completions)
                policy.append(logps[:rows])
                old.append(reference_logps(arguments, completions)[:rows])
            return kl_estimate(torch.cat(policy), torch.cat(old)), sum(map(len, policy))

    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    options: dict[str, Any] = {"beta": beta, **weights}

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Completions, Any, Tensor]]:
        arguments, completions = inputs(batch, device), Completions.of(batch, device)
        with phase("reference"), referring(model, head, reference) as frozen:
            found = referred(logprobs, fused_loss, frozen, arguments, completions)
        return arguments, (completions, found, batch["desirable"].to(device))

    def loss_of(
        arguments: dict[str, Any],
        targets: tuple[Completions, Any, Tensor],
        whole: tuple[Tensor, int],
    ) -> Tensor:
        (completions, found, desirable), (kl, num_rows) = targets, whole
        if fused_loss is not None:
            known = {"reference": found, "desirable": desirable, "kl": kl, "num_rows": num_rows}
            return fused(fused_loss, head, arguments, completions, **known, **options)
        logps = completion_logps(logprobs, head, arguments, completions)
        rows = len(desirable)  # a tail of padding may come after them
        return kto(logps[:rows], found[:rows], desirable, kl, num_rows, **options)

    known = ((step, whole(step)) for step in steps)
    return run(model, optimizer, known, ready=ready, loss_of=loss_of, phase=phase)
