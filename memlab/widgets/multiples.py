"""Slots against pad_to_multiple_of: a staircase above, the shapes that are left below."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from memlab.data.max_length import batch_widths
from memlab.widgets.figures import bare, legend, points
from memlab.widgets.live import Live, described
from memlab.widgets.rows import (
    BATCHES,
    MULTIPLES,
    Sets,
    chooser,
    data_sets,
    length_steps,
    percent,
    slider,
)
from memlab.widgets.show import WIDTH, columns, heading
from memlab.widgets.style import FONT, GOAL, HATCH, INK, KEPT, LOST, PADDING, PADDING_HATCH, Look

SHAPES = Look("shapes", "#bdbdbd", "", INK)
LAYERS = {KEPT: "tokens", PADDING: "padding to the longest row", LOST: "added by the multiple"}
EDGES = {PADDING: PADDING_HATCH}
LIMITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Padded(NamedTuple):
    """All batches of a data set, padded to a multiple."""

    multiple: int
    slots: int
    added: float  # slots more than padding to the longest row takes, as a share of those
    shapes: int  # distinct (rows, slots a row) among the batches


def padded_to(lengths: np.ndarray, batch_size: int, multiples: Sequence[int]) -> list[Padded]:
    """What each multiple makes of batches of consecutive rows of these lengths (rows,)."""
    longest, rows = batch_widths(lengths, batch_size)
    kinds, counts = np.unique(longest * (batch_size + 1) + rows, return_counts=True)
    longest, rows = np.divmod(kinds, batch_size + 1)  # of each distinct shape
    least = int(longest @ (rows * counts))
    found = []
    for multiple in multiples:
        width = -(-longest // multiple) * multiple
        slots = int(width @ (rows * counts))
        shapes = len(np.unique(width * (batch_size + 1) + rows))
        found.append(Padded(multiple, slots, slots / least - 1, shapes))
    return found


def largest_within(found: Sequence[Padded], waste: float) -> Padded:
    """The largest multiple that adds at most `waste`, a share of the slots; 1 adds nothing."""
    return max((padded for padded in found if padded.added <= waste), key=lambda p: p.multiple)


class ExploreMultiples(Live):
    """Slots and shapes by multiple; made by `explore_multiples`."""

    def __init__(
        self,
        sets: Mapping[str, np.ndarray],
        batch_size: int,
        max_length: int | None,
        multiple: int,
        multiples: Sequence[int],
        waste: float,
    ) -> None:
        self.sets, self.multiples = sets, sorted({1, multiple, *multiples})
        self._found: dict[Hashable, list[Padded]] = {}
        longest = max(int(rows.max()) for rows in sets.values())
        at = max_length or longest
        style = described(["multiple", "at most added", "rows a batch"])
        self.data = chooser(sets, style)
        self.multiple = slider(self.multiples, multiple, "multiple", style)
        limits = [(percent(limit), limit) for limit in sorted({*LIMITS, waste})]
        self.waste = slider(limits, waste, "at most added", style)
        self.batch_size = slider(sorted({*BATCHES, batch_size}), batch_size, "rows a batch", style)
        steps = length_steps(min(16, longest), longest, at)
        self.max_length = slider(steps, at, "max_length", style)
        moved = [self.data, self.multiple, self.waste, self.batch_size, self.max_length]
        super().__init__(moved, (WIDTH, 4.2))
        for control in moved:
            control.observe(self.redraw, names="value")

    @property
    def found(self) -> list[Padded]:
        """What each multiple does to the chosen data set, batches and max_length."""
        key = (self.data.value, self.batch_size.value, self.max_length.value)
        if key not in self._found:
            lengths = np.minimum(self.sets[str(self.data.value)], self.max_length.value)
            self._found[key] = padded_to(lengths, self.batch_size.value, self.multiples)
        return self._found[key]

    @property
    def best(self) -> Padded:
        """The largest multiple that adds no more than the chosen share."""
        return largest_within(self.found, self.waste.value)

    @property
    def chosen(self) -> Padded:
        """What the slider's multiple does."""
        return self.found[self.multiples.index(self.multiple.value)]

    def ground(self) -> None:
        return None  # axes and their names: what every step has

    def draw_ground(self) -> None:
        tall = self.figure.get_size_inches()[1]
        for bottom, height, name in (
            (1.45, tall - 2.15, "slots"),
            (0.46, 0.8, "distinct\nshapes"),
        ):
            ax = self.figure.add_axes((0.075, bottom / tall, 0.905, height / tall))
            bare(ax)
            ax.set_xlim(-0.5, len(self.multiples) - 0.5)
            style = {"rotation": 0, "ha": "right", "va": "center", "labelpad": 6}
            ax.set_ylabel(name, fontsize=FONT, color=INK, **style)
        self._slots, self._shapes = self.figure.axes
        ticks = [f"{multiple:,}" for multiple in self.multiples]
        self._shapes.set_xticks(range(len(ticks)), ticks)
        self._shapes.tick_params(axis="x", length=0, labelsize=FONT, labelcolor=INK)
        self._shapes.set_xlabel("pad_to_multiple_of", fontsize=FONT, color=INK, labelpad=2)
        looks = [
            Patch(fc=look.colour, hatch=look.hatch, ec=EDGES.get(look, HATCH), label=name)
            for look, name in LAYERS.items()
        ]
        legend(self._slots, looks, loc="upper left", anchor=(0.0, 1 + 26 / points(self._slots)[1]))

    def draw_over(self) -> Sequence[Artist]:
        end = self.multiples.index(self.best.multiple) + 0.5
        drawn = [*self._draw_slots(), *self._draw_shapes()]
        for ax in (self._slots, self._shapes):
            drawn.append(ax.axvline(end, color=GOAL, lw=1.3, ls=(0, (4, 2))))
        drawn.append(self._name_limit(end))
        return [*drawn, heading(self.figure, self._finding())]

    def _draw_slots(self) -> list[Artist]:
        """One step a multiple: tokens, padding to the longest row, and what the multiple adds."""
        ax, found = self._slots, self.found
        slots = np.array([padded.slots for padded in found])
        edges = (0, self._tokens(), slots[0], slots)
        ax.set_ylim(0, 1.25 * slots.max())
        drawn = [
            _steps(ax, low + 0 * slots, high + 0 * slots, look)
            for look, low, high in zip(LAYERS, edges[:-1], edges[1:], strict=True)
        ]
        drawn += [
            _note(ax, i, p.slots, f"+{percent(p.added)}".replace("+<", "<"))
            for i, p in enumerate(found)
            if i
        ]
        return [*drawn, self._mark(ax, self.chosen.slots)]

    def _draw_shapes(self) -> list[Artist]:
        ax = self._shapes
        shapes = np.array([padded.shapes for padded in self.found])
        ax.set_ylim(0, 1.35 * shapes.max())
        drawn = [_steps(ax, 0 * shapes, shapes, SHAPES)]
        drawn += [_note(ax, i, n, f"{n:,}") for i, n in enumerate(shapes)]
        return [*drawn, self._mark(ax, max(self.chosen.shapes, 0.04 * shapes.max()))]

    def _mark(self, ax: Axes, height: float) -> Artist:
        """An outline around the step of the slider's multiple."""
        left = self.multiples.index(self.multiple.value) - 0.5
        return ax.add_patch(Rectangle((left, 0), 1, height, fc="none", ec=INK, lw=2, clip_on=False))

    def _name_limit(self, end: float) -> Artist:
        on_left = end > 2
        return self._slots.annotate(
            f"← at most {percent(self.waste.value)} added",
            (end, 1),
            (-5 if on_left else 5, -2),
            xycoords=self._slots.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if on_left else "left",
            va="top",
            fontsize=FONT,
            color=GOAL,
        )

    def _tokens(self) -> int:
        rows = self.sets[str(self.data.value)]
        return int(np.minimum(rows, self.max_length.value).sum())

    def _finding(self) -> str:
        first, best, limit = self.found[0].shapes, self.best, percent(self.waste.value)
        if best.multiple == 1:
            return f"Every multiple adds more than {limit} to the slots"
        text = f"{best.multiple:,} is the largest multiple that adds at most {limit} to the slots"
        return text if first == best.shapes else f"{text}; {first:,} shapes become {best.shapes:,}"

    def says(self) -> str:
        at, best = self.chosen, self.best
        return (
            f"pad_to_multiple_of {at.multiple:,}, {self.batch_size.value} rows a batch: "
            f"{at.slots:,} slots, {percent(at.added)} more than padding to the longest row; "
            f"distinct shapes: {at.shapes:,}. The largest multiple that adds at most "
            f"{percent(self.waste.value)} is {best.multiple:,}: {best.slots:,} slots, distinct "
            f"shapes: {best.shapes:,}."
        )

    def table(self) -> str:
        lines = [["multiple", "slots", "added", "shapes", ""]]
        for padded in self.found:
            cells = [f"{padded.multiple:,}", f"{padded.slots:,}", percent(padded.added)]
            mark = f"< largest within {percent(self.waste.value)}" if padded == self.best else ""
            lines.append([*cells, f"{padded.shapes:,}", mark])
        return columns(lines)


def _steps(ax: Axes, low: np.ndarray, high: np.ndarray, look: Look) -> Artist:
    """A band of steps, one a multiple, each one unit wide."""
    edges = np.arange(len(low) + 1) - 0.5
    low, high = (np.append(side, side[-1]) for side in (low, high))
    style = {"fc": look.colour, "hatch": look.hatch, "ec": EDGES.get(look, HATCH), "lw": 0}
    return ax.fill_between(edges, low, high, step="post", **style)


def _note(ax: Axes, x: float, y: float, text: str) -> Artist:
    """A number above a step."""
    style = {"ha": "center", "fontsize": FONT - 0.5, "color": INK}
    return ax.annotate(text, (x, y), (0, 3), textcoords="offset points", **style)


def explore_multiples(
    lengths: Sets,
    *,
    batch_size: int = 4,
    max_length: int | None = None,
    multiple: int = 8,
    multiples: Sequence[int] = MULTIPLES,
    waste: float = 0.02,
) -> ExploreMultiples:
    """An interactive staircase: slots of a whole data set against pad_to_multiple_of.

    `lengths` are tokens a row, or several data sets by name; consecutive rows, cut to `max_length`
    (None: not at all), make batches of `batch_size`, padded to their longest row and on to the
    multiple. One batch's lengths alone give that batch's staircase. Names the largest of
    `multiples` that adds at most `waste` to the slots, as a share of those without a multiple.
    Raises ValueError for lengths that are empty or below 1, sizes below 1, a negative waste;
    TypeError for lengths that are no integers.
    """
    sets = data_sets("explore_multiples", lengths)
    sizes = {"batch_size": batch_size, "max_length": max_length, "multiple": multiple}
    sizes |= {"multiples": min(multiples, default=1)}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"explore_multiples: {name}={value}; give 1 or more")
    if waste < 0:
        raise ValueError(f"explore_multiples: waste={waste}; give a share, 0 or more")
    return ExploreMultiples(sets, batch_size, max_length, multiple, multiples, waste)
