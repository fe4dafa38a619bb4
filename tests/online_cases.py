"""What the tests of trainers with rollouts share: prompts, a reward, and a look at their steps."""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from trainer_cases import chunked, ids

from memlab.instruments.device import simulated_gpu
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.trainers.rollouts import Rollout, rollout

LIMIT = 6  # tokens of a completion
STOPS = list(range(0, 512, 4))  # many, so that completions end at different lengths


def asked(count: int = 4, low: int = 2, high: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [ids(rng, low, high) for _ in range(count)]


def small_ids(completions: Tensor, mask: Tensor) -> Tensor:
    """A reward: the share of a completion's tokens in the lower half of the vocabulary."""
    return ((completions < 256) & mask).sum(1) / mask.sum(1)


def roll(model: nn.Module, seed: int = 0, **options):
    """What trainers take as `rollout`: the same completions for the same seed and weights."""
    options = {
        "max_completion_length": LIMIT,
        "eos_token_id": STOPS,
        "generator": torch.Generator().manual_seed(seed),
        **options,
    }
    return partial(rollout, model, head=head_parts(model), **options)


def rows_of(made: Rollout) -> list[dict]:
    """Each row without its padding, as `trainer_cases.completion_logp` takes it."""
    rows = []
    for row, labels, mask in zip(made.input_ids, made.labels, made.mask, strict=True):
        first = made.input_ids.shape[1] - len(labels) + int((labels != -100).nonzero()[0])
        size = first + int(mask.sum())
        kept = [at >= first for at in range(size)]
        rows.append({"input_ids": row[:size].tolist(), "completion_mask": kept})
    return rows


def direct_logps(model: nn.Module, row: dict) -> Tensor:
    """Slowly and directly: log p of each token of the row's completion."""
    tokens, mask = row["input_ids"], row["completion_mask"]
    logps = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return torch.stack([logps[t - 1, tokens[t]] for t in range(len(tokens)) if mask[t]])


def simulated_phases(train, **options) -> list[str]:
    """The phases of one step of two prompts, run on the simulated GPU in bf16 with a meter."""
    model, frozen = (build_meta("memlab/tiny", dtype=torch.bfloat16).train() for _ in range(2))
    config = load_config("memlab/tiny")
    with simulated_gpu() as device, fake_tensors_are_computed():
        for made in (model, frozen):
            materialize(made, device)
        meter = Meter(device.type, vocab_size=config.vocab_size)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with meter:
            meter.watch(model, optimizer)
            for loss in train(
                model,
                optimizer,
                [[[5] * 8] * 2],
                head=head_parts(model),
                rollout=roll(model, generator=None, label=meter.label),
                reward=small_ids,
                logprobs=chunked,
                reference=head_parts(frozen),
                phase=meter.phase,
                **options,
            ):
                assert loss.shape == ()
        cache = max(sample.bytes[CATEGORIES.index("kv_cache")] for sample in meter.ledger.samples())
    rows, read = 2 * options.get("num_generations", 2), 8 + LIMIT - 1
    entries = rows * config.num_key_value_heads * read * config.head_dim
    whole = 2 * config.num_hidden_layers * entries * 2  # bytes, and a layer's keys a second time
    assert whole < cache <= whole + 2 * entries
    return [name for _, name in meter.ledger.phases if name != "setup"]
