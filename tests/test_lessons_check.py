"""Exercises: right answers are computed, hints come before reasons, usual mistakes are named."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made_steps import made_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memlab
from memlab import lessons
from memlab.instruments.measurement import Measurement
from memlab.lessons import ask, check, chunked, start, where


@pytest.fixture(autouse=True)
def _fresh_attempts() -> None:
    lessons._wrong_attempts.clear()


def peaking_at(total: int, parameters: int = 0) -> Measurement:
    by_category = {**made_step().by_category, "parameters": parameters}
    return replace(made_step(), metered_peak_bytes=total, by_category=by_category)


def loop(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    def part(h_c: Tensor, w: Tensor, y_c: Tensor) -> Tensor:
        return F.cross_entropy(h_c @ w.T, y_c, reduction="sum")

    total = h.new_zeros(())
    for h_c, y_c in zip(h.split(chunk), y.split(chunk), strict=True):
        total = total + checkpoint(part, h_c, w, y_c, use_reentrant=False)
    return total / (y != -100).sum().clamp(min=1)


def test_memlab_check_is_this_check() -> None:
    assert memlab.check is check


def test_an_unknown_exercise_lists_its_lessons() -> None:
    with pytest.raises(ValueError, match=r"there are 06a, 06b, 06c, 06d$"):
        check("06z", 1)
    with pytest.raises(ValueError, match=r"00a, .*06d"):
        check("nonsense", 1)


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        ("00a", "3072"),
        ("00a", 3072 + 0j),
        ("00a", np.array([3072])),
        ("00b", True),
        ("00b", np.True_),
        ("00b", torch.tensor(True)),
        ("00c", ["loss"]),
        ("01a", None),
        ("06b", 100),
        ("06b", 512.5),
        ("06c", 12),
        ("06d", "liger"),
        ("06d", ["fast"]),
        *(
            (exercise, answer)
            for exercise in ("00a", "02a", "02b", "04a", "05b", "05c", "06b")
            for answer in (math.nan, math.inf, -math.inf, np.float32(np.nan))
        ),
        *(pytest.param(e, 10**400, id=f"{e}-huge") for e in ("02a", "02b", "04c", "05c")),
        *(("02c", [wrong, 1]) for wrong in (math.nan, math.inf)),
        ("03a", ([math.nan], [1])),
        ("03b", [400, 400, 400, 400, math.inf]),
        ("04b", (0, 0, math.nan)),
        ("04c", math.nan),
        ("05a", [math.nan, 1, 2]),
    ],
)
def test_a_wrong_form_of_answer_says_which_is_wanted(exercise: str, answer: object) -> None:
    with pytest.raises(TypeError, match=rf"{exercise}: give (a|one|three) .*, not "):
        check(exercise, answer)


@pytest.mark.parametrize("number", [np.int64, np.float32, torch.tensor, Fraction, float])
def test_numbers_of_other_libraries_are_numbers(
    monkeypatch: pytest.MonkeyPatch, number: Callable[[int], object]
) -> None:
    monkeypatch.setattr(chunked, "_at_the_floor", lambda chunk: chunk <= 512)
    assert check("00a", number(3072))
    assert not check("00a", number(3000))
    assert check("06b", number(512))
    assert "256 is at the floor" in repr(check("06b", number(256)))


@pytest.mark.parametrize("huge", [10**40, 1e308, 2**63])
def test_huge_numbers_are_wrong_answers_like_others(huge: float) -> None:
    for exercise in ("00a", "02a", "02b", "04a", "05c"):
        assert not check(exercise, huge)
    lessons._wrong_attempts.clear()
    assert "No row is that long." in repr(check("02a", huge))
    for exercise, answer in (("02c", [huge] * 2), ("03b", [huge] * 5), ("04b", [huge] * 3)):
        assert not check(exercise, answer)
    assert not check("03a", ([huge], [huge]))
    assert not check("05a", [huge] * 3)


def test_every_exercise_has_a_question_and_a_form() -> None:
    ids = list(lessons.EXERCISES)
    assert ids == sorted(ids)
    for lesson in {exercise[:2] for exercise in ids}:
        letters = [exercise[2:] for exercise in ids if exercise.startswith(lesson)]
        assert len(letters) >= 3
        assert letters == list("abcdef"[: len(letters)])
    for exercise in lessons.EXERCISES:
        assert repr(ask(exercise)).startswith(f"{exercise}: ")
        assert ask(exercise)._repr_markdown_().endswith(".*")


def test_hint_first_then_the_reason_and_right_forgets_attempts() -> None:
    first, second = check("00a", 7), check("00a", 7)
    assert repr(first) == f"not yet: {start.EXERCISES['00a'].hint}"
    assert "3072" in repr(second)
    assert not first
    right = check("00a", 3072)
    assert isinstance(right, lessons.Verdict)
    assert right
    assert repr(right).startswith("right: 2 bytes an entry")
    assert "✓ right" in right._repr_html_()
    assert repr(check("00a", 7)) == repr(first)


@pytest.mark.parametrize(("answer", "said"), [(3000, "before rounding"), (1500, "counts entries")])
def test_rounding_mistakes_are_named(answer: int, said: str) -> None:
    assert said in repr(check("00a", answer))


def test_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_peak", lambda: 19_318_754_816)
    assert check("00b", 17.99)
    assert "GB still" in repr(check("00b", 19.32))
    assert "larger unit" in repr(check("00b", 20.74))


def test_readings_are_compared_by_running_a_tiny_step() -> None:
    assert check("00c", ["by_category", "metered_peak_bytes"])
    assert "Not the same everywhere: step_ms" in repr(
        check("00c", {"metered_peak_bytes", "by_category", "step_ms"})
    )
    assert "1 more" in repr(check("00c", ["metered_peak_bytes"]))


def test_static_bytes() -> None:
    n, untied = where._parameters()
    assert (n, untied) == (1_235_814_400, 128_256 * 2048)
    assert check("01a", 9.89)
    assert "parameters alone" in repr(check("01a", 2.47))
    assert "fp32" in repr(check("01a", 14.83))
    assert "GiB" in repr(check("01a", 9.21))
    assert "tied" in repr(check("01a", 11.99))


def test_growth_at_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {1: peaking_at(17_000_000_000), 2: peaking_at(19_384_000_000, parameters=1_192_000_000)}
    monkeypatch.setattr(where, "measure", lambda recipe, device: peaks[recipe.max_steps])
    assert check("01b", 2.38)
    assert "two numbers" in repr(check("01b", 1.19))
    assert "needs more" in repr(check("01b", 0))


def test_released_output_saves_its_bf16_logits() -> None:
    assert where._released() == 2 * 4096 * 151_936
    assert check("01c", 1.24)
    assert "fp32 logits" in repr(check("01c", 2.49))


def test_bytes_a_logit() -> None:
    assert check("06a", 12)
    assert "what backward keeps" in repr(check("06a", 4))


def test_the_floor_is_found_by_simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(recipe: object, *, device: str, chunk: int | None) -> Measurement:
        asked.append(chunk)
        floor, loss = 5_391_000_000, 3_850_000_000 + 1_525_000 * (chunk or 1024)
        m = peaking_at(max(floor, loss))
        return replace(m, by_category={**m.by_category, "logits": loss if loss > floor else 0})

    monkeypatch.setattr(chunked, "measure", measured)
    assert check("06b", 512)
    assert set(asked) == {None, 512}
    assert "so is a larger" in repr(check("06b", 256))
    assert "0.02 GB above the floor" in repr(check("06b", 1024))


@pytest.mark.parametrize("largest", [32, 64, 2048, 4096])
def test_the_floor_is_found_on_both_sides_of_the_usual_chunk(
    monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(chunked, "_at_the_floor", lambda chunk: chunk <= largest)
    assert chunked._largest_at_the_floor() == largest


def only_labels(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    """Right too: rows without a label leave first."""
    rows = y != -100
    return loop(h[rows], w, y[rows], chunk) + 0 * (h.sum() + w.sum())


@pytest.mark.parametrize("answer", [loop, only_labels])
def test_a_right_loop_is_right(answer: object) -> None:
    verdict = check("06c", answer)
    assert verdict, verdict


def full(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    return F.cross_entropy(h @ w.T, y, reduction="sum") / (y != -100).sum().clamp(min=1)


def one_chunk(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    return loop(h, w, y, len(y))


def zero_without_labels(zero: Callable[[Tensor], object]) -> Callable[..., object]:
    return lambda h, w, y, c: loop(h, w, y, c) if (y != -100).any() else zero(h)


def mean_of_means(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    parts = zip(h.split(chunk), y.split(chunk), strict=True)
    means = [F.cross_entropy(h_c @ w.T, y_c) for h_c, y_c in parts if (y_c != -100).any()]
    return torch.stack(means).mean()


def half_detached(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    return loop(h, w.detach(), y, chunk) + 0 * w.sum()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (full, "keeps .* bytes for backward"),
        (mean_of_means, "mean of the chunks' means"),
        (lambda h, w, y, c: loop(h, w, y, c) * (y != -100).sum(), "the sum, not divided"),
        (lambda h, w, y, c: F.cross_entropy(h @ w.T, y), "every label -100 .* not nan"),
        (one_chunk, r"holds [\d,]+ bytes at its peak.*: all the logits, 2,097,152 bytes, exist"),
        (lambda h, w, y, c: loop(h.float(), w.float(), y, c), "another type than the inputs'"),
        (zero_without_labels(lambda h: 0), r"every label -100, too, return a tensor .* not 0\."),
        (zero_without_labels(lambda h: h.new_zeros(())), "-100 the loss is not connected to h"),
        (zero_without_labels(lambda h: 0 * h.sum()), "-100 the loss is not connected to w"),
        (zero_without_labels(lambda h: (h - h.detach()).sum()), "gradient of h must be zeros"),
        (lambda h, w, y, c: loop(h, w, y, c).detach(), "not connected"),
        (half_detached, "gradient of w is not"),
        (lambda h, w, y, c: 3.0, "one number, a tensor"),
        (lambda h, w, y, c: h @ w, "raised RuntimeError"),
    ],
)
def test_a_wrong_loop_is_told_what_is_wrong(answer: object, said: str) -> None:
    verdict = check("06c", answer)
    assert not verdict
    assert re.search(said, repr(verdict)), verdict


def test_a_frozen_head_fits_where_it_makes_its_gradients_in_the_forward_pass() -> None:
    assert check("06d", "fast")
    assert "needs 660 MiB" in repr(check("06d", "frugal"))
    assert "no dW to sum" in repr(check("06d", "chunked"))


@pytest.mark.integers
def test_the_floor_of_the_default_recipe() -> None:
    assert chunked._largest_at_the_floor() == 512
    assert chunked._measured(32).metered_peak_bytes == chunked._measured(512).metered_peak_bytes
