"""Runs recorded on a real card, beside what was predicted for them.

    python -m memlab.experiments.recordings            # on a CUDA card: run what is missing, write
    the file

One JSON line a run in the lessons' `measured/` folder: the recipe, the date, the card's reading
and the prediction made on that machine. Tests hold today's predictions against them.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import memlab
from memlab.errors import MemlabError
from memlab.experiments.recipe import Recipe
from memlab.instruments.measurement import Measurement

FILE = "h200.jsonl"


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
    """The card's reading of exactly this recipe, where it was recorded."""
    for recording in recordings():
        if recording.recipe == recipe:
            return recording.reading
    return None


def price(before: Recipe, after: Recipe) -> str:
    """What `after` costs in time: "+8 % (NVIDIA H200, recorded)", or "—" where not recorded."""
    slow, fast = recorded(after), recorded(before)
    if slow is None or fast is None or slow.step_ms is None or fast.step_ms is None:
        return "—"
    return f"{slow.step_ms / fast.step_ms - 1:+.0%} ({slow.device}, recorded)".replace("%", " %")


def to_record() -> Iterator[Recipe]:
    """The runs that the tests and the lessons refer to."""
    shapes = [
        {"model": "Qwen/Qwen3-0.6B"},
        {"model": "Qwen/Qwen3-0.6B", "per_device_train_batch_size": 1, "max_length": 512},
        {"model": "Qwen/Qwen3-1.7B", "per_device_train_batch_size": 2, "max_length": 2048},
        {"model": "meta-llama/Llama-3.2-1B"},
    ]
    for shape in shapes:
        for loss_type in ("nll", "chunked_nll"):
            for checkpointing in (False, True):
                for expandable in (False, True):
                    yield Recipe.of(
                        **shape,
                        loss_type=loss_type,
                        gradient_checkpointing=checkpointing,
                        expandable_segments=expandable,
                    )
    row_by_row = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for recipe in (Recipe.off(), Recipe.defaults()):
        yield recipe.replace(**row_by_row)
    for switch in (
        {"dataset": "chat"},
        {"loss_type": "dft"},
        {"dtype": "float32"},
        {"optim": "adamw_torch"},
        {"optim": "sgd"},
    ):
        yield Recipe.of(**switch)


def record(recipes: Iterable[Recipe], path: Path) -> None:
    """Run each recipe that the file does not hold yet on the card, and add its line."""
    from memlab.experiments.card import measure_in_child
    from memlab.experiments.measuring import measure

    done = {recording.recipe for recording in load(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        if recipe in done:
            continue
        today = datetime.date.today().isoformat()
        reading = replace(measure_in_child(recipe), timeline=())
        prediction = replace(measure(recipe, device="simulated"), timeline=())
        recording = Recording(recipe, reading, prediction, today)
        with path.open("a", encoding="utf-8") as file:
            file.write(recording.to_json() + "\n")
        print(
            recipe.model,
            *(f"{new}" for _, new in Recipe.off(model=recipe.model).changes(recipe).values()),
            f"metered {prediction.metered_peak_bytes - reading.metered_peak_bytes:+d} B,",
            f"allocated {prediction.peak_allocated_bytes / reading.peak_allocated_bytes - 1:+.3%},",
            f"reserved {_share(prediction.peak_reserved_bytes, reading.peak_reserved_bytes):+.3%},",
            f"{reading.step_ms:.0f} ms",
            flush=True,
        )


def _share(predicted: int | None, read: int | None) -> float:
    return (predicted or 0) / (read or 1) - 1


if __name__ == "__main__":
    record(to_record(), Path(sys.argv[1]) if len(sys.argv) > 1 else folder() / FILE)
