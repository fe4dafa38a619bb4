"""What interactive figures share: one figure in an image, a spoken sentence, visible errors."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import ipywidgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from memlab.widgets.figures import new_figure
from memlab.widgets.png import png
from memlab.widgets.show import DPI


def described(names: Sequence[str]) -> dict[str, Any]:
    """Style for controls described by `names`: no description is cut off, all start level."""
    return {"description_width": f"{max(8, max(len(n) for n in names)) * 0.62:.1f}em"}


class Live:
    """A figure redrawn when a control moves; subclasses draw into `self.figure` and describe it.

    What stays between steps is the ground, painted once and kept as pixels; what moves is drawn
    over it. That, and no pyplot, keeps a step well below 100 ms.
    Errors in an observer never vanish: they appear as text below the picture and stay in
    `self.failure`.
    """

    def __init__(self, controls: Sequence[ipywidgets.Widget], size: tuple[float, float]) -> None:
        self.figure = new_figure(*size)
        self.figure.set_dpi(1.5 * DPI)  # shown at DPI: sharp on fine screens
        self._painted: Any = None  # the ground's pixels
        self._ground: Hashable = None  # what the pixels show
        self.failure: Exception | None = None
        self.image = ipywidgets.Image(
            format="png", layout={"width": f"{size[0] * DPI:.0f}px", "max_width": "100%"}
        )
        self.status = ipywidgets.HTML()
        self.error = ipywidgets.HTML()
        self.view = ipywidgets.VBox([*controls, self.image, self.status, self.error])
        self.redraw()

    def ground(self) -> Hashable:
        """Equal as long as `draw_ground` would draw the same."""
        raise NotImplementedError

    def draw_ground(self) -> None:
        """Draws what stays into the empty `self.figure`."""
        raise NotImplementedError

    def draw_over(self) -> Sequence[Artist]:
        """Adds what moves to the figure and returns it, lowest first; it is removed once drawn."""
        raise NotImplementedError

    def says(self) -> str:
        """The figure in one sentence."""
        raise NotImplementedError

    def table(self) -> str:
        """The figure's numbers as plain text, the same on every run."""
        raise NotImplementedError

    def redraw(self, _: object = None) -> None:
        """Draws the figure for the controls' present values and puts it into the image."""

        def once() -> None:
            self.image.value = self._picture()
            self.describe()

        self.guarded(once)

    def describe(self) -> None:
        """Puts the figure's sentence below it."""
        self.status.value = f'<div role="status">{html.escape(self.says())}</div>'

    def _picture(self) -> bytes:
        canvas = self.figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        if self._painted is None or self.ground() != self._ground:
            self.figure.clear()
            self.draw_ground()
            canvas.draw()
            self._painted, self._ground = canvas.copy_from_bbox(self.figure.bbox), self.ground()
        canvas.restore_region(self._painted)
        for artist in self.draw_over():
            self.figure.draw_artist(artist)
            artist.remove()
        return png(np.asarray(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")))

    def guarded(self, act: Callable[[], None]) -> None:
        """Runs `act`; what it raises is shown in one line in the widget."""
        self.failure, self.error.value = None, ""
        try:
            act()
        except Exception as failure:
            self.failure = failure
            line = " ".join(f"{type(failure).__name__}: {failure}".split())
            self.error.value = f'<div role="alert" style="color:#b00020">{html.escape(line)}</div>'

    def __repr__(self) -> str:
        return self.table()

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        view = self.view._repr_mimebundle_() or {}
        data = {**view, "image/png": base64.b64encode(self.image.value).decode()}
        data["text/plain"] = self.table()
        return data, {"image/png": {"alt": self.says()}}
