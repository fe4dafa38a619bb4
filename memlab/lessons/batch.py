"""The batch that a recipe's last step computes on, which is the step that is measured."""

from __future__ import annotations

from typing import NamedTuple

from memlab.experiments import Recipe
from memlab.experiments.trainer_batches import last_rows


class Batch(NamedTuple):
    """One step's rows as they lie in memory, of all its micro-batches."""

    rows: int
    slots: int
    documents: tuple[int, ...]  # their lengths in tokens

    @property
    def tokens(self) -> int:
        """Slots that hold a token of the data: the useful ones."""
        return sum(self.documents)


def last_batch(recipe: Recipe) -> Batch:
    """The rows of the recipe's last step, without running it. Raises as `step_batches`."""
    made = last_rows(recipe)
    filled = made if recipe.pad_to_multiple_of is None else last_rows(_unfilled(recipe))
    return Batch(
        rows=sum(batch.rows for batch in made),
        slots=sum(batch.rows * batch.slots for batch in made),
        documents=tuple(length for batch in filled for length in batch.documents),
    )


def _unfilled(recipe: Recipe) -> Recipe:
    """Padding-free, a filled-up tail looks like a document: the same rows without one."""
    return recipe.replace(pad_to_multiple_of=None)
