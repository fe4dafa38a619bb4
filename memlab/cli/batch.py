"""The batch that a command measured, in words: its slots, and what another one could take."""

import math

from memlab.data.lengths import lengths
from memlab.experiments import Recipe
from memlab.experiments.batching import last_step

NEED_ROWS_OF_UNEQUAL_LENGTH = {"packing", "packing_strategy", "padding_free", "truncation_mode"}


def batch_shape(recipe: Recipe) -> tuple[int, int]:
    """(rows, slots a row) of the largest micro-batch in the step that is measured, the last."""
    rows, slots = max((batch["labels"].shape for batch in last_step(recipe)), key=math.prod)
    return rows, slots


def shape_in_words(recipe: Recipe) -> str:
    """As asked for where every row is full, "4 x 1024 tokens"; else as drawn, "4 x 912 slots"."""
    if recipe.dataset == "full":
        return f"{recipe.per_device_train_batch_size} x {recipe.max_length} tokens"
    rows, slots = batch_shape(recipe)
    return f"{rows} x {slots} slots"


def title(recipe: Recipe) -> str:
    """The model and its batch; with the data set, max_length and seed that it was drawn by."""
    if recipe.dataset == "full":
        return f"{recipe.model}, {shape_in_words(recipe)}"
    cut = f"max_length {recipe.max_length}" if recipe.max_length else "nothing cut"
    return f"{recipe.model}, {shape_in_words(recipe)} ({recipe.dataset}, {cut}, seed {recipe.seed})"


def other_batches(recipe: Recipe) -> str | None:
    """What to know where rows differ in length: this batch is one of many."""
    if recipe.dataset == "full":
        return None
    longest = max(lengths(recipe.dataset))
    if recipe.max_length is not None and (recipe.packing or recipe.max_length < longest):
        longest = recipe.max_length
    return (
        f"one batch of {recipe.dataset}, as seed {recipe.seed} draws it: another may take more; "
        f"the most, every row full: --dataset full --max-length {longest}"
    )


def comparison_notes(before: Recipe, after: Recipe) -> list[str]:
    """What the two sides' data mean for the figures."""
    changed = before.changes(after)
    if "dataset" in changed and len(changed) > 1:
        return [
            "the two sides hold different data, and that counts as saved too: "
            f"--dataset {after.dataset} gives both the same"
        ]
    idle = [name for name in changed if name in NEED_ROWS_OF_UNEQUAL_LENGTH]
    if after.dataset == "full" and idle:
        return [
            "every row of dataset=full is max_length tokens long, so nothing is left for "
            f"{', '.join(idle)} to do: give rows of unequal length, such as --dataset docstrings"
        ]
    if after.dataset == "full":
        return []
    return [
        f"batch: {shape_in_words(before)} -> {shape_in_words(after)}, as seed {after.seed} draws "
        f"it from {after.dataset}; other batches differ"
    ]
