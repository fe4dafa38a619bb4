"""Which technique goes with which trainer, and why not: one table, for recipes and for readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlab.experiments.recipe import Recipe

TRAINERS = {
    "sft": "SFT",
    "dpo": "DPO",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "online_dpo": "Online DPO",
    "gkd": "GKD",
}
ONLINE = ("grpo", "rloo", "online_dpo")  # they learn from completions that they sample
IN_PAIRS = ("dpo", "reward", "online_dpo")  # two rows where others have one

OWN: dict[str, dict[str, Any]] = {  # TRL's value of a switch that a recipe leaves at None
    "dpo": {"beta": 0.1},
    "kto": {"beta": 0.1},
    "grpo": {"beta": 0.0, "max_completion_length": 512, "num_generations": 8},
    "rloo": {"beta": 0.05, "max_completion_length": 512, "num_generations": 2},
    "online_dpo": {"beta": 0.1, "max_completion_length": 64},
    "gkd": {"beta": 0.5},
}
OF_SOME = {  # the trainers that have a switch which others don't
    "truncation_mode": ("sft", "dpo"),
    "beta": tuple(OWN),
    "max_completion_length": ONLINE,
    "num_generations": ("grpo", "rloo"),
    "teacher_model": ("gkd",),
}


@dataclass(frozen=True)
class Technique:
    """A row of the table. Trainers are by the names that a recipe gives them."""

    title: str
    setting: str  # how a recipe switches it on
    instead: str  # and what to give where it can't be
    is_on: Callable[[Recipe], bool]
    never: Mapping[str, str] = field(default_factory=dict)  # trainer -> why it is refused there
    idle: Mapping[str, str] = field(default_factory=dict)  # trainer -> why it changes nothing

    def cell(self, trainer: str) -> str:
        """ "yes", "-" where it is refused, "n/a" where it has nothing to do."""
        return "-" if trainer in self.never else "n/a" if trainer in self.idle else "yes"


_PAIRS = "the two answers of a pair are told apart by their rows, which packing would join"
_SAMPLED = "its rows are sampled in every step, when there is no data set left to pack"
_ROLLED = "its completions come out of a KV cache as padded rows"
_NO_WORDS = "its head gives one score a row, and no logits over words"

TECHNIQUES = (
    Technique(
        "truncation", "max_length=...", "max_length=None", lambda r: r.max_length is not None
    ),
    Technique(
        "pad to a multiple",
        "pad_to_multiple_of=...",
        "pad_to_multiple_of=None",
        lambda r: r.pad_to_multiple_of is not None,
    ),
    Technique(
        "gradient checkpointing",
        "gradient_checkpointing=True",
        "gradient_checkpointing=False",
        lambda r: r.gradient_checkpointing,
    ),
    Technique(
        "packing",
        "packing=True",
        "packing=False",
        lambda r: r.packing,
        never={
            "dpo": _PAIRS,
            "reward": _PAIRS,
            "kto": "each row has one verdict, and packing would join rows of several",
            "gkd": "a row's prompt may be completed anew by the student, which takes one prompt",
            **dict.fromkeys(ONLINE, _SAMPLED),
        },
    ),
    Technique(
        "padding-free",
        "padding_free=True",
        "padding_free=False",
        lambda r: r.padding_free,
        never={
            "gkd": "the completions that its student may sample come as padded rows",
            **dict.fromkeys(ONLINE, _ROLLED),
        },
    ),
    Technique(
        "chunked loss",
        "loss_type='chunked_nll'",
        "loss_type='nll'",
        lambda r: r.loss_type != "nll" and not r.fused_head,
        idle={"reward": _NO_WORDS},
    ),
    Technique(
        "fused head",
        "fused_head='frugal'",
        "fused_head=None",
        lambda r: r.fused_head is not None,
        never={"reward": _NO_WORDS, "gkd": "its kernels know log-probabilities, not divergences"},
    ),
    Technique(
        "Liger",
        "use_liger_kernel=True",
        "use_liger_kernel=False",
        lambda r: r.use_liger_kernel,
        never={
            "reward": _NO_WORDS,
            "rloo": "liger-kernel has no loss for it",
            "online_dpo": "liger-kernel has no loss for completions that are sampled in pairs",
        },
    ),
)


def own(recipe: Recipe, switch: str) -> Any:
    """The recipe's value of a switch or, where that is None, the trainer's own (TRL's).

    Generations that nobody asked for are at most TRL's, as many as divide a step's completions.
    """
    value = getattr(recipe, switch)
    if value is not None:
        return value
    value = OWN.get(recipe.trainer, {}).get(switch)
    if switch == "num_generations" and value is not None:
        step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
        return math.gcd(value, step)
    return value


def check(recipe: Recipe) -> None:
    """Raise ValueError for a switch or a technique that the recipe's trainer does not have."""
    trainer = recipe.trainer
    for switch, trainers in OF_SOME.items():
        value = getattr(recipe, switch)
        if value not in (None, "keep_start") and trainer not in trainers:
            others = ", ".join(map(repr, trainers))
            raise ValueError(
                f"{switch}={value!r} with trainer={trainer!r}: only {others} "
                f"{'has' if len(trainers) == 1 else 'have'} it; leave it out"
            )
    if trainer in ("dpo", "kto", "online_dpo") and recipe.beta == 0:
        raise ValueError(
            f"beta=0.0 with trainer={trainer!r}: it weighs what is learnt, and nothing would be; "
            "give a number above 0"
        )
    if trainer == "gkd" and recipe.beta is not None and recipe.beta > 1:
        raise ValueError(
            f"beta={recipe.beta} with trainer='gkd': the share of one of two divergences; give 0 "
            "to 1"
        )
    step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    if trainer == "kto" and step < 2:
        raise ValueError(
            f"per_device_train_batch_size={step} with trainer='kto': its KL estimate pairs a "
            "prompt with another row's completion; give 2 rows or more a step"
        )
    generations = own(recipe, "num_generations")
    if generations is not None and (step % generations or generations == 1):
        generations = max(generations, 2)
        raise ValueError(
            f"per_device_train_batch_size={recipe.per_device_train_batch_size} times "
            f"gradient_accumulation_steps={recipe.gradient_accumulation_steps} with "
            f"trainer={trainer!r}: {step} completions, not a multiple of num_generations="
            f"{generations}; give {-(-step // generations) * generations} completions, or other "
            "generations"
        )
    for technique in TECHNIQUES:
        if trainer in technique.never and technique.is_on(recipe):
            switch = technique.setting.partition("=")[0]
            raise ValueError(
                f"{switch}={getattr(recipe, switch)!r} with trainer={trainer!r}: "
                f"{technique.never[trainer]}; give {technique.instead}"
            )
