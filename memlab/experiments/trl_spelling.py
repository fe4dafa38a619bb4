"""A recipe in the words of the installed TRL."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.models.compat import checkpointing_switch


def arguments(recipe: Recipe) -> dict[str, Any]:
    """The keyword arguments of `trl.SFTConfig` for this recipe, as the installed TRL spells them.

    Until 1.14 TRL tells "nll" (all logits) from "chunked_nll"; since 1.15 "nll" is chunked and
    "chunked_nll" its alias, so there is no way back to all logits. Where documents must be kept
    apart it asks for flash attention, which TRL wants there; padding-free without packing gets no
    max_length, because TRL leaves the cutting to the user then. Raises MemlabError without TRL.
    """
    try:
        major, minor = (int(part) for part in version("trl").split(".")[:2])
    except PackageNotFoundError:
        raise MemlabError(
            "to_trl needs TRL: pip install 'trl>=1.16,<2' (memlab itself brings none)"
        ) from None
    always_chunked = (major, minor) >= (1, 15)
    loss_type = "nll" if always_chunked and recipe.loss_type == "chunked_nll" else recipe.loss_type
    init: dict[str, Any] = {"dtype": recipe.dtype}
    if recipe.flattened and recipe.dtype == "float32":
        raise ValueError(
            "dtype='float32' in TRL with documents side by side in a row: flash attention takes "
            "half precision only; give dtype='bfloat16'"
        )
    attention = recipe.attn_implementation
    if attention in (None, "memlab_attention", "memlab_varlen"):  # not known there
        attention = "flash_attention_2" if recipe.flattened else None
    if attention is not None:
        init["attn_implementation"] = attention
    return {
        "per_device_train_batch_size": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "max_length": None if cut_beforehand(recipe) else recipe.max_length,
        "truncation_mode": recipe.truncation_mode,
        "packing": recipe.packing,
        "packing_strategy": recipe.packing_strategy,
        "padding_free": recipe.padding_free,
        "pad_to_multiple_of": recipe.pad_to_multiple_of,
        "max_steps": recipe.max_steps,
        "loss_type": loss_type,
        checkpointing_switch(): recipe.gradient_checkpointing,
        "optim": recipe.optim,
        "bf16": recipe.dtype == "bfloat16",
        "model_init_kwargs": init,
        "seed": recipe.seed,
    }


def cut_beforehand(recipe: Recipe) -> bool:
    """Whether TRL leaves the cutting to the user, as it does with padding-free, unpacked rows."""
    return recipe.padding_free and not recipe.packing


def sft_config(recipe: Recipe, **extra: Any) -> Any:
    """The recipe as a `trl.SFTConfig`; `extra` goes to it as it is.

    Where torch finds no accelerator it says `use_cpu=True`: without it transformers refuses bf16.
    Warns where the rows have to be cut before TRL gets them. Raises MemlabError without TRL.
    """
    spelled = arguments(recipe)
    if cut_beforehand(recipe) and recipe.max_length is not None:
        warnings.warn(
            f"padding_free=True: TRL does not cut such rows, so cut the data set to max_length="
            f"{recipe.max_length} before it gets there (memlab.techniques.truncation)",
            stacklevel=3,  # the caller of Recipe.to_trl
        )
    from trl.trainer.sft_config import SFTConfig

    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        spelled["use_cpu"] = True
    return SFTConfig(**{**spelled, **extra})
