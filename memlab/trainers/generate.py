"""Completions sampled from the very model that is trained, with a KV cache.

The cache holds keys and values of every token read so far: 2 L B Hkv T D entries for L layers, B
rows, Hkv key and value heads of D, and T tokens, which are the prompt's and all of the completion's
but the last, for nobody reads that one. It grows by a token at a time, as in transformers: while a
layer's part is copied into a longer one, both are alive.

A simulated device knows no values: there each token is 0, and no completion ends before its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache

from memlab.losses.sequences import number, whole
from memlab.models.compat import cache_argument
from memlab.models.head import HeadParts
from memlab.trainers.reference import evaluating

Label = Callable[[str, Iterable[Tensor]], object]
Tokens = Callable[[int], Iterator[Tensor]]  # the completion's tokens from the n-th on, (B, 1) each
Take = Callable[[Tokens, int], list[Tensor]]


def one_by_one(tokens: Tokens, limit: int) -> list[Tensor]:
    """The first `limit` tokens, or all there are."""
    return list(islice(tokens(0), limit))


def generate(
    model: torch.nn.Module,
    prompts: Tensor,
    *,
    head: HeadParts,
    max_completion_length: int,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int = 0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    label: Label | None = None,
    take: Take = one_by_one,
) -> tuple[Tensor, Tensor]:
    """Completions (B, C) int64 of prompts (B, P), padded on the right, and their mask (B, C) bool.

    A completion ends with the first token of `eos_token_id` (None: never), which the mask takes in,
    or at its limit; C is the longest one's length. Tokens are sampled from softmax(logits /
    temperature), by `generator` of the model's device, or are the likeliest at temperature 0.
    `label("kv_cache", tensors)` is told what the cache is made of: `Meter.label` is one. Meanwhile
    the model is in evaluation mode, where dropout and checkpointing rest. On a simulated device,
    where only shapes count, `take(tokens, limit)` gathers the tokens: it may leave some out, with
    others in their place, and ask for `tokens(n)`, those after n that nobody computed
    (`instruments.extrapolation` does).

    Raises ValueError for a prompt without tokens, a length or a temperature out of range.
    """
    whole("max_completion_length", max_completion_length, 1)
    number("temperature", temperature, lambda t: t >= 0, "at least 0, where 0 is greedy")
    if prompts.ndim != 2 or prompts.numel() == 0:
        raise ValueError(f"prompts must be (B, P), both at least 1, not {tuple(prompts.shape)}")
    simulated = isinstance(prompts, FakeTensor)
    stops = torch.tensor(stop_ids(eos_token_id), dtype=torch.int64, device=prompts.device)
    config = head.backbone.config
    cache: Any = DynamicCache(config=config)  # pyright: ignore[reportArgumentType]
    stopped = torch.zeros_like(prompts[:, :1], dtype=torch.bool)

    def sampled(ids: Tensor, cache: Any) -> Iterator[Tensor]:
        while True:
            ids = _next(ids, head, cache, temperature, generator)
            if label is not None:  # of new tensors: each token's are one longer
                label("kv_cache", (t for layer in cache.layers for t in (layer.keys, layer.values)))
            yield ids
            if len(stops) and not simulated:
                stopped.logical_or_(torch.isin(ids, stops))
                if stopped.all():
                    return

    def tokens(start: int) -> Iterator[Tensor]:
        if not start:
            return sampled(prompts, cache)
        return sampled(prompts[:, :1], _made_up(cache, prompts.shape[1] + start - 1, config))

    with evaluating(model):  # where a checkpointed layer, too, keeps its cache
        new = (take if simulated else one_by_one)(tokens, max_completion_length)
    if simulated:  # no values: each token is 0
        completions = prompts.new_zeros(len(prompts), len(new))
    else:
        completions = torch.cat(new, 1)
    if simulated or not len(stops):
        return completions, torch.ones_like(completions, dtype=torch.bool)
    stop = torch.isin(completions, stops)
    mask = stop.cumsum(1) - stop.long() == 0
    return completions.masked_fill(~mask, pad_token_id), mask


def tempered(head: HeadParts, temperature: float) -> HeadParts:
    """The same parts with logits divided by `temperature`, which scale and softcap take in."""
    softcap = None if head.softcap is None else head.softcap / temperature
    return replace(head, softcap=softcap, logit_scale=head.logit_scale / temperature)


def _next(
    ids: Tensor,
    head: HeadParts,
    cache: Any,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:  # (B, P) of prompts or (B, 1) of a last token -> (B, 1)
    known = {cache_argument(head.backbone): cache, "use_cache": True}
    hidden = head.backbone(input_ids=ids, **known).last_hidden_state
    head = tempered(head, temperature or 1.0)
    z = head.head(hidden[:, -1])  # (B, V)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if head.logit_scale != 1:
        z.mul_(head.logit_scale)
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)
    if temperature:  # the largest of z - log(noise), noise exponential, is drawn from softmax(z)
        z -= torch.empty_like(z).exponential_(generator=generator).log_()
    return z.argmax(-1, keepdim=True)


def _made_up(cache: Any, length: int, config: Any) -> Any:
    """A cache like the given one, of `length` tokens that nobody computed."""
    made: Any = DynamicCache(config=config)
    for at, layer in enumerate(cache.layers):
        shapes = ((*x.shape[:2], length, x.shape[3]) for x in (layer.keys, layer.values))
        made.update(*map(layer.keys.new_empty, shapes), at)
    return made


def stop_ids(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The tokens that end a completion, as a list. Raises TypeError for no int nor list."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id]
