"""How good a packing can be: the fewest bins that any placement needs, and the share it fills."""

from collections.abc import Sequence

import numpy as np


def lower_bound(lengths: Sequence[int] | np.ndarray, max_length: int) -> int:
    """Bins of max_length tokens that documents of these lengths (rows,) need at the least.

    Lengths beyond max_length count as cut to it. The larger of ceil(sum / L) and the bound L2 of
    Martello and Toth (1990, Knapsack Problems, 8.3): for every a up to L/2, a bin for each
    document longer than L/2, and those between a and L/2 in bins of their own as far as they don't
    fit beside the ones of at most L - a.

    Raises:
        ValueError: max_length below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: give the tokens of a bin, at least 1")
    sizes = np.minimum(np.asarray(lengths, np.int64), max_length)
    size = max(1, min(max_length, int(sizes.sum())))  # more room than tokens changes nothing
    count = np.bincount(sizes, minlength=size + 1)
    items = np.cumsum(count)  # (size + 1,) of at most so many tokens
    tokens = np.cumsum(count * np.arange(size + 1))
    a, half = np.arange(size // 2 + 1), size // 2
    beside = (items[size - a] - items[half]) * size - (tokens[size - a] - tokens[half])
    small = tokens[half] - tokens[np.maximum(a - 1, 0)]  # from a to L/2 each
    more = np.maximum(0, -((beside - small) // size))  # ceil, in integers
    return int(items[-1] - items[half] + more.max())


def efficiency(tokens: int, bins: int, max_length: int) -> float:
    """Share of the positions of `bins` bins that hold a token; 1 where there is no bin."""
    return tokens / (bins * max_length) if bins else 1.0
