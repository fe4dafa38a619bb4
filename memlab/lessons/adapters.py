"""Bytes that a reference adds, a frozen copy or an adapter switched off; a small adapted model."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from memlab.instruments.device import simulated_gpu
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.head import head_parts
from memlab.trainers import reference


def adapted(model: nn.Module, **config: Any) -> Any:
    """The model with a LoRA adapter of peft's on its linear layers; the model's own are frozen."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that is to go
        return get_peft_model(model, LoraConfig(target_modules="all-linear", **config))  # type: ignore[arg-type]


def small_adapted() -> tuple[nn.Module, Any]:
    """memlab/tiny in fp32, and the same weights with an adapter that changes what it says."""
    config = load_config("memlab/tiny")
    plain, base = (
        materialize(build_meta(config, dtype=torch.float32), "cpu", init=True) for _ in range(2)
    )
    torch.manual_seed(0)  # the adapter's weights
    return plain.eval(), adapted(base, init_lora_weights=False, lora_dropout=0.5).train()


def reference_bytes(model: str, *, dtype: str = "bfloat16", lora: bool = False) -> int:
    """Bytes that a trainer's reference adds to the model that is trained, on the simulated GPU.

    A second model, frozen; or with `lora` the model itself with its adapter off. Raises ValueError
    for an unknown model, MemlabError where this torch can't simulate.
    """
    config, kind = load_config(model), getattr(torch, dtype)
    trained = build_meta(config, dtype=kind)
    if lora:
        trained = adapted(trained)
    second = None if lora else build_meta(config, dtype=kind)
    with simulated_gpu() as device, Meter(device.type) as meter:
        materialize(trained, device)
        meter.watch(trained)
        before, frozen = meter.live_bytes, None
        if second is not None:
            frozen = reference.frozen(materialize(second, device))
            meter.watch(second)
        with reference.referring(trained, head_parts(trained), frozen):
            return meter.live_bytes - before
