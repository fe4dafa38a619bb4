"""Figures for a notebook cell: a picture, its numbers as text, a description for listeners.

A cell that ends in one of these shows the picture (PNG, with alt text in its metadata, which HTML
export uses); `print(figure)` gives the same numbers as a plain table, the same on every run.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.widgets.figures import bars, new_figure, timeline
from memlab.widgets.style import FONT, INK, LOOKS, change, gb

if TYPE_CHECKING:
    from memlab.experiments import Comparison, Recipe

WIDTH = (
    8.6  # inches: a notebook's output and a README's column hold it unscaled at 100 dots an inch
)
DPI = 110


def render(figure: Figure, dpi: int = DPI) -> bytes:
    """`figure` as PNG bytes, without a time stamp; equal figures give equal bytes."""
    data = io.BytesIO()
    figure.savefig(
        data,
        format="png",
        dpi=dpi,
        metadata={"Software": None},
        pil_kwargs={"compress_level": 1},
    )
    return data.getvalue()


class Shown:
    """A static figure: picture and table for notebooks, `html()` for pages, `save()` for files.

    `draw` fills an empty figure of `size` inches; `table` holds the figure's numbers; `alt` says in
    a sentence what is to be seen.
    """

    def __init__(
        self, draw: Callable[[Figure], None], size: tuple[float, float], *, table: str, alt: str
    ) -> None:
        self._draw, self._size, self.table, self.alt = draw, size, table, alt

    def png(self, dpi: int = 2 * DPI) -> bytes:
        """The picture, by default at twice the screen's resolution."""
        figure = new_figure(*self._size)
        self._draw(figure)
        return render(figure, dpi)

    def save(self, path: str | Path, dpi: int = 2 * DPI) -> Path:
        """Writes the PNG to `path` and returns it."""
        path = Path(path)
        path.write_bytes(self.png(dpi))
        return path

    def html(self) -> str:
        """`<figure>` with the picture inside, its alt text, and the numbers in a folded table."""
        data = base64.b64encode(self.png()).decode()
        return (
            f'<figure><img alt="{html.escape(self.alt)}" width="{self._pixels}"'
            f' src="data:image/png;base64,{data}">'
            f"<details><summary>Numbers</summary><pre>{html.escape(self.table)}</pre></details></figure>"
        )

    @property
    def _pixels(self) -> int:
        return round(self._size[0] * DPI)

    def __repr__(self) -> str:
        return self.table

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {
            "image/png": base64.b64encode(self.png()).decode(),
            "text/plain": self.table,
        }
        return data, {"image/png": {"alt": self.alt, "width": self._pixels}}


def show_comparison(
    comparison: Comparison,
    *,
    title: str = "",
    beside: Callable[[Recipe], Measurement | None] = lambda recipe: None,
) -> Shown:
    """Bars before and after, by category at the peak, of what `memlab.compare` returned.

    `beside` gives another reading of a recipe, such as `recorded`, to stand under its bar.
    """
    rows = {"before": comparison.before, "after": comparison.after}
    title = title or _says(rows, [m.metered_peak_bytes for m in rows.values()])
    recipes = {"before": comparison.before_recipe, "after": comparison.after_recipe}
    shown = {}
    for side, m in rows.items():
        shown[side] = m
        if other := beside(recipes[side]):
            shown[f"{side}: {other.device}"] = other
    return show_bars(shown, title=title)


def show_bars(rows: Mapping[str, Measurement], *, title: str = "") -> Shown:
    """Bars of several measurements by label, by category at each one's metered peak, in GB.

    Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("show_bars: rows is empty; give at least one label and measurement")
    peaks = [m.metered_peak_bytes for m in rows.values()]
    height = 0.95 + 0.55 * len(rows)

    def draw(figure: Figure) -> None:
        ax = figure.add_axes(_inside(rows, height))
        bars(ax, list(rows.items()))
        heading(figure, title or _says(rows, peaks))

    alt = f"Bars of peak memory by category. {_says(rows, peaks)}. " + " ".join(
        f"{label}: {_largest(m)}." for label, m in rows.items()
    )
    return Shown(draw, (WIDTH, height), table=table(rows), alt=alt)


def show_timeline(shown: Measurement | Mapping[str, Measurement], *, title: str = "") -> Shown:
    """Live bytes over one step, or over several steps on one scale, one beneath another.

    Raises ValueError where a measurement kept no timeline.
    """
    rows = {title: shown} if isinstance(shown, Measurement) else dict(shown)
    for label, m in rows.items():
        if not m.timeline:
            raise ValueError(f"show_timeline: {label or 'the measurement'} kept no timeline")
    limit = max(m.metered_peak_bytes for m in rows.values())
    first = next(iter(rows))
    each = 2.9 if len(rows) == 1 else 2.5
    height = each * len(rows)

    def draw(figure: Figure) -> None:
        for i, (label, m) in enumerate(rows.items()):
            bottom = (each * (len(rows) - 1 - i) + 0.33) / height
            ax = figure.add_axes((0.066, bottom, 0.924, (each - 0.75) / height))
            line = None if i == 0 else (first, rows[first].metered_peak_bytes)
            timeline(ax, m, limit=limit, title=label, reference=line)

    alt = "Live memory over one training step, stacked by category. " + " ".join(
        f"{label or 'it'} peaks at {gb(m.metered_peak_bytes)} in {m.peak.phase}; {_largest(m)}."
        for label, m in rows.items()
    )
    return Shown(
        draw,
        (WIDTH, height),
        table=table({k or "at the peak": m for k, m in rows.items()}),
        alt=alt,
    )


def heading(figure: Figure, text: str, *, x: float = 0.012) -> Text:
    """One bold line at the top left."""
    top = 1 - 0.1 / figure.get_size_inches()[1]
    return figure.text(x, top, text, va="top", fontsize=FONT + 1, fontweight="bold", color=INK)


def table(rows: Mapping[str, Measurement]) -> str:
    """The numbers behind the figures: GB by category at the metered peak, one column a measurement.

    Only what is the same on every device is in it: no reserved bytes, no milliseconds.
    """
    present = [c for c in CATEGORIES if any(m.by_category[c] for m in rows.values())]
    lines = [["GB at the peak", *rows]]
    lines += [
        [LOOKS[c].name, *(gb(m.by_category[c], unit=False) for m in rows.values())] for c in present
    ]
    lines += [["metered peak", *(gb(m.metered_peak_bytes, unit=False) for m in rows.values())]]
    return columns(lines)


def columns(lines: list[list[str]]) -> str:
    """Lines of cells as text: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _inside(rows: Mapping[str, Any], height: float) -> tuple[float, float, float, float]:
    """Where the bars' axes stand in a figure: room for the labels, the heading, the key."""
    left = min(0.3, 0.03 + 0.0088 * max(len(label) for label in rows))
    return left, 0.38 / height, 0.985 - left, 1 - 0.8 / height


def _says(rows: Mapping[str, Measurement], peaks: list[int]) -> str:
    """The figure's finding in one line."""
    if len(peaks) == 1:
        return f"{gb(peaks[0])} at the peak"
    chain = " → ".join(gb(n, unit=False) for n in peaks)
    return f"Peak {chain} GB: {change(peaks[0], peaks[-1])}"


def _largest(m: Measurement) -> str:
    category = max(m.by_category, key=lambda c: m.by_category[c])
    return f"most of it {LOOKS[category].name}, {gb(m.by_category[category])}"
