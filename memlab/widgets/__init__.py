"""Figures and widgets for the lessons; nothing else imports matplotlib or ipywidgets.

Names load their module when first asked for: `from memlab.widgets import Grid` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Explore": "explorer",
    "Grid": "grid",
    "Predict": "prediction",
    "Readings": "readings",
    "Scrub": "scrubber",
    "Shown": "show",
    "explore": "explorer",
    "predict": "prediction",
    "readings": "readings",
    "scrub": "scrubber",
    "show_bars": "show",
    "show_comparison": "show",
    "show_timeline": "show",
}

if TYPE_CHECKING:
    from memlab.widgets.explorer import Explore, explore
    from memlab.widgets.grid import Grid
    from memlab.widgets.prediction import Predict, predict
    from memlab.widgets.readings import Readings, readings
    from memlab.widgets.scrubber import Scrub, scrub
    from memlab.widgets.show import Shown, show_bars, show_comparison, show_timeline

__all__ = [
    "Explore",
    "Grid",
    "Predict",
    "Readings",
    "Scrub",
    "Shown",
    "explore",
    "predict",
    "readings",
    "scrub",
    "show_bars",
    "show_comparison",
    "show_timeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memlab.widgets' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"memlab.widgets.{_HOMES[name]}"), name)
    return value
