"""Group relative policy optimization: the loop, plain.

A step: `num_generations` completions of each prompt, their rewards and advantages, then one
optimizer step, or `num_iterations` of them on the same completions. Loss of a step: `losses.grpo`,
divided by the whole step's completions or tokens, as its `loss_type` says.

Example, of `prompts`, lists of token ids, all in one step, where short completions are liked::

    from functools import partial
    import torch
    from memlab.models.head import head_parts
    from memlab.techniques import chunked_logprobs
    from memlab.trainers import grpo, rollouts

    head = head_parts(model)
    roll = partial(rollouts.rollout, model, head=head, max_completion_length=16, eos_token_id=2)
    options = {"rollout": roll, "reward": lambda completions, mask: -mask.float().sum(1)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    logprobs = chunked_logprobs.token_logprobs
    for loss in grpo.train(model, optimizer, [prompts], head=head, logprobs=logprobs, **options):
        print(loss.item())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.grpo import ALONE, PER_COMPLETION, group_advantages, grpo
from memlab.losses.sequences import number, whole
from memlab.losses.sft import IGNORED
from memlab.models.head import HeadParts
from memlab.trainers.generate import tempered
from memlab.trainers.loop import Batch, HeadFunction, Phase, on_hidden, run
from memlab.trainers.online import (
    Reward,
    check_size,
    hidden_before,
    rewarded,
    split,
    token_logps,
)
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
    fused_loss: HeadFunction | None = None,
    num_generations: int = 8,
    per_device_train_batch_size: int | None = None,
    num_iterations: int = 1,
    reference: HeadParts | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    scale_rewards: str | bool = "group",
    phase: Phase = contextlib.nullcontext,
    **loss: Any,
) -> Iterator[Tensor]:
    """Run every step and yield the loss of each optimizer step, a detached scalar.

    A step is its prompts, (P,) token ids each; `rollout(prompts)` completes them, each repeated
    `num_generations` times side by side (`rollouts.rollout`), at the `temperature` that is given
    here too; `reward(completions, mask)` scores them all at once, (B, C) -> (B,) floats. Then
    micro-batches of `per_device_train_batch_size` completions are trained on (None: all at once).
    `logprobs(h, w, y, ...)` gives log-probabilities of tokens, see `loop.apply_head`. `reference`
    is used when `beta` is above 0: None is the model with its peft adapter off. `loss`: loss_type,
    epsilon, epsilon_high, max_completion_length of `losses.grpo`. `phase` also names the rollout's
    part and the reference's, which takes in the old log-probabilities of several iterations.
    `fused_loss(h, w, y, *, advantages, num_items, old_logps, ref_logps, beta, ...)` works out head
    and loss together (`techniques.liger_losses`); the log-probabilities before it are `logprobs`'.

    Raises ValueError without a reference that `beta` needs, for rewards of other shapes or infinite
    ones, and what `rollout`, `losses.grpo` or the fused loss raise; TypeError for rewards that are
    no floats. Numbers out of range are refused before a step has run.
    """
    whole("num_iterations", num_iterations, 1)
    whole("num_generations", num_generations, 2, ALONE)
    check_size(per_device_train_batch_size)
    if loss.get("max_completion_length") is not None:
        whole("max_completion_length", loss["max_completion_length"], 1)
    number("temperature", temperature, lambda t: t > 0, "above 0")
    number("beta", beta, lambda b: b >= 0, "at least 0")
    if beta:
        check(model, head, reference)

    def rolled() -> Iterator[tuple[list[Batch], int]]:
        for prompts in steps:
            with phase("rollout"):
                made = rollout([p for p in prompts for _ in range(num_generations)])
                rewards = rewarded(reward, made)
                advantages = group_advantages(rewards, num_generations, scale_rewards=scale_rewards)
                by_completion = loss.get("loss_type") in PER_COMPLETION
                items = len(made.mask) if by_completion else int(made.mask.sum())
            batches = split(
                per_device_train_batch_size,
                input_ids=made.input_ids,
                labels=made.labels,
                advantages=advantages,
            )
            with phase("reference"):
                for batch in batches:
                    if num_iterations > 1:
                        with evaluating(model):
                            batch["old_logps"] = logps_of(head, batch)
                    if beta:
                        with referring(model, head, reference) as frozen:
                            batch["ref_logps"] = logps_of(frozen, batch)
            for _ in range(num_iterations):
                yield batches, items

    def logps_of(parts: HeadParts, batch: Batch) -> Tensor:  # (B, S)
        scaled = tempered(parts, temperature)
        return token_logps(logprobs, scaled, batch["input_ids"], batch["labels"])

    def loss_of(_: dict[str, Any], batch: Batch, items: int) -> Tensor:
        labels, advantages = batch["labels"], batch["advantages"]
        options: dict[str, Any] = {"num_items": items, "beta": beta, **loss}
        options |= {name: batch.get(name) for name in ("old_logps", "ref_logps")}
        if fused_loss is None:
            return grpo(logps_of(head, batch), advantages, labels != IGNORED, **options)
        hidden = hidden_before(head, batch["input_ids"], labels)
        options["advantages"] = advantages
        return on_hidden(
            fused_loss, tempered(head, temperature), hidden, labels.flatten(), **options
        )

    return run(model, optimizer, rolled(), ready=lambda b: ({}, b), loss_of=loss_of, phase=phase)
