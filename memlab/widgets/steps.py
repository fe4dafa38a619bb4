"""Whole steps side by side: one strip a step, one column a phase, all on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memlab.instruments.measurement import CATEGORIES, Measurement, Sample
from memlab.widgets.figures import areas, legend, points
from memlab.widgets.show import WIDTH, Shown, columns
from memlab.widgets.style import FAINT, FONT, HATCH, INK, LOOKS, QUIET, gb, phase_look

PHASES = ("rollout", "reference", "forward", "backward", "optimizer")
WIDTHS = (1.2, 1.0, 1.0, 1.4, 0.7)  # of the columns
LEFTS = tuple(sum(WIDTHS[:at]) for at in range(len(WIDTHS)))
GAP = 0.03  # between columns
STRIP, HEAD, KEY = 0.78, 0.42, 0.42  # inches


def highest(measurement: Measurement) -> dict[str, int]:
    """Live bytes at the highest moment of each phase that the step has, in the order of PHASES."""
    parts = _by_phase(measurement)
    return {phase: max(s.total for s in parts[phase]) for phase in PHASES if phase in parts}


def peak_phase(measurement: Measurement) -> str:
    """The phase of PHASES with the step's highest moment, the first of them."""
    tops = highest(measurement)
    return max(tops, key=lambda phase: tops[phase])


def show_steps(rows: Mapping[str, Measurement], *, title: str = "") -> Shown:
    """Live bytes of several steps, stacked by category, each phase in its column, on one scale.

    A column is as wide for a step of ten operations as for one of a thousand; the micro-batches of
    a phase stand side by side in it. Raises ValueError without rows, or without a timeline.
    """
    if not rows:
        raise ValueError("show_steps: rows is empty; give at least one label and measurement")
    for label, m in rows.items():
        if not m.timeline:
            raise ValueError(f"show_steps: {label} kept no timeline; measure it again")
    limit = max(m.metered_peak_bytes for m in rows.values())
    tall = HEAD + STRIP * len(rows) + KEY

    def draw(figure: Figure) -> None:
        for at, (label, m) in enumerate(rows.items()):
            bottom = KEY + STRIP * (len(rows) - 1 - at)
            ax = figure.add_axes((0.145, bottom / tall, 0.845, (STRIP - 0.1) / tall))
            _strip(ax, label, m, limit)
            if at == 0:
                _names(ax)
        _key(figure, list(rows.values()), KEY / tall)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=FONT + 1, fontweight="bold")

    said = " ".join(
        f"{label}: {gb(m.metered_peak_bytes)} in {peak_phase(m)}." for label, m in rows.items()
    )
    alt = f"Live memory over one step of each, a column a phase, on one scale. {said}"
    return Shown(draw, (WIDTH, tall), table=_table(rows), alt=alt)


def _by_phase(measurement: Measurement) -> dict[str, list[Sample]]:
    """The timeline's samples by phase; what is between phases goes to the one before, or after."""
    parts: dict[str, list[Sample]] = {}
    phase = next((s.phase for s in measurement.timeline if s.phase in PHASES), PHASES[0])
    for sample in measurement.timeline:
        if sample.phase in PHASES:
            phase = sample.phase
        parts.setdefault(phase, []).append(sample)
    return parts


def _strip(ax: Axes, label: str, measurement: Measurement, limit: int) -> None:
    ax.set_xlim(0, LEFTS[-1] + WIDTHS[-1])
    ax.set_ylim(0, 1.12 * limit)
    top: tuple[float, int, int] = (0.0, 0, -1)  # place, bytes beside it, bytes
    parts = _by_phase(measurement)
    for phase, left, width in zip(PHASES, LEFTS, WIDTHS, strict=True):
        inside = left + GAP, left + width - GAP
        if phase not in parts:
            ax.plot(inside, [0, 0], color=FAINT, lw=1.2)
            continue
        x = _places(parts[phase], *inside)
        live = np.array([s.bytes for s in parts[phase]], dtype=np.int64)
        areas(ax, np.append(x, inside[1]), np.append(live, live[-1:], axis=0))
        totals = live.sum(axis=1)
        at = int(totals.argmax())
        if totals[at] > top[2]:
            beside = totals[max(at - 1, 0) : at + 2].min()
            top = float(x[at]), int(beside), int(totals[at])
    _ring(ax, *top)
    _frame(ax, limit)
    ax.text(-0.04, 0.62, label, transform=ax.transAxes, **_text(FONT, INK, "bold"))
    size = gb(measurement.metered_peak_bytes)
    ax.text(-0.04, 0.28, size, transform=ax.transAxes, **_text(FONT - 0.5, INK, "normal"))


def _places(samples: Sequence[Sample], left: float, right: float) -> np.ndarray:
    """Where the samples stand in a column: by event, as if nothing had happened in between."""
    events = np.array([s.event for s in samples])
    steps = np.diff(events, prepend=events[0])
    usual = int(np.median(steps[1:])) if len(steps) > 1 else 1
    steps = np.minimum(steps, 4 * max(usual, 1))  # other phases, between micro-batches
    at = steps.cumsum()
    return left + (right - left) * at / max(int(at[-1]) + usual, 1)


def _text(size: float, colour: str, weight: str) -> dict[str, Any]:
    return {
        "fontsize": size,
        "color": colour,
        "fontweight": weight,
        "ha": "right",
        "va": "center",
        "clip_on": False,
    }


def _ring(ax: Axes, x: float, foot: int, y: int) -> None:
    """Marks the peak, on a line from what is alive beside it: spikes are thin."""
    ax.vlines(x, foot, y, color=INK, lw=1.2, zorder=4, clip_on=False)
    ax.plot([x], [y], "o", ms=5, mfc="white", mec=INK, mew=1.4, zorder=5, clip_on=False)


def _frame(ax: Axes, limit: int) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.set_xticks([])
    every = next((n for n in (0.5, 1, 2, 5, 10, 20, 50) if limit / 1e9 / n <= 4), 100)
    ticks = np.arange(0, limit / 1e9 + 0.01, every if limit > 1e9 else limit / 2e9)
    ax.set_yticks(ticks * 1e9, [f"{t:g}" if limit > 1e9 else "" for t in ticks])
    ax.tick_params(axis="y", length=0, pad=2, labelsize=FONT - 2, labelcolor=QUIET)
    ax.grid(axis="y", color=FAINT, lw=0.5)
    ax.set_axisbelow(True)


def _names(ax: Axes) -> None:
    """A band over the first strip that names the columns."""
    high = points(ax)[1]
    for phase, left, width in zip(PHASES, LEFTS, WIDTHS, strict=True):
        ground, ink = phase_look(phase)
        middle = left + width / 2
        ax.axvspan(
            left + GAP, left + width - GAP, 1 + 4 / high, 1 + 20 / high, fc=ground, clip_on=False
        )
        ax.text(
            middle,
            1 + 12 / high,
            phase,
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="center",
            fontsize=FONT - 0.5,
            color=ink,
        )
    ax.text(-0.004, 1 + 12 / high, "GB", transform=ax.transAxes, **_text(FONT - 2, QUIET, "normal"))


def _key(figure: Figure, shown: Sequence[Measurement], top: float) -> None:
    """The categories that are ever alive, under the strips."""
    ax = figure.add_axes((0.02, 0, 0.97, top))
    ax.axis("off")
    ever = np.max([s.bytes for m in shown for s in m.timeline], axis=0)
    looks = [LOOKS[c] for c, n in zip(CATEGORIES, ever, strict=True) if n]
    patches = [Patch(facecolor=k.colour, hatch=k.hatch, ec=HATCH, label=k.name) for k in looks]
    legend(ax, patches, loc="upper left", anchor=(0.0, 0.72))


def _table(rows: Mapping[str, Measurement]) -> str:
    """GB at the highest moment of each phase, a line a step."""
    tops = {label: highest(m) for label, m in rows.items()}
    lines = [["GB at most in", *PHASES, "peak"]]
    for label, m in rows.items():
        cells = [gb(tops[label][p], unit=False) if p in tops[label] else "" for p in PHASES]
        lines.append([label, *cells, gb(m.metered_peak_bytes, unit=False)])
    return columns(lines)
