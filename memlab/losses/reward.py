"""The loss of a reward model, from its scalar scores of chosen and rejected answers."""

import torch.nn.functional as F
from torch import Tensor

from memlab.losses.sequences import divided, floats, number


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    num_pairs: int | Tensor | None = None,
    *,
    margin: Tensor | None = None,
    center_rewards_coefficient: float | None = None,
) -> Tensor:
    """Sum over pairs of -log sigmoid(chosen - rejected - margin), / `num_pairs` of the whole step.

    Bradley and Terry 1952; the margin, how much better each chosen answer is, from Llama 2
    (arXiv 2307.09288, eq. 2). `center_rewards_coefficient` c adds c (chosen + rejected)^2 to a pair
    (Eisenstein et al. 2023, arXiv 2312.09244): differences leave the mean score free, this pulls
    it to 0. chosen, rejected and margin (B,); `num_pairs` None counts these pairs. The value has at
    least fp32. Raises ValueError for other shapes or a negative coefficient, TypeError for other
    dtypes.
    """
    offered = {"chosen": chosen, "rejected": rejected}
    if margin is not None:
        offered["margin"] = margin
    chosen, rejected, *margins = floats("(B,)", **offered)
    losses = -F.logsigmoid(chosen - rejected - sum(margins))
    if center_rewards_coefficient is not None:
        wanted = "at least 0, or None"
        number("center_rewards_coefficient", center_rewards_coefficient, lambda c: c >= 0, wanted)
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return divided(losses.sum(), num_pairs, len(losses), "num_pairs")
