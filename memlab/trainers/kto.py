"""Kahneman-Tversky optimization: the loop, plain.

Loss of a step: the sum over rows of `losses.kto`, divided by the rows of the whole step. What each
row's gain is compared with, an estimate of KL(policy || reference), is a mean over the whole step,
cut off at 0: it can't be put together from micro-batches, so it is worked out before the split, by
both models, from prompts beside other rows' completions. (TRL takes a micro-batch's own.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlab.losses.kto import kl_estimate, kto
from memlab.models.head import HeadParts
from memlab.trainers.completions import (
    Collate,
    Completions,
    Row,
    completion_logps,
    fused,
    labelled,
    referred,
)
from memlab.trainers.loop import Batch, HeadFunction, Inputs, Phase, padded_inputs, run
from memlab.trainers.reference import check, evaluating, referring

KL = "KL_"  # columns of the mismatched completions, as TRL names them


def mismatched(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a whole step with the `completion_ids` of the one before as `KL_completion_ids`.

    The first one gets the last one's. Before `techniques.truncation.truncate_kto`. Raises
    ValueError for fewer than 2 rows.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a mismatched completion is another row's; give 2")
    name = f"{KL}completion_ids"
    return [{**row, name: rows[i - 1]["completion_ids"]} for i, row in enumerate(rows)]


def collate_rows(rows: Sequence[Row], collate: Collate) -> Batch:
    """A batch of rows as `truncate_kto` gives them, with a bool `label`: is it desirable?

    `collate` is that of `techniques.pad_to_multiple` or, without padding, `padding_free`; what it
    makes of the mismatched completions has names that begin with KL_. Raises ValueError for a row
    without `label`, `input_ids`, `completion_mask` or their KL_, or with a label that is no bool.
    """
    labels = [_desirable(row.get("label")) for row in rows]
    mismatched_batch = collate([labelled(row, KL) for row in rows])
    return {
        **collate([labelled(row) for row in rows]),
        **{f"{KL}{name}": column for name, column in mismatched_batch.items()},
        "desirable": torch.tensor(labels, dtype=torch.bool),
    }


def _desirable(label: object) -> bool:
    scalar = isinstance(label, Tensor) and label.dtype == torch.bool and label.ndim == 0
    if not scalar and not isinstance(label, (bool, np.bool_)):
        raise ValueError(f"label={label!r} of a row: give True (desirable) or False, a bool")
    return bool(label)


def mismatched_part(batch: Batch) -> Batch:
    """The columns that begin with KL_, under the names of a batch of their own."""
    return {name.removeprefix(KL): batch[name] for name in batch if name.startswith(KL)}


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    logprobs: HeadFunction,
    fused_loss: HeadFunction | None = None,
    reference: HeadParts | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches made by `collate_rows`, of at least 2 rows together;
    `inputs(batch, device)` makes the model's arguments of one. `logprobs(h, w, y, ...)` gives
    log-probabilities of tokens, see `loop.apply_head`. `reference` None is the model with its peft
    adapter off. `beta` and the weights are those of `losses.kto`. `phase` also names the part of
    the reference and of the KL estimate, "reference". `fused_loss(h, w, y, *, rows, reference,
    desirable, kl, num_rows, ...)` works out head and loss together (`techniques.liger_losses`); the
    reference then leaves its hidden states, and `logprobs` is for the KL estimate alone.

    Raises ValueError without a reference, for a step of one row, and what `losses.kto` or the fused
    loss raises, the latter for rows laid end to end too.
    """
    check(model, head, reference)
    device = next(model.parameters()).device

    def reference_logps(arguments: dict[str, Any], completions: Completions) -> Tensor:
        with referring(model, head, reference) as frozen:
            return completion_logps(logprobs, frozen, arguments, completions)

    def whole(step: Sequence[Batch]) -> tuple[Tensor, int]:
        policy, old = [], []
        with phase("reference"):
            for batch in step:
                others, rows = mismatched_part(batch), len(batch["desirable"])
                arguments, completions = inputs(others, device), Completions.of(others, device)
                with evaluating(model):
                    logps = completion_logps(logprobs, head, arguments, completions)
                policy.append(logps[:rows])
                old.append(reference_logps(arguments, completions)[:rows])
            return kl_estimate(torch.cat(policy), torch.cat(old)), sum(map(len, policy))

    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    options: dict[str, Any] = {"beta": beta, **weights}

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Completions, Any, Tensor]]:
        arguments, completions = inputs(batch, device), Completions.of(batch, device)
        with phase("reference"), referring(model, head, reference) as frozen:
            found = referred(logprobs, fused_loss, frozen, arguments, completions)
        return arguments, (completions, found, batch["desirable"].to(device))

    def loss_of(
        arguments: dict[str, Any],
        targets: tuple[Completions, Any, Tensor],
        whole: tuple[Tensor, int],
    ) -> Tensor:
        (completions, found, desirable), (kl, num_rows) = targets, whole
        if fused_loss is not None:
            known = {"reference": found, "desirable": desirable, "kl": kl, "num_rows": num_rows}
            return fused(fused_loss, head, arguments, completions, **known, **options)
        logps = completion_logps(logprobs, head, arguments, completions)
        rows = len(desirable)  # a tail of padding may come after them
        return kto(logps[:rows], found[:rows], desirable, kl, num_rows, **options)

    known = ((step, whole(step)) for step in steps)
    return run(model, optimizer, known, ready=ready, loss_of=loss_of, phase=phase)
