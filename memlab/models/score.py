"""Reward models: a decoder whose last hidden state a small head turns into one score."""

import copy
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from memlab.models.attention import resolve_attention
from memlab.models.build import load_config
from memlab.models.head import HeadParts


def build_score_meta(
    model: str | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """As `build.build_meta`, with a head `score` (D -> 1) in the place of the one over words.

    Raises ValueError for an unknown name, or an architecture that transformers has no such form of.
    """
    config: Any = load_config(model) if isinstance(model, str) else copy.deepcopy(model)
    config.num_labels = 1
    attention = attn_implementation or resolve_attention(config, None, "cpu")
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(
            config, dtype=dtype, attn_implementation=attention
        )


def score_parts(model: Any) -> HeadParts:
    """The decoder and the head (B, D) -> (B, 1) of a reward model, peft-wrapped or not.

    Raises TypeError for a model without a head called `score`.
    """
    if hasattr(model, "get_base_model"):  # peft puts its layers inside the base model
        model = model.get_base_model()
    backbone = getattr(model, getattr(model, "base_model_prefix", ""), None)
    head = getattr(model, "score", None)
    if backbone is None or head is None:
        raise TypeError(f"{type(model).__name__} is no reward model: its head must be `score`")
    return HeadParts(backbone=backbone, head=head, softcap=None, logit_scale=1.0)
