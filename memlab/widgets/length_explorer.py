"""What a max_length costs: tokens lost, rows cut, padding and peak memory along one axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import ipywidgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from memlab.data.max_length import Lengths, batch_widths
from memlab.instruments.measurement import Measurement
from memlab.widgets.figures import bare, legend, points, scale, text_width
from memlab.widgets.grid import Grid, Setting, Value
from memlab.widgets.live import Live, described
from memlab.widgets.rows import (
    BATCHES,
    Sets,
    chooser,
    data_sets,
    length_steps,
    percent,
    slider,
)
from memlab.widgets.show import WIDTH, columns, heading
from memlab.widgets.style import (
    CURRENT,
    FAINT,
    FONT,
    GOAL,
    HATCH,
    INK,
    KEPT,
    LOST,
    QUIET,
    Look,
    gb,
)

BATCH = "per_device_train_batch_size"
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
BINS = 64
CURVES = {  # what a share tells -> colour and dashes of its curve
    "of the rows cut": (INK, (0, (1, 1.2))),
    "of the tokens lost": (LOST.colour, "-"),
    (PADDED := "of the slots padding"): (QUIET, (0, (5, 2))),
}


class Cut(NamedTuple):
    """What a max_length costs: shares from 0 to 1; the peak in bytes, None where unknown."""

    rows: float
    tokens: float
    padding: float
    peak: int | None
    simulated: bool  # False: the peak lies between two that were

    @property
    def shares(self) -> tuple[float, float, float]:
        """In the order of CURVES."""
        return self.rows, self.tokens, self.padding


class ExploreLengths(Live):
    """A data set cut at a length; made by `explore_lengths`."""

    def __init__(
        self,
        sets: Mapping[str, np.ndarray],
        start: Setting,
        keep: float,
        max_length: int | None,
        grid: Grid | None,
        exact: Callable[[Setting], Measurement] | None,
    ) -> None:
        self.sets = {name: Lengths(rows) for name, rows in sets.items()}
        self._padded: dict[Hashable, Lengths] = {}
        self.grid, self._exact = grid, exact
        self.exactly: tuple[int, int] | None = None  # max_length, bytes
        axes = dict(grid.axes) if grid else {}
        self._known = sorted(int(step) for step in axes.get("max_length", ()))
        longest = max(lengths.longest for lengths in self.sets.values())
        self.end = max(longest, max_length or 0, *self._known[:1])  # of the axis
        others = [axis for axis in axes if axis not in (BATCH, "max_length")]
        style = described(["keep at least", *others])
        self.data = chooser(sets, style)
        steps = self._steps(*([] if max_length is None else [max_length]))
        shortest = next(iter(self.sets.values())).shortest(keep)
        at = max_length or min((step for step in steps if step >= shortest), default=steps[-1])
        self.max_length = slider(steps, at, "max_length", style)
        shares = [(percent(share), share) for share in sorted({*SHARES, keep})]
        self.keep = slider(shares, keep, "keep at least", style)
        batch_size = int(start[BATCH])
        batches = axes.get(BATCH, [batch_size]) if grid else sorted({*BATCHES, batch_size})
        self.batch = slider(batches, batch_size, "rows a batch", style)
        self.others = {
            axis: ipywidgets.Dropdown(
                options=list(axes[axis]), value=start[axis], description=axis, style=style
            )
            for axis in others
        }
        self.field = ipywidgets.IntText(
            value=min(at, self.lengths.longest),
            description="max_length",
            style=style,
            layout={"width": "19em"},
        )
        self.button = ipywidgets.Button(
            description="Simulate exactly",
            tooltip="Simulate the max_length in the field, up to the longest row",
        )
        self.button.on_click(lambda _: self.guarded(self.simulate))
        moved = [self.data, self.max_length, self.keep, self.batch, *self.others.values()]
        extra = [ipywidgets.HBox([self.field, self.button])] if exact else []
        super().__init__([*moved, *extra], (WIDTH, 4.45 if grid else 3.25))
        for control in moved:
            control.observe(self._moved, names="value")

    def _steps(self, *also: int) -> list[int]:
        """Where the slider stops: the grid's steps and some between, as far as rows go."""
        known = self._known or [min(64, self.end), self.end]
        end = max(known[0], min(known[-1], self.end))
        return length_steps(known[0], end, *also, *(step for step in known if step < end))

    def _moved(self, change: Mapping) -> None:
        owner = change["owner"]
        if owner in (self.max_length, self.data):
            self.field.value = min(self.max_length.value, self.lengths.longest)
        elif owner is self.keep:
            self.field.value = self.shortest
        if owner not in (self.max_length, self.keep):
            self.exactly = None
        self.redraw()

    def simulate(self) -> None:
        """Simulates the field's max_length, for the other controls as they are, and marks it.

        A row has no more tokens than the data set's longest: beyond it the field goes back there.
        Raises ValueError without an `exact` function, and what that raises.
        """
        if self._exact is None:
            raise ValueError("explore_lengths: no exact=... function was given to simulate with")
        self.field.value = min(self.field.value, self.lengths.longest)
        self.button.disabled, self.status.value = True, "simulating …"
        try:
            measured = self._exact({**self.setting, "max_length": self.field.value})
            self.exactly = (self.field.value, measured.metered_peak_bytes)
        finally:
            self.button.disabled = False
            self.describe()
        self.redraw()

    @property
    def lengths(self) -> Lengths:
        """The chosen data set."""
        return self.sets[str(self.data.value)]

    @property
    def padded(self) -> Lengths:
        """The rows as long as their batches of this size make them; sorted once a size."""
        key = (self.data.value, self.batch.value)
        if key not in self._padded:
            longest, rows = batch_widths(self.lengths.in_order, self.batch.value)
            self._padded[key] = Lengths(np.repeat(longest, rows))
        return self._padded[key]

    @property
    def setting(self) -> Setting:
        """The controls' present values, as the grid and `exact` take them."""
        others: Setting = {axis: control.value for axis, control in self.others.items()}  # type: ignore[misc]
        return {**others, BATCH: self.batch.value, "max_length": self.max_length.value}

    @property
    def shortest(self) -> int:
        """The smallest max_length that keeps the chosen share of the tokens."""
        return self.lengths.shortest(self.keep.value)

    def cut(self, max_length: int) -> Cut:
        """What this max_length costs; the peak is that of the batch with the longest row."""
        rows = self.lengths
        return Cut(
            float(rows.cut(max_length) / len(rows.in_order)),
            float(1 - rows.kept(max_length)),
            float(1 - rows.tokens(max_length) / self.padded.tokens(max_length)),
            *self._peak(max_length),
        )

    def _peak(self, max_length: int) -> tuple[int | None, bool]:
        """Bytes, and whether they were simulated; None beyond the grid."""
        longest = min(max_length, self.lengths.longest)
        if self.grid is None or not self._known[0] <= longest <= self._known[-1]:
            return None, False
        return self.grid.peak({**self.setting, "max_length": longest}, along="max_length")

    def ground(self) -> Hashable:
        return self.data.value

    def draw_ground(self) -> None:
        self._tokens, self._shares, *memory = self._panels()
        self._draw_tokens()
        self._draw_shares()
        for ax in memory:
            dot = {"marker": "o", "ls": "", "ms": 5, "mec": INK}
            looks = [Line2D([], [], mfc=INK, label="simulated", **dot)]
            looks += [Line2D([], [], mfc="white", label="interpolated", **dot)]
            legend(ax, looks, loc="lower right", anchor=(1.0, 0.02))
            _name_axis(ax, "peak memory")

    def _panels(self) -> list[Axes]:
        """Axes above each other on one scale of lengths, which stands at the lowest.

        That of the peak, which is there with a grid, is the last and holds no curve.
        """
        tall = self.figure.get_size_inches()[1]
        panels, top, height = [], tall - 0.56, 1.05
        for _ in range(3 if self.grid else 2):
            ax = self.figure.add_axes((0.075, (top - height) / tall, 0.905, height / tall))
            bare(ax)
            ax.set_xlim(0, 1.02 * self.end)
            ax.spines["bottom"].set_visible(True)
            ax.spines["bottom"].set_color(FAINT)
            panels.append(ax)
            top -= height + 0.13
        ticks = MaxNLocator(9, steps=[1, 2, 4, 5, 8, 10]).tick_values(0, self.end)
        ticks = [tick for tick in ticks if 0 <= tick <= self.end]
        panels[-1].set_xticks(ticks, [f"{t:,.0f}" for t in ticks])
        panels[-1].tick_params(axis="x", length=0, labelsize=FONT - 1, labelcolor=INK)
        panels[-1].set_xlabel("tokens a row", fontsize=FONT, color=INK, labelpad=2)
        return panels

    def _draw_tokens(self) -> None:
        """The histogram: tokens, by the length of the row that they are in."""
        rows, ax = self.lengths, self._tokens
        self._at = np.unique(np.linspace(1, self.end, 80).astype(int))  # where curves have points
        self._edges = np.linspace(0, self.end, BINS + 1)
        self._bins = np.minimum(np.searchsorted(self._edges, rows.ascending) - 1, BINS - 1)
        self._heights = self._in_bins(rows.ascending)
        ax.set_ylim(0, 1.12 * self._heights.max())
        self._fill(0 * self._heights, self._heights, KEPT)
        looks = [Patch(fc=KEPT.colour, label="kept")]
        looks += [Patch(fc=LOST.colour, hatch=LOST.hatch, ec=HATCH, label="lost")]
        legend(ax, looks, loc="upper right", anchor=(1.0, 1 + 34 / points(ax)[1]))
        _name_axis(ax, "tokens, by\nlength of row", x=-0.045)

    def _in_bins(self, tokens: np.ndarray) -> np.ndarray:
        """Shares of all tokens (BINS,) of what each row, in ascending order, counts."""
        return np.bincount(self._bins, tokens, BINS) / self.lengths.total

    def _fill(self, low: np.ndarray, high: np.ndarray, look: Look) -> Artist:
        """The histogram between two heights, in one piece: hatching many is slow."""
        edges, low, high = self._edges, *(np.append(h, h[-1]) for h in (low, high))
        style = {"fc": look.colour, "hatch": look.hatch, "ec": HATCH, "lw": 0, "step": "post"}
        return self._tokens.fill_between(edges, low, high, **style)

    def _draw_shares(self) -> None:
        rows, ax, at = self.lengths, self._shares, self._at
        for name, shares in zip(
            CURVES, (rows.cut(at) / len(rows.in_order), 1 - rows.kept(at)), strict=False
        ):
            self._draw_curve(name, shares)
        ax.set_ylim(0, 1.05)
        ax.set_yticks([0, 0.5, 1], ["0", "50", "100 %"])
        ax.tick_params(axis="y", length=0, labelsize=FONT - 1, labelcolor=QUIET)
        ax.grid(axis="y", color=FAINT, lw=0.5)
        _name_axis(ax, "share")

    def _draw_curve(self, name: str, shares: np.ndarray) -> list[Artist]:
        colour, dashes = CURVES[name]
        return [*self._shares.plot(self._at, shares, color=colour, ls=dashes, lw=1.6)]

    def draw_over(self) -> Sequence[Artist]:
        at, rows = self.max_length.value, self.lengths
        cut = self.cut(at)
        padding = 1 - rows.tokens(self._at) / self.padded.tokens(self._at)
        drawn = [self._draw_lost(at), *self._draw_curve(PADDED, padding)]
        for ax in (self._tokens, self._shares):
            drawn += self._lines(ax, at)
        drawn += self._name_lines(at)
        drawn += self._mark_shares(at, cut)
        if self.grid:
            drawn.append(self._draw_memory(at, cut))
        return [*drawn, heading(self.figure, self._finding())]

    def _lines(self, ax: Axes, at: int) -> list[Artist]:
        """Where the share that is wanted is kept, and where the slider stands."""
        wanted = ax.axvline(self.shortest, color=GOAL, lw=1.3, ls=(0, (4, 2)))
        return [wanted, ax.axvline(at, color=INK, lw=1.3)]

    def _draw_memory(self, at: int, cut: Cut) -> Axes:
        """The peak of the batch with the longest row: simulated points, and lines between."""
        under = self.figure.axes[2]
        ax = self.figure.add_axes(under.get_position().bounds, facecolor="none")
        bare(ax)
        ax.set_xlim(under.get_xlim())
        bend = self.lengths.longest  # from there on a cut changes nothing
        steps = {*(s for s in self._known if s < self.end), bend, self.end, self._known[-1]}
        peaks = [(step, *self._peak(step)) for step in sorted(steps) if step <= self.end]
        curve = [(step, n) for step, n, _ in peaks if n is not None]
        top = max(
            [n for _, n in curve] + ([self.exactly[1]] if self.exactly else []), default=10**9
        )
        ax.set_ylim(0, 1.3 * top)
        ax.plot([x for x, _ in curve], [n for _, n in curve], color=INK, lw=1.4)
        simulated = [(step, n) for step, n, simulated in peaks if simulated and n is not None]
        ax.plot([x for x, _ in simulated], [n for _, n in simulated], "o", color=INK, ms=3.5)
        scale(ax, 1.1 * top)
        self._lines(ax, at)
        self._mark_peaks(ax, at, cut, top)
        return ax

    def _draw_lost(self, at: int) -> Artist:
        lost = self._in_bins(np.maximum(self.lengths.ascending - at, 0))
        return self._fill(self._heights - lost, self._heights, LOST)

    def _name_lines(self, at: int) -> list[Artist]:
        """What the two lines are, above the histogram and in it, beside the line with more room."""
        keep = f"{percent(self.keep.value)} kept from {self.shortest:,} on"
        return [
            self._beside(
                self._tokens,
                at,
                1.06,
                f"max_length {at:,}",
                INK,
                across=True,
                left=2 * at > self.end,
            ),
            self._beside(self._tokens, self.shortest, 0.76, keep, GOAL, across=True),
        ]

    def _mark_shares(self, at: int, cut: Cut) -> list[Artist]:
        drawn: list[Artist] = []
        gap = 1.3 * FONT / points(self._shares)[1] * 1.05
        heights = spread(cut.shares, gap, 0.5 * gap, 1.05 - 0.4 * gap)
        for share, y, (name, (colour, _)) in zip(cut.shares, heights, CURVES.items(), strict=True):
            drawn += self._shares.plot([at], [share], "o", color=colour, mec="white", ms=6)
            drawn.append(self._beside(self._shares, at, y, f"{percent(share)} {name}", colour))
        return drawn

    def _mark_peaks(self, ax: Axes, at: int, cut: Cut, top: int) -> None:
        if cut.peak is not None:
            look = {"mfc": CURRENT if cut.simulated else "white", "mec": CURRENT, "mew": 1.6}
            ax.plot([at], [cut.peak], "o", ms=7, zorder=5, **look)
            said = gb(cut.peak) if cut.simulated else f"≈ {gb(cut.peak)}"
            self._beside(ax, at, cut.peak + 0.17 * top, said, INK, weight="bold", left=True)
        if self.exactly:
            x, peak = self.exactly
            ax.plot([x], [peak], "D", ms=7, mfc=CURRENT, mec="white", zorder=6)
            self._beside(ax, x, peak - 0.2 * top, f"exactly {gb(peak)}", INK)

    def _beside(
        self,
        ax: Axes,
        x: float,
        y: float,
        text: str,
        colour: str,
        *,
        across: bool = False,
        weight: str = "normal",
        left: bool = False,
    ) -> Artist:
        """Text beside the vertical line at x, on the right, or the left, where it has room."""
        room = points(ax)[0] / ax.get_xlim()[1]
        need = text_width(text) + 8
        on_left = x * room > need and (left or (ax.get_xlim()[1] - x) * room < need)
        return ax.annotate(
            text,
            (x, y),
            (-6 if on_left else 6, 0),
            xycoords=ax.get_xaxis_transform() if across else "data",
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="center",
            fontsize=FONT,
            fontweight=weight,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )

    def _finding(self) -> str:
        share, shortest = self.keep.value, self.shortest
        longest = self.lengths.longest
        here, whole = self.cut(shortest).peak, self.cut(longest).peak
        if share == 1:
            peak = f", a peak of {gb(whole)}" if whole else ""
            return f"All tokens need max_length {longest:,}{peak}"
        last = percent(1 - share)
        cost = f"cost {gb(whole - here)}" if here and whole else "take longer rows"
        return f"The last {last} of the tokens {cost}: max_length {shortest:,} → {longest:,}"

    def says(self) -> str:
        at = self.max_length.value
        cut = self.cut(at)
        shares = ", ".join(
            f"{percent(share)} {name}" for share, name in zip(cut.shares, CURVES, strict=True)
        )
        text = f"max_length {at:,}, {self.batch.value} rows a batch: {shares}"
        if cut.peak is not None:
            text += f", peak {gb(cut.peak)}{'' if cut.simulated else ' (interpolated)'}"
        text += f". {percent(self.keep.value)} of the tokens are kept from {self.shortest:,} on."
        if self.exactly:
            text += f" Simulated exactly, max_length {self.exactly[0]:,}: {gb(self.exactly[1])}."
        return text

    def table(self) -> str:
        """The smallest max_length for some shares of the tokens, and the costs there."""
        lines = [["tokens kept", "max_length", "rows cut", "padding", "peak GB"]]
        for share in sorted({0.9, 0.95, 0.98, 0.99, 1.0, self.keep.value}):
            at = self.lengths.shortest(share)
            cut = self.cut(at)
            peak = "" if cut.peak is None else gb(cut.peak, unit=False)
            known = "" if cut.peak is None or cut.simulated else "≈ "
            cells = [percent(share), f"{at:,}", percent(cut.rows), percent(cut.padding)]
            lines.append([*cells, known + peak])
        return columns(lines if self.grid else [line[:-1] for line in lines])


def _name_axis(ax: Axes, name: str, *, x: float = -0.066) -> None:
    """What stands on the vertical axis, left of its numbers."""
    ax.set_ylabel(name, fontsize=FONT - 1, color=INK, va="center")
    ax.yaxis.set_label_coords(x, 0.45)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels at `values`: in the same order, `gap` apart, within low to high."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places, floor = [0.0] * len(values), low
    for i in order:
        places[i] = floor = max(values[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    return places


def explore_lengths(
    lengths: Sets,
    *,
    batch_size: int = 4,
    max_length: int | None = None,
    keep: float = 0.98,
    grid: Grid | None = None,
    start: Mapping[str, Value] | None = None,
    exact: Callable[[Setting], Measurement] | None = None,
) -> ExploreLengths:
    """An interactive histogram of row lengths with a cut, and what each max_length costs.

    `lengths` are tokens a row, or several data sets by name; consecutive rows make batches of
    `batch_size`. The sliders start at `max_length` (None: the smallest that keeps `keep`, a share
    of the tokens, rounded up to a step) and at `keep`. `grid` holds simulated peaks over
    "max_length", and perhaps over "per_device_train_batch_size" and others, which become controls
    that start at `start`; a peak between its steps is interpolated and says so. The peak is that
    of the batch with the longest row, to which all its rows are padded. `exact(setting)` is what
    the button "Simulate exactly" calls.
    Raises ValueError for lengths that are empty or below 1, a start that is not in the grid, a
    share outside ]0, 1], `exact` without `grid`; TypeError for lengths that are no integers.
    """
    sets = data_sets("explore_lengths", lengths)
    if not 0 < keep <= 1:
        raise ValueError(f"explore_lengths: keep={keep!r}; give a share above 0 and up to 1")
    if grid is None and exact is not None:
        raise ValueError("explore_lengths: exact needs a grid=... of simulated peaks beside it")
    if grid is not None and "max_length" not in grid.axes:
        raise ValueError(f"explore_lengths: {grid} has no axis max_length")
    first = {axis: values[0] for axis, values in grid.axes.items()} if grid else {}
    first |= {BATCH: batch_size, **(start or {})}
    for axis, values in grid.axes.items() if grid else ():
        if axis != "max_length" and first[axis] not in values:
            raise ValueError(f"explore_lengths: {axis}={first[axis]!r}; give one of {values}")
    return ExploreLengths(sets, first, keep, max_length, grid, exact)
