"""Online direct preference optimization: the loop, plain.

A step: two completions of each prompt; the one with the higher reward is chosen (the first, when
they are equal), the other rejected. Then one optimizer step on the pairs. Loss of a step: the sum
over pairs of `losses.dpo`, divided by the pairs of the whole step.
Guo et al. 2024, arXiv 2402.04792.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.dpo import dpo
from memlab.losses.sft import IGNORED
from memlab.models.head import HeadParts
from memlab.trainers.dpo import sides
from memlab.trainers.loop import Batch, HeadFunction, Phase, run
from memlab.trainers.reference import check, referring
from memlab.trainers.rollouts import Reward, Roll, rewarded, split, token_logps

SIDES = ("chosen_", "rejected_")


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Any]],
    *,
    head: HeadParts,
    rollout: Roll,
    reward: Reward,
    logprobs: HeadFunction,
    per_device_train_batch_size: int | None = None,
    reference: HeadParts | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is its prompts, (P,) token ids each; `rollout(prompts)` completes them, each twice side
    by side (`rollouts.rollout`); `reward(completions, mask)` scores all of them at once, (B, C) ->
    (B,) floats, a NaN counting as the lowest. Then micro-batches of `per_device_train_batch_size`
    pairs are trained on (None: all at once), 2B rows each, the B chosen ones first. `logprobs` and
    `reference` are those of `dpo.train`, `loss_type`, `beta` and `label_smoothing` those of
    `losses.dpo`. As in TRL, the temperature of the rollout does not scale the logits of the loss.
    `phase` also names the rollout's part and the reference's.

    Raises ValueError without a reference, for rewards of other shapes, and what `rollout` and
    `losses.dpo` raise; TypeError for rewards that are no floats.
    """
    check(model, head, reference)

    def rolled() -> Iterator[tuple[list[Batch], int]]:
        for prompts in steps:
            with phase("rollout"):
                made = rollout([prompt for prompt in prompts for _ in range(2)])
                scores = rewarded(reward, made).nan_to_num(nan=-torch.inf).view(-1, 2)
                first = torch.arange(0, len(made.mask), 2, device=made.mask.device)
                swapped = (scores[:, 0] < scores[:, 1]).long()
                rows = dict(zip(SIDES, (first + swapped, first + 1 - swapped), strict=True))
                columns = {
                    f"{side}{name}": column[at]
                    for side, at in rows.items()
                    for name, column in (("input_ids", made.input_ids), ("labels", made.labels))
                }
            yield split(per_device_train_batch_size, **columns), len(first)

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
        ids, labels = (
            torch.cat([batch[f"{side}{name}"] for side in SIDES])
            for name in ("input_ids", "labels")
        )
        with phase("reference"), referring(model, head, reference) as frozen:
            fixed = token_logps(logprobs, frozen, ids, labels).sum(1)
        return {}, (ids, labels, fixed)

    def loss_of(_: dict[str, Any], batch: tuple[Tensor, Tensor, Tensor], pairs: int) -> Tensor:
        ids, labels, fixed = batch
        logps = token_logps(logprobs, head, ids, labels).sum(1)  # (2B,)
        chosen_lengths, rejected_lengths = sides((labels != IGNORED).sum(1))
        return dpo(
            *sides(logps),
            *sides(fixed),
            pairs,
            loss_type=loss_type,
            beta=beta,
            label_smoothing=label_smoothing,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )

    return run(model, optimizer, rolled(), ready=ready, loss_of=loss_of, phase=phase)
