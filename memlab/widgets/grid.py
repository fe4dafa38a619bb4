"""A grid of simulated peaks, shipped with a lesson so that its slider answers at once.

The file is JSON: the axes, then one line a setting with the bytes at the metered peak by category.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memlab.errors import MemlabError
from memlab.instruments.measurement import CATEGORIES, Measurement

Value = int | float | str | bool
Setting = dict[str, Value]


@dataclass(frozen=True)
class Grid:
    """Peaks in bytes by category over every combination of the axes' values.

    `values` maps `key(setting)` to bytes in the order of CATEGORIES; their sum is the metered
    peak. `about` says what was simulated (recipe, versions).
    """

    axes: Mapping[str, Sequence[Value]]
    values: Mapping[str, Sequence[int]]
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [s for s in self.settings() if self.key(s) not in self.values]
        if missing:
            raise ValueError(f"Grid: no value for {missing[0]} (and {len(missing) - 1} more)")

    def settings(self) -> Iterator[Setting]:
        """Every combination, the last axis fastest."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def key(self, setting: Mapping[str, Value]) -> str:
        """The name of a setting in `values`: its values in the order of the axes, as JSON."""
        return json.dumps([setting[axis] for axis in self.axes])[1:-1]

    def at(self, setting: Mapping[str, Value]) -> dict[str, int]:
        """Bytes by category at the metered peak of `setting`. Raises KeyError off the grid."""
        return dict(zip(CATEGORIES, self.values[self.key(setting)], strict=True))

    def peak(self, setting: Mapping[str, Value], *, along: str) -> tuple[int, bool]:
        """Metered peak in bytes of a setting that may lie between the steps of the axis `along`.

        The second value says whether it is on the grid; else the peak is interpolated linearly
        between its neighbours. Raises ValueError beyond the axis' first or last step.
        """
        steps = sorted(value for value in self.axes[along] if isinstance(value, int | float))
        value = setting[along]
        if value in steps:
            return sum(self.at(setting).values()), True
        if not isinstance(value, int | float) or not steps[0] < value < steps[-1]:
            raise ValueError(
                f"{along}={value!r} is beyond the grid; give {steps[0]} to {steps[-1]}"
            )
        above = next(i for i, step in enumerate(steps) if step > value)
        near = steps[above - 1 : above + 1]
        peaks = [sum(self.at({**setting, along: step}).values()) for step in near]
        return round(float(np.interp(value, near, peaks))), False

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{len(v)} x {k}' for k, v in self.axes.items())})"

    @classmethod
    def simulate(
        cls,
        axes: Mapping[str, Sequence[Value]],
        measure: Callable[[Setting], Measurement],
        about: Mapping[str, str] | None = None,
    ) -> Grid:
        """Measures every combination with `measure(setting)`."""
        names = list(axes)
        settings = [dict(zip(names, v, strict=True)) for v in itertools.product(*axes.values())]
        values = {json.dumps(list(s.values()))[1:-1]: _by_category(measure(s)) for s in settings}
        return cls({k: tuple(v) for k, v in axes.items()}, values, about or {})

    def differences(
        self, measure: Callable[[Setting], Measurement], *, sample: int | None = None, seed: int = 0
    ) -> list[str]:
        """Measures all again, or a seeded sample; returns a line a setting that has changed."""
        settings = list(self.settings())
        if sample is not None:
            settings = random.Random(seed).sample(settings, min(sample, len(settings)))
        found = []
        for setting in settings:
            was, now = tuple(self.values[self.key(setting)]), _by_category(measure(setting))
            if was != now:
                found.append(f"{setting}: recorded {sum(was)} B {was}, now {sum(now)} B {now}")
        return found

    def save(self, path: str | Path) -> None:
        """Writes the grid, one setting a line, so that a change shows which one moved."""
        lines = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(list(v))}" for k, v in self.values.items()
        )
        axes = json.dumps({k: list(v) for k, v in self.axes.items()})
        Path(path).write_text(
            f'{{\n "axes": {axes},\n "categories": {json.dumps(CATEGORIES)},\n'
            f' "about": {json.dumps(dict(self.about))},\n "values": {{\n{lines}\n }}\n}}\n',
            encoding="utf-8",
        )

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """Reads a saved grid. Raises MemlabError where the file is missing or no grid."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if tuple(data["categories"]) != CATEGORIES:
                raise ValueError(f"its categories are {data['categories']}")
            values = {k: tuple(int(n) for n in v) for k, v in data["values"].items()}
            return cls({k: tuple(v) for k, v in data["axes"].items()}, values, data["about"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise MemlabError(f"{path} holds no grid of peaks ({error}): fetch it again") from None


def _by_category(m: Measurement) -> tuple[int, ...]:
    return tuple(m.by_category[c] for c in CATEGORIES)
