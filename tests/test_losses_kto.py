"""KTO: worked values, TRL's values, the promises of the docstrings."""

import math

import pytest
import torch
from trl_losses import defaults, language_model, trainer, trl_class

from memlab.losses.kto import kl_estimate, kto

DESIRABLE = torch.tensor([True, False, False, True, False])
SWITCHES = [{}, {"beta": 0.8, "desirable_weight": 1.5, "undesirable_weight": 0.5}]


def rows(dtype=torch.float64, seed=4):
    rng = torch.Generator().manual_seed(seed)
    made = -3 * torch.rand(2, 5, generator=rng, dtype=torch.float64)
    return [row.to(dtype).requires_grad_() for row in made]


def test_worked_values():
    logps, ref = torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0])
    kl = kl_estimate(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
    assert kl.item() == 0.5
    assert kl_estimate(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0])).item() == 0
    good = 1 / (1 + math.exp(2.0 * 1.5))  # 1 - sigmoid(beta (2 - 0.5))
    only = kto(logps, ref, torch.tensor([True, True]), kl, beta=2.0)
    assert only.item() == pytest.approx(good)
    both = torch.tensor([True, False])
    for name, kept in (("desirable_weight", 1 - good), ("undesirable_weight", good)):
        value = kto(logps, ref, both, kl, beta=2.0, **{name: 0}).item()
        assert value == pytest.approx(kept / 2)
    weights = {"desirable_weight": 3.0, "undesirable_weight": 5.0}
    value = kto(logps, ref, both, kl, beta=2.0, **weights).item()
    assert value == pytest.approx((3 * good + 5 * (1 - good)) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "weights"])
@pytest.mark.parametrize("desirable", [DESIRABLE, DESIRABLE | True, DESIRABLE & False], ids=str)
@pytest.mark.parametrize("higher", ["policy", "reference"])
def test_equals_trl(desirable, switches, dtype, higher):
    cls = trl_class("trl.trainer.kto_trainer", "KTOTrainer")
    logps, ref = rows(dtype)
    kl_logps, ref_kl = (row.detach() for row in rows(dtype, seed=5))
    kl_logps = kl_logps + (2 if higher == "policy" else -5)  # below the reference, z0 is clamped
    defaults = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    stub = trainer(
        calculate_KL=True,
        loss_type="kto",
        _compute_kl_logps=lambda *_: kl_logps,
        **{**defaults, **switches},
    )
    ones = torch.ones(5, 2, dtype=torch.int64)
    inputs = {
        "input_ids": ones,
        "attention_mask": ones,
        "completion_mask": ones,
        "label": desirable,
        "ref_logps": ref,
        "ref_KL_logps": ref_kl,
    }
    theirs = cls._compute_loss(stub, language_model(logps[:, None]), inputs, False)
    kl = kl_estimate(kl_logps, ref_kl)
    assert (kl > 0) == (higher == "policy")
    ours = kto(logps, ref, desirable, kl, **switches)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(ours, logps)
    (trl_grad,) = torch.autograd.grad(theirs, logps)
    torch.testing.assert_close(grad, trl_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("switches", SWITCHES, ids=["defaults", "weights"])
def test_gradcheck(switches):
    assert torch.autograd.gradcheck(lambda *b: kto(*b, DESIRABLE, 0.3, **switches), rows())


def test_no_gradient_through_the_estimate():
    logps, ref = rows()
    assert not kl_estimate(logps, ref).requires_grad
    loose = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    kto(logps, ref, DESIRABLE, loose).backward()
    assert loose.grad is None


@pytest.mark.parametrize("items", [5, torch.tensor(5)])
def test_micro_batches_of_unequal_sizes_make_the_step(items):
    """With z0 of the whole step, a part may hold rows of one class only."""
    whole, split, switches = rows(), rows(), SWITCHES[1]
    kl = kl_estimate(whole[0] + 2, whole[1])
    step, total = kto(*whole, DESIRABLE, kl, **switches), 0
    step.backward()
    for where in (slice(0, 1), slice(1, 5)):
        loss = kto(*(row[where] for row in split), DESIRABLE[where], kl, items, **switches)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, step)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(dtype):
    batch = rows(dtype)
    kl = kl_estimate(batch[0] + 2, batch[1])
    value = kto(*batch, DESIRABLE, kl)
    assert kl.dtype == value.dtype == torch.promote_types(dtype, torch.float32)
    wide = kto(*(row.double() for row in batch), DESIRABLE, kl.double())
    torch.testing.assert_close(value.double(), wide, rtol=1e-6, atol=0)


def test_far_rows_stay_finite():
    logps = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    value = kto(logps, torch.zeros(4), torch.tensor([True, True, False, False]), 0.0)
    value.backward()
    assert value == 0.5
    assert logps.grad is not None
    assert not logps.grad.any()


def test_defaults_are_trls():
    config = trl_class("trl.trainer.kto_config", "KTOConfig")
    ours, theirs = defaults(kto, config)
    assert ours == theirs
    assert set(ours) == {"beta", "desirable_weight", "undesirable_weight"}


def test_bad_input():
    logps, ref = rows()
    with pytest.raises(ValueError, match="at least 2 rows, not 1"):
        kl_estimate(logps[:1], ref[:1])
    with pytest.raises(ValueError, match=r"logps and ref_logps must have the shape \(B,\)"):
        kl_estimate(logps, ref[:2])
    with pytest.raises(ValueError, match=r"logps and ref_logps must have the shape \(B,\)"):
        kto(logps, ref[:2], DESIRABLE, 0.0)
    with pytest.raises(ValueError, match="hold no row"):
        kto(logps[:0], ref[:0], DESIRABLE[:0], 0.0)
    with pytest.raises(TypeError, match=r"desirable must be a tensor of torch.bool, not torch.int"):
        kto(logps, ref, DESIRABLE.long(), 0.0)
    with pytest.raises(ValueError, match=r"desirable must have the shape \(5,\), not \(2,\)"):
        kto(logps, ref, DESIRABLE[:2], 0.0)
    with pytest.raises(ValueError, match=r"kl must be one number for the step, not \(5,\)"):
        kto(logps, ref, DESIRABLE, logps)
    with pytest.raises(ValueError, match="beta must be above 0, not 0"):
        kto(logps, ref, DESIRABLE, 0.0, beta=0)
    for name in ("desirable_weight", "undesirable_weight"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 0, not -1"):
            kto(logps, ref, DESIRABLE, 0.0, **{name: -1})
        with pytest.raises(TypeError, match=f"^{name} must be a number"):
            kto(logps, ref, DESIRABLE, 0.0, **{name: "1"})
