"""Lesson 06: bytes a logit, the floor, a loop of one's own, and the head for a budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.experiments import Recipe, measure
from memlab.experiments.heads import head_loss
from memlab.instruments.measurement import Measurement
from memlab.instruments.meter import Meter
from memlab.lessons.judging import Exercise, Finding, is_number, near, raised
from memlab.lessons.running import HeadShapes, head_bytes, simulated_head
from memlab.techniques.chunked_loss import chunked_cross_entropy, cross_entropy
from memlab.techniques.fused_head import fused_token_logprobs

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
CHUNKS = tuple(2**n for n in range(5, 13))  # 32 to 4096
DEFAULT_CHUNK: int = inspect.signature(chunked_cross_entropy).parameters["chunk"].default
TOLERANCE = 1e-9  # in fp64
HEADS = {
    "all logits": Recipe(loss_type="nll"),
    "chunked": Recipe(),
    "fast": Recipe(fused_head="fast"),
    "frugal": Recipe(fused_head="frugal"),
}
MIB = 1 << 20
FROZEN = HeadShapes(8192, 151_936, 2048)  # the benchmark's
BUDGET_MIB = 400


def _bytes_a_logit() -> int:
    """What the full loss adds to the peak, a logit; D is small, so that the logits outweigh all."""
    shapes = HeadShapes(4096, 151_936, 8)
    with simulated_head(shapes) as (meter, (h, w, y)):
        before = meter.live_bytes
        cross_entropy(h, w, y).backward()
    peak = max(sample.total for sample in meter.ledger.samples())
    return round((peak - before) / (shapes.tokens * shapes.words))


def _judge_bytes(answer: float) -> Finding:
    return near(
        answer,
        _bytes_a_logit(),
        usual={
            2: "That is the bf16 logit alone, which the loss does not even keep.",
            4: "That is what backward keeps; the peak comes while it works on it.",
            6: "That is the bf16 logit and its fp32 copy: the forward, before backward.",
            8: "That is two fp32 copies; count once more what is alive inside the loss.",
        },
    )


def _why_bytes() -> str:
    return (
        f"{_bytes_a_logit()} bytes: three fp32 numbers a logit are alive at once where softmax "
        "meets its gradient, though only 4 bytes are kept for backward."
    )


def _measured(chunk: int) -> Measurement:
    usual = None if chunk == DEFAULT_CHUNK else chunk  # the lesson's own run answers for it
    return measure(Recipe.defaults(), device="simulated", chunk=usual)


def _at_the_floor(chunk: int) -> bool:
    """Whether the peak is a moment without logits, which no smaller chunk can lower."""
    return _measured(chunk).by_category["logits"] == 0


def _largest_at_the_floor() -> int:
    """The largest of CHUNKS at the floor: a few steps from the usual one, for peaks only rise."""
    at = CHUNKS.index(DEFAULT_CHUNK)
    while at > 0 and not _at_the_floor(CHUNKS[at]):
        at -= 1
    while at + 1 < len(CHUNKS) and _at_the_floor(CHUNKS[at + 1]):
        at += 1
    return CHUNKS[at]


def _judge_floor(answer: float) -> Finding:
    answer, right = int(answer), _largest_at_the_floor()
    if answer == right:
        return Finding(True)
    if answer < right:
        return Finding(False, f"{answer} is at the floor, and so is a larger chunk.")
    extra = (_measured(answer).metered_peak_bytes - _measured(right).metered_peak_bytes) / 1e9
    return Finding(False, f"{answer} is {extra:.2f} GB above the floor.")


def _why_floor() -> str:
    right = _largest_at_the_floor()
    floor = _measured(right).metered_peak_bytes / 1e9
    return (
        f"{right}: from there down the peak stays at {floor:.2f} GB, for it has moved to a moment "
        "at which no logits are alive."
    )


def _inputs(n: int, v: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    h = torch.randn(n, d, generator=random, dtype=dtype).requires_grad_()
    w = torch.randn(v, d, generator=random, dtype=dtype).requires_grad_()
    y = torch.randint(v, (n,), generator=random)
    y[: n // 3] = -100  # whole chunks without a label, and parts of one
    y[-2] = -100
    return h, w, y


class Held(NamedTuple):
    """Bytes that a loss keeps for backward, holds at its peak through backward; of all logits."""

    kept: int
    peak: int
    logits: int


def _held(loss: Loss, chunk: int) -> Held:
    """Metered with data, in fp32 on the CPU: a loss may look at the labels."""
    n, v = 256, 2048
    h, w, y = _inputs(n, v, 8, torch.float32)
    with Meter("cpu") as meter:
        meter.begin_step()
        value = loss(h, w, y, chunk)
        kept = meter.live_bytes
        value.backward()
    return Held(kept, max(sample.total for sample in meter.ledger.samples()), 4 * n * v)


def _reference(h: Tensor, w: Tensor, y: Tensor, chunk: int) -> Tensor:
    return chunked_cross_entropy(h, w, y, chunk=chunk)


def _judge_loop(answer: Loss) -> Finding:
    try:
        said = (
            _wrong_value(answer)
            or _wrong_without_labels(answer)
            or _wrong_gradient(answer)
            or _holds_too_much(answer)
        )
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong_value(answer: Loss) -> str:
    h, w, y = _inputs(37, 50, 16, torch.float64)
    value, right = answer(h, w, y, 8), cross_entropy(h, w, y)
    if not isinstance(value, Tensor) or value.shape != ():
        return "Return one number, a tensor of shape ()."
    if not torch.isclose(value.double(), right, rtol=TOLERANCE):
        if torch.isclose(value.double(), right, rtol=1e-5):
            return (
                "The loss is right to a few digits only: part of it is computed in another type "
                f"than the inputs', which are {h.dtype} here."
            )
        valid = int((y != -100).sum())
        z = h @ w.T
        parts = [(z_c, y_c) for z_c, y_c in zip(z.split(8), y.split(8), strict=True)]
        means = [F.cross_entropy(z_c, y_c) for z_c, y_c in parts if (y_c != -100).any()]
        usual = {
            "the sum, not divided by the valid labels": right * valid,
            "divided by all rows, not by the valid labels": right * valid / len(y),
            "a mean of the chunks' means; chunks have unequal numbers of labels": sum(means)
            / len(means),
        }
        for name, wrong in usual.items():
            if torch.isclose(value.double(), torch.as_tensor(wrong), rtol=1e-6):
                return f"That is {name}."
        return f"The loss is {value.item():.6g} where the full logits give {right.item():.6g}."
    return ""


def _wrong_without_labels(answer: Loss) -> str:
    h, w, y = _inputs(37, 50, 16, torch.float64)
    value = answer(h, w, torch.full_like(y, -100), 8)
    if not isinstance(value, Tensor) or value.shape != ():
        return f"With every label -100, too, return a tensor of shape (), not {value!r}."
    if value.item() != 0:
        return f"With every label -100 the loss must be 0, not {value.item()}."
    for name, gradient in zip("hw", _gradients(value, h, w), strict=True):
        if gradient is None:
            return (
                f"With every label -100 the loss is not connected to {name}: its gradient must be "
                "zeros, not None."
            )
        if gradient.count_nonzero():  # a NaN is not zero either
            return f"With every label -100 the gradient of {name} must be zeros."
    return ""


def _gradients(value: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor | None, ...]:
    """Of h and w; None where `value` does not depend on it."""
    if not value.requires_grad:
        return None, None
    return torch.autograd.grad(value, (h, w), allow_unused=True)


def _wrong_gradient(answer: Loss) -> str:
    h, w, y = _inputs(37, 50, 16, torch.float64)
    gradients = [_gradients(loss(h, w, y, 8), h, w) for loss in (answer, _reference)]
    for name, mine, right in zip("hw", *gradients, strict=True):
        if mine is None or right is None:
            return f"The loss is not connected to {name}: no gradient can flow."
        if not torch.allclose(mine, right, rtol=TOLERANCE, atol=TOLERANCE):
            return f"The value is right, but the gradient of {name} is not."
    return ""


def _holds_too_much(answer: Loss) -> str:
    kept, peak, logits = _held(answer, 16)
    reference = _held(_reference, 16)
    if kept > reference.kept + logits // 16:  # room for a chunk's logits
        return (
            f"Value and gradients are right, but it keeps {kept:,} bytes for backward; the "
            f"reference keeps {reference.kept:,}, and all the logits are {logits:,}. A chunk's "
            "must die with it."
        )
    if peak > reference.peak + logits // 2:  # room for several copies of a chunk's
        return (
            f"Value and gradients are right, and it keeps little, but it holds {peak:,} bytes at "
            f"its peak, where the reference holds {reference.peak:,}: all the logits, {logits:,} "
            "bytes, exist at once. Compute them `chunk` rows at a time."
        )
    return ""


def _why_loop() -> str:
    kept, _, logits = _held(_reference, 16)
    return (
        "Sum each chunk's loss over its valid labels under torch.utils.checkpoint, then divide "
        f"once, by the valid labels of all (at least 1): {kept:,} bytes kept instead of {logits:,}."
    )


def _frozen_mib(head: str) -> float:
    """What a head adds at its peak to inputs and gradients, where w is frozen."""
    return head_bytes(head_loss(HEADS[head]), FROZEN, trained=False).extra / MIB


def _judge_budget(answer: str) -> Finding:
    needed = _frozen_mib(answer)
    return Finding(needed <= BUDGET_MIB, f"{answer} needs {needed:,.0f} MiB.")


def _why_budget() -> str:
    needed = {head: f"{_frozen_mib(head):,.0f}" for head in HEADS}
    tile = inspect.signature(fused_token_logprobs).parameters["chunk"].default
    return (
        f"fast, {needed['fast']} MiB: a frozen head has no dW to sum in fp32, which leaves dh and "
        f"a chunk's logits. frugal, {needed['frugal']} MiB, never had that sum, and holds a tile "
        f"of as many logits as {tile} rows have; chunked, {needed['chunked']} MiB, widens a part "
        f"of its chunk to fp32; all logits, {needed['all logits']} MiB."
    )


def _is_head(answer: Any) -> bool:
    return isinstance(answer, str) and answer in HEADS


def _is_chunk(answer: Any) -> bool:
    return is_number(answer) and answer in CHUNKS


EXERCISES = {
    "06a": Exercise(
        "The loss from full bf16 logits: how many bytes a logit are alive at its peak?",
        "a whole number of bytes",
        is_number,
        _judge_bytes,
        "Kept for backward: 4. At the peak, look at the timeline where backward begins.",
        _why_bytes,
    ),
    "06b": Exercise(
        "What is the largest chunk, of 32, 64, ... 4096 rows, at which `Recipe.defaults()` still "
        "peaks as low as with 32?",
        f"one of {', '.join(map(str, CHUNKS))}",
        _is_chunk,
        _judge_floor,
        "Move the slider: the curve is flat up to there.",
        _why_floor,
    ),
    "06c": Exercise(
        "Write loss(h, w, y, chunk): the mean cross-entropy of h (N, D) against labels y (N,), "
        "-100 for none, with head w (V, D), never holding all the logits.",
        "a function of (h, w, y, chunk) that returns the loss",
        callable,
        _judge_loop,
        "Chunks may hold no label at all. What must be divided, and when?",
        _why_loop,
    ),
    "06d": Exercise(
        f"LoRA freezes the head: {FROZEN.tokens} rows, {FROZEN.words:,} words, width "
        f"{FROZEN.hidden}, bf16. Beside its inputs and the gradient of h, {BUDGET_MIB} MiB are "
        "free. Which head fits?",
        f"one of {', '.join(map(repr, HEADS))}",
        _is_head,
        _judge_budget,
        "`head_bytes(loss, shapes, trained=False)` measures a frozen one. Which bytes are gone?",
        _why_budget,
    ),
}
