"""Packing: bins of the three strategies side by side, and what a useful token takes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from memlab.data.max_length import batch_widths
from memlab.techniques.packing import STRATEGIES, Placement, place
from memlab.widgets.figures import bare, legend
from memlab.widgets.live import Live, described
from memlab.widgets.rows import (
    Sets,
    chooser,
    data_sets,
    length_steps,
    percent,
    slider,
)
from memlab.widgets.show import WIDTH, columns, heading
from memlab.widgets.slots import boxes, draw_documents, draw_padding, rectangles
from memlab.widgets.style import DOCUMENTS, FONT, HATCH, INK, KEPT, LOST

SHOWN = 24  # bins a strategy, at most
MANY = 150_000  # bins, for which the slider does not go to shorter ones
ROOM = "#ececec"
TALL = 4.75  # inches


class Packed(NamedTuple):
    """What a strategy makes of all rows. `placement` is of the bins that are drawn."""

    strategy: str
    bins: int
    tokens: int  # that are in the bins
    efficiency: float  # tokens in the bins, as a share of the bins' room
    lost: float  # share of all tokens that is cut away
    split: float  # share of all documents that are in several pieces
    placement: Placement


def packed(lengths: np.ndarray, max_length: int, strategy: str) -> Packed:
    """Packs rows of these lengths (rows,), each of at least 1 token, into bins of `max_length`.

    The placement is that of at most SHOWN bins: of the best-fit strategies some evenly spaced
    among all, of "wrapped" the first, for they are as good as any.
    """
    total = int(lengths.sum())
    if strategy == "wrapped":
        ends = np.cumsum(lengths)
        bins, tokens = -(-total // max_length), total
        split = float(((ends - lengths) // max_length != (ends - 1) // max_length).mean())
        enough = int(np.searchsorted(ends, SHOWN * max_length)) + 1
        shown = _bins(place(lengths[:enough], max_length, strategy), np.arange(min(bins, SHOWN)))
    else:
        placement = place(lengths, max_length, strategy)
        bins = len(placement.offsets) - 1
        keeps = strategy == "bfd_split"
        tokens = total if keeps else int(np.minimum(lengths, max_length).sum())
        split = float((lengths > max_length).mean()) if keeps else 0.0
        shown = _bins(placement, np.unique(np.linspace(0, bins - 1, SHOWN).astype(int)))
    efficiency = tokens / (bins * max_length)
    return Packed(strategy, bins, tokens, efficiency, 1 - tokens / total, split, shown)


def _bins(placement: Placement, chosen: np.ndarray) -> Placement:
    """Some bins of a placement."""
    bounds = [placement.offsets[chosen], placement.offsets[chosen + 1]]
    pieces = np.concatenate([np.arange(*pair) for pair in zip(*bounds, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(bounds[1] - bounds[0])])
    rows, starts, stops = (part[pieces] for part in placement[:3])
    return Placement(rows, starts, stops, offsets)


class ExplorePacking(Live):
    """Bins of the three strategies; made by `explore_packing`."""

    def __init__(
        self,
        sets: Mapping[str, np.ndarray],
        max_length: int,
        batch_size: int,
        bytes_a_slot: float | None,
    ) -> None:
        self.sets, self.batch_size, self.bytes_a_slot = sets, batch_size, bytes_a_slot
        self._found: dict[Hashable, tuple[list[Packed], float]] = {}
        longest = max(int(rows.max()) for rows in sets.values())
        most = max(len(rows) for rows in sets.values())
        style = described(["max_length"])
        self.data = chooser(sets, style)
        tokens = max(int(rows.sum()) for rows in sets.values())
        first = min(max(4, tokens // MANY), max_length)
        steps = length_steps(first, max(2 * longest, max_length), max_length)
        self.max_length = slider(steps, max_length, "max_length", style)
        counts = [count for count in _counts() if count < most]
        self.rows = slider(
            [*((f"{n:,}", n) for n in counts), (f"{most:,}", most)], most, "rows", style
        )
        moved = [self.data, self.max_length, self.rows]
        super().__init__(moved, (WIDTH, TALL))
        for control in moved:
            control.observe(self.redraw, names="value")

    @property
    def lengths(self) -> np.ndarray:
        """The first rows of the chosen data set, as many as chosen."""
        return self.sets[str(self.data.value)][: self.rows.value]

    def _numbers(self) -> tuple[list[Packed], float]:
        """What the strategies make of the rows; slots a useful token of padded batches of them."""
        key = (self.data.value, self.max_length.value, self.rows.value)
        if key not in self._found:
            rows, limit = self.lengths, self.max_length.value
            cut = np.minimum(rows, limit)
            longest, count = batch_widths(cut, self.batch_size)
            padded = float(longest @ count / cut.sum())
            bfd, split, wrapped = STRATEGIES
            found = {name: packed(rows, limit, name) for name in (bfd, wrapped)}
            whole = rows.max() <= limit  # nothing to split: the same bins
            again = found[bfd]._replace(strategy=split)
            found[split] = again if whole else packed(rows, limit, split)
            self._found[key] = [found[name] for name in STRATEGIES], padded
        return self._found[key]

    @property
    def packed(self) -> list[Packed]:
        """What each strategy makes of the chosen rows, in the order of STRATEGIES."""
        return self._numbers()[0]

    def ground(self) -> None:
        return None  # axes and names: what every step has

    def draw_ground(self) -> None:
        self._panels: list[Axes] = []
        for i, strategy in enumerate(STRATEGIES):
            left = 0.012 + i * 0.332
            ax = self.figure.add_axes((left, 1.66 / TALL, 0.312, (TALL - 2.68) / TALL))
            style = {"fontsize": FONT + 1, "fontweight": "bold", "color": INK}
            self.figure.text(left, 1 - 0.55 / TALL, strategy, **style)
            self._panels.append(ax)
        colour = DOCUMENTS[0][0]
        looks = [
            Patch(fc=colour, label="document"),
            Patch(fc=colour, hatch="////", ec=HATCH, label="continued from another bin"),
            Patch(fc=ROOM, label="room"),
            Patch(fc="none", label=f"at most {SHOWN} bins are shown"),
        ]
        legend(self._panels[0], looks, loc="upper left", anchor=(0.0, -0.01))
        self._bars = self.figure.add_axes((0.2, 0.06 / TALL, 0.788, 1.06 / TALL))
        self._bars.set_ylim(len(STRATEGIES) + 0.5, -0.5)
        style = {"fontsize": FONT, "color": INK, "va": "center_baseline"}
        for y, name in enumerate(self._costs()):
            height = (0.06 + 1.06 * (1 - (y + 0.5) / (len(STRATEGIES) + 1))) / TALL
            self.figure.text(0.012, height, name, **style)
        style |= {"fontweight": "bold"}
        self.figure.text(0.012, 1.2 / TALL, f"{self._unit()} a useful token", **style)
        for ax in self.figure.axes:
            bare(ax)

    def draw_over(self) -> Sequence[Artist]:
        drawn: list[Artist] = []
        for ax, found in zip(self._panels, self.packed, strict=True):
            drawn += self._caption(ax, found)
            drawn += self._draw_bins(ax, found)
        drawn += self._draw_costs(self._bars)
        return [*drawn, heading(self.figure, self._finding())]

    def _caption(self, ax: Axes, found: Packed) -> list[Artist]:
        """Two lines under the strategy's name."""
        left, top = ax.get_position().x0, 1 - 0.55 / TALL
        return [
            self.figure.text(left, top - down / TALL, text, fontsize=FONT, color=colour)
            for down, text, colour in (
                (0.19, f"{_bins_of(found)}, {percent(found.efficiency)} full", INK),
                (0.37, _fate(found), LOST.colour if found.lost else INK),
            )
        ]

    def _draw_bins(self, ax: Axes, found: Packed) -> list[Artist]:
        """Each bin a row: its documents in colour, then the room that is left."""
        rows, starts, stops, offsets = found.placement
        count, limit = len(offsets) - 1, self.max_length.value
        ax.set_xlim(0, limit)
        ax.set_ylim(max(count, SHOWN // 4), 0)
        bins, sizes = np.arange(count), stops - starts
        bin_of, before = np.repeat(bins, np.diff(offsets)), np.cumsum(sizes) - sizes
        left = before - before[offsets[:-1]][bin_of]
        return [
            *rectangles(ax, boxes(0 * bins, 0 * bins + limit, bins, 0.84), ROOM),
            *draw_documents(
                ax, rows, boxes(left, left + sizes, bin_of, 0.84), continued=starts > 0
            ),
        ]

    def _costs(self) -> dict[str, float]:
        """Slots for each useful token, by layout."""
        found, padded = self._numbers()
        return {f"padded, {self.batch_size} rows a batch": padded} | {
            each.strategy: 1 / each.efficiency for each in found
        }

    def _draw_costs(self, ax: Axes) -> list[Artist]:
        """A bar a layout: slots, or their bytes, for each useful token."""
        slots = np.array(list(self._costs().values()))
        ax.set_xlim(0, 1.12 * slots.max())
        y = np.arange(len(slots)) - 0.33
        drawn = rectangles(ax, boxes(0 * slots, 0 * slots + 1, y, 0.66), KEPT.colour)
        drawn += draw_padding(ax, boxes(0 * slots + 1, slots, y, 0.66))
        style = {"fontsize": FONT, "color": INK, "va": "center_baseline"}
        return drawn + [
            ax.annotate(self._cost(n), (n, i), (5, 0), textcoords="offset points", **style)
            for i, n in enumerate(slots)
        ]

    def _unit(self) -> str:
        return "slots" if self.bytes_a_slot is None else "MB"

    def _cost(self, slots: float) -> str:
        return f"{slots * (1 if self.bytes_a_slot is None else self.bytes_a_slot / 1e6):.2f}"

    def _finding(self) -> str:
        bfd, split, _ = self.packed
        padded, best = (self._cost(n) for n in (self._numbers()[1], 1 / split.efficiency))
        lost = f"bfd loses {percent(bfd.lost)} of the tokens" if bfd.lost else "nothing is lost"
        return f"A useful token takes {best} {self._unit()} packed, {padded} padded; {lost}"

    def says(self) -> str:
        parts = [
            f"{each.strategy}: {_bins_of(each)}, {percent(each.efficiency)} full, {_fate(each)}"
            for each in self.packed
        ]
        costs = ", ".join(f"{name} {self._cost(n)}" for name, n in self._costs().items())
        rows = f"{len(self.lengths):,} rows in bins of {self.max_length.value:,} tokens"
        return f"{rows}. {'. '.join(parts)}. {self._unit()} a useful token: {costs}."

    def table(self) -> str:
        lines = [
            ["strategy", "bins", "full", "tokens lost", "documents split", f"{self._unit()}/token"]
        ]
        for each in self.packed:
            cells = [each.strategy, f"{each.bins:,}", percent(each.efficiency)]
            cells += [percent(each.lost), percent(each.split), self._cost(1 / each.efficiency)]
            lines.append(cells)
        name, padded = next(iter(self._costs().items()))
        lines.append(
            [name, "", percent(1 / padded), percent(self.packed[0].lost), "", self._cost(padded)]
        )
        return columns(lines)


def _bins_of(found: Packed) -> str:
    return f"{found.bins:,} bin{'s' if found.bins > 1 else ''}"


def _fate(found: Packed) -> str:
    """What becomes of tokens and documents."""
    if found.lost:
        return f"{percent(found.lost)} of the tokens lost"
    if found.strategy == "wrapped":
        return f"nothing lost, documents mix, {percent(found.split)} split"
    if not found.split:
        return "nothing lost, no document split"
    return f"nothing lost, {percent(found.split)} of documents split"


def _counts() -> list[int]:
    """Numbers of rows, two to each power of ten."""
    return [digit * 10**power for power in range(1, 7) for digit in (1, 3)]


def explore_packing(
    lengths: Sets,
    *,
    max_length: int = 1024,
    batch_size: int = 4,
    bytes_a_slot: float | None = None,
) -> ExplorePacking:
    """An interactive figure of packing: bins of "bfd", "bfd_split" and "wrapped".

    `lengths` are tokens a row, or several data sets by name, to see what their mix does. All
    numbers come from all rows; the picture shows at most 24 bins a strategy. A bin's room counts
    as slots; "padded" are batches of `batch_size` consecutive rows, each cut to max_length and
    padded to the longest. With `bytes_a_slot`, what a slot costs, a useful token's bytes are shown
    in MB (1e6 bytes) instead of its slots.
    Raises ValueError for lengths that are empty or below 1, and sizes below 1; TypeError for
    lengths that are no integers.
    """
    sets = data_sets("explore_packing", lengths)
    for name, value in {"max_length": max_length, "batch_size": batch_size}.items():
        if value < 1:
            raise ValueError(f"explore_packing: {name}={value}; give 1 or more")
    return ExplorePacking(sets, max_length, batch_size, bytes_a_slot)
