"""What the tests of Liger's kernels share: a step with some of them, metered on whatever device."""

import contextlib
import gc
from typing import Any

import torch

from memlab.instruments.device import simulated_gpu
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing, fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.techniques import chunked_loss, liger, liger_losses
from memlab.trainers import gkd, sft
from memlab.trainers.reference import frozen

ROWS, TOKENS, LAYERS = 4, 1024, 4
OFF = dict.fromkeys(("rms_norm", "rope", "swiglu"), False)
SWITCHES: dict[str, tuple[dict[str, bool] | None, bool]] = {  # kernels, the fused head
    "none": (None, False),
    "rms_norm": (OFF | {"rms_norm": True}, False),
    "rope": (OFF | {"rope": True}, False),
    "swiglu": (OFF | {"swiglu": True}, False),
    "head": (None, True),
    "all": ({}, True),
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 1000
    return {"input_ids": ids, "labels": ids}


def metered_peak(
    switches: dict[str, bool] | None, fused: bool, *, checkpointing: bool, simulated: bool
) -> int:
    """Bytes at the peak of the second of two SFT steps of a shallow Qwen3-0.6B."""
    head_loss = liger.cross_entropy if fused else chunked_loss.cross_entropy
    options = {"head_loss": head_loss}
    return _peak(sft.train, options, switches, checkpointing=checkpointing, simulated=simulated)


def metered_gkd_peak(*, simulated: bool) -> int:
    """The same of GKD by Liger's divergence, student and teacher of one shape."""
    options = {"divergence": liger_losses.jsd, "teacher": None}
    return _peak(gkd.train, options, None, checkpointing=True, simulated=simulated)


def _peak(train: Any, options: dict, switches: Any, *, checkpointing: bool, simulated: bool) -> int:
    gc.collect()
    config = load_config("Qwen/Qwen3-0.6B")
    config.num_hidden_layers = LAYERS
    model, other = (build_meta(config) for _ in range(2))
    if checkpointing:
        enable_checkpointing(model)
    with contextlib.ExitStack() as stack:
        device = torch.device("cuda")
        if simulated:
            device = stack.enter_context(simulated_gpu())
            stack.enter_context(fake_tensors_are_computed())
        meter = stack.enter_context(Meter(device.type))
        if switches is not None:
            stack.enter_context(liger.kernels(model, **switches))
        materialize(model.train(), device, init=not simulated)
        if "teacher" in options:
            options |= {"teacher": frozen(materialize(other, device, init=not simulated))}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        meter.watch(model, optimizer)
        losses = train(model, optimizer, [[batch()]] * 2, head=head_parts(model), **options)
        for _ in range(2):
            meter.begin_step()
            assert next(losses).shape == ()
    return max(sample.total for sample in meter.ledger.samples())
