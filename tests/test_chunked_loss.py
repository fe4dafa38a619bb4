"""Chunked cross-entropy: the values, gradients and bytes of its header."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_cases import (
    BAD_COUNTS,
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

from memlab.techniques import chunked_loss
from memlab.techniques.chunked_loss import (
    chunked_cross_entropy,
    cross_entropy,
    token_loss,
)

OPTIONS = [
    {},
    {"loss_type": "dft"},
    {"logit_scale": 0.25},
    {"softcap": 2.0},
    {"softcap": 3.0, "logit_scale": 1.7, "loss_type": "dft", "num_items_in_batch": 50},
    {"num_items_in_batch": torch.tensor(41)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 29, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [0.0, 0.4])
def test_equals_full_logits_in_fp64(options, chunk, with_bias, masked):
    h, w, y, bias = inputs(masked=masked)
    bias = bias if with_bias else None
    full = run(cross_entropy, h, w, y, bias, **options)
    assert_same(run(chunked_cross_entropy, h, w, y, bias, chunk=chunk, **options), full, 1e-12)


def test_full_logits_equal_torch():
    h, w, y, bias = inputs()
    z = 5 * torch.tanh((h @ w.T + bias) * 0.5 / 5)
    ours = cross_entropy(h, w, y, bias=bias, logit_scale=0.5, softcap=5)
    torch.testing.assert_close(ours, F.cross_entropy(z, y), rtol=1e-12, atol=0)


def test_equals_full_logits_in_fp32():
    h, w, y, bias = inputs(200, 50, 16, torch.float32)
    full = run(cross_entropy, h, w, y, bias)
    assert_same(run(chunked_cross_entropy, h, w, y, bias, chunk=64), full, 1e-5)


@given(
    n=st.integers(1, 12),
    v=st.integers(1, 9),
    d=st.integers(1, 5),
    chunk=st.integers(1, 14),
    masked=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_sizes_and_masks(n, v, d, chunk, masked, seed):
    h, w, y, bias = inputs(n, v, d, masked=masked, seed=seed)
    full = run(cross_entropy, h, w, y, bias)
    assert_same(run(chunked_cross_entropy, h, w, y, bias, chunk=chunk), full, 1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    h, w, y, bias = inputs(6, 5, 3)
    leaves = [t.requires_grad_() for t in (h, w, bias)]

    def loss(h, w, bias):
        return chunked_cross_entropy(h, w, y, bias=bias, chunk=4, softcap=softcap, logit_scale=0.7)

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize(("v", "chunk"), [(500, 64), (4000, 512)])
def test_bf16_is_as_close_to_fp64_as_full_logits(v, chunk):
    h, w, y, _ = inputs(512, v, 64)
    h, w = h.bfloat16(), (w * 0.1).bfloat16()
    exact = run(cross_entropy, h.double(), w.double(), y)
    full, chunked = (
        [(x.double() - e).norm() / e.norm() for x, e in zip(got, exact, strict=True)]
        for got in (run(cross_entropy, h, w, y), run(chunked_cross_entropy, h, w, y, chunk=chunk))
    )
    assert chunked[0] <= 1.01 * full[0] + 1e-7
    assert all(c <= 1.01 * f for c, f in zip(chunked[1:], full[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(dtype):
    h, w, y, _ = inputs(dtype=dtype)
    expected = torch.promote_types(dtype, torch.float32)
    assert chunked_cross_entropy(h, w, y).dtype == expected
    assert cross_entropy(h, w, y).dtype == expected


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "loss_type": "dft"}])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_autocast_around_changes_nothing(options, chunk):
    assert_autocast_changes_nothing(chunked_cross_entropy, chunk=chunk, **options)


def test_a_bf16_bias_has_its_gradient_summed_in_fp32():
    h, w = (torch.zeros(rows, 3, dtype=torch.bfloat16) for rows in (4096, 2))
    y, bias = torch.zeros(4096, dtype=torch.long), torch.zeros(2, dtype=torch.bfloat16)
    dbias = run(chunked_cross_entropy, h, w, y, bias, chunk=257)[-1]  # 257 is no bf16 number
    assert dbias.tolist() == [-0.5, 0.5]


def test_uniform_dft_is_half_of_nll():
    h, w, y = torch.zeros(4, 3), torch.zeros(2, 3), torch.tensor([0, 1, -100, 1])
    nll, dft = (chunked_cross_entropy(h, w, y, loss_type=kind) for kind in ("nll", "dft"))
    assert nll.item() == pytest.approx(0.6931471805599453)
    assert dft.item() == pytest.approx(nll.item() / 2)


def test_tied_weights():
    _, w, y, _ = inputs(29, 23, 7)
    ids = torch.arange(29) % 23
    grads = []
    for loss in (cross_entropy, chunked_cross_entropy):
        table = w.clone().requires_grad_()
        loss(F.embedding(ids, table).tanh(), table, y, chunk=5).backward()
        grads.append(table.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_frozen_head_gets_no_gradient():
    h, w, y, _ = inputs()
    h.requires_grad_()
    chunked_cross_entropy(h, w, y, chunk=8).backward()
    assert h.grad is not None
    assert w.grad is None


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("loss", [cross_entropy, chunked_cross_entropy])
def test_case_12_every_label_masked(loss, loss_type):
    h, w, _, bias = inputs()
    y = torch.full((29,), -100)
    value, *grads = run(loss, h, w, y, bias, loss_type=loss_type)
    assert value == 0
    assert all(g is not None and not g.any() for g in grads)


def test_case_12_leaves_the_other_micro_batches_unchanged():
    h, w, y, _ = inputs()
    masked = torch.cat([y, torch.full((8,), -100)])
    more = torch.cat([h, torch.ones(8, 7, dtype=h.dtype)])
    value, dh, dw = run(chunked_cross_entropy, more, w, masked, chunk=8)
    assert not dh[29:].any()
    assert_same([value, dh[:29], dw], run(chunked_cross_entropy, h, w, y, chunk=8), 1e-12)


def test_case_13_unequal_micro_batches_make_the_step():
    h, w, y, _ = inputs(masked=0.5)
    items = (y != -100).sum()
    value, dh, dw = run(chunked_cross_entropy, h, w, y, chunk=8)
    parts = [
        run(chunked_cross_entropy, h_p, w, y_p, chunk=8, num_items_in_batch=items)
        for h_p, y_p in zip(h.split([3, 14, 1, 11]), y.split([3, 14, 1, 11]), strict=True)
    ]
    values, dhs, dws = zip(*parts, strict=True)
    assert_same([sum(values), torch.cat(dhs), sum(dws)], [value, dh, dw], 1e-12)


def test_case_14_bf16_hidden_under_an_fp32_head():
    h, w, y, _ = inputs(6, 32, 8, torch.float32, masked=0)
    h = h.bfloat16()
    value, dh, dw = run(chunked_cross_entropy, h, w, y, chunk=4)
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    full = run(cross_entropy, h.float(), w, y)
    assert_same([value, dh, dw], [full[0], full[1].bfloat16(), full[2]], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_14_never_copies_the_head(dtype):
    n, v, d = 6, 3000, 400  # a copy of this head dwarfs everything else
    h, w, y, _ = inputs(n, v, d, torch.float32, masked=0)
    h, w = h.bfloat16().requires_grad_(), w.to(dtype)
    with Meter(h, w, y) as meter:
        chunked_cross_entropy(h, w, y, chunk=2).backward()
    assert meter.peak < v * d * w.itemsize / 4


def test_second_derivative_is_refused():
    h, w, y, _ = inputs()
    loss = chunked_cross_entropy(h.requires_grad_(), w.requires_grad_(), y)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*; take cross_entropy$"):
        torch.autograd.grad(loss, h, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_of_a_checkpoint_is_no_second_derivative(use_reentrant):
    def checkpointed(h, w, y, *, bias):
        def loss(h, w, bias):
            return chunked_cross_entropy(h.tanh(), w, y, bias=bias, chunk=8)

        return checkpoint(loss, h, w, bias, use_reentrant=use_reentrant)

    def plain(h, w, y, *, bias):
        return cross_entropy(h.tanh(), w, y, bias=bias)

    assert_same(run(checkpointed, *inputs()), run(plain, *inputs()), 1e-12)


def test_in_place_write_to_a_saved_input_raises():
    h, w, y, _ = inputs()
    hidden = h.requires_grad_() * 1
    loss = chunked_cross_entropy(hidden, w, y)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("loss", [cross_entropy, chunked_cross_entropy])
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
        *BAD_COUNTS,
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"softcap": float("inf")}, ValueError, "softcap=inf: give a finite positive number"),
        ({"loss_type": "mse"}, ValueError, "loss_type='mse'"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
    ],
)
def test_bad_input(loss, change, error, says):
    good = {"h": torch.zeros(4, 3), "w": torch.zeros(8, 3), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=says):
        loss(**(good | change))


def test_a_label_outside_the_vocabulary_raises():
    with pytest.raises((IndexError, RuntimeError)):
        chunked_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 4]))


def test_before_and_after_take_the_same_arguments():
    before, after = map(inspect.signature, (cross_entropy, chunked_cross_entropy))
    assert before == after


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_label_count_nothing_whatever_they_hold(junk, loss_type):
    h, w, y, bias = inputs()
    spoilt = h.masked_fill((y == -100)[:, None], junk)
    options = {"chunk": 8, "loss_type": loss_type}
    found = run(chunked_cross_entropy, spoilt, w, y, bias, **options)
    assert_same(found, run(chunked_cross_entropy, h, w, y, bias, **options), 0)


@pytest.mark.parametrize("loss", [cross_entropy, chunked_cross_entropy])
def test_words_that_are_never_said_count_nothing(loss):
    h, w, y, bias = inputs()
    y = y.where(y < 20, -100)
    bias[20:] = -float("inf")
    value, dh, dw, db = run(loss, h, w, y, bias, chunk=8)
    expected = run(loss, h, w[:20], y, bias[:20], chunk=8)
    assert_same([value, dh, dw[:20], db[:20]], expected, 1e-12)
    assert not dw[20:].any()
    assert not db[20:].any()


def test_numpy_integers_and_whole_floats_are_numbers():
    h, w, y, _ = inputs()
    expected = chunked_cross_entropy(h, w, y, chunk=8, num_items_in_batch=50)
    for chunk, items in ((np.int64(8), np.int64(50)), (np.int32(8), 50.0)):
        value = chunked_cross_entropy(h, w, y, chunk=chunk, num_items_in_batch=items)
        assert value == expected


def test_a_chunk_may_be_larger_than_any_tensor():
    h, w, y, _ = inputs()
    assert chunked_cross_entropy(h, w, y, chunk=2**70) == chunked_cross_entropy(h, w, y, chunk=29)


@pytest.mark.parametrize("loss", [cross_entropy, chunked_cross_entropy])
def test_a_tensor_of_one_number_makes_a_loss_that_is_one(loss):
    h, w, y, _ = inputs()
    value = loss(h, w, y, num_items_in_batch=torch.tensor([41]))
    assert value.shape == ()
    assert value == loss(h, w, y, num_items_in_batch=41)


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("masked", [0.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_kept_bytes_are_those_of_the_header(loss_type, masked, softcap):
    h, w, y, _ = inputs(300, 4000, 32, torch.bfloat16, masked=masked)
    labelled = int((y != -100).sum())
    h.requires_grad_(), w.requires_grad_()
    with Meter(h, w, y) as meter:
        loss = chunked_cross_entropy(h, w, y, chunk=64, loss_type=loss_type, softcap=softcap)
        kept = meter.live
    # h, w and y are kept as they are: 2*(N+V)*D + 8*N. New are the 8 B and 4 B of a labelled row:
    expected = rounded(8 * labelled) + rounded(4 * labelled)
    expected += rounded(4 * 300) if loss_type == "dft" else 0
    scalars = 2 * 512  # the loss, the number of labels
    assert kept == expected + scalars
    saved = {t.untyped_storage().data_ptr() for t in saved_tensors(loss.grad_fn)}
    assert {t.untyped_storage().data_ptr() for t in (h, w, y)} <= saved


def test_full_logits_keep_4_bytes_an_entry_and_peak_at_12():
    n, v, d = 128, 3000, 16
    h, w, y, _ = inputs(n, v, d, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    with Meter(h, w, y) as meter:
        loss = cross_entropy(h, w, y)
        assert 0 <= meter.live - 4 * n * v <= 4096
        loss.backward()
    assert 0 <= meter.peak - 12 * n * v <= 2 * (n + v) * d + 8192


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        (4096, 30_000, 64, 512),  # the chunk's logits make the peak
        (4096, 3_000, 2048, 64),  # the fp32 gradient of the head does
        (2000, 30_000, 64, 4096),  # one chunk
        (512, 30_000, 64, 512),  # one chunk, full
    ],
)
def test_peak_is_that_of_the_header(n, v, d, chunk, frozen, softcap, gpu):
    h = torch.zeros(n, d, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu, requires_grad=not frozen)
    y = torch.zeros(n, dtype=torch.long, device=gpu)
    with Meter(h, w, y) as meter:  # the labelled rows are given apart
        rows = torch.arange(n, device=gpu)
        options = (None, rows, chunk, 1.0, softcap)
        loss = token_loss(chunked_loss._TokenLogprobs.apply(h, w, y, *options), y)
        loss.backward()
    c = min(chunk, n)
    logits = (6 if softcap is None else 10) * c * v
    gradients = 2 * n * d + (0 if frozen else 2 * v * d)
    if frozen or n <= chunk:
        above = logits + 2 * c * d + 12 * n
    else:
        above = max(logits, 2 * v * d) + 2 * v * d + 2 * c * d + 12 * n
    assert abs(meter.peak - gradients - above) <= 64 * c + 8192


def test_real_tensors_peak_as_the_card_does_with_a_frozen_head():
    n, v, d, chunk = 300, 3000, 32, 64
    h, w, y, _ = inputs(n, v, d, torch.bfloat16, masked=0)
    with Meter(h.requires_grad_(), w, y) as meter:
        chunked_cross_entropy(h, w, y, chunk=chunk).backward()
    above = 2 * n * d + 6 * chunk * v + 2 * chunk * d + 12 * n
    assert abs(meter.peak - above) <= 64 * chunk + 8192
