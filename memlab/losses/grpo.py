"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300): advantages and loss.

With rho = exp(log pi - log pi_old), a token of a completion with the advantage A costs
    l = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta k3
    k3 = exp(d) - d - 1,  d = log pi_ref - log pi
(k3: Schulman's estimate of KL(pi || pi_ref), never negative). What a step of B completions pays:
    grpo      sum over completions of the mean of l over its tokens, / B
    dapo      sum of l / tokens                           Yu et al. 2025, arXiv 2503.14476
    bnpo      the same
    dr_grpo   sum of l / (B max_completion_length)        Liu et al. 2025, arXiv 2503.20783
    luspo     sum of l / B                                Liu et al. 2026, arXiv 2602.05261
luspo takes for rho, of every token, its completion's: exp(mean of log pi - log pi_old), which TRL
does with importance_sampling_level="sequence" (Zheng et al. 2025, arXiv 2507.18071).
In TRL dapo counts the whole step's tokens, bnpo each micro-batch's (a mean of means, and the only
difference between them); here every denominator is the whole step's.
"""

import torch
from torch import Tensor

from memlab.losses.sequences import choice, divided, floats, integers, number, whole

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
PER_COMPLETION = ("grpo", "dr_grpo", "luspo")  # the others divide by tokens
SCALES = ("group", "batch", "none")
ALONE = ": a group of 1 has nothing to compare with"
TINY = 1e-4  # beside the standard deviation, as in TRL


def group_advantages(
    rewards: Tensor, num_generations: int, *, scale_rewards: str | bool = "group"
) -> Tensor:
    """A = (R - mean of its group's R) / (std + 1e-4), for the whole step before it is split.

    rewards (B,), each prompt's `num_generations` completions side by side; the std, with Bessel's
    correction, is that of the "group" (True), of the "batch", or "none" (False) divides. A NaN
    reward, a completion nobody could score, is left out of mean and std and gets the advantage 0.
    At least fp32. Raises ValueError for other shapes or switches, TypeError for other dtypes.
    """
    if isinstance(scale_rewards, bool):
        scale_rewards = "group" if scale_rewards else "none"
    choice("scale_rewards", scale_rewards, SCALES)
    grouped = groups(rewards, num_generations)
    advantages = grouped - grouped.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        dims = (1,) if scale_rewards == "group" else (0, 1)
        advantages = advantages / (nanstd(grouped, dims) + TINY)
    return scored(advantages)


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_logps - logps, of any shape: KL(pi || pi_ref) token by token."""
    d = ref_logps - logps
    return torch.expm1(d) - d


def grpo(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_items: int | Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    max_completion_length: int | None = None,
) -> Tensor:
    """The module's formula for `loss_type`, this call's part of a step of `num_items`.

    logps, old_logps, ref_logps (B, T) of the completions' tokens, advantages (B,), mask (B, T) of
    bools or ints 0 and 1: what stands outside it counts nothing, whatever it holds. `num_items` of
    the whole step are completions for `PER_COMPLETION`, tokens of the mask for the others; None
    counts this call's. old_logps None: those of this very policy. The value has at least fp32.
    Raises ValueError or TypeError for other shapes, dtypes, switches or pairs of switches.
    """
    choice("loss_type", loss_type, LOSS_TYPES)
    number("beta", beta, lambda b: b >= 0, "at least 0")
    if beta and ref_logps is None:
        raise ValueError(f"beta={beta!r} needs the reference model: give ref_logps, or beta=0.0")
    (advantages,) = floats("(B,)", advantages=advantages)
    given = {"logps": logps, "old_logps": old_logps, "ref_logps": ref_logps if beta else None}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    tokens = dict(zip(given, floats("(B, T)", **given), strict=True))
    keep = integers("mask", mask, logps).bool()
    tokens = {name: torch.where(keep, tensor, 0.0) for name, tensor in tokens.items()}
    if len(advantages) != len(keep):
        raise ValueError(f"advantages must be one a completion, {len(keep)}, not {len(advantages)}")
    logps = tokens["logps"]
    lengths, log_ratio = keep.sum(1), logps - tokens.get("old_logps", logps.detach())
    if loss_type == "luspo":
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths.clamp(min=1)[:, None]
    losses = -clipped(log_ratio, advantages[:, None], epsilon, epsilon_high)
    if beta:
        losses = losses + beta * k3(logps, tokens["ref_logps"])
    sums = torch.where(keep, losses, 0.0).sum(1)
    if loss_type == "grpo":
        sums = sums / lengths.clamp(min=1)
    if loss_type == "dr_grpo":
        sums = sums / _limit(max_completion_length)
    here = len(sums) if loss_type in PER_COMPLETION else lengths.sum()
    return divided(sums.sum(), num_items, here)


def clipped(
    log_ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None
) -> Tensor:
    """min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), of any shape; None: as `epsilon`."""
    high = epsilon if epsilon_high is None else epsilon_high
    number("epsilon", epsilon, lambda e: e >= 0, "at least 0")
    number("epsilon_high", high, lambda e: e >= 0, "at least 0, or None")
    ratio = log_ratio.exp()
    return torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


def groups(rewards: Tensor, num_generations: int) -> Tensor:
    """rewards (B,) -> (B / num_generations, num_generations), at least fp32.

    Raises ValueError for other shapes or parts of groups, TypeError for other dtypes.
    """
    whole("num_generations", num_generations, 2, ALONE)
    (rewards,) = floats("(B,)", rewards=rewards)
    if len(rewards) % num_generations:
        raise ValueError(
            f"rewards must come in whole groups of num_generations={num_generations}, "
            f"not {len(rewards)}: give the whole step"
        )
    return rewards.view(-1, num_generations)


def nanstd(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Standard deviation of the entries that are not NaN, with Bessel's correction; dims stay."""
    squares = (x - x.nanmean(dims, keepdim=True)) ** 2
    return (squares.nansum(dims, keepdim=True) / ((~x.isnan()).sum(dims, keepdim=True) - 1)).sqrt()


def scored(advantages: Tensor) -> Tensor:
    """(P, G) -> (P G,), with 0 for a completion that could not be scored (NaN)."""
    return torch.where(advantages.isnan(), 0.0, advantages).flatten()


def _limit(max_completion_length: int | None) -> int:
    if max_completion_length is None:
        raise ValueError("loss_type='dr_grpo' divides by it: give max_completion_length")
    whole("max_completion_length", max_completion_length, 1)
    return max_completion_length
