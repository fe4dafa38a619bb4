"""The meter: counts every storage of a device as it is born and dies, by category and over time.

It watches operations (a `TorchDispatchMode`) and storages (weak references), so it reads the same
integers from CUDA tensors, CPU tensors and simulated ones. Storages are rounded up to 512 B, the
caching allocator's unit. What an operation allocates and frees inside itself is not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.instruments.ledger import TEMPORARIES, Ledger, rounded
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.workspaces import CUBLAS_WORKSPACE, MATRIX_PRODUCTS, workspaces

DEVICE_QUERY = torch.ops.prim.device.default


def device_type(tensor: Tensor) -> str:
    """`tensor.device.type`, without the dispatch that asking a fake tensor costs."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type
    return tensor.device.type


class Meter(TorchDispatchMode):
    """Counts the storages of `device_type` that operations make while it is active.

    `vocab_size` tells logits from other tensors: floating point, last dimension V. `watch` names
    the model and its optimizer, whose tensors are then known as parameters, gradients and
    optimizer state. An activation is what a forward pass (or its recomputation in backward) leaves
    alive. The counts are in `ledger`; bytes on the host are counted apart, unless the host is the
    device.
    """

    def __init__(self, device_type: str, *, vocab_size: int | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.vocab_size = vocab_size
        self.ledger = Ledger()
        self.live_bytes = 0
        self.host_bytes = self.host_peak_bytes = 0
        self._live: dict[int, tuple[int, Any]] = {}  # storage -> (birth, its watcher), oldest first
        self._emptied: dict[int, tuple[int, Any]] = {}  # alive, resized to 0 bytes: as in _live
        self._host: dict[int, tuple[int, Any]] = {}  # storage -> (bytes, its watcher)
        self._watching = False
        self._handles: set[bool] = set()  # threads that have multiplied: is it backward's?
        self._recomputing_since: int | None = None
        self._watched: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Remember whose parameters (buffers too), gradients and optimizer state these are.

        A frozen model (a reference, a teacher) is watched without an optimizer: its weights are
        parameters too. Of its parts, watch each: the backbone, then the head.
        """
        self._watched.append((model, optimizer))
        self._label_watched()

    def begin_step(self) -> None:
        """Peaks, samples and host bytes speak of what follows."""
        self.ledger.begin_step()
        self.host_peak_bytes = self.host_bytes

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside.

        Trainers name "rollout" (completions and their rewards), "reference" (a frozen model's, or a
        teacher's, pass), "forward", "backward" and "optimizer"; what is outside is "setup".
        """
        if not self._watching:  # a step that is only timed: nothing to name, no work to add
            yield
            return
        outer = self.ledger.phase
        start = self._next_birth
        self.ledger.enter(name)
        try:
            yield
        finally:
            self._end_recomputation()
            if name == "forward":
                self._call_survivors_activations(start)
            self._label_watched()
            self.ledger.enter(outer)

    def label(self, category: str, tensors: Iterable[Any]) -> None:
        """Say what the storages of these tensors are for, from their birth on."""
        number = CATEGORIES.index(category)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and device_type(tensor) == self.device_type:
                known = self._live.get(tensor.untyped_storage()._cdata)
                if known is not None:
                    self.ledger.births[known[0]].category = number

    def birth_of(self, tensor: Tensor) -> int | None:
        """The number, in the ledger, of the birth of this tensor's storage, where it was seen."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def alive(self, first_birth: int) -> list[int]:
        """The births from `first_birth` on whose storages are alive."""
        births = itertools.takewhile(
            lambda birth: birth >= first_birth, (b for b, _ in reversed(self._live.values()))
        )
        return [*births][::-1]

    def renumber(self, births: dict[int, int]) -> None:
        """Take the storages of these births, from now on, for those of other births."""
        moved = ((key, (births.get(b, b), w)) for key, (b, w) in self._live.items())
        self._live = dict(sorted(moved, key=lambda item: item[1][0]))
        self.live_bytes = sum(self.ledger.births[birth].nbytes for birth, _ in self._live.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every operation, for compiled code that is not run here

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._seeing_resizes()  # type: ignore[method-assign]
        self._watching = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._watching = False  # what dies later is no event of the run
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked of every fake tensor, several times an operation
        if self.ledger.phase == "backward":
            self._follow_recomputation()
        out = func(*args, **(kwargs or {}))
        self._see_all(out, func)
        if inside := workspaces(func, args):
            self.ledger.worked(inside)
        if func in MATRIX_PRODUCTS:
            self._use_cublas()
        return out

    def _use_cublas(self) -> None:
        """On a card, backward runs in a thread of its own, with a cuBLAS handle of its own."""
        thread = self.ledger.phase == "backward"
        if thread not in self._handles:
            self._handles.add(thread)
            self.ledger.worked((CUBLAS_WORKSPACE,), keeps=True)

    def _see_all(self, out: Any, func: Any) -> None:
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            device = device_type(out)
            if device == self.device_type:
                self._see(storage, self._category(out), func)
            elif device == "cpu":
                self._see_host(storage)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._see_all(item, func)

    def _see(self, storage: torch.UntypedStorage, category: int, func: object) -> None:
        key = storage._cdata
        nbytes = rounded(storage.nbytes())
        known = self._live.get(key) or self._emptied.get(key)
        if known is not None:
            earlier = self.ledger.births[known[0]]
            if key in self._live:
                if earlier.nbytes == nbytes:
                    return
                self._forget(key)
            category = earlier.category
        if nbytes:
            self._emptied.pop(key, None)
            birth = self.ledger.born(storage.nbytes(), category, str(func))
            watcher = weakref.ref(storage, lambda _: self._forget(key))
            self._live[key] = (birth, watcher)
            self.live_bytes += nbytes

    def _forget(self, key: int) -> None:
        birth, _ = self._live.pop(key)
        if not self._watching:
            return
        self.ledger.died(birth)
        self.live_bytes -= self.ledger.births[birth].nbytes

    def _see_host(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        nbytes = storage.nbytes()
        if key in self._host or not nbytes:
            return
        self._host[key] = (nbytes, weakref.ref(storage, lambda _: self._forget_host(key)))
        self.host_bytes += nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _forget_host(self, key: int) -> None:
        self.host_bytes -= self._host.pop(key)[0]

    def _category(self, tensor: Tensor) -> int:
        is_logits = (
            tensor.dim() > 1
            and tensor.shape[-1] == self.vocab_size
            and tensor.dtype.is_floating_point
        )
        return CATEGORIES.index("logits") if is_logits else TEMPORARIES

    def _seeing_resizes(self) -> Any:
        """FSDP2 and sleep mode free memory by `storage.resize_(0)`, which is no operation."""
        meter, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            key = storage._cdata
            if key in meter._live or key in meter._emptied:
                if nbytes == 0 and key in meter._live:
                    dropped = weakref.ref(storage, lambda _: meter._emptied.pop(key, None))
                    meter._emptied[key] = (meter._live[key][0], dropped)
                meter._see(storage, TEMPORARIES, "storage.resize_")
            return result

        return resize_

    # Which temporaries turned out to be activations

    @property
    def _next_birth(self) -> int:
        return len(self.ledger.births)

    def _follow_recomputation(self) -> None:
        """Gradients are made with grad mode off; with it on, backward repeats a forward."""
        if torch.is_grad_enabled():
            if self._recomputing_since is None:
                self._recomputing_since = self._next_birth
        else:
            self._end_recomputation()

    def _end_recomputation(self) -> None:
        if self._recomputing_since is not None:
            self._call_survivors_activations(self._recomputing_since)
            self._recomputing_since = None

    def _call_survivors_activations(self, first_birth: int) -> None:
        births, activations = self.ledger.births, CATEGORIES.index("activations")
        for birth, _ in reversed(self._live.values()):
            if birth < first_birth:
                break
            if births[birth].category == TEMPORARIES:
                births[birth].category = activations

    def _label_watched(self) -> None:
        for model, optimizer in self._watched:
            self.label("parameters", model.parameters())
            self.label("parameters", model.buffers())
            self.label("gradients", (p.grad for p in model.parameters()))
            if optimizer is not None:
                for state in optimizer.state.values():
                    self.label("optimizer_state", state.values())
