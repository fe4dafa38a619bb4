"""Lesson 01: static bytes, the second step, and a name that keeps logits alive."""

from __future__ import annotations

import torch.nn.functional as F

from memlab.experiments import Recipe, measure
from memlab.lessons.judging import Exercise, Finding, is_number, near
from memlab.lessons.running import HeadShapes, simulated_head
from memlab.models.build import build_meta, load_config

STATIC_MODEL = "meta-llama/Llama-3.2-1B"
GIB = 2**30
QWEN = "Qwen/Qwen3-0.6B"
ROWS = 4 * 1024


def _parameters() -> tuple[int, int]:
    """How many parameters 01a's model has, and how many more if its head were not tied."""
    model = build_meta(STATIC_MODEL)
    words = model.get_input_embeddings().weight.numel()  # type: ignore[union-attr]
    untied = words if model.config.tie_word_embeddings else 0
    return sum(p.numel() for p in model.parameters()), untied


def _judge_static(answer: float) -> Finding:
    n, untied = _parameters()
    return near(
        answer,
        8 * n / 1e9,
        within=0.005,
        usual={
            2 * n / 1e9: "Those are the parameters alone.",
            4
            * n
            / 1e9: "Those are parameters and gradients; Adam keeps two more numbers for each.",
            6 * n / 1e9: "Adam keeps two numbers a parameter, not one.",
            8 * n / GIB: "That is GiB; memlab's GB is 1e9 bytes.",
            12
            * n
            / 1e9: "That holds Adam's state in fp32; here it has the parameters' dtype, bf16.",
            16 * n / 1e9: "That is fp32, or mixed precision; here everything is bf16.",
            8 * (n + untied) / 1e9: "That counts the head twice: it is tied to the embeddings.",
        },
    )


def _why_static() -> str:
    n, _ = _parameters()
    return (
        f"{n:,} parameters, 2 bytes each, four times (parameter, gradient, Adam's two moments): "
        f"{8 * n / 1e9:.2f} GB, before a single activation."
    )


def _growth() -> tuple[int, int]:
    """By how much the peak grows from the first step to the second; bytes of the parameters."""
    second = measure(Recipe.off(max_steps=2), device="simulated")
    first = measure(Recipe.off(max_steps=1), device="simulated")
    grown = second.metered_peak_bytes - first.metered_peak_bytes
    return grown, second.by_category["parameters"]


def _judge_growth(answer: float) -> Finding:
    grown, parameters = _growth()
    return near(
        answer,
        grown / 1e9,
        within=0.01,
        usual={
            0: "Step 1 fits, and yet step 2 needs more.",
            parameters / 1e9: "Adam keeps two numbers a parameter, not one.",
            4 * parameters / 1e9: "That is Adam's state in fp32; here it is bf16.",
            grown / GIB: "That is GiB; memlab's GB is 1e9 bytes.",
        },
    )


def _why_growth() -> str:
    grown, parameters = _growth()
    return (
        f"{grown / 1e9:.2f} GB: Adam makes its two moments when it first steps, after the peak of "
        f"step 1; twice the parameters' {parameters / 1e9:.2f} GB, there from step 2 on."
    )


def _released() -> int:
    """Bytes that the peak falls by when the logits' name is dropped before backward."""

    def loss(keep: bool) -> int:
        shapes = HeadShapes(ROWS, load_config(QWEN).vocab_size, 8)
        with simulated_head(shapes) as (meter, (h, w, y)):
            logits = F.linear(h, w)
            value = F.cross_entropy(logits.float(), y)
            if not keep:
                del logits
            value.backward()
        return max(sample.total for sample in meter.ledger.samples())

    return loss(True) - loss(False)


def _judge_released(answer: float) -> Finding:
    saved = _released()
    return near(
        answer,
        saved / 1e9,
        within=0.01,
        usual={
            2 * saved / 1e9: "Those are the fp32 logits, which backward needs; the output is bf16.",
            saved / GIB: "That is GiB; memlab's GB is 1e9 bytes.",
            saved / 4 / 1e9: "That is one row of 1024 tokens; the batch has four.",
        },
    )


def _why_released() -> str:
    vocabulary, saved = load_config(QWEN).vocab_size, _released()
    return (
        f"The output's bf16 logits, 2 x {ROWS} x {vocabulary:,} bytes = {saved / 1e9:.2f} GB: the "
        "loss has made fp32 ones of its own, and only the name keeps these alive."
    )


EXERCISES = {
    "01a": Exercise(
        f"How many GB do parameters, gradients and Adam's state of {STATIC_MODEL} take in bf16?",
        "a number of GB (1e9 bytes), two decimals",
        is_number,
        _judge_static,
        "How many numbers does training keep for each parameter, and how many bytes has one?",
        _why_static,
    ),
    "01b": Exercise(
        "By how many GB does the peak of `Recipe.off()` grow from the first step to the second?",
        "a number of GB (1e9 bytes), two decimals",
        is_number,
        _judge_growth,
        "Measure it with max_steps=1 and with max_steps=2. Which category is new?",
        _why_growth,
    ),
    "01c": Exercise(
        "A loop keeps `out = model(ids)` until after `backward()`; its `out.logits` are bf16, and "
        "the loss works on an fp32 copy. What does `del out` before backward save, in GB, for "
        f"{QWEN} at 4 x 1024 tokens?",
        "a number of GB (1e9 bytes), two decimals",
        is_number,
        _judge_released,
        "N x V logits of 2 bytes. Backward reads the loss's own copy, not these.",
        _why_released,
    ),
}
