"""Attention by the kernel that a card would choose, under a name of our own.

Computes     causal softmax(scaling * q @ k.T) @ v, with grouped heads
Without      the (B, H, T, T) scores, and without expanded copies of grouped keys and values

Importing this file registers "memlab_attention" with transformers. On CUDA and on a simulated
GPU it calls the operator that `F.scaled_dot_product_attention` would pick on the card: flash
attention in bf16 and fp16, memory-efficient attention in fp32. It is called by its ATen name,
because on a simulated device the public function falls back to the plain mathematics, which
would cost other bytes. Elsewhere (CPU, MPS) the public function is called.

Masks: none is ever built. Causal attention alone is right for rows padded on the right, whose
padding comes after every real token, so give the model no `attention_mask`; one that is given is
read once a forward (a device sync). Whatever else would need a mask raises ValueError: padding on
the left, several documents in a row, a sliding window shorter than the row, softcapping.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "memlab_attention"

_CARDS = ("cuda", "gpu")  # "gpu" is the simulated one


def resolve_attention(
    config: Any, requested: str | None, device_type: str, *, instead: str | None = None
) -> str:
    """Name of the attention implementation to build a model with.

    `config` is a transformers configuration, `requested` a name or None for the best one, and
    `device_type` "cpu", "cuda" or "gpu" (simulated). Softcapped models (Gemma 2) get "eager": no
    fused operator of torch takes a softcap. Raises ValueError for a name that would not work, and
    names `instead`, or the best one, as what would.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    instead = instead or _best(softcap)
    if requested is None:
        return "eager" if softcap else NAME
    if requested == "eager":
        return requested
    if requested == "flash_attention_2":
        if find_spec("flash_attn") is None:
            raise ValueError(
                "attn_implementation='flash_attention_2' needs flash-attn: install the extra "
                f"'flash', or take {instead}"
            )
        if device_type != "cuda":
            raise ValueError(
                "attn_implementation='flash_attention_2' runs on a real CUDA card only, not on "
                f"'{device_type}': take {instead}"
            )
        return requested
    if requested == "kernels-community/flash-attn2":
        raise ValueError(
            f"attn_implementation={requested!r} is for to_trl(): transformers gets that kernel "
            f"from the hub; memlab runs {instead}"
        )
    if requested not in (NAME, "sdpa"):
        raise ValueError(
            f"attn_implementation={requested!r} is unknown: take {NAME!r}, 'eager', 'sdpa' or "
            "'flash_attention_2'"
        )
    if softcap:
        raise ValueError(
            f"attn_implementation={requested!r} cannot softcap attention scores (this model caps "
            f"them at {softcap}): take 'eager'"
        )
    if requested == "sdpa" and device_type == "gpu":
        raise ValueError(
            "attn_implementation='sdpa' would not take the card's kernel on a simulated GPU: take "
            f"{NAME!r}, which does"
        )
    return requested


def _best(softcap: float | None) -> str:
    return "'eager'" if softcap else f"{NAME!r}"


def attention(
    module: torch.nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, S, D)
    value: Tensor,  # (B, Hkv, S, D)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: output (B, T, H, D), contiguous; no attention weights.

    S is T, or the length of the KV cache when T is 1. Raises ValueError for what it cannot
    honour (see the head of this file).
    """
    rows, cached = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError(_refusal("attention in both directions"))
    if attention_mask is not None:
        raise ValueError(_refusal("a ready-made mask"))
    if softcap is not None:
        raise ValueError(_refusal("softcapping"))
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(_refusal("several documents in a row (cu_seq_lens_q)"))
    if rows not in (1, cached):
        raise ValueError(_refusal(f"{rows} queries on a cache of {cached} keys"))
    _check_window(sliding_window, cached)

    causal = rows > 1  # a lone query is the last one, and sees every key
    if query.device.type in _CARDS:
        out = _on_card(query, key, value, dropout, causal, scaling)
    else:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def _on_card(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scaling: float | None
) -> Tensor:
    aten = torch.ops.aten
    if query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scaling
        )[0]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # this one knows no grouped heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    keeps_logsumexp = torch.is_grad_enabled() and query.requires_grad
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, None, keeps_logsumexp, dropout, causal, scale=scaling
    )[0]


def no_mask(
    *,
    kv_length: int,
    attention_mask: Tensor | None = None,  # (B, S), True for a real token
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Mask function for transformers: None, after checking that none is needed.

    Raises ValueError for left padding, several documents in a row, custom masks, and windows
    shorter than the keys. A simulated step must run inside `compat.fake_tensors_are_computed`, else
    transformers takes every batch of it for packed documents.
    """
    if not allow_is_causal_skip:
        raise ValueError(_refusal("several documents in a row, or a custom mask"))
    _check_window(local_size, kv_length)
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError(_refusal("padding on the left (pad on the right)"))


def _check_window(window: int | None, length: int) -> None:
    if window is not None and length > window:
        raise ValueError(
            f"attn_implementation={NAME!r} does not do a sliding window of {window} over {length} "
            f"tokens: take max_length <= {window}, or attn_implementation='eager'"
        )


def _refusal(what: str) -> str:
    return f"attn_implementation={NAME!r} does not do {what}: take attn_implementation='eager'"


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, no_mask)
