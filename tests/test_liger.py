"""Liger's layer kernels: the same values, for one model alone, undone; the bytes they remove."""

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from liger_cases import SWITCHES, metered_gkd_peak, metered_peak
from trainer_cases import with_lora
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from memlab.instruments.device import simulated_gpu
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import fake_tensors_are_computed
from memlab.techniques import liger

pytest.importorskip("liger_kernel", reason="no liger-kernel here")
pytest.importorskip("triton", reason="no Triton here")

TESTS = Path(__file__).parent
FAMILIES = ("memlab/tiny", "memlab/tiny-llama", "memlab/tiny-mistral", "memlab/tiny-gemma2")
PATCHED = {"RMSNorm": "rms_norm", "Attention": "rope", "MLP": "swiglu"}
# 4 layers of Qwen3-0.6B, bf16, 4 rows of 1024 tokens, second step; without and with checkpointing
PEAKS = {
    False: {
        "none": 9_990_356_480,
        "rms_norm": 9_638_034_944,
        "rope": 9_990_356_480,
        "swiglu": 9_889_693_184,
        "head": 2_900_657_664,
        "all": 2_403_632_640,
    },
    True: {
        "none": 8_846_757_376,
        "rms_norm": 8_829_980_160,
        "head": 2_370_487_808,
        "all": 2_370_487_808,
    },
}
GKD_PEAK = 7_431_467_520


@functools.cache
def interpreted() -> dict[str, tuple[float, float, float]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "liger_interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "case",
    [
        "qwen3 rms_norm",
        "qwen3 rope",
        "qwen3 swiglu",
        "qwen3 head",
        "qwen3 checkpointing",
        "qwen2",
        "llama",
        "mistral",
        "gemma2",
    ],
)
def test_loss_and_gradients_are_those_of_the_layers_replaced(case: str) -> None:
    expected, found, gradient_error = interpreted()[case]
    assert found == pytest.approx(expected, rel=1e-6)
    assert gradient_error < 1e-5


def changed(model: torch.nn.Module) -> set[str]:
    """Names of the kinds of layers that have a forward of their own."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", PATCHED)
def test_each_switch_changes_its_layers_and_no_class_or_module(name: str, kind: str) -> None:
    model, other = build_meta(name), build_meta(name)
    module = sys.modules[type(model).__module__]
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    before, forwards = dict(vars(module)), [getattr(c, "forward", None) for c in classes]
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    with liger.kernels(model, **dict.fromkeys(PATCHED.values(), False) | {PATCHED[kind]: True}):
        assert changed(model) == {f"{prefix}{kind}"}
        assert changed(other) == set()
        assert vars(module) == before
        assert [getattr(c, "forward", None) for c in classes] == forwards
    assert changed(model) == set()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft
def test_every_norm_is_changed_and_an_adapter_is_no_obstacle() -> None:
    for model in (build_meta("memlab/tiny"), with_lora(build_meta("memlab/tiny"))):
        with liger.kernels(model):
            kinds = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
            assert kinds.count("Qwen3RMSNorm") == 2 * 4 + 1  # q_norm and k_norm among them
            assert kinds.count("Qwen3Attention") == kinds.count("Qwen3MLP") == 2
        assert changed(model) == set()


def test_undone_after_an_error_and_in_reverse_order() -> None:
    model = build_meta("memlab/tiny")
    layer = model.model.layers[0].mlp
    layer.forward = mine = functools.partial(type(layer).forward, layer)
    with liger.kernels(model):
        outer = layer.forward
        assert outer is not mine
        with contextlib.suppress(KeyError), liger.kernels(model):
            assert layer.forward is not outer
            raise KeyError
        assert layer.forward is outer
    assert layer.forward is mine
    assert changed(model) == {"Qwen3MLP"}


def test_an_error_while_patching_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta("memlab/tiny")
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", lambda self, x: x)
    with pytest.raises(ValueError, match="Qwen3Attention that calls no apply_rotary_pos_emb"):
        with liger.kernels(model):
            pass
    assert changed(model) == set()


def test_a_copy_runs_its_own_layers() -> None:
    model = build_meta("memlab/tiny")
    with liger.kernels(model):
        twin = copy.deepcopy(model)
    assert twin.model.norm.forward.__self__ is twin.model.norm


def kept_bytes(name: str, patched: bool, pick, width: int, tokens: int = 1024) -> int:
    """Bytes alive after a layer of a model has run, its input and parameters aside."""
    model = build_meta(name)
    with simulated_gpu() as device, Meter(device.type) as meter:
        layer = pick(materialize(model, device))
        shape = 1, tokens, width
        x = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        with liger.kernels(model) if patched else contextlib.nullcontext():
            before = meter.live_bytes
            kept = layer(x)
        assert kept.shape == x.shape
        return (meter.live_bytes - before) // tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_a_token_are_the_headers(name: str) -> None:
    config, gemma = load_config(name), "gemma2" in name
    d, f = config.hidden_size, config.intermediate_size

    def norm(model):
        return model.model.norm

    def mlp(model):
        return model.model.layers[0].mlp

    output = 2 * d
    assert kept_bytes(name, True, norm, d) == 4 + output  # and 2 * d of the input, there anyway
    if not gemma:  # 6 * d + 4, but for what the last operation returned
        assert kept_bytes(name, False, norm, d) == 4 * d + 4 + 2 * d + output
    assert kept_bytes(name, True, mlp, d) == 6 * f + output
    assert kept_bytes(name, False, mlp, d) == 8 * f + output


def test_backward_takes_a_row_of_sums_for_each_multiprocessor_of_the_card() -> None:
    model = build_meta("memlab/tiny")
    with simulated_gpu() as device, Meter(device.type) as meter:
        norm = materialize(model, device).model.norm
        x = torch.empty(8, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
        with liger.kernels(model):
            norm(x).sum().backward()
    assert 132 * 128 * 4 in [birth.nbytes for birth in meter.ledger.births]


def test_the_fused_head_takes_the_cards_path() -> None:
    n, d, v = 4096, 1024, 32_000
    c = 128  # n / 32, and 32 = v / d rounded up
    with simulated_gpu() as device, Meter(device.type) as meter:
        h, w = (
            torch.empty(rows, d, dtype=torch.bfloat16, device=device, requires_grad=True)
            for rows in (n, v)
        )
        y = torch.zeros(n, dtype=torch.int64, device=device)
        before = meter.live_bytes
        loss = liger.cross_entropy(h, w, y)
        kept = meter.live_bytes - before
        peak = max(sample.total for sample in meter.ledger.samples()) - before
        loss.backward()
        assert meter.live_bytes - before - kept <= 1024  # gradients are what was kept
    assert 0 <= kept - 2 * (n + v) * d <= 2048
    assert (
        0 <= peak - 2 * (n + v) * d - 2 * c * v <= 32 * n
    )  # dw in bf16, one buffer for all chunks
    assert h.grad is not None
    assert w.grad is not None


def test_of_two_models_side_by_side_one_saves() -> None:
    def alive(patched: str) -> list[int]:
        found = []
        models = {name: build_meta("memlab/tiny") for name in ("first", "second")}
        with simulated_gpu() as device, fake_tensors_are_computed(), Meter(device.type) as meter:
            for model in models.values():
                materialize(model, device)
            ids = torch.zeros(1, 64, dtype=torch.int64, device=device)
            with liger.kernels(models[patched]) if patched else contextlib.nullcontext():
                for model in models.values():
                    before = meter.live_bytes
                    kept = model.model(input_ids=ids, use_cache=False)
                    found.append(meter.live_bytes - before)
                    del kept
        return found

    plain, first, second = alive(""), alive("first"), alive("second")
    assert plain[0] == plain[1]
    assert first[0] < plain[0] == first[1]
    assert second[1] < plain[1] == second[0]


@pytest.mark.integers
@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_of_a_step_by_kernel(checkpointing: bool) -> None:
    found = {
        name: metered_peak(*SWITCHES[name], checkpointing=checkpointing, simulated=True)
        for name in PEAKS[checkpointing]
    }
    assert found == PEAKS[checkpointing]


@pytest.mark.integers
def test_peak_of_a_gkd_step() -> None:
    assert metered_gkd_peak(simulated=True) == GKD_PEAK


def refused(model, match: str, **switches: bool) -> None:
    with pytest.raises(ValueError, match=match) as error, liger.kernels(model, **switches):
        pass
    assert "\n" not in str(error.value)
    assert "use_liger_kernel=False" in str(error.value)
    assert changed(model) == set()


def test_what_the_kernels_do_not_compute_is_refused_by_name() -> None:
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    refused(gpt2, r"use_liger_kernel=True of 'gpt2': .* a transformers model of llama, mistral")
    refused(torch.nn.Linear(2, 2), "use_liger_kernel=True of 'Linear': .* a transformers model of")
    config = load_config("memlab/tiny-llama")
    config.hidden_act = "gelu"
    model = build_meta(config)
    refused(model, r"with the activation 'gelu': .* or swiglu=False")
    with liger.kernels(model, swiglu=False):
        assert changed(model) == {"LlamaRMSNorm", "LlamaAttention"}
    model.model.layers[0].mlp = torch.nn.Identity()
    model.model.layers[1].mlp = torch.nn.Identity()
    model.config.hidden_act = "silu"
    refused(model, "without layers called LlamaMLP")
    real = materialize(build_meta("memlab/tiny"), "cpu")
    refused(real, "use_liger_kernel=True on 'cpu': .* a CUDA card or a simulated one")


def test_what_the_fused_head_does_not_compute_is_refused_by_name() -> None:
    h, w, y = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"with logit_scale=0.5: .* a model without one"):
        liger.cross_entropy(h, w, y, logit_scale=0.5)
    with pytest.raises(ValueError, match="use_liger_kernel=True on 'cpu'"):
        liger.cross_entropy(h, w, y)
    for items in (-3, 0, "3", True):
        with pytest.raises(ValueError, match=f"num_items_in_batch={items!r}: give the labels of"):
            liger.cross_entropy(h, w, y, num_items_in_batch=items)
    for softcap in ("30", 0.0, -1):
        with pytest.raises(ValueError, match=f"softcap={softcap!r}: give a positive number, or"):
            liger.cross_entropy(h, w, y, softcap=softcap)
