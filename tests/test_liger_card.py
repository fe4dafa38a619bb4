"""Liger on a card: its kernels' values, and the very bytes that the simulated GPU counts."""

import contextlib

import pytest
import torch
from liger_cases import SWITCHES, metered_gkd_peak, metered_peak
from test_liger import FAMILIES, GKD_PEAK, PEAKS, changed

from memlab.models.build import build_meta, materialize
from memlab.models.compat import enable_checkpointing
from memlab.models.head import head_parts
from memlab.techniques import liger, liger_losses
from memlab.techniques.chunked_loss import cross_entropy
from memlab.trainers.gkd import divergence
from memlab.trainers.loop import apply_head

pytestmark = pytest.mark.gpu


def loss_and_gradients(
    name: str, dtype: torch.dtype, *, patched: bool, checkpointing: bool = False
) -> list[torch.Tensor]:
    capped_or_windowed = "gemma2" in name or "mistral" in name
    attention = "eager" if capped_or_windowed else None
    meta = build_meta(name, dtype=dtype, attn_implementation=attention)
    model = materialize(meta, "cuda", init=True, seed=3).train()
    with torch.no_grad():  # initial norms are all ones, or all zeros
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight += torch.linspace(-0.3, 0.4, len(module.weight), device="cuda")
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(2 * 65, device="cuda").view(2, 65) % 500
    labels = (torch.arange(2 * 65, device="cuda") * 7) % 500
    labels[::5] = -100
    with liger.kernels(model) if patched else contextlib.nullcontext():
        function = liger.cross_entropy if patched else cross_entropy
        arguments = {"input_ids": ids}
        loss = apply_head(function, head_parts(model), arguments, labels, num_items_in_batch=99)
        loss.backward()
    assert changed(model) == set()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest error of any gradient, in the norm, relative to that gradient's."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients(name: str, checkpointing: bool) -> None:
    expected = loss_and_gradients(name, torch.float32, patched=False)
    found = loss_and_gradients(name, torch.float32, patched=True, checkpointing=checkpointing)
    print(name, "fp32", worst(found, expected))
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert worst(found, expected) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_is_as_near_to_fp32_as_the_layers_replaced(name: str) -> None:
    exact = loss_and_gradients(name, torch.float32, patched=False)
    plain, found = (
        worst(loss_and_gradients(name, torch.bfloat16, patched=patched), exact)
        for patched in (False, True)
    )
    print(name, "bf16", plain, found)
    assert found < 2 * plain  # Liger sums the head's gradient in bf16


def test_gkd_with_a_frozen_teacher() -> None:
    torch.manual_seed(0)
    make = {"device": "cuda", "requires_grad": True}
    h, w = torch.randn(1500, 64, **make), torch.randn(700, 64, **make)
    th, tw = torch.randn(1500, 48, device="cuda"), torch.randn(700, 48, device="cuda")
    y = torch.arange(1500, device="cuda") % 700
    y[::3] = -100
    other = {"h": th, "w": tw, "bias": None, "logit_scale": 1.0, "softcap": None}
    options = {"teacher": other, "num_items_in_batch": 2000, "beta": 0.3, "temperature": 1.5}
    head = {"bias": None, "logit_scale": 1.0, "softcap": None}
    losses = [function(h, w, y, **head, **options) for function in (divergence, liger_losses.jsd)]
    expected, found = (torch.autograd.grad(loss, (h, w)) for loss in losses)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert worst(list(found), list(expected)) < 1e-4


@pytest.mark.parametrize(
    ("checkpointing", "name"), [(switch, name) for switch in PEAKS for name in PEAKS[switch]]
)
def test_the_card_counts_what_the_simulated_one_does(checkpointing: bool, name: str) -> None:
    found, simulated = (
        metered_peak(*SWITCHES[name], checkpointing=checkpointing, simulated=simulated)
        for simulated in (False, True)
    )
    print(name, checkpointing, found, simulated, PEAKS[checkpointing][name])
    assert found == simulated == PEAKS[checkpointing][name]


def test_the_card_counts_gkd_as_the_simulated_one_does() -> None:
    found, simulated = (metered_gkd_peak(simulated=simulated) for simulated in (False, True))
    print("gkd", found, simulated, GKD_PEAK)
    assert found == simulated == GKD_PEAK
