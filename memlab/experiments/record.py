"""Record runs on a CUDA card, beside their predictions; `recordings` reads them back.

    python -m memlab.experiments.record             # on a card: what the lessons' file lacks
    python -m memlab.experiments.record --predict   # anywhere: the file's predictions made anew

Predictions are made meanwhile in processes of their own, without the card.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from memlab.experiments.card import measure_in_child
from memlab.experiments.measuring import measure
from memlab.experiments.recipe import Recipe
from memlab.experiments.recordings import FILE, Recording, folder, load
from memlab.experiments.rules import ONLINE
from memlab.instruments.measurement import Measurement

TORCHTUNE = Recipe.off(  # the setting of its README's table of optimizations
    model="meta-llama/Llama-3.2-3B",
    dataset="docstrings",
    per_device_train_batch_size=2,
    max_length=4096,
)


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
    for rows, micro_batches in ((1, 4), (2, 2)):
        split = {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": micro_batches,
        }
        yield from (Recipe.off(**split), Recipe.defaults(**split))
    for switch in (
        {"dataset": "chat"},
        {"loss_type": "dft"},
        {"dtype": "float32"},
        {"optim": "adamw_torch"},
        {"optim": "sgd"},
    ):
        yield Recipe.of(**switch)
    yield from _sequences()
    yield from _trainers()


def _sequences() -> Iterator[Recipe]:
    """Truncated, padded, padding-free and packed rows of unequal lengths."""
    docstrings = {"dataset": "docstrings"}
    big = {"model": "Qwen/Qwen3-1.7B", **docstrings}
    many = {**big, "max_length": 2048, "per_device_train_batch_size": 16}
    for padding_free in (False, True):
        for expandable in (False, True):
            yield Recipe.off(**many, padding_free=padding_free, expandable_segments=expandable)
        yield Recipe.defaults(**many, padding_free=padding_free)
        yield Recipe.off(  # lets the card's speed decide, not the launches
            **big,
            max_length=512,
            per_device_train_batch_size=96,
            padding_free=padding_free,
            gradient_checkpointing=True,
        )
    for base in (Recipe.off, Recipe.defaults):
        for max_length in (8192, 1024):
            yield base(dataset="chat_like", max_length=max_length)
        for padding_free in (False, True):
            yield base(**docstrings, per_device_train_batch_size=8, padding_free=padding_free)
        for packing in (False, True):
            yield base(**docstrings, packing=packing)
        yield base(per_device_train_batch_size=1, max_length=512, pad_to_multiple_of=2048)
    yield Recipe.off(**docstrings, packing=True, packing_strategy="wrapped")
    yield Recipe.off(**docstrings, per_device_train_batch_size=24)
    for packing in (False, True):
        yield TORCHTUNE.replace(packing=packing)


def _trainers() -> Iterator[Recipe]:
    """A step of each trainer but SFT, and with Liger."""
    big = {"model": "Qwen/Qwen3-1.7B"}
    for trainer in ("dpo", "reward", "kto", "gkd"):
        yield Recipe.defaults(**big, trainer=trainer)
    for trainer in ONLINE:
        yield Recipe.defaults(**big, trainer=trainer, max_completion_length=48)
    yield Recipe.off(**big, trainer="dpo")
    for on in (False, True):  # large enough for the card's speed to decide, not the launches
        yield Recipe.off(
            **big,
            per_device_train_batch_size=8,
            max_length=2048,
            gradient_checkpointing=True,
            use_liger_kernel=on,
        )
    yield Recipe.off(use_liger_kernel=True)
    yield Recipe.defaults(use_liger_kernel=True, loss_type="nll")


def predicted(recipe: Recipe) -> Measurement:
    """The simulation of the recipe, without its timeline."""
    return replace(measure(recipe, device="simulated"), timeline=())


def record(recipes: Iterable[Recipe], path: Path) -> None:
    """Run each recipe that the file does not hold yet on the card, and add its line."""
    done = {recording.recipe for recording in load(path)}
    missing = [recipe for recipe in recipes if recipe not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        for recipe, prediction in zip(missing, pool.map(predicted, missing), strict=True):
            reading = replace(measure_in_child(recipe), timeline=())
            today = datetime.date.today().isoformat()
            with path.open("a", encoding="utf-8") as file:
                file.write(Recording(recipe, reading, prediction, today).to_json() + "\n")
            print(summary(recipe, reading, prediction), flush=True)


def predict_again(path: Path) -> None:
    """Replace each recording's prediction by one made now: the model of the card has changed."""
    again = [replace(line, prediction=predicted(line.recipe)) for line in load(path)]
    path.write_text("".join(line.to_json() + "\n" for line in again), encoding="utf-8")
    for line in again:
        print(summary(line.recipe, line.reading, line.prediction))


def summary(recipe: Recipe, reading: Measurement, prediction: Measurement) -> str:
    """One line: the switches that are not off, and how far the prediction is from the reading."""
    on = Recipe.off(model=recipe.model).changes(recipe)
    switches = " ".join(f"{name}={value}" for name, (_, value) in on.items())
    metered = prediction.metered_peak_bytes - reading.metered_peak_bytes
    allocated = prediction.peak_allocated_bytes / reading.peak_allocated_bytes - 1
    reserved = (prediction.peak_reserved_bytes or 0) / (reading.peak_reserved_bytes or 1) - 1
    return (
        f"{recipe.model} {switches}: metered {metered:+d} B, allocated {allocated:+.3%}, "
        f"reserved {reserved:+.3%}, {reading.step_ms:.0f} ms"
    )


if __name__ == "__main__":
    file = folder() / FILE
    if sys.argv[1:] == ["--predict"]:
        predict_again(file)
    else:
        record(to_record(), file)
