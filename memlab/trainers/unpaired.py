"""Batches of unpaired rows, each desirable or not, beside prompts with other rows' completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlab.trainers.completions import Collate, Row, labelled
from memlab.trainers.loop import Batch

KL = "KL_"  # columns of the mismatched completions, as TRL names them


def mismatched(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a whole step with the `completion_ids` of the one before as `KL_completion_ids`.

    The first one gets the last one's. Before `techniques.truncation.truncate_kto`. Raises
    ValueError for fewer than 2 rows.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a mismatched completion is another row's; give 2")
    name = f"{KL}completion_ids"
    return [{**row, name: rows[i - 1]["completion_ids"]} for i, row in enumerate(rows)]


def collate_rows(rows: Sequence[Row], collate: Collate) -> Batch:
    """A batch of rows as `truncate_kto` gives them, with a bool `label`: is it desirable?

    `collate` is that of `techniques.pad_to_multiple` or, without padding, `padding_free`; what it
    makes of the mismatched completions has names that begin with KL_. Raises ValueError for a row
    without `label`, `input_ids`, `completion_mask` or their KL_, or with a label that is no bool or
    a completion of no token.
    """
    labels = [_desirable(i, row.get("label")) for i, row in enumerate(rows)]
    batch = collate(labelled(rows))  # first: it names the row whose completion is wrong
    mismatched_batch = collate(labelled(rows, KL))
    return {
        **batch,
        **{f"{KL}{name}": column for name, column in mismatched_batch.items()},
        "desirable": torch.tensor(labels, dtype=torch.bool),
    }


def _desirable(i: int, label: object) -> bool:
    scalar = isinstance(label, Tensor) and label.dtype == torch.bool and label.ndim == 0
    if not scalar and not isinstance(label, (bool, np.bool_)):
        raise ValueError(f"label={label!r} of row {i}: give True (desirable) or False, a bool")
    return bool(label)


def mismatched_part(batch: Batch) -> Batch:
    """The columns that begin with KL_, under the names of a batch of their own."""
    return {name.removeprefix(KL): batch[name] for name in batch if name.startswith(KL)}
