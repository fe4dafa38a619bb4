"""From a recipe of any trainer to the steps that its `train` takes: rows cut, drawn, collated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from memlab.data import lengths
from memlab.data.preferences import (
    binary_rows,
    full_prompted_rows,
    preference_rows,
    prompt_rows,
    prompted_rows,
    scored_rows,
)
from memlab.data.rows import IGNORE
from memlab.experiments.batching import Row, collation, drawn, micro_batches, split
from memlab.experiments.recipe import Recipe
from memlab.experiments.rules import IN_PAIRS, ONLINE, own
from memlab.techniques import truncation
from memlab.techniques.pad_to_multiple import padded_length
from memlab.trainers import dpo, kto, reward


class Rows(NamedTuple):
    """A micro-batch as it lies in memory."""

    rows: int
    slots: int  # a row
    documents: tuple[int, ...]  # their tokens; of each row where they are not told apart


COLLATE: dict[str, Callable[..., dict[str, Any]]] = {
    "dpo": dpo.collate_pairs,
    "reward": reward.collate_pairs,
    "kto": kto.collate_rows,
    "gkd": lambda rows, collate: collate(rows),
}


def step_batches(
    recipe: Recipe, *, count: int, vocab_size: int, fill: Literal["text", "zeros"] = "text"
) -> list[list[Any]]:
    """The content of `count` steps, on the CPU.

    A step is its micro-batches, collated as the trainer's `train` takes them, or for GRPO, RLOO and
    Online DPO its prompts, (P,) int64 each, whole. `max_length` cuts as the trainer cuts, see
    `memlab.techniques.truncation`. GKD, which stops at a row whose prompt is cut away, gets none.
    Rows of dataset "full" are exactly max_length tokens; a prompt takes half of it, or for an
    online trainer all but max_completion_length.

    Rows come in an order that depends on the seed alone, and start over when they run out. KTO's
    mismatched completions are those of the same step. Raises ValueError when max_length leaves no
    row.
    """
    options: Any = {"vocab_size": vocab_size, "fill": fill}
    if recipe.trainer == "sft":
        accumulate = recipe.gradient_accumulation_steps
        return split(micro_batches(recipe, count=count * accumulate, **options), accumulate)
    size = rows_a_step(recipe)
    whole = _whole(recipe, count * size, **options, seed=recipe.seed)
    steps = split(drawn(_usable(recipe, whole), count * size, recipe.seed), size)
    return [_content(recipe, step) for step in steps]


def last_step(recipe: Recipe) -> list[Any]:
    """The content of the step that is measured, the last, with zeros for ids. Raises ValueError
    as `step_batches`."""
    return step_batches(recipe, count=recipe.max_steps, vocab_size=1, fill="zeros")[-1]


def last_rows(recipe: Recipe) -> list[Rows]:
    """The rows of each micro-batch of the step that is measured, as the policy trains on them: both
    sides of pairs, and prompts with completions of max_completion_length tokens. Raises
    ValueError as `step_batches`."""
    step = last_step(recipe)
    if recipe.trainer not in ONLINE:
        return [_rows(batch) for batch in step]
    answer = own(recipe, "max_completion_length")
    whole = [len(prompt) + answer for prompt in step]
    if recipe.trainer == "online_dpo" and recipe.max_length is not None:
        whole = [min(length, recipe.max_length) for length in whole]
    repeats = own(recipe, "num_generations") or 2
    size = recipe.per_device_train_batch_size * (2 if recipe.trainer in IN_PAIRS else 1)
    slots = padded_length(max(whole), recipe.pad_to_multiple_of)
    drawn_once = [length for length in whole for _ in range(repeats)]
    return [Rows(len(part), slots, tuple(part)) for part in split(drawn_once, size)]


def _rows(batch: dict[str, Any]) -> Rows:
    rows, slots = batch["labels"].shape
    if "cu_seqlens" in batch:
        return Rows(rows, slots, tuple(batch["cu_seqlens"].diff().tolist()))
    return Rows(rows, slots, tuple(batch["attention_mask"].sum(dim=1).tolist()))


def longest_row(recipe: Recipe) -> int:
    """Tokens that a row may have before max_length cuts it; of dataset "full", after it.

    Where a row's answer stands beside another one's prompt, as in pairs, it is a bound.
    """
    if recipe.dataset == "full":
        assert recipe.max_length is not None  # the recipe has refused it
        return recipe.max_length
    shapes = lengths.rows(recipe.dataset)
    prompt = max(row.spans[0][0] for row in shapes)
    if recipe.trainer in ONLINE:
        return prompt + own(recipe, "max_completion_length")
    if recipe.trainer in ("sft", "gkd"):
        return max(row.length for row in shapes)
    return prompt + max(end - start for row in shapes for start, end in row.spans[:1])


def rows_a_step(recipe: Recipe) -> int:
    """Rows of the data set in a step: pairs, rows or prompts."""
    size, accumulate = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    return size * accumulate // (own(recipe, "num_generations") or 1)


def _whole(recipe: Recipe, count: int, **options: Any) -> list[Row]:
    """The rows to choose from, prompts and answers, uncut."""
    if recipe.dataset != "full":
        return prompted_rows(recipe.dataset, **options)
    length, prompt = recipe.max_length, None
    assert length is not None  # the recipe has refused it
    if recipe.trainer in ONLINE:
        prompt = length - own(recipe, "max_completion_length")
    return full_prompted_rows(max(count, 2), length, prompt_length=prompt, **options)


def _usable(recipe: Recipe, whole: Sequence[Row]) -> list[Row]:
    """What is left of the rows, in the trainer's columns; ValueError for nothing."""

    def left(max_length: int | None) -> list[Row]:
        return _cut(recipe, whole, max_length)

    rows = left(recipe.max_length)
    if not rows:
        longest = sum(sorted(len(row["input_ids"]) for row in whole)[-2:])  # a prompt and another
        enough = bisect_left(range(longest), 1, lo=2, key=lambda length: len(left(length)))
        raise ValueError(
            f"max_length={recipe.max_length} leaves trainer={recipe.trainer!r} no row of dataset="
            f"{recipe.dataset!r}; take at least {enough}"
        )
    return rows


def _cut(recipe: Recipe, whole: Sequence[Row], max_length: int | None) -> list[Row]:
    match recipe.trainer:
        case "dpo":
            mode = recipe.truncation_mode
            return truncation.truncate_dpo(preference_rows(whole), max_length, truncation_mode=mode)
        case "reward":
            return truncation.truncate_reward(scored_rows(preference_rows(whole)), max_length)
        case "kto":  # cut in `_content`, when each row has another one's completion beside it
            return [row for row in binary_rows(whole) if truncation.truncate_kto([row], max_length)]
        case "gkd":
            ends = -max_length if max_length else None
            prompted = [row for row in whole if row["labels"][ends:][0] == IGNORE]
            return truncation.truncate_gkd(prompted, max_length)
        case _:  # completions have their own limit, and Online DPO cuts prompts when it knows them
            return prompt_rows(whole)


def _content(recipe: Recipe, step: list[Row]) -> list[Any]:
    if recipe.trainer in ONLINE:
        return [torch.as_tensor(row["prompt_ids"]) for row in step]
    if recipe.trainer == "kto":
        step = truncation.truncate_kto(kto.mismatched(step), recipe.max_length)
    collate, parts = COLLATE[recipe.trainer], split(step, recipe.per_device_train_batch_size)
    return [collate(part, collation(recipe)) for part in parts]
