"""A waterfall: what each kernel takes off the peak, one after the other, in two modes on one scale.

A grid holds the peaks; its axis `kernels` names the steps, each with all kernels before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import ipywidgets
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memlab.instruments.measurement import CATEGORIES
from memlab.widgets.figures import bare, label, legend, scale
from memlab.widgets.grid import Grid, Setting
from memlab.widgets.live import Live, described
from memlab.widgets.rows import slider
from memlab.widgets.show import WIDTH, Shown, columns, heading
from memlab.widgets.style import FONT, HATCH, INK, LOOKS, QUIET, gb

Peaks = Mapping[str, int]  # bytes by category at the metered peak

NAMES = {"rms_norm": "RMSNorm", "rope": "RoPE", "swiglu": "SwiGLU", "head": "fused\nhead"}
MODES = {False: "without checkpointing", True: "with checkpointing"}

GOAL_SHARE = 0.6  # what is claimed
TALL = 3.3  # inches
GONE: dict[str, Any] = {"facecolor": "white", "edgecolor": QUIET, "lw": 0.9, "ls": (0, (3, 2))}

CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # no line through letters


class Fall(NamedTuple):
    """The peaks of one mode: with nothing on, after each step by name, at the end."""

    start: Peaks
    steps: tuple[tuple[str, int], ...]
    end: Peaks

    @property
    def before(self) -> int:
        """Bytes with no kernel on."""
        return sum(self.start.values())

    @property
    def after(self) -> int:
        """Bytes with all of them."""
        return sum(self.end.values())

    @property
    def share(self) -> str:
        """The change, such as "-53 %"."""
        return percent(self.before, self.after)


def percent(before: int, after: int) -> str:
    """The change in whole percent with a real minus; a tenth where it is below one percent."""
    change = 100 * (after / before - 1)
    digits = 0 if abs(change) >= 1 or change == 0 else 2
    return f"{change:+.{digits}f} %".replace("-", "\N{MINUS SIGN}")


def falls(grid: Grid, max_length: int) -> dict[bool, Fall]:
    """Of each mode (gradient checkpointing off, on). Raises KeyError off the grid."""
    chain = [str(kernels) for kernels in grid.axes["kernels"]]
    chain = [kernels for kernels in chain if kernels == "none" or kernels.startswith("rms_norm")]
    found = {}
    for mode in MODES:
        peaks = [
            grid.at({"gradient_checkpointing": mode, "max_length": max_length, "kernels": kernels})
            for kernels in chain
        ]
        names = [NAMES[kernels.rpartition("+")[2]] for kernels in chain[1:]]
        sums = [sum(peak.values()) for peak in peaks[1:]]
        found[mode] = Fall(peaks[0], tuple(zip(names, sums, strict=True)), peaks[-1])
    return found


def waterfall(ax: Axes, fall: Fall, *, limit: int, title: str) -> None:
    """Both ends stacked by category, and between them what each step takes off. Bytes, in GB."""
    bare(ax)
    ax.set_xlim(-0.6, len(fall.steps) + 1.6)
    ax.set_ylim(0, 1.16 * limit)
    _stack(ax, 0, fall.start, limit)
    _stack(ax, len(fall.steps) + 1, fall.end, limit)
    top = fall.before
    for x, (_, n) in enumerate(fall.steps, start=1):
        ax.plot([x - 1.4, x + 0.4], [top, top], color=QUIET, lw=0.7)
        ax.bar(x, abs(top - n), 0.8, min(top, n), **GONE)
        said = signed_gb(n - top)
        ax.text(x, max(top, n) + 0.015 * limit, said, ha="center", va="bottom", **_text())
        top = n
    ax.plot([len(fall.steps) - 0.4, len(fall.steps) + 0.6], [top, top], color=QUIET, lw=0.7)
    _goal(ax, fall)
    names = ["none", *(name for name, _ in fall.steps), "all"]
    ax.set_xticks(range(len(names)), names, fontsize=FONT - 0.5, color=INK)
    ax.tick_params(axis="x", length=0, pad=3)
    ends = f"{gb(fall.before, unit=False)} → {gb(fall.after)}, {fall.share}"
    ax.set_title(f"{title}: {ends}", loc="left", fontsize=FONT, color=INK, pad=6)
    scale(ax, 1.1 * limit)


def signed_gb(n: int) -> str:
    """Bytes as signed GB: "-7.13", "-0.004" where that is little, "0" where nothing changed."""
    digits = 2 if abs(n) >= 5e6 else 3
    return f"{n / 1e9:+.{digits}f}".replace("-", "\N{MINUS SIGN}") if n else "0"


def _goal(ax: Axes, fall: Fall) -> None:
    """A dashed line where GOAL_SHARE is taken off, named where no bar stands."""
    n = (1 - GOAL_SHARE) * fall.before
    ax.axhline(n, color=QUIET, lw=0.9, ls=(0, (3, 2)), zorder=0.9)
    said = f"\N{MINUS SIGN}{100 * GOAL_SHARE:.0f} %: {gb(n)}"
    ax.annotate(
        said,
        (0.55, n),
        (0, 3),
        textcoords="offset points",
        color=QUIET,
        fontsize=FONT - 1,
        bbox=CLEAR,
    )


def _text() -> dict[str, Any]:
    return {"fontsize": FONT, "color": INK, "bbox": CLEAR}


def _stack(ax: Axes, x: float, peaks: Peaks, limit: int) -> None:
    low = 0
    for category in CATEGORIES:
        if n := peaks.get(category, 0):
            look = LOOKS[category]
            ax.bar(x, n, 0.8, low, color=look.colour, hatch=look.hatch, edgecolor=HATCH, lw=0.6)
            if n > 0.07 * limit:
                label(ax, x, low + n / 2, gb(n, unit=False), look.ink, look.colour)
            low += n
    total = gb(low, unit=False)
    ax.text(x, low + 0.015 * limit, total, ha="center", va="bottom", weight="bold", **_text())


def _draw(figure: Figure, both: Mapping[bool, Fall], limit: int, top: float) -> None:
    """Two panels below `top` inches from the upper edge."""
    tall = figure.get_size_inches()[1]
    for at, (mode, fall) in enumerate(both.items()):
        box = 0.062 + 0.49 * at, 0.72 / tall, 0.44, 1 - (0.72 + top) / tall
        waterfall(figure.add_axes(box), fall, limit=limit, title=MODES[mode])
    ax = figure.add_axes((0.05, 0, 0.94, 0.3 / tall))
    ax.axis("off")
    present = [c for c in CATEGORIES if any(f.start.get(c) or f.end.get(c) for f in both.values())]
    patches = [
        Patch(facecolor=LOOKS[c].colour, hatch=LOOKS[c].hatch, ec=HATCH, label=LOOKS[c].name)
        for c in present
    ]
    taken = Patch(label="taken off", **GONE)
    legend(ax, [*patches, taken], loc="upper left", anchor=(0.0, 1.0))


def _table(both: Mapping[bool, Fall]) -> str:
    first = next(iter(both.values()))
    lines = [["peak GB", *(MODES[mode] for mode in both)]]
    lines.append(["none", *(gb(fall.before, unit=False) for fall in both.values())])
    for at, (name, _) in enumerate(first.steps):
        cells = [gb(fall.steps[at][1], unit=False) for fall in both.values()]
        lines.append([f"+ {' '.join(name.split())}", *cells])
    lines.append(["all", *(fall.share for fall in both.values())])
    return columns(lines)


def _says(both: Mapping[bool, Fall]) -> str:
    said = []
    for mode, fall in both.items():
        top, parts = fall.before, []
        for name, n in fall.steps:
            parts.append(f"{' '.join(name.split())} {signed_gb(n - top)}")
            top = n
        ends = f"{gb(fall.before)} to {gb(fall.after)}, {fall.share}"
        said.append(f"{MODES[mode]}: {ends} ({', '.join(parts)})")
    return "; ".join(said) + "."


def show_waterfall(grid: Grid, max_length: int, *, title: str = "") -> Shown:
    """What each kernel takes off the peak of a step with rows of `max_length` tokens, both modes.

    Raises KeyError for a length that is not on the grid.
    """
    both = falls(grid, max_length)
    limit = max(fall.before for fall in both.values())

    def draw(figure: Figure) -> None:
        _draw(figure, both, limit, 0.62)
        heading(figure, title)

    alt = f"Two waterfalls of the peak, kernel by kernel. {_says(both)}"
    return Shown(draw, (WIDTH, TALL + 0.25), table=_table(both), alt=alt)


class ExploreWaterfall(Live):
    """The waterfalls with a slider of lengths; made by `explore_waterfall`."""

    def __init__(self, grid: Grid, start: int, exact: Callable[[Setting], int] | None) -> None:
        self._grid, self._exact = grid, exact
        style = described(["max_length"])
        lengths = [int(n) for n in grid.axes["max_length"]]
        self.length = slider(lengths, start, "max_length", style)
        self.field = ipywidgets.IntText(
            value=start, description="max_length", style=style, layout={"width": "15em"}
        )
        self.button = ipywidgets.Button(
            description="Simulate exactly", tooltip="Simulate both ends at the length in the field"
        )
        self.button.on_click(lambda _: self.guarded(self.simulate))
        self.exactly = ""
        extra = [ipywidgets.HBox([self.field, self.button])] if exact else []
        super().__init__([self.length, *extra], (WIDTH, TALL))
        self.length.observe(lambda _: self._moved(), names="value")

    def _moved(self) -> None:
        self.field.value, self.exactly = self.length.value, ""
        self.redraw()

    def simulate(self) -> None:
        """Simulates the field's length, none and all kernels.

        Raises ValueError without an `exact` function, and what that raises.
        """
        if self._exact is None:
            raise ValueError("explore_waterfall: no exact=... function was given to simulate with")
        length, said = self.field.value, []
        self.button.disabled, self.status.value = True, "simulating …"
        try:
            for mode, name in MODES.items():
                setting: Setting = {"gradient_checkpointing": mode, "max_length": length}
                before, after = (
                    self._exact({**setting, "use_liger_kernel": on}) for on in (False, True)
                )
                said.append(f"{name} {gb(before)} to {gb(after)}, {percent(before, after)}")
            self.exactly = f" Simulated exactly, max_length {length}: {'; '.join(said)}."
        finally:
            self.button.disabled = False
            self.describe()

    @property
    def _both(self) -> dict[bool, Fall]:
        return falls(self._grid, self.length.value)

    def ground(self) -> Hashable:
        return self.length.value

    def draw_ground(self) -> None:
        both = self._both
        _draw(self.figure, both, max(fall.before for fall in both.values()), 0.36)

    def draw_over(self) -> Sequence[Artist]:
        return []

    def says(self) -> str:
        return f"max_length {self.length.value}, {_says(self._both)}{self.exactly}"

    def table(self) -> str:
        return f"max_length {self.length.value}\n{_table(self._both)}"


def explore_waterfall(
    grid: Grid, *, start: int, exact: Callable[[Setting], int] | None = None
) -> ExploreWaterfall:
    """The waterfalls of a grid over gradient_checkpointing, max_length and kernels, by length.

    `exact(setting)` gives the peak in bytes of a setting of gradient_checkpointing, max_length and
    use_liger_kernel, for the button "Simulate exactly". Raises ValueError for a start off the grid.
    """
    if start not in grid.axes["max_length"]:
        lengths = ", ".join(map(str, grid.axes["max_length"]))
        raise ValueError(f"explore_waterfall: start={start} is not on the grid: give {lengths}")
    return ExploreWaterfall(grid, start, exact)
