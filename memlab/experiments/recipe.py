"""The switches of a training run, under the names that TRL gives them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
import warnings
from dataclasses import dataclass
from typing import Any

from memlab.experiments import rules

CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": tuple(rules.TRAINERS),
    "dataset": ("full", "docstrings", "prompt_completion", "chat", "chat_like"),
    "truncation_mode": ("keep_start", "keep_end"),
    "packing_strategy": ("bfd", "bfd_split", "wrapped"),
    "loss_type": ("nll", "chunked_nll", "dft"),
    "fused_head": (None, "fast", "frugal"),
    "dtype": ("bfloat16", "float32"),
    "optim": ("adamw_torch_fused", "adamw_torch", "sgd"),
    "attn_implementation": (
        *(None, "memlab_attention", "memlab_varlen", "eager", "sdpa", "flash_attention_2"),
        "kernels-community/flash-attn2",
    ),
}
HALF = (  # TRL's fp16=True is another thing: its weights stay in fp32, and autocast computes
    "AdamW's eps of 1e-8 is 0 in it, and so are the squares of small gradients: 0 / 0 is a NaN"
)
AT_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 2,  # one token that predicts, one that is predicted
    "max_steps": 1,
    "pad_to_multiple_of": 1,
    "max_completion_length": 1,
    "num_generations": 2,  # a completion is judged beside others of its prompt
    "beta": 0.0,
}
OFF: dict[str, Any] = {
    "loss_type": "nll",
    "gradient_checkpointing": False,
    "expandable_segments": False,
}


@dataclass(frozen=True)
class Recipe:
    """One training run: a model, its data, and which memory techniques are on.

    The defaults are TRL's (checkpointing and the chunked loss on); `Recipe.off()` has every
    technique off. None stands for the trainer's own value, see `rules.own`; for `loss_type` it is
    "chunked_nll", and "nll" with Liger. That switch says how all trainers make what they need of
    the logits; which loss they make of it changes no bytes. A batch is counted as in TRL: pairs
    (DPO, Reward), rows (SFT, KTO, GKD), completions (GRPO, RLOO), prompts (Online DPO). The limit
    of sampled completions is `max_completion_length` for all; TRL's Online DPO calls it
    `max_new_tokens`.

    A value that can't work raises ValueError or TypeError naming the switch, the value and what
    would work.
    """

    model: str = "Qwen/Qwen3-0.6B"
    trainer: str = "sft"
    dataset: str = "full"
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    pad_to_multiple_of: int | None = None
    max_steps: int = 2
    loss_type: str | None = None
    fused_head: str | None = None
    use_liger_kernel: bool = False
    gradient_checkpointing: bool = True
    dtype: str = "bfloat16"
    optim: str = "adamw_torch_fused"
    attn_implementation: str | None = None
    expandable_segments: bool = False
    max_completion_length: int | None = None
    num_generations: int | None = None
    beta: float | None = None
    teacher_model: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.packing_strategy == "bfd-requeue":
            warnings.warn(
                "packing_strategy='bfd-requeue' is the old name of 'bfd_split'; give that",
                FutureWarning,
                stacklevel=3,  # the caller of Recipe
            )
            object.__setattr__(self, "packing_strategy", "bfd_split")
        if self.loss_type is None:
            loss_type = "nll" if self.use_liger_kernel else "chunked_nll"
            object.__setattr__(self, "loss_type", loss_type)
        for name, kind in switch_types().items():
            value = getattr(self, name)
            if float in kind and type(value) is int and abs(value) < 2**53:
                value = float(value)
                object.__setattr__(self, name, value)
            if type(value) is float and not math.isfinite(value):
                raise ValueError(f"{name}={value}: give a finite number")
            if type(value) not in kind:  # exact: True is not a batch size
                wanted = " or ".join("None" if k is type(None) else k.__name__ for k in kind)
                found = type(value).__name__
                article = "an" if found[0] in "aeiou" else "a"
                raise TypeError(f"{name}={value!r}: {article} {found}; give {wanted}")
            if name in CHOICES and value not in CHOICES[name]:
                known = ", ".join(map(repr, CHOICES[name]))
                hint = self._flavour(str(value)) if name == "loss_type" else ""
                hint = HALF if (name, value) == ("dtype", "float16") else hint
                raise ValueError(f"{name}={value!r}: {hint or 'unknown'}; give one of {known}")
            if name in AT_LEAST and value is not None and value < AT_LEAST[name]:
                least = AT_LEAST[name]
                raise ValueError(f"{name}={value}: below {least}; give {least} or more")
        rules.check(self)

    def _flavour(self, loss_type: str) -> str:
        """Where another loss of the recipe's trainer is to be had; "" where it is unknown."""
        from memlab.losses import dpo, grpo  # torch, which a good recipe does not need

        flavours = {"dpo": dpo, "online_dpo": dpo, "grpo": grpo}
        if self.trainer not in flavours or loss_type not in flavours[self.trainer].LOSS_TYPES:
            return ""
        return (
            f"changes no bytes of trainer={self.trainer!r}, and is an argument of memlab.trainers."
            f"{self.trainer}.train; a recipe's loss_type says how logits are made"
        )

    @property
    def flattened(self) -> bool:
        """Whether a batch is one row of documents: padding-free, or packed by best fit."""
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    @classmethod
    def off(cls, **switches: Any) -> Recipe:
        """Every technique off, then `switches`. Raises ValueError, TypeError as `of`."""
        return cls.of(**{**OFF, **switches})

    @classmethod
    def defaults(cls, **switches: Any) -> Recipe:
        """What TRL has on by default (checkpointing, the chunked loss), then `switches`.

        Raises ValueError, TypeError as `of`.
        """
        return cls.of(**switches)

    @classmethod
    def of(cls, **switches: Any) -> Recipe:
        """A recipe of these switches.

        Raises ValueError for an unknown name, with the nearest known ones, and for a value or a
        pair of values that can't work; TypeError for a switch that no trainer has any more.
        """
        known = switch_types()
        for name in switches:
            if name == "max_prompt_length":
                raise TypeError(
                    f"{name}={switches[name]!r}: no trainer has it any more; filter the data set "
                    "by the length of its prompts beforehand"
                )
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise ValueError(
                    f"unknown switch {name}: {hint}the switches are {', '.join(known)}"
                )
        return cls(**switches)

    def replace(self, **switches: Any) -> Recipe:
        """This recipe with `switches` changed."""
        return Recipe.of(**{**dataclasses.asdict(self), **switches})

    def changes(self, after: Recipe) -> dict[str, tuple[Any, Any]]:
        """The switches in which `after` differs: name -> (here, there)."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(after)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def to_trl(self, **arguments: Any) -> Any:
        """The same run as the configuration of its trainer in the installed TRL: `trl.SFTConfig`,
        `trl.DPOConfig` and so on; `arguments` go to it as they are.

        The models' names go to the trainer, `SFTTrainer(model=...)`; `expandable_segments` is an
        environment variable (PYTORCH_ALLOC_CONF). Since TRL 1.15 `loss_type="nll"` is itself
        chunked. Warns of a switch that TRL's trainer does without. Raises MemlabError when TRL is
        not installed, ValueError for what its trainer can't take.
        """
        from memlab.experiments.trl_spelling import config

        return config(self, **arguments)


def switch_types() -> dict[str, tuple[type, ...]]:
    """Each switch's accepted types."""
    hints = typing.get_type_hints(Recipe)
    return {
        field.name: typing.get_args(hints[field.name]) or (hints[field.name],)
        for field in dataclasses.fields(Recipe)
    }
