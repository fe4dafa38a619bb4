"""DPO losses: worked values, TRL's values, the promises of the docstrings."""

import inspect
import math

import pytest
import torch
from trl_losses import defaults, language_model, trainer, trl_class

from memlab.losses.dpo import LOSS_TYPES, dpo
from memlab.losses.sequences import sequence_logps

SWITCHES = [
    {"loss_type": "sigmoid"},
    {"loss_type": "sigmoid", "beta": 0.7, "label_smoothing": 0.2},
    {"loss_type": "robust", "beta": 0.7},
    {"loss_type": "robust", "beta": 0.7, "label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.7},
    {"loss_type": "ipo"},
    {"loss_type": "ipo", "beta": 2.0},
]
LENGTHS = {
    "chosen_lengths": torch.tensor([4, 1, 6, 3, 2]),
    "rejected_lengths": torch.tensor([2, 5, 6, 0, 1]),
}
HALVES = (slice(0, 1), slice(1, 5))


def pairs(dtype=torch.float64, rows=5):
    """Four (B,) sums: chosen, rejected, and the reference's."""
    rng = torch.Generator().manual_seed(1)
    made = -3 * torch.rand(4, rows, generator=rng, dtype=torch.float64)
    return [row.to(dtype).requires_grad_() for row in made]


def part(batch, where, switches):
    lengths = {name: value[where] for name, value in LENGTHS.items()}
    return [row[where] for row in batch], {**switches, **lengths}


def trl_loss(logps, mask, ref, switches):
    """TRL's loss of (2 B, T) log-probabilities, the chosen ones first."""
    cls = trl_class("trl.trainer.dpo_trainer", "DPOTrainer")
    prompt = torch.zeros(len(mask), 1, dtype=mask.dtype)
    ref_chosen, ref_rejected = ref.chunk(2)
    stub = trainer(
        f_divergence_type="reverse_kl",
        loss_types=[switches["loss_type"]],
        loss_weights=[1.0],
        beta=switches.get("beta", 0.1),
        label_smoothing=switches.get("label_smoothing", 0.0),
    )
    inputs = {
        "input_ids": torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.int64),
        "attention_mask": torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.int64),
        "completion_mask": torch.cat([prompt, mask], 1),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    return cls._compute_loss(stub, language_model(logps * mask), inputs, False)


def rows_of_tokens(dtype):
    """Five pairs: log-probabilities (10, 6), their mask, the reference's sums (10,)."""
    rng = torch.Generator().manual_seed(2)
    logps = -torch.rand(10, 6, generator=rng, dtype=torch.float64)
    ref = -3 * torch.rand(10, generator=rng, dtype=torch.float64)
    lengths = torch.cat(list(LENGTHS.values()))
    mask = (torch.arange(6) < lengths[:, None]).long()
    return logps.to(dtype).requires_grad_(), mask, ref.to(dtype)


def our_loss(logps, mask, ref, switches):
    chosen, rejected = sequence_logps(logps, mask).chunk(2)
    lengths = dict(zip(LENGTHS, mask.sum(1).chunk(2), strict=True))
    return dpo(chosen, rejected, *ref.chunk(2), **switches, **lengths)


def test_worked_values():
    one, three, zero = torch.ones(1), torch.full((1,), 3.0), torch.zeros(1)
    # r(chosen) = 2, r(rejected) = -1: z = 3 beta
    offered = (three, zero, one, one)
    assert dpo(*offered, beta=0.5).item() == pytest.approx(math.log1p(math.exp(-1.5)))
    assert dpo(*offered, beta=0.25, loss_type="hinge").item() == pytest.approx(0.25)
    assert dpo(*offered, beta=1.0, loss_type="hinge").item() == 0
    lengths = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([2])}
    # 2 / 4 - (-1) / 2 - 1 / (2 * 2)
    assert dpo(*offered, beta=2.0, loss_type="ipo", **lengths).item() == pytest.approx(0.75**2)
    even = dpo(zero, zero, zero, zero, label_smoothing=0.3)
    assert even.item() == pytest.approx(math.log(2))


def test_robust_is_the_expected_value_that_flips_cannot_bias():
    """Chowdhury et al.: over labels flipped with the rate e, its mean is the clean sigmoid loss."""
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    switches = {"loss_type": "robust", "label_smoothing": 0.2}
    right = dpo(chosen, rejected, ref_chosen, ref_rejected, **switches)
    flipped = dpo(rejected, chosen, ref_rejected, ref_chosen, **switches)
    clean = dpo(chosen, rejected, ref_chosen, ref_rejected)
    torch.testing.assert_close(0.8 * right + 0.2 * flipped, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_equals_trl(switches, dtype):
    logps, mask, ref = rows_of_tokens(dtype)
    if switches["loss_type"] == "sigmoid" and "label_smoothing" in switches:
        # TRL's sigmoid ignores it; of a single pair, its "aot" is the smoothed sigmoid
        aot = {**switches, "loss_type": "aot"}
        two = [[row, row + 5] for row in range(5)]
        theirs = sum(trl_loss(logps[i], mask[i], ref[i], aot) for i in two) / 5
    else:
        theirs = trl_loss(logps, mask, ref, switches)
    ours = our_loss(logps, mask, ref, switches)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(ours, logps)
    (trl_grad,) = torch.autograd.grad(theirs, logps)
    torch.testing.assert_close(grad, trl_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradcheck(switches):
    batch = pairs()
    assert torch.autograd.gradcheck(lambda *b: dpo(*b, **switches, **LENGTHS), batch)


@pytest.mark.parametrize("items", [5, torch.tensor(5)])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_micro_batches_of_unequal_sizes_make_the_step(switches, items):
    whole, split = pairs(), pairs()
    step, total = dpo(*whole, **switches, **LENGTHS), 0
    step.backward()
    for where in HALVES:
        rows, kept = part(split, where, switches)
        loss = dpo(*rows, items, **kept)
        loss.backward()
        total += loss.detach()
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(total, step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_promotes_to_at_least_fp32(loss_type, dtype):
    batch = pairs(dtype)
    value = dpo(*batch, loss_type=loss_type, **LENGTHS)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    wide = [row.detach().double() for row in batch]
    expected = dpo(*wide, loss_type=loss_type, **LENGTHS)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)


def test_far_apart_pairs_stay_finite():
    for far in (-1e4, 1e4):
        batch = [torch.full((1,), value, requires_grad=True) for value in (far, 0.0, 0.0, 0.0)]
        value = dpo(*batch, beta=1.0, label_smoothing=0.1)
        value.backward()
        assert value.isfinite()
        assert all(row.grad.isfinite().all() for row in batch)


def test_defaults_are_trls():
    config = trl_class("trl.trainer.dpo_config", "DPOConfig")
    ours, theirs = defaults(dpo, config, but=["loss_type"])  # a list there
    assert ours == theirs
    assert set(ours) == {"beta", "label_smoothing"}
    loss_types = config.__dataclass_fields__["loss_type"].default_factory()
    assert loss_types == [inspect.signature(dpo).parameters["loss_type"].default]


def test_bad_input():
    batch = pairs()
    with pytest.raises(ValueError, match=r"loss_type must be one of sigmoid, robust, .*'kto'"):
        dpo(*batch, loss_type="kto")
    with pytest.raises(ValueError, match=r"beta must be above 0, not 0"):
        dpo(*batch, beta=0)
    with pytest.raises(TypeError, match=r"beta must be a number above 0, not '0.1'"):
        dpo(*batch, beta="0.1")
    for value in (-0.1, 0.5):
        with pytest.raises(ValueError, match=r"label_smoothing must be .* below 0.5, not"):
            dpo(*batch, label_smoothing=value)
    for loss_type in ("hinge", "ipo"):
        with pytest.raises(ValueError, match=rf"label_smoothing=0.1 .*{loss_type}.*sigmoid or rob"):
            dpo(*batch, loss_type=loss_type, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"ipo.*give chosen_lengths"):
        dpo(*batch, loss_type="ipo")
    short = {**LENGTHS, "rejected_lengths": torch.ones(2).long()}
    with pytest.raises(ValueError, match=r"rejected_lengths must have the shape \(5,\), not \(2,"):
        dpo(*batch, loss_type="ipo", **short)
    with pytest.raises(TypeError, match=r"chosen_lengths must be a tensor of bools or ints"):
        dpo(*batch, loss_type="ipo", chosen_lengths=[4, 1, 6, 3, 2])
    with pytest.raises(ValueError, match=r"ref_rejected_logps must have the shape \(B,\)"):
        dpo(*batch[:3], batch[3][:2])
    with pytest.raises(TypeError, match=r"ref_chosen_logps must be a tensor of floats"):
        dpo(batch[0], batch[1], batch[2].long(), batch[3])
    with pytest.raises(ValueError, match=r"hold no row"):
        dpo(*[row[:0] for row in batch])
