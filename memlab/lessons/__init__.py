"""Self-checks for the lessons: every right answer is computed by running, none is stored."""

from __future__ import annotations

from collections import Counter
from typing import Any

from memlab.lessons import apart, chunked, cutting, liger, packed, rounding, start, trainers, where
from memlab.lessons.code import show_code
from memlab.lessons.judging import Exercise, Question, Verdict, plain
from memlab.lessons.spelling import in_trl

__all__ = ["Question", "Verdict", "ask", "check", "in_trl", "show_code"]

EXERCISES: dict[str, Exercise] = {
    **start.EXERCISES,
    **where.EXERCISES,
    **cutting.EXERCISES,
    **apart.EXERCISES,
    **packed.EXERCISES,
    **rounding.EXERCISES,
    **chunked.EXERCISES,
    **liger.EXERCISES,
    **trainers.EXERCISES,
}
_wrong_attempts: Counter[str] = Counter()


def ask(exercise: str) -> Question:
    """The question of an exercise, such as "06b", and the form of answer it wants.

    Raises ValueError for an unknown exercise, as `check` does.
    """
    known = _known(exercise)
    return Question(exercise, known.question, known.wants)


def check(exercise: str, answer: Any) -> Verdict | Question:
    """Whether `answer` is right: a hint on the first wrong attempt, then the reason.

    With `...` in the answer's place, which is how lessons come, the question. The right answer is
    computed now, by measuring or by running the technique. NumPy's numbers and tensors of shape ()
    are numbers too. Raises ValueError for an unknown exercise (naming those of its lesson),
    TypeError for a wrong form of answer.
    """
    known = _known(exercise)
    if answer is ...:
        return ask(exercise)
    value = plain(answer)
    if not known.accepts(value):
        raise TypeError(f"{exercise}: give {known.wants}, not {answer!r}")
    finding = known.judge(value)
    if finding.right:
        _wrong_attempts.pop(exercise, None)
        return Verdict(True, known.reason())
    _wrong_attempts[exercise] += 1
    help_ = known.hint if _wrong_attempts[exercise] == 1 else known.reason()
    return Verdict(False, f"{finding.said} {help_}".strip())


def _known(exercise: str) -> Exercise:
    if exercise not in EXERCISES:
        lesson = [id_ for id_ in EXERCISES if id_[:2] == str(exercise)[:2]]
        known = ", ".join(lesson or EXERCISES)
        raise ValueError(f"unknown exercise {exercise!r}: there are {known}")
    return EXERCISES[exercise]
