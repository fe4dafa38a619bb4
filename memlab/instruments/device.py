"""The simulated GPU: fake tensors on a device that this process does not have.

Fake tensors carry shapes, types and storages but no data, so a training step on them runs the very
same Python code, in seconds, and makes and drops the same storages. Without a card they live on a
device called `gpu`, registered through PyTorch's experimental hook for Python-only devices; beside
a real card they live on `cuda`, because that hook would take CUDA's place in the autograd engine.

Source: torch.utils.backend_registration, torch._subclasses.fake_tensor (PyTorch 2.11 to 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration

from memlab.errors import MemlabError
from memlab.instruments.twins import Twins

# CUDA has kernels for these; without one of its own, a new device would get their formulas instead,
# op by op, with temporaries that no card makes.
ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
HOOK = "_setup_privateuseone_for_python_backend"


def simulation_missing() -> str | None:
    """Why this torch can't simulate a GPU, in one line; None when it can."""
    if torch.cuda.is_available() or hasattr(backend_registration, HOOK):
        return None
    return (
        f"torch {torch.__version__} has no hook for Python-only devices, which the simulated GPU "
        "needs: install torch>=2.11,<2.14, or use device=cpu"
    )


@functools.cache
def simulated_device() -> str:
    """The name of the device that simulated tensors live on, registered at the first call.

    Raises MemlabError where this torch lacks the hook.
    """
    if torch.cuda.is_available():
        return "cuda"
    if missing := simulation_missing():
        raise MemlabError(missing)
    getattr(backend_registration, HOOK)("gpu", backend_module=_device_module())
    for name in ONE_KERNEL_ON_CUDA:
        torch.library.impl(f"aten::{name}", "PrivateUse1", _never_called)
    return "gpu"


def _never_called(*args: object, **kwargs: object) -> object:
    raise AssertionError("a simulated GPU has no kernels: FakeTensorMode answers before them")


@contextlib.contextmanager
def simulated_gpu() -> Iterator[torch.device]:
    """Inside, tensors made on the yielded device take no memory, and kernels are not launched.

    Integer tensors keep real twins on the host (see `twins`), so data-dependent code works. Enter a
    `Meter` inside this context to count. Backward runs in the calling thread, where the modes are.
    Raises MemlabError as `simulated_device`.
    """
    device = torch.device(simulated_device())
    lifted = torch._C._only_lift_cpu_tensors()
    with (
        torch.autograd.set_multithreading_enabled(False),
        _no_kernel_launches(),
        FakeTensorMode(allow_non_fake_inputs=True),
        Twins(device.type),
    ):
        # else torch.tensor(1.0, device=...) would try to make real data there
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)


def _device_module() -> object:
    """What torch asks of a device's module, for checkpointing, autocast and FSDP2 too."""
    base = backend_registration._DummyBackendModule

    class SimulatedDevice(base):  # type: ignore[misc, valid-type]
        Stream = staticmethod(lambda *args, **kwargs: torch.Stream(device="gpu"))
        Event = staticmethod(lambda *args, **kwargs: torch.Event(device="gpu"))

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def current_stream(self, device: object = None) -> torch.Stream:
            return torch.Stream(device="gpu")

        def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def synchronize(self, device: object = None) -> None: ...

        def set_device(self, device: object) -> None: ...

        def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
            return types.SimpleNamespace(name="simulated GPU", multi_processor_count=132)

        def get_device_capability(self, device: object = None) -> tuple[int, int]:
            return 9, 0  # an H200's, as the count above is

    return SimulatedDevice()


@contextlib.contextmanager
def _no_kernel_launches() -> Iterator[None]:
    """Triton kernels called with a fake tensor return at once; real launches go through."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton on this platform: nothing to skip
        yield
        return
    launch = JITFunction.run

    def run(self: object, *args: object, **kwargs: object) -> object:
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            return None
        return launch(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        JITFunction.run = launch
