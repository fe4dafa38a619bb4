"""What the losses over whole sequences share: masked sums, divisors of the step, checked input."""

import functools
import math
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor

_COUNTED = "at least 0, those of the whole step, 0 where it has none (or None: these)"


def sequence_logps(logps: Tensor, mask: Tensor) -> Tensor:
    """log p(y | x) of each sequence: the sum of its tokens' log-probabilities where `mask` says so.

    logps (B, T), mask (B, T) of bools or of ints 0 and 1 -> (B,), at least fp32. What stands
    outside the mask counts nothing, and gets a zero gradient, even where it is infinite or NaN.
    Raises ValueError for other shapes or no row at all, TypeError for other dtypes.
    """
    (logps,) = floats("(B, T)", logps=logps)
    return torch.where(integers("mask", mask, logps).bool(), logps, 0.0).sum(1)


def floats(shape: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype of at least fp32, all of one `shape`, written as "(B,)" or "(B, T)".

    Raises TypeError for one that does not hold floats, ValueError for other shapes or no row.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a tensor of floats, not {_kind(tensor)}")
    names, shapes = " and ".join(tensors), [tuple(tensor.shape) for tensor in tensors.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != len(shape.split(", ")):
        found = ", ".join(map(str, shapes))
        raise ValueError(f"{names} must have the shape {shape}, all the same, not {found}")
    if shapes[0][0] == 0:
        raise ValueError(f"{names} hold no row: give at least one")
    dtypes = (tensor.dtype for tensor in tensors.values())
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return [tensor.to(wide) for tensor in tensors.values()]


def integers(name: str, tensor: Tensor, like: Tensor, only: torch.dtype | None = None) -> Tensor:
    """`tensor`, of bools or ints (or `only` of one dtype) and of the shape of `like`.

    Raises TypeError for other dtypes, ValueError for other shapes.
    """
    fits = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    if not fits or only not in (None, tensor.dtype):
        raise TypeError(
            f"{name} must be a tensor of {only or 'bools or ints'}, not {_kind(tensor)}"
        )
    if tensor.shape != like.shape:
        shapes = f"{tuple(like.shape)}, not {tuple(tensor.shape)}"
        raise ValueError(f"{name} must have the shape {shapes}")
    return tensor


def divided(
    total: Tensor,
    num_items: int | Tensor | None,
    here: int | Tensor,
    name: str = "num_items",
) -> Tensor:
    """`total` / the items of the whole step (None: those `here`); without any item 0, not 0 / 0.

    Raises TypeError for a `num_items` that is no number, ValueError for one below 0, and for 0
    where there are items here. A tensor's value is not looked at: that would wait for its device.
    """
    items = here if num_items is None else num_items
    if isinstance(items, Tensor):
        return total / items.clamp(min=1)
    number(name, items, lambda n: n > 0 or (n == 0 and not here), _COUNTED)
    return total / max(items, 1)


def number(name: str, value: object, allowed: Callable[[float], bool], wanted: str) -> None:
    """Raise TypeError unless `value` is a number, ValueError unless a finite and `allowed` one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number {wanted}, not {value!r}")
    if not math.isfinite(value) or not allowed(float(value)):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def whole(name: str, value: object, least: int, why: str = "") -> None:
    """Raise TypeError unless `value` is a number, ValueError unless an integer of `least` or more.

    2.0 is none: a size or a count that is handed on must be an int. `why` ends the message.
    """
    wanted = f"a whole number of at least {least}{why}"
    number(name, value, lambda n: n >= least, wanted)
    if not isinstance(value, Integral):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _kind(found: object) -> object:
    return found.dtype if isinstance(found, Tensor) else type(found).__name__
