"""Rows of unequal length for the figures of the sequence lessons: data sets, batches, controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
import numpy as np

Lengths = Sequence[int] | np.ndarray  # tokens of each row
Sets = Lengths | Mapping[str, Lengths]

BATCHES = (1, 2, 4, 8, 16, 32)
MULTIPLES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def data_sets(caller: str, lengths: Sets) -> dict[str, np.ndarray]:
    """Lengths in tokens (rows,) by name of the data set; those without a name are called "rows".

    Raises ValueError in the name of `caller` for no rows or a length below 1, TypeError for
    lengths that are no integers.
    """
    named = lengths if isinstance(lengths, Mapping) else {"rows": lengths}
    if not named:
        raise ValueError(f"{caller}: lengths is empty; give at least one data set")
    return {str(name): _checked(f"{caller}: {name}", given) for name, given in named.items()}


def _checked(what: str, lengths: Lengths) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{what}: shape {array.shape}; give one length a row, at least one")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: {array.dtype}; give lengths in tokens, whole numbers")
    if array.min() < 1:
        raise ValueError(f"{what}: a length of {array.min()}; give 1 token or more")
    return array.astype(np.int64)


def length_steps(start: int, end: int, *also: int) -> list[int]:
    """Lengths from `start` to `end`, four to each doubling; both ends and `also` are among them."""
    steps = {2**power * part // 4 for power in range(2, 21) for part in (4, 5, 6, 7)}
    return sorted({step for step in steps if start <= step <= end} | {start, end, *also})


def slider(
    values: Sequence[Any], value: Any, label: str, style: Mapping[str, Any]
) -> ipywidgets.SelectionSlider:
    """A slider over `values`, or over (text, value) pairs, that stands at `value`."""
    return ipywidgets.SelectionSlider(
        options=list(values),
        value=value,
        description=label,
        continuous_update=False,
        style=dict(style),
        layout={"width": "34em"},
    )


def chooser(sets: Mapping[str, Any], style: Mapping[str, Any]) -> ipywidgets.Dropdown:
    """A dropdown over the names of data sets; hidden where there is only one."""
    return ipywidgets.Dropdown(
        options=list(sets),
        description="data set",
        style=dict(style),
        layout={} if len(sets) > 1 else {"display": "none"},
    )


def percent(share: float) -> str:
    """A share as a percentage, whole from 10 to 99, never a false 0 or 100.

    0.98 -> "98 %", 0.995 -> "99.5 %", 0.034 -> "3.4 %", 0.0002 -> "<0.1 %".
    """
    number = round(100 * share, 9)  # 1 - 0.98 is not quite 0.02
    if 0 < number < 0.05:
        return "<0.1 %"
    if 99.95 <= number < 100:
        return ">99.9 %"
    whole = 10 <= number <= 99 or number >= 100 or number == round(number)
    return f"{number:.0f} %" if whole else f"{number:.1f} %"
