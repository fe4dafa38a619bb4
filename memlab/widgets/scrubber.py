"""Drag through a training step: what is alive at each moment."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from memlab.instruments.measurement import CATEGORIES, Measurement, Sample
from memlab.widgets.figures import bare, points, series, text_width, timeline
from memlab.widgets.live import Live, described
from memlab.widgets.show import WIDTH, columns
from memlab.widgets.style import FONT, HATCH, INK, LOOKS, gb


class Scrub(Live):
    """A timeline with a cursor, and the bytes alive there by category; made by `scrub`."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self.events, self.live = series(measurement)
        at = int(self.live.sum(axis=1).argmax())
        self.slider = ipywidgets.IntSlider(
            value=at,
            min=0,
            max=len(self.events) - 1,
            description="moment",
            continuous_update=False,
            readout=False,
            style=described(["moment"]),
            layout={"width": "52em", "max_width": "100%"},
        )
        super().__init__([self.slider], (WIDTH, 2.9))
        self.slider.observe(self.redraw, names="value")

    @property
    def sample(self) -> Sample:
        """The moment under the cursor."""
        return self.measurement.timeline[self.slider.value]

    def ground(self) -> None:
        return None  # the timeline never changes

    def draw_ground(self) -> None:
        self._ax = self.figure.add_axes((0.066, 0.12, 0.6, 0.76))
        timeline(self._ax, self.measurement)

    def draw_over(self) -> Sequence[Artist]:
        cursor = self._ax.axvline(self.sample.event, color=INK, lw=0.8)
        return [cursor, self._bars()]

    def _bars(self) -> Axes:
        """One bar a category that is ever alive, on a scale that stays the same over the step."""
        ax = self.figure.add_axes((0.79, 0.12, 0.2, 0.76))
        bare(ax)
        ever = [i for i in range(len(CATEGORIES)) if self.live[:, i].any()]
        width = points(ax)[0]
        ax.set_xlim(0, int(self.live.max()) * width / (width - text_width("00.00")))
        ax.set_ylim(len(ever) - 0.4, -0.6)
        for y, i in enumerate(ever):
            look, n = LOOKS[CATEGORIES[i]], self.sample.bytes[i]
            ax.barh(y, n, 0.6, color=look.colour, hatch=look.hatch, edgecolor=HATCH, lw=0)
            ax.annotate(
                gb(n, unit=False),
                (n, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=FONT - 0.5,
                color=INK,
            )
        ax.set_yticks(range(len(ever)), [LOOKS[CATEGORIES[i]].name for i in ever])
        ax.tick_params(axis="y", length=0, labelsize=FONT - 0.5, labelcolor=INK)
        ax.set_title(
            f"{self.sample.phase}: {gb(self.sample.total)}",
            loc="left",
            fontsize=FONT + 1,
            fontweight="bold",
            color=INK,
            pad=8,
        )
        return ax

    def says(self) -> str:
        parts = ", ".join(
            f"{LOOKS[c].name} {gb(n, unit=False)}"
            for c, n in zip(CATEGORIES, self.sample.bytes, strict=True)
            if n
        )
        where = f"In {self.sample.phase}, at event {self.sample.event}"
        return f"{where}: {gb(self.sample.total)} alive ({parts})."

    def table(self) -> str:
        """The largest moment of each phase, by category."""
        tops = {}
        for sample in self.measurement.timeline:
            if sample.phase not in tops or sample.total > tops[sample.phase].total:
                tops[sample.phase] = sample
        ever = [i for i in range(len(CATEGORIES)) if self.live[:, i].any()]
        lines = [["GB at most in", *tops]]
        lines += [
            [LOOKS[CATEGORIES[i]].name, *(gb(s.bytes[i], unit=False) for s in tops.values())]
            for i in ever
        ]
        return columns([*lines, ["alive", *(gb(s.total, unit=False) for s in tops.values())]])


def scrub(measurement: Measurement) -> Scrub:
    """A slider over a step's moments, from the peak on. Raises ValueError without a timeline."""
    if not measurement.timeline:
        raise ValueError("scrub: this measurement kept no timeline; measure it again")
    return Scrub(measurement)
