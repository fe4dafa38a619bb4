"""The library's own code, shown in a lesson instead of copied into it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memlab

_CHECKOUT = Path(memlab.__file__).parent.parent


class Code:
    """Source of functions, with highlighting where markdown is shown; made by `show_code`."""

    def __init__(self, parts: list[str], files: list[str]) -> None:
        self.text = "\n\n".join(parts)
        self.files = list(dict.fromkeys(files))

    def __repr__(self) -> str:
        return f"{self.text}\n\nThe rest: {', '.join(self.files)}"

    def _repr_markdown_(self) -> str:
        links = ", ".join(f"[{file}](../{file})" for file in self.files)
        return f"```python\n{self.text}\n```\n\nThe rest: {links}"


def show_code(*parts: Callable[..., Any], first: str = "") -> Code:
    """The source of functions or classes of memlab, without their docstrings, in this order.

    `first` starts each at its first line that holds this text. The link leads to the file in a
    checkout, from its notebooks. Raises TypeError for what has no source of its own, ValueError
    where no line holds `first`.
    """
    return Code([_source(part, first) for part in parts], [_file(part) for part in parts])


def _source(part: Callable[..., Any], first: str) -> str:
    lines = textwrap.dedent(inspect.getsource(part)).splitlines()
    definition: Any = ast.parse("\n".join(lines)).body[0]
    if ast.get_docstring(definition) and len(definition.body) > 1:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    start = next((i for i, line in enumerate(lines) if first in line), None)
    if start is None:
        raise ValueError(f"show_code: no line of {part.__name__} holds {first!r}")
    return textwrap.dedent("\n".join(lines[start:]))


def _file(part: Callable[..., Any]) -> str:
    return Path(inspect.getfile(part)).relative_to(_CHECKOUT).as_posix()
