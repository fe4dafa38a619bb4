"""Sliders over simulated peaks: bars by category, and the peak along the slider's axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
import numpy as np

from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.widgets.figures import Row, bare, bars, line, points, scale, text_width
from memlab.widgets.grid import Grid, Setting, Value
from memlab.widgets.live import Live, described
from memlab.widgets.show import WIDTH, columns
from memlab.widgets.style import FAINT, FONT, INK, LOOKS, gb

Peaks = Mapping[str, int]  # bytes by category at the metered peak
CURRENT = "#D55E00"


class Explore(Live):
    """An interactive figure over settings; made by `explore`."""

    def __init__(
        self,
        axes: Mapping[str, Sequence[Value]],
        at: Callable[[Setting], Peaks],
        known: Callable[[Setting], bool],
        start: Setting,
        labels: Mapping[str, str],
        reference: tuple[str, int] | None,
        exact: Callable[[Setting], Measurement] | None,
    ) -> None:
        self.axes, self._at, self._known, self._exact = axes, at, known, exact
        self.reference, self.labels = reference, labels
        self.along = next(iter(axes))
        self.exactly: tuple[Setting, Peaks] | None = None
        style = described([labels[axis] for axis in axes])
        self.controls = {
            axis: _control(axes[axis], start[axis], labels[axis], style) for axis in axes
        }
        self.fields = {
            axis: ipywidgets.IntText(
                value=start[axis], description=labels[axis], style=style, layout={"width": "15em"}
            )
            for axis in axes
            if exact and isinstance(start[axis], int) and not isinstance(start[axis], bool)
        }
        self.button = ipywidgets.Button(
            description="Simulate exactly",
            tooltip="Simulate the values in the fields, on or between the slider's steps",
        )
        self.button.on_click(lambda _: self.guarded(self.simulate))
        extra = [ipywidgets.HBox([*self.fields.values(), self.button])] if exact else []
        super().__init__([*self.controls.values(), *extra], (WIDTH, 3.5))
        for axis, control in self.controls.items():
            control.observe(lambda _, axis=axis: self._moved(axis), names="value")

    @property
    def setting(self) -> Setting:
        """The controls' present values."""
        return {axis: control.value for axis, control in self.controls.items()}

    def _moved(self, axis: str) -> None:
        self.along, self.exactly = axis, None
        if axis in self.fields:
            self.fields[axis].value = self.controls[axis].value
        self.redraw()

    def simulate(self) -> None:
        """Simulates the fields' values and shows them too; raises what that raises."""
        if self._exact is None:
            raise ValueError("explore: no exact=... function was given to simulate with")
        setting = {**self.setting, **{axis: field.value for axis, field in self.fields.items()}}
        self.button.disabled, self.status.value = True, "simulating …"
        try:
            self.exactly = (setting, self._exact(setting).by_category)
        finally:
            self.button.disabled = False
        self.redraw()

    def draw(self) -> None:
        self.figure.clear()
        here = self.setting
        rows = [(self._name(here), _row(self._at(here)))]
        if self.exactly:
            rows.append((f"exactly {self._name(self.exactly[0])}", _row(self.exactly[1])))
        curve = self._curve()
        limit = max([y for _, y in curve] + [row.total for _, row in rows] + [self._reference or 0])
        height = 0.4 + 0.5 * len(rows)
        left = 0.05 + 0.0088 * max(len(label) for label, _ in rows)
        tall = self.figure.get_size_inches()[1]
        ax = self.figure.add_axes(
            (left, 1 - (height - 0.3) / tall, 0.985 - left, (height - 0.4) / tall)
        )
        bars(ax, rows, limit=limit)
        ax = self.figure.add_axes((0.075, 0.52 / tall, 0.9, 1 - (height + 0.95) / tall))
        self._draw_curve(ax, curve, limit)

    @property
    def _reference(self) -> int | None:
        return self.reference[1] if self.reference else None

    def _name(self, setting: Setting) -> str:
        return f"{self.labels[self.along]} {setting[self.along]}"

    def _curve(self) -> list[tuple[int, int]]:
        """The peak at each known step of the axis last moved: (index of the step, bytes)."""
        settings = [{**self.setting, self.along: value} for value in self.axes[self.along]]
        return [(i, sum(self._at(s).values())) for i, s in enumerate(settings) if self._known(s)]

    def _draw_curve(self, ax: Any, curve: list[tuple[int, int]], limit: int) -> None:
        steps = self.axes[self.along]
        bare(ax)
        ax.set_xlim(-0.4, len(steps) - 0.6)
        ax.set_ylim(0, 1.2 * limit)
        ax.plot(*zip(*curve, strict=True), "-o", color=INK, lw=1.4, ms=3.5, zorder=3)
        if self.reference:
            line(ax, *self.reference)
        x = steps.index(self.setting[self.along])
        self._mark(ax, x, dict(curve)[x], "o")
        if self.exactly and all(isinstance(v, int) for v in steps):
            setting, peaks = self.exactly
            order = np.argsort(steps)
            x = float(np.interp(setting[self.along], np.array(steps)[order], order))
            self._mark(ax, x, sum(peaks.values()), "D", below=True)
        every = max(
            1, round(max(text_width(f"{v} ") for v in steps) * len(steps) / points(ax)[0] + 0.5)
        )
        ax.set_xticks(range(0, len(steps), every), [str(v) for v in steps[::every]])
        ax.tick_params(axis="x", length=0, labelsize=FONT - 1, labelcolor=INK)
        ax.set_xlabel(self.labels[self.along], fontsize=FONT, color=INK, labelpad=2)
        ax.set_title("peak", loc="left", fontsize=FONT, color=INK, pad=3)
        ax.spines["bottom"].set_visible(True)
        ax.spines["bottom"].set_color(FAINT)
        scale(ax, 1.15 * limit)

    def _mark(self, ax: Any, x: float, y: int, marker: str, *, below: bool = False) -> None:
        ax.plot([x], [y], marker, ms=8, mfc=CURRENT, mec="white", mew=1.2, zorder=4, clip_on=False)
        ax.annotate(
            gb(y),
            (x, y),
            (0, -9 if below else 8),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=FONT,
            fontweight="bold",
            color=INK,
            zorder=5,
        )

    def says(self) -> str:
        peaks = self._at(self.setting)
        at = ", ".join(f"{self.labels[axis]} {value}" for axis, value in self.setting.items())
        parts = ", ".join(
            f"{LOOKS[c].name} {gb(peaks[c], unit=False)}" for c in CATEGORIES if peaks.get(c)
        )
        text = f"{at}: peak {gb(sum(peaks.values()))} ({parts})."
        if self.exactly:
            exactly, total = self._name(self.exactly[0]), sum(self.exactly[1].values())
            text += f" Simulated exactly, {exactly}: {gb(total)}."
        return text

    def table(self) -> str:
        here = self.setting[self.along]
        steps = self.axes[self.along]
        lines = [[self.labels[self.along], "peak GB", ""]]
        lines += [
            [str(steps[i]), gb(n, unit=False), "<" if steps[i] == here else ""]
            for i, n in self._curve()
        ]
        others = [f"{self.labels[a]} {v}" for a, v in self.setting.items() if a != self.along]
        return "\n".join([*others, columns(lines)])


def explore(
    source: Grid | Mapping[Any, Measurement] | Callable[[Setting], Measurement],
    *,
    axes: Mapping[str, Sequence[Value]] | str | None = None,
    start: Setting | None = None,
    labels: Mapping[str, str] | None = None,
    reference: tuple[str, Measurement | int] | None = None,
    exact: Callable[[Setting], Measurement] | None = None,
) -> Explore:
    """An interactive figure of the peak over settings.

    `source` is a Grid; or a mapping from the values of one axis, named by `axes`, to measurements;
    or a function of a setting, called when a step of `axes` is first visited. Numbers get a slider,
    words a dropdown. `start` is the first setting shown (the first steps otherwise), `labels` are
    what axes are called, `reference` a line to compare with, in bytes, and `exact(setting)` what
    the button "Simulate exactly" calls.
    Raises ValueError for axes that are missing, empty or don't hold `start`.
    """
    if isinstance(source, Grid):
        grid, seen = source, None
    elif isinstance(source, Mapping):
        if not isinstance(axes, str):
            raise ValueError("explore: a mapping needs axes='name of its keys'")
        grid, seen = Grid.simulate({axes: list(source)}, lambda s: source[s[axes]]), None
    else:
        if not isinstance(axes, Mapping):
            raise ValueError("explore: a function needs axes={'name': [values, ...]}")
        grid, seen = None, {}
    steps = {k: list(v) for k, v in (grid.axes if grid else axes).items()}  # type: ignore[union-attr]
    if not steps or not all(steps.values()):
        raise ValueError(f"explore: axes={steps}: give at least one axis with at least one value")
    first = {k: v[0] for k, v in steps.items()} | dict(start or {})
    for axis, value in first.items():
        if value not in steps.get(axis, ()):
            raise ValueError(f"explore: start {axis}={value!r} is not one of {steps.get(axis)}")

    def at(setting: Setting) -> Peaks:
        if grid:
            return grid.at(setting)
        key = tuple(setting.values())
        if key not in seen:
            seen[key] = source(setting).by_category
        return seen[key]

    def known(setting: Setting) -> bool:
        return grid is not None or tuple(setting.values()) in seen

    line = None
    if reference:
        n = reference[1]
        line = (reference[0], n.metered_peak_bytes if isinstance(n, Measurement) else n)
    names = {axis: axis for axis in steps} | dict(labels or {})
    return Explore(steps, at, known, first, names, line, exact)


def _row(peaks: Peaks) -> Row:
    return Row(peaks, sum(peaks.values()))


def _control(values: Sequence[Value], value: Value, label: str, style: dict[str, Any]) -> Any:
    """A slider over numbers, a dropdown over words; both move a step with the arrow keys."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return ipywidgets.SelectionSlider(
            options=list(values),
            value=value,
            description=label,
            continuous_update=False,
            style=style,
            layout={"width": "34em"},
        )
    return ipywidgets.Dropdown(
        options=[(str(v), v) for v in values], value=value, description=label, style=style
    )
