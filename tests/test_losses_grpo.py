"""GRPO: worked values, TRL's values, the promises of the docstrings."""

import math

import pytest
import torch
from trl_losses import defaults, scored_rollouts, trainer, trl_class

from memlab.losses.grpo import LOSS_TYPES, PER_COMPLETION, SCALES, group_advantages, grpo, k3

ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 2.0], dtype=torch.float64)
MASK = (torch.arange(7) < torch.tensor([5, 1, 7, 3, 4, 6])[:, None]).long()
LIMIT = 9  # max_completion_length
SWITCHES = [
    {},
    {"epsilon": 0.1, "epsilon_high": 0.28, "beta": 0.04},
    {"epsilon": 0.0, "beta": 1.5},
]
REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0, 2.0, 2.0, 2.0, 2.0, -1.0, 0.25, 7.0, 1.0])
TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.float64: (1e-12, 1e-14)}
nan = float("nan")


def tokens(dtype=torch.float64):
    """log-probabilities (6, 7) of the policy, the old policy, the reference."""
    rng = torch.Generator().manual_seed(7)
    made = -2 * torch.rand(3, 6, 7, generator=rng, dtype=torch.float64)
    logps, old, ref = (row.to(dtype) for row in made)
    return logps.requires_grad_(), old, ref


def loss_of(batch, where=slice(None), items=None, advantages=ADVANTAGES, **switches):
    width = int(MASK[where].sum(1).max())  # a micro-batch is as wide as its own longest row
    logps, old, ref = (row[where, :width] for row in batch)
    given = {"old_logps": old, "ref_logps": ref, "max_completion_length": LIMIT, **switches}
    return grpo(logps, advantages[where].to(logps.dtype), MASK[where, :width], items, **given)


def items_of(loss_type):
    return len(MASK) if loss_type in PER_COMPLETION else int(MASK.sum())


def test_worked_values():
    zero = torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    # the ratio is 1, a token costs -A: 3 tokens of -2, one of 5
    value = lambda loss_type, limit=10: grpo(  # noqa: E731
        zero, torch.tensor([2.0, -5.0]), mask, loss_type=loss_type, max_completion_length=limit
    ).item()
    assert value("grpo") == (-2 + 5) / 2
    assert value("dapo") == value("bnpo") == pytest.approx((-6 + 5) / 4)
    assert value("dr_grpo") == pytest.approx((-6 + 5) / 20)
    assert value("dr_grpo", limit=1) == pytest.approx((-6 + 5) / 2)
    assert value("luspo") == pytest.approx((-6 + 5) / 2)


def test_luspo_has_one_ratio_a_completion():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ratios = torch.tensor([[1.0, 2.0, 1.0], [0.5, 0.5, 9.0]])  # of means 2 ** (1 / 3) and 0.5
    options = {"loss_type": "luspo", "old_logps": torch.zeros(2, 3), "epsilon": 0.3}
    found = grpo(ratios.log(), torch.tensor([2.0, -5.0]), mask, **options)
    costs = -2.0 * 2 ** (1 / 3), 5.0 * 0.7  # the second is clipped
    assert found.item() == pytest.approx((3 * costs[0] + 2 * costs[1]) / 2)


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
    logps = torch.tensor([[math.log(ratio)]], requires_grad=True)
    old, mask = torch.zeros(1, 1), torch.ones(1, 1).bool()
    switches = {"old_logps": old, "epsilon": 0.2, "epsilon_high": 0.3}
    value = grpo(logps, torch.tensor([advantage]), mask, **switches)
    value.backward()
    assert value.item() == pytest.approx(-gain)
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(-slope)


def test_k3():
    logps = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64)
    expected = [0, math.e - 2, math.exp(-1.5) + 0.5]
    assert k3(logps, ref).tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda x: k3(x, ref), logps)
    near = k3(torch.tensor(-1.0), torch.tensor(-1.0001))  # exp(d) - 1 would lose half the digits
    assert near.item() == pytest.approx(0.5e-8, rel=0.02)


def test_k3_estimates_the_divergence():
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), kl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "all", "never off"])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equals_trl(loss_type, old, switches, dtype):
    cls = trl_class("trl.trainer.grpo_trainer", "GRPOTrainer")
    logps, old_logps, ref = tokens(dtype)
    old_logps = old_logps if old else None
    advantages = ADVANTAGES.to(dtype)
    inputs = {
        "prompt_ids": MASK[:, :1],
        "prompt_mask": MASK[:, :1],
        "completion_ids": MASK,
        "completion_mask": MASK,
        "advantages": advantages,
        "old_per_token_logps": old_logps,
        "ref_per_token_logps": ref,
        "num_items_in_batch": MASK.sum(),
    }
    epsilon = switches.get("epsilon", 0.2)
    stub = trainer(
        loss_type=loss_type,
        beta=switches.get("beta", 0.0),
        epsilon_low=epsilon,
        epsilon_high=switches.get("epsilon_high", epsilon),
        max_completion_length=LIMIT,
        importance_sampling_level="sequence" if loss_type == "luspo" else "token",
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros(6, 7), None),
    )
    theirs = cls._compute_loss(stub, None, inputs)
    limit = {"max_completion_length": LIMIT} if loss_type == "dr_grpo" else {}
    ref = ref if "beta" in switches else None
    ours = grpo(
        *(logps, advantages, MASK),
        old_logps=old_logps,
        ref_logps=ref,
        loss_type=loss_type,
        **switches,
        **limit,
    )
    tight = dict(zip(("rtol", "atol"), TOLERANCES[dtype], strict=True))
    torch.testing.assert_close(ours, theirs, **tight)
    (grad,) = torch.autograd.grad(ours, logps)
    (trl_grad,) = torch.autograd.grad(theirs, logps)
    torch.testing.assert_close(grad, trl_grad, **tight)


@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "all", "never off"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradcheck(loss_type, switches):
    logps, old, ref = tokens()
    loss = lambda x: loss_of((x, old, ref), loss_type=loss_type, **switches)  # noqa: E731
    assert torch.autograd.gradcheck(loss, logps)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_of_unequal_sizes_make_the_step(loss_type, as_tensor):
    whole, split, items = tokens(), tokens(), items_of(loss_type)
    switches = {"loss_type": loss_type, **SWITCHES[1]}
    step, total = loss_of(whole, **switches), 0
    step.backward()
    for where in (slice(0, 1), slice(1, 2), slice(2, 6)):
        loss = loss_of(split, where, torch.tensor(items) if as_tensor else items, **switches)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, step)
    torch.testing.assert_close(split[0].grad, whole[0].grad)


@pytest.mark.parametrize("junk", [nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_the_mask_drops_counts_nothing(loss_type, junk):
    clean, dirty = tokens(), tokens()
    dirty = [row.detach().masked_fill(MASK == 0, junk) for row in dirty]
    dirty[0].requires_grad_()
    switches = {"loss_type": loss_type, "beta": 0.1}
    values = [loss_of(batch, **switches) for batch in (clean, dirty)]
    torch.testing.assert_close(*values, rtol=0, atol=0)
    grads = [torch.autograd.grad(v, b[0])[0] for v, b in zip(values, (clean, dirty), strict=True)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert not grads[1][MASK == 0].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_no_token_is_a_connected_zero(loss_type, items):
    logps, *_ = tokens()
    if items == 0 and loss_type in PER_COMPLETION:
        items = items + len(logps)  # completions, of which there are some
    value = grpo(
        *(logps, ADVANTAGES, MASK * 0, items), loss_type=loss_type, max_completion_length=LIMIT
    )
    value.backward()
    assert value == 0
    assert logps.grad is not None
    assert not logps.grad.any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(loss_type, dtype):
    batch = tokens(dtype)
    value = loss_of(batch, loss_type=loss_type, beta=0.1)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    wide, rounded = [row.double() for row in batch], ADVANTAGES.to(dtype).double()
    expected = loss_of(wide, advantages=rounded, loss_type=loss_type, beta=0.1)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)


def test_advantages():
    rewards = torch.tensor([1.0, 3.0, 10.0, 10.0], dtype=torch.float64)
    assert group_advantages(rewards, 2, scale_rewards="none").tolist() == [-1, 1, 0, 0]
    scaled = 1 / (math.sqrt(2) + 1e-4)  # the deviation of 1 and 3
    assert group_advantages(rewards, 2).tolist() == pytest.approx([-scaled, scaled, 0, 0])
    scaled = 1 / (math.sqrt(66 / 3) + 1e-4)  # of all four, around 6
    batch = group_advantages(rewards, 2, scale_rewards="batch")
    assert batch.tolist() == pytest.approx([-scaled, scaled, 0, 0])


@pytest.mark.parametrize("switch", [*SCALES, True, False])
@pytest.mark.parametrize("missing", [[], [1], [0, 1, 2, 5], [4, 5, 6, 7]], ids=str)
def test_advantages_equal_trl(switch, missing, monkeypatch):
    """Missing: completions that no reward function could score."""
    cls = trl_class("trl.trainer.grpo_trainer", "GRPOTrainer")
    rewards = REWARDS.clone()
    rewards[missing] = nan
    policy, mask = torch.zeros(12, 2), torch.ones(12, 2).long()
    scale = {True: "group", False: "none"}.get(switch, switch)
    theirs = scored_rollouts(
        cls, monkeypatch, rewards, 4, policy, policy, mask, scale_rewards=scale, beta=0.0
    )
    ours = group_advantages(rewards, 4, scale_rewards=switch)
    torch.testing.assert_close(ours, theirs["advantages"], rtol=1e-5, atol=1e-6)
    assert not ours[missing].any()


def test_advantages_promote():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        assert group_advantages(REWARDS.to(dtype), 4).dtype == wide


def test_defaults_are_trls():
    config = trl_class("trl.trainer.grpo_config", "GRPOConfig")
    ours, theirs = defaults(grpo, config, but=["max_completion_length"])
    assert ours == theirs
    assert set(ours) == {"loss_type", "epsilon", "epsilon_high", "beta"}
    ours, theirs = defaults(group_advantages, config)
    assert ours == theirs
    assert set(ours) == {"scale_rewards"}


def test_bad_input():
    logps, old, ref = tokens()
    batch = (logps, ADVANTAGES, MASK)
    with pytest.raises(ValueError, match=r"loss_type must be one of grpo, bnpo, .*not 'ppo'"):
        grpo(*batch, loss_type="ppo")
    with pytest.raises(ValueError, match=r"beta=0.1 needs .* give ref_logps, or beta=0.0"):
        grpo(*batch, beta=0.1)
    with pytest.raises(ValueError, match="beta must be at least 0, not -1"):
        grpo(*batch, beta=-1, ref_logps=ref)
    with pytest.raises(ValueError, match=r"dr_grpo.*give max_completion_length"):
        grpo(*batch, loss_type="dr_grpo")
    with pytest.raises(
        ValueError, match="max_completion_length must be a whole number of at least 1, not 0"
    ):
        grpo(*batch, loss_type="dr_grpo", max_completion_length=0)
    for name in ("epsilon", "epsilon_high"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 0.*, not -0.2"):
            grpo(*batch, **{name: -0.2})
        with pytest.raises(TypeError, match=f"^{name} must be a number"):
            grpo(*batch, **{name: "0.2"})
    with pytest.raises(ValueError, match=r"logps and old_logps must have the shape \(B, T\)"):
        grpo(*batch, old_logps=old[:, :2])
    with pytest.raises(ValueError, match="advantages must be one a completion, 6, not 2"):
        grpo(logps, ADVANTAGES[:2], MASK)
    with pytest.raises(ValueError, match=r"mask must have the shape \(6, 7\), not \(2, 7\)"):
        grpo(logps, ADVANTAGES, MASK[:2])
    with pytest.raises(TypeError, match="mask must be a tensor of bools or ints"):
        grpo(logps, ADVANTAGES, MASK.float())
    with pytest.raises(ValueError, match="hold no row"):
        grpo(logps[:0], ADVANTAGES[:0], MASK[:0])


def test_bad_groups():
    with pytest.raises(ValueError, match=r"whole groups of num_generations=5, not 12"):
        group_advantages(REWARDS, 5)
    for size in (1, 2.5):
        with pytest.raises(ValueError, match=f"num_generations must be .* 2: .*, not {size}"):
            group_advantages(REWARDS, size)
    with pytest.raises(TypeError, match="num_generations must be a number"):
        group_advantages(REWARDS, "4")
    with pytest.raises(ValueError, match=r"scale_rewards must be one of group, batch, none, not"):
        group_advantages(REWARDS, 4, scale_rewards="std")
    with pytest.raises(ValueError, match=r"rewards must have the shape \(B,\)"):
        group_advantages(REWARDS.view(3, 4), 4)
