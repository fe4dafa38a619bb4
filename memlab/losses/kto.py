"""The loss of Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306).

With r(y) = log pi(y|x) - log pi_ref(y|x), and z0 an estimate of KL(pi || pi_ref), a row costs
    desirable      desirable_weight   (1 - sigmoid(beta (r - z0)))
    undesirable    undesirable_weight (1 - sigmoid(beta (z0 - r)))
No gradient flows through z0. TRL skips rows whose loss is NaN; here a NaN stays to be seen.
"""

import torch
from torch import Tensor

from memlab.losses.sequences import divided, floats, integers, number


def kl_estimate(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """z0 = max(0, mean of log pi(y'|x) - log pi_ref(y'|x)), without gradient, at least fp32.

    logps, ref_logps (B,): prompts x with completions y' of other rows. Take it over the whole step
    at once, before the step is split (it cannot be put together from parts), and over all ranks.
    Raises ValueError for other shapes and for a single row, TypeError for other dtypes.
    """
    logps, ref_logps = floats("(B,)", logps=logps, ref_logps=ref_logps)
    if len(logps) == 1:
        raise ValueError(
            "kl_estimate pairs each prompt with another row's completion: give the whole step, "
            "at least 2 rows, not 1"
        )
    return (logps - ref_logps).mean().clamp(min=0).detach()


def kto(
    logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    num_rows: int | Tensor | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Sum over rows of what the module's formulas say, / `num_rows` of the whole step.

    logps, ref_logps (B,) sum a completion's tokens (`sequences.sequence_logps`), desirable (B,)
    bool, kl () the whole step's `kl_estimate`; `num_rows` None counts these rows. The value has at
    least fp32. Raises ValueError for other shapes, beta or weights, TypeError for other types.
    """
    number("beta", beta, lambda b: b > 0, "above 0")
    number("desirable_weight", desirable_weight, lambda w: w >= 0, "at least 0")
    number("undesirable_weight", undesirable_weight, lambda w: w >= 0, "at least 0")
    logps, ref_logps = floats("(B,)", logps=logps, ref_logps=ref_logps)
    integers("desirable", desirable, logps, only=torch.bool)
    if isinstance(kl, Tensor):
        if kl.numel() != 1:
            raise ValueError(f"kl must be one number for the step, not {tuple(kl.shape)}")
        kl = kl.detach()
    gain = beta * (logps - ref_logps - kl)
    lost = torch.sigmoid(torch.where(desirable, -gain, gain))  # sigmoid(-u) = 1 - sigmoid(u)
    losses = torch.where(desirable, desirable_weight * lost, undesirable_weight * lost)
    return divided(losses.sum(), num_rows, len(losses), "num_rows")
