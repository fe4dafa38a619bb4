"""The library's own code, shown in a lesson instead of copied into it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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


def show_code(*parts: Callable[..., Any] | tuple[ModuleType, str], first: str = "") -> Code:
    """The source of functions or classes of memlab, without their docstrings, in this order.

    A kernel, which exists only where its compiler is installed, is given as (module, name).
    `first` starts each at its first line that holds this text. The link leads to the file in a
    checkout, from its notebooks. Raises TypeError for what has no source of its own, ValueError
    where no line holds `first` and for a name that the module's file does not define.
    """
    return Code([_source(part, first) for part in parts], [_file(part) for part in parts])


def _source(part: Callable[..., Any] | tuple[ModuleType, str], first: str) -> str:
    if isinstance(part, tuple):
        module, name = part
        found = _named(module, name)
    else:
        name, found = part.__name__, inspect.getsource(part)
    lines = textwrap.dedent(found).splitlines()
    definition: Any = ast.parse("\n".join(lines)).body[0]
    if ast.get_docstring(definition) and len(definition.body) > 1:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    start = next((i for i, line in enumerate(lines) if first in line), None)
    if start is None:
        raise ValueError(f"show_code: no line of {name} holds {first!r}")
    return textwrap.dedent("\n".join(lines[start:]))


def _named(module: ModuleType, name: str) -> str:
    """The source of a function by its name, also one under a condition that does not hold here."""
    lines = inspect.getsource(module).splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            start = min(part.lineno for part in (node, *node.decorator_list))
            return "\n".join(lines[start - 1 : node.end_lineno])
    raise ValueError(f"show_code: {module.__name__} defines no function {name}")


def _file(part: Callable[..., Any] | tuple[ModuleType, str]) -> str:
    file = inspect.getfile(part[0] if isinstance(part, tuple) else inspect.unwrap(part))
    return Path(file).relative_to(_CHECKOUT).as_posix()
