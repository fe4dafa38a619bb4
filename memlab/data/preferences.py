"""Rows for the trainers that compare, judge, distil or continue answers: the same everywhere.

`prompted_rows` and `full_prompted_rows` give rows of a prompt and answers, as GKD takes them. The
other functions make the columns of `memlab.techniques.truncation` from such rows, nothing cut: the
prompt is what stands before the first label, the answer is the first span of labels, and a worse
answer is the next row's (for the last row the first one's).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from memlab.data.rows import IGNORE, Tokens, full_rows, rows

PROMPTED = ("prompt_completion", "chat")  # the kinds of `memlab.data.lengths` with prompts

Row = dict[str, Tokens]  # columns (T,) int64


def prompted_rows(
    dataset: str, *, vocab_size: int, fill: Literal["text", "zeros"] = "text", seed: int = 0
) -> list[Row]:
    """The rows of `memlab.data.rows.rows`, of a data set that has prompts: `input_ids`, `labels`.

    Raises ValueError for plain text ("docstrings", "chat_like"), and as `rows` does.
    """
    made = rows(dataset, vocab_size=vocab_size, fill=fill, seed=seed)
    if dataset not in PROMPTED:
        raise ValueError(f"dataset={dataset!r} has no prompts; take {' or '.join(PROMPTED)}")
    return made


def full_prompted_rows(
    count: int,
    length: int,
    *,
    prompt_length: int | None = None,
    vocab_size: int,
    fill: Literal["text", "zeros"] = "text",
    seed: int = 0,
) -> list[Row]:
    """`count` rows of exactly `length` tokens, `input_ids` and `labels`, the prompt's being -100.

    The prompt is the first half, rounded down, or `prompt_length` tokens. Raises ValueError when it
    leaves no token for the prompt or for the answer, and as `memlab.data.rows.full_rows` does.
    """
    made = full_rows(count, length, vocab_size=vocab_size, fill=fill, seed=seed)
    prompt = length // 2 if prompt_length is None else prompt_length
    if not 0 < prompt < length:
        raise ValueError(f"a prompt of {prompt} tokens in a row of {length}; give 1 or more a part")
    for row in made:
        row["labels"][:prompt] = IGNORE
    return made


def preference_rows(rows: Sequence[Row]) -> list[Row]:
    """DPO's pairs: `prompt_ids`, `chosen_ids` (the row's own answer), `rejected_ids` (a worse one).

    Raises ValueError for fewer than 2 rows, or one without a prompt or an answer.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a rejected answer is another row's; give 2 or more")
    parts = [_parts(i, row) for i, row in enumerate(rows)]
    return [
        {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": worse}
        for (prompt, answer), (_, worse) in zip(parts, parts[1:] + parts[:1], strict=True)
    ]


def scored_rows(pairs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Reward's pairs from those of DPO: `chosen_ids` and `rejected_ids`, each after its prompt."""
    sides = ("chosen_ids", "rejected_ids")
    return [
        {side: np.array([*pair["prompt_ids"], *pair[side]], np.int64) for side in sides}
        for pair in pairs
    ]


def binary_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """KTO's judged answers: `prompt_ids`, `completion_ids` and the bool `label`, is it desirable?

    Rows 0, 2, 4 ... have their own answer, a desirable one, the others a worse one. Raises as
    `preference_rows`.
    """
    judged = []
    for i, pair in enumerate(preference_rows(rows)):
        desirable = i % 2 == 0
        answer = pair["chosen_ids" if desirable else "rejected_ids"]
        judged.append(
            {"prompt_ids": pair["prompt_ids"], "completion_ids": answer, "label": desirable}
        )
    return judged


def prompt_rows(rows: Sequence[Row]) -> list[Row]:
    """The prompts alone, `prompt_ids`. Raises ValueError for a row without prompt or answer."""
    return [{"prompt_ids": _parts(i, row)[0]} for i, row in enumerate(rows)]


def _parts(i: int, row: Row) -> tuple[Tokens, Tokens]:
    """The prompt of row i, and its first answer."""
    edges = np.flatnonzero(np.diff(row["labels"] != IGNORE, append=False)) + 1
    if len(edges) == 0 or row["labels"][0] != IGNORE:
        raise ValueError(f"row {i} is not a prompt (labels of -100) and then an answer; give both")
    start, end = edges[:2]
    return row["input_ids"][:start], row["input_ids"][start:end]
