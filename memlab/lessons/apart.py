"""Lesson 03: where documents start, a batch that saves nothing, and a collation of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memlab.lessons import contamination
from memlab.lessons.judging import Exercise, Finding, is_number, raised
from memlab.models.build import build_meta, materialize
from memlab.techniques import pad_to_multiple, padding_free, varlen_attention

Collate = Callable[[list[dict[str, Tensor]]], dict[str, Any]]
IDS = ([5, 6, 7], [8], [9, 10, 11, 12])  # 03a
COUNT, TOKENS = 5, 2000  # 03b
COLUMNS = ("input_ids", "labels", "position_ids")
TOLERANCE = 1e-5  # of a loss in fp32


def _rows(ids: Any) -> list[dict[str, Tensor]]:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in ids]  # (T,) each
    return [{"input_ids": row, "labels": row.clone()} for row in tensors]


def _bounds_and_labels() -> tuple[list[int], list[int]]:
    batch = padding_free.collate(_rows(IDS))
    return batch["cu_seqlens"].tolist(), batch["labels"][0].tolist()


def _judge_bounds(answer: Any) -> Finding:
    said_bounds, said_labels = ([int(n) for n in part] for part in answer)
    bounds, labels = _bounds_and_labels()
    sizes = [len(ids) for ids in IDS]
    usual_bounds = {
        tuple(sizes): "Those are the lengths; cu_seqlens adds them up.",
        tuple(bounds[1:]): "The first document starts somewhere, too: at 0.",
        tuple(bounds[:-1]): "The last document ends somewhere, too.",
        tuple(n - 1 for n in bounds[1:]): "Ends are excluded, as in a slice.",
    }
    if said_bounds != bounds:
        return Finding(False, usual_bounds.get(tuple(said_bounds), "cu_seqlens is not that."))
    flat = [token for ids in IDS for token in ids]
    lasts = [-100 if place + 1 in bounds else token for place, token in enumerate(flat)]
    shifted = [*labels[1:], -100]
    usual_labels = {
        tuple(flat): "Those are the ids: each document's first token would be learnt from the end "
        "of another one.",
        tuple(lasts): "It is the first token of a document that nothing in it predicts.",
        tuple(shifted): "Labels stand beside their own tokens; the loss shifts them.",
    }
    if said_labels != labels:
        return Finding(False, usual_labels.get(tuple(said_labels), "The labels are not that."))
    return Finding(True)


def _why_bounds() -> str:
    bounds, labels = _bounds_and_labels()
    return (
        f"cu_seqlens {bounds}: where each document starts, and the end. Labels {labels}: the first "
        "token of each has no predecessor of its own."
    )


def _slots(lengths: list[int]) -> tuple[int, int]:
    """Of the padded batch of rows of these lengths, and of the padding-free one."""
    rows = _rows([[0] * n for n in lengths])
    padded, free = (technique.collate(rows) for technique in (pad_to_multiple, padding_free))
    return padded["input_ids"].numel(), free["input_ids"].numel()


def _judge_lengths(answer: Any) -> Finding:
    lengths = [int(n) for n in answer]
    if len(lengths) != COUNT or sum(lengths) != TOKENS:
        return Finding(False, f"Those are {len(lengths)} rows with {sum(lengths):,} tokens in all.")
    padded, free = _slots(lengths)
    if padded == free:
        return Finding(True)
    return Finding(False, f"Padded, they take {padded:,} slots; {padded - free:,} would be saved.")


def _why_lengths() -> str:
    padded, free = _slots([TOKENS // COUNT] * COUNT)
    return (
        f"All of {TOKENS // COUNT}: {padded:,} slots padded and {free:,} padding-free. What is "
        "saved is each row's distance from the longest, so only equal rows save nothing."
    )


_FLAWS = {
    "input_ids": "input_ids: all rows' tokens, one after the other.",
    "labels": "labels: the first token of each document must be -100, and no other one.",
    "position_ids": "position_ids: they start again from 0 in each document.",
    "cu_seqlens": "cu_seqlens: 0, then where each document ends; one without tokens leaves none.",
    "max_seqlen": "max_seqlen: the longest document's tokens.",
}


def _made() -> list[dict[str, Tensor]]:
    """Rows of random ids, one of them without a token."""
    random = torch.Generator().manual_seed(0)
    return _rows([torch.randint(1, 500, (n,), generator=random).tolist() for n in (7, 0, 23, 1, 9)])


def _loss(batch: dict[str, Any], attention: str, inputs: dict[str, Any]) -> float:
    varlen_attention.register()
    model = build_meta(contamination.MODEL, dtype=torch.float32, attn_implementation="sdpa")
    materialize(model, "cpu", init=True).eval()
    return contamination.run(model, attention, batch["labels"], inputs).loss


def _padded_loss() -> float:
    batch = pad_to_multiple.collate(_made())
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return _loss(batch, "sdpa", inputs)


def _judge_collate(answer: Collate) -> Finding:
    try:
        batch = answer(_made())
        if flaw := _wrong_form(batch):
            return Finding(False, flaw)
        found = _loss(batch, varlen_attention.NAME, padding_free.model_inputs(batch))
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    right = _padded_loss()
    wrong = _wrong_part(batch)
    if abs(found - right) <= TOLERANCE * right and not wrong:
        return Finding(True)
    return Finding(False, f"The loss is {found:.6f}, padded it is {right:.6f}. {wrong}".strip())


def _wrong_form(batch: Any) -> str:
    names = {*COLUMNS, "cu_seqlens", "max_seqlen"}
    if not isinstance(batch, dict) or set(batch) != names:
        return f"Return a dict of {', '.join(sorted(names))}, and no attention mask."
    tokens = sum(len(row["input_ids"]) for row in _made())
    for name in COLUMNS:
        column = batch[name]
        if not isinstance(column, Tensor) or column.dtype != torch.int64:
            return f"{name}: give an int64 tensor."
        if column.shape != (1, tokens):
            return f"{name} has shape {tuple(column.shape)}; one row of N tokens is (1, N)."
    bounds = batch["cu_seqlens"]
    if not isinstance(bounds, Tensor) or bounds.dtype != torch.int32:
        return "cu_seqlens: the kernel wants an int32 tensor."
    if type(batch["max_seqlen"]) is not int:
        return "max_seqlen: a Python int; a tensor would have to be fetched from the card."
    return ""


def _wrong_part(batch: dict[str, Any]) -> str:
    """What to say of the first part that is not the reference's; "" where all are."""
    right = padding_free.collate(_made())
    for name, flaw in _FLAWS.items():
        mine, theirs = (torch.as_tensor(b[name]).tolist() for b in (batch, right))
        if mine != theirs:
            return flaw
    return ""


def _why_collate() -> str:
    batch = padding_free.collate(_made())
    loss = _loss(batch, varlen_attention.NAME, padding_free.model_inputs(batch))
    padded, free = _slots([len(row["input_ids"]) for row in _made()])
    return (
        "Lengths add up to cu_seqlens, positions restart, and first labels are -100: loss "
        f"{loss:.6f} in {free} slots; padded, {_padded_loss():.6f} in {padded}."
    )


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, list | tuple) and len(answer) == 2 and all(map(_are_whole, answer))


def _are_whole(answer: Any) -> bool:
    """Whole numbers in a list, a tuple, an array or a tensor."""
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    return isinstance(values, list | tuple) and all(is_number(n) and n == int(n) for n in values)


EXERCISES = {
    "03a": Exercise(
        f"The rows {', '.join(map(str, IDS))} are laid end to end. What are cu_seqlens and labels?",
        "a pair of lists, (cu_seqlens, labels)",
        _is_pair,
        _judge_bounds,
        "cu_seqlens has one number more than there are documents. Which tokens does nothing in "
        "their own document predict?",
        _why_bounds,
    ),
    "03b": Exercise(
        f"Which {COUNT} rows with {TOKENS:,} tokens in all save nothing when they are laid end to "
        "end?",
        f"a list of {COUNT} lengths",
        lambda answer: _are_whole(answer) and all(int(n) >= 1 for n in answer),
        _judge_lengths,
        "Padded, a batch takes rows times the longest. When is that the number of tokens?",
        _why_lengths,
    ),
    "03c": Exercise(
        "Write collate(rows): rows of `input_ids` and `labels`, tensors (T,), some perhaps empty, "
        "as one padding-free batch.",
        "a function of (rows) that returns a dict of input_ids, labels, position_ids, all (1, N), "
        "cu_seqlens (int32) and max_seqlen (int)",
        callable,
        _judge_collate,
        "Three things must know where documents start: positions, labels, cu_seqlens.",
        _why_collate,
    ),
}
