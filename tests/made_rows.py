"""Rows of unequal lengths with masked labels, for tests here and on a card."""

import numpy as np


def rows_of(vocabulary: int, lengths=(5, 23, 2, 11, 40, 1, 17)) -> list[dict]:
    """One row a length: random ids, three labels in ten masked."""
    rng = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = rng.integers(1, vocabulary, length)
        labels = np.where(rng.random(length) < 0.7, ids, -100)
        rows.append({"input_ids": ids, "labels": labels})
    return rows
