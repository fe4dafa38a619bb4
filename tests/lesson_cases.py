"""What the lessons' tests share: attempts start anew, and a wrong answer's first verdict."""

from typing import Any

import pytest

from memlab import check, lessons


@pytest.fixture(autouse=True)
def fresh_attempts() -> None:
    """For every test of a module that imports it."""
    lessons._wrong_attempts.clear()


def said(exercise: str, answer: Any) -> str:
    """What a wrong answer gets at the first attempt."""
    lessons._wrong_attempts.clear()
    verdict = check(exercise, answer)
    assert not verdict, verdict
    return repr(verdict)
