"""The losses of supervised fine-tuning, from logits: the reference that techniques are held to.

Both reduce as TRL does: a sum over the valid labels (those that are not -100) divided by the number
of valid labels of the whole step, all micro-batches and ranks, never a mean of means.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.losses.sequences import divided

IGNORED = -100


def nll(logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
    """Negative log-likelihood: sum over valid labels of -log p(label), / `num_items`.

    logits (N, V), labels (N,) int64 already shifted; `num_items` None counts these labels. The
    value has at least fp32; without a valid label it is 0, connected to the logits. Rows of -100
    add nothing to it and to the gradient, whatever they hold.
    Raises ValueError for other shapes or no label at all, TypeError for other dtypes.
    """
    total = -_logprobs(logits, labels).sum()
    return divided(total, num_items, (labels != IGNORED).sum())


def dft(logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
    """Dynamic fine-tuning: sum over valid labels of -sg(p(label)) log p(label), / `num_items`.

    sg stops the gradient, so that each token's gradient is nll's times its own probability
    (Wu et al. 2025, arXiv 2508.05629). Arguments, ValueError and TypeError as for
    `nll`.
    """
    logp = _logprobs(logits, labels)
    total = -(logp.detach().exp() * logp).sum()
    return divided(total, num_items, (labels != IGNORED).sum())


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:  # (N, V), (N,) -> (N,), 0 where ignored
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits must be (N, V) and labels (N,), not {shapes}")
    if len(labels) == 0:
        raise ValueError(
            f"labels are empty: give at least one label, {IGNORED} where there is no loss"
        )
    if not logits.is_floating_point() or labels.dtype != torch.int64:
        raise TypeError(
            f"logits must be floats and labels int64, not {logits.dtype}, {labels.dtype}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = torch.where((labels != IGNORED)[:, None], wide, 0.0)
    return -F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
