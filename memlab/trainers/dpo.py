"""Direct preference optimization: the loop, plain.

Loss of a step: the sum over pairs of `losses.dpo`, divided by the pairs of the whole step. A batch
holds 2B rows, forwarded together: the B chosen ones first, then the B rejected, as in TRL. The
reference model runs before the policy, so that no activations wait beside it (TRL: after it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.dpo import dpo
from memlab.models.head import HeadParts
from memlab.trainers.completions import Collate, Completions, Row, completion_logps, labelled
from memlab.trainers.loop import Batch, HeadFunction, Inputs, Phase, padded_inputs, run
from memlab.trainers.pairs import num_pairs, sides
from memlab.trainers.reference import check, referring


def collate_pairs(rows: Sequence[Row], collate: Collate) -> Batch:
    """A batch of rows as `techniques.truncation.truncate_dpo` gives them.

    `collate` is that of `techniques.pad_to_multiple` or, without padding, `padding_free`. Raises
    ValueError for a row without `chosen_input_ids`, `chosen_completion_mask` or their `rejected_`.
    """
    return collate([labelled(row, side) for side in ("chosen_", "rejected_") for row in rows])


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    logprobs: HeadFunction,
    reference: HeadParts | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    inputs: Inputs = padded_inputs,
    phase: Phase = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Run every step and yield its loss, a detached scalar on the model's device.

    A step is a sequence of micro-batches made by `collate_pairs`; `inputs(batch, device)` makes the
    model's arguments of one. `logprobs(h, w, y, ...)` gives log-probabilities of tokens, see
    `loop.apply_head`. `reference` None is the model with its peft adapter off. `loss_type`, `beta`
    and `label_smoothing` are those of `losses.dpo`. `phase` also names the reference's part.

    Raises ValueError without a reference, for a batch that does not hold pairs, and what
    `losses.dpo` raises.
    """
    check(model, head, reference)
    device = next(model.parameters()).device

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Completions, Tensor]]:
        arguments, completions = inputs(batch, device), Completions.of(batch, device)
        with phase("reference"), referring(model, head, reference) as frozen:
            logps = completion_logps(logprobs, frozen, arguments, completions)
        return arguments, (completions, logps)

    def loss_of(
        arguments: dict[str, Any], targets: tuple[Completions, Tensor], pairs: int
    ) -> Tensor:
        completions, reference_logps = targets
        logps = completion_logps(logprobs, head, arguments, completions)
        lengths = completions.lengths() if loss_type == "ipo" else None
        chosen_lengths, rejected_lengths = (None, None) if lengths is None else sides(lengths)
        return dpo(
            *sides(logps),
            *sides(reference_logps),
            pairs,
            loss_type=loss_type,
            beta=beta,
            label_smoothing=label_smoothing,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )

    counted = ((step, sum(num_pairs(batch) for batch in step)) for step in steps)
    return run(model, optimizer, counted, ready=ready, loss_of=loss_of, phase=phase)
