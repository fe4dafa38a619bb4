"""Attention for many documents in one row: each token sees its own document's past, no other.

Computes     causal softmax(scale * q @ k.T) @ v of each document apart, with grouped heads
Instead of   a (N, N) block-diagonal mask, or causal attention alone, which lets documents mix
Memory       kept for backward: q, k, v, out and 4 * H * N bytes of row sums, as for one document
Price        work grows with sum(t_i ** 2), not (sum t_i) ** 2
Use          register(); model.set_attn_implementation(NAME)
Source       Dao 2023, arXiv 2307.08691; the kernel is torch.nn.attention.varlen's
Unlike       transformers' "flash_attention_2": needs no package beside torch; without cu_seqlens
             it raises, and never derives them from positions, which costs a device sync a layer.
             Apache-2.0; torch 2.11 to 2.13, transformers 5.17 to 5.24
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "memlab_varlen"
CARDS = ("cuda", "gpu")  # "gpu" is a simulated one


def varlen_attention(
    q: Tensor,  # (N, H, D)
    k: Tensor,  # (N, Hkv, D)
    v: Tensor,  # (N, Hkv, D)
    cu_seqlens: Tensor,  # (documents + 1,) int32
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:  # (N, H, D)
    """Causal attention inside each document; `window` is how many tokens one sees, itself included.

    On CUDA by one flash kernel, in bf16 and fp16 only: other types raise ValueError. Elsewhere
    document by document, which any type and device can do. ValueError too for a window below 1 and,
    where the values of cu_seqlens are at hand (a card's would have to be waited for), for documents
    that don't add up to N tokens or are longer than max_seqlen. TypeError: a size is no int.
    """
    for name, value in (("max_seqlen", max_seqlen), ("window", window)):
        if value is not None and (type(value) is bool or not hasattr(value, "__index__")):
            raise TypeError(f"{name}={value!r}: give an int")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: give 1 (the token alone) or more, or None")
    if q.device.type not in CARDS:
        lengths = cu_seqlens.diff()
        if cu_seqlens.numel() < 2 or cu_seqlens[0] or cu_seqlens[-1] != len(q) or lengths.min() < 0:
            raise ValueError(f"cu_seqlens={cu_seqlens.tolist()}: give 0, ..., {len(q)}, ascending")
        if lengths.max() > max_seqlen:
            raise ValueError(f"max_seqlen={max_seqlen}: a document has {int(lengths.max())} tokens")
        return _document_by_document(q, k, v, cu_seqlens, scale, window)
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"padding_free in {q.dtype}: flash attention takes bfloat16 or float16")
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None or window >= max_seqlen else window - 1
    grouped = {"enable_gqa": True} if _must_ask_for_groups() else {}
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return varlen_attn(q, k, v, *sizes, scale=scale, window_size=(left, 0), **grouped)  # type: ignore[return-value]


@cache
def _must_ask_for_groups() -> bool:  # since torch 2.12
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _document_by_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None, window: int | None
) -> Tensor:
    out = []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]  # (1, H, T, D)
        mask = None
        if window is not None and window < end - start:
            ones = q.new_ones(end - start, end - start, dtype=torch.bool)
            mask = ones.tril().triu(1 - window)
        out.append(
            F.scaled_dot_product_attention(
                *one, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )[0]
        )
    return torch.cat(out, dim=1).transpose(0, 1)


def attention(
    module: torch.nn.Module,
    query: Tensor,  # (1, H, N, D)
    key: Tensor,  # (1, Hkv, N, D)
    value: Tensor,  # (1, Hkv, N, D)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`varlen_attention` as transformers calls it: output (1, N, H, D), no weights.

    Raises ValueError where documents can't be told apart, and for softcapping and dropout; what
    `varlen_attention` raises (TypeError, ValueError) too.
    """
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise ValueError(
            f"attn_implementation={NAME!r} can't tell documents apart without cu_seqlens: collate "
            "with padding_free and call model(**model_inputs(batch))"
        )
    if softcap is not None or dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} does no softcapping (softcap={softcap}) and no dropout "
            f"({dropout}): take 'flash_attention_2', which does both"
        )
    # Not x[0]: in backward that is a row of zeros, filled, where squeeze is a view.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = varlen_attention(
        q, k, v, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window
    )
    return out[None], None


def register() -> None:
    """Make `NAME` known to transformers, without a mask function: it then builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
