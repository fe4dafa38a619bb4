"""Rollouts: a step's prompts with the completions that the policy gives them now, as batches.

Prompts of one length are completed together, one length after the other, since memlab's attention
takes no padding on the left. What needs the whole step, rewards and advantages, is worked out on
the `Rollout`, before `online.split` makes micro-batches of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.losses.sequences import number, whole
from memlab.losses.sft import IGNORED
from memlab.models.head import HeadParts
from memlab.trainers.generate import generate


class Rollout(NamedTuple):
    """Prompts with their completions, B rows in the order of the prompts, int64."""

    input_ids: Tensor  # (B, T) prompt and completion, then padding
    labels: Tensor  # (B, S) of the last S positions of input_ids: -100 but for the completions
    completions: Tensor  # (B, C) the completions alone, then padding
    mask: Tensor  # (B, C) bool: what of them is no padding; the stop token counts


Roll = Callable[[Sequence[Any]], Rollout]  # of prompts, (P,) token ids each


def rollout(
    model: torch.nn.Module,
    prompts: Sequence[Any],
    *,
    head: HeadParts,
    max_completion_length: int,
    pad_token_id: int = 0,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    **options: Any,
) -> Rollout:
    """One completion for each prompt, by `generate.generate`, whose `options` these are.

    Afterwards prompts lose tokens on the left until they fit into `max_length` beside the longest
    completion (as `techniques.truncation.truncate_prompts` cuts them); T is rounded up to
    `pad_to_multiple_of`. Give `functools.partial(rollout, model, ...)` to a trainer.

    Raises ValueError for no prompt, an empty one, a `max_length` without room for prompts, and a
    multiple below 1.
    """
    device = next(model.parameters()).device
    rows = checked(prompts, pad_to_multiple_of)
    order, read, new, masks = [], [], [], []
    for length in sorted({len(row) for row in rows}):
        group = [at for at, row in enumerate(rows) if len(row) == length]
        order += group
        read.append(torch.stack([rows[at] for at in group]).to(device))
        completions, mask = generate(
            model,
            read[-1],
            head=head,
            max_completion_length=max_completion_length,
            pad_token_id=pad_token_id,
            **options,
        )
        new.append(completions)
        masks.append(mask)
    return laid_out(
        order,
        read,
        new,
        masks,
        pad_token_id=pad_token_id,
        max_length=max_length,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def checked(prompts: Sequence[Any], pad_to_multiple_of: int | None) -> list[Tensor]:
    """The prompts as int64 tensors (P,); ValueError for none, and for a multiple below 1."""
    rows = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
    if not rows:
        raise ValueError("prompts are empty: a step needs at least one")
    if pad_to_multiple_of is not None:
        whole("pad_to_multiple_of", pad_to_multiple_of, 1, ", or None")
    return rows


def laid_out(
    order: Sequence[int],
    read: Sequence[Tensor],
    new: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    pad_token_id: int,
    max_length: int | None,
    pad_to_multiple_of: int | None,
) -> Rollout:
    """A `Rollout` of parts, each of prompts of one length, the shortest first.

    A part is prompts (b, P), their completions (b, C) padded on the right, and the mask (b, C) of
    these; C may differ. `order` has the place of each of the parts' rows among the step's prompts.
    """
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=read[0].device)

    def whole(parts: Iterable[Tensor], width: int, value: int) -> Tensor:
        return torch.cat([F.pad(x, (0, width - x.shape[1]), value=value) for x in parts])[back]

    longest = max(ids.shape[1] for ids in new)
    if max_length is not None:
        wanted = f"above the {longest} tokens of the longest completion"
        number("max_length", max_length, lambda n: n > longest, wanted)
        read = [ids[:, longest - max_length :] for ids in read]
    both = [torch.cat(pair, 1) for pair in zip(read, new, strict=True)]
    learnt = [
        F.pad(ids.masked_fill(~mask, IGNORED), (prompt.shape[1], 0), value=IGNORED)
        for prompt, ids, mask in zip(read, new, masks, strict=True)
    ]
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    width = -(-max(ids.shape[1] for ids in both) // multiple) * multiple
    return Rollout(
        whole(both, width, pad_token_id),
        whole(learnt, width, IGNORED)[:, read[0].shape[1] :],  # the shortest prompts come first
        whole(new, longest, pad_token_id),
        whole(masks, longest, False),
    )
