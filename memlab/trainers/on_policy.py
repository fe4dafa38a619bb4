"""GKD on what the student says itself: a share of the steps gets completions of its own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from memlab.losses.sequences import number
from memlab.losses.sft import IGNORED
from memlab.trainers.loop import Batch, Phase
from memlab.trainers.rollouts import Roll


def on_policy(
    steps: Iterable[Sequence[Batch]],
    roll: Roll,
    *,
    lmbda: float = 0.5,
    seed: int = 0,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Sequence[Batch]]:
    """The steps for `gkd.train`, in a share `lmbda` of which the student completes the prompts.

    A row's prompt is what stands before its first valid label. `roll` is `rollouts.rollout` bound
    to the student. All of a step is drawn and completed at once, before it is split, when the
    student has taken the step before. (TRL draws for each micro-batch.) `phase` names the part
    "rollout". Raises ValueError for `lmbda` outside of 0 to 1, for rows laid end to end, and
    for a row without a prompt.
    """
    number("lmbda", lmbda, lambda share: 0 <= share <= 1, "between 0 and 1")
    draw = random.Random(seed)
    for step in steps:
        if draw.random() < lmbda:
            with phase("rollout"):
                step = _completed(step, roll)
        yield step


def _completed(step: Sequence[Batch], roll: Roll) -> list[Batch]:
    made = roll([prompt for batch in step for prompt in _prompts(batch)])
    before = made.input_ids.shape[1] - made.labels.shape[1]
    labels = F.pad(made.labels, (before, 0), value=IGNORED)
    sizes = [len(batch["input_ids"]) for batch in step]
    parts = zip(made.input_ids.split(sizes), labels.split(sizes), strict=True)
    return [{"input_ids": ids, "labels": learnt} for ids, learnt in parts]


def _prompts(batch: Batch) -> list[Tensor]:
    if "cu_seqlens" in batch:
        raise ValueError(
            "padding_free=True with on_policy: it takes prompts from padded rows; give "
            "padding_free=False"
        )
    first = (batch["labels"] != IGNORED).int().argmax(1).tolist()  # 0 where there is no label
    if 0 in first:
        raise ValueError(
            f"labels of row {first.index(0)}: on_policy needs a prompt, which has -100, and then "
            "an answer; give rows of both"
        )
    return [ids[:length] for ids, length in zip(batch["input_ids"], first, strict=True)]
