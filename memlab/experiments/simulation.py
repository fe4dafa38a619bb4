"""Measure a recipe without a card: its steps on the simulated GPU, replayed in an allocator."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch

from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.experiments.training import prepare, train
from memlab.experiments.versions import versions
from memlab.instruments import replaying
from memlab.instruments.allocator import CachingAllocator
from memlab.instruments.device import simulated_device, simulated_gpu
from memlab.instruments.ledger import Ledger
from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.instruments.meter import Meter
from memlab.models.build import config_digest
from memlab.models.compat import fake_tensors_are_computed


def simulate(recipe: Recipe, *, chunk: int | None = None) -> Measurement:
    """The last of the recipe's steps on an H200: metered bytes exact, the allocator's predicted.

    Raises ValueError for an unknown model, MemlabError inside torch.inference_mode().
    """
    run = recipe.replace(expandable_segments=False)  # both settings replay one run
    meter = _kept_run(run, chunk, config_digest(recipe.model))
    allocator = replay(meter.ledger, expandable_segments=recipe.expandable_segments)
    return measurement(
        meter,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        device="simulated GPU",
        simulated=True,
    )


@lru_cache(maxsize=1)
def _kept_run(recipe: Recipe, chunk: int | None, model: str) -> Meter:
    return simulated_run(recipe, chunk=chunk)


def simulated_run(recipe: Recipe, *, chunk: int | None = None) -> Meter:
    """The meter after all steps of the recipe on the simulated GPU, its last step marked.

    Raises MemlabError where no GPU can be simulated, or inside torch.inference_mode().
    """
    simulated_device()  # says what is missing before anything is built
    if torch.is_inference_mode_enabled():
        raise MemlabError("a training step can't run inside torch.inference_mode(): leave it first")
    host = torch.device("cpu")  # as a context, it is asked before each operation
    usual = nullcontext() if torch.get_default_device() == host else host
    with torch.enable_grad(), usual:  # whatever the caller has set
        return _simulated_run(recipe, chunk)


def _simulated_run(recipe: Recipe, chunk: int | None) -> Meter:
    prepared = prepare(recipe, "gpu")
    with simulated_gpu() as device, fake_tensors_are_computed():
        meter = Meter(device.type, vocab_size=prepared.vocab_size)
        with meter:
            losses = train(prepared, device, meter, init=False, chunk=chunk)
            for _ in range(recipe.max_steps):
                meter.begin_step()
                next(losses)
        return meter


def replay(ledger: Ledger, *, expandable_segments: bool) -> CachingAllocator:
    """The caching allocator after the ledger's events; its peaks are those of the last step."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    replaying.replay(allocator, *ledger.flow(to_event=ledger.step_start))
    allocator.reset_peaks()
    replaying.replay(allocator, *ledger.flow(from_event=ledger.step_start))
    return allocator


def measurement(
    meter: Meter,
    *,
    peak_allocated_bytes: int | None,
    peak_reserved_bytes: int | None,
    device: str,
    simulated: bool,
) -> Measurement:
    """What the meter counted in its last step, beside the caching allocator's peaks, if any."""
    timeline = meter.ledger.thinned()
    peak = max(timeline, key=lambda sample: sample.total)
    return Measurement(
        metered_peak_bytes=peak.total,
        peak_allocated_bytes=peak.total if peak_allocated_bytes is None else peak_allocated_bytes,
        peak_reserved_bytes=peak_reserved_bytes,
        by_category=dict(zip(CATEGORIES, peak.bytes, strict=True)),
        by_op=meter.ledger.alive_at(peak.event),
        timeline=timeline,
        host_peak_bytes=meter.host_peak_bytes,
        step_ms=None,
        device=device,
        simulated=simulated,
        versions=versions(),
    )
