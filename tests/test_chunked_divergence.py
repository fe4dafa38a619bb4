"""Chunked divergence: the values, gradients and bytes of the header."""

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

from memlab.instruments.device import simulated_gpu
from memlab.losses.gkd import generalized_jsd
from memlab.techniques import chunked_divergence
from memlab.techniques.chunked_divergence import divergence, full_divergence
from memlab.trainers import gkd

BETAS = [0, 0.1, 0.5, 1]
OPTIONS = [
    {},
    {"temperature": 2.5},
    {"num_items_in_batch": 50},
    {"num_items_in_batch": torch.tensor(41), "temperature": 0.7},
    {"softcap": 3.0, "logit_scale": 1.7, "temperature": 1.5},
]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Small chunks, too, are widened only two of their rows at a time."""
    monkeypatch.setattr(chunked_divergence, "WIDE", 50)


def teacher_of(n=29, v=23, d=5, dtype=torch.float64, seed=9, *, with_bias=True, **options):
    """A teacher of another width than `inputs`' students."""
    h, w, _, bias = inputs(n, v, d, dtype, seed=seed)
    return {"h": h, "w": w, "bias": bias if with_bias else None, **options}


def direct(h, w, y, *, teacher, num_items_in_batch=None, beta=0.5, temperature=1.0, **head):
    """From the loss of memlab.losses."""

    def logits(h, w, bias=None, logit_scale=1.0, softcap=None):
        z = logit_scale * F.linear(h, w, bias)
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    options = {"beta": beta, "temperature": temperature}
    z, z_teacher = logits(h, w, **head), logits(**teacher)
    return generalized_jsd(z, z_teacher, y, num_items_in_batch, **options)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("chunk", "wide"), [(4, 50), (29, 50), (1000, 2**24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_loss_of_all_logits_in_fp64(beta, options, chunk, wide, with_bias, monkeypatch):
    monkeypatch.setattr(chunked_divergence, "WIDE", wide)
    h, w, y, bias = inputs()
    bias = bias if with_bias else None
    teacher = teacher_of(with_bias=with_bias, softcap=4.0, logit_scale=0.6)
    options = {**options, "teacher": teacher, "beta": beta}
    expected = run(direct, h, w, y, bias, **options)
    for function in (divergence, full_divergence):
        assert_same(run(function, h, w, y, bias, chunk=chunk, **options), expected, 1e-12)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_equals_trl(beta):
    cls = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    h, w, y, _ = inputs(dtype=torch.float32)
    teacher = teacher_of(dtype=torch.float32, with_bias=False)

    def theirs(h, w, y, *, bias, teacher, **options):
        student, other = (z[None] for z in (h @ w.T, teacher["h"] @ teacher["w"].T))
        return cls.generalized_jsd_loss(student, other, y[None], **options)

    options = {"teacher": teacher, "beta": beta, "temperature": 1.3, "num_items_in_batch": 40}
    assert_same(run(divergence, h, w, y, chunk=8, **options), run(theirs, h, w, y, **options), 1e-5)


@given(
    n=st.integers(1, 12),
    v=st.integers(1, 9),
    d=st.integers(1, 5),
    chunk=st.integers(1, 14),
    wide=st.integers(1, 60),
    masked=st.floats(0, 1),
    beta=st.floats(0.01, 0.99) | st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_sizes_and_masks(n, v, d, chunk, wide, masked, beta, seed):
    h, w, y, bias = inputs(n, v, d, masked=masked, seed=seed)
    options = {"teacher": teacher_of(n, v, 3, seed=seed + 1), "beta": beta}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_divergence, "WIDE", wide)
        found = run(divergence, h, w, y, bias, chunk=chunk, **options)
    assert_same(found, run(direct, h, w, y, bias, **options), 1e-11)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(beta, softcap):
    h, w, y, bias = inputs(6, 5, 3)
    leaves = [t.requires_grad_() for t in (h, w, bias)]
    options = {"teacher": teacher_of(6, 5, 2), "softcap": softcap, "logit_scale": 0.7, "chunk": 4}

    def loss(h, w, bias):
        return divergence(h, w, y, bias=bias, beta=beta, temperature=1.3, **options)

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("v", "chunk"), [(500, 64), (4000, 512)])
def test_bf16_is_as_close_to_fp64_as_full_logits(beta, v, chunk, monkeypatch):
    monkeypatch.setattr(chunked_divergence, "WIDE", 20 * v)
    h, w, y, bias = (t.bfloat16() if t.is_floating_point() else t for t in inputs(512, v, 64))
    other = teacher_of(512, v, 48, torch.bfloat16)
    w, other["w"] = w * 0.1, other["w"] * 0.1
    exact_teacher = {name: tensor.double() for name, tensor in other.items()}
    wide = (h.double(), w.double(), y, bias.double())
    exact = run(full_divergence, *wide, teacher=exact_teacher, beta=beta)
    full, chunked = (
        [
            (x.double() - e).norm() / e.norm()
            for x, e in zip(
                run(function, h, w, y, bias, teacher=other, beta=beta, chunk=chunk),
                exact,
                strict=True,
            )
        ]
        for function in (full_divergence, divergence)
    )
    assert chunked[0] <= 1.01 * full[0] + 1e-6
    assert all(c <= 1.01 * f for c, f in zip(chunked[1:], full[1:], strict=True))


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(beta, dtype):
    h, w, y, bias = inputs(dtype=dtype)
    expected = torch.promote_types(dtype, torch.float32)
    for function in (divergence, full_divergence):
        value, *grads = run(function, h, w, y, bias, teacher=teacher_of(dtype=dtype), beta=beta)
        assert value.dtype == expected
        assert {g.dtype for g in grads} == {dtype}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk", [4, 1000])
def test_autocast_around_changes_nothing(beta, chunk):
    teacher = teacher_of(dtype=torch.float32)
    assert_autocast_changes_nothing(divergence, teacher=teacher, beta=beta, chunk=chunk)


def test_tied_weights_and_a_bias_that_is_trained_alone():
    _, w, y, bias = inputs()
    found = []
    for function in (full_divergence, divergence):
        table, b = w.clone().requires_grad_(), bias.clone().requires_grad_()
        hidden = F.embedding(torch.arange(29) % 23, table).tanh()
        options = {"teacher": teacher_of(), "bias": b, "chunk": 5}
        function(hidden, table, y, **options).backward()
        (alone,) = torch.autograd.grad(function(hidden.detach(), w, y, **options), b)
        found.append((table.grad, b.grad, alone))
    assert_same(*found, 1e-12)


@pytest.mark.parametrize("function", [full_divergence, divergence])
def test_a_frozen_head_and_a_teacher_get_no_gradient(function):
    h, w, y, bias = inputs()
    teacher = {name: tensor.requires_grad_() for name, tensor in teacher_of().items()}
    function(h.requires_grad_(), w, y, bias=bias, teacher=teacher, chunk=8).backward()
    assert h.grad is not None
    assert [t.grad for t in (w, bias, *teacher.values())] == [None] * 5


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("function", [full_divergence, divergence])
def test_case_12_every_label_masked(function, items, beta):
    h, w, _, bias = inputs()
    y = torch.full((29,), -100)
    options = {"teacher": teacher_of(), "num_items_in_batch": items, "beta": beta}
    value, *grads = run(function, h, w, y, bias, **options)
    assert value == 0
    assert all(g is not None and not g.any() for g in grads)


def test_case_13_unequal_micro_batches_make_the_step_one_of_them_all_masked():
    h, w, y, bias = inputs(masked=0.5)
    y[2:9] = -100
    teacher, items = teacher_of(), int((y != -100).sum())
    value, dh, dw, db = run(divergence, h, w, y, bias, teacher=teacher, chunk=8)
    found = []
    for at in (slice(0, 2), slice(2, 9), slice(9, 29)):
        part = {**teacher, "h": teacher["h"][at]}
        options = {"teacher": part, "num_items_in_batch": items, "chunk": 3}
        found.append(run(divergence, h[at], w, y[at], bias, **options))
    values, dhs, dws, dbs = zip(*found, strict=True)
    assert values[1] == 0
    assert_same([sum(values), torch.cat(dhs), sum(dws), sum(dbs)], [value, dh, dw, db], 1e-12)


def test_case_14_fp32_heads_under_bf16_hidden_states():
    h, w, y, _ = inputs(6, 32, 8, torch.float32, masked=0)
    teacher = teacher_of(6, 32, dtype=torch.float32)
    h, teacher["h"] = h.bfloat16(), teacher["h"].bfloat16()
    value, dh, dw = run(divergence, h, w, y, teacher=teacher, chunk=4)
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    wide = {**teacher, "h": teacher["h"].float()}
    full = run(direct, h.float(), w, y, teacher=wide)
    assert_same([value, dh, dw], [full[0], full[1].bfloat16(), full[2]], 1e-6)


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_case_14_never_copies_a_head(hidden, dtype):
    n, v, d = 6, 3000, 600  # a copy of these heads dwarfs everything else
    h, w, y, _ = inputs(n, v, d, torch.float32, masked=0)
    other = teacher_of(n, v, d, hidden, with_bias=False)
    h, w, other["w"] = h.to(hidden).requires_grad_(), w.to(dtype), other["w"].to(dtype)
    with Meter(h, w, y, other["h"], other["w"]) as meter:
        divergence(h, w, y, teacher=other, chunk=2).backward()
    assert meter.peak < v * d * w.itemsize / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0, 0.5])
def test_a_word_the_teacher_never_says_costs_as_one_it_hardly_says(beta, dtype):
    h, w, y, bias = inputs(dtype=dtype)
    never, hardly = teacher_of(dtype=dtype), teacher_of(dtype=dtype)
    never["bias"][4], hardly["bias"][4] = -torch.inf, -1e4  # 0 * log(0) is 0
    for function in (divergence, full_divergence):
        options = {"beta": beta, "chunk": 4}
        found = run(function, h, w, y, bias, teacher=never, **options)
        assert_same(found, run(function, h, w, y, bias, teacher=hardly, **options), 1e-6)
        assert found[0].isfinite()


def test_equal_models_cost_nothing():
    h, w, y, bias = inputs()
    teacher = {"h": h, "w": w, "bias": bias + 3}  # shifted: the same probabilities
    for beta in BETAS:
        value, *grads = run(divergence, h, w, y, bias, teacher=teacher, beta=beta)
        assert all(abs(x).max() < 1e-14 for x in (value, *grads))


def test_without_gradients_nothing_is_kept():
    h, w, y, _ = inputs()
    with torch.no_grad():
        value = divergence(h.requires_grad_(), w, y, teacher=teacher_of(), chunk=8)
    assert value.grad_fn is None
    assert value > 0


def test_second_derivative_is_refused():
    h, w, y, _ = inputs()
    loss = divergence(h.requires_grad_(), w, y, teacher=teacher_of())
    with pytest.raises(RuntimeError, match=r"create_graph=True.*; take full_divergence$"):
        torch.autograd.grad(loss, h, create_graph=True)


def test_in_place_write_to_what_the_teacher_gave_raises():
    h, w, y, _ = inputs()
    teacher = teacher_of()
    loss = divergence(h.requires_grad_(), w, y, teacher=teacher)
    teacher["h"].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("function", [full_divergence, divergence])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"h": torch.zeros(5, 3)}, ValueError, "student: h, w, y must be"),
        ({"w": torch.zeros(8, 5)}, ValueError, "student: h, w, y must be"),
        ({"w": torch.zeros(0, 3)}, ValueError, r"all above 0, not .*, \(0, 3\), "),
        ({"h": torch.zeros(4, 0), "w": torch.zeros(8, 0)}, ValueError, "student: .* above 0, not"),
        ({"teacher": teacher_of(4, 8, 0)}, ValueError, r"teacher: .* above 0, not \(4, 0\)"),
        ({"h": torch.zeros(0, 3), "y": torch.zeros(0).long()}, ValueError, "all above 0"),
        ({"bias": torch.zeros(3)}, ValueError, "student: bias must be of shape"),
        ({"y": torch.zeros(4)}, TypeError, "y int64"),
        ({"h": torch.zeros(4, 3).long()}, TypeError, "floats"),
        ({"softcap": 0}, ValueError, "student: softcap=0"),
        ({"softcap": float("inf")}, ValueError, "student: softcap=inf, .* softcap finite above 0"),
        ({"softcap": "30"}, ValueError, "student: softcap='30'"),
        ({"logit_scale": "2"}, ValueError, "student: .*logit_scale='2': give numbers"),
        ({"chunk": 0}, ValueError, "chunk=0"),
        ({"chunk": "8"}, ValueError, "chunk='8'"),
        ({"chunk": True}, ValueError, "chunk=True"),
        ({"beta": "0.5"}, ValueError, "beta='0.5', .*give 0 to 1"),
        ({"temperature": "1"}, ValueError, "temperature='1', .*above 0"),
        *BAD_COUNTS,
        ({"chunk": 2.5}, ValueError, "chunk=2.5"),
        ({"beta": 1.1}, ValueError, "beta=1.1"),
        ({"temperature": 0}, ValueError, "temperature=0"),
        ({"label_smoothing": 0.1}, TypeError, "label_smoothing"),
        ({"teacher": {"h": torch.zeros(4, 2)}}, TypeError, "'w'"),
        ({"teacher": teacher_of(3, 8)}, ValueError, "teacher: h, w, y must be"),
        ({"teacher": teacher_of(4, 8, softcap=-1)}, ValueError, "teacher: softcap=-1"),
        ({"teacher": teacher_of(4, 9)}, ValueError, "teacher: 9 words, student: 8; give one"),
        ({"teacher": teacher_of(4, 8, weight=1)}, TypeError, "weight"),
    ],
)
def test_bad_input(function, change, error, says):
    good = {"h": torch.zeros(4, 3), "w": torch.zeros(8, 3), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=says):
        function(**(good | {"teacher": teacher_of(4, 8)} | change))


def test_it_is_called_as_the_trainers_own():
    assert inspect.signature(full_divergence) == inspect.signature(divergence)
    h, w, y, bias = inputs(dtype=torch.float32)
    arguments = {
        "bias": bias,
        "logit_scale": 0.5,
        "softcap": 3.0,
        "teacher": teacher_of(dtype=torch.float32, logit_scale=2.0, softcap=None),
        "num_items_in_batch": 20,
        "beta": 0.3,
        "temperature": 1.3,
    }
    assert arguments.keys() | {"h", "w", "y"} == inspect.signature(gkd.divergence).parameters.keys()
    expected = gkd.divergence(h, w, y, **arguments)
    torch.testing.assert_close(divergence(h, w, y, **arguments), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_label_count_nothing_whatever_they_hold(junk, beta):
    h, w, y, bias = inputs()
    ignored, clean = (y == -100)[:, None], teacher_of()
    spoilt = {**clean, "h": clean["h"].masked_fill(ignored, junk)}
    options = {"beta": beta, "chunk": 8}
    found = run(divergence, h.masked_fill(ignored, junk), w, y, bias, teacher=spoilt, **options)
    assert_same(found, run(divergence, h, w, y, bias, teacher=clean, **options), 0)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("function", [full_divergence, divergence])
def test_words_that_are_never_said_count_nothing(function, beta):
    h, w, y, bias = inputs()
    few, whole = teacher_of(), teacher_of()
    few = {**few, "w": few["w"][:20], "bias": few["bias"][:20]}
    bias[20:] = whole["bias"][20:] = -float("inf")
    value, dh, dw, db = run(function, h, w, y, bias, teacher=whole, beta=beta, chunk=8)
    expected = run(function, h, w[:20], y, bias[:20], teacher=few, beta=beta, chunk=8)
    assert_same([value, dh, dw[:20], db[:20]], expected, 1e-12)
    assert not dw[20:].any()
    assert not db[20:].any()


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("function", [full_divergence, divergence])
def test_a_word_that_only_one_of_the_two_never_says(function, beta):
    h, w, y, bias = inputs()
    for silent in ("student", "teacher"):
        teacher, own = teacher_of(), bias.clone()
        (own if silent == "student" else teacher["bias"])[3] = -float("inf")
        found = run(function, h, w, y, own, teacher=teacher, beta=beta, chunk=8)
        assert all(x.isfinite().all() for x in found)
        assert_same(found, run(direct, h, w, y, own, teacher=teacher, beta=beta), 1e-11)


def test_numpy_integers_are_numbers():
    h, w, y, _ = inputs()
    teacher = teacher_of()
    expected = divergence(h, w, y, teacher=teacher, chunk=8, num_items_in_batch=50)
    options = {"chunk": np.int64(8), "num_items_in_batch": np.int64(50)}
    assert divergence(h, w, y, teacher=teacher, **options) == expected


def test_a_chunk_may_be_larger_than_any_tensor():
    h, w, y, _ = inputs()
    huge, all_at_once = (divergence(h, w, y, teacher=teacher_of(), chunk=c) for c in (2**70, 29))
    assert huge == all_at_once


@pytest.mark.parametrize("function", [full_divergence, divergence])
def test_a_tensor_of_one_number_makes_a_loss_that_is_one(function):
    h, w, y, _ = inputs()
    value = function(h, w, y, teacher=teacher_of(), num_items_in_batch=torch.tensor([41]))
    assert value.shape == ()
    assert value == function(h, w, y, teacher=teacher_of(), num_items_in_batch=41)


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("masked", [0.0, 0.5])
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_kept_bytes_are_those_of_the_header(masked, beta, monkeypatch):
    monkeypatch.setattr(chunked_divergence, "WIDE", 40_000)
    h, w, y, _ = inputs(300, 4000, 32, torch.bfloat16, masked=masked)
    other = teacher_of(300, 4000, 48, torch.bfloat16, with_bias=False)
    given = (h.requires_grad_(), w.requires_grad_(), other["h"], other["w"])
    with Meter(*given, y) as meter:
        loss = divergence(h, w, y, teacher=other, beta=beta, chunk=64)
        kept = meter.live
    scalars = 2 * 512  # the loss, the number of labels
    assert kept == rounded(8 * int((y != -100).sum())) + scalars
    saved = {t.untyped_storage().data_ptr() for t in saved_tensors(loss.grad_fn)}
    assert {t.untyped_storage().data_ptr() for t in given} <= saved


@pytest.mark.parametrize(("beta", "keeps", "peaks"), [(0, 8, 24), (0.5, 24, 40), (1, 12, 24)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_all_the_logits_keep_and_peak_as_the_header_says(beta, keeps, peaks, softcap):
    n, v, d = 128, 3000, 16
    h, w, y, _ = inputs(n, v, d, torch.bfloat16)
    other = teacher_of(n, v, d, torch.bfloat16, with_bias=False, softcap=softcap)
    given = (h.requires_grad_(), w.requires_grad_(), other["h"], other["w"])
    more = 0 if softcap is None else 4
    with Meter(*given, y) as meter:
        loss = full_divergence(h, w, y, teacher=other, beta=beta, softcap=softcap)
        assert 0 <= meter.live - (keeps + more) * n * v <= 8192
        loss.backward()
    assert 0 <= meter.peak - (peaks + more) * n * v <= 2 * (n + v) * d + 16384


def above(n, v, d, chunk, *, beta, frozen, softcap, wide):
    """The peak of the header."""
    c = min(chunk, n)
    widened = (20 if beta in (0, 1) else 36) + (0 if softcap is None else 4)
    logits = 4 * c * v + widened * min(c, wide // v) * v
    if frozen or n <= chunk:
        return logits + 2 * c * d + 8 * n
    return max(logits, 2 * v * d) + 2 * v * d + 2 * c * d + 8 * n


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [
        (4096, 30_000, 64, 512),  # the chunk's logits make the peak
        (4096, 3_000, 2048, 64),  # the fp32 gradient of the head does
        (2000, 30_000, 64, 4096),  # one chunk
    ],
)
def test_peak_is_that_of_the_header(n, v, d, chunk, beta, frozen, softcap, monkeypatch, gpu):
    wide = 1_000_000
    h = torch.zeros(n, d, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu, requires_grad=not frozen)
    teacher = (h.detach().clone(), w.detach().clone(), None)
    options = ((1.0, softcap), (1.0, softcap), beta)
    with Meter(h, w, *teacher[:2]) as meter:
        rows = torch.arange(n, device=gpu)
        sizes = (chunk, wide // v)
        chunked_divergence._ByChunks.apply(h, w, None, rows, *teacher, *sizes, options).backward()
    gradients = 2 * n * d + (0 if frozen else 2 * v * d)
    expected = above(n, v, d, chunk, beta=beta, frozen=frozen, softcap=softcap, wide=wide)
    assert abs(meter.peak - gradients - expected) <= 64 * min(chunk, n) + 16384


@pytest.mark.parametrize(
    ("n", "v", "d", "chunk"),
    [(2**20, 4096, 8, 2**15), (2**14, 262_144, 64, 2**10)],  # 2**32 logits each, of each model
)
def test_2_to_the_32_logits_cost_no_more_than_a_chunk(n, v, d, chunk, monkeypatch):
    monkeypatch.setattr(chunked_divergence, "WIDE", 2**24)
    with simulated_gpu() as gpu:
        h, other = (torch.zeros(n, d, dtype=torch.bfloat16, device=gpu) for _ in range(2))
        w = torch.zeros(v, d, dtype=torch.bfloat16, device=gpu)
        y = torch.zeros(n, dtype=torch.long, device=gpu)
        y[::2] = -100
        with Meter(h.requires_grad_(), other, w, y) as meter:
            loss = divergence(h, w, y, teacher={"h": other, "w": w}, chunk=chunk)
            loss.backward()
            assert h.grad.shape == h.shape
        options = {"beta": 0.5, "frozen": True, "softcap": None, "wide": 2**24}
        found = meter.peak - 2 * n * d - above(n // 2, v, d, chunk, **options)
        assert 0 <= found <= 16 * n + 64 * chunk
