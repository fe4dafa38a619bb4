"""The losses of direct preference optimization, from log-probabilities of whole completions.

With r(y) = log pi(y|x) - log pi_ref(y|x), and z = beta (r(chosen) - r(rejected)), a pair costs
    sigmoid   -(1 - e) log sigmoid(z) - e log sigmoid(-z)
    robust    (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)
    hinge     max(0, 1 - z)
    ipo       (r(chosen) / |chosen| - r(rejected) / |rejected| - 1 / (2 beta))^2
where e is label_smoothing, the share of pairs taken to be labelled the wrong way round, and |y| a
number of tokens (ipo takes means over tokens, as its authors confirmed to TRL).
Sources: Rafailov et al. 2023 (arXiv 2305.18290), with e Mitchell's conservative DPO; Chowdhury et
al. 2024 (2403.00409); Liu et al. 2023 (2309.06657); Azar et al. 2023 (2310.12036, eq. 17).
TRL 1.16 lets sigmoid ignore label_smoothing, and hinge and ipo too: here the latter refuse it.
"""

import torch.nn.functional as F
from torch import Tensor

from memlab.losses.sequences import choice, divided, floats, integers, number

LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")
SMOOTHED = ("sigmoid", "robust")


def dpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    num_pairs: int | Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
) -> Tensor:
    """Sum over pairs of what the module's formulas say, / `num_pairs` of the whole step.

    Each logps (B,) sums a completion's tokens (`sequences.sequence_logps`); `num_pairs` None counts
    these pairs. The lengths, (B,) ints, count the tokens of each sum: ipo needs them, the others
    do not look. The value has at least fp32. Raises ValueError or TypeError for other shapes,
    dtypes, switches or pairs of switches.
    """
    _check(loss_type, beta, label_smoothing)
    chosen, rejected, ref_chosen, ref_rejected = floats(
        "(B,)",
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
    z = beta * (chosen - rejected)
    if loss_type == "hinge":
        losses = F.relu(1 - z)
    elif loss_type == "ipo":
        chosen = chosen / _lengths("chosen_lengths", chosen_lengths, chosen)
        rejected = rejected / _lengths("rejected_lengths", rejected_lengths, rejected)
        losses = (chosen - rejected - 1 / (2 * beta)) ** 2
    else:
        kept = -(1 - label_smoothing) * F.logsigmoid(z)
        flipped = -label_smoothing * F.logsigmoid(-z)
        if loss_type == "sigmoid":
            losses = kept + flipped
        else:
            losses = (kept - flipped) / (1 - 2 * label_smoothing)
    return divided(losses.sum(), num_pairs, len(losses), "num_pairs")


def _check(loss_type: str, beta: float, label_smoothing: float) -> None:
    choice("loss_type", loss_type, LOSS_TYPES)
    number("beta", beta, lambda b: b > 0, "above 0")
    number("label_smoothing", label_smoothing, lambda e: 0 <= e < 0.5, "at least 0 and below 0.5")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(
            f"label_smoothing={label_smoothing!r} has no meaning for loss_type={loss_type!r}: "
            f"set it to 0, or take loss_type {' or '.join(SMOOTHED)}"
        )


def _lengths(name: str, lengths: Tensor | None, like: Tensor) -> Tensor:
    if lengths is None:
        raise ValueError(f"loss_type='ipo' takes means over tokens: give {name}, a (B,) tensor")
    return integers(name, lengths, like).clamp(min=1)
