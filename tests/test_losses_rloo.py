"""RLOO: worked values, TRL's values, the promises of the docstrings."""

import math

import pytest
import torch
from trl_losses import defaults, scored_rollouts, trainer, trl_class

from memlab.losses.rloo import leave_one_out_advantages, penalised_rewards, rloo
from memlab.losses.sequences import sequence_logps

ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 2.0], dtype=torch.float64)
MASK = (torch.arange(7) < torch.tensor([5, 1, 7, 3, 4, 6])[:, None]).long()
REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0, 2.0, 2.5])
SWITCHES = [{}, {"epsilon": 0.1, "epsilon_high": 0.28}]
nan = float("nan")


def tokens(dtype=torch.float64):
    """log-probabilities (6, 7) of the policy, the old policy, the reference: each near the next."""
    rng = torch.Generator().manual_seed(8)
    made = -torch.rand(3, 6, 7, generator=rng, dtype=torch.float64)
    logps, old, ref = ((made[0] + 0.1 * row).to(dtype) for row in made)
    return logps.requires_grad_(), old, ref


def sums(dtype=torch.float64):
    logps, old, _ = (sequence_logps(row.detach(), MASK) for row in tokens(torch.float64))
    return logps.to(dtype).requires_grad_(), old.to(dtype)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.6, 0.0),  # too high for a good one: 1 + epsilon_high
        (0.5, 2.0, 1.0, 1.0),
        (1.5, -2.0, -3.0, -3.0),
        (0.5, -2.0, -1.6, 0.0),  # too low for a bad one: 1 - epsilon
    ],
)
def test_clipping(ratio, advantage, gain, slope):
    logps = torch.tensor([math.log(ratio), 5.0], requires_grad=True)
    old, advantages = torch.tensor([0.0, 5.0]), torch.tensor([advantage, 0.5])
    value = rloo(logps, advantages, old_logps=old, epsilon=0.2, epsilon_high=0.3)
    value.backward()
    assert value.item() == pytest.approx(-(gain + 0.5) / 2)
    assert logps.grad is not None
    assert logps.grad.tolist() == pytest.approx([-slope / 2, -0.25])


def test_a_fresh_policy_has_the_gradient_of_reinforce():
    """Without old_logps the ratio is 1 and its gradient that of -A log pi."""
    logps, _ = sums()
    value = rloo(logps, ADVANTAGES)
    torch.testing.assert_close(value, -ADVANTAGES.mean())
    (grad,) = torch.autograd.grad(value, logps)
    torch.testing.assert_close(grad, -ADVANTAGES / 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "both"])
def test_equals_trl(switches, dtype):
    cls = trl_class("trl.trainer.rloo_trainer", "RLOOTrainer")
    logps, old, _ = tokens(dtype)
    advantages = ADVANTAGES.to(dtype)
    inputs = {
        "prompt_ids": MASK[:, :1],
        "prompt_mask": MASK[:, :1],
        "completion_ids": MASK,
        "completion_mask": MASK,
        "advantages": advantages,
        "old_logps": sequence_logps(old, MASK),
    }
    epsilon = switches.get("epsilon", 0.2)
    stub = trainer(
        epsilon_low=epsilon,
        epsilon_high=switches.get("epsilon_high", epsilon),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros(6, 7), None),
    )
    theirs = cls._compute_loss(stub, None, inputs)
    old_sums = sequence_logps(old, MASK)
    ours = rloo(sequence_logps(logps, MASK), advantages, old_logps=old_sums, **switches)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (grad,) = torch.autograd.grad(ours, logps)
    (trl_grad,) = torch.autograd.grad(theirs, logps)
    assert (grad[MASK == 1] == 0).any()  # some ratio is clipped
    torch.testing.assert_close(grad, trl_grad, rtol=1e-5, atol=1e-7)


def test_penalised_rewards_by_hand():
    logps = torch.tensor([[-1.0, -2.0, nan], [-3.0, 9.0, 9.0]], requires_grad=True)
    ref = torch.tensor([[-2.0, -2.5, 0.0], [-2.0, 0.0, nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    made = penalised_rewards(torch.tensor([5.0, 7.0]), logps, ref, mask, beta=2.0)
    assert made.tolist() == [5 - 2 * 1.5, 7 + 2 * 1.0]  # may be negative, unlike grpo's k3
    assert not made.requires_grad


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])
    made = leave_one_out_advantages(rewards, 3)
    assert made.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]
    scaled = leave_one_out_advantages(rewards, 3, normalize_advantages=True)
    torch.testing.assert_close(scaled, (made - made.mean()) / (made.std() + 1e-4))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("missing", [[], [1], [0, 2], [3, 4, 5]], ids=str)
def test_rewards_and_advantages_equal_trl(beta, normalize, missing, monkeypatch):
    """Missing: completions that no reward function could score."""
    cls = trl_class("trl.trainer.rloo_trainer", "RLOOTrainer")
    rewards = REWARDS.clone()
    rewards[missing] = nan
    policy, _, ref = (row.detach() for row in tokens(torch.float32))
    theirs = scored_rollouts(
        *(cls, monkeypatch, rewards, 3, policy, ref, MASK),
        beta=beta,
        normalize_advantages=normalize,
    )
    penalised = penalised_rewards(rewards, policy, ref, MASK, beta=beta)
    ours = leave_one_out_advantages(penalised, 3, normalize_advantages=normalize)
    torch.testing.assert_close(ours, theirs["advantages"], rtol=1e-5, atol=1e-6)
    assert not ours[missing].any()


@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "both"])
def test_gradcheck(switches):
    logps, old = sums()
    loss = lambda x: rloo(x, ADVANTAGES, old_logps=old, **switches)  # noqa: E731
    assert torch.autograd.gradcheck(loss, logps)


@pytest.mark.parametrize("items", [6, torch.tensor(6)])
def test_micro_batches_of_unequal_sizes_make_the_step(items):
    (whole, old), (split, _) = sums(), sums()
    step, total = rloo(whole, ADVANTAGES, old_logps=old), 0
    step.backward()
    for where in (slice(0, 1), slice(1, 6)):
        loss = rloo(split[where], ADVANTAGES[where], items, old_logps=old[where])
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, step)
    torch.testing.assert_close(split.grad, whole.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    logps, old = sums(dtype)
    advantages = ADVANTAGES.to(dtype)
    value = rloo(logps, advantages, old_logps=old)
    expected = rloo(logps.double(), advantages.double(), old_logps=old.double())
    assert value.dtype == wide
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    policy, _, ref = tokens(dtype)
    made = penalised_rewards(REWARDS.to(dtype), policy, ref, MASK)
    assert made.dtype == wide
    assert leave_one_out_advantages(REWARDS.to(dtype), 3).dtype == wide


def test_defaults_are_trls():
    config = trl_class("trl.trainer.rloo_config", "RLOOConfig")
    ours, theirs = defaults(rloo, config)
    assert ours == theirs
    assert set(ours) == {"epsilon", "epsilon_high"}
    ours, theirs = defaults(penalised_rewards, config)
    assert ours == theirs
    assert set(ours) == {"beta"}
    ours, theirs = defaults(leave_one_out_advantages, config)
    assert ours == theirs
    assert set(ours) == {"normalize_advantages"}


def test_bad_input():
    logps, old = sums()
    policy, _, ref = tokens()
    for name in ("epsilon", "epsilon_high"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 0.*, not -0.2"):
            rloo(logps, ADVANTAGES, **{name: -0.2})
    with pytest.raises(ValueError, match=r"logps and old_logps and advantages .*\(B,\)"):
        rloo(logps, ADVANTAGES, old_logps=old[:2])
    with pytest.raises(ValueError, match=r"logps and old_logps and advantages .*\(B,\)"):
        rloo(policy, ADVANTAGES)
    with pytest.raises(ValueError, match="beta must be at least 0, not -1"):
        penalised_rewards(REWARDS, policy, ref, MASK, beta=-1)
    with pytest.raises(ValueError, match="rewards must be one a completion, 6, not 2"):
        penalised_rewards(REWARDS[:2], policy, ref, MASK)
    with pytest.raises(ValueError, match=r"mask must have the shape \(6, 7\), not \(2, 7\)"):
        penalised_rewards(REWARDS, policy, ref, MASK[:2])
    with pytest.raises(ValueError, match=r"whole groups of num_generations=4, not 6"):
        leave_one_out_advantages(REWARDS, 4)
    with pytest.raises(ValueError, match=r"num_generations must be .* at least 2.*, not 1"):
        leave_one_out_advantages(REWARDS, 1)
