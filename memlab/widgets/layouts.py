"""One batch laid out four ways: padded, padded to a multiple, padding-free, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ipywidgets
import numpy as np
from matplotlib.artist import Artist

from memlab.techniques.packing import place
from memlab.widgets.figures import bare
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
from memlab.widgets.slots import boxes, draw_documents, draw_padding, draw_room
from memlab.widgets.style import FONT, INK, gb

TALL, TOP, CAPTION = 4.3, 0.42, 0.29  # inches: the figure, its heading, a layout's caption
ROW = 0.24  # inches at most


class Layout(NamedTuple):
    """Pieces of documents in rows; the slots of a row that hold none are padding."""

    name: str
    documents: np.ndarray  # (P,) of each piece
    row: np.ndarray  # (P,) that it is in
    left: np.ndarray  # (P,) its first slot in that row
    right: np.ndarray  # (P,) the slot after its last
    widths: np.ndarray  # (rows,) slots of each row
    room: int = 0  # tokens that a row could hold, where it needs no slots for them

    @property
    def slots(self) -> int:
        """Slots of all rows."""
        return int(self.widths.sum())

    @property
    def useful(self) -> float:
        """Share of the slots that hold a token."""
        return float((self.right - self.left).sum() / self.slots)

    @property
    def shape(self) -> str:
        """Rows and slots, such as "4 × 512 = 2,048 slots"."""
        rows, slots = len(self.widths), f"{self.slots:,} slots"
        if len(set(self.widths)) == 1 and rows > 1:
            return f"{rows} × {self.widths[0]:,} = {slots}"
        return f"{rows} row{'s' if rows > 1 else ''}, {slots}"


def layouts(lengths: np.ndarray, max_length: int, multiple: int) -> list[Layout]:
    """The four layouts of a batch of rows (B,) in tokens, each cut to `max_length`.

    The packed one is best-fit decreasing ("bfd"); collated padding-free, as packing switches on,
    its rows take a slot a token.
    """
    lengths = np.minimum(lengths, max_length)
    rows, longest = np.arange(len(lengths)), int(lengths.max())
    wide = -(-longest // multiple) * multiple
    starts = np.cumsum(lengths) - lengths
    packed = place(lengths, max_length, "bfd")
    sizes = packed.stops - packed.starts
    before = np.cumsum(sizes) - sizes  # tokens before a piece, in all rows
    row = np.repeat(np.arange(len(packed.offsets) - 1), np.diff(packed.offsets))
    left = before - before[packed.offsets[:-1]][row]
    whole = (rows, rows, 0 * lengths, lengths)
    return [
        Layout("padded", *whole, np.full(len(rows), longest)),
        Layout(f"padded to a multiple of {multiple:,}", *whole, np.full(len(rows), wide)),
        Layout(
            "padding-free", rows, 0 * rows, starts, starts + lengths, lengths.sum(keepdims=True)
        ),
        Layout(
            f"packed into rows of up to {max_length:,}",
            packed.rows,
            row,
            left,
            left + sizes,
            np.bincount(row, sizes).astype(int),
            room=max_length,
        ),
    ]


class ExploreLayouts(Live):
    """A batch in four layouts on one scale; made by `explore_layouts`."""

    def __init__(
        self,
        sets: Mapping[str, np.ndarray],
        batch: int,
        batch_size: int,
        max_length: int | None,
        multiple: int,
        bytes_a_slot: float | None,
    ) -> None:
        self.sets, self.bytes_a_slot = sets, bytes_a_slot
        longest = max(int(rows.max()) for rows in sets.values())
        style = described(["rows a batch"])
        at = max_length or longest
        self.data = chooser(sets, style)
        self.batch = ipywidgets.IntSlider(
            value=batch,
            min=1,
            max=max(batch, 1),
            description="batch",
            continuous_update=False,
            style=style,
            layout={"width": "34em"},
        )
        self.batch_size = slider(sorted({*BATCHES, batch_size}), batch_size, "rows a batch", style)
        self.max_length = slider(
            length_steps(min(16, longest), longest, at), at, "max_length", style
        )
        self.multiple = slider(sorted({*MULTIPLES, multiple}), multiple, "multiple", style)
        self._limit_batches()
        moved = [self.data, self.batch, self.batch_size, self.max_length, self.multiple]
        super().__init__(moved, (WIDTH, TALL))
        for control in moved:
            control.observe(self._moved, names="value")

    def _moved(self, change: Mapping) -> None:
        if change["owner"] in (self.data, self.batch_size):
            self._limit_batches()
        self.redraw()

    def _limit_batches(self) -> None:
        self.batch.max = -(-len(self.sets[str(self.data.value)]) // self.batch_size.value)

    @property
    def lengths(self) -> np.ndarray:
        """The rows of the chosen batch, in tokens, before they are cut."""
        size = self.batch_size.value
        return self.sets[str(self.data.value)][(self.batch.value - 1) * size :][:size]

    @property
    def layouts(self) -> list[Layout]:
        """The chosen batch, four ways."""
        return layouts(self.lengths, self.max_length.value, self.multiple.value)

    def ground(self) -> None:
        return None  # empty axes

    def draw_ground(self) -> None:
        self._ax = self.figure.add_axes((0.012, 0, 0.976, 1))
        bare(self._ax)
        self._ax.set_ylim(TALL, 0)

    def draw_over(self) -> Sequence[Artist]:
        shown, ax = self.layouts, self._ax
        widest = max(int(layout.widths.max()) for layout in shown)
        room = max(layout.room for layout in shown)
        ax.set_xlim(0, max(widest, min(room, 1.1 * widest)))  # much free room runs off the right
        rows = sum(len(layout.widths) for layout in shown)
        each = min(ROW, (TALL - TOP - len(shown) * CAPTION - 0.1) / rows)
        top, high, captions = TOP, 0.86 * each, []
        pieces, padding, free = [], [], []
        for layout in shown:
            captions += self._caption(top, layout)
            tops = top + CAPTION + each * np.arange(len(layout.widths))
            pieces.append(boxes(layout.left, layout.right, tops[layout.row], high))
            filled = np.zeros(len(layout.widths), int)
            np.maximum.at(filled, layout.row, layout.right)
            padding.append(boxes(filled, layout.widths, tops, high))
            free.append(boxes(filled, np.maximum(filled, layout.room), tops, high))
            top += CAPTION + each * len(layout.widths)
        documents = np.concatenate([layout.documents for layout in shown])
        return [
            *draw_room(ax, np.concatenate(free)),
            *draw_padding(ax, np.concatenate(padding)),
            *draw_documents(ax, documents, np.concatenate(pieces)),
            *captions,
            heading(self.figure, self._finding(shown)),
        ]

    def _caption(self, top: float, layout: Layout) -> list[Artist]:
        """The layout's name in bold, then its numbers, above its rows."""
        y = 1 - (top + 0.23) / TALL
        name = self.figure.text(0.012, y, layout.name, fontsize=FONT, fontweight="bold", color=INK)
        after = name.get_window_extent().x1 / self.figure.bbox.width + 0.012
        text = f"{layout.shape}, {self._measures(layout)}"
        return [name, self.figure.text(after, y, text, fontsize=FONT, color=INK)]

    def _measures(self, layout: Layout) -> str:
        useful = f"{percent(layout.useful)} useful"
        if self.bytes_a_slot is None:
            return useful
        return f"{useful}, {gb(layout.slots * self.bytes_a_slot)}"

    def _finding(self, shown: Sequence[Layout]) -> str:
        padded, free = shown[0].slots, shown[2].slots
        if padded == free:
            return "Rows of equal length: nothing is padding, padding-free saves nothing"
        return (
            f"{percent(1 - free / padded)} of the padded batch is padding: "
            f"{padded:,} slots for {free:,} tokens"
        )

    def says(self) -> str:
        shown = self.layouts
        cut = int(np.maximum(self.lengths - self.max_length.value, 0).sum())
        text = f"Batch {self.batch.value}, {len(self.lengths)} rows"
        text += f", {cut:,} tokens lost by max_length {self.max_length.value:,}" if cut else ""
        parts = [f"{layout.name}: {layout.shape}, {self._measures(layout)}" for layout in shown]
        return f"{text}. {'. '.join(parts)}."

    def table(self) -> str:
        lines = [["layout", "rows", "slots", "useful"]]
        for layout in self.layouts:
            cells = [layout.name, str(len(layout.widths)), f"{layout.slots:,}"]
            lines.append([*cells, percent(layout.useful)])
        if self.bytes_a_slot is not None:
            lines[0].append("GB")
            for line, layout in zip(lines[1:], self.layouts, strict=True):
                line.append(gb(layout.slots * self.bytes_a_slot, unit=False))
        return columns(lines)


def explore_layouts(
    lengths: Sets,
    *,
    batch: int = 1,
    batch_size: int = 4,
    max_length: int | None = None,
    multiple: int = 64,
    bytes_a_slot: float | None = None,
) -> ExploreLayouts:
    """An interactive figure of one batch: padded, padded to a multiple, padding-free, packed.

    `lengths` are tokens a row, or several data sets by name; consecutive rows make batches of
    `batch_size`, counted from 1. All layouts hold the same tokens, each row cut to `max_length`
    (None: the longest row's). With `bytes_a_slot`, what a slot costs, each layout also says what
    its slots cost.
    Raises ValueError for lengths that are empty or below 1, a batch that is not there, sizes
    below 1; TypeError for lengths that are no integers.
    """
    sets = data_sets("explore_layouts", lengths)
    sizes = {"batch_size": batch_size, "max_length": max_length, "multiple": multiple}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"explore_layouts: {name}={value}; give 1 or more")
    batches = -(-len(next(iter(sets.values()))) // batch_size)
    if not 1 <= batch <= batches:
        raise ValueError(f"explore_layouts: batch={batch}; give 1 to {batches}")
    return ExploreLayouts(sets, batch, batch_size, max_length, multiple, bytes_a_slot)
