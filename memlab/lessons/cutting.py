"""Lesson 02: a max_length that keeps a share, slots of a batch, and answers that are cut away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from memlab.data import lengths
from memlab.data.max_length import Lengths
from memlab.data.rows import rows
from memlab.lessons.judging import Exercise, Finding, is_number, near, raised
from memlab.techniques.pad_to_multiple import collate
from memlab.techniques.truncation import IGNORE, truncate_sft

Rows = list[dict[str, list[int]]]
Cut = Callable[[Rows, int], Rows]
DATA, SHARE = "chat_like", 0.95
BATCH, LIMIT = (700, 90, 2600, 310), 1024  # 02b: tokens a row
ANSWERS, SHORT = "prompt_completion", 64  # 02c


def _judge_share(answer: float) -> Finding:
    data = Lengths(lengths.lengths(DATA))
    usual: dict[float, str] = {
        data.longest: "That keeps every token.",
        data.shortest(1 - SHARE): f"That keeps {1 - SHARE:.0%} of the tokens.",
    }
    finding = near(answer, data.shortest(SHARE), usual=usual)
    if answer > data.longest:
        return Finding(False, "No row is that long.")
    if finding.right or finding.said or answer < 1:
        return finding
    answer = int(answer)
    rows_whole, kept = 1 - data.cut(answer) / len(data.in_order), data.kept(answer)
    if abs(rows_whole - SHARE) < 0.001:  # whichever way a quantile is rounded
        return Finding(False, f"That leaves {SHARE:.0%} of the rows whole, which are short ones.")
    said = f"{answer} keeps {kept:.3%} of the tokens"
    return Finding(False, f"{said}, and a smaller one would do." if kept >= SHARE else f"{said}.")


def _why_share() -> str:
    data = Lengths(lengths.lengths(DATA))
    right = data.shortest(SHARE)
    return (
        f"{right}: it keeps {data.kept(right):.3%} of the tokens, one less keeps "
        f"{data.kept(right - 1):.3%}; it cuts {data.cut(right)} of {len(data.in_order)} rows."
    )


def _made(sizes: tuple[int, ...]) -> Rows:
    return [{"input_ids": [1] * n, "labels": [1] * n} for n in sizes]


def _slots(max_length: int | None) -> int:
    """Of 02b's batch, cut and collated."""
    return collate(truncate_sft(_made(BATCH), max_length))["input_ids"].numel()


def _judge_slots(answer: float) -> Finding:
    shortened = [min(n, LIMIT) for n in BATCH]
    return near(
        answer,
        _slots(LIMIT),
        usual={
            _slots(None): "That is the batch before it is cut.",
            sum(BATCH): "Those are its tokens before the cut, without padding.",
            sum(shortened): "Those are the tokens that are left; padding takes slots too.",
            LIMIT: "That is one row.",
        },
    )


def _why_slots() -> str:
    tokens = sum(min(n, LIMIT) for n in BATCH)
    return (
        f"The longest row is cut to {LIMIT}, and all {len(BATCH)} are padded to it: "
        f"{_slots(LIMIT):,} slots for {tokens:,} tokens; {_slots(None):,} before the cut."
    )


def _survivors() -> tuple[int, int]:
    """Rows of 02c's data that are left by keep_start, and by keep_end."""
    whole = rows(ANSWERS, vocab_size=1, fill="zeros")
    first, last = (
        len(truncate_sft(whole, SHORT, truncation_mode=mode)) for mode in ("keep_start", "keep_end")
    )
    return first, last


def _judge_survivors(answer: Any) -> Finding:
    said, right = tuple(int(n) for n in answer), _survivors()
    if said == right:
        return Finding(True)
    if said == right[::-1]:
        return Finding(False, "The other way round: which end of a row holds the answer?")
    data = lengths.lengths(ANSWERS)
    if said[0] == sum(length <= SHORT for length in data):
        return Finding(False, "Those rows are whole; a cut row stays while a label is left in it.")
    if said == (len(data), len(data)):
        return Finding(False, "A row whose labels are all cut away is dropped.")
    good = [name for name, a, b in zip(("keep_start", "keep_end"), said, right) if a == b]  # noqa: B905
    return Finding(False, f"The number for {good[0]} is right." if good else "")


def _why_survivors() -> str:
    first, last = _survivors()
    lost = len(lengths.rows(ANSWERS)) - first
    return (
        f"keep_start leaves {first} rows, keep_end {last}: of {lost} rows the prompt alone fills "
        f"{SHORT} tokens, so that no token of the answer is left to learn from."
    )


def _cases() -> list[Rows]:
    """Batches of a prompt without labels and an answer, one of them without an answer."""
    shapes = [[(2, 3), (4, 1), (0, 2)], [(9, 2), (1, 1)], [(3, 0), (2, 6)], [(5, 5)]]
    return [
        [
            {
                "input_ids": [*range(10 * i + 1, 10 * i + 1 + prompt + answer)],
                "labels": [IGNORE] * prompt
                + [*range(10 * i + 1 + prompt, 10 * i + 1 + prompt + answer)],
            }
            for i, (prompt, answer) in enumerate(batch)
        ]
        for batch in shapes
    ]


def _judge_cut(answer: Cut) -> Finding:
    try:
        said = next(
            (
                said
                for batch in _cases()
                for n in (1, 3, 6, 20)
                if (said := _wrong(answer, batch, n))
            ),
            "",
        )
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong(answer: Cut, batch: Rows, max_length: int) -> str:
    given = copy.deepcopy(batch)
    right = truncate_sft(batch, max_length, truncation_mode="keep_end")
    got = answer(given, max_length)
    where = f"max_length={max_length}, rows of {', '.join(str(len(r['labels'])) for r in batch)}"
    if given != batch:
        return f"{where}: your function changes the rows that it is given."
    if not isinstance(got, list) or any(not isinstance(row, dict) for row in got):
        return "Return a list of rows, each a dict of input_ids and labels."
    plain = [{name: [*row[name]] for name in ("input_ids", "labels")} for row in got]
    if plain == right:
        return ""
    if any(len(row["labels"]) > max_length for row in plain):
        return f"{where}: a row is longer than that."
    if any({*row["labels"]} <= {IGNORE} for row in plain):
        return f"{where}: a row without a label came back; nothing can be learnt from it."
    if any(0 in row["input_ids"] for row in plain):
        return f"{where}: there is padding in a row; pad when a batch is made, after the cut."
    if plain == truncate_sft(batch, max_length):
        return f"{where}: that keeps the first tokens of a row; keep the last."
    if len(plain) < len(right):
        return f"{where}: {len(right)} rows have a label among their last tokens, not {len(plain)}."
    return f"{where}: got {plain} where {right} is left."


def _why_cut() -> str:
    batch = _cases()[1]
    kept = truncate_sft(batch, 3, truncation_mode="keep_end")
    return (
        "Slice each row by itself, then drop what has no label; padding comes last. Rows of "
        f"{' and '.join(str(len(row['labels'])) for row in batch)} tokens at max_length 3 keep the "
        f"labels {' and '.join(str(row['labels']) for row in kept)}."
    )


def _is_length(answer: Any) -> bool:
    return is_number(answer) and answer == int(answer)


def _are_counts(answer: Any) -> bool:
    return isinstance(answer, tuple | list) and len(answer) == 2 and all(map(_is_length, answer))


EXERCISES = {
    "02a": Exercise(
        f"What is the smallest max_length that keeps {SHARE:.0%} of the tokens of {DATA!r}?",
        "a whole number of tokens",
        _is_length,
        _judge_share,
        "`Lengths(lengths(...))` answers it, or the explorer: move *keep at least*.",
        _why_share,
    ),
    "02b": Exercise(
        f"A batch of rows of {', '.join(map(str, BATCH))} tokens, max_length={LIMIT}, padded: how "
        "many slots does it take?",
        "a whole number of slots",
        _is_length,
        _judge_slots,
        "First cut, then pad every row to the longest that is left.",
        _why_slots,
    ),
    "02c": Exercise(
        f"{ANSWERS!r}, max_length={SHORT}, labels on the answers only: how many rows survive "
        "keep_start, and how many keep_end?",
        "a pair of whole numbers, (keep_start, keep_end)",
        _are_counts,
        _judge_survivors,
        "`truncate_sft` drops what has no label left: count what it returns in each mode.",
        _why_survivors,
    ),
    "02d": Exercise(
        "Write cut(rows, max_length): the last max_length tokens of each row of input_ids and "
        "labels, before any padding; rows without a label left are dropped.",
        "a function of (rows, max_length) that returns rows",
        callable,
        _judge_cut,
        "Where is the end of a short row, once it is padded to the longest?",
        _why_cut,
    ),
}
