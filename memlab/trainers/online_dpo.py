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
from memlab.trainers.loop import Batch, HeadFunction, Phase, run
from memlab.trainers.online import Reward, check_size, rewarded, split, token_logps
from memlab.trainers.reference import check, referring
from memlab.trainers.rollouts import Roll


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
    pairs are trained on (None: all at once), a pair's two rows forwarded together. `logprobs` and
    `reference` are those of `dpo.train`, `loss_type`, `beta` and `label_smoothing` those of
    `losses.dpo`. As in TRL, the temperature of the rollout does not scale the logits of the loss.
    `phase` also names the rollout's part and the reference's.

    Raises ValueError without a reference, for rewards of other shapes or infinite ones, and what
    `rollout` and `losses.dpo` raise; TypeError for rewards that are no floats.
    """
    check(model, head, reference)
    check_size(per_device_train_batch_size)

    def rolled() -> Iterator[tuple[list[Batch], int]]:
        for prompts in steps:
            with phase("rollout"):
                made = rollout([prompt for prompt in prompts for _ in range(2)])
                scores = rewarded(reward, made).nan_to_num(nan=-torch.inf).view(-1, 2)
                columns = {
                    "input_ids": made.input_ids.unflatten(0, (-1, 2)),
                    "labels": made.labels.unflatten(0, (-1, 2)),
                    "chosen": (scores[:, :1] < scores[:, 1:]).long(),
                }
            yield split(per_device_train_batch_size, **columns), len(scores)

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor, Tensor]]:
        ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
        with phase("reference"), referring(model, head, reference) as frozen:
            fixed = token_logps(logprobs, frozen, ids, labels).sum(1)
        return {}, (ids, labels, fixed, batch["chosen"])

    def loss_of(
        _: dict[str, Any], batch: tuple[Tensor, Tensor, Tensor, Tensor], pairs: int
    ) -> Tensor:
        ids, labels, fixed, chosen = batch
        logps = token_logps(logprobs, head, ids, labels).sum(1)  # (2B,)
        chosen_lengths, rejected_lengths = sides((labels != IGNORED).sum(1), chosen)
        return dpo(
            *sides(logps, chosen),
            *sides(fixed, chosen),
            pairs,
            loss_type=loss_type,
            beta=beta,
            label_smoothing=label_smoothing,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )

    return run(model, optimizer, rolled(), ready=ready, loss_of=loss_of, phase=phase)


def sides(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of two rows a pair (2B,), what belongs to the chosen one, 0 or 1 (B, 1), and to the other."""
    pairs = rows.view(-1, 2)
    return pairs.gather(1, chosen)[:, 0], pairs.gather(1, 1 - chosen)[:, 0]
