"""Measure a recipe on a real device: a CUDA card, in a child process, or the CPU, in this one.

A child starts clean: no earlier tensor is alive, the allocator's setting is read at its start, and
an out-of-memory error leaves nothing pinned. Its two parts: the steps under the meter, whose peaks
are read, and further steps without it, which are timed. Children are forks of a process that has
imported all they need, and never touched the card.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from memlab.errors import MemlabError
from memlab.experiments.forks import Server, serve
from memlab.experiments.recipe import Recipe
from memlab.experiments.simulation import measurement
from memlab.experiments.training import prepare, train
from memlab.instruments.measurement import Measurement
from memlab.instruments.meter import Meter

TIMED_STEPS = 5
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


_children = Server([sys.executable, "-m", __name__])


def measure_in_child(recipe: Recipe) -> Measurement:
    """Run the recipe on the CUDA card in a fresh process.

    Raises MemlabError with the error's first line when it fails, its memory running out included.
    """
    setting = f"expandable_segments:{recipe.expandable_segments}"
    env = {**os.environ, **dict.fromkeys(ALLOCATOR_VARIABLES, setting)}
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # no import may start CUDA: a fork couldn't use it
    try:
        return Measurement.from_json(_children.ask(json.dumps(asdict(recipe)), env))
    except MemlabError as error:
        raise MemlabError(f"the run on the card failed: {error}") from None


def measure_here(recipe: Recipe, device_type: str) -> Measurement:
    """Run the recipe here, on "cuda" or "cpu": the metered steps, then (cuda) a few timed ones."""
    on_card = device_type == "cuda"
    device = torch.device(device_type)
    timed = TIMED_STEPS if on_card else 0
    prepared = prepare(recipe, device_type, extra_steps=timed)
    meter = Meter(device_type, vocab_size=prepared.vocab_size)
    gc.collect()  # a model of an earlier run in a reference cycle would still count
    with meter:
        losses = train(prepared, device, meter, init=True)
        for _ in range(recipe.max_steps):
            meter.begin_step()
            if on_card:
                torch.cuda.reset_peak_memory_stats()
            next(losses)
    peaks: tuple[int | None, int | None] = (None, None)
    if on_card:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    result = measurement(
        meter,
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        device=torch.cuda.get_device_name() if on_card else "cpu",
        simulated=False,
    )
    return replace(result, step_ms=_milliseconds(losses, timed)) if on_card else result


def _milliseconds(losses: Iterator[object], steps: int) -> float:
    """Median time of further steps, without the meter."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        next(losses)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _answer(request: str) -> str:
    return measure_here(Recipe.of(**json.loads(request)), "cuda").to_json()


if __name__ == "__main__":
    serve(_answer)
