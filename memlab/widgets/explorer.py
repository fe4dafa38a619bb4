"""Sliders over simulated peaks: bars by category, and the peak along the slider's axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import ipywidgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.widgets.figures import Row, bare, bars, line, points, scale, text_width
from memlab.widgets.grid import Grid, Setting, Value
from memlab.widgets.live import Live, described
from memlab.widgets.show import WIDTH, columns
from memlab.widgets.style import CURRENT, FAINT, FONT, INK, LOOKS, QUIET, gb

Peaks = Mapping[str, int]  # bytes by category at the metered peak
Reference = Callable[[Setting], int]  # bytes to compare a setting's peak with


class Points(NamedTuple):
    """Where `explore` looks peaks up: the axes' steps, a setting's peak, whether it is known."""

    axes: dict[str, list[Value]]
    at: Callable[[Setting], Peaks]
    known: Callable[[Setting], bool]


class Explore(Live):
    """An interactive figure over settings; made by `explore`."""

    def __init__(
        self,
        points: Points,
        start: Setting,
        labels: Mapping[str, str],
        reference: tuple[str, Reference] | None,
        exact: Callable[[Setting], Measurement] | None,
    ) -> None:
        axes = self.axes = points.axes
        self._at, self._known, self._exact = points.at, points.known, exact
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
        """Simulates the fields' values and shows them too.

        Raises ValueError without an `exact` function, and what that raises.
        """
        if self._exact is None:
            raise ValueError("explore: no exact=... function was given to simulate with")
        setting = {**self.setting, **{axis: field.value for axis, field in self.fields.items()}}
        self.button.disabled, self.status.value = True, "simulating …"
        try:
            self.exactly = (setting, self._exact(setting).by_category)
        finally:
            self.button.disabled = False
            self.describe()
        self.redraw()

    def ground(self) -> Hashable:
        fixed = tuple((axis, v) for axis, v in self.setting.items() if axis != self.along)
        exactly = self.exactly and tuple(self.exactly[0].values())
        return self.along, fixed, exactly, len(self._curve())

    def draw_ground(self) -> None:
        tall = self.figure.get_size_inches()[1]
        self._ax = self.figure.add_axes((0.075, 0.48 / tall, 0.9, 1 - (self._bars + 0.78) / tall))
        self._draw_curve(self._ax)

    def draw_over(self) -> Sequence[Artist]:
        x = self.axes[self.along].index(self.setting[self.along])
        return [*self._mark(x, sum(self._at(self.setting).values()), "o"), self._draw_bars()]

    @property
    def _bars(self) -> float:
        """Inches that the bars take."""
        return 1.45 if self.exactly else 0.95

    def _draw_bars(self) -> Axes:
        rows = [(self._name(self.setting), _row(self._at(self.setting)))]
        if self.exactly:
            rows.append((f"exactly\n{self._exact_name()}", _row(self.exactly[1])))
        names = [self._name({self.along: value}) for value in self.axes[self.along]]
        names += [line for name, _ in rows for line in name.split("\n")]
        widest = max(len(name) for name in names)
        left, tall = 0.03 + 0.0088 * widest, self.figure.get_size_inches()[1]
        box = (left, 1 - (self._bars - 0.3) / tall, 0.985 - left, (self._bars - 0.35) / tall)
        ax = self.figure.add_axes(box)
        bars(ax, rows, limit=self._limit(), names=False)
        return ax

    def _limit(self) -> int:
        """The largest peak in sight, in bytes."""
        exactly = sum(self.exactly[1].values()) if self.exactly else 0
        return max([exactly, *(y for _, y in self._curve()), *self._references()])

    def _references(self) -> list[int]:
        """What is compared with at each step of the axis last moved; none without a reference."""
        if self.reference is None:
            return []
        steps = self.axes[self.along]
        return [self.reference[1]({**self.setting, self.along: value}) for value in steps]

    def _name(self, setting: Setting) -> str:
        return f"{self.labels[self.along]} {setting[self.along]}"

    def _exact_name(self) -> str:
        """The exact setting where it differs from the controls'; else its place on the curve."""
        exact = self.exactly[0] if self.exactly else self.setting
        other = [axis for axis, value in self.setting.items() if exact[axis] != value]
        return ", ".join(f"{self.labels[axis]} {exact[axis]}" for axis in other or [self.along])

    def _curve(self) -> list[tuple[int, int]]:
        """The peak at each known step of the axis last moved: (index of the step, bytes)."""
        settings = [{**self.setting, self.along: value} for value in self.axes[self.along]]
        here = self.setting  # looked up, even when it was not known so far
        known = [(i, s) for i, s in enumerate(settings) if s == here or self._known(s)]
        return [(i, sum(self._at(s).values())) for i, s in known]

    def _draw_curve(self, ax: Axes) -> None:
        steps, curve, limit = self.axes[self.along], self._curve(), self._limit()
        bare(ax)
        ax.set_xlim(-0.4, len(steps) - 0.6)
        ax.set_ylim(0, 1.2 * limit)
        ax.plot(*zip(*curve, strict=True), "-o", color=INK, lw=1.4, ms=3.5, zorder=3)
        self._draw_reference(ax)
        if self.exactly:
            x = _between(steps, self.exactly[0][self.along])
            self._mark(x, sum(self.exactly[1].values()), "D", below=True)
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

    def _draw_reference(self, ax: Axes) -> None:
        """One labelled line; where it changes along the axis, a dashed curve named at its end."""
        values = self._references()
        if not self.reference or not values:
            return
        if len(set(values)) == 1:
            line(ax, self.reference[0], values[0])
            return
        ax.plot(range(len(values)), values, color=QUIET, lw=0.9, ls=(0, (3, 2)), zorder=2)
        highest = int(np.argmax(values))
        ax.annotate(
            self.reference[0],
            (highest, values[highest]),
            (-8 if highest else 8, 0),
            textcoords="offset points",
            ha="right" if highest else "left",
            va="bottom",
            fontsize=FONT - 1,
            color=QUIET,
        )

    def _mark(self, x: float, y: int, marker: str, *, below: bool = False) -> Sequence[Artist]:
        """A point of the curve with its value."""
        look = {"ms": 8, "mfc": CURRENT, "mec": "white", "mew": 1.2, "clip_on": False}
        value = self._ax.annotate(
            gb(y),
            (x, y),
            (0, -9 if below else 8),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=FONT,
            fontweight="bold",
            color=INK,
        )
        return [*self._ax.plot([x], [y], marker, zorder=4, **look), value]

    def says(self) -> str:
        peaks = self._at(self.setting)
        at = ", ".join(f"{self.labels[axis]} {value}" for axis, value in self.setting.items())
        parts = ", ".join(
            f"{LOOKS[c].name} {gb(peaks[c], unit=False)}" for c in CATEGORIES if peaks.get(c)
        )
        text = f"{at}: peak {gb(sum(peaks.values()))} ({parts})."
        if self.reference:
            text += f" {self.reference[0]}: {gb(self.reference[1](self.setting))}."
        if self.exactly:
            exactly, total = self._exact_name(), sum(self.exactly[1].values())
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
    reference: tuple[str, Measurement | int | Reference] | None = None,
    exact: Callable[[Setting], Measurement] | None = None,
) -> Explore:
    """An interactive figure of the peak over settings.

    `source` is a Grid; or a mapping from the values of one axis, named by `axes`, to measurements;
    or a function of a setting, called when a step of `axes` is first visited. Numbers get a slider,
    words a dropdown. `start` is the first setting shown (the first steps otherwise), `labels` are
    what axes are called, `reference` is what to compare with, in bytes or as a function of the
    setting, and `exact(setting)` is what the button "Simulate exactly" calls.
    Raises ValueError for axes that are missing, empty or don't hold `start`.
    """
    points = _points(source, axes)
    first = {k: v[0] for k, v in points.axes.items()} | dict(start or {})
    for axis, value in first.items():
        if value not in points.axes.get(axis, ()):
            raise ValueError(f"explore: start {axis}={value!r} is not in {points.axes}")
    names = {axis: axis for axis in points.axes} | dict(labels or {})
    compared = (reference[0], _compared(reference[1])) if reference else None
    return Explore(points, first, names, compared, exact)


def _compared(reference: Measurement | int | Reference) -> Reference:
    if isinstance(reference, Measurement):
        reference = reference.metered_peak_bytes
    return reference if callable(reference) else lambda _: reference


def _points(source: Any, axes: Any) -> Points:
    if isinstance(source, Grid):
        steps = {axis: list(values) for axis, values in source.axes.items()}
        return Points(steps, source.at, lambda setting: True)
    if isinstance(source, Mapping):
        if not isinstance(axes, str) or not source:
            raise ValueError(
                "explore: a mapping needs axes='name of its keys' and at least one key"
            )
        return _points(Grid.simulate({axes: list(source)}, lambda s: source[s[axes]]), None)
    if not isinstance(axes, Mapping) or not axes or not all(axes.values()):
        raise ValueError(f"explore: a function needs axes={{'name': [values, ...]}}, not {axes!r}")
    seen: dict[tuple[Value, ...], Peaks] = {}

    def at(setting: Setting) -> Peaks:
        key = tuple(setting.values())
        if key not in seen:
            seen[key] = source(setting).by_category
        return seen[key]

    steps = {axis: list(values) for axis, values in axes.items()}
    return Points(steps, at, lambda setting: tuple(setting.values()) in seen)


def _between(steps: Sequence[Any], value: Any) -> float:
    """Where `value` lies along the steps, in steps; for words, the step itself."""
    if value in steps:
        return steps.index(value)
    order = np.argsort(steps)
    return float(np.interp(value, np.array(steps)[order], order))


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
