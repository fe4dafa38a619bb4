"""The benchmark of heads as a lesson shows it: one run on a card, its sides beside each other."""

from __future__ import annotations

import html
from typing import Any

from memlab.experiments.benchmarks import benchmarks

COLUMNS = ("ms", "time", "extra MiB", "error of dh", "error of dW")
NONE = "—"


class HeadTimes:
    """One run of the benchmark "head": a table of its trained shape.

    Times are also given as multiples of the bare matrix products', errors of gradients (against
    fp64) as multiples of full logits', and the extra memory is what the peak holds beside the
    inputs and their gradients. Then the time, as such a multiple, of each further shape.
    """

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.further = [name for name in run["shapes"] if name != "trained"]

    @property
    def lines(self) -> list[list[str]]:
        """The header, then a line a side, the fastest first."""
        shapes = self.run["shapes"]
        sides = shapes["trained"]["sides"]
        found = [["", *COLUMNS, *(f"time, {name}" for name in self.further)]]
        for side in sorted(sides, key=lambda side: sides[side]["ratio"]):
            read, full = sides[side], sides["full logits"]["errors"]
            errors = [f"{e / f:.2f}x" for e, f in zip(read.get("errors", ()), full, strict=False)]
            extra = f"{read['extra_mib']:,.0f}" if errors else NONE  # products make no gradients
            further = [shapes[name]["sides"].get(side) for name in self.further]
            found.append(
                [
                    side,
                    f"{read['ms']:.1f}",
                    f"{read['ratio']:.2f}x",
                    extra,
                    *(errors or [NONE, NONE]),
                    *(f"{r['ratio']:.2f}x" if r else NONE for r in further),
                ]
            )
        return found

    @property
    def title(self) -> str:
        """The card, the date, and the shapes."""
        shape, versions = self.run["shapes"]["trained"], self.run["versions"]
        return (
            f"{self.run['device']}, recorded {self.run['date']}, torch {versions['torch']}: "
            f"{shape['rows']:,} rows, {shape['vocab']:,} words, width {shape['width']:,}"
        )

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in self.lines
        ]
        return "\n".join([self.title, *table])

    def _repr_html_(self) -> str:
        header, *lines = ([html.escape(cell) for cell in line] for line in self.lines)
        head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
        body = "".join(
            f'<tr><th scope="row" style="text-align:left">{side}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
            for side, *cells in lines
        )
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def show_head_times() -> HeadTimes:
    """The newest run. Raises IndexError where none was recorded."""
    return HeadTimes(benchmarks("head")[-1])
