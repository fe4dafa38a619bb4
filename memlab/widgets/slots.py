"""Drawing token slots: documents in colour, padding grey and hatched, many in one collection."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from memlab.widgets.figures import points, text_width
from memlab.widgets.style import DOCUMENTS, FONT, HATCH, PADDING, PADDING_HATCH

NAMES_AT_MOST = 80  # documents in one picture; more would be read by no one, and take too long


def boxes(left: np.ndarray, right: np.ndarray, top: np.ndarray, height: float) -> np.ndarray:
    """Corners (n, 4, 2) of n rectangles, left to right, from `top` (n,) on by `height`."""
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, top + height, top + height], axis=1)
    return np.stack([x, y], axis=2).astype(float)


def draw_documents(
    ax: Axes,
    documents: np.ndarray,
    corners: np.ndarray,
    *,
    continued: np.ndarray | None = None,
) -> list[Artist]:
    """Pieces of documents (n,) as rectangles (n, 4, 2) in their documents' colours.

    `continued` (n,) marks pieces whose beginning is elsewhere: they are hatched. Where there are
    few and there is room, each carries its document's number, counted from 1. Returns what it drew.
    """
    palette = np.array([colour for colour, _ in DOCUMENTS])
    drawn = rectangles(ax, corners, palette[documents % len(palette)])
    if continued is not None:
        drawn += hatch(ax, corners[continued], "////", HATCH)
    if len(documents) <= NAMES_AT_MOST:
        hatched = np.zeros(len(documents), bool) if continued is None else continued
        drawn += _number(ax, documents, corners, hatched)
    return drawn


def _number(
    ax: Axes, documents: np.ndarray, corners: np.ndarray, hatched: np.ndarray
) -> list[Artist]:
    (wide, high), (left, right), (bottom, top) = points(ax), ax.get_xlim(), ax.get_ylim()
    drawn: list[Artist] = []
    for document, box, lines in zip(documents, corners, hatched, strict=True):
        room = np.ptp(box, axis=0) * [wide / abs(right - left), high / abs(top - bottom)]
        name, size = str(document + 1), min(FONT - 1, 0.8 * room[1])
        if size >= 5 and room[0] > text_width(name, size) + 3:
            ground, ink = DOCUMENTS[document % len(DOCUMENTS)]
            style: dict[str, Any] = {"fontsize": size, "color": ink, "ha": "center"}
            if lines:  # none through the number
                style["bbox"] = {"facecolor": ground, "edgecolor": "none", "pad": 0.5}
            x, y = box.mean(axis=0)
            drawn.append(ax.text(x, y, name, va="center_baseline", **style))
    return drawn


def draw_padding(ax: Axes, corners: np.ndarray) -> list[Artist]:
    """Slots without a token: rectangles (n, 4, 2), grey and hatched; empty ones are left out."""
    corners = corners[np.ptp(corners[:, :, 0], axis=1) > 0]
    drawn = rectangles(ax, corners, PADDING.colour)
    return drawn + hatch(ax, corners, PADDING.hatch, PADDING_HATCH)


def draw_room(ax: Axes, corners: np.ndarray) -> list[Artist]:
    """Room that takes no slots: rectangles (n, 4, 2), a dashed outline; empty ones are left out."""
    corners = corners[np.ptp(corners[:, :, 0], axis=1) > 0]
    return rectangles(ax, corners, "none", edgecolor="#a0a0a0", linestyle=(0, (3, 2)))


def rectangles(ax: Axes, corners: np.ndarray, colours: Any, **look: Any) -> list[Artist]:
    """Rectangles (n, 4, 2) of one colour or of a colour each, with a white edge."""
    look = {"edgecolor": "white", "linewidth": 0.5, **look}
    shown = PolyCollection(list(corners), facecolor=colours, **look)
    return [ax.add_collection(shown, autolim=False)]


def hatch(ax: Axes, corners: np.ndarray, pattern: str, colour: Any) -> list[Artist]:
    """Hatches rectangles (n, 4, 2) as one path, which is much faster than one by one."""
    if not len(corners):
        return []
    closed = np.concatenate([corners, corners[:, :1]], axis=1).reshape(-1, 2)
    steps = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]
    path = Path(closed, np.tile(steps, len(corners)))
    return [ax.add_patch(PathPatch(path, fc="none", ec=colour, hatch=pattern, lw=0))]
