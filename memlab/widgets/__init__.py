"""Figures and widgets for the lessons; nothing else imports matplotlib or ipywidgets.

Names load their module when first asked for: `from memlab.widgets import Grid` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Explore": "explorer",
    "ExploreLayouts": "layouts",
    "ExploreLengths": "length_explorer",
    "ExploreMultiples": "multiples",
    "ExplorePacking": "bins",
    "ExploreWaterfall": "waterfall",
    "Grid": "grid",
    "Predict": "prediction",
    "Readings": "readings",
    "Scrub": "scrubber",
    "Shown": "show",
    "explore": "explorer",
    "explore_layouts": "layouts",
    "explore_lengths": "length_explorer",
    "explore_multiples": "multiples",
    "explore_packing": "bins",
    "explore_waterfall": "waterfall",
    "predict": "prediction",
    "readings": "readings",
    "scrub": "scrubber",
    "show_bars": "show",
    "show_comparison": "show",
    "show_steps": "steps",
    "show_timeline": "show",
    "show_waterfall": "waterfall",
}

if TYPE_CHECKING:
    from memlab.widgets.bins import ExplorePacking, explore_packing
    from memlab.widgets.explorer import Explore, explore
    from memlab.widgets.grid import Grid
    from memlab.widgets.layouts import ExploreLayouts, explore_layouts
    from memlab.widgets.length_explorer import ExploreLengths, explore_lengths
    from memlab.widgets.multiples import ExploreMultiples, explore_multiples
    from memlab.widgets.prediction import Predict, predict
    from memlab.widgets.readings import Readings, readings
    from memlab.widgets.scrubber import Scrub, scrub
    from memlab.widgets.show import Shown, show_bars, show_comparison, show_timeline
    from memlab.widgets.steps import show_steps
    from memlab.widgets.waterfall import ExploreWaterfall, explore_waterfall, show_waterfall

__all__ = [
    "Explore",
    "ExploreLayouts",
    "ExploreLengths",
    "ExploreMultiples",
    "ExplorePacking",
    "ExploreWaterfall",
    "Grid",
    "Predict",
    "Readings",
    "Scrub",
    "Shown",
    "explore",
    "explore_layouts",
    "explore_lengths",
    "explore_multiples",
    "explore_packing",
    "explore_waterfall",
    "predict",
    "readings",
    "scrub",
    "show_bars",
    "show_comparison",
    "show_steps",
    "show_timeline",
    "show_waterfall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memlab.widgets' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"memlab.widgets.{_HOMES[name]}"), name)
    return value
