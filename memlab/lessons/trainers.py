"""Lesson 13: trainers ranked, a reference's bytes, the cache that wins, a reference for free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memlab.experiments import Recipe, measure
from memlab.experiments.rules import TRAINERS
from memlab.instruments.measurement import Measurement
from memlab.instruments.meter import Meter
from memlab.lessons.adapters import reference_bytes, small_adapted
from memlab.lessons.judging import Exercise, Finding, is_number, near, raised

Refer = Callable[[Any, Tensor], Tensor]
RANKED = ("dpo", "reward", "sft")  # 13a
ASKED = "Qwen/Qwen3-1.7B"  # 13b
SMALL = "memlab/tiny"  # 13c
COMPLETION, TOGETHER = 64, 4  # 13c: tokens; completions trained on at a time
TOLERANCE = 1e-5  # of logits in fp32


def _peaks() -> dict[str, int]:
    recipes = {trainer: Recipe.off(trainer=trainer) for trainer in RANKED}
    return {t: measure(r, device="simulated").metered_peak_bytes for t, r in recipes.items()}


def _judge_rank(answer: Any) -> Finding:
    peaks, said = _peaks(), [str(name).lower() for name in answer]
    right = sorted(peaks, key=peaks.__getitem__)
    if said == right:
        return Finding(True)
    if said == right[::-1]:
        return Finding(False, "That is the order from the highest; begin with the lowest.")
    if said.index("reward") < said.index("sft"):
        return Finding(False, "A reward model has no logits, but it reads both sides of a pair.")
    return Finding(False, "DPO has the rows of a pair, their logits, and a second model.")


def _why_rank() -> str:
    peaks = _peaks()
    order = sorted(peaks, key=peaks.__getitem__)
    said = ", ".join(f"{TRAINERS[t]} {peaks[t] / 1e9:.2f} GB" for t in order)
    return (
        f"{said}. With everything off, rows decide: how many go through the model, and how many of "
        "their tokens get logits. The reference comes on top of that."
    )


def _judge_reference(answer: Any) -> Finding:
    whole, lora = (float(n) for n in answer)
    right = reference_bytes(ASKED)
    if abs(lora - reference_bytes(ASKED, lora=True)) > 0.001 * right:
        return Finding(False, "With LoRA, the base model is in memory already, untouched.")
    return near(
        whole,
        right,
        within=0.01,
        usual={
            right / 1e9: "That is GB; give bytes.",
            right / 2: "That is the number of parameters; each takes two bytes in bf16.",
            2 * right: "That is fp32; the model is in bf16.",
            4 * right: "That is a model in training: its gradients and Adam's state, too. A "
            "reference has neither.",
        },
    )


def _why_reference() -> str:
    whole, lora = reference_bytes(ASKED), reference_bytes(ASKED, lora=True)
    return (
        f"{whole:,} bytes, 2 for each parameter in bf16, and {lora} with LoRA: the base model with "
        "its adapter off is the reference."
    )


def counted(completions: int, model: str = SMALL) -> Recipe:
    """The recipe of 13c: a step of so many completions, trained on TOGETHER at a time."""
    return Recipe.defaults(
        model=model,
        trainer="grpo",
        max_completion_length=COMPLETION,
        per_device_train_batch_size=TOGETHER,
        gradient_accumulation_steps=completions // TOGETHER,
    )


def tops(measurement: Measurement) -> tuple[int, int]:
    """Live bytes at the highest moment of the rollout, and of everything else."""
    rollout = [s.total for s in measurement.timeline if s.phase == "rollout"]
    training = [s.total for s in measurement.timeline if s.phase != "rollout"]
    return max(rollout), max(training)


def _one_and_two(model: str = SMALL) -> list[tuple[int, int]]:
    """`tops` of the steps of one micro-batch and of two."""
    recipes = (counted(n * TOGETHER, model) for n in (1, 2))
    return [tops(measure(recipe, device="simulated")) for recipe in recipes]


def bend(model: str = SMALL) -> int:
    """13c's answer for `model`, from the steps of one and of two micro-batches.

    Further micro-batches repeat the second, and each completion takes as much of the rollout.
    """
    one, two = _one_and_two(model)
    training, more = max(one[1], two[1]), two[0] - one[0]
    groups = 1 + (training - one[0]) // more + 1
    return groups * TOGETHER


def _judge_count(answer: float) -> Finding:
    right, answer = bend(), int(answer)
    if answer % TOGETHER:
        return Finding(False, f"Give a multiple of {TOGETHER}.")
    if answer == right:
        return Finding(True)
    where = "there, and below" if answer > right else "not yet there"
    return Finding(False, f"With {answer} the peak is {where}.")


def _why_count() -> str:
    one, two = _one_and_two()
    each, training = (two[0] - one[0]) / TOGETHER, max(one[1], two[1])
    return (
        f"{bend()}: {TOGETHER} completions at a time need {training / 1e6:.1f} MB in "
        f"training from the second time on, however often; a rollout holds "
        f"{each / 1e6:.1f} MB for each of all."
    )


IDS = torch.arange(24).reshape(2, 12)


def _judge_refer(answer: Refer) -> Finding:
    try:
        said = _wrong_reference(answer)
    except Exception as error:  # the learner's own code: whatever it raises is the finding
        return raised(error)
    return Finding(not said, said)


def _wrong_reference(answer: Refer) -> str:
    plain, model = small_adapted()
    with torch.no_grad():
        right = plain(IDS).logits
        adapted_says = model.eval()(IDS).logits
    model.train()
    modes = [module.training for module in model.modules()]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with Meter("cpu") as meter:
        meter.watch(model)
        before = meter.live_bytes
        meter.begin_step()
        found = answer(model, IDS)
    highest = max(sample.total for sample in meter.ledger.samples()) - before
    if not isinstance(found, Tensor) or found.shape != right.shape:
        return f"Return the logits, a tensor of shape {tuple(right.shape)}."
    if not torch.allclose(found, right, rtol=TOLERANCE, atol=TOLERANCE):
        return "Those are not the logits of the model without its adapter."
    if highest > size:
        return (
            f"The logits are right, at the price of {highest:,} bytes: a copy of the model "
            f"({size:,}), and what that keeps for a backward."
        )
    if modes != [module.training for module in model.modules()]:
        return "Leave the model in the mode it was in: dropout must come back."
    with torch.no_grad():
        if not torch.allclose(model.eval()(IDS).logits, adapted_says):
            return "Afterwards the adapter must be on again."
    return ""


def _why_refer() -> str:
    _, model = small_adapted()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return (
        "`with torch.no_grad(), model.disable_adapter():` and one forward pass. A copy would take "
        f"{size:,} bytes, even of this small model; this takes none."
    )


def _is_ranking(answer: Any) -> bool:
    listed = isinstance(answer, list | tuple)
    return listed and sorted(str(name).lower() for name in answer) == sorted(RANKED)


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, list | tuple) and len(answer) == 2 and all(map(is_number, answer))


EXERCISES = {
    "13a": Exercise(
        "Now everything off: Qwen3-0.6B, a batch of 4, rows of 1024 tokens. Rank "
        f"{', '.join(map(repr, RANKED))} by their peaks.",
        f"a list of the {len(RANKED)} names, the lowest first",
        _is_ranking,
        _judge_rank,
        "Count the rows that go through the model, then those of their tokens that get logits.",
        _why_rank,
    ),
    "13b": Exercise(
        f"DPO on {ASKED} in bf16: how many bytes does the reference add, whole and with LoRA?",
        "a pair of numbers of bytes, (whole, with LoRA), the first within 1 %",
        _is_pair,
        _judge_reference,
        "Which of weight, gradient and Adam's two averages does a frozen model have?",
        _why_reference,
    ),
    "13c": Exercise(
        f"GRPO of {SMALL} as in the figure above, {TOGETHER} completions at a time "
        "(per_device_train_batch_size), more and more of them a step "
        "(gradient_accumulation_steps). From how many completions on is the peak in the rollout?",
        f"a multiple of {TOGETHER}",
        is_number,
        _judge_count,
        "Training hardly grows beyond the second micro-batch. What does a completion add to the "
        "rollout?",
        _why_count,
    ),
    "13d": Exercise(
        "Write refer(model, ids): the logits (B, T, V) of a LoRA model's reference, no copy made.",
        "a function of (model, ids) that returns logits",
        callable,
        _judge_refer,
        "The base model is still there, under the adapter: peft can switch that off for a while.",
        _why_refer,
    ),
}
