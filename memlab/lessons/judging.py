"""What an exercise is, and how its answers are judged."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The outcome of one answer; `said` names the mistake where it is a usual one."""

    right: bool
    said: str = ""


@dataclass(frozen=True)
class Exercise:
    """A question, the form of its answer in words and as a test, and how answers are judged.

    `judge` and `reason` compute the right answer by running something each time they are called.
    """

    question: str
    wants: str
    accepts: Callable[[Any], bool]
    judge: Callable[[Any], Finding]
    hint: str
    reason: Callable[[], str]


@dataclass(frozen=True, repr=False)
class Question:
    """An exercise as it is put to the learner."""

    exercise: str
    text: str
    wants: str

    def __repr__(self) -> str:
        return f"{self.exercise}: {self.text}\nAnswer with {self.wants}."

    def _repr_markdown_(self) -> str:
        return f"**{self.exercise}** {self.text}\n\n*Answer with {self.wants}.*"


@dataclass(frozen=True, repr=False)
class Verdict:
    """Whether an answer is right, and why; true where it is."""

    right: bool
    text: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{'right' if self.right else 'not yet'}: {self.text}"

    def _repr_html_(self) -> str:
        mark, colour = ("✓ right", "#00664b") if self.right else ("✗ not yet", "#a34400")
        head = f'<b style="color:{colour}">{mark}:</b>'
        return f'<p role="status">{head} {html.escape(self.text)}</p>'


def plain(answer: Any) -> Any:
    """The Python number in a NumPy scalar or a tensor of shape (); any other answer as it is."""
    return answer.item() if getattr(answer, "shape", None) == () else answer


def is_number(answer: Any) -> bool:
    """A real number that a float holds; True, False, infinity and NaN are none."""
    if not isinstance(answer, Real) or isinstance(answer, bool):
        return False
    try:
        return math.isfinite(answer)
    except OverflowError:  # an int beyond the largest float
        return False


def raised(error: Exception) -> Finding:
    """What to say where the learner's own function raised."""
    return Finding(False, f"Your function raised {type(error).__name__}: {error}.")


def near(
    answer: float, right: float, *, within: float = 0.0, usual: Mapping[float, str] | None = None
) -> Finding:
    """Right within a share of the right answer; else the first usual mistake it is as close to."""
    if abs(answer - right) <= within * abs(right):
        return Finding(True)
    for mistake, said in (usual or {}).items():
        if abs(answer - mistake) <= within * abs(mistake):
            return Finding(False, said)
    return Finding(False)
