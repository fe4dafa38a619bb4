"""The batch that a command measured, in words: its slots, and what another one could take."""

from memlab.experiments import Recipe
from memlab.experiments.rules import IN_GROUPS, IN_PAIRS, TECHNIQUES, TRAINERS
from memlab.experiments.trainer_batches import last_rows, longest_row

NEED_ROWS_OF_UNEQUAL_LENGTH = {"packing", "packing_strategy", "padding_free", "truncation_mode"}
COUNTED = {  # what a batch is counted in, where that isn't rows
    "dpo": "pairs",
    "reward": "pairs",
    "grpo": "completions",
    "rloo": "completions",
    "online_dpo": "prompts",
}


def batch_shape(recipe: Recipe) -> tuple[int, int]:
    """(rows, slots a row) of the largest micro-batch in the step that is measured, the last."""
    largest = max(last_rows(recipe), key=lambda batch: batch.rows * batch.slots)
    return largest.rows, largest.slots


def shape_in_words(recipe: Recipe) -> str:
    """As asked for where every row is full, "4 x 1024 tokens"; else as drawn, "4 x 912 slots".
    Pairs have two rows each."""
    if recipe.dataset == "full":
        rows = recipe.per_device_train_batch_size * (2 if recipe.trainer in IN_PAIRS else 1)
        return f"{rows} x {recipe.max_length} tokens"
    rows, slots = batch_shape(recipe)
    return f"{rows} x {slots} slots"


def title(recipe: Recipe) -> str:
    """The model, its trainer and its batch; with the data set, max_length and seed that it was
    drawn by."""
    named = recipe.model
    if recipe.trainer != "sft":
        named += f", {TRAINERS[recipe.trainer]}"
    if counted := COUNTED.get(recipe.trainer):
        named += f" of {recipe.per_device_train_batch_size} {counted}"
    shape = f"{named}, {shape_in_words(recipe)}"
    if recipe.dataset == "full":
        return shape
    cut = f"max_length {recipe.max_length}" if recipe.max_length else "nothing cut"
    if recipe.trainer in IN_GROUPS:
        cut = "prompts whole"
    return f"{shape} ({recipe.dataset}, {cut}, seed {recipe.seed})"


def other_batches(recipe: Recipe) -> str | None:
    """What to know where rows differ in length: this batch is one of many."""
    if recipe.dataset == "full":
        return None
    longest, cut = longest_row(recipe), recipe.max_length
    if cut is not None and recipe.trainer not in IN_GROUPS:
        longest = cut if recipe.packing else min(longest, cut)
    return (
        f"one batch of {recipe.dataset}, as seed {recipe.seed} draws it: another may take more; "
        f"the most, every row full: --dataset full --max-length {longest}"
    )


def comparison_notes(before: Recipe, after: Recipe) -> list[str]:
    """What the trainer and the two sides' data mean for the figures."""
    trainer = after.trainer
    return [
        f"{technique.title} changes nothing with trainer={trainer!r}: {technique.idle[trainer]}"
        for technique in TECHNIQUES
        if trainer in technique.idle and technique.is_on(before) != technique.is_on(after)
    ] + _data_notes(before, after)


def _data_notes(before: Recipe, after: Recipe) -> list[str]:
    changed = before.changes(after)
    batches = f"batch: {shape_in_words(before)} -> {shape_in_words(after)}"
    if "trainer" in changed and len(changed) > 1:
        return [
            f"{batches}; the two sides have different trainers, and that counts as saved too: "
            f"--trainer {after.trainer} gives both the same"
        ]
    if "dataset" in changed and len(changed) > 1:
        return [
            "the two sides hold different data, and that counts as saved too: "
            f"--dataset {after.dataset} gives both the same"
        ]
    idle = [name for name in changed if name in NEED_ROWS_OF_UNEQUAL_LENGTH]
    if after.dataset == "full" and idle:
        return [
            "every row of dataset=full is max_length tokens long, so nothing is left for "
            f"{', '.join(idle)} to do: give rows of unequal length, such as --dataset "
            + ("docstrings" if after.trainer == "sft" else "chat")
        ]
    if after.dataset == "full":
        return [batches] if "trainer" in changed else []
    return [f"{batches}, as seed {after.seed} draws it from {after.dataset}; other batches differ"]
