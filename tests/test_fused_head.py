"""Fused head: the kernels equal their torch twins, and the loss full logits; its bytes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_cases import OPTIONS, errors
from head_cases import BAD_COUNTS, Meter, assert_autocast_changes_nothing, assert_same, inputs, run

from memlab.instruments.device import simulated_gpu
from memlab.techniques import fused_head
from memlab.techniques.chunked_loss import cross_entropy
from memlab.techniques.fused_head import fused_cross_entropy, fused_token_logprobs

# ------------------------------------------------------------------------ kernels and their twins


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no triton")
def test_interpreted_kernels_equal_their_twins() -> None:
    here = Path(__file__)  # the interpreter must be chosen before triton is imported
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(here.parents[1])}
    subprocess.run([sys.executable, here.with_name("fused_cases.py")], env=env, check=True)


# ------------------------------------------------------------------------------- equal full logits


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 29, None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [0.0, 0.4])
def test_equals_full_logits_in_fp64(frugal, options, chunk, with_bias, masked):
    h, w, y, bias = inputs(masked=masked)
    bias = bias if with_bias else None
    full = run(cross_entropy, h, w, y, bias, **options)
    assert_same(
        run(fused_cross_entropy, h, w, y, bias, chunk=chunk, frugal=frugal, **options), full, 1e-12
    )


@pytest.mark.parametrize("frugal", [False, True])
def test_autocast_around_changes_nothing(frugal):
    assert_autocast_changes_nothing(fused_cross_entropy, frugal=frugal, chunk=4)


def test_frugal_tiles_of_words_make_the_vocabulary():
    h, w, y, bias = inputs(40, 1100, 7)
    assert len(fused_head._tiles(1100, int((y != -100).sum()), 7)) == 5  # 4 of 256, one of 76
    full = run(cross_entropy, h, w, y, bias)
    assert_same(run(fused_cross_entropy, h, w, y, bias, chunk=7, frugal=True), full, 1e-12)


@pytest.mark.parametrize(("frugal", "made"), [(False, 4), (True, 4 + 3)])
def test_logits_are_made_once_and_by_frugal_all_but_the_last_tile_again(monkeypatch, frugal, made):
    h, w, y, _ = inputs(40, 1024, 7, masked=0)
    products, real = [], fused_head._raw

    def counted(*args):
        products.append(args[0].shape)
        return real(*args)

    monkeypatch.setattr(fused_head, "_raw", counted)
    run(fused_cross_entropy, h, w, y, chunk=10, frugal=frugal)
    assert len(products) == made


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize("times", [1.0, 0.3])
@pytest.mark.parametrize("n", [512, 500])
@pytest.mark.parametrize(("v", "chunk"), [(500, 64), (4000, 512)])
def test_bf16_is_as_close_to_fp64_as_full_logits(frugal, times, n, v, chunk):
    h, w, y, _ = inputs(n, v, 64)
    h, w = h.bfloat16(), (w * 0.1).bfloat16()
    exact = run(cross_entropy, h.double(), w.double(), y, times=times)
    full = errors(run(cross_entropy, h, w, y, times=times), exact)
    fused = errors(
        run(fused_cross_entropy, h, w, y, chunk=chunk, frugal=frugal, times=times), exact
    )
    assert fused[0] <= 1.01 * full[0] + 1e-7
    # made without the factor, -1 + p is closer to -1: 0.55 to 1.05 times the error of full logits
    assert all(f <= 1.1 * e for f, e in zip(fused[1:], full[1:], strict=True))


@pytest.mark.parametrize("frugal", [False, True])
def test_fp16_under_a_loss_scale(frugal):
    h, w, y, _ = inputs(512, 4000, 64)
    h, w = h.half(), (w * 0.1).half()
    exact = run(cross_entropy, h.double(), w.double(), y, times=2.0**10)
    full = errors(run(cross_entropy, h, w, y, times=2.0**10), exact)
    fused = errors(
        run(fused_cross_entropy, h, w, y, chunk=100, frugal=frugal, times=2.0**10), exact
    )
    assert all(f <= 1.05 * e + 1e-7 for f, e in zip(fused, full, strict=True))


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_case_12_every_label_masked(frugal, loss_type):
    h, w, _, bias = inputs()
    y = torch.full((29,), -100)
    value, *grads = run(fused_cross_entropy, h, w, y, bias, frugal=frugal, loss_type=loss_type)
    assert value == 0
    assert all(g is not None and not g.any() for g in grads)


@pytest.mark.parametrize("frugal", [False, True])
def test_case_14_bf16_hidden_under_an_fp32_head(frugal):
    h, w, y, _ = inputs(6, 32, 8, torch.float32, masked=0)
    h = h.bfloat16()
    value, dh, dw = run(fused_cross_entropy, h, w, y, chunk=4, frugal=frugal)
    full = run(cross_entropy, h.float(), w, y)
    assert_same([value, dh, dw], [full[0], full[1].bfloat16(), full[2]], 1e-6)


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize("trained", ["h", "w", "bias"])
def test_only_what_is_trained_gets_a_gradient(frugal, trained):
    h, w, y, bias = inputs()
    parts = {"h": h, "w": w, "bias": bias}
    full = dict(zip(parts, run(cross_entropy, h, w, y, bias)[1:], strict=True))
    parts[trained].requires_grad_()
    fused_cross_entropy(h, w, y, bias=bias, chunk=8, frugal=frugal).backward()
    for name, part in parts.items():
        if name == trained:
            torch.testing.assert_close(part.grad, full[name], rtol=1e-12, atol=1e-12)
        else:
            assert part.grad is None


def test_without_gradients_the_logits_stay_logits(monkeypatch):
    h, w, y, _ = inputs()
    monkeypatch.setattr(fused_head, "_to_gradient", None)
    with torch.no_grad():
        value = fused_cross_entropy(h.requires_grad_(), w.requires_grad_(), y, chunk=8)
    torch.testing.assert_close(value, cross_entropy(h, w, y).detach())


@pytest.mark.parametrize("frugal", [False, True])
def test_backward_twice(frugal):
    h, w, y, _ = inputs()
    h.requires_grad_(), w.requires_grad_()
    loss = fused_cross_entropy(h, w, y, chunk=8, frugal=frugal)
    once = torch.autograd.grad(loss, (h, w), retain_graph=True)
    assert_same(torch.autograd.grad(loss, (h, w)), once, 0)


def test_token_logprobs_take_any_gradient():
    h, w, y, bias = inputs(12, 9, 5)
    leaves = [t.requires_grad_() for t in (h, w, bias)]

    def weighted(h, w, bias):
        logp = fused_token_logprobs(h, w, y, bias=bias, chunk=5, softcap=2.0, logit_scale=0.7)
        return logp * torch.arange(1, 13)

    assert torch.autograd.gradcheck(weighted, leaves)


@pytest.mark.parametrize("frugal", [False, True])
def test_second_derivative_is_refused(frugal):
    h, w, y, _ = inputs()
    loss = fused_cross_entropy(h.requires_grad_(), w, y, frugal=frugal)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, h, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"h": torch.zeros(5, 3)}, ValueError, "h, w, y must be of shapes"),
        ({"w": torch.zeros(0, 3)}, ValueError, r"V, D > 0, not .*, \(0, 3\), "),
        ({"h": torch.zeros(4, 0), "w": torch.zeros(8, 0)}, ValueError, "V, D > 0, not"),
        ({"bias": torch.zeros(3)}, ValueError, "bias must be of shape"),
        ({"y": torch.zeros(4)}, TypeError, "y int64"),
        ({"h": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.long)}, ValueError, "y is empty"),
        ({"chunk": 0}, ValueError, "chunk=0"),
        ({"chunk": True}, ValueError, "chunk=True"),
        ({"chunk": "8"}, ValueError, "chunk='8'"),
        ({"logit_scale": "2"}, TypeError, "logit_scale='2'"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"softcap": "30"}, ValueError, "softcap='30'"),
        *BAD_COUNTS,
        ({"softcap": float("inf")}, ValueError, "softcap=inf: give a finite positive number"),
        ({"loss_type": "mse"}, ValueError, "loss_type='mse'"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
    ],
)
def test_bad_input(change, error, says):
    good = {"h": torch.zeros(4, 3), "w": torch.zeros(8, 3), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=says):
        fused_cross_entropy(**(good | change))


@pytest.mark.parametrize("frugal", [False, True])
def test_a_label_outside_the_vocabulary_raises(frugal):
    with pytest.raises((IndexError, RuntimeError)):
        fused_cross_entropy(
            torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 4]), frugal=frugal
        )


@pytest.mark.parametrize("frugal", [False, True])
def test_sizes_larger_than_any_tensor_and_a_tensor_of_one_number(frugal):
    h, w, y, _ = inputs()
    options = {"frugal": frugal, "num_items_in_batch": torch.tensor([41])}
    value = fused_cross_entropy(h, w, y, chunk=2**70, **options)
    assert value.shape == ()
    assert value == fused_cross_entropy(h, w, y, **options | {"num_items_in_batch": 41})


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("mode", ["trained", "frozen", "frugal"])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("masked", [0, 0.5])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        (4096, 30_208, 64, 512),  # the chunk's logits make the peak
        (4096, 3_072, 2048, 64),  # the gradient of the head does
        (2000, 30_208, 64, 4096),  # one chunk
    ],
)
def test_bytes_are_those_of_the_header(mode, softcap, masked, n, v, d, chunk, gpu):
    h = torch.zeros(n, d, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu, requires_grad=mode != "frozen")
    y = torch.zeros(n, dtype=torch.long, device=gpu)
    m = n - int(masked * n)  # labelled
    rows = torch.arange(m, device=gpu)
    with Meter(h, w, y, rows) as meter:
        if mode == "frugal":
            value = fused_head._Recomputed.apply(h, w, y, None, rows, chunk, 1.0, softcap).sum()
            tiles = [len(range(v)[here]) for here in fused_head._tiles(v, m, chunk)]
            kept = 4 * m + 2 * m * tiles[-1]  # and the rows, 8 * m, which the public functions make
        else:
            options = rows, chunk, 1.0, softcap, False, True
            value = fused_head._MadeInForward.apply(h, w, y, None, *options)
            kept = 4 * m * d + (0 if mode == "frozen" else 4 * v * d)
        assert 0 <= meter.live - kept <= 2048
        value.backward()
    c = min(m, chunk)
    if mode == "frugal":
        forward = 2 * m * tiles[0] + 2 * m * d + 4 * m
        at_the_end = 2 * m * d + 2 * n * d
        backward = 2 * v * d + 6 * m * d + max(2 * m * tiles[0], at_the_end)
        expected = max(forward, backward)
    else:
        forward = kept + 2 * c * v + 2 * c * d
        backward = kept + 2 * m * d + (2 * n * d if m < n else 0)
        backward += 0 if mode == "frozen" else 2 * v * d
        expected = max(forward, backward)
    assert abs(meter.peak - expected) <= 64 * n + 8192, (meter.peak, expected)


@pytest.mark.parametrize(
    ("n", "d", "trained", "masked", "options", "most"),
    [
        (8192, 2048, True, False, {}, 1539),
        (8192, 2048, True, False, {"frugal": True}, 700),
        (8192, 2048, True, False, {"frugal": True, "chunk": 1024}, 400),
        (8192, 2048, False, False, {}, 400),
        (16_384, 1024, True, True, {}, 1539),
    ],
)
def test_extra_bytes_of_the_benchmarks_shapes(n, d, trained, masked, options, most):
    v, given = 151_936, {"dtype": torch.bfloat16, "requires_grad": True}
    with simulated_gpu() as gpu:
        h = torch.empty(n, d, device=gpu, **given)
        w = torch.empty(v, d, device=gpu, **given | {"requires_grad": trained})
        y = torch.arange(n) % v
        if masked:
            y[::2] = -100
        y = y.to(gpu)
        with Meter(h, w, y) as meter:
            fused_cross_entropy(h, w, y, **options).backward()
        gradients = 2 * n * d + (2 * v * d if trained else 0)
        assert meter.live >= gradients
        assert (meter.peak - gradients) / 2**20 <= most
