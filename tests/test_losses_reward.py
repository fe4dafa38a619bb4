"""The reward model's loss: worked values, TRL's values, the promises of the docstring."""

import math

import pytest
import torch
from trl_losses import Stub, defaults, trainer, trl_class

from memlab.losses.reward import bradley_terry

MARGIN = torch.tensor([0.5, 0.0, 1.5, -1.0, 0.25], dtype=torch.float64)
SWITCHES = [
    {},
    {"margin": MARGIN},
    {"center_rewards_coefficient": 0.3},
    {"margin": MARGIN, "center_rewards_coefficient": 0.3},
]


def scores(dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    made = 2 * torch.randn(2, 5, generator=rng, dtype=torch.float64)
    return [row.to(dtype).requires_grad_() for row in made]


def test_worked_values():
    two, one, half = (torch.tensor([value]) for value in (2.0, 1.0, 0.5))
    assert bradley_terry(one, one).item() == pytest.approx(math.log(2))
    assert bradley_terry(two, one).item() == pytest.approx(math.log1p(math.exp(-1)))
    with_margin = bradley_terry(two, one, margin=half).item()
    assert with_margin == pytest.approx(math.log1p(math.exp(-0.5)))
    centered = bradley_terry(two, one, center_rewards_coefficient=0.1).item()
    assert centered == pytest.approx(math.log1p(math.exp(-1)) + 0.9)
    assert bradley_terry(two, one, center_rewards_coefficient=0) == bradley_terry(two, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=["plain", "margin", "center", "both"])
def test_equals_trl(switches, dtype):
    cls = trl_class("trl.trainer.reward_trainer", "RewardTrainer")
    chosen, rejected = scores(dtype)
    margin = switches.get("margin")
    switches = switches if margin is None else {**switches, "margin": margin.to(dtype)}
    coefficient = switches.get("center_rewards_coefficient")
    inputs = {"attention_mask": torch.ones(10, 1)}
    if margin is not None:
        inputs["margin"] = switches["margin"]
    model = lambda **_: Stub(logits=torch.cat([chosen, rejected])[:, None])  # noqa: E731
    stub = trainer(args=Stub(center_rewards_coefficient=coefficient))
    theirs = cls.compute_loss(stub, model, inputs)
    ours = bradley_terry(chosen, rejected, **switches)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(ours, [chosen, rejected])
    trl_grads = torch.autograd.grad(theirs, [chosen, rejected])
    torch.testing.assert_close(grads, trl_grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("switches", SWITCHES, ids=["plain", "margin", "center", "both"])
def test_gradcheck(switches):
    assert torch.autograd.gradcheck(lambda *b: bradley_terry(*b, **switches), scores())


@pytest.mark.parametrize("items", [5, torch.tensor(5)])
@pytest.mark.parametrize("switches", SWITCHES, ids=["plain", "margin", "center", "both"])
def test_micro_batches_of_unequal_sizes_make_the_step(switches, items):
    whole, split = scores(), scores()
    step, total = bradley_terry(*whole, **switches), 0
    step.backward()
    for where in (slice(0, 1), slice(1, 5)):
        kept = {**switches, "margin": MARGIN[where]} if "margin" in switches else switches
        loss = bradley_terry(*(row[where] for row in split), items, **kept)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, step)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(dtype):
    batch = scores(dtype)
    value = bradley_terry(*batch, center_rewards_coefficient=0.1)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    wide = bradley_terry(*(row.double() for row in batch), center_rewards_coefficient=0.1)
    torch.testing.assert_close(value.double(), wide, rtol=1e-6, atol=0)


def test_defaults_are_trls():
    config = trl_class("trl.trainer.reward_config", "RewardConfig")
    ours, theirs = defaults(bradley_terry, config)
    assert ours == theirs
    assert set(ours) == {"center_rewards_coefficient"}


def test_bad_input():
    chosen, rejected = scores()
    with pytest.raises(ValueError, match=r"chosen and rejected must have the shape \(B,\)"):
        bradley_terry(chosen[:, None], rejected[:, None])
    with pytest.raises(ValueError, match=r"chosen and rejected and margin .*\(5,\), \(2,\)"):
        bradley_terry(chosen, rejected, margin=MARGIN[:2])
    with pytest.raises(TypeError, match="margin must be a tensor of floats, not float"):
        bradley_terry(chosen, rejected, margin=0.5)
    with pytest.raises(TypeError, match=r"rejected must be a tensor of floats, not torch.int64"):
        bradley_terry(chosen, rejected.long())
    with pytest.raises(ValueError, match="hold no row"):
        bradley_terry(chosen[:0], rejected[:0])
    with pytest.raises(ValueError, match="center_rewards_coefficient must be at least 0, or None"):
        bradley_terry(chosen, rejected, center_rewards_coefficient=-0.1)
    with pytest.raises(TypeError, match="center_rewards_coefficient must be a number"):
        bradley_terry(chosen, rejected, center_rewards_coefficient="0.1")
