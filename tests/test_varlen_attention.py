"""Attention of many documents in one row: equal to each alone, and refused where it can't be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memlab.instruments.device import simulated_gpu
from memlab.techniques import varlen_attention as module
from memlab.techniques.varlen_attention import attention, varlen_attention


def inputs(
    tokens: int, heads: int = 4, kv_heads: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(tokens, heads, 8, generator=rng, dtype=torch.float64).requires_grad_()

    return normal(heads), normal(kv_heads), normal(kv_heads)


def masked_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """All documents at once, under an (N, N) mask."""
    n, groups = len(q), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (document[:, None] == document) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    kv_heads=st.sampled_from((1, 2, 4)),
    window=st.none() | st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_the_masked_reference(lengths, kv_heads, window, seed):
    tensors = inputs(sum(lengths), kv_heads=kv_heads, seed=seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    out = varlen_attention(*tensors, cu_seqlens, max(lengths), scale=0.3, window=window)
    expected = masked_reference(*tensors, lengths, 0.3, window)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, tensors, direction),
        torch.autograd.grad(expected, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_the_default_scale_is_that_of_attention():
    q, k, v = inputs(6)
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    expected = masked_reference(q, k, v, [2, 4], 8**-0.5, None)
    torch.testing.assert_close(varlen_attention(q, k, v, cu_seqlens, 4), expected)


def as_transformers_calls(*, batch: int = 1, **arguments):
    q, k, v = (x.transpose(0, 1)[None].expand(batch, -1, -1, -1) for x in inputs(6))
    return attention(torch.nn.Module(), q, k, v, None, **arguments)


LENGTHS = {"cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32), "max_length_q": 4}


def test_as_transformers_calls_it():
    out, weights = as_transformers_calls(scaling=0.3, **LENGTHS)
    assert weights is None
    torch.testing.assert_close(out[0], masked_reference(*inputs(6), [2, 4], 0.3, None))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "can't tell documents apart without cu_seqlens: collate with padding_free"),
        ({"cu_seq_lens_q": LENGTHS["cu_seq_lens_q"]}, "can't tell documents apart"),
        ({**LENGTHS, "batch": 2}, "can't tell documents apart"),
        ({**LENGTHS, "softcap": 50.0}, r"softcapping \(softcap=50.0\).*take 'flash_attention_2'"),
        ({**LENGTHS, "dropout": 0.1}, r"no dropout \(0.1\)"),
    ],
)
def test_refuses_what_it_cannot_do(arguments, says):
    with pytest.raises(ValueError, match=says):
        as_transformers_calls(**arguments)


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "window", "says"),
    [
        ([0, 3], 3, None, r"cu_seqlens=\[0, 3\]: give 0, ..., 6, ascending"),
        ([0, 9], 9, None, r"cu_seqlens=\[0, 9\]"),
        ([1, 6], 5, None, r"cu_seqlens=\[1, 6\]"),
        ([0, 4, 2, 6], 4, None, r"cu_seqlens=\[0, 4, 2, 6\]"),
        ([0], 6, None, r"cu_seqlens=\[0\]"),
        ([0, 2, 6], 3, None, "max_seqlen=3: a document has 4 tokens"),
        ([0, 2, 6], 4, 0, "window=0: give 1"),
        ([0, 2, 6], 4, -1, "window=-1"),
    ],
)
def test_documents_that_do_not_add_up_are_refused(cu_seqlens, max_seqlen, window, says):
    lengths = torch.tensor(cu_seqlens, dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        varlen_attention(*inputs(6), lengths, max_seqlen, window=window)


@pytest.mark.parametrize("value", ["3", 3.0, True])
@pytest.mark.parametrize("name", ["max_seqlen", "window"])
def test_a_length_that_is_no_int_is_refused(name, value):
    lengths = torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match=f"{name}={value!r}: give an int"):
        varlen_attention(*inputs(6), lengths, **{"max_seqlen": 3, name: value})


def test_numpy_integers_are_lengths():
    lengths = torch.tensor([0, 3, 6], dtype=torch.int32)
    found = varlen_attention(*inputs(6), lengths, np.int64(3), window=np.int32(2))
    assert found.equal(varlen_attention(*inputs(6), lengths, 3, window=2))


def test_a_document_of_no_token_changes_nothing():
    q, k, v = inputs(6)
    lengths = torch.tensor([0, 2, 2, 6, 6], dtype=torch.int32)
    expected = masked_reference(q, k, v, [2, 4], 0.3, None)
    torch.testing.assert_close(varlen_attention(q, k, v, lengths, 4, scale=0.3), expected)


def test_a_card_takes_half_precision_only():
    with simulated_gpu() as device:
        q, k, v = (torch.empty(6, 2, 8, device=device) for _ in range(3))
        cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match="flash attention takes bfloat16 or float16"):
            varlen_attention(q, k, v, cu_seqlens, 4)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, (-1, 0)), (4, (-1, 0)), (9, (-1, 0)), (3, (2, 0))]
)
def test_a_card_gets_torchs_kernel_with_a_window_that_includes_the_token_itself(
    monkeypatch, window, expected
):
    calls = []

    def varlen_attn(q, k, v, *lengths, **options):
        calls.append((lengths, options))
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    module._must_ask_for_groups.cache_clear()
    with simulated_gpu() as device:
        q = torch.empty(6, 2, 8, device=device, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
        varlen_attention(q, q, q, cu_seqlens, 4, scale=0.5, window=window)
    module._must_ask_for_groups.cache_clear()
    ((lengths, options),) = calls
    assert lengths[0] is lengths[1] is cu_seqlens
    assert lengths[2:] == (4, 4)
    assert options == {"scale": 0.5, "window_size": expected}


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_keeps_exactly_the_bytes_of_its_header(kv_heads):
    tokens, heads, size, saved = 320, 4, 8, {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with simulated_gpu() as device:
        q, k, v = (
            torch.empty(tokens, h, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        )
        cu_seqlens = torch.tensor([0, 100, 320], dtype=torch.int32, device=device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            varlen_attention(q, k, v, cu_seqlens, 220).sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    small = 4 * 3 + 2 * 8  # cu_seqlens; the state of a random generator that nothing draws from
    rows = 2 * tokens * size * (2 * heads + 2 * kv_heads)  # q, out; k, v
    assert sum(saved.values()) == rows + 4 * heads * tokens + small
