"""Real twins of small integer tensors, so that data-dependent code runs on a simulated GPU.

A fake tensor has no values, yet `h[labels != -100]` needs to know how many labels are valid. Every
small integer or boolean tensor, and every scalar, therefore keeps a real copy on the host: an
operation whose inputs all have twins also runs on the twins. What is made here is invisible to a
`Meter` entered later, as the temporaries inside a CUDA operation are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from memlab.instruments.answers import Answers

INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
LARGEST = 1 << 24  # entries of a tensor that still gets a twin
VALUES = {"_local_scalar_dense", "equal"}  # answer with a Python value
SHAPES = {"nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
ADDMM_INTO = torch.ops.aten.addmm.dtype_out  # torch 2.11 has no rule for it on fake tensors
FILLS = {"zeros", "ones", "full", "scalar_tensor"}
FILLS_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}


class Twins(TorchDispatchMode):
    """Answers data-dependent operations on `device_type` from real twins."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.answers = Answers()
        self.stale: dict[int, torch.UntypedStorage] = {}  # twins overwritten by unknown values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every operation, for compiled code that is not run here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_to_copy" and self._to_card(args[0], kwargs):
            return self._copy_to_card(args[0], **kwargs)
        if func is ADDMM_INTO:
            return kwargs["out"]
        tensors = _tensors(args)
        known = name in FILLS or name == "arange" or name in FILLS_LIKE
        if not known:
            known = bool(tensors) and all(self.twin(t) is not None for t in tensors)
        if not known:
            if name in INDEXING:
                args = (args[0], self._integer_indices(args[1]), *args[2:])
            out = self.answers(func, args, kwargs)
            if func._schema.is_mutable:
                self._forget_written(func, args, kwargs)
            return out
        if not self._worth_running(name, args, kwargs):
            return func(*args, **kwargs)
        with _disable_current_modes():
            real = func(*tree_map(self._host, args), **tree_map(self._host, kwargs))
        if name in VALUES:
            return real
        if name in SHAPES:
            device = tensors[0].device
            return tree_map(lambda r: self.give(r, device) if isinstance(r, Tensor) else r, real)
        if name in INDEXING:
            args = (args[0], self._integer_indices(args[1]), *args[2:])
        out = self.answers(func, args, kwargs)
        for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake, FakeTensor) and _small(value):
                fake._memlab_twin = value  # type: ignore[attr-defined]
        return out

    def give(self, values: Tensor, device: torch.device) -> Tensor:
        """A simulated tensor on `device` whose values are known."""
        fake = torch.empty(values.shape, dtype=values.dtype, device=device)
        if _small(values):
            fake._memlab_twin = values  # type: ignore[attr-defined]
        return fake

    def twin(self, tensor: Tensor) -> Tensor | None:
        """The real values of `tensor` where they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" and _small(tensor) else None
        twin = getattr(tensor, "_memlab_twin", None)
        if twin is None:
            return getattr(tensor, "constant", None)
        return None if self.stale and twin.untyped_storage()._cdata in self.stale else twin

    def _to_card(self, source: Tensor, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and device.type == self.device_type != source.device.type

    def _copy_to_card(
        self,
        source: Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        **_: Any,
    ) -> Tensor:
        values = self.twin(source)
        dtype = dtype or source.dtype
        layout = memory_format or torch.preserve_format  # dense: gaps and repeats stay behind
        like = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
        card = torch.empty_like(like, device=device, memory_format=layout)
        if values is not None and (dtype in INTEGERS or values.numel() <= 1):
            with _disable_current_modes():
                card._memlab_twin = values.to(dtype, copy=True)  # type: ignore[attr-defined]
        return card

    def _worth_running(self, name: str, args: Any, kwargs: Any) -> bool:
        """Constants are only worth a twin where they are small integers, or scalars."""
        if name in FILLS_LIKE:
            if name.startswith("new_"):
                shape, dtype = args[1], kwargs.get("dtype") or args[0].dtype
            else:
                shape, dtype = args[0].shape, kwargs.get("dtype") or args[0].dtype
        elif name in FILLS and args and isinstance(args[0], (list, tuple, torch.Size)):
            shape, dtype = args[0], kwargs.get("dtype") or torch.get_default_dtype()
        else:
            return True
        entries = 1
        for size in shape:
            entries *= size
        return entries <= 1 or (dtype in INTEGERS and entries <= LARGEST)

    def _host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            twin = self.twin(value)
            # the template of zeros_like has a shape and a type to offer, but no values
            return torch.empty(value.shape, dtype=value.dtype) if twin is None else twin
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _integer_indices(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Boolean indices as integer ones, as the CUDA operation does inside."""
        integer: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                integer.append(index)
                continue
            twin = self.twin(index)
            if twin is None:
                raise NotImplementedError(
                    "a boolean index whose values are not known on the simulated GPU: derive it "
                    f"from integer tensors of at most {LARGEST} entries"
                )
            with _disable_current_modes():
                columns = twin.nonzero().unbind(1)
            integer += [self.give(column, index.device) for column in columns]
        return integer

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """An unknown value was written into a tensor: its twin no longer tells the truth."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for written in tree_leaves(value):
                twin = getattr(written, "_memlab_twin", None)
                if twin is not None:
                    storage = twin.untyped_storage()
                    self.stale[storage._cdata] = storage


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments, lists of them included."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _small(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.numel() <= 1 or (value.dtype in INTEGERS and value.numel() <= LARGEST)
