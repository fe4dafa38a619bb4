"""From the rows of a data set to the micro-batches of a recipe: cut or packed, then collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from memlab.data import lengths
from memlab.data.lengths import shuffled
from memlab.data.rows import IGNORE, full_rows, rows
from memlab.experiments.recipe import Recipe
from memlab.techniques import packing, pad_to_multiple, padding_free, truncation

Row = dict[str, Any]
T = TypeVar("T")


def micro_batches(
    recipe: Recipe, *, count: int, vocab_size: int, fill: Literal["text", "zeros"] = "text"
) -> list[dict[str, Any]]:
    """`count` collated micro-batches, on the CPU, of `recipe.per_device_train_batch_size` rows.

    Rows come in an order that depends on the seed alone, and start over when they run out. Raises
    ValueError when max_length leaves no row with a label.
    """
    size = recipe.per_device_train_batch_size
    made = _rows(recipe, size * count, vocab_size, fill)
    if not any((row["labels"] != IGNORE).any() for row in made):
        first = min(row.spans[0][0] for row in lengths.rows(recipe.dataset))
        raise ValueError(
            f"max_length={recipe.max_length} cuts every label of dataset={recipe.dataset!r}; "
            f"take at least {first + 1}"
        )
    return list(map(collation(recipe), split(drawn(made, size * count, recipe.seed), size)))


def drawn(rows: Sequence[T], count: int, seed: int) -> list[T]:
    """`count` rows in an order that the seed alone decides; they start over when they run out."""
    order = shuffled(rows, seed)
    return [order[i % len(order)] for i in range(count)]


def split(items: list[T], size: int) -> list[list[T]]:
    """The items in lists of `size`, the last one perhaps shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def collation(recipe: Recipe) -> Callable[[Sequence[Row]], dict[str, Any]]:
    """What makes a batch of rows of `input_ids` and `labels`: padded, or laid end to end."""
    return partial(
        padding_free.collate if recipe.flattened else pad_to_multiple.collate,
        pad_to_multiple_of=recipe.pad_to_multiple_of,
    )


def _rows(recipe: Recipe, count: int, vocab_size: int, fill: Literal["text", "zeros"]) -> list[Row]:
    """The rows to choose from, none longer than max_length."""
    options: Any = {"vocab_size": vocab_size, "fill": fill, "seed": recipe.seed}
    if recipe.dataset == "full":
        assert recipe.max_length is not None  # the recipe has refused it
        whole = full_rows(count, recipe.max_length, **options)
    else:
        whole = rows(recipe.dataset, **options)
    if not recipe.packing:
        return truncation.truncate_sft(
            whole, recipe.max_length, truncation_mode=recipe.truncation_mode
        )
    columns = {name: [row[name] for row in whole] for name in ("input_ids", "labels")}
    packed = packing.pack(columns, recipe.max_length, strategy=recipe.packing_strategy)
    return [dict(zip(packed, row, strict=True)) for row in zip(*packed.values(), strict=True)]
