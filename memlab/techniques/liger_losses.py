"""Liger's fused losses for DPO, KTO, GRPO and GKD: head and loss together, a few rows at a time.

Computes   a trainer's loss straight from hidden states, and its gradients in the forward pass
Instead of log-probabilities of all tokens first, by way of all the logits
Memory     kept for backward, bf16: the logits of B rows of T tokens, 4*B*T*V -> 2*(B*T+V)*D, the
           gradients; in passing those of one pair (DPO), row (KTO) or 1024 tokens (GKD) at a time,
           and of 2048 tokens by 4096 words (GRPO). The reference leaves 2*B*T*D of hidden states
           (GRPO: 4*B*T) where it would leave 8*B or, for GKD, all its logits
Use        dpo.train(..., fused_loss=liger_losses.dpo); gkd.train(..., divergence=liger_losses.jsd)
Price      a second copy of the gradients where a step has several micro-batches; GKD's divergence
           in the dtype of the logits, and dw even of a frozen head
Source     Hsu et al. 2024, arXiv 2410.10989; liger-kernel 0.8.5
Unlike     liger_kernel.chunked_loss: what it would ignore is refused; a sum over the step, not a
           mean of means; never compiled, as a simulated card is not. Apache-2.0; torch 2.11 to 2.13
"""

from typing import Any

from torch import Tensor

GRPO = ("grpo", "dr_grpo", "dapo", "bnpo")


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
    """Sum over pairs / `num_pairs` of the step (None: these). ValueError: what Liger has not."""
    if loss_type not in ("sigmoid", "robust", "hinge"):
        raise _refusal("loss_type", loss_type, "'sigmoid', 'robust' or 'hinge'")
    if label_smoothing and loss_type != "robust":
        raise _refusal("label_smoothing", label_smoothing, "0.0, or loss_type='robust'")
    loss = _liger("DPO", beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)
    (states, _, bias), labels = _rows(rows, h, w, **head), y.view(rows, -1)
    total = loss(w, states, labels, bias, *_rows(rows, **reference))[0]
    return _of_step(total, rows // 2, num_pairs)


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
    """Sum over rows / `num_rows` of the step (None: these). ValueError: weights."""
    weights = desirable_weight, undesirable_weight
    if weights != (1, 1):
        raise _refusal("desirable_weight, undesirable_weight", weights, "1.0 for both")
    loss = _liger("KTO", beta=beta, use_ref_model=True)
    (states, _, bias), labels = _rows(rows, h, w, **head), y.view(rows, -1)
    other = _rows(rows, **reference)
    return _of_step(loss(states, w, labels, bias, desirable, *other, kl=kl)[0], rows, num_rows)


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
    logit_scale: float = 1.0,  # any
    **head: Any,
) -> Tensor:
    """This call's part of a step of `num_items` completions ("grpo", "dr_grpo") or tokens."""
    if loss_type not in GRPO:
        raise _refusal("loss_type", loss_type, " or ".join(map(repr, GRPO)))
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("loss_type='dr_grpo' divides by it: give max_completion_length")
    high = epsilon if epsilon_high is None else epsilon_high
    clip = {"epsilon_low": epsilon, "epsilon_high": high}
    limit = {"max_completion_length": max_completion_length, "temperature": 1 / logit_scale}
    kind = "dapo" if loss_type == "bnpo" else loss_type
    loss = _liger("GRPO", loss_type=kind, beta=beta, use_ref_model=bool(beta), **clip, **limit)
    rows, keep = len(advantages), y != -100
    states, _, bias = _rows(rows, h, w, **head)
    ids, mask = y.where(keep, 0).view(rows, -1), keep.view(rows, -1)
    others = advantages, bias, ref_logps, old_logps
    total = loss(states, w, ids, mask, *others, num_items_in_batch=num_items)[0]
    return total if kind == "dapo" else _of_step(total, rows, num_items)


def jsd(
    h: Tensor,  # (N, D)
    w: Tensor,  # (V, D)
    y: Tensor,  # (N,) int64
    *,
    teacher: dict[str, Any],  # h, w, bias, logit_scale, softcap
    num_items_in_batch: int | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    **head: Any,
) -> Tensor:
    """Sum of the generalized JSD over labels, / those of the step. ValueError: vocabularies."""
    if len(teacher["w"]) != len(w):
        raise _refusal("teacher's vocabulary", len(teacher["w"]), f"the student's {len(w)}")
    here = int((y != -100).sum())
    loss = _liger("JSD", beta=beta, temperature=temperature, weight_hard_loss=0, weight_soft_loss=1)
    *student, bias = _rows(None, h, w, **head)
    *other, other_bias = _rows(None, **teacher)
    return _of_step(loss(*student, *other, y, bias, other_bias), here, num_items_in_batch)


def _rows(rows, h, w, bias=None, logit_scale=1.0, softcap=None):  # (rows, T, D) or h, w, bias
    if softcap is not None or logit_scale != 1:
        name, value = ("softcap", softcap) if softcap is not None else ("logit_scale", logit_scale)
        raise _refusal(f"the head's {name}", value, "a model without one")
    return h if rows is None else h.view(rows, -1, h.shape[1]), w, bias


def _of_step(mean: Tensor, here: int, whole: int | None) -> Tensor:  # a part of the step's mean
    return mean if whole in (None, here) else mean * (here / whole)  # times 1 copies gradients too


def _liger(name: str, **options: Any) -> Any:
    try:
        from liger_kernel import chunked_loss
    except ImportError as error:
        raise ImportError("use_liger_kernel=True needs liger-kernel: install it") from error
    return getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(compiled=False, **options)


def _refusal(name: str, value: object, works: str) -> ValueError:
    problem = f"{name}={value!r} with use_liger_kernel=True: Liger's loss has no such thing"
    return ValueError(f"{problem}; give {works}, or use_liger_kernel=False")
