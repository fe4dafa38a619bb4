"""Lesson 06 in a real browser: it runs to its end, and its slider changes its picture."""

from pathlib import Path

import pytest
from lab import open_notebook

LESSON = Path(__file__).parent.parent / "notebooks" / "06_chunked_cross_entropy.ipynb"


@pytest.mark.browser
def test_lesson_06_runs_and_its_slider_moves_its_picture(chromium_path: str) -> None:
    with open_notebook(LESSON, chromium_path) as lab:
        lab.run_all()
        assert lab.stderr() == []
        assert lab.sliders() > 0
        before, after = lab.press(lab.sliders() - 1, "ArrowRight")
        assert before != after
        back = lab.press(lab.sliders() - 1, "ArrowLeft")[1]
        assert back != after
