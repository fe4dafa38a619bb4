"""The lessons that came with memlab: where they are, and a copy of them in a user's folder."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import MemlabError

MANIFEST = ".memlab-series.json"  # what copy_series wrote: relative path -> SHA-256
FOR_TEACHERS = ("INSTRUCTORS.md",)  # holds answers, so it goes with the solutions
LESSON = re.compile(r"(\d\d)_\w+\.ipynb")
_PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Lesson:
    number: str  # "06"
    path: Path

    @property
    def title(self) -> str:
        """The file's name in words: "chunked cross entropy"."""
        return self.path.stem[len(self.number) :].replace("_", " ").strip()


@dataclass(frozen=True)
class Copied:
    """What copy_series did, by path relative to the folder."""

    written: tuple[str, ...]  # new, or an old copy that nobody had changed
    kept: tuple[str, ...]  # changed by the user, and so left alone
    same: tuple[str, ...]  # already there


def series_folder() -> Path:
    """The wheel's lessons, or the checkout's where memlab is installed from one.

    Raises MemlabError where neither is there.
    """
    for folder in (_PACKAGE / "_lessons", _PACKAGE.parent / "notebooks"):
        if folder.is_dir():
            return folder
    raise MemlabError(
        f"no lessons beside {_PACKAGE}: install memlab again, from a wheel or with pip install -e"
    )


def find_lessons(wanted: Iterable[str] = ()) -> list[Lesson]:
    """The lessons in numerical order: all, or those `wanted` by number or name ("6", "06_chunked").

    Raises ValueError for one that doesn't exist, MemlabError where the series is not installed.
    """
    lessons = [
        Lesson(match[1], path)
        for path in sorted(series_folder().iterdir())
        if (match := LESSON.fullmatch(path.name))
    ]
    chosen = set()
    for name in wanted:
        found = {lesson for lesson in lessons if _is_called(lesson, name)}
        if not found:
            known = ", ".join(lesson.number for lesson in lessons) or "none"
            raise ValueError(f"no lesson {name!r}: the lessons are {known}")
        chosen |= found
    return [lesson for lesson in lessons if not wanted or lesson in chosen]


def _is_called(lesson: Lesson, name: str) -> bool:
    return lesson.number == name.zfill(2) or name in (lesson.path.name, lesson.path.stem)


def copy_series(folder: Path, *, solutions: bool = False) -> Copied:
    """Copy the series into `folder`: without outputs and solutions, which would give answers away.

    With `solutions`, both stay, and the instructors' notes come too. A file that the user changed
    is never overwritten: a hidden manifest holds what was written; an unchanged copy is updated.
    Raises OSError where the folder can't be written, MemlabError where there is no series to copy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    before = _read_manifest(manifest)
    hashes = dict(before)
    done: dict[str, list[str]] = {"written": [], "kept": [], "same": []}
    for name, content in _series(solutions):
        target = folder / name
        here = _sha256(target.read_bytes()) if target.exists() else None
        if here == _sha256(content):
            done["same"].append(name)
        elif here is None or here == before.get(name):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            done["written"].append(name)
        else:
            done["kept"].append(name)
            continue
        hashes[name] = _sha256(content)
    manifest.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    return Copied(**{what: tuple(names) for what, names in done.items()})


def without_answers(notebook: dict) -> dict:
    """The notebook (nbformat 4, as a dict) with no outputs, and no cells tagged "solution"."""
    cells = [
        {**cell, "outputs": [], "execution_count": None} if cell["cell_type"] == "code" else cell
        for cell in notebook["cells"]
        if "solution" not in cell["metadata"].get("tags", ())
    ]
    kept = ("kernelspec", "language_info")  # not widgets' state, nor papermill's record of the run
    metadata = {key: notebook["metadata"][key] for key in kept if key in notebook["metadata"]}
    cells = [
        {**cell, "metadata": {k: v for k, v in cell["metadata"].items() if k not in _RUN_RECORDS}}
        for cell in cells
    ]
    return {**notebook, "cells": cells, "metadata": metadata}


_RUN_RECORDS = ("papermill", "execution", "ExecuteTime")


def _series(solutions: bool) -> Iterable[tuple[str, bytes]]:
    """Each file of the copy: its path relative to the folder, its content."""
    root = series_folder()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        hidden = any(part.startswith((".", "__pycache__")) for part in Path(name).parts)
        if not path.is_file() or hidden or (path.name in FOR_TEACHERS and not solutions):
            continue
        content = path.read_bytes()
        if path.suffix == ".ipynb" and not solutions:
            notebook = without_answers(json.loads(content))
            content = (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
        yield name, content


def _read_manifest(path: Path) -> dict[str, str]:
    """The hashes written last time; without a readable manifest, no file is updated."""
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return hashes if isinstance(hashes, dict) else {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
