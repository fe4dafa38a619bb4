"""A recipe's trainer, called: its loop with the functions, the frozen model and the sizes it takes.

The same code runs real and simulated. Rewards are a stand-in, since memory does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlab.experiments import heads
from memlab.experiments.recipe import Recipe
from memlab.experiments.rules import own
from memlab.instruments.extrapolation import Extrapolation
from memlab.instruments.meter import Meter
from memlab.models.head import HeadParts, head_parts
from memlab.models.score import score_parts
from memlab.techniques import liger, padding_free
from memlab.trainers import dpo, gkd, grpo, kto, loop, online_dpo, reward, rloo, rollouts, sft

ONLINE = {"grpo": grpo.train, "rloo": rloo.train, "online_dpo": online_dpo.train}


def odd_share(completions: Tensor, mask: Tensor) -> Tensor:
    """The stand-in for a reward: which share of a completion's token ids is odd. (B, C) -> (B,)"""
    return (completions % 2 * mask).sum(1) / mask.sum(1)


@dataclass
class Method:
    """One recipe's trainer on a model that has its memory. `chunk` as in `measure`."""

    recipe: Recipe
    model: torch.nn.Module
    frozen: HeadParts | None
    chunk: int | None
    meter: Meter

    def train(
        self, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Any]]
    ) -> Iterator[Tensor]:
        """Run the steps, one loss a step."""
        loop_of: Callable[..., Iterator[Tensor]]
        options: dict[str, Any]
        match self.recipe.trainer:
            case "sft":
                options = {"head_loss": heads.head_loss(self.recipe, self.chunk)} | self._inputs
                loop_of = sft.train
            case "dpo" | "kto" as name:
                options = self._compared | self._inputs
                loop_of = dpo.train if name == "dpo" else kto.train
            case "reward":
                options, loop_of = self._inputs, reward.train
            case "gkd":
                options = {
                    "teacher": self.frozen,
                    "divergence": heads.divergence(self.recipe, self.chunk),
                    "beta": own(self.recipe, "beta"),
                } | self._inputs
                loop_of = gkd.train
            case name:
                options, loop_of = self._compared | self._sampled, ONLINE[name]
        layers = liger.kernels(self.model) if self.recipe.use_liger_kernel else nullcontext()
        with layers:
            yield from loop_of(
                self.model, optimizer, steps, head=self._head, phase=self.meter.phase, **options
            )

    @property
    def _head(self) -> HeadParts:
        return (score_parts if self.recipe.trainer == "reward" else head_parts)(self.model)

    @property
    def _inputs(self) -> dict[str, Any]:
        flattened = self.recipe.flattened
        return {"inputs": padding_free.model_inputs if flattened else loop.padded_inputs}

    @property
    def _compared(self) -> dict[str, Any]:
        """For the trainers that compare log-probabilities with those of a reference."""
        options = {
            "logprobs": heads.logprobs(self.recipe, self.chunk),
            "reference": self.frozen,
            "beta": own(self.recipe, "beta"),
        }
        if self.recipe.use_liger_kernel:
            options["fused_loss"] = heads.LIGER_LOSSES[self.recipe.trainer]
        return options

    @property
    def _sampled(self) -> dict[str, Any]:
        """For the trainers that sample completions, of `max_completion_length` tokens each."""
        recipe = self.recipe
        roll = partial(
            rollouts.rollout,
            self.model,
            head=self._head,
            max_completion_length=own(recipe, "max_completion_length"),
            max_length=recipe.max_length if recipe.trainer == "online_dpo" else None,
            pad_to_multiple_of=recipe.pad_to_multiple_of,
            label=self.meter.label,
            take=Extrapolation(self.meter),
        )
        options = {
            "rollout": roll,
            "reward": odd_share,
            "per_device_train_batch_size": recipe.per_device_train_batch_size,
        }
        generations = own(recipe, "num_generations")
        return options | ({"num_generations": generations} if generations else {})
