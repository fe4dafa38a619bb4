"""A recipe turned into a training run, on whatever device: the same code real and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from memlab.errors import MemlabError
from memlab.experiments.methods import Method
from memlab.experiments.recipe import Recipe
from memlab.experiments.rules import IN_PAIRS, ONLINE, own, second_model
from memlab.experiments.trainer_batches import longest_row, step_batches
from memlab.instruments.meter import Meter
from memlab.models.attention import resolve_attention
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing
from memlab.models.score import build_score_meta
from memlab.techniques import liger, varlen_attention
from memlab.techniques.pad_to_multiple import padded_length
from memlab.trainers import reference

OPTIMIZERS: dict[str, Any] = {
    "adamw_torch_fused": partial(torch.optim.AdamW, fused=True),
    "adamw_torch": partial(torch.optim.AdamW, foreach=True),
    "sgd": partial(torch.optim.SGD, foreach=True),
}
MOST_TOKENS = 1 << 24  # a micro-batch; twins of integer tensors go no further
MOST_MICRO_BATCHES = 1000  # seconds each
LEARNING_RATE = 2e-5  # TRL's


@dataclass(frozen=True)
class Prepared:
    """A recipe's model without memory, and its batches on the host; made outside a simulation."""

    recipe: Recipe
    model: Any  # on meta
    frozen: Any  # on meta: the reference model, or GKD's teacher; None where there is none
    steps: list[list[Any]]
    vocab_size: int


def prepare(recipe: Recipe, device_type: str, *, extra_steps: int = 0) -> Prepared:
    """Build the model's shape and the batches; text fills them where it will be computed on.

    Raises ValueError for an unknown model, or attention that its device can't compute; MemlabError
    without liger-kernel where it is wanted.
    """
    config = load_config(recipe.model)
    _check_sizes(recipe, config)
    if recipe.use_liger_kernel:
        _load_liger()
    model = _model(recipe, config, device_type)
    model.train()
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    return Prepared(
        recipe,
        model,
        _frozen(recipe, config, device_type),
        step_batches(
            recipe,
            count=recipe.max_steps + extra_steps,
            vocab_size=config.vocab_size,
            fill="zeros" if device_type == "gpu" else "text",
        ),
        config.vocab_size,
    )


def _load_liger() -> None:
    """Import it before anything is measured. Raises MemlabError where it can't be had."""
    try:
        liger.load()
    except ImportError as error:
        raise MemlabError(str(error)) from error


def _model(recipe: Recipe, config: PreTrainedConfig, device_type: str) -> Any:
    build = build_score_meta if recipe.trainer == "reward" else build_meta
    return build(
        config,
        dtype=getattr(torch, recipe.dtype),
        attn_implementation=_attention(recipe, config, device_type),
    )


def _frozen(recipe: Recipe, config: PreTrainedConfig, device_type: str) -> Any:
    """The second model of a trainer that needs one. Raises ValueError for a teacher of other
    words."""
    match second_model(recipe):
        case None:
            return None
        case "reference":
            return _model(recipe, config, device_type)
    name = recipe.teacher_model or recipe.model
    try:
        teacher = load_config(name)
    except ValueError as error:
        raise ValueError(f"teacher_model: {error}") from None
    if teacher.vocab_size != config.vocab_size:
        raise ValueError(
            f"teacher_model={name!r} has {teacher.vocab_size} words, and {recipe.model} "
            f"{config.vocab_size}: give a teacher of the same words, such as {recipe.model!r}"
        )
    return _model(recipe, teacher, device_type)


def _attention(recipe: Recipe, config: PreTrainedConfig, device_type: str) -> str:
    """The attention to build the model with: one that keeps documents apart where it must.

    Raises ValueError where there is none.
    """
    requested = recipe.attn_implementation
    if not recipe.flattened:
        return resolve_attention(config, requested, device_type)
    switch = "padding_free" if recipe.padding_free else "packing"
    if recipe.dtype == "float32" and device_type != "cpu":
        raise ValueError(
            f"{switch}=True with dtype='float32': flash attention takes half precision only; give "
            "dtype='bfloat16'"
        )
    softcap = getattr(config, "attn_logit_softcapping", None)
    if requested not in (None, varlen_attention.NAME):
        instead = f"{switch}=False" if softcap else repr(varlen_attention.NAME)
        return resolve_attention(config, requested, device_type, instead=instead)
    if softcap:
        raise ValueError(
            f"{switch}=True with {recipe.model}, which caps attention scores at {softcap}: only "
            f"'flash_attention_2' does both, with flash-attn on a CUDA card; give {switch}=False"
        )
    varlen_attention.register()
    return varlen_attention.NAME


def _check_sizes(recipe: Recipe, config: PreTrainedConfig) -> None:
    multiple, rows = recipe.pad_to_multiple_of, recipe.per_device_train_batch_size
    read = longest_row(recipe)
    longest = read if recipe.trainer in ONLINE else recipe.max_length or read
    if recipe.trainer in IN_PAIRS:
        rows *= 2
    if recipe.flattened:  # one row, whose rest is a document of padding
        tokens = padded_length(rows * longest, multiple)
        longest = max(longest, (multiple or 1) - 1)
    else:
        longest = padded_length(longest, multiple)
        tokens = rows * longest
    padded = "" if multiple is None else f" with pad_to_multiple_of={multiple}"
    cut = f"max_length={recipe.max_length}"
    if recipe.trainer in ONLINE and recipe.dataset != "full":
        cut = f"max_completion_length={own(recipe, 'max_completion_length')}"
        padded = f" after the prompts of dataset={recipe.dataset!r}{padded}"
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        raise ValueError(
            f"{cut}{padded}: rows of {longest} tokens, and {recipe.model} "
            f"has {positions} positions; give at most {positions}"
        )
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"per_device_train_batch_size={rows} times {cut}{padded}: up "
            f"to {tokens} tokens; memlab runs at most {MOST_TOKENS} at once"
        )
    micro_batches = recipe.gradient_accumulation_steps * recipe.max_steps
    if micro_batches > MOST_MICRO_BATCHES or micro_batches * tokens > 4 * MOST_TOKENS:
        raise ValueError(
            f"gradient_accumulation_steps={recipe.gradient_accumulation_steps} times max_steps="
            f"{recipe.max_steps}: {micro_batches} micro-batches; memlab runs at most "
            f"{min(MOST_MICRO_BATCHES, 4 * MOST_TOKENS // tokens)} of this size"
        )


def train(
    prepared: Prepared,
    device: torch.device,
    meter: Meter,
    *,
    init: bool,
    chunk: int | None = None,
) -> Iterator[Tensor]:
    """Give the model its memory on `device` and run the steps, one loss a step.

    `init` fills the weights; a simulated device has nothing to fill. `chunk` is the rows a chunk of
    the chunked losses; None leaves them theirs.
    """
    recipe, model = prepared.recipe, prepared.model
    materialize(model, device, init=init, seed=recipe.seed)
    frozen = None
    if prepared.frozen is not None:
        frozen = reference.frozen(materialize(prepared.frozen, device, init=init, seed=recipe.seed))
        meter.watch(prepared.frozen)
    optimizer = OPTIMIZERS[recipe.optim](model.parameters(), lr=LEARNING_RATE)
    meter.watch(model, optimizer)
    method = Method(recipe, model, frozen, chunk, meter)
    yield from method.train(optimizer, prepared.steps)
