"""REINFORCE leave-one-out: the loop, plain.

A step: `num_generations` completions of each prompt, their rewards less what they strayed from the
reference, advantages, then one optimizer step, or `num_iterations` of them on the same completions.
Loss of a step: the sum over completions of `losses.rloo`, divided by the whole step's completions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.grpo import ALONE
from memlab.losses.rloo import leave_one_out_advantages, penalised_rewards, rloo
from memlab.losses.sequences import number, whole
from memlab.losses.sft import IGNORED
from memlab.models.head import HeadParts
from memlab.trainers.generate import tempered
from memlab.trainers.loop import Batch, HeadFunction, Phase, run
from memlab.trainers.online import Reward, check_size, rewarded, split, token_logps
from memlab.trainers.reference import check, evaluating, referring
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
    num_generations: int = 2,
    per_device_train_batch_size: int | None = None,
    num_iterations: int = 1,
    reference: HeadParts | None = None,
    beta: float = 0.05,
    temperature: float = 1.0,
    normalize_advantages: bool = False,
    phase: Phase = contextlib.nullcontext,
    **loss: Any,
) -> Iterator[Tensor]:
    """Run every step and yield the loss of each optimizer step, a detached scalar.

    Arguments as for `grpo.train`. `beta` weighs the divergence from `reference` in the rewards
    (0: none is needed); `normalize_advantages` is that of `losses.rloo.leave_one_out_advantages`;
    `loss`: epsilon and epsilon_high of `losses.rloo.rloo`. The reference's phase takes in the
    log-probabilities of the policy that made the completions, as far as they are needed.

    Raises ValueError without a reference that `beta` needs, for rewards of other shapes or infinite
    ones, and what `rollout` and `losses.rloo` raise; TypeError for rewards that are no floats.
    """
    whole("num_iterations", num_iterations, 1)
    whole("num_generations", num_generations, 2, ALONE)
    check_size(per_device_train_batch_size)
    number("temperature", temperature, lambda t: t > 0, "above 0")
    number("beta", beta, lambda b: b >= 0, "at least 0")
    if beta:
        check(model, head, reference)

    def rolled() -> Iterator[tuple[list[Batch], int]]:
        for prompts in steps:
            with phase("rollout"):
                made = rollout([p for p in prompts for _ in range(num_generations)])
                rewards = rewarded(reward, made)
            columns = {"input_ids": made.input_ids, "labels": made.labels}
            with phase("reference"):
                if beta or num_iterations > 1:
                    with evaluating(model):
                        old = whole_step(head, columns)
                    columns["old_logps"] = old.sum(1)
                if beta:
                    with referring(model, head, reference) as frozen:
                        fixed = whole_step(frozen, columns)
                    counted = made.labels != IGNORED
                    rewards = penalised_rewards(rewards, old, fixed, counted, beta=beta)
                columns["advantages"] = leave_one_out_advantages(
                    rewards, num_generations, normalize_advantages=normalize_advantages
                )
            for _ in range(num_iterations):
                yield split(per_device_train_batch_size, **columns), len(rewards)

    def logps_of(parts: HeadParts, batch: Batch) -> Tensor:  # (B, S)
        scaled = tempered(parts, temperature)
        return token_logps(logprobs, scaled, batch["input_ids"], batch["labels"])

    def whole_step(parts: HeadParts, columns: dict[str, Tensor]) -> Tensor:  # a part at a time
        batches = split(per_device_train_batch_size, **columns)
        return torch.cat([logps_of(parts, batch) for batch in batches])

    def loss_of(_: dict[str, Any], batch: Batch, items: int) -> Tensor:
        logps = logps_of(head, batch).sum(1)
        return rloo(logps, batch["advantages"], items, old_logps=batch.get("old_logps"), **loss)

    return run(model, optimizer, rolled(), ready=lambda b: ({}, b), loss_of=loss_of, phase=phase)
