"""The functions by which a recipe's trainer gets from hidden states to what its loss needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from memlab.experiments.recipe import Recipe
from memlab.techniques import (
    chunked_divergence,
    chunked_logprobs,
    chunked_loss,
    fused_head,
    liger,
    liger_losses,
)

HeadFunction = Callable[..., Tensor]

LIGER_LOSSES: dict[str, HeadFunction] = {  # head and loss together
    "dpo": liger_losses.dpo,
    "kto": liger_losses.kto,
    "grpo": liger_losses.grpo,
}
HEAD_LOSSES: dict[str | None, HeadFunction] = {
    "nll": chunked_loss.cross_entropy,
    "chunked_nll": chunked_loss.chunked_cross_entropy,
    "dft": partial(chunked_loss.chunked_cross_entropy, loss_type="dft"),
}


def head_loss(recipe: Recipe, chunk: int | None = None) -> HeadFunction:
    """SFT's: a loss (). `chunk` is the rows of a chunk, where there are chunks; None: its own."""
    if recipe.use_liger_kernel:
        return liger.cross_entropy
    if recipe.fused_head is None:
        return partial(HEAD_LOSSES[recipe.loss_type], **_chunks(chunk))
    return partial(
        fused_head.fused_cross_entropy,
        loss_type="dft" if recipe.loss_type == "dft" else "nll",
        frugal=recipe.fused_head == "frugal",
        **_chunks(chunk),
    )


def logprobs(recipe: Recipe, chunk: int | None = None) -> HeadFunction:
    """Log-probabilities of tokens (N,), for the trainers that compare those. `chunk` as above.

    With Liger they come a chunk at a time, too, where its losses leave some to be made.
    """
    if recipe.loss_type == "nll" and not recipe.use_liger_kernel:
        return chunked_logprobs.full_token_logprobs
    function = fused_head.fused_token_logprobs if recipe.fused_head else None
    return partial(function or chunked_logprobs.token_logprobs, **_chunks(chunk))


def divergence(recipe: Recipe, chunk: int | None = None) -> HeadFunction:
    """GKD's divergence of student and teacher (). `chunk` as above."""
    if recipe.use_liger_kernel:
        return liger_losses.jsd
    if recipe.loss_type == "nll":
        return chunked_divergence.full_divergence
    return partial(chunked_divergence.divergence, **_chunks(chunk))


def _chunks(chunk: int | None) -> dict[str, Any]:
    return {} if chunk is None else {"chunk": chunk}
