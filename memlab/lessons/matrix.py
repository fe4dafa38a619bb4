"""The table of techniques and trainers as its tests found it, with the reasons of the rules."""

from __future__ import annotations

import json
from collections.abc import Mapping

from memlab.experiments.recordings import folder
from memlab.experiments.rules import TECHNIQUES, TRAINERS

FILE = "matrix.json"


class Matrix:
    """Techniques by trainers: a table, and under it a line for each "no" and each other switch.

    `found` is technique -> trainer -> cell, as tests/test_matrix.py left it; a cell that no test
    covers is empty.
    """

    def __init__(self, found: Mapping[str, Mapping[str, str]]) -> None:
        lines = [[title, *(row.get(name, "") for name in TRAINERS)] for title, row in found.items()]
        self.cells = [["", *TRAINERS.values()], *lines]  # the header, then a line a technique

    @property
    def reasons(self) -> dict[tuple[str, str], str]:
        """(technique, its trainers) -> why it is refused there, or has nothing to do, or by which
        other switch it is had."""
        found: dict[tuple[str, str], list[str]] = {}
        for technique in TECHNIQUES:
            other = {name: f"by {said}" for name, said in technique.settings.items()}
            for name, why in {**other, **technique.never, **technique.idle}.items():
                found.setdefault((technique.title, why), []).append(TRAINERS[name])
        return {(title, ", ".join(names)): why for (title, why), names in found.items()}

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.cells, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in self.cells
        ]
        why = [f"{title}, {names}: {why}" for (title, names), why in self.reasons.items()]
        return "\n".join([*table, "", *why])

    def table(self) -> str:
        """The cells in Markdown."""
        lines = [f"| {' | '.join(line)} |" for line in self.cells]
        return "\n".join([lines[0], "|---" * (1 + len(TRAINERS)) + "|", *lines[1:]])

    def _repr_markdown_(self) -> str:
        why = [f"* **{title}**, {names}: {why}" for (title, names), why in self.reasons.items()]
        return "\n".join([self.table(), "", *why])


def show_matrix() -> Matrix:
    """Which technique goes with which trainer, by a test of each cell, and why not."""
    return Matrix(json.loads((folder() / FILE).read_text(encoding="utf-8")))
