"""Measure a recipe on the best device there is; compare two recipes that differ in a switch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import torch

import memlab
from memlab.data.disk import cached_json
from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.instruments.amounts import unit_of
from memlab.instruments.device import simulation_missing
from memlab.instruments.measurement import CATEGORIES, Measurement

DEVICES = ("auto", "simulated", "cuda", "cpu")


def measure(
    recipe: Recipe, *, device: str = "auto", cache: bool = True, chunk: int | None = None
) -> Measurement:
    """The memory of the recipe's last step, by category and over time.

    `device`: "cuda" runs it on the card, in a child process; "simulated" predicts it for an H200
    with no card; "cpu" computes it here (tiny models only); "auto" takes the card where there is
    one, else the simulation. Simulations are kept on disk by recipe, versions and memlab's own
    source. `chunk` sets the rows a chunk of the chunked losses (None: theirs), in simulations only.

    Raises ValueError for an unknown device or model, MemlabError where the device can't be had.
    """
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: give the rows of a chunk, an int of at least 1")
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: unknown; give one of {', '.join(DEVICES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "simulated"
    if device == "simulated":
        return _simulated(recipe, cache=cache, chunk=chunk)
    if chunk is not None:
        raise ValueError(f"chunk={chunk} with device={device}: give device=simulated")
    from memlab.experiments import card

    if device == "cpu":
        return card.measure_here(recipe, "cpu")
    if not torch.cuda.is_available():
        raise MemlabError("device=cuda: torch finds no CUDA card; give device=simulated")
    return card.measure_in_child(recipe)


def _simulated(recipe: Recipe, *, cache: bool, chunk: int | None) -> Measurement:
    from memlab.experiments.simulation import simulate

    if missing := simulation_missing():
        raise MemlabError(missing)
    if not cache:
        return simulate(recipe, chunk=chunk)
    name = f"simulated-{_fingerprint(recipe, chunk)}.json"
    kept = cached_json(name, lambda: simulate(recipe, chunk=chunk).to_json())
    try:
        return Measurement.from_json(kept)
    except MemlabError:  # someone else wrote into the cache
        return simulate(recipe, chunk=chunk)


def _fingerprint(recipe: Recipe, chunk: int | None) -> str:
    from memlab.experiments.versions import versions
    from memlab.models.build import config_digest

    model = config_digest(recipe.model)
    content = json.dumps([asdict(recipe), model, chunk, versions(), _source_digest()])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


@once
def _source_digest() -> str:
    """Of the code that a simulation runs, so that an edited checkout simulates anew."""
    digest = hashlib.sha256()
    package = Path(memlab.__file__).parent
    for layer in (
        "techniques",
        "losses",
        "instruments",
        "models",
        "data",
        "trainers",
        "experiments",
    ):
        for pattern in ("*.py", "*.json"):
            for file in sorted((package / layer).glob(pattern)):
                digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Comparison:
    """Two recipes and their measurements on one device."""

    before_recipe: Recipe
    after_recipe: Recipe
    before: Measurement
    after: Measurement

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The switches that differ: name -> (before, after)."""
        return self.before_recipe.changes(self.after_recipe)

    @property
    def saved_bytes(self) -> int:
        """Peak allocated bytes, before minus after; negative where it grew."""
        return self.before.peak_allocated_bytes - self.after.peak_allocated_bytes

    @property
    def saved_share(self) -> float:
        """`saved_bytes` as a share of before's peak."""
        return self.saved_bytes / self.before.peak_allocated_bytes

    @property
    def price(self) -> float | None:
        """Step time after / before - 1; None when it was not timed on a card.

        Of short steps it is noise: `recordings.step_price(before, after)` says where.
        """
        if self.before.step_ms is None or self.after.step_ms is None:
            return None
        return self.after.step_ms / self.before.step_ms - 1

    def table(self) -> str:
        """Plain text: allocated, reserved, then each category at the peak.

        In GB (1e9 bytes), or MB (1e6 bytes) where both peaks are below 0.1 GB.
        """
        unit = unit_of(self.before.metered_peak_bytes, self.after.metered_peak_bytes)
        rows = [
            ("peak allocated", self.before.peak_allocated_bytes, self.after.peak_allocated_bytes),
            ("peak reserved", self.before.peak_reserved_bytes, self.after.peak_reserved_bytes),
        ]
        for name in CATEGORIES:
            category = self.before.by_category[name], self.after.by_category[name]
            if any(category):
                rows.append((f"  {name.replace('_', ' ')}", *category))
        lines = [f"{unit.name:<20}{'before':>9}{'after':>9}{'saved':>9}"]
        for label, before, after in rows:
            if before is not None and after is not None:
                figures = (before, after, before - after)
                lines.append(f"{label:<20}" + "".join(f"{unit.of(n):>9}" for n in figures))
        return "\n".join(lines)


def compare(
    before: Recipe, after: Recipe, *, device: str = "auto", cache: bool = True
) -> Comparison:
    """Measure both recipes on one device. Raises ValueError and MemlabError as `measure` does."""
    return Comparison(
        before,
        after,
        measure(before, device=device, cache=cache),
        measure(after, device=device, cache=cache),
    )
