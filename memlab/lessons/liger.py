"""Lesson 07: the kernel that counts, where -50 % holds, trainers with Liger, a norm that keeps
little."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memlab.experiments import Recipe, measure
from memlab.experiments.kernels import LAYERS, PARTS
from memlab.experiments.rules import TRAINERS
from memlab.instruments.meter import Meter
from memlab.lessons.judging import Exercise, Finding, is_number, raised
from memlab.lessons.kernels import kept_by_a_layer, liger_missing
from memlab.lessons.running import HeadShapes, head_bytes
from memlab.models.build import load_config
from memlab.techniques import liger
from memlab.techniques.chunked_loss import cross_entropy

Norm = Callable[[Tensor, Tensor, float], Tensor]
ASKED = "Qwen/Qwen3-8B"  # 07a
EVERY = 64  # 07b: tokens
LINE = (512, 1024)  # two lengths at which the peak without Liger is measured
EPS = 1e-6  # 07d
TOLERANCE = 1e-5  # of a gradient in fp32
ROOM = 16  # 07d: bytes a row beside the output


@cache
def _removed(checkpointing: bool) -> dict[str, float]:
    """Bytes a token that each part of Liger takes off ASKED where backward begins."""
    config = load_config(ASKED)
    plain = kept_by_a_layer(ASKED, checkpointing=checkpointing)
    found: dict[str, float] = {}
    for layer in LAYERS:
        kept = kept_by_a_layer(ASKED, {layer}, checkpointing=checkpointing)
        found[layer] = config.num_hidden_layers * (plain - kept)
    shapes = HeadShapes(4096, config.vocab_size, config.hidden_size)
    full, fused = (head_bytes(loss, shapes).extra for loss in (cross_entropy, liger.cross_entropy))
    return found | {"head": (full - fused) / shapes.tokens}


def _top_kernels() -> tuple[str, str]:
    """The part that takes most off, without checkpointing and with it."""
    off, on = ({**_removed(mode)} for mode in (False, True))
    return max(off, key=off.__getitem__), max(on, key=on.__getitem__)


def _judge_top(answer: Any) -> Finding:
    if missing := liger_missing():
        return Finding(False, missing)
    for said, right, mode in zip(answer, _top_kernels(), (False, True), strict=True):
        if said != right:
            with_it = "with" if mode else "without"
            takes = _removed(mode)[said] / 1000
            return Finding(
                False, f"{said!r} takes {takes:,.0f} kB off a token {with_it} checkpointing."
            )
    return Finding(True)


def _why_top() -> str:
    if liger_missing():
        return "Without liger-kernel and triton nothing can be run to tell."
    parts = [
        f"{with_it} checkpointing "
        + ", ".join(f"{part} {n / 1000:,.0f}" for part, n in _removed(mode).items())
        for mode, with_it in ((False, "without"), (True, "with"))
    ]
    layers = load_config(ASKED).num_hidden_layers
    return (
        f"{_top_kernels()}, in kB a token: {'; '.join(parts)}. {layers} wide layers of "
        "four norms each outweigh the logits (12 bytes each, less the head's gradient, which Liger "
        "makes beforehand); checkpointed, a layer keeps its input alone."
    )


@cache
def _peak(max_length: int, *, with_liger: bool) -> int:
    """Bytes of a step with checkpointing: with all the logits, or with Liger."""
    recipe = Recipe.off(
        gradient_checkpointing=True, max_length=max_length, use_liger_kernel=with_liger
    )
    return measure(recipe, device="simulated").metered_peak_bytes


def _without(max_length: int) -> float:
    """The peak with all the logits, on the line through those at two lengths."""
    first, second = (_peak(length, with_liger=False) for length in LINE)
    return first + (max_length - LINE[0]) * (second - first) / (LINE[1] - LINE[0])


def _floor() -> int:
    """The peak with Liger: the end of backward, which rows of usual lengths do not move."""
    return _peak(LINE[1], with_liger=True)


def _judge_half(answer: float) -> Finding:
    if missing := liger_missing():
        return Finding(False, missing)
    length = int(answer)
    without, floor = _without(length), _floor()
    share = f"At {length}: {without / 1e9:.2f} -> {floor / 1e9:.2f} GB, {floor / without - 1:+.1%}."
    if 2 * floor > without:
        return Finding(False, share)
    if 2 * floor <= _without(length - EVERY):
        return Finding(False, f"{share} A shorter row will do.")
    return Finding(True)


def _why_half() -> str:
    if liger_missing():
        return "Without liger-kernel and triton nothing can be run to tell."
    floor, start, a_token = _floor(), _without(0), _without(1) - _without(0)
    length = EVERY * math.ceil((2 * floor - start) / a_token / EVERY)
    return (
        f"{length}: with Liger the peak is {floor / 1e9:.2f} GB, the end of backward, whatever the "
        f"length; without, a token more in each row adds {a_token / 1e6:.2f} MB, nearly all of it "
        f"logits, until it is {2 * floor / 1e9:.2f} GB."
    )


def _with_liger() -> dict[str, str]:
    """Trainer -> why a recipe with Liger is refused there; "" where it is not."""
    found = {}
    for trainer in TRAINERS:
        try:
            Recipe(trainer=trainer, use_liger_kernel=True)
            found[trainer] = ""
        except ValueError as refused:
            found[trainer] = str(refused)
    return found


def _judge_trainers(answer: Any) -> Finding:
    said = {str(name) for name in answer}
    verdicts = _with_liger()
    if unknown := said - set(verdicts):
        return Finding(False, f"There is no trainer {', '.join(sorted(map(repr, unknown)))}.")
    for name in said:
        if verdicts[name]:
            return Finding(False, f"{verdicts[name]}.")
    missing = [name for name, refused in verdicts.items() if not refused and name not in said]
    return Finding(not missing, f"{len(missing)} more.")


def _why_trainers() -> str:
    verdicts = _with_liger()
    valid = [name for name, refused in verdicts.items() if not refused]
    others = [refused.split(";")[0] for refused in verdicts.values() if refused]
    return f"{', '.join(valid)}. Refused: {'; '.join(others)}."


def plain_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (N, D) by w (D,), by operations that autograd follows."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * w).to(x.dtype)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, D), w (D,) and a gradient (N, D) of the output."""
    random = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(256, 256, generator=random).to(dtype) for _ in range(2))
    w = torch.randn(256, generator=random).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), gradient


def _kept_a_row(norm: Norm) -> float:
    """Bytes a row that it leaves for backward beside its output and its inputs, in bf16."""
    x, w, _ = _inputs(torch.bfloat16)
    with Meter("cpu") as meter:
        meter.begin_step()
        y = norm(x, w, EPS)
        return (meter.live_bytes - y.nbytes) / len(x)


def _judge_norm(answer: Norm) -> Finding:
    try:
        said = _wrong_norm(answer)
        if not said and (kept := _kept_a_row(answer)) > ROOM:
            plain = _kept_a_row(plain_norm)
            said = (
                f"Value and gradients are right, but a row of 256 numbers leaves {kept:,.0f} bytes "
                f"for backward; operation by operation it is {plain:,.0f}. x is there anyway; what "
                "else can't backward compute from it?"
            )
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong_norm(answer: Norm) -> str:
    found = []
    for norm in (answer, plain_norm):
        x, w, gradient = _inputs(torch.float32)
        y = norm(x, w, EPS)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return "Return a tensor of the shape of x."
        if y.grad_fn is None:
            return "The output is not connected to x: no gradient can flow."
        given = torch.autograd.grad(y, (x, w), gradient, allow_unused=True)
        found.append({"value": y, "gradient of x": given[0], "gradient of w": given[1]})
    for name, right in found[1].items():
        mine = found[0][name]
        if mine is None:
            return f"There is no {name}."
        if mine.shape != right.shape or (mine - right).norm() > TOLERANCE * right.norm():
            return f"The {name} is not that of RMSNorm."
    return ""


def _why_norm() -> str:
    kept = _kept_a_row(plain_norm)
    return (
        f"Save x, w and one number a row, and compute the rest once more: 4 bytes a row instead of "
        f"{kept:,.0f}. That is all that a fused norm does for memory."
    )


def _is_pair(answer: Any) -> bool:
    return (
        isinstance(answer, list | tuple)
        and len(answer) == 2
        and all(isinstance(part, str) and part in PARTS for part in answer)
    )


def _is_length(answer: Any) -> bool:
    return is_number(answer) and answer > 0 and answer % EVERY == 0


def _are_names(answer: Any) -> bool:
    names = isinstance(answer, list | tuple | set | frozenset)
    return names and all(isinstance(name, str) for name in answer)


EXERCISES = {
    "07a": Exercise(
        f"Another model, {ASKED}. Which part of Liger takes the most bytes off each token where "
        "backward begins, without checkpointing and with it?",
        f"a pair of {', '.join(map(repr, PARTS))}: (without, with)",
        _is_pair,
        _judge_top,
        "A norm of D numbers keeps 4*D fewer; count a layer's norms, and the layers. A logit is 12 "
        "bytes. And what does a checkpointed layer keep?",
        _why_top,
    ),
    "07b": Exercise(
        f"Checkpointing is on. From which `max_length` on, of the multiples of {EVERY}, does Liger "
        "halve the peak of 4 rows of Qwen3-0.6B?",
        f"a multiple of {EVERY}",
        _is_length,
        _judge_half,
        "One of the two sides does not grow with the length there. Two points of the other side "
        "make a line.",
        _why_half,
    ),
    "07c": Exercise(
        "Which trainers take `use_liger_kernel=True`?",
        f"a list of some of {', '.join(map(repr, TRAINERS))}",
        _are_names,
        _judge_trainers,
        "`Recipe(trainer=..., use_liger_kernel=True)` says why not.",
        _why_trainers,
    ),
    "07d": Exercise(
        f"Make a norm of x (N, D) by w (D,) that keeps at most {ROOM} bytes a row for backward, "
        "beside its output and its inputs.",
        "a function of (x, w, eps) that returns a tensor of the shape of x",
        callable,
        _judge_norm,
        "Backward may compute again what forward has computed; look at what is saved.",
        _why_norm,
    ),
}
