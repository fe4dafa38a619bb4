"""Runs recorded on a real card, beside what was predicted for them.

One JSON line a run in the lessons' `measured/` folder: the recipe, the date and the card's reading,
and a prediction with the versions under which it was made. Tests hold today's against the readings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import memlab
from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.instruments.measurement import Measurement

FILE = "h200.jsonl"
SHORT_MS = 400.0
NOISE = 0.6  # share of the time of a step


@dataclass(frozen=True)
class Recording:
    """One run on a card. Its measurements have no timeline."""

    recipe: Recipe
    reading: Measurement
    prediction: Measurement
    date: str  # ISO

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "recipe": asdict(self.recipe),
                "date": self.date,
                "reading": json.loads(self.reading.to_json()),
                "prediction": json.loads(self.prediction.to_json()),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, line: str) -> Recording:
        """Read a line. Raises MemlabError when it is corrupt."""
        try:
            fields: dict[str, Any] = json.loads(line)
            return cls(
                Recipe.of(**fields["recipe"]),
                Measurement.from_json(json.dumps(fields["reading"])),
                Measurement.from_json(json.dumps(fields["prediction"])),
                fields["date"],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise MemlabError(
                f"corrupt recording ({error}): restore {FILE} or record it again"
            ) from None


def folder() -> Path:
    """Where recordings are: in the checkout's notebooks, or in the installed wheel."""
    package = Path(memlab.__file__).parent
    installed = package / "_lessons" / "measured"
    return installed if installed.is_dir() else package.parent / "notebooks" / "measured"


@cache
def recordings() -> tuple[Recording, ...]:
    """Every recorded run. Raises MemlabError when the file is corrupt; none without a file."""
    return tuple(load(folder() / FILE))


def load(path: Path) -> Iterator[Recording]:
    """A file's recordings, none where it is missing. MemlabError names a corrupt line."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield Recording.from_json(line)
        except MemlabError as error:
            raise MemlabError(f"{path.name}, line {number}: {error}") from None


def recorded(recipe: Recipe) -> Measurement | None:
    """The card's reading of exactly this recipe, where it was recorded.

    Raises MemlabError where the file of recordings is missing or broken.
    """
    for recording in recordings():
        if recording.recipe == recipe:
            return recording.reading
    return None


def price(before: Recipe, after: Recipe) -> str:
    """What `after` costs in time: "+8 % (NVIDIA H200, recorded)", or "—" where not recorded.

    "within noise" in place of the share where it can't be told, as `step_price` says.
    Raises MemlabError as `recorded`.
    """
    slow, fast = recorded(after), recorded(before)
    said = step_price(fast, slow) if slow and fast else None
    return f"{said} ({slow.device}, recorded)" if slow and said else "—"


def step_price(before: Measurement, after: Measurement) -> str | None:
    """Step time after / before - 1, as "+8 %"; None where it was not timed on a card.

    "within noise" where it can't be told: steps of less than `SHORT_MS` wait for Python more than
    for the card, and pairs of them that were recorded twice differed by up to `NOISE`.
    """
    if before.step_ms is None or after.step_ms is None:
        return None
    share = after.step_ms / before.step_ms - 1
    if max(before.step_ms, after.step_ms) < SHORT_MS and abs(share) < NOISE:
        return "within noise"
    return f"{share:+.0%}".replace("%", " %")
