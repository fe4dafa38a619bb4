"""Generalized knowledge distillation (Agarwal et al. 2023, arXiv 2306.13649), from logits."""

import math

import torch
from torch import Tensor

from memlab.losses.sequences import divided, floats, integers, number
from memlab.losses.sft import IGNORED


def generalized_jsd(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    num_items: int | Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Sum over valid labels of the divergence of teacher P and student Q, / `num_items`.

    With M = beta P + (1 - beta) Q, it is beta KL(P || M) + (1 - beta) KL(Q || M) (eq. 1). At both
    ends that is 0, so as in TRL the ends mean what it tends to per unit of beta, or of 1 - beta:
    beta 0 is KL(P || Q), as in plain distillation, beta 1 is KL(Q || P), which seeks modes.

    student, teacher (N, V): logits (or log-probabilities), both divided by `temperature`; labels
    (N,) int64 already shifted, of which only -100, no loss, matters: those rows add nothing to the
    value and the gradient, whatever they hold. A word of logit -inf is one that is never said, and
    counts as 1e30 below the row's best: 0 log 0 is 0. `num_items` of the whole step, None counts
    these labels. The value has at least fp32; without a valid label it is 0, connected.
    Raises ValueError for other shapes, vocabularies or switches, TypeError for other dtypes.
    """
    number("beta", beta, lambda b: 0 <= b <= 1, "between 0 and 1")
    number("temperature", temperature, lambda t: t > 0, "above 0")
    student, teacher = floats("(N, V)", student=student, teacher=teacher)
    integers("labels", labels, student[:, 0], only=torch.int64)
    keep = labels != IGNORED
    q, p = (_log_softmax(logits / temperature, keep) for logits in (student, teacher))
    if beta == 0:
        rows = _kl(p, q)
    elif beta == 1:
        rows = _kl(q, p)
    else:
        m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
        rows = beta * _kl(p, m) + (1 - beta) * _kl(q, m)
    return divided(torch.where(keep, rows, 0.0).sum(), num_items, keep.sum())


def _log_softmax(x: Tensor, keep: Tensor) -> Tensor:  # (N, V) that is overwritten, (N,) -> (N, V)
    with torch.no_grad():  # what changes gets no gradient anyway
        x.masked_fill_(~keep[:, None], 0.0)
        x.clamp_(min=x.amax(-1, keepdim=True) - 1e30)
    return x.log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:  # log-probabilities (N, V), (N, V) -> KL(p || q), (N,)
    return (p.exp() * (p - q)).sum(-1)
