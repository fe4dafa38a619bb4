"""Chunked log-probabilities: the values, gradients and bytes of the header."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_cases import (
    Meter,
    assert_autocast_changes_nothing,
    assert_same,
    inputs,
    rounded,
    run,
    saved_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from memlab.instruments.device import simulated_gpu
from memlab.techniques import chunked_logprobs
from memlab.techniques.chunked_logprobs import full_token_logprobs, token_logprobs, token_stats

OPTIONS = [
    {},
    {"logit_scale": 0.25},
    {"softcap": 2.0},
    {"softcap": 3.0, "logit_scale": 1.7},
]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Small chunks, too, are widened only two of their rows at a time."""
    monkeypatch.setattr(chunked_logprobs, "WIDE", 50)


def weighted(function, chunk=1024):
    """A loss with another gradient for every token."""

    def loss(h, w, y, **options):
        logp = function(h, w, y, chunk=chunk, **options)
        return (logp * torch.linspace(-1, 2, len(y), dtype=logp.dtype)).sum()

    return loss


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 29, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("wide", [50, 2**24])
def test_equals_full_logits_in_fp64(options, chunk, with_bias, masked, wide, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "WIDE", wide)
    h, w, y, bias = inputs(masked=masked)
    bias = bias if with_bias else None
    full = run(weighted(full_token_logprobs), h, w, y, bias, **options)
    assert_same(run(weighted(token_logprobs, chunk), h, w, y, bias, **options), full, 1e-12)


@pytest.mark.parametrize("function", [full_token_logprobs, token_logprobs])
def test_equals_torch_token_by_token(function):
    h, w, y, bias = inputs()
    z = 5 * torch.tanh((h @ w.T + bias) * 0.5 / 5)
    expected = -F.cross_entropy(z, y, reduction="none")
    ours = function(h, w, y, bias=bias, logit_scale=0.5, softcap=5, chunk=8)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert not ours[y == -100].any()
    assert (ours[y != -100] < 0).all()


@given(
    n=st.integers(1, 12),
    v=st.integers(1, 9),
    d=st.integers(1, 5),
    chunk=st.integers(1, 14),
    wide=st.integers(1, 60),
    masked=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_sizes_and_masks(n, v, d, chunk, wide, masked, seed):
    h, w, y, bias = inputs(n, v, d, masked=masked, seed=seed)
    full = run(weighted(full_token_logprobs), h, w, y, bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_logprobs, "WIDE", wide)
        assert_same(run(weighted(token_logprobs, chunk), h, w, y, bias), full, 1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    h, w, y, bias = inputs(6, 5, 3)
    leaves = [t.requires_grad_() for t in (h, w, bias)]

    def logprobs(h, w, bias):
        return token_logprobs(h, w, y, bias=bias, chunk=4, softcap=softcap, logit_scale=0.7)

    assert torch.autograd.gradcheck(logprobs, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("v", "chunk"), [(500, 64), (4000, 512)])
def test_16_bits_are_as_close_to_fp64_as_full_logits(v, chunk, dtype, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "WIDE", 20 * v)
    h, w, y, bias = inputs(512, v, 64)
    h, w, bias = h.to(dtype), (w * 0.1).to(dtype), bias.to(dtype)
    wide = [t.double() for t in (h, w)]
    exact = run(weighted(full_token_logprobs), *wide, y, bias.double(), softcap=20)
    full, chunked = (
        [
            (x.double() - e).norm() / e.norm()
            for x, e in zip(run(loss, h, w, y, bias, softcap=20), exact, strict=True)
        ]
        for loss in (weighted(full_token_logprobs), weighted(token_logprobs, chunk))
    )
    assert chunked[0] <= 1.01 * full[0] + 1e-7
    assert all(c <= 1.01 * f for c, f in zip(chunked[1:], full[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(dtype):
    h, w, y, _ = inputs(dtype=dtype)
    expected = torch.promote_types(dtype, torch.float32)
    assert token_logprobs(h, w, y).dtype == full_token_logprobs(h, w, y).dtype == expected


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 1000])
def test_autocast_around_changes_nothing(options, chunk):
    assert_autocast_changes_nothing(weighted(token_logprobs, chunk), **options)


def test_gradients_of_the_head_are_summed_in_fp32():
    h, w = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    y, bias = torch.zeros(4096, dtype=torch.long), torch.zeros(2, dtype=torch.bfloat16)

    def summed(*arguments, **options):
        return token_logprobs(*arguments, **options, chunk=257).sum()  # 257 is no bf16 number

    for gradient in run(summed, h, w, y, bias)[2:]:
        assert gradient.flatten().tolist() == [2048, -2048]


def test_tied_weights():
    _, w, y, _ = inputs(29, 23, 7)
    ids = torch.arange(29) % 23
    grads = []
    for function in (full_token_logprobs, token_logprobs):
        table = w.clone().requires_grad_()
        weighted(function, 5)(F.embedding(ids, table).tanh(), table, y).backward()
        grads.append(table.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("trained", ["h", "w", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained):
    h, w, y, bias = inputs()
    given = {"h": h, "w": w, "bias": bias}
    expected = dict(zip(given, run(weighted(full_token_logprobs), h, w, y, bias)[1:], strict=True))
    given[trained].requires_grad_()
    weighted(token_logprobs, 8)(y=y, **given).backward()
    found = {name: tensor.grad for name, tensor in given.items()}
    torch.testing.assert_close(found.pop(trained), expected[trained], rtol=1e-12, atol=1e-12)
    assert set(found.values()) == {None}


def test_without_gradients_nothing_is_kept():
    h, w, y, bias = inputs()
    with torch.no_grad():
        logp = token_logprobs(h.requires_grad_(), w, y, bias=bias, chunk=8)
    assert logp.grad_fn is None
    torch.testing.assert_close(logp, full_token_logprobs(h, w, y, bias=bias), rtol=1e-12, atol=0)


@pytest.mark.parametrize("function", [full_token_logprobs, token_logprobs])
def test_case_12_every_label_masked(function):
    h, w, _, bias = inputs()
    y = torch.full((29,), -100)
    value, *grads = run(weighted(function), h, w, y, bias)
    assert value == 0
    assert all(g is not None and not g.any() for g in grads)


def test_case_12_leaves_the_other_micro_batches_unchanged():
    h, w, y, bias = inputs()
    blank = torch.full((8,), -100)
    leaves = [t.requires_grad_() for t in (w, bias)]
    expected = torch.autograd.grad(token_logprobs(h, w, y, bias=bias, chunk=8).sum(), leaves)
    for labels, rows in ((y[:20], h[:20]), (blank, torch.ones(8, 7).double()), (y[20:], h[20:])):
        token_logprobs(rows, w, labels, bias=bias, chunk=8).sum().backward()
    assert_same([leaf.grad for leaf in leaves], expected, 1e-12)


def test_case_13_unequal_micro_batches_make_the_step():
    h, w, y, _ = inputs(masked=0.5)
    weights, items = torch.linspace(-1, 2, 29).double(), (y != -100).sum()
    value, dh, dw = run(lambda *a, **o: (token_logprobs(*a, **o) * weights).sum() / items, h, w, y)
    found = [
        run(
            lambda *a, at, **o: (token_logprobs(*a, chunk=3, **o) * weights[at]).sum() / items,
            h[at],
            w,
            y[at],
            at=at,
        )
        for at in (slice(0, 2), slice(2, 17), slice(17, 29))
    ]
    values, dhs, dws = zip(*found, strict=True)
    assert_same([sum(values), torch.cat(dhs), sum(dws)], [value, dh, dw], 1e-12)


def test_case_14_an_fp32_head_under_bf16_hidden_states():
    h, w, y, _ = inputs(6, 32, 8, torch.float32, masked=0)
    h = h.bfloat16()
    value, dh, dw = run(weighted(token_logprobs, 4), h, w, y)
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    full = run(weighted(full_token_logprobs), h.float(), w, y)
    assert_same([value, dh, dw], [full[0], full[1].bfloat16(), full[2]], 1e-6)


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_case_14_never_copies_the_head(hidden, dtype):
    n, v, d = 6, 3000, 400  # a copy of this head dwarfs everything else
    h, w, y, _ = inputs(n, v, d, torch.float32, masked=0)
    h, w = h.to(hidden).requires_grad_(), w.to(dtype)
    with Meter(h, w, y) as meter:
        token_logprobs(h, w, y, chunk=2).sum().backward()
    assert meter.peak < v * d * w.itemsize / 4


def test_case_15_unreduced_times_weights():
    h, w, y, _ = inputs()
    weights = torch.linspace(-1, 2, len(y), dtype=h.dtype)

    def direct(h, w, y, **_):
        return -(F.cross_entropy(h @ w.T, y, reduction="none") * weights).sum()

    assert_same(run(weighted(token_logprobs, 8), h, w, y), run(direct, h, w, y), 1e-12)


def test_a_gradient_that_is_one_number_for_all_tokens_and_one_that_comes_twice():
    h, w, y, _ = inputs()
    logp = token_logprobs(h.requires_grad_(), w, y, chunk=8)
    (once,) = torch.autograd.grad(logp.sum(), h, retain_graph=True)  # expanded: stride 0
    (again,) = torch.autograd.grad(logp, h, torch.ones_like(logp))
    assert torch.equal(once, again)


def test_stats():
    h, w, y, bias = inputs()
    got = token_stats(h.requires_grad_(), w, y, bias=bias, chunk=8)
    dist = torch.distributions.Categorical(logits=h @ w.T + bias)
    valid = y != -100
    zero = torch.zeros((), dtype=h.dtype)
    label = dist.log_prob(y.clamp(min=0))
    torch.testing.assert_close(got[0], torch.where(valid, label, zero), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        got[1], torch.where(valid, dist.entropy(), zero), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(got[2], (dist.logits.argmax(1) == y) & valid)
    assert [t.requires_grad for t in got] == [True, False, False]
    assert torch.equal(token_logprobs(h, w, y, bias=bias, chunk=8), got[0])
    (gradient,) = torch.autograd.grad(got[0].sum(), h)
    (plain,) = torch.autograd.grad(token_logprobs(h, w, y, bias=bias, chunk=8).sum(), h)
    assert torch.equal(gradient, plain)


def test_the_entropy_of_a_word_that_is_certain_is_zero():
    h, w, y = (
        torch.ones(2, 1),
        torch.tensor([[0.0], [-200.0], [-float("inf")]]),
        torch.tensor([0, 0]),
    )
    assert token_stats(h, w, y)[1].tolist() == [0, 0]


def test_stats_equal_trl():
    kernel = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    h, w, y, bias = inputs(200, 40, 16, torch.float32, masked=0)
    theirs = kernel.apply(h, w, bias, y, 1.0, 16, 3.0, 0.5)  # softcap 3, logit scale 0.5
    ours = token_stats(h, w, y, bias=bias, chunk=64, softcap=3.0, logit_scale=0.5)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[2], theirs[4])


def test_second_derivative_is_refused():
    h, w, y, _ = inputs()
    logp = token_logprobs(h.requires_grad_(), w.requires_grad_(), y)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*; take full_token_logprobs$"):
        torch.autograd.grad(logp.sum(), h, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_of_a_checkpoint_is_no_second_derivative(use_reentrant):
    def checkpointed(h, w, y, *, bias):
        def loss(h, w, bias):
            return weighted(token_logprobs, 8)(h.tanh(), w, y, bias=bias)

        return checkpoint(loss, h, w, bias, use_reentrant=use_reentrant)

    def plain(h, w, y, *, bias):
        return weighted(full_token_logprobs)(h.tanh(), w, y, bias=bias)

    assert_same(run(checkpointed, *inputs()), run(plain, *inputs()), 1e-12)


def test_in_place_write_to_a_saved_input_raises():
    h, w, y, _ = inputs()
    hidden = h.requires_grad_() * 1
    logp = token_logprobs(hidden, w, y)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        logp.sum().backward()


@pytest.mark.parametrize("function", [full_token_logprobs, token_logprobs, token_stats])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"h": torch.zeros(2, 3, 4)}, ValueError, "h, w, y must be of shapes"),
        ({"h": torch.zeros(5, 3)}, ValueError, "h, w, y must be of shapes"),
        ({"w": torch.zeros(8, 5)}, ValueError, "h, w, y must be of shapes"),
        ({"w": torch.zeros(0, 3)}, ValueError, r"V, D > 0, not .*, \(0, 3\), "),
        ({"h": torch.zeros(4, 0), "w": torch.zeros(8, 0)}, ValueError, "V, D > 0, not"),
        ({"bias": torch.zeros(3)}, ValueError, "bias must be of shape"),
        ({"y": torch.zeros(4)}, TypeError, "y int64"),
        ({"h": torch.zeros(4, 3, dtype=torch.long)}, TypeError, "floats"),
        ({"h": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.long)}, ValueError, "y is empty"),
        ({"chunk": 0}, ValueError, "chunk=0"),
        ({"chunk": 2.5}, ValueError, "chunk=2.5"),
        ({"chunk": True}, ValueError, "chunk=True"),
        ({"chunk": "8"}, ValueError, "chunk='8'"),
        ({"softcap": "30"}, ValueError, "softcap='30': give a finite positive number"),
        ({"logit_scale": "2"}, TypeError, "logit_scale='2': give a number"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"softcap": float("inf")}, ValueError, "softcap=inf: give a finite positive number"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
    ],
)
def test_bad_input(function, change, error, says):
    good = {"h": torch.zeros(4, 3), "w": torch.zeros(8, 3), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=says):
        function(**(good | change))


def test_a_label_outside_the_vocabulary_raises():
    with pytest.raises((IndexError, RuntimeError)):
        token_logprobs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 4]))


def test_before_and_after_take_the_same_arguments():
    assert inspect.signature(full_token_logprobs) == inspect.signature(token_logprobs)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_label_count_nothing_whatever_they_hold(junk):
    h, w, y, bias = inputs()
    spoilt = h.masked_fill((y == -100)[:, None], junk)
    found = run(weighted(token_logprobs, 8), spoilt, w, y, bias)
    assert_same(found, run(weighted(token_logprobs, 8), h, w, y, bias), 0)


def test_words_that_are_never_said_count_nothing():
    h, w, y, bias = inputs()
    y = y.where(y < 20, -100)
    bias[20:] = -float("inf")
    for function in (token_logprobs, full_token_logprobs):
        value, dh, dw, db = run(weighted(function, 8), h, w, y, bias)
        expected = run(weighted(function, 8), h, w[:20], y, bias[:20])
        assert_same([value, dh, dw[:20], db[:20]], expected, 1e-12)
        assert not dw[20:].any()
        assert not db[20:].any()
    found, expected = token_stats(h, w, y, bias=bias), token_stats(h, w[:20], y, bias=bias[:20])
    assert_same(found, expected, 1e-12)


def test_numpy_integers_are_a_chunk():
    h, w, y, _ = inputs()
    assert token_logprobs(h, w, y, chunk=np.int64(8)).equal(token_logprobs(h, w, y, chunk=8))


def test_a_chunk_may_be_larger_than_any_tensor():
    h, w, y, _ = inputs()
    assert token_logprobs(h, w, y, chunk=2**70).equal(token_logprobs(h, w, y, chunk=29))


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("function", [token_logprobs, token_stats])
@pytest.mark.parametrize("masked", [0.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_kept_bytes_are_those_of_the_header(function, masked, softcap, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "WIDE", 40_000)
    h, w, y, _ = inputs(300, 4000, 32, torch.bfloat16, masked=masked)
    labelled = int((y != -100).sum())
    h.requires_grad_(), w.requires_grad_()
    with Meter(h, w, y) as meter:
        logp = function(h, w, y, chunk=64, softcap=softcap)
        logp = logp[0] if isinstance(logp, tuple) else logp
        kept = meter.live
    # h, w and y are kept as they are: 2*(N+V)*D + 8*N; the result is the caller's
    assert kept == rounded(8 * labelled) + rounded(4 * 300)
    saved = {t.untyped_storage().data_ptr() for t in saved_tensors(logp.grad_fn)}
    assert {t.untyped_storage().data_ptr() for t in (h, w, y)} <= saved


def test_full_logits_keep_4_bytes_an_entry_and_peak_at_12():
    n, v, d = 128, 3000, 16
    h, w, y, _ = inputs(n, v, d, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    with Meter(h, w, y) as meter:
        logp = full_token_logprobs(h, w, y)
        assert 0 <= meter.live - 4 * n * v <= 4096
        logp.sum().backward()
    assert 0 <= meter.peak - 12 * n * v <= 2 * (n + v) * d + 8192


def above(n, v, d, chunk, *, frozen, softcap, wide):
    """The peak of the header."""
    c = min(chunk, n)
    logits = 2 * c * v + (12 if softcap is None else 16) * min(c, wide // v) * v
    if frozen or n <= chunk:
        return logits + 2 * c * d + 8 * n
    return max(logits, 2 * v * d) + 2 * v * d + 2 * c * d + 8 * n


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        (4096, 30_000, 64, 512),  # the chunk's logits make the peak
        (4096, 3_000, 2048, 64),  # the fp32 gradient of the head does
        (2000, 30_000, 64, 4096),  # one chunk
        (512, 30_000, 64, 512),  # one chunk, full
    ],
)
def test_peak_is_that_of_the_header(n, v, d, chunk, stats, frozen, softcap, monkeypatch, gpu):
    wide = 2_000_000
    monkeypatch.setattr(chunked_logprobs, "WIDE", wide)
    h = torch.zeros(n, d, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu, requires_grad=not frozen)
    y = torch.zeros(n, dtype=torch.long, device=gpu)
    with Meter(h, w, y) as meter:  # the labelled rows are given apart
        rows = torch.arange(n, device=gpu)
        options = (None, rows, chunk, 1.0, softcap, stats)
        chunked_logprobs._ByChunks.apply(h, w, y, *options)[0].sum().backward()
    outside = 4 * n + 2 * n * d + (0 if frozen else 2 * v * d)  # the result, dh, dw
    if stats:
        outside += 5 * n  # the other results
    expected = above(n, v, d, chunk, frozen=frozen, softcap=softcap, wide=wide)
    assert abs(meter.peak - outside - expected) <= 64 * min(chunk, n) + 16384


def simulated(n, v, d, chunk, **options):
    """Peak bytes of forward and backward on the simulated GPU, above h, w, y, dh, the result."""
    with simulated_gpu() as gpu:
        h = torch.zeros(n, d, dtype=torch.bfloat16, device=gpu, requires_grad=True)
        w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu)
        y = torch.zeros(n, dtype=torch.long, device=gpu)
        y[::2] = -100
        with Meter(h, w, y) as meter:
            logp = token_logprobs(h, w, y, chunk=chunk, **options)
            assert (logp.shape, logp.dtype) == ((n,), torch.float32)
            logp.sum().backward()
            assert h.grad.shape == h.shape
        return meter.peak - 2 * n * d - 4 * n


@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [(2**20, 4096, 8, 2**15), (2**14, 262_144, 64, 2**10)],  # 2**32 logits each
)
def test_2_to_the_32_logits_cost_no_more_than_a_chunk(n, v, d, chunk, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "WIDE", 2**24)
    expected = above(n // 2, v, d, chunk, frozen=True, softcap=None, wide=2**24)
    found = simulated(n, v, d, chunk)
    assert 0 <= found - expected <= 16 * n + 64 * chunk


def test_real_tensors_peak_as_the_card_does_with_a_frozen_head(monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "WIDE", 40_000)
    n, v, d, chunk = 300, 3000, 32, 64
    h, w, y, _ = inputs(n, v, d, torch.bfloat16, masked=0)
    with Meter(h.requires_grad_(), w, y) as meter:
        token_logprobs(h, w, y, chunk=chunk).sum().backward()
    expected = above(n, v, d, chunk, frozen=True, softcap=None, wide=40_000)
    assert abs(meter.peak - 4 * n - 2 * n * d - expected) <= 64 * chunk + 8192
