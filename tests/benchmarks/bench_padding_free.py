"""Forward and backward of the same docstrings, padded and padding-free, on a card.

    python tests/benchmarks/bench_padding_free.py

Padding-free may take at most 1.03 times the padded step's time times useful / padded slots, and
its activations at most 1.03 times its bytes times that share. `--padded-rows` cuts the padded side
into micro-batches, where all its rows don't fit at once. One run measures all sides, in turns;
flash-attn is a side of its own where it is installed. `--control` adds the padded batch with random
words and labels in place of its padding: as many slots, but none whose gradient is zero. Zeros cost
a card less power, so that it multiplies them faster at its power limit. Prints a table, then one
JSON line, as notebooks/measured/benchmarks.jsonl keeps them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
from typing import Any

import torch

from memlab.experiments import Recipe
from memlab.experiments.heads import HEAD_LOSSES
from memlab.experiments.training import Prepared, prepare
from memlab.experiments.versions import versions
from memlab.models.build import materialize
from memlab.models.head import head_parts
from memlab.techniques import padding_free
from memlab.trainers import sft

MODEL = "Qwen/Qwen3-1.7B"
WARM_UP = 2  # repeats that don't count
CONTROL = "padded, all labelled"


def sides(recipe: Recipe, padded_rows: int, multiple: int | None = None) -> dict[str, Recipe]:
    """What is measured: name -> recipe."""
    micro_batches, left = divmod(recipe.per_device_train_batch_size, padded_rows)
    assert not left, "--padded-rows must divide --rows"
    padded = recipe.replace(
        per_device_train_batch_size=padded_rows, gradient_accumulation_steps=micro_batches
    )
    flat = recipe.replace(padding_free=True, pad_to_multiple_of=multiple)
    found = {"padded": padded, "padding-free": flat}
    if importlib.util.find_spec("flash_attn") is not None:
        found["padding-free, flash-attn"] = flat.replace(attn_implementation="flash_attention_2")
    return found


def fill(prepared: Prepared) -> None:
    """Put random words and labels in place of padding."""
    for batch in (batch for step in prepared.steps for batch in step):
        padding = batch["attention_mask"] == 0
        words = torch.randint(prepared.vocab_size, padding.shape)
        for column in ("input_ids", "labels"):
            batch[column] = torch.where(padding, words, batch[column])


class Side:
    """One way to run the batch, on a model that all share."""

    def __init__(self, recipe: Recipe, prepared: Prepared, model: torch.nn.Module) -> None:
        self.recipe, self.head = recipe, head_parts(model)
        self.model: Any = model
        (self.batches,) = prepared.steps
        self.slots = sum(int(batch["labels"].numel()) for batch in self.batches)
        self.attention = prepared.model.config._attn_implementation
        self.inputs = padding_free.model_inputs if recipe.flattened else sft.padded_inputs
        self.times: list[float] = []

    def forward_backward(self) -> torch.Tensor:
        """One forward and backward of each batch; the loss of all."""
        device = torch.device("cuda")
        total = torch.zeros((), device=device)
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in self.batches)
        for batch in self.batches:
            hidden = self.head.backbone(**self.inputs(batch, device), use_cache=False)[0]
            targets = sft.shifted(batch["labels"].to(device))
            loss = HEAD_LOSSES[self.recipe.loss_type](
                hidden.flatten(0, 1), self.head.head.weight, targets, num_items_in_batch=items
            )
            del hidden
            loss.backward()
            total += loss.detach()
        return total

    def time(self) -> None:
        """Append the milliseconds of one forward and backward."""
        self.model.set_attn_implementation(self.attention)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        self.forward_backward()
        end.record()
        torch.cuda.synchronize()
        self.times.append(start.elapsed_time(end))
        self.model.zero_grad()


def main() -> None:
    """Measure, print, and give the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--padded-rows", type=int, help="rows of a padded micro-batch")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--pad-to-multiple-of", type=int, help="of the padding-free row")
    parser.add_argument("--loss", default="nll", choices=tuple(HEAD_LOSSES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--control", action="store_true", help="no zeros in place of padding")
    options = parser.parse_args()
    recipe = Recipe.off(
        model=MODEL,
        dataset="docstrings",
        per_device_train_batch_size=options.rows,
        max_length=options.max_length,
        max_steps=1,
        loss_type=options.loss,
        gradient_checkpointing=True,
        seed=options.seed,
    )
    made = {
        name: (side, prepare(side, "cuda"))
        for name, side in sides(
            recipe, options.padded_rows or options.rows, options.pad_to_multiple_of
        ).items()
    }
    if options.control:
        made[CONTROL] = (made["padded"][0], prepare(made["padded"][0], "cuda"))
        fill(made[CONTROL][1])
    model = materialize(made["padded"][1].model, "cuda", init=True, seed=0)
    runs = {name: Side(side, prepared, model) for name, (side, prepared) in made.items()}
    losses = {}
    for name, run in runs.items():
        model.set_attn_implementation(run.attention)
        losses[name] = float(run.forward_backward())
        model.zero_grad()
    for _ in range(options.repeats + WARM_UP):
        for run in runs.values():
            run.time()
    padded = statistics.median(runs["padded"].times[WARM_UP:])
    slots = runs["padded"].slots
    useful = sum(int(batch["attention_mask"].sum()) for batch in runs["padded"].batches)
    print(f"{MODEL}, {options.rows} docstrings, {useful} tokens in {slots} padded slots")
    print(f"{'':<26}{'ms':>8}{'of padded x share':>19}{'loss':>9}")
    table = {}
    for name, run in runs.items():
        ms = statistics.median(run.times[WARM_UP:])
        ratio = ms / (padded * useful / slots)
        table[name] = {"ms": round(ms, 3), "ratio": round(ratio, 4), "loss": losses[name]}
        print(f"{name:<26}{ms:>8.1f}{ratio:>19.3f}{losses[name]:>9.4f}")
    result = {
        "benchmark": "padding_free",
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "model": MODEL,
        "rows": options.rows,
        "padded_rows": options.padded_rows or options.rows,
        "max_length": options.max_length,
        "pad_to_multiple_of": options.pad_to_multiple_of,
        "gradient_checkpointing": recipe.gradient_checkpointing,
        "loss_type": options.loss,
        "useful_tokens": useful,
        "padded_slots": slots,
        "sides": table,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
