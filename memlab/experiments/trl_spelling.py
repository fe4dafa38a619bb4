"""A recipe in the words of the installed TRL."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe


def arguments(recipe: Recipe) -> dict[str, Any]:
    """The keyword arguments of `trl.SFTConfig` for this recipe, as the installed TRL spells them.

    Until 1.14 TRL tells "nll" (all logits) from "chunked_nll"; since 1.15 "nll" is chunked and
    "chunked_nll" its alias, so there is no way back to all logits. Raises MemlabError without TRL.
    """
    try:
        major, minor = (int(part) for part in version("trl").split(".")[:2])
    except PackageNotFoundError:
        raise MemlabError("to_trl needs TRL: pip install 'trl>=1.16,<2'") from None
    always_chunked = (major, minor) >= (1, 15)
    loss_type = "nll" if always_chunked and recipe.loss_type == "chunked_nll" else recipe.loss_type
    init: dict[str, Any] = {"dtype": recipe.dtype}
    if recipe.attn_implementation not in (None, "memlab_attention"):
        init["attn_implementation"] = recipe.attn_implementation
    return {
        "per_device_train_batch_size": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "max_length": recipe.max_length,
        "max_steps": recipe.max_steps,
        "loss_type": loss_type,
        checkpointing_switch(): recipe.gradient_checkpointing,
        "optim": recipe.optim,
        "bf16": recipe.dtype == "bfloat16",
        "model_init_kwargs": init,
        "seed": recipe.seed,
    }


def checkpointing_switch() -> str:
    """`gradient_checkpointing`, or the name that later versions of transformers want instead.

    Read in the source of TrainingArguments: importing that loads accelerate and all it finds.
    """
    import transformers

    source = Path(str(transformers.__file__)).with_name("training_args.py").read_text("utf-8")
    renamed = "activation_checkpointing"
    return renamed if f"\n    {renamed}: " in source else "gradient_checkpointing"


def sft_config(recipe: Recipe, **extra: Any) -> Any:
    """The recipe as a `trl.SFTConfig`; `extra` goes to it as it is. Raises MemlabError without
    TRL."""
    spelled = arguments(recipe)
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(**{**spelled, **extra})
