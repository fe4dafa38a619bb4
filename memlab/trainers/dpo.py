"""Direct preference optimization: the loop, plain.

Loss of a step: the sum over pairs of `losses.dpo`, divided by the pairs of the whole step. A batch
holds 2B rows, forwarded together: the B chosen ones first, then the B rejected, as in TRL. The
reference model runs before the policy, so that no activations wait beside it (TRL: after it).

Example, of `rows` with `prompt_ids`, `chosen_ids` and `rejected_ids`, a step of one micro-batch::

    import torch
    from memlab.models.head import head_parts
    from memlab.techniques import chunked_logprobs, pad_to_multiple, truncation
    from memlab.trainers import dpo, reference

    batch = dpo.collate_pairs(truncation.truncate_dpo(rows, 512), pad_to_multiple.collate)
    options = {"head": head_parts(model), "reference": reference.frozen_copy(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    logprobs = chunked_logprobs.token_logprobs
    for loss in dpo.train(model, optimizer, [[batch]], logprobs=logprobs, **options):
        print(loss.item())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.losses.dpo import dpo
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
from memlab.trainers.pairs import num_pairs, sides
from memlab.trainers.reference import check, referring


def collate_pairs(rows: Sequence[Row], collate: Collate) -> Batch:
    """A batch of rows as `techniques.truncation.truncate_dpo` gives them.

    `collate` is that of `techniques.pad_to_multiple` or, without padding, `padding_free`. Raises
    ValueError for a row without `chosen_input_ids`, `chosen_completion_mask` or their `rejected_`,
    or with an answer of no token.
    """
    return collate([*labelled(rows, "chosen_"), *labelled(rows, "rejected_")])


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    head: HeadParts,
    logprobs: HeadFunction,
    fused_loss: HeadFunction | None = None,
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
    `fused_loss(h, w, y, *, rows, reference, num_pairs, ...)` works out head and loss together
    instead (`techniques.liger_losses`); the reference then leaves its hidden states.

    Raises ValueError without a reference, for a batch that does not hold pairs, and what
    `losses.dpo` or the fused loss raises, the latter for rows laid end to end too.
    """
    check(model, head, reference)
    device = next(model.parameters()).device
    options: dict[str, Any] = {
        "loss_type": loss_type,
        "beta": beta,
        "label_smoothing": label_smoothing,
    }

    def ready(batch: Batch) -> tuple[dict[str, Any], tuple[Completions, Any]]:
        arguments, completions = inputs(batch, device), Completions.of(batch, device)
        with phase("reference"), referring(model, head, reference) as frozen:
            found = referred(logprobs, fused_loss, frozen, arguments, completions)
        return arguments, (completions, found)

    def loss_of(arguments: dict[str, Any], targets: tuple[Completions, Any], pairs: int) -> Tensor:
        completions, found = targets
        if fused_loss is not None:
            known = {"reference": found, "num_pairs": pairs, **options}
            return fused(fused_loss, head, arguments, completions, **known)
        logps = completion_logps(logprobs, head, arguments, completions)
        lengths = completions.lengths() if loss_type == "ipo" else None
        chosen_lengths, rejected_lengths = (None, None) if lengths is None else sides(lengths)
        return dpo(
            *sides(logps),
            *sides(found),
            pairs,
            **options,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )

    counted = ((step, sum(num_pairs(batch) for batch in step)) for step in steps)
    return run(model, optimizer, counted, ready=ready, loss_of=loss_of, phase=phase)
