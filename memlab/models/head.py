"""A causal language model taken apart: the decoder, and the head that makes logits."""

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class HeadParts:
    """What turns token ids into logits (B, T, V), in two pieces.

    logits = cap(logit_scale * head(backbone(ids).last_hidden_state)), where
    cap(x) = softcap * tanh(x / softcap), or x where softcap is None.
    """

    backbone: nn.Module  # (B, T) ids -> output with last_hidden_state (B, T, D)
    head: nn.Module  # (B, T, D) -> (B, T, V): weight (V, D), bias (V,) or None
    softcap: float | None
    logit_scale: float


def head_parts(model: Any) -> HeadParts:
    """The parts of a transformers causal language model, peft-wrapped or not.

    Raises TypeError for a model without a decoder or without an output embedding, ValueError for
    a head that is adapted itself: logits made from its weight would leave the adapter out.
    """
    if hasattr(model, "get_base_model"):  # peft puts its layers inside the base model
        model = model.get_base_model()
    backbone = getattr(model, getattr(model, "base_model_prefix", ""), None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if backbone is None or head is None:
        raise TypeError(f"{type(model).__name__} is not a causal language model with a head")
    if hasattr(head, "base_layer") or not hasattr(head, "bias"):  # peft's layers; trained tokens
        name = next(name for name, module in model.named_modules() if module is head)
        raise ValueError(
            f"peft_config adapts {name}, the head: losses take its weight, and would leave the "
            f"adapter out; give others to it, or modules_to_save=[{name!r}] to train it whole"
        )
    config = model.config
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    divisor = getattr(config, "logits_scaling", None)  # Granite divides
    return HeadParts(
        backbone=backbone,
        head=head,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=(1.0 if scale is None else float(scale)) / float(divisor or 1.0),
    )
