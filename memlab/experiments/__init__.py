"""Recipes of training runs, and what they measure."""

from memlab.experiments.measuring import Comparison, compare, measure
from memlab.experiments.recipe import Recipe
from memlab.experiments.recordings import price, recorded

__all__ = ["Comparison", "Recipe", "compare", "measure", "price", "recorded"]
