"""What goes with what, and why not: techniques and trainers, then values of two switches.

Two tables, for recipes (`check`) and for readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memlab.data.preferences import PROMPTED

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
WITH_PROMPTS = ("full", *PROMPTED)  # the data sets that all trainers take; SFT takes any
IN_GROUPS = ("grpo", "rloo")  # completions of a prompt, which have the only limit there is

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
    "num_generations": IN_GROUPS,
    "teacher_model": ("gkd",),
}


@dataclass(frozen=True)
class Technique:
    """A row of the table. Trainers are by the names that a recipe gives them."""

    title: str
    setting: str  # how a recipe switches it on
    instead: str  # and what to give where it can't be
    is_on: Callable[[Recipe], bool]
    settings: Mapping[str, str] = field(default_factory=dict)  # trainer -> how it does there
    never: Mapping[str, str] = field(default_factory=dict)  # trainer -> why it is refused there
    idle: Mapping[str, str] = field(default_factory=dict)  # trainer -> why it changes nothing

    def setting_of(self, trainer: str) -> str:
        """How a recipe of the trainer switches it on."""
        return self.settings.get(trainer, self.setting)

    def cell(self, trainer: str) -> str:
        """ "yes", "-" where it is refused, "n/a" where it has nothing to do."""
        return "-" if trainer in self.never else "n/a" if trainer in self.idle else "yes"


_PAIRS = "the two answers of a pair are told apart by their rows, which packing would join"
_SAMPLED = "its rows are sampled in every step, when there is no data set left to pack"
_ROLLED = "its completions come out of a KV cache as padded rows"
_NO_WORDS = "its head gives one score a row, and no logits over words"

TECHNIQUES = (
    Technique(
        "truncation",
        "max_length=...",
        "max_length=None",
        lambda r: (r.max_completion_length if r.trainer in IN_GROUPS else r.max_length) is not None,
        settings=dict.fromkeys(IN_GROUPS, "max_completion_length=..."),
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


@dataclass(frozen=True)
class Clash:
    """Values that are fine alone and can't work together: a row of the second table."""

    values: str  # the recipe's or its trainer's own go in the place of braces, here and below
    when: Callable[[Recipe], object]
    reason: str  # and what ties it to both sides
    instead: str

    def __call__(self, recipe: Recipe) -> str:
        """What a recipe is told that has them."""
        values = {name: own(recipe, name) for name in vars(recipe)}
        return f"{self.values}{self.reason} give {self.instead}".format(**values)


KEEPS_DOCUMENTS_APART = {
    None,
    "memlab_varlen",
    "flash_attention_2",
    "kernels-community/flash-attn2",
}


def _documents_mix(recipe: Recipe) -> bool:
    return recipe.flattened and recipe.attn_implementation not in KEEPS_DOCUMENTS_APART


CLASHES = (  # the first that is found is told
    Clash(
        "dataset={dataset!r} with trainer={trainer!r}",
        lambda r: r.trainer != "sft" and r.dataset not in WITH_PROMPTS,
        ": plain text has no prompts;",
        " or ".join(map(repr, WITH_PROMPTS)),
    ),
    Clash(
        "max_length={max_length} with max_completion_length={max_completion_length}",
        lambda r: (
            (r.trainer == "online_dpo" or (r.trainer in IN_GROUPS and r.dataset == "full"))
            and r.max_length is not None
            and r.max_length <= own(r, "max_completion_length")
        ),
        ": beside its completion, a row has no room for a prompt;",
        "a max_length above {max_completion_length}",
    ),
    Clash(
        "beta={beta} with trainer={trainer!r}",
        lambda r: r.beta == 0 and r.trainer in ("dpo", "kto", "online_dpo"),
        ": it weighs what is learnt, and nothing would be;",
        "a number above 0",
    ),
    Clash(
        "beta={beta} with trainer='gkd'",
        lambda r: r.trainer == "gkd" and r.beta is not None and r.beta > 1,
        ": the share of one of two divergences;",
        "0 to 1",
    ),
    Clash(
        "per_device_train_batch_size={per_device_train_batch_size} with trainer='kto'",
        lambda r: r.trainer == "kto" and _step(r) < 2,
        ": its KL estimate pairs a prompt with another row's completion;",
        "2 rows or more a step",
    ),
    Clash(
        "max_length={max_length} with trainer={trainer!r} and dataset={dataset!r}",
        lambda r: (
            r.trainer in IN_GROUPS
            and r.dataset != "full"  # whose prompts it makes
            and r.max_length not in (None, type(r).max_length)
        ),
        ": it would cut nothing, because prompts stay whole and completions have a limit of "
        "their own;",
        "max_completion_length in its place",
    ),
    Clash(
        "loss_type='dft' with trainer={trainer!r}",
        lambda r: r.loss_type == "dft" and r.trainer != "sft",
        ": it weighs the labels of 'sft';",
        "'chunked_nll' or 'nll'",
    ),
    Clash(
        "loss_type={loss_type!r} with use_liger_kernel=True",
        lambda r: r.use_liger_kernel and r.loss_type != "nll",
        ": Liger's loss is chunked in its own way, and takes the place of the head;",
        "loss_type='nll'",
    ),
    Clash(
        "padding_free=True with use_liger_kernel=True and trainer={trainer!r}",
        lambda r: r.use_liger_kernel and r.padding_free and r.trainer != "sft",
        ": Liger's loss takes a rectangle of padded rows;",
        "one of the two",
    ),
    Clash(
        "fused_head={fused_head!r} with use_liger_kernel=True",
        lambda r: r.use_liger_kernel and r.fused_head,
        ": each takes the place of the head;",
        "fused_head=None, or use_liger_kernel=False",
    ),
    Clash(
        "fused_head={fused_head!r} with loss_type='nll'",
        lambda r: r.fused_head and r.loss_type == "nll",
        ", which keeps all logits:",
        "loss_type='chunked_nll', or fused_head=None",
    ),
    Clash(
        "fused_head='fast' with trainer={trainer!r}",
        lambda r: r.fused_head == "fast" and r.trainer != "sft",
        ": it makes gradients before the loss of a whole sequence is known;",
        "'frugal'",
    ),
    Clash(
        "packing=True with max_length=None",
        lambda r: r.packing and r.max_length is None,
        ":",
        "the length of a bin",
    ),
    Clash(
        "max_length=None with dataset='full'",
        lambda r: r.max_length is None and r.dataset == "full",
        ", whose rows are max_length tokens:",
        "a number, or a data set such as 'docstrings' (with trainer='sft') or 'chat'",
    ),
    Clash(
        "truncation_mode={truncation_mode!r} with packing=True",
        lambda r: r.packing and r.truncation_mode != "keep_start",
        ": packing cuts at the start of a row's tokens;",
        "'keep_start'",
    ),
    Clash(
        "padding_free=True with packing_strategy='wrapped'",
        lambda r: r.padding_free and r.packing and r.packing_strategy == "wrapped",
        ", which cuts documents anywhere and lets them mix:",
        "'bfd' or 'bfd_split', or padding_free=False",
    ),
    *(
        Clash(
            f"attn_implementation={{attn_implementation!r}} with {switch}=True",
            lambda r, switch=switch: getattr(r, switch) and _documents_mix(r),
            ": documents of a row would see each other;",
            "'memlab_varlen' or 'flash_attention_2'",
        )
        for switch in ("padding_free", "packing")
    ),
    Clash(
        "attn_implementation='memlab_varlen' without padding_free=True or packing=True",
        lambda r: r.attn_implementation == "memlab_varlen" and not r.flattened,
        ": it has no documents to keep apart;",
        "None",
    ),
)


def _step(recipe: Recipe) -> int:
    """What a step learns from, counted as a batch is: pairs, rows, completions or prompts."""
    return recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps


def own(recipe: Recipe, switch: str) -> Any:
    """The recipe's value of a switch or, where that is None, the trainer's own (TRL's).

    Generations that nobody asked for are at most TRL's, as many as divide a step's completions.
    """
    value = getattr(recipe, switch)
    if value is not None:
        return value
    value = OWN.get(recipe.trainer, {}).get(switch)
    if switch == "num_generations" and value is not None:
        return math.gcd(value, _step(recipe))
    return value


def second_model(recipe: Recipe) -> str | None:
    """What the recipe's trainer keeps beside the model that it trains, if anything."""
    if recipe.trainer == "gkd":
        return "teacher"
    return "reference" if own(recipe, "beta") else None


def check(recipe: Recipe) -> None:
    """Raise ValueError for what the recipe's trainer does not have and for values that clash;
    TypeError for DPO's `max_completion_length`, which it had once."""
    _check_switches(recipe)
    _check_groups(recipe)
    for technique in TECHNIQUES:
        if recipe.trainer in technique.never and technique.is_on(recipe):
            switch = technique.setting.partition("=")[0]
            raise ValueError(
                f"{switch}={getattr(recipe, switch)!r} with trainer={recipe.trainer!r}: "
                f"{technique.never[recipe.trainer]}; give {technique.instead}"
            )
    for clash in CLASHES:
        if clash.when(recipe):
            raise ValueError(clash(recipe))


def _check_switches(recipe: Recipe) -> None:
    for switch, trainers in OF_SOME.items():
        value = getattr(recipe, switch)
        if value in (None, "keep_start") or recipe.trainer in trainers:
            continue
        asked = f"{switch}={value!r} with trainer={recipe.trainer!r}"
        if (switch, recipe.trainer) == ("max_completion_length", "dpo"):
            raise TypeError(
                f"{asked}: it has none any more; filter the data set by the length of its "
                "completions beforehand, or cut them, and give max_length"
            )
        others = ", ".join(map(repr, trainers))
        has = "has" if len(trainers) == 1 else "have"
        raise ValueError(f"{asked}: only {others} {has} it; leave it out")


def _check_groups(recipe: Recipe) -> None:
    step, generations = _step(recipe), own(recipe, "num_generations")
    if generations is not None and (step % generations or generations == 1):
        generations = max(generations, 2)
        raise ValueError(
            f"per_device_train_batch_size={recipe.per_device_train_batch_size} times "
            f"gradient_accumulation_steps={recipe.gradient_accumulation_steps} with "
            f"trainer={recipe.trainer!r}: {step} completions, not a multiple of num_generations="
            f"{generations}; give {-(-step // generations) * generations} completions, or other "
            "generations"
        )
