"""Batches of pairs: 2B rows, the B chosen ones first, then the B rejected, as TRL has them."""

from torch import Tensor

from memlab.trainers.completions import num_rows
from memlab.trainers.loop import Batch


def num_pairs(batch: Batch) -> int:
    """Pairs of a batch; ValueError for an odd number of padded rows."""
    rows = num_rows(batch)
    if rows % 2 and "cu_seqlens" not in batch:
        raise ValueError(f"a batch of {rows} rows holds no pairs: make it with collate_pairs")
    return rows // 2


def sides(rows: Tensor) -> tuple[Tensor, Tensor]:  # (2B,) or, with a tail of padding, (2B + 1,)
    """The first half and the second: what belongs to the chosen rows, and to the rejected."""
    pairs = len(rows) // 2
    return rows[:pairs], rows[pairs : 2 * pairs]
