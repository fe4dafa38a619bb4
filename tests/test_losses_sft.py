"""SFT losses from logits: worked values, TRL's values, the promises of the docstrings."""

import math

import pytest
import torch

from memlab.losses.sft import dft, nll

LABELS = torch.tensor([3, -100, 0, 5, 5, -100, 1])


def logits(dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(7, 6, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()


def test_uniform_over_two_words():
    z, labels = torch.zeros(3, 2), torch.tensor([0, 1, -100])
    assert nll(z, labels).item() == pytest.approx(math.log(2))
    assert dft(z, labels).item() == pytest.approx(math.log(2) / 2)


def test_dft_gradient_is_nlls_weighted_by_the_probability():
    for row, label in enumerate(LABELS):
        if label == -100:
            continue
        z = logits()
        (plain,) = torch.autograd.grad(nll(z[row : row + 1], label[None]), z)
        (weighted,) = torch.autograd.grad(dft(z[row : row + 1], label[None]), z)
        torch.testing.assert_close(weighted, plain * z[row].softmax(0)[label])


@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_trl(items, dtype):
    """What TRL's trainer does with the log-probabilities of its fused head."""
    kernel = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    z = logits(dtype)
    eye = torch.eye(6, dtype=dtype)  # logits as hidden states under an identity head
    valid = LABELS != -100
    logp = kernel.apply(z, eye, None, LABELS.clamp(min=0), 1.0, 4, None, 1.0, ())[0]
    logp = torch.where(valid, logp, 0.0)
    divisor = torch.as_tensor(valid.sum() if items is None else items).clamp(min=1)
    for ours, theirs in ((nll, -logp), (dft, -logp * logp.exp().detach())):
        expected = theirs.sum() / divisor
        value = ours(z, LABELS, items)
        torch.testing.assert_close(value.float(), expected.float(), rtol=1e-6, atol=0)
        (grad,) = torch.autograd.grad(value, z)
        (trl_grad,) = torch.autograd.grad(expected, z, retain_graph=True)
        torch.testing.assert_close(grad, trl_grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", [nll, dft])
def test_micro_batches_of_unequal_sizes_make_the_step(loss):
    z = logits()
    items = (LABELS != -100).sum()
    parts = zip(z.split([1, 4, 2]), LABELS.split([1, 4, 2]), strict=True)
    torch.testing.assert_close(sum(loss(*part, items) for part in parts), loss(z, LABELS))


@pytest.mark.parametrize("loss", [nll, dft])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_no_valid_label_is_a_connected_zero(loss, items):
    z = logits()
    value = loss(z, torch.full((7,), -100), items)
    value.backward()
    assert value == 0
    assert z.grad is not None
    assert not z.grad.any()


@pytest.mark.parametrize("loss", [nll, dft])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(loss, dtype):
    value = loss(logits(dtype), LABELS)
    assert value.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("loss", [nll, dft])
def test_bad_input(loss):
    with pytest.raises(ValueError, match=r"logits must be \(N, V\)"):
        loss(logits()[None], LABELS[None])
    with pytest.raises(ValueError, match=r"logits must be \(N, V\)"):
        loss(logits(), LABELS[:3])
    with pytest.raises(ValueError, match="labels are empty"):
        loss(logits()[:0], LABELS[:0])
    with pytest.raises(TypeError, match="int64"):
        loss(logits(), LABELS.int())
    with pytest.raises(TypeError, match="floats"):
        loss(torch.zeros(7, 6, dtype=torch.long), LABELS)


@pytest.mark.parametrize("loss", [nll, dft])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_rows_without_a_label_count_nothing_whatever_they_hold(loss, junk):
    ignored = LABELS == -100
    clean = logits()
    spoilt = clean.detach().masked_fill(ignored[:, None], junk).requires_grad_()
    value, expected = loss(spoilt, LABELS), loss(clean, LABELS)
    torch.testing.assert_close(value, expected)
    (grad,) = torch.autograd.grad(value, spoilt)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, clean)[0])
    assert not grad[ignored].any()
