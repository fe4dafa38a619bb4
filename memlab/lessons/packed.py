"""Lesson 04: bins of equal rows, tokens lost, bytes a useful token, and a packer of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from memlab.data import lengths
from memlab.experiments import Recipe, measure
from memlab.lessons.batch import last_batch
from memlab.lessons.judging import Exercise, Finding, is_number, near, raised
from memlab.techniques.packing import STRATEGIES, place

Fit = Callable[[list[int], int], list[list[int]]]
SIX, NINE = (4,) * 6, 9  # 04a
DATA, SHORT = "docstrings", 256  # 04b
STAYS = ("parameters", "optimizer_state")


def _bins(sizes: Any, max_length: int) -> int:
    return len(place(sizes, max_length).offsets) - 1


def _judge_bins(answer: float) -> Finding:
    return near(
        answer,
        _bins(SIX, NINE),
        usual={
            len(SIX): "That is a bin a row; a bin holds more than one.",
            len(SIX) // 3: f"Three rows of {SIX[0]} are more than {NINE} tokens.",
        },
    )


def _why_bins() -> str:
    bins = _bins(SIX, NINE)
    return (
        f"{bins}: two rows of {SIX[0]} fit into {NINE}, a third does not. {bins * NINE - sum(SIX)} "
        f"of {bins * NINE} slots stay empty, though {sum(SIX)} tokens would fill "
        f"{sum(SIX) / NINE:.2f} bins."
    )


def _lost(strategy: str) -> int:
    """Tokens of 04b's data that are in no bin."""
    sizes = lengths.lengths(DATA)
    placed = place(sizes, SHORT, strategy)
    return sum(sizes) - int((placed.stops - placed.starts).sum())


def _judge_lost(answer: Any) -> Finding:
    said, right = tuple(int(n) for n in answer), tuple(map(_lost, STRATEGIES))
    if said == right:
        return Finding(True)
    sizes = np.array(lengths.lengths(DATA))
    usual = {
        int((sizes > SHORT).sum()): "That counts the rows that are cut, not their tokens.",
        int(sizes[sizes > SHORT].sum()): "A long row loses only what is beyond max_length.",
        0: "Best fit cuts each document to max_length before it places it.",
    }
    if said[0] in usual:
        return Finding(False, usual[said[0]])
    wrong = [name for name, a, b in zip(STRATEGIES, said, right, strict=True) if a != b]
    return Finding(False, f"Look again at {', '.join(wrong)}.")


def _why_lost() -> str:
    lost = ", ".join(f"{name} {_lost(name):,}" for name in STRATEGIES)
    return (
        f"{lost} of {sum(lengths.lengths(DATA)):,}: bfd drops what is beyond {SHORT} in each "
        "document, the others cut it into pieces and keep all of them."
    )


def useful_bytes(recipe: Recipe) -> float:
    """Bytes for each useful token: what the peak adds to parameters and optimizer state.

    The measured step is the recipe's last, simulated; a useful token is a slot that holds one.
    """
    measured = measure(recipe, device="simulated")
    stays = sum(measured.by_category[category] for category in STAYS)
    return (measured.metered_peak_bytes - stays) / last_batch(recipe).tokens


def _packed() -> Recipe:
    """04c's recipe."""
    return Recipe.off(dataset=DATA, packing=True)


def _judge_useful(answer: float) -> Finding:
    recipe = _packed()
    measured = measure(recipe, device="simulated")
    tokens = last_batch(recipe).tokens
    padded = recipe.replace(packing=False)
    return near(
        answer,
        useful_bytes(recipe) / 1e6,
        within=0.005,
        usual={
            measured.metered_peak_bytes
            / tokens
            / 1e6: "That shares out the whole peak; parameters and Adam's state are there anyway.",
            useful_bytes(padded) / 1e6: "That is the padded step.",
            useful_bytes(recipe) / 2**20: "That is MiB; a MB is 1e6 bytes.",
            useful_bytes(recipe) / 1e9: "That is GB.",
        },
    )


def _why_useful() -> str:
    recipe = _packed()
    packed, padded = (useful_bytes(r) / 1e6 for r in (recipe, recipe.replace(packing=False)))
    return f"{packed:.2f} MB, where the padded step of as many rows takes {padded:.2f} MB."


def _cases() -> list[tuple[list[int], int]]:
    """Lengths and L: some that need best fit, some that need the order, docstrings."""
    long = [min(n, 1024) for n in lengths.lengths(DATA)[:300]]
    return [
        ([4] * 6, 9),
        ([2, 5, 4, 7, 1, 3, 8], 10),
        ([3, 6, 2, 4, 5], 10),
        ([10], 10),
        (long, 1024),
    ]


def _judge_fit(answer: Fit) -> Finding:
    try:
        said = next((said for case in _cases() if (said := _wrong(answer, *case))), "")
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong(answer: Fit, sizes: list[int], max_length: int) -> str:
    bins = answer(list(sizes), max_length)
    case = f"lengths {sizes}" if len(sizes) < 10 else f"{len(sizes)} docstrings"
    where = f"{case}, max_length={max_length}"
    try:
        filled = [[int(n) for n in each] for each in bins]
    except TypeError:
        return "Return a list of bins, each a list of lengths."
    if sorted(n for each in filled for n in each) != sorted(sizes):
        return f"{where}: the bins must hold each length once, and nothing else."
    if any(sum(each) > max_length for each in filled):
        return f"{where}: a bin holds more than {max_length} tokens."
    if [] in filled:
        return f"{where}: a bin is empty."
    best = _bins(sizes, max_length)
    if len(filled) > best:
        return f"{where}: {len(filled)} bins, and {best} are enough."
    return ""


def _why_fit() -> str:
    sizes, max_length = _cases()[-1]
    return (
        "Longest first, each into the bin with the least room that suffices, else into a new one: "
        f"{_bins(sizes, max_length)} bins for {len(sizes)} docstrings of {sum(sizes):,} tokens, "
        f"which would fill {sum(sizes) / max_length:.1f}."
    )


def _is_whole(answer: Any) -> bool:
    return is_number(answer) and answer == int(answer)


def _are_counts(answer: Any) -> bool:
    return isinstance(answer, tuple | list) and len(answer) == 3 and all(map(_is_whole, answer))


EXERCISES = {
    "04a": Exercise(
        f"Six rows of {SIX[0]} tokens, max_length={NINE}, strategy 'bfd': how many bins?",
        "a whole number",
        _is_whole,
        _judge_bins,
        "A document stays whole: how many fit into one bin?",
        _why_bins,
    ),
    "04b": Exercise(
        f"{DATA!r} in bins of {SHORT}: how many tokens does each of {', '.join(STRATEGIES)} lose?",
        f"three whole numbers, ({', '.join(STRATEGIES)})",
        _are_counts,
        _judge_lost,
        "`place` names the first and last token of each piece: add up what is in the bins.",
        _why_lost,
    ),
    "04c": Exercise(
        f"`Recipe.off(dataset={DATA!r}, packing=True)`: what does the peak hold beside parameters "
        "and optimizer state, in MB for each useful token?",
        "a number of MB (1e6 bytes), two decimals",
        is_number,
        _judge_useful,
        "`measure(recipe).by_category`, and `last_batch(recipe).tokens`.",
        _why_useful,
    ),
    "04d": Exercise(
        "Write fit(lengths, max_length): bins of at most max_length tokens, as lists of lengths, "
        "no more of them than best-fit decreasing makes.",
        "a function of (lengths, max_length) that returns a list of lists",
        callable,
        _judge_fit,
        "Which document should be placed first, and which of several bins should it get?",
        _why_fit,
    ),
}
