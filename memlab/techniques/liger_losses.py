"""Liger's fused losses for DPO, KTO, GRPO and GKD: head and loss together, a few rows at a time.

Computes   a trainer's loss straight from hidden states, and its gradients in the forward pass
Instead of log-probabilities of all tokens first, by way of all the logits
Memory     kept for backward, bf16: the logits of B rows of T tokens, 4*B*T*V -> 2*(B*T+V)*D, the
           gradients; in passing 16 bytes a logit of one pair (DPO), 14 of a row (KTO), 34 of 1024
           tokens (GKD), 20 of a row's 2048 tokens by 4096 words, and 4*V*D (GRPO). The reference
           leaves 2*B*T*D of hidden states (GRPO: 4*B*T), not 8*B or, for GKD, all its logits
Use        dpo.train(..., fused_loss=liger_losses.dpo); gkd.train(..., divergence=liger_losses.jsd)
Price      gradients twice over several micro-batches; GKD's in the logits' dtype, dw even if frozen
Source     Hsu et al. 2024, arXiv 2410.10989; liger-kernel 0.8.5. Apache-2.0; torch 2.11 to 2.13
Unlike     liger_kernel.chunked_loss: what it would ignore is refused; sums a step; never compiled
"""

from numbers import Integral, Real
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def dpo(
    h: Tensor,  # (2B*T, D): the B chosen rows, then the B rejected
    w: Tensor,  # (V, D)
    y: Tensor,  # (2B*T,) int64, -100 where there is no loss
    *,
    rows: int,  # 2B
    reference: dict[str, Any],  # h, w, bias, logit_scale, softcap of the other model
    num_pairs: int | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    **head: Any,  # bias (V,), logit_scale, softcap
) -> Tensor:
    """Sum over pairs / `num_pairs` (None: these). ValueError: not Liger's; ImportError: no Liger"""
    if loss_type not in ("sigmoid", "robust", "hinge"):
        raise _refusal("loss_type", loss_type, "'sigmoid', 'robust' or 'hinge'")
    if label_smoothing and loss_type != "robust":
        raise _refusal("label_smoothing", label_smoothing, "0.0, or loss_type='robust'")
    if not isinstance(rows, Integral) or rows < 2 or rows % 2:
        raise ValueError(f"{rows=}: give two a pair, the chosen rows and then as many rejected")
    loss = _liger("DPO", beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)
    (states, _, bias), labels = _rows(rows, h, w, **head), y.view(rows, -1)
    total, (*_, good, bad) = loss(w, states, labels, bias, *_rows(rows, **reference))
    z, e = good - bad, label_smoothing  # (B,): the value again, Liger's adds 0 / chosen labels
    sided = ((e - 1) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)
    total.detach().copy_((F.relu(1 - z) if loss_type == "hinge" else sided).mean())
    return _of_step(total, rows // 2, _items(num_pairs))


def kto(
    h: Tensor,  # (B*T, D)
    w: Tensor,  # (V, D)
    y: Tensor,  # (B*T,) int64
    *,
    rows: int,  # B
    reference: dict[str, Any],
    desirable: Tensor,  # (B,) bool
    kl: Tensor,  # () of the whole step
    num_rows: int | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **head: Any,
) -> Tensor:
    """Sum over rows / `num_rows` (None: these). ValueError: not Liger's; ImportError: no Liger"""
    if (weights := (desirable_weight, undesirable_weight)) != (1, 1):
        raise _refusal("desirable_weight, undesirable_weight", weights, "1.0 for both")
    loss = _liger("KTO", beta=beta, use_ref_model=True)
    (states, _, bias), labels = _rows(rows, h, w, **head), y.view(rows, -1)
    total = loss(states, w, labels, bias, desirable, *_rows(rows, **reference), kl=kl)[0]
    return _of_step(total, rows, _items(num_rows))


def grpo(
    h: Tensor,  # (B*S, D)
    w: Tensor,  # (V, D)
    y: Tensor,  # (B*S,) int64, -100 outside the completions
    *,
    advantages: Tensor,  # (B,)
    num_items: int | None = None,
    old_logps: Tensor | None = None,  # (B, S)
    ref_logps: Tensor | None = None,  # (B, S)
    loss_type: str = "dapo",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    max_completion_length: int | None = None,
    **head: Any,  # a logit_scale above 0, too
) -> Tensor:
    """Part of a step of `num_items` completions (*grpo), tokens. ValueError, ImportError as dpo"""
    if loss_type not in ("grpo", "dr_grpo", "dapo", "bnpo"):
        raise _refusal("loss_type", loss_type, "'grpo', 'dr_grpo', 'dapo' or 'bnpo'")
    if loss_type == "dr_grpo" and not max_completion_length:
        raise ValueError(f"loss_type='dr_grpo' divides by {max_completion_length=}: give 1 or more")
    if beta and ref_logps is None:
        raise ValueError(f"{beta=} needs the reference model: give ref_logps, or beta=0.0")
    if not isinstance(scale := head.pop("logit_scale", 1.0), Real) or not 0 < float(scale) < 1e99:
        raise ValueError(f"logit_scale={scale!r}: give a finite number above 0")
    kind, mask = loss_type.replace("bnpo", "dapo"), (y != -100).view(len(advantages), -1)
    items = _items(num_items, y if kind == "dapo" else None)
    clip = {"epsilon_low": epsilon, "epsilon_high": (epsilon_high, epsilon)[epsilon_high is None]}
    limit = {"max_completion_length": max_completion_length, "temperature": 1 / scale}
    loss = _liger("GRPO", loss_type=kind, beta=beta, use_ref_model=bool(beta), **clip, **limit)
    (states, _, bias), ids = _rows(len(mask), h, w, **head), y.view_as(mask).where(mask, 0)
    w.detach()[:, 0].gather(0, ids.flatten())  # Liger takes a label that is no word; this does not
    others = advantages, bias, ref_logps, old_logps
    total = loss(states, w, ids, mask, *others, num_items_in_batch=items)[0]
    return total if kind == "dapo" else _of_step(total, len(mask), items)


def jsd(
    h, w, y, *, teacher: dict[str, Any], num_items_in_batch=None, beta=0.5, temperature=1.0, **head
) -> Tensor:
    """h (N, D), w (V, D), y (N,): sum of JSD / the step's labels. ValueError, ImportError as dpo"""
    if len(teacher["w"]) != len(w):
        raise _refusal("teacher's vocabulary", len(teacher["w"]), f"the student's {len(w)}")
    loss = _liger("JSD", beta=beta, temperature=temperature, weight_hard_loss=0, weight_soft_loss=1)
    *student, bias = _rows(None, h, w, **head)
    *other, b = _rows(None, **teacher)
    total, items = loss(*student, *other, y, bias, b), _items(num_items_in_batch, y)
    return _of_step(total, int((y != -100).sum()), items)


def _rows(rows, h, w, bias=None, logit_scale=1.0, softcap=None):  # (rows, T, D) or h, w, bias
    for name, value, none in (("softcap", softcap, None), ("logit_scale", logit_scale, 1)):
        if value != none:
            raise _refusal(f"the head's {name}", value, "a model without one")
    return h if rows is None else h.view(rows, -1, h.shape[1]), w, bias


def _items(n: Any, y: Tensor | None = None) -> Any:  # 0 only where none of y is a label
    if isinstance(n, Tensor) and n.numel() == 1:  # not read: that would wait for its card
        return n.clamp(min=1).reshape(())
    number = n is None or (isinstance(n, Real) and not isinstance(n, bool) and float(n) < 1e99)
    if not number or (n is not None and n < (n != 0 or y is None or bool((y != -100).any()))):
        raise ValueError(f"{n!r:.60} items in the step: give a number from 1 up, or None for these")
    return n


def _of_step(mean: Tensor, here: int, n: Any) -> Tensor:  # a part of the mean over a step's n
    if n is None or (not isinstance(n, Tensor) and n == here):
        return mean  # not * 1: a copy
    return mean * (here / n)


def _liger(name: str, **options: Any) -> Any:
    for option, value in options.items():  # no number of theirs may be negative
        above = option == ("beta" if name in ("DPO", "KTO") else "temperature")
        least, most = 1e-99 if above else 0, 1 if (name, option) == ("JSD", "beta") else 1e99
        text = isinstance(value, str) and option != "loss_type"
        if text or (isinstance(value, int | float) and not least <= value <= most):
            works = "0 to 1" if most == 1 else "a number above 0" if above else "a number from 0 up"
            raise ValueError(f"{option.removesuffix('_low')}={value!r}: give {works}")
    try:
        from liger_kernel import chunked_loss
    except ImportError as error:
        raise ImportError("use_liger_kernel=True needs liger-kernel: install it") from error
    return getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(compiled=False, **options)


def _refusal(name: str, value: object, works: str) -> ValueError:
    problem = f"{name}={value!r} with use_liger_kernel=True: Liger's loss has no such thing"
    return ValueError(f"{problem}; give {works}, or use_liger_kernel=False")
