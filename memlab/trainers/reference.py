"""The reference model that preference methods hold on to: a frozen copy, or the adapter off."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from memlab.models.head import HeadParts, head_parts


def frozen(model: torch.nn.Module) -> HeadParts:
    """The parts of a model that is to be a reference only: no gradient, no dropout from now on."""
    return head_parts(model.requires_grad_(False).eval())


def frozen_copy(model: torch.nn.Module) -> HeadParts:
    """The model as it is now, copied and frozen: the memory of every parameter once more.

    A model trained through a peft adapter needs none, it is its own reference with the adapter off
    (`reference=None`). On a simulated GPU build a second model, and freeze that.
    """
    return frozen(copy.deepcopy(model))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No gradient and no dropout inside; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def referring(
    model: torch.nn.Module, head: HeadParts, reference: HeadParts | None
) -> Iterator[HeadParts]:
    """The parts of the reference model, to be used inside: nothing there keeps a gradient.

    With `reference` None it is `model`, of parts `head`, with its peft adapter off. Raises
    ValueError when it has none, or when `reference` is the trained model itself.
    """
    check(model, head, reference)
    if reference is not None:
        with evaluating(reference.backbone):
            yield reference
    else:
        adapted: Any = model
        with evaluating(model), adapted.disable_adapter():
            yield head


def check(model: torch.nn.Module, head: HeadParts, reference: HeadParts | None) -> None:
    """Raise the errors of `referring`, ValueErrors, before a step has run."""
    if reference is None and not hasattr(model, "disable_adapter"):
        raise ValueError(
            f"reference=None: {type(model).__name__} has no peft adapter to switch off; give "
            "frozen_copy(model), made before training"
        )
    if reference is not None and reference.backbone is head.backbone:
        raise ValueError("reference: the trained model itself; give frozen_copy(model)")
