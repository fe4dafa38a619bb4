"""Two devices' readings of one step, side by side: what stays, what changes."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets

from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.widgets.live import described
from memlab.widgets.show import columns
from memlab.widgets.style import LOOKS

SAME, DIFFERS = "= same", "≠ differs"
NONE = "—"
CELL = "padding:.15em 1em; text-align:right; white-space:nowrap"


class Readings:
    """A table of two measurements out of several; made by `readings`."""

    def __init__(self, measurements: Mapping[str, Measurement]) -> None:
        self.measurements = dict(measurements)
        names = list(self.measurements)
        look = {
            "style": described(["compare", "with"]),
            "layout": {"width": f"{0.62 * max(map(len, names)) + 9:.0f}em"},
        }
        self.left, self.right = (
            ipywidgets.Dropdown(options=names, value=value, description=text, **look)
            for text, value in (("compare", names[0]), ("with", names[:2][-1]))
        )
        self.page = ipywidgets.HTML()
        self.view = ipywidgets.VBox([ipywidgets.HBox([self.left, self.right]), self.page])
        for control in (self.left, self.right):
            control.observe(self._fill, names="value")
        self._fill()

    @property
    def chosen(self) -> tuple[str, str]:
        """The names of the two measurements that are compared."""
        return str(self.left.value), str(self.right.value)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(reading, left value, right value, how they compare), of the present choice."""
        left, right = (_values(self.measurements[name]) for name in self.chosen)
        return [
            (name, _text(left[name]), _text(right[name]), _compared(left[name], right[name]))
            for name in left
        ]

    def _fill(self, _: object = None) -> None:
        self.page.value = self.html()

    def html(self) -> str:
        """The table; "same" and "differs" are words, not colours alone."""
        heads = ("reading", *self.chosen, "")
        head = "".join(f'<th scope="col" style="{CELL}">{html.escape(h)}</th>' for h in heads)
        body = "".join(_line(*row) for row in self.rows())
        return (
            f'<table style="border-collapse:collapse" role="status"><tr>{head}</tr>{body}</table>'
        )

    def __repr__(self) -> str:
        values = [_values(m) for m in self.measurements.values()]
        lines = [["reading", *self.measurements]]
        lines += [[name, *(_text(v[name]) for v in values)] for name in values[0]]
        return columns(lines)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        view = self.view._repr_mimebundle_() or {}
        return {**view, "text/html": self.html(), "text/plain": repr(self)}


def _line(name: str, left: str, right: str, compared: str) -> str:
    colour = "#a34400" if compared.startswith(DIFFERS) else "#00664b"
    texts = "".join(f'<td style="{CELL}">{html.escape(text)}</td>' for text in (left, right))
    label = html.escape(name).replace("  ", "&emsp;")
    return (
        f'<tr><th scope="row" style="{CELL}; font-weight:normal; text-align:left">{label}</th>'
        f'{texts}<td style="{CELL}; text-align:left; color:{colour}"><b>{compared}</b></td></tr>'
    )


def _values(m: Measurement) -> dict[str, float | None]:
    """What one device reads, by the name of the reading; None where it reads nothing."""
    present = [c for c in CATEGORIES if c != "kv_cache"]
    return {
        "metered peak, bytes": m.metered_peak_bytes,
        **{f"  {LOOKS[c].name}": m.by_category[c] for c in present},
        "peak allocated, bytes": m.peak_allocated_bytes,
        "peak reserved, bytes": m.peak_reserved_bytes,
        "one step, ms": m.step_ms,
    }


def _text(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _compared(left: float | None, right: float | None) -> str:
    if left is None or right is None:
        return "" if left is right else f"{DIFFERS}: only one of them has it"
    if left == right:
        return SAME
    share = f" by {abs(right / left - 1):.3%}".replace("%", " %") if left else ""
    return f"{DIFFERS}{share}"


def readings(measurements: Mapping[str, Measurement]) -> Readings:
    """A table of two devices' readings with a choice of devices, by name.

    Raises ValueError without measurements.
    """
    if not measurements:
        raise ValueError("readings: give at least one name and measurement")
    return Readings(measurements)
