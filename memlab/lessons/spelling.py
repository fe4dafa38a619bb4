"""A recipe as it is written in TRL, to be pasted; or how to get TRL."""

from __future__ import annotations

from importlib.metadata import version

from memlab.errors import MemlabError
from memlab.experiments import Recipe
from memlab.experiments.trl_spelling import arguments, config_name, done_without


class Spelled:
    """What `in_trl` found: code with highlighting where markdown is shown."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def in_trl(recipe: Recipe, *, over: Recipe | None = None) -> Spelled:
    """The configuration that `recipe.to_trl()` makes, as code for the installed TRL.

    With `over`, only the switches in which the two differ. Comments name what TRL's trainer does
    without. Without TRL, how to get it.
    """
    try:
        spelled = arguments(recipe)
        base = arguments(over) if over else {}
        known = done_without(over) if over else []
    except MemlabError as missing:
        return Spelled(f"# {missing}")
    shown = {
        name: value for name, value in spelled.items() if name not in base or base[name] != value
    }
    lines = [f"    {name}={value!r}," for name, value in shown.items()]
    lines += [f"    # {line}" for line in done_without(recipe) if line not in known]
    return Spelled("\n".join([f"{config_name(recipe)}(  # TRL {version('trl')}", *lines, ")"]))
