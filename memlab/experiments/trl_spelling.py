"""A recipe in the words of the installed TRL."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.experiments.rules import IN_GROUPS, TRAINERS, own
from memlab.models.compat import checkpointing_switch

CONFIGS = {  # where TRL has a trainer's configuration; its last two are experimental there
    "sft": "trl.trainer.sft_config.SFTConfig",
    "dpo": "trl.trainer.dpo_config.DPOConfig",
    "reward": "trl.trainer.reward_config.RewardConfig",
    "kto": "trl.trainer.kto_config.KTOConfig",
    "grpo": "trl.trainer.grpo_config.GRPOConfig",
    "rloo": "trl.trainer.rloo_config.RLOOConfig",
    "online_dpo": "trl.experimental.online_dpo.OnlineDPOConfig",
    "gkd": "trl.experimental.gkd.GKDConfig",
}
NO_MULTIPLE = ("online_dpo", "gkd")
ALL_LOGITS = ("online_dpo", "gkd")


def arguments(recipe: Recipe) -> dict[str, Any]:
    """The keyword arguments of the trainer's configuration, as the installed TRL spells them.

    Until 1.14 TRL tells "nll" (all logits) from "chunked_nll"; since 1.15 "nll" is chunked and
    "chunked_nll" its alias, so there is no way back to all logits, nor has one DPO, KTO, GRPO or
    RLOO. Where documents must be kept apart it asks for flash attention, which TRL wants there;
    padding-free without packing gets no max_length, because TRL leaves the cutting to the user
    then. Liger is `use_kernels`, as TRL wants it now: kernels of the layers, beside TRL's own head.
    GKD gets the answers that it is given, as here. What TRL has not is left out: `done_without`
    names it.

    Raises MemlabError without TRL, ValueError for a value that its trainer can't take.
    """
    always_chunked = _always_chunked()
    return {
        "per_device_train_batch_size": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        **_rows(recipe),
        "max_steps": recipe.max_steps,
        **_method(recipe, always_chunked=always_chunked),
        checkpointing_switch(): recipe.gradient_checkpointing,
        "optim": recipe.optim,
        "bf16": recipe.dtype == "bfloat16",
        "model_init_kwargs": _model(recipe),
        "seed": recipe.seed,
    }


def _always_chunked() -> bool:
    """Whether the installed TRL chunks the head of all but `ALL_LOGITS`; MemlabError without."""
    try:
        major, minor = (int(part) for part in version("trl").split(".")[:2])
    except PackageNotFoundError:
        raise MemlabError(
            "to_trl needs TRL: pip install 'trl>=1.16,<2' (memlab itself brings none)"
        ) from None
    return (major, minor) >= (1, 15)


def _rows(recipe: Recipe) -> dict[str, Any]:
    """How rows are cut and laid into batches."""
    trainer, said = recipe.trainer, {}
    if trainer not in IN_GROUPS:
        said["max_length"] = None if cut_beforehand(recipe) else recipe.max_length
    if trainer == "online_dpo" and recipe.max_length is None:
        raise ValueError(
            "max_length=None with TRL's Online DPO, which needs a number: give the longest prompt "
            "and its completion"
        )
    if trainer in ("sft", "dpo"):
        said["truncation_mode"] = recipe.truncation_mode
    if trainer == "sft":
        said["packing"] = recipe.packing
        said["packing_strategy"] = recipe.packing_strategy
        said["padding_free"] = recipe.padding_free
    if trainer not in NO_MULTIPLE:
        said["pad_to_multiple_of"] = recipe.pad_to_multiple_of
    return said


def _method(recipe: Recipe, *, always_chunked: bool) -> dict[str, Any]:
    """What a trainer has of its own."""
    beta, longest = own(recipe, "beta"), own(recipe, "max_completion_length")
    match recipe.trainer:
        case "sft":
            chunked = always_chunked and recipe.loss_type == "chunked_nll"
            return {"loss_type": "nll" if chunked else recipe.loss_type}
        case "dpo" | "kto":
            return {"beta": beta}
        case "grpo" | "rloo":
            generations = own(recipe, "num_generations")
            return {"beta": beta, "max_completion_length": longest, "num_generations": generations}
        case "online_dpo":
            return {"beta": [beta], "max_new_tokens": longest}  # one for each epoch
        case "gkd":
            teacher = {"teacher_model_name_or_path": recipe.teacher_model or recipe.model}
            loaded = {"teacher_model_init_kwargs": {"dtype": recipe.dtype}}
            return {"beta": beta, "lmbda": 0.0} | teacher | loaded
        case _:
            return {}


def _model(recipe: Recipe) -> dict[str, Any]:
    """How the model is loaded."""
    init: dict[str, Any] = {"dtype": recipe.dtype}
    flattened = recipe.flattened and recipe.trainer == "sft"
    if flattened and recipe.dtype == "float32":
        raise ValueError(
            "dtype='float32' in TRL with documents side by side in a row: flash attention takes "
            "half precision only; give dtype='bfloat16'"
        )
    attention = recipe.attn_implementation
    if attention in (None, "memlab_attention", "memlab_varlen"):  # not known there
        attention = "flash_attention_2" if flattened else None
    if attention is not None:
        init["attn_implementation"] = attention
    if recipe.use_liger_kernel:
        init["use_kernels"] = True
    return init


def done_without(recipe: Recipe) -> list[str]:
    """What the recipe asks for and its trainer in TRL does not do, one line each.

    Raises MemlabError without TRL.
    """
    trainer = recipe.trainer
    all_logits = trainer in ALL_LOGITS
    chunked = _always_chunked() and not all_logits and trainer != "reward"
    missing = (  # whether it is asked for, how, and what TRL does
        (
            recipe.padding_free and trainer != "sft",
            "padding_free=True",
            "does without, and pads its rows",
        ),
        (
            recipe.pad_to_multiple_of is not None and trainer in NO_MULTIPLE,
            f"pad_to_multiple_of={recipe.pad_to_multiple_of}",
            "does without, and pads to the longest row",
        ),
        (
            recipe.loss_type != "nll" and all_logits,
            f"loss_type={recipe.loss_type!r}",
            "does without, and keeps all logits",
        ),
        (
            recipe.loss_type == "nll" and not recipe.use_liger_kernel and chunked,
            "loss_type='nll'",
            "makes logits in chunks, and has no way back to all of them",
        ),
        (
            recipe.fused_head is not None,
            f"fused_head={recipe.fused_head!r}",
            f"does without, and {'keeps all logits' if all_logits else 'has its own'}",
        ),
        (
            recipe.use_liger_kernel,
            "use_liger_kernel=True",
            "has kernels for its layers, and "
            f"{'keeps all logits' if all_logits else 'a chunked head of its own for the loss'}",
        ),
        (
            recipe.max_length is None and trainer == "gkd",
            "max_length=None",
            "cuts all the same, at 1024 tokens or where its tokenizer ends",
        ),
        (
            recipe.dataset == "full" and trainer in IN_GROUPS,
            f"max_length={recipe.max_length}",
            "cuts completions only, so cut the prompts beforehand",
        ),
    )
    return [
        f"{setting}: TRL's {TRAINERS[trainer]} {does}"
        for asked_for, setting, does in missing
        if asked_for
    ]


def cut_beforehand(recipe: Recipe) -> bool:
    """Whether TRL leaves the cutting to the user, as it does with padding-free, unpacked rows."""
    return recipe.trainer == "sft" and recipe.padding_free and not recipe.packing


def config_name(recipe: Recipe) -> str:
    """What TRL calls the configuration of the recipe's trainer."""
    return CONFIGS[recipe.trainer].rpartition(".")[2]


def config(recipe: Recipe, **extra: Any) -> Any:
    """The recipe as the configuration of its trainer in TRL; `extra` goes to it as it is.

    Where torch finds no accelerator it says `use_cpu=True`: without it transformers refuses bf16.
    Warns of what TRL does without, and where the rows have to be cut before TRL gets them. Raises
    as `arguments`.
    """
    spelled = arguments(recipe)
    for line in done_without(recipe):
        warnings.warn(line, stacklevel=3)  # the caller of Recipe.to_trl
    if cut_beforehand(recipe) and recipe.max_length is not None:
        warnings.warn(
            f"padding_free=True: TRL does not cut such rows, so cut the data set to max_length="
            f"{recipe.max_length} before it gets there (memlab.techniques.truncation)",
            stacklevel=3,
        )
    module, _, name = CONFIGS[recipe.trainer].rpartition(".")
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        spelled["use_cpu"] = True
    return getattr(import_module(module), name)(**{**spelled, **extra})
