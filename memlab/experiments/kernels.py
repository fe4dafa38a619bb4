"""A step with some of Liger's kernels, of which a recipe has all or none: simulated."""

from __future__ import annotations

from collections.abc import Collection

import torch

from memlab.experiments import heads
from memlab.experiments.recipe import Recipe
from memlab.experiments.simulation import measurement
from memlab.experiments.training import LEARNING_RATE, OPTIMIZERS, prepare
from memlab.instruments.device import simulated_device, simulated_gpu
from memlab.instruments.measurement import Measurement
from memlab.instruments.meter import Meter
from memlab.models.build import materialize
from memlab.models.compat import fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.techniques import liger
from memlab.trainers import sft

LAYERS = ("rms_norm", "rope", "swiglu")
PARTS = (*LAYERS, "head")


def measure_parts(recipe: Recipe, parts: Collection[str]) -> Measurement:
    """The recipe's last SFT step on the simulated GPU, with these of PARTS made by Liger.

    Without reserved bytes: no allocator is replayed. Raises ValueError for an unknown part and for
    a recipe of another trainer, of documents side by side, or with all of Liger already; what
    `liger.kernels` raises; MemlabError where this torch can't simulate.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"parts={sorted(unknown)}: unknown; give some of {', '.join(PARTS)}")
    if recipe.trainer != "sft" or recipe.flattened or recipe.use_liger_kernel:
        raise ValueError(
            f"parts of Liger with trainer={recipe.trainer!r}, flattened={recipe.flattened}, "
            f"use_liger_kernel={recipe.use_liger_kernel}: give padded rows, trainer='sft' and False"
        )
    simulated_device()  # says what is missing before anything is built
    liger.load()  # here, since an import in a simulation leaves tensors
    prepared = prepare(recipe, "gpu")
    model, switches = prepared.model, {layer: layer in parts for layer in LAYERS}
    with simulated_gpu() as device, fake_tensors_are_computed(), torch.enable_grad():
        with Meter(device.type, vocab_size=prepared.vocab_size) as meter:
            materialize(model, device, init=False)
            optimizer = OPTIMIZERS[recipe.optim](model.parameters(), lr=LEARNING_RATE)
            meter.watch(model, optimizer)
            head_loss = liger.cross_entropy if "head" in parts else heads.head_loss(recipe)
            options = {"head_loss": head_loss, "phase": meter.phase}
            with liger.kernels(model, **switches):
                losses = sft.train(
                    model, optimizer, prepared.steps, head=head_parts(model), **options
                )
                for _ in range(recipe.max_steps):
                    meter.begin_step()
                    next(losses)
    return measurement(
        meter,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        device="simulated GPU",
        simulated=True,
    )
