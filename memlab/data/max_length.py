"""What a max_length costs a data set, from its row lengths alone: tokens, rows and padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def batch_widths(lengths: np.ndarray, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Longest row (batches,) and number of rows (batches,) of batches of consecutive rows; the
    last batch may be smaller.
    """
    starts = np.arange(0, len(lengths), batch_size)
    return np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths))


class Lengths:
    """Lengths in tokens of R rows, sorted once; then a question about a max_length is a look-up.

    A max_length is an int of at least 1, or an array of them with an array of answers.

    Raises:
        TypeError: lengths that are no integers.
        ValueError: lengths that are not 1-D, below 0 or without a token; a max_length below 1; a
            share outside ]0, 1]; a batch_size below 1.
    """

    def __init__(self, lengths: Sequence[int] | NDArray[np.integer]) -> None:
        rows = np.asarray(lengths)
        if rows.ndim != 1 or rows.size == 0:
            raise ValueError(f"lengths of shape {rows.shape}: give one number of tokens a row")
        if rows.dtype.kind not in "iu":
            raise TypeError(f"lengths of dtype {rows.dtype}: give whole numbers of tokens")
        if rows.min() < 0 or rows.max() == 0:
            raise ValueError(f"lengths from {rows.min()} to {rows.max()}: give rows with tokens")
        self.in_order = rows.astype(np.int64)  # (R,)
        self.ascending = np.sort(self.in_order)  # (R,)
        self.total = int(self.in_order.sum())  # tokens
        self.longest = int(self.ascending[-1])
        self._tokens_before = np.concatenate([[0], self.ascending.cumsum()])  # (R + 1,)

    def tokens(self, max_length: Any) -> Any:
        """Tokens left of all rows: the shorter rows' own, and max_length of each other one.

        Raises ValueError for a max_length below 1, as all that ask about one.
        """
        shorter = self._shorter(max_length)
        return self._tokens_before[shorter] + (len(self.ascending) - shorter) * max_length

    def lost(self, max_length: Any) -> Any:
        """Tokens cut away. Raises ValueError as `tokens`."""
        return self.total - self.tokens(max_length)

    def kept(self, max_length: Any) -> Any:
        """Share of the tokens that is left, 0 to 1. Raises ValueError as `tokens`."""
        return self.tokens(max_length) / self.total

    def cut(self, max_length: Any) -> Any:
        """Number of rows that lose tokens. Raises ValueError as `tokens`."""
        return len(self.ascending) - self._shorter(max_length)

    def shortest(self, share: float) -> int:
        """The smallest max_length that keeps at least this share of the tokens.

        Raises ValueError for a share outside ]0, 1].
        """
        if not 0 < share <= 1:
            raise ValueError(f"share={share!r}: give a share of the tokens above 0 and up to 1")
        return bisect_left(range(1, self.longest + 1), share, key=self.kept) + 1

    def padding(self, max_length: Any, batch_size: int) -> Any:
        """Share of the slots that are padding: rows cut, then each batch of `batch_size` rows, in
        the order given, padded to its longest. Raises ValueError for either below 1."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: give at least 1")
        longest, batch_rows = batch_widths(self.in_order, batch_size)
        slots = np.minimum.outer(max_length, longest) @ batch_rows
        return 1 - self.tokens(max_length) / slots

    def _shorter(self, max_length: Any) -> Any:
        """Number of rows that a max_length leaves whole."""
        if np.any(np.asarray(max_length) < 1):
            raise ValueError(f"max_length={max_length!r}: give at least 1")
        return np.searchsorted(self.ascending, max_length, side="right")
