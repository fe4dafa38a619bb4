"""Attention: equal to eager attention, refused where it would be wrong, the card's own operator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from memlab.instruments.device import simulated_gpu
from memlab.models import attention as attention_module
from memlab.models.attention import NAME, attention, no_mask, resolve_attention
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import fake_tensors_are_computed


class Module(torch.nn.Module):
    is_causal = True


def inputs(length: int = 17, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, length, h, 8) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, dtype=torch.float64).transpose(1, 2).requires_grad_() for s in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = (q @ k.mT * scaling).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values_and_gradients_equal_the_reference(kv_heads: int):
    q, k, v = tensors = inputs(kv_heads=kv_heads)
    out, weights = attention(Module(), q, k, v, None, scaling=0.3)
    expected = reference(q, k, v, scaling=0.3)
    assert weights is None
    assert out.shape == (2, 17, 4, 8)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, tensors, direction),
        torch.autograd.grad(expected, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_one_query_sees_the_whole_cache():
    q, k, v = inputs()
    q = q[:, :, -1:]
    out, _ = attention(Module(), q, k, v, None, scaling=0.3)
    torch.testing.assert_close(out, reference(q, k, v, 0.3))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_causal": False}, "both directions"),
        ({"attention_mask": torch.ones(2, 1, 17, 17)}, "ready-made mask"),
        ({"softcap": 50.0}, "softcapping"),
        ({"cu_seq_lens_q": torch.tensor([0, 17])}, "several documents"),
        ({"sliding_window": 16}, "max_length <= 16"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], what: str):
    q, k, v = inputs()
    kwargs: dict[str, Any] = {"attention_mask": None} | changes
    with pytest.raises(ValueError, match=what):
        attention(Module(), q, k, v, **kwargs)


def test_a_window_no_shorter_than_the_row_changes_nothing():
    q, k, v = inputs()
    plain, _ = attention(Module(), q, k, v, None)
    windowed, _ = attention(Module(), q, k, v, None, sliding_window=17)
    assert torch.equal(plain, windowed)


def test_a_part_of_a_prompt_on_a_cache_is_refused():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="3 queries on a cache of 17 keys"):
        attention(Module(), q[:, :, :3], k, v, None)


def test_masks_are_checked_and_never_made():
    right = torch.tensor([[True, True, False], [True, True, True]])
    lengths: dict[str, Any] = {"q_length": 3, "kv_length": 3}
    assert no_mask(**lengths, attention_mask=right) is None
    assert no_mask(**lengths) is None
    with pytest.raises(ValueError, match="padding on the left"):
        no_mask(**lengths, attention_mask=right.flip(1))
    with pytest.raises(ValueError, match="several documents"):
        no_mask(**lengths, allow_is_causal_skip=False)
    with pytest.raises(ValueError, match="window of 2 over 3"):
        no_mask(**lengths, local_size=2)


def twins(name: str, **config: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with equal weights: our attention, and eager attention."""
    shape = load_config(name)
    for key, value in config.items():
        setattr(shape, key, value)
    ours, eager = (
        materialize(build_meta(shape, dtype=torch.float32, attn_implementation=a), "cpu", init=True)
        for a in (NAME, "eager")
    )
    return ours, eager


@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-llama"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_model_equals_eager_attention_on_right_padded_rows(name: str, masked: bool):
    ours, eager = twins(name)
    real = torch.tensor([[1] * 20, [1] * 13 + [0] * 7])
    ids = torch.randint(512, real.shape, generator=torch.Generator().manual_seed(0)) * real
    a = ours(ids, attention_mask=real if masked else None, use_cache=False).logits
    b = eager(ids, attention_mask=real, use_cache=False).logits
    torch.testing.assert_close(a[real == 1], b[real == 1])
    for logits in (a, b):
        logits[real == 1].square().sum().backward()
    for (label, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=label)


def test_a_model_generates_with_a_cache_as_eager_attention_does():
    ours, eager = twins("memlab/tiny")
    ids = torch.arange(1, 9).view(1, 8)
    a, b = (
        m.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        for m in (ours, eager)
    )
    assert torch.equal(a, b)


def test_a_model_refuses_left_padding_and_packed_rows():
    ours, _ = twins("memlab/tiny")
    ids = torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match="padding on the left"):
        ours(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="several documents"):
        ours(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


def test_a_model_refuses_rows_longer_than_its_window():
    shape = load_config("mistralai/Mistral-7B-v0.1")
    shape.update({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1})
    shape.update({"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2})
    shape.update({"vocab_size": 64, "sliding_window": 8})
    model = materialize(build_meta(shape, dtype=torch.float32), "cpu", init=True)
    assert model(torch.arange(8).view(1, 8)).logits.isfinite().all()
    with pytest.raises(ValueError, match="max_length <= 8"):
        model(torch.arange(9).view(1, 9), use_cache=False)


def test_the_best_attention_by_model():
    plain, capped = load_config("memlab/tiny"), load_config("google/gemma-2-2b")
    for device in ("cpu", "cuda", "gpu"):
        assert resolve_attention(plain, None, device) == NAME
        assert resolve_attention(capped, None, device) == "eager"
        assert resolve_attention(plain, "eager", device) == "eager"
    assert resolve_attention(plain, "sdpa", "cpu") == "sdpa"


@pytest.mark.parametrize(
    ("model", "name", "device", "message"),
    [
        ("google/gemma-2-2b", NAME, "cuda", "cannot softcap.*take 'eager'"),
        ("google/gemma-2-2b", "sdpa", "cpu", "cannot softcap.*take 'eager'"),
        ("memlab/tiny", "sdpa", "gpu", "take 'memlab_attention'"),
        ("memlab/tiny", "flash", "cuda", "'flash' is unknown: take 'memlab_attention'"),
    ],
)
def test_attention_that_would_not_work_is_refused(model: str, name: str, device: str, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_attention(load_config(model), name, device)


def test_flash_attention_2_needs_its_extra_and_a_card(monkeypatch: pytest.MonkeyPatch):
    plain = load_config("memlab/tiny")
    monkeypatch.setattr(attention_module, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="extra 'flash', or take 'memlab_attention'"):
        resolve_attention(plain, "flash_attention_2", "cuda")
    monkeypatch.setattr(attention_module, "find_spec", lambda _: object())
    assert resolve_attention(plain, "flash_attention_2", "cuda") == "flash_attention_2"
    with pytest.raises(ValueError, match="real CUDA card only, not on 'gpu'"):
        resolve_attention(plain, "flash_attention_2", "gpu")


class Ops(TorchDispatchMode):
    """Names of the attention operators, with the heads of their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.endswith("_attention"):
            self.seen.append((name, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "operator", "kv_heads"),
    [
        (torch.bfloat16, "_scaled_dot_product_flash_attention", 2),
        (torch.float32, "_scaled_dot_product_efficient_attention", 4),
    ],
)
def test_a_simulated_gpu_takes_the_cards_operator(dtype: torch.dtype, operator: str, kv_heads: int):
    model = build_meta("memlab/tiny", dtype=dtype)
    with simulated_gpu() as device, fake_tensors_are_computed():
        materialize(model, device)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device.type}
        ids = torch.zeros(2, 64, dtype=torch.int64, device=device)
        with Ops() as ops:
            logits = model(input_ids=ids, use_cache=False).logits
        logits.float().sum().backward()
        assert ops.seen == [(operator, kv_heads)] * 2
        assert logits.shape == (2, 64, 512)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_simulated_gpu_refuses_packed_rows_as_a_card_does():
    model = build_meta("memlab/tiny")
    with simulated_gpu() as device, fake_tensors_are_computed():
        materialize(model, device)
        ids = torch.zeros(1, 6, dtype=torch.int64, device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device="cpu").to(device)
        with pytest.raises(ValueError, match="several documents"):
            model(input_ids=ids, position_ids=positions, use_cache=False)
