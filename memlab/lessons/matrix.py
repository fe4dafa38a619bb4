"""The table of techniques and trainers, with its reasons, as a lesson shows it."""

from __future__ import annotations

from memlab.experiments.rules import TECHNIQUES, TRAINERS


class Matrix:
    """`rules.TECHNIQUES` by `rules.TRAINERS`: a table, and under it a line for each "no"."""

    @property
    def cells(self) -> list[list[str]]:
        """The header, then a line a technique."""
        lines = [[t.title, *(t.cell(name) for name in TRAINERS)] for t in TECHNIQUES]
        return [["", *TRAINERS.values()], *lines]

    @property
    def reasons(self) -> dict[tuple[str, str], str]:
        """(technique, its trainers) -> why it is refused there, or has nothing to do."""
        found: dict[tuple[str, str], list[str]] = {}
        for technique in TECHNIQUES:
            for name, why in {**technique.never, **technique.idle}.items():
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

    def _repr_markdown_(self) -> str:
        lines = [f"| {' | '.join(line)} |" for line in self.cells]
        lines.insert(1, "|---" * (1 + len(TRAINERS)) + "|")
        why = [f"* **{title}**, {names}: {why}" for (title, names), why in self.reasons.items()]
        return "\n".join([*lines, "", *why])


def show_matrix() -> Matrix:
    """Which technique goes with which trainer, and why not."""
    return Matrix()
