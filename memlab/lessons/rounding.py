"""Lesson 05: slots of a batch, the largest multiple worth it, shapes left, and a padding loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.data.lengths import lengths
from memlab.lessons.judging import Exercise, Finding, is_number, near, raised
from memlab.techniques import pad_to_multiple
from memlab.techniques.pad_to_multiple import padded_length, shapes, slots

Pad = Callable[[list[list[int]], int], tuple[Tensor, Tensor, Tensor]]
LENGTHS = (65, 97, 10, 71)  # 05a
ASKED = (8, 64, 2048)
DATA, BATCH, CUT = "docstrings", 4, 1024  # 05b and 05c
MULTIPLES = (8, 16, 32, 64, 128, 256, 512, 1024)
WASTE = 0.02


def batches(dataset: str, size: int, max_length: int) -> list[tuple[int, ...]]:
    """Lengths of a data set's rows in batches of `size`, in order, each cut to `max_length`."""
    cut = [min(n, max_length) for n in lengths(dataset)]
    return [tuple(cut[i : i + size]) for i in range(0, len(cut), size)]


def total_slots(of: Sequence[Sequence[int]], multiple: int | None = None) -> int:
    """Slots of all these batches, each given as its rows' lengths."""
    return sum(slots(batch, multiple=multiple) for batch in of)


def compiled_graphs(of: Sequence[Sequence[int]], multiple: int | None = None) -> int:
    """How many graphs torch.compile makes for tensors (B, T) of these batches, one after another.

    Counted by compiling a function for each new shape (dynamic=False): a tenth of a second each.
    """
    made = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward  # counted, not compiled any further

    torch.compiler.reset()
    most = len(of) + 1
    limits: dict[str, Any] = {"recompile_limit": most, "accumulated_recompile_limit": most}
    with torch._dynamo.config.patch(limits):
        compiled = torch.compile(torch.exp, backend=backend, dynamic=False)
        for batch in of:
            compiled(torch.empty(len(batch), padded_length(max(batch), multiple)))
    torch.compiler.reset()
    return len(made)


def _judge_slots(answer: Any) -> Finding:
    said, right = tuple(int(n) for n in answer), _right_slots()
    if said == right:
        return Finding(True)
    widths = tuple(padded_length(max(LENGTHS), multiple) for multiple in ASKED)
    each = tuple(sum(padded_length(n, multiple) for n in LENGTHS) for multiple in ASKED)
    added = tuple(len(LENGTHS) * (max(LENGTHS) + -sum(LENGTHS) % multiple) for multiple in ASKED)
    usual = {
        widths: "That is one row's length; how many rows are there?",
        each: "A tensor has one width: all rows are padded to the longest one's.",
        added: "The multiple is of a row's length, not of the batch's tokens.",
    }
    return Finding(False, usual.get(said, ""))


def _right_slots() -> tuple[int, ...]:
    return tuple(slots(LENGTHS, multiple=multiple) for multiple in ASKED)


def _why_slots() -> str:
    widths = ", ".join(str(padded_length(max(LENGTHS), multiple)) for multiple in ASKED)
    return (
        f"The longest row has {max(LENGTHS)} tokens, which become {widths}; times {len(LENGTHS)} "
        f"rows: {', '.join(f'{n:,}' for n in _right_slots())} slots."
    )


def _added(multiple: int) -> float:
    """The share of slots that the multiple adds to 05b's batches."""
    of = batches(DATA, BATCH, CUT)
    return total_slots(of, multiple) / total_slots(of) - 1


def _largest() -> int:
    return max(multiple for multiple in MULTIPLES if _added(multiple) <= WASTE)


def _judge_largest(answer: float) -> Finding:
    answer, right = int(answer), _largest()
    if answer == right:
        return Finding(True)
    added = f"{answer} adds {_added(answer):.2%} to the slots"
    return Finding(False, f"{added}, and a larger one fits too." if answer < right else f"{added}.")


def _why_largest() -> str:
    right = _largest()
    next_one = MULTIPLES[MULTIPLES.index(right) + 1]
    return (
        f"{right}: it adds {_added(right):.2%} to the slots of all batches, {next_one} already "
        f"{_added(next_one):.2%}."
    )


def _shapes(multiple: int | None) -> int:
    return len(shapes(batches(DATA, BATCH, CUT), multiple=multiple))


def _judge_shapes(answer: float) -> Finding:
    return near(
        answer,
        _shapes(_largest()),
        usual={
            _shapes(None): "Those are the shapes without a multiple.",
            CUT // _largest(): "So many are possible; not every one occurs.",
            len(batches(DATA, BATCH, CUT)): "Those are the batches; many have the same shape.",
        },
    )


def _why_shapes() -> str:
    return (
        f"{_shapes(_largest())} different (rows, slots a row) with a multiple of {_largest()}, "
        f"{_shapes(None)} without one."
    )


def _judge_pad(answer: Pad) -> Finding:
    cases = (
        ([[1, 2, 3], [4, 5]], 4),
        ([[1, 2, 3, 4], [5]], 4),
        ([[7] * 9, [8] * 3, [9] * 16], 8),
        ([[1, 2, 3, 4, 5]], 1),
    )
    try:
        said = next((said for case in cases if (said := _wrong_padding(answer, *case))), "")
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong_padding(answer: Pad, ids: list[list[int]], multiple: int) -> str:
    right = pad_to_multiple.collate(
        [{"input_ids": row, "labels": row} for row in ids], pad_to_multiple_of=multiple
    )
    made = answer([list(row) for row in ids], multiple)
    if not isinstance(made, tuple) or len(made) != 3:
        return "Return three tensors: ids, labels, mask."
    case = f"Rows of {', '.join(str(len(row)) for row in ids)} tokens, a multiple of {multiple}"
    for name, mine in zip(("input_ids", "labels", "attention_mask"), made, strict=True):
        if not isinstance(mine, Tensor) or mine.ndim != 2:
            return f"{name}: return a tensor (B, T)."
        if mine.shape != right[name].shape:
            rows, width = right[name].shape
            usual = (
                " A length that is a multiple already stays."
                if max(len(row) for row in ids) % multiple == 0
                else ""
            )
            return f"{case}: {tuple(mine.shape)} where ({rows}, {width}) would do.{usual}"
        if not torch.equal(mine.to(torch.int64), right[name]):
            return f"{case}: {_FLAWS[name]}"
    return ""


_FLAWS = {
    "input_ids": "the ids are not the rows' ids, then zeros.",
    "labels": "padding has no label: -100. With 0 the model would learn to write padding.",
    "attention_mask": "the mask is 1 for a token and 0 for padding.",
}


def _why_pad() -> str:
    n = padded_length(9, 8)
    return (
        f"Round up with multiple * ceil(T / multiple): 9 tokens become {n}, {n} stay {n}; padding "
        "gets label -100 and mask 0."
    )


def _are_three(answer: Any) -> bool:
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    return (
        isinstance(values, list | tuple)
        and len(values) == len(ASKED)
        and all(is_number(n) for n in values)
    )


_OF = f"Rows of `{DATA}`, cut to {CUT:,} tokens, in batches of {BATCH}"
EXERCISES = {
    "05a": Exercise(
        f"Rows of {', '.join(map(str, LENGTHS))} tokens make a batch. How many slots does it take "
        f"with pad_to_multiple_of {', '.join(map(str, ASKED))}?",
        "three whole numbers, one a multiple",
        _are_three,
        _judge_slots,
        "First the longest row's length, rounded up to the multiple; then all rows.",
        _why_slots,
    ),
    "05b": Exercise(
        f"{_OF}: which of {', '.join(map(str, MULTIPLES))} is the largest multiple that adds at "
        f"most {WASTE:.0%} to the slots?",
        f"one of {', '.join(map(str, MULTIPLES))}",
        lambda answer: is_number(answer) and answer in MULTIPLES,
        _judge_largest,
        "Set the staircase to these batches: the dashed line is the limit.",
        _why_largest,
    ),
    "05c": Exercise(
        f"{_OF}: how many different shapes are left with that multiple?",
        "a whole number of shapes",
        is_number,
        _judge_shapes,
        "The lower picture counts them; a shape is (rows, slots a row).",
        _why_shapes,
    ),
    "05d": Exercise(
        "Write pad(rows, multiple): lists of ids, padded on the right: the longest row's length "
        "rounded up to a multiple; with labels and mask.",
        "a function of (rows, multiple) that returns ids, labels, mask, each (B, T)",
        callable,
        _judge_pad,
        "Try rows whose longest is a multiple already, and look at what padding's labels are.",
        _why_pad,
    ),
}
