"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): rewards, advantages, loss.

Of the k completions of a prompt, each one's baseline is the mean reward of the others:
    R = reward - beta sum over its tokens of (log pi - log pi_ref)
    A_i = R_i - sum over j != i of R_j / (k - 1)
    loss of a completion = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)
with rho = exp(log pi(y|x) - log pi_old(y|x)) of the whole completion, clipped as TRL does. The KL
is a part of the reward, computed once with the policy that made the rollouts: no gradient flows
through it (grpo, by contrast, has its own in the loss).
"""

import torch
from torch import Tensor

from memlab.losses.grpo import TINY, clipped, groups, nanstd, scored
from memlab.losses.sequences import divided, floats, integers, number


def penalised_rewards(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, mask: Tensor, *, beta: float = 0.05
) -> Tensor:
    """R = rewards - beta sum over the mask of (logps - ref_logps), (B,), without gradient.

    rewards (B,), logps and ref_logps (B, T) of the policy that made the rollouts and the reference,
    mask (B, T) of bools or ints 0 and 1. At least fp32. Raises ValueError for other shapes or a
    negative beta, TypeError for other dtypes.
    """
    number("beta", beta, lambda b: b >= 0, "at least 0")
    (rewards,) = floats("(B,)", rewards=rewards)
    logps, ref_logps = floats("(B, T)", logps=logps, ref_logps=ref_logps)
    if len(rewards) != len(logps):
        raise ValueError(f"rewards must be one a completion, {len(logps)}, not {len(rewards)}")
    kl = torch.where(integers("mask", mask, logps).bool(), logps - ref_logps, 0.0).sum(1)
    return (rewards - beta * kl).detach()


def leave_one_out_advantages(
    rewards: Tensor, num_generations: int, *, normalize_advantages: bool = False
) -> Tensor:
    """A = R - mean of the other R of its group, (B,), for the whole step before it is split.

    rewards (B,), each prompt's `num_generations` completions side by side. `normalize_advantages`
    divides by their std + 1e-4 (their mean is 0 already). A NaN reward, a completion nobody could
    score, is left out, and gets the advantage 0, as does one whose siblings are all NaN.
    At least fp32. Raises ValueError for other shapes or groups, TypeError for other dtypes.
    """
    grouped = groups(rewards, num_generations)
    others = (~grouped.isnan()).sum(1, keepdim=True) - 1
    advantages = grouped - (grouped.nansum(1, keepdim=True) - grouped) / others
    if normalize_advantages:
        advantages = advantages / (nanstd(advantages, (0, 1)) + TINY)
    return scored(advantages)


def rloo(
    logps: Tensor,
    advantages: Tensor,
    num_sequences: int | Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """Sum over completions of the module's loss, / `num_sequences` of the whole step.

    logps, old_logps (B,) sum a completion's tokens (`sequences.sequence_logps`), advantages (B,);
    `num_sequences` None counts these, old_logps None takes those of this very policy. The value has
    at least fp32. Raises ValueError for other shapes or switches, TypeError for other dtypes.
    """
    old_logps = logps.detach() if old_logps is None else old_logps
    logps, old_logps, advantages = floats(
        "(B,)", logps=logps, old_logps=old_logps, advantages=advantages
    )
    gains = clipped(logps - old_logps, advantages, epsilon, epsilon_high)
    return divided(-gains.sum(), num_sequences, len(gains), "num_sequences")
