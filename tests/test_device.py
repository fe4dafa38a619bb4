"""The simulated device: what it says when it can't be had, and what it leaves alone."""

import pytest
import torch
from torch.utils import backend_registration

from memlab.errors import MemlabError
from memlab.instruments import device
from memlab.instruments.device import simulated_gpu, simulation_missing
from memlab.instruments.meter import Meter


def test_a_torch_without_the_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backend_registration, device.HOOK)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch>=2.11" in (simulation_missing() or "")
    with pytest.raises(MemlabError, match=r"has no hook .* install torch>=2\.11,<2\.14") as error:
        device.simulated_device.__wrapped__()
    assert "\n" not in str(error.value)


def test_simulated_tensors_take_no_memory() -> None:
    with simulated_gpu() as gpu:
        x = torch.empty(1 << 40, device=gpu)  # 4 TiB
        y = (x * 2).sum()
    assert y.shape == ()


def test_backward_and_optimizers_run() -> None:
    with simulated_gpu() as gpu:
        w = torch.nn.Parameter(torch.empty(4, 4, device=gpu))
        optimizer = torch.optim.AdamW([w], fused=True)
        (w @ w).sum().backward()
        optimizer.step()
    assert w.grad is not None
    assert optimizer.state[w]["exp_avg"].shape == (4, 4)


def test_silu_has_one_kernel_in_backward_as_on_a_card() -> None:
    with simulated_gpu() as gpu:
        with Meter(gpu.type) as meter:
            x = torch.empty(512, device=gpu, requires_grad=True)
            torch.nn.functional.silu(x).sum().backward()
    made = [birth.op for birth in meter.ledger.births]
    assert sum("silu_backward" in op for op in made) == 1
    assert not any("sigmoid" in op for op in made)


def test_triton_kernels_are_skipped_for_fake_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit", reason="no Triton here")
    launched: list[object] = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *a, **k: launched.append(a))
    with simulated_gpu() as gpu:
        jit.JITFunction.run(None, torch.empty(4, device=gpu))
        jit.JITFunction.run(None, x=torch.empty(4, device=gpu))
        assert launched == []
        jit.JITFunction.run(None, 3)
    assert launched == [(3,)]


@pytest.mark.filterwarnings("ignore")  # what liger-kernel imports
def test_a_real_triton_kernel_costs_what_it_allocates() -> None:
    liger = pytest.importorskip("liger_kernel.transformers.rms_norm", reason="no liger-kernel here")
    with simulated_gpu() as gpu, Meter(gpu.type) as meter:
        norm = liger.LigerRMSNorm(1024)
        norm.weight = torch.nn.Parameter(torch.empty(1024, dtype=torch.bfloat16, device=gpu))
        x = torch.empty(4096, 1024, dtype=torch.bfloat16, device=gpu, requires_grad=True)
        before = meter.live_bytes
        y = norm(x)
        assert meter.live_bytes - before == 2 * 4096 * 1024 + 4 * 4096  # output, 1/rms a row
        y.sum().backward()
    assert x.grad is not None
    assert norm.weight.grad.shape == (1024,)
