"""On a card, in bf16: padded, padding-free and packed agree as well as bf16 agrees with itself."""

import importlib.util

import pytest
import torch
from made_rows import rows_of
from trainer_cases import one_step

from memlab.experiments.heads import HEAD_LOSSES
from memlab.models.attention import NAME as PADDED
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.head import head_parts
from memlab.techniques import packing, pad_to_multiple, padding_free, varlen_attention
from memlab.trainers import sft

pytestmark = pytest.mark.gpu

LENGTHS = (100, 900, 33, 512, 1, 700, 256)  # some below, some above a block of the kernel
VARLEN = [varlen_attention.NAME]
if importlib.util.find_spec("flash_attn") is not None:
    VARLEN.append("flash_attention_2")


def loss_and_norm(model, attention: str, batches: list[dict]) -> torch.Tensor:
    model.set_attn_implementation(attention)
    found = one_step(
        sft.train,
        model,
        batches,
        head=head_parts(model),
        head_loss=HEAD_LOSSES["chunked_nll"],
        inputs=padding_free.model_inputs if "cu_seqlens" in batches[0] else sft.padded_inputs,
    )
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.3"]
)
def test_loss_and_gradient_norm_within_the_spread_of_bf16(name: str) -> None:
    varlen_attention.register()
    rows = rows_of(load_config(name).vocab_size, LENGTHS)
    meta = build_meta(name, dtype=torch.bfloat16, attn_implementation=PADDED)
    model = materialize(meta, "cuda", init=True, seed=3).train()
    padded = [
        loss_and_norm(model, PADDED, batches)
        for batches in (
            [pad_to_multiple.collate(rows)],
            [pad_to_multiple.collate(rows[::-1], pad_to_multiple_of=64)],
            [pad_to_multiple.collate(rows[:4]), pad_to_multiple.collate(rows[4:])],
            [pad_to_multiple.collate([row]) for row in rows],
        )
    ]
    columns = {key: [row[key] for row in rows] for key in ("input_ids", "labels")}
    packed = packing.pack(columns, 1024, strategy="bfd")
    bins = [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)]
    flat = {
        (attention, kind): loss_and_norm(model, attention, batches)
        for attention in VARLEN
        for kind, batches in (
            ("padding-free", [padding_free.collate(rows)]),
            ("packed", [padding_free.collate(bins)]),
        )
    }
    model.float()  # the same weights; padded, by memory-efficient attention
    exact = loss_and_norm(model, PADDED, [pad_to_multiple.collate(rows)])
    spread = torch.stack([(x / exact - 1).abs() for x in padded]).amax(0)
    print(f"\n{name}: fp32 loss {exact[0]:.5f}, norm {exact[1]:.5f}; off by at most {spread}")
    for which, found in flat.items():
        off = (found / exact - 1).abs()
        print(f"  {which}: off {off.tolist()}")
        assert (off <= 1.5 * spread + 1e-4).all(), which


def test_values_of_the_kernels_agree() -> None:
    """torch's varlen kernel, and flash-attn's where it is installed, against fp32, in bf16."""
    rng = torch.Generator("cuda").manual_seed(0)
    lengths = torch.tensor([0, 700, 1, 299, 1048, 2048])
    cu_seqlens = lengths.cumsum(0).to("cuda", torch.int32)
    q, k, v = (
        torch.randn(4096, h, 128, generator=rng, device="cuda", dtype=torch.bfloat16)
        for h in (16, 8, 8)
    )

    def with_gradients(function, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = function(*leaves)
        direction = torch.ones_like(out) / 64
        return [out.detach(), *torch.autograd.grad(out, leaves, direction)]

    def reference(q, k, v):
        return varlen_attention._document_by_document(q, k, v, cu_seqlens, None, None)

    def varlen(q, k, v):
        return varlen_attention.varlen_attention(q, k, v, cu_seqlens, 2048)

    exact = with_gradients(reference, q.float(), k.float(), v.float())
    candidates = {"torch varlen": varlen}
    if len(VARLEN) > 1:
        from flash_attn import flash_attn_varlen_func

        candidates["flash-attn"] = lambda q, k, v: flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, 2048, 2048, causal=True
        )
    naive = with_gradients(reference, q, k, v)
    for name, function in candidates.items():
        for got, own, want in zip(with_gradients(function, q, k, v), naive, exact, strict=True):
            off, own_off = (float((x.float() - want).norm() / want.norm()) for x in (got, own))
            print(f"  {name}: off {off:.2e} of fp32 (bf16, document by document: {own_off:.2e})")
            assert off <= 1.5 * own_off + 1e-3, name
