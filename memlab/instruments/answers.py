"""What operations on fake tensors answered before, told again sooner.

A model has many equal layers and runs many times, so nearly every operation gets tensors of shapes
that it got before. `FakeTensorMode` remembers answers too, and takes some 100 microseconds to tell
one: most of a simulation. Here a question is the operation, the numbers, and what a dense tensor
is (shape, strides, type, device, offset); an answer is the same of each output, and whether it has
a storage of its own or shares an input's. Whatever is more than that is asked anew each time.

Source: torch._subclasses.fake_tensor (PyTorch 2.11 to 2.13), whose cache asks for the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout}
PLAIN |= {torch.memory_format}
DEPENDS_ON_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


class Unanswerable(Exception):
    """A question with something in it that is not looked at here."""


@dataclass(frozen=True, slots=True)
class Output:
    """A dense tensor without gradient; `shares` is the input whose storage it has, if any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    shares: int | None
    notes: dict[str, Any]  # what a fake tensor's mode notes of it

    def made(self, inputs: list[FakeTensor]) -> FakeTensor:
        """Such a tensor, made as `FakeTensor` makes itself."""
        if self.shares is None:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            storage = inputs[self.shares].untyped_storage()
            meta.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
        fake = Tensor._make_subclass(
            FakeTensor,
            meta,
            False,
            dispatch_device=True,
            device_for_backend_keys=self.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self.notes)
        return fake


class Answers:
    """Calls operations, of which it remembers what they answered."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type | None, list[Output]] | None] = {}
        self._fit: dict[Any, bool] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`."""
        fit = self._fit.get(func)
        if fit is None:
            fit = self._fit[func] = _fit(func)
        if not fit:
            return func(*args, **kwargs)
        inputs: list[FakeTensor] = []
        asked: list[Hashable] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        try:
            _ask(args, asked, inputs)
            for name, value in kwargs.items():
                asked.append(name)
                _ask((value,), asked, inputs)
        except Unanswerable:
            return func(*args, **kwargs)
        question = tuple(asked)
        try:
            known = self._known[question]
        except KeyError:
            answer = func(*args, **kwargs)
            self._known[question] = _remembered(answer, inputs) if inputs else None
            return answer
        if known is None:
            return func(*args, **kwargs)
        kind, outputs = known
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            made = [output.made(inputs) for output in outputs]
        return made[0] if kind is None else kind(made)


def _fit(func: Any) -> bool:
    """Does it write nothing, and answer by what its arguments are, not by what is in them?"""
    if func.namespace != "aten" or func._schema.is_mutable:
        return False
    return not DEPENDS_ON_VALUES & set(func.tags) and "lift" not in func.name()


def _ask(values: Any, asked: list[Hashable], inputs: list[FakeTensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                raise Unanswerable
            asked += (
                value.shape,
                value.stride(),
                value.dtype,
                value.fake_device,
                value.storage_offset(),
            )
            inputs.append(value)
        elif kind in PLAIN:
            asked += (kind, value)  # 1, 1.0 and True are equal, and no equal answers
        elif kind is list or kind is tuple:
            asked += (kind, len(value))
            _ask(value, asked, inputs)
        else:
            raise Unanswerable


def _remembered(answer: Any, inputs: list[FakeTensor]) -> tuple[type | None, list[Output]] | None:
    """The answer as kind and outputs; None where it is of another sort."""
    kind = None if type(answer) is FakeTensor else type(answer)
    if kind not in (None, tuple, list):
        return None
    tensors = [answer] if kind is None else answer
    storages = [tensor.untyped_storage()._cdata for tensor in inputs]
    outputs: list[Output] = []
    for tensor in tensors:
        output = _output(tensor, storages) if type(tensor) is FakeTensor else None
        if output is None or any(tensor is given for given in inputs):
            return None
        outputs.append(output)
    pairs = zip(tensors, outputs, strict=True)
    own = [tensor.untyped_storage()._cdata for tensor, output in pairs if output.shares is None]
    return (kind, outputs) if len(own) == len({*own}) else None


def _output(tensor: FakeTensor, storages: list[int]) -> Output | None:
    if (
        tensor.constant is not None
        or tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.dtype.is_complex
    ):
        return None
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    shares = storages.index(storage._cdata) if storage._cdata in storages else None
    shape, stride = tuple(tensor.shape), tensor.stride()
    device, notes = tensor.fake_device, dict(vars(tensor))
    output = Output(shape, stride, tensor.dtype, device, offset, shares, notes)
    dense = shares is not None or (offset == 0 and storage.nbytes() == _dense_bytes(output))
    return output if dense else None


def _dense_bytes(output: Output) -> int:
    """Of the storage that `torch.empty_strided` makes."""
    if 0 in output.shape:
        return 0
    steps = zip(output.shape, output.stride, strict=True)
    return output.dtype.itemsize * (1 + sum((size - 1) * step for size, step in steps))
