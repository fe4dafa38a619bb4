"""Liger for a lesson: a comparison where it is missing too, and the bytes that one layer keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.experiments import Comparison, Recipe, compare, measure
from memlab.experiments.kernels import LAYERS
from memlab.experiments.versions import versions
from memlab.instruments.device import simulated_gpu
from memlab.instruments.measurement import Measurement
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing, fake_tensors_are_computed
from memlab.techniques import liger

ALL = "rms_norm+rope+swiglu+head"
Shipped = Callable[[Mapping[str, Any]], Mapping[str, int]]  # a setting -> bytes by category


def liger_missing() -> str:
    """Why Liger's kernels can't be measured here, in one line; "" where they can."""
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"No {' and no '.join(missing)} here (both are for Linux only): what Liger's side shows "
        "was simulated where they are, and came with the lesson."
    )


def compare_with_liger(
    before: Recipe, after: Recipe, *, device: str, shipped: Shipped
) -> Comparison:
    """`memlab.compare`; without liger-kernel or triton, `after` is looked up in a lesson's grid.

    `shipped(setting)` gives the bytes by category of gradient_checkpointing, max_length and
    kernels. A line is printed then. Raises MemlabError where the grid has no such recipe, and what
    `compare` raises.
    """
    missing = liger_missing()
    if not missing:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # liger-kernel imports it
        return compare(before, after, device=device)
    print(missing)
    return Comparison(
        before, after, measure(before, device="simulated"), _looked_up(after, shipped)
    )


def _looked_up(recipe: Recipe, shipped: Shipped) -> Measurement:
    """The shipped peak as a measurement without a timeline."""
    sizes = {
        "max_length": recipe.max_length,
        "gradient_checkpointing": recipe.gradient_checkpointing,
    }
    try:
        if recipe != Recipe.off(use_liger_kernel=True, **sizes):
            raise KeyError(recipe)
        peaks = dict(shipped({**sizes, "kernels": ALL}))
    except KeyError:
        usual = Recipe.off()
        raise MemlabError(
            f"{liger_missing()} It came with {usual.model}, "
            f"{usual.per_device_train_batch_size} rows and {usual.max_steps} steps: give those, or "
            "install liger-kernel and triton"
        ) from None
    total = sum(peaks.values())
    return Measurement(
        metered_peak_bytes=total,
        peak_allocated_bytes=total,
        peak_reserved_bytes=None,
        by_category=peaks,
        by_op={},
        timeline=(),
        host_peak_bytes=0,
        step_ms=None,
        device="simulated GPU, shipped with the lesson",
        simulated=True,
        versions=versions(),
    )


def kept_by_a_layer(
    model: str, kernels: Collection[str] = (), *, checkpointing: bool = False
) -> int:
    """Bytes a token that one decoder layer leaves for backward, on the simulated GPU.

    `kernels` are those of Liger that it runs by: "rms_norm", "rope", "swiglu". Raises ValueError
    for an unknown model, MemlabError where this torch can't simulate; what `liger.kernels` raises.
    """
    tokens = 512
    one, two = (_kept(model, n, kernels, checkpointing, tokens) for n in (1, 2))
    return round((two - one) / tokens)


def _kept(name: str, layers: int, kernels: Collection[str], checkpointing: bool, n: int) -> int:
    """Bytes alive after a forward pass of n tokens through so many layers, beyond parameters."""
    config = load_config(name)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = build_meta(config, dtype=torch.bfloat16).train()
    if checkpointing:
        enable_checkpointing(model)
    switches = {layer: layer in kernels for layer in LAYERS}
    if kernels:
        liger.load()  # here, since an import in a simulation leaves tensors
    with ExitStack() as stack:
        device = stack.enter_context(simulated_gpu())
        stack.enter_context(fake_tensors_are_computed())
        meter = stack.enter_context(Meter(device.type))
        if kernels:
            stack.enter_context(liger.kernels(model, **switches))
        materialize(model, device)
        ids = torch.zeros(1, n, dtype=torch.int64, device=device)
        before = meter.live_bytes
        kept = model.model(input_ids=ids, use_cache=False)
        after = meter.live_bytes
        del kept
    return after - before
