"""Drawing measurements on a matplotlib `Figure`: bars at the peak, and live bytes over a step.

Pure functions of an `Axes` and numbers: no pyplot, no global state, nothing kept. Sizes are in
bytes and shown in GB (1e9 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.widgets.style import FAINT, FONT, HATCH, INK, LOOKS, QUIET, gb, phase_look


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches, drawn by Agg, outside pyplot's registry."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def points(ax: Axes) -> tuple[float, float]:
    """Width and height of `ax` in points, the unit of font sizes."""
    a_pixel = 72 / ax.figure.dpi
    return ax.bbox.width * a_pixel, ax.bbox.height * a_pixel


def text_width(text: str, size: float = FONT) -> float:
    """Width in points that `text` takes at most in matplotlib's default font, by rule of thumb."""
    return 0.6 * size * len(text)


class Row(NamedTuple):
    """What a bar shows, all in bytes."""

    by_category: Mapping[str, int]
    total: int
    reserved: int | None = None


def as_row(shown: Measurement | Row) -> Row:
    """A row of `bars` from a measurement: its categories, metered peak and reserved bytes."""
    if isinstance(shown, Row):
        return shown
    return Row(shown.by_category, shown.metered_peak_bytes, shown.peak_reserved_bytes)


def bars(
    ax: Axes,
    rows: Sequence[tuple[str, Measurement | Row]],
    *,
    limit: int | None = None,
    names: bool = True,
) -> None:
    """Stacked horizontal bars, one a row: bytes by category, their total, and bytes reserved.

    `limit` fixes the right end of the axis in bytes, so that a redrawn figure keeps its scale.
    Categories too narrow for their name are named in a key below; with `names=False` all are, so
    that nothing jumps between steps of a slider. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("bars: rows is empty; give at least one (label, measurement)")
    shown = [(label, as_row(row)) for label, row in rows]
    end = max(limit or 0, *(max(row.total, row.reserved or 0) for _, row in shown)) or 1
    bare(ax)
    ax.set_ylim(len(shown) - 0.45, -0.55)
    width = points(ax)[0]
    beyond = text_width("reserved 00.00 GB") + 8
    ax.set_xlim(0, end * width / max(width - beyond, width / 2))
    bytes_a_point = ax.get_xlim()[1] / width
    named: set[str] = set()
    for y, (_, row) in enumerate(shown):
        named |= _bar(ax, y, row, bytes_a_point, names)
    ax.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize=FONT, color=INK)
    ax.tick_params(axis="y", length=0, pad=6)
    present = [c for c in CATEGORIES if any(row.by_category.get(c) for _, row in shown)]
    _key(ax, [c for c in present if c not in named], below=0.0)


def _bar(ax: Axes, y: float, row: Row, bytes_a_point: float, names: bool) -> set[str]:
    """One stacked bar at height y; returns the categories whose name found room on it."""
    named, left = set(), 0
    for category in CATEGORIES:
        n = row.by_category.get(category, 0)
        if not n:
            continue
        look = LOOKS[category]
        ax.barh(y, n, 0.62, left, color=look.colour, hatch=look.hatch, edgecolor=HATCH, lw=0.6)
        room, number = n / bytes_a_point, gb(n, unit=False)
        if names and room >= text_width(look.name) + 4:
            label(ax, left + n / 2, y, f"{look.name}\n{number}", look.ink, look.colour)
            named.add(category)
        elif room >= text_width(number):
            label(ax, left + n / 2, y, number, look.ink, look.colour)
        left += n
    extended = row.reserved is not None and row.reserved > row.total
    end = row.reserved if row.reserved is not None and extended else left
    if extended:
        ax.barh(y, end - left, 0.62, left, fill=False, ec=QUIET, lw=0.9, ls=(0, (3, 2)))
        _beyond(ax, end, y, -8, f"reserved {gb(end)}", fontsize=FONT - 1.5, color=QUIET)
    _beyond(
        ax,
        end,
        y,
        4 if extended else 0,
        gb(row.total),
        fontsize=FONT + 1,
        fontweight="bold",
        color=INK,
    )
    return named


def _beyond(ax: Axes, x: float, y: float, up: float, text: str, **style: Any) -> None:
    """Text just right of a bar's end, `up` points above its middle."""
    ax.annotate(text, (x, y), (6, up), textcoords="offset points", va="center", **style)


def label(ax: Axes, x: float, y: float, text: str, ink: str, ground: str) -> Text:
    """Text centred on a coloured area, over a patch of that colour: no hatch crosses letters."""
    return ax.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=FONT - 0.5,
        linespacing=1.15,
        color=ink,
        bbox={"facecolor": ground, "edgecolor": "none", "pad": 1.2},
    )


def bare(ax: Axes) -> None:
    """Takes frame and ticks off."""
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])


def _key(ax: Axes, categories: Sequence[str], *, below: float) -> None:
    """A one-line key of categories under `ax`; nothing where all are named already."""
    if not categories:
        return
    looks = [LOOKS[c] for c in categories]
    legend(
        ax,
        [Patch(facecolor=k.colour, hatch=k.hatch, edgecolor=HATCH, label=k.name) for k in looks],
        loc="upper left",
        anchor=(0.0, below),
    )


def legend(
    ax: Axes,
    handles: Sequence[Artist],
    *,
    loc: Literal["upper left", "upper right", "lower right"],
    anchor: tuple[float, float],
) -> None:
    """A frameless one-line key; several may stand on one `Axes`."""
    ax.add_artist(
        Legend(
            ax,
            handles,
            [str(h.get_label()) for h in handles],
            loc=loc,
            bbox_to_anchor=anchor,
            ncols=len(handles),
            frameon=False,
            fontsize=FONT - 1,
            handlelength=1.3,
            handleheight=0.9,
            handletextpad=0.5,
            columnspacing=1.4,
            borderpad=0.1,
            borderaxespad=0.2,
            labelcolor=INK,
        )
    )


def timeline(
    ax: Axes,
    measurement: Measurement,
    *,
    limit: int | None = None,
    title: str = "",
    reference: tuple[str, int] | None = None,
) -> None:
    """Live bytes by category over a step's allocations and frees, stacked; its peak is marked.

    Phases run along the top. `limit` fixes the top of the scale in bytes, and `reference` draws
    one labelled line, for figures that are compared. Raises ValueError without a timeline.
    """
    if not measurement.timeline:
        raise ValueError("timeline: this measurement kept no timeline; measure it again")
    events, live = series(measurement)
    height = points(ax)[1]
    band = 1 - 13 / height
    top = (limit or int(live.sum(axis=1).max())) * height / (height - 34)
    ax.set_xlim(events[0], max(events[-1], events[0] + 1))
    ax.set_ylim(0, top)
    areas(ax, events, live)
    unnamed = _name_areas(ax, events, live)
    _key(ax, unnamed, below=-0.03)
    if len(unnamed) < 5:
        ax.text(
            1.0,
            -0.045,
            "allocations and frees, in order",
            ha="right",
            va="top",
            fontsize=FONT - 1.5,
            color=QUIET,
            transform=ax.transAxes,
        )
    _phases(ax, phases(measurement), band)
    if reference:
        middle = (events[0] + events[-1]) / 2
        peak_on_the_right = events[live.sum(axis=1).argmax()] > middle  # where its name would be
        line(ax, *reference, left=bool(peak_on_the_right))
    _peak(ax, measurement, events, live)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.set_xticks([])
    scale(ax, (band - 0.02) * top)
    if title:
        ax.set_title(title, loc="left", fontsize=FONT + 1, fontweight="bold", color=INK, pad=8)


def scale(ax: Axes, end: float) -> None:
    """Ticks in GB up to `end` bytes on the vertical axis, the highest with its unit."""
    ticks = [t for t in MaxNLocator(5).tick_values(0, end / 1e9) if 0 <= t * 1e9 <= end]
    ax.set_yticks([t * 1e9 for t in ticks], [f"{t:g}" for t in ticks[:-1]] + [f"{ticks[-1]:g} GB"])
    ax.tick_params(axis="y", length=0, labelsize=FONT - 1, labelcolor=QUIET)
    ax.grid(axis="y", color=FAINT, lw=0.5)
    ax.set_axisbelow(True)


def line(ax: Axes, label: str, n: int, *, left: bool = False) -> None:
    """A dashed line across `ax` at `n` bytes, labelled at its right end or at its left one."""
    ax.axhline(n, color=QUIET, lw=0.9, ls=(0, (3, 2)))
    ax.annotate(
        f"{label} {gb(n)}",
        (0 if left else 1, n),
        (3 if left else -3, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=FONT - 1,
        color=QUIET,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},  # no grid through letters
    )


def series(measurement: Measurement) -> tuple[np.ndarray, np.ndarray]:
    """The timeline as arrays: events (S,) and live bytes (S, C), C as in CATEGORIES."""
    events = np.array([s.event for s in measurement.timeline])
    live = np.array([s.bytes for s in measurement.timeline], dtype=np.int64)
    return events, live


def phases(measurement: Measurement) -> list[tuple[str, int, int]]:
    """Runs of equal phase, in order: (phase, first event, event at which the next run starts)."""
    runs: list[tuple[str, int, int]] = []
    for sample in measurement.timeline:
        if runs and runs[-1][0] == sample.phase:
            runs[-1] = (sample.phase, runs[-1][1], sample.event)
        else:
            if runs:
                runs[-1] = (runs[-1][0], runs[-1][1], sample.event)
            runs.append((sample.phase, sample.event, sample.event))
    return runs


def areas(ax: Axes, events: np.ndarray, live: np.ndarray) -> None:
    """Stacked bands, the top one first; outlines keep spikes of a few events visible."""
    tops = live.cumsum(axis=1)
    for i, category in reversed(list(enumerate(CATEGORIES))):
        alive = live[:, i] > 0
        alive[1:] |= alive[:-1]  # a band ends where the next event begins
        look, low, high = LOOKS[category], tops[:, i] - live[:, i], tops[:, i]
        band = {"step": "post", "where": alive}
        ax.fill_between(events, low, high, fc=look.colour, ec=look.colour, lw=1.4, **band)
        ax.fill_between(events, low, high, fc="none", ec=HATCH, hatch=look.hatch, lw=0, **band)


def _name_areas(ax: Axes, events: np.ndarray, live: np.ndarray) -> list[str]:
    """Names each category in its band, or beside a spike; returns those without room."""
    width, height = points(ax)
    x_point = width / (ax.get_xlim()[1] - ax.get_xlim()[0])
    y_point = height / ax.get_ylim()[1]
    tops = live.cumsum(axis=1)
    unnamed = []
    for i, category in enumerate(CATEGORIES):
        if not live[:, i].any():
            continue
        look, low, high = LOOKS[category], (tops[:, i] - live[:, i]) * y_point, tops[:, i] * y_point
        spot = _inside(events * x_point, low, high, look.name)
        beside = (
            None if spot else _beside(events * x_point, low, high, tops[:, -1] * y_point, look.name)
        )
        if spot:
            label(ax, spot[0] / x_point, spot[1] / y_point, look.name, look.ink, look.colour)
        elif beside:
            x, y, gap = beside
            ax.annotate(
                look.name,
                (x / x_point, y / y_point),
                (gap, 0),
                textcoords="offset points",
                ha="right" if gap < 0 else "left",
                va="center",
                fontsize=FONT - 0.5,
                color=INK,
                arrowprops={
                    "arrowstyle": "-",
                    "color": look.colour,
                    "lw": 1.2,
                    "shrinkA": 1,
                    "shrinkB": 0,
                },
            )
        else:
            unnamed.append(category)
    return unnamed


def _inside(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, name: str
) -> tuple[float, float] | None:
    """Centre (points) of the roomiest box between `low` and `high` that holds `name`, or None."""
    need_x, need_y = text_width(name) + 6, FONT * 1.3
    best, found = need_y, None
    for start in range(len(x)):
        stop = int(np.searchsorted(x, x[start] + need_x))
        if stop >= len(x):
            break
        floor, ceiling = low[start : stop + 1].max(), high[start : stop + 1].min()
        if ceiling - floor > best:
            best, found = ceiling - floor, (x[start] + need_x / 2, (floor + ceiling) / 2)
    return found


def _beside(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, top: np.ndarray, name: str
) -> tuple[float, float, float] | None:
    """For a spike: a point on it and the signed gap to a free place for `name`, in points."""
    at = int((high - low).argmax())
    middle, need = (low[at] + high[at]) / 2, text_width(name) + 14
    end = int(np.searchsorted(x, x[at], side="right"))
    while end < len(x) - 1 and high[end] - low[end] > 0.5 * (high[at] - low[at]):
        end += 1
    sides = ((x[at], -8), (x[end] if end < len(x) else x[-1], 8))
    for edge, gap in sides if high[at] - low[at] >= FONT else ():
        left, right = (edge - need, edge) if gap < 0 else (edge, edge + need)
        near = (x > left) & (x < right)
        if left > x[0] and right < x[-1] and (top[near] < middle - 0.7 * FONT).all():
            return edge, middle, gap
    return None


def _phases(ax: Axes, runs: Sequence[tuple[str, int, int]], bottom: float) -> None:
    """A band along the top, a stripe a run, named where that fits, else in a key above."""
    left, right = ax.get_xlim()
    point = points(ax)[0] / (right - left)
    across = ax.get_xaxis_transform()
    roomy = {p for p, start, stop in runs if (stop - start) * point >= text_width(p, FONT - 1)}
    for phase, start, stop in runs:
        ground, ink = phase_look(phase)
        ax.axvspan(start, stop, bottom, 1.0, color=ground, lw=0)
        if (stop - start) * point >= text_width(phase, FONT - 1):
            ax.text(
                (start + stop) / 2,
                (1 + bottom) / 2 - 0.002,
                phase,
                ha="center",
                va="center",
                fontsize=FONT - 1,
                color=ink,
                transform=across,
            )
        if len(runs) <= 12:
            ax.axvline(start, 0, bottom, color=FAINT, lw=0.6, zorder=0.5)
    unnamed = [p for p in dict.fromkeys(p for p, _, _ in runs) if p not in {*roomy, "setup"}]
    if unnamed:
        legend(
            ax,
            [Patch(facecolor=phase_look(p)[0], label=p) for p in unnamed],
            loc="lower right",
            anchor=(1.0, 1.0),
        )


def _thin_spike(ax: Axes, events: np.ndarray, totals: np.ndarray, at: int) -> int | None:
    """The bytes from which the spike at `at` rises, where it is too thin to be seen as one."""
    if not 0 < at < len(events) - 1:
        return None
    point = points(ax)[0] / (ax.get_xlim()[1] - ax.get_xlim()[0])
    wide = (events[at + 1] - events[at]) * point >= 3
    return None if wide else int(max(totals[at - 1], totals[at + 1]))


def _peak(ax: Axes, measurement: Measurement, events: np.ndarray, live: np.ndarray) -> None:
    at = int(live.sum(axis=1).argmax())
    x, y = events[at], live[at].sum()
    on_the_right = x < (ax.get_xlim()[0] + ax.get_xlim()[1]) / 2
    if foot := _thin_spike(ax, events, live.sum(axis=1), at):
        ax.vlines(x, foot, y, color=INK, lw=1.4, zorder=4)  # else the ring seems to hang in the air
    ax.plot([x], [y], "o", ms=5, mfc="white", mec=INK, mew=1.4, zorder=5, clip_on=False)
    ax.annotate(
        f"peak {gb(measurement.metered_peak_bytes)}",
        (x, y),
        (8 if on_the_right else -8, 4),
        textcoords="offset points",
        ha="left" if on_the_right else "right",
        va="bottom",
        fontsize=FONT,
        fontweight="bold",
        color=INK,
        zorder=6,
    )
