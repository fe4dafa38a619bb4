"""The batch that a recipe's last step computes on, which is the step that is measured."""

from __future__ import annotations

from typing import Any, NamedTuple

from memlab.experiments import Recipe
from memlab.experiments.batching import last_step


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
    """The rows of the recipe's last step, without running it. Raises as `micro_batches`."""
    made = last_step(recipe)
    filled = made if recipe.pad_to_multiple_of is None else last_step(_unfilled(recipe))
    return Batch(
        rows=sum(len(batch["input_ids"]) for batch in made),
        slots=sum(batch["input_ids"].numel() for batch in made),
        documents=tuple(length for batch in filled for length in _documents(batch)),
    )


def _unfilled(recipe: Recipe) -> Recipe:
    """Padding-free, a filled-up tail looks like a document: the same rows without one."""
    return recipe.replace(pad_to_multiple_of=None)


def _documents(batch: dict[str, Any]) -> list[int]:
    """Tokens of each document; of each row where its documents are not told apart."""
    if "cu_seqlens" in batch:
        return batch["cu_seqlens"].diff().tolist()
    return batch["attention_mask"].sum(dim=1).tolist()
