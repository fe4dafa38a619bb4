"""Recipes from command-line options."""

import argparse
from typing import Any

from memlab.experiments import Recipe
from memlab.experiments.recipe import switch_types

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
NONE = ("none", "null")


def base_recipe(options: argparse.Namespace, base: str, **switches: Any) -> Recipe:
    """`Recipe.off` or `Recipe.defaults` with the model, trainer, data and sizes of the options,
    then `switches`. Raises ValueError for a max_length of another type, and as `Recipe.of`."""
    named = {
        "model": options.model,
        "trainer": options.trainer,
        "dataset": options.dataset,
        "per_device_train_batch_size": options.batch_size,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if options.max_length is not None:
        types = switch_types()["max_length"]
        given["max_length"] = parse_value("max_length", options.max_length, types)
    return getattr(Recipe, base)(**{**given, **switches})


def parse_switches(texts: list[str]) -> dict[str, Any]:
    """Switches of `name=value` texts, each value read by its switch's type.

    A name that no recipe has is passed on as it is: the recipe refuses it, with those it knows.
    Raises ValueError for a text without "=", for a switch given twice, or a value of another type.
    """
    types = switch_types()
    switches: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {text!r}: give SWITCH=VALUE, such as loss_type=chunked_nll")
        if name in switches:
            raise ValueError(f"--set {name} is given twice: {switches[name]!r} and {value!r}")
        switches[name] = parse_value(name, value, types.get(name, (str,)))
    return switches


def parse_value(name: str, text: str, types: tuple[type, ...]) -> Any:
    """`text` as the first of `types` that it spells. Raises ValueError where it spells none."""
    lower = text.lower()
    if type(None) in types and lower in NONE:
        return None
    if bool in types and lower in TRUE + FALSE:
        return lower in TRUE
    for number in (int, float):
        if number in types:
            try:
                return number(text)
            except ValueError:
                pass
    if str in types:
        return text
    spellings = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        type(None): "none",
    }
    raise ValueError(f"{name}={text!r}: give {' or '.join(spellings[kind] for kind in types)}")
