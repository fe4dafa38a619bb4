"""Completions: transformers' own, ended by stop tokens, and a KV cache of the formula's bytes."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from trainer_cases import with_lora
from transformers import PreTrainedModel

from memlab.instruments.device import simulated_gpu
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing, fake_tensors_are_computed
from memlab.models.head import HeadParts, head_parts
from memlab.trainers.generate import generate, tempered

NAMES = ("memlab/tiny", "memlab/tiny-gemma2")


def tiny(name: str = "memlab/tiny") -> PreTrainedModel:
    return materialize(build_meta(name, dtype=torch.float32), "cpu", init=True, seed=3).train()


def prompts(rows: int = 3, tokens: int = 5) -> Tensor:
    return torch.randint(1, 200, (rows, tokens), generator=torch.Generator().manual_seed(1))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_completions_are_those_of_transformers(name: str) -> None:
    model, asked = tiny(name), prompts()
    found, mask = generate(
        model, asked, head=head_parts(model), max_completion_length=6, temperature=0.0
    )
    expected = model.eval().generate(
        asked, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(found, expected[:, 5:])
    assert len(found.unique()) > 1
    assert bool(mask.all())


@pytest.mark.parametrize(
    ("temperature", "softcap", "logit_scale"), [(1.0, None, 1.0), (0.5, None, 1.7), (0.3, 0.4, 6.0)]
)
def test_samples_follow_the_softmax_of_the_logits(
    temperature: float, softcap: float | None, logit_scale: float
) -> None:
    model, asked = tiny(), prompts(1).expand(2000, -1)[:, :2]
    found, _ = generate(
        model,
        asked,
        head=replace(head_parts(model), softcap=softcap, logit_scale=logit_scale),
        max_completion_length=1,
        temperature=temperature,
        generator=seeded(),
    )
    with torch.no_grad():
        logits = logit_scale * model(input_ids=asked[:1]).logits[0, -1]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    # samples are as surprising as their entropy says, give or take the mean's standard error
    surprise = -logp[found[:, 0]].mean()
    entropy = -(logp.exp() * logp).sum()
    deviation = ((logp.exp() * logp.square()).sum() - entropy**2).sqrt()
    assert abs(surprise - entropy) < 4 * deviation / len(found) ** 0.5
    assert len(found.unique()) > 20


def test_a_generator_repeats_its_samples() -> None:
    model, asked = tiny(), prompts()
    head = head_parts(model)
    a, b, c = (
        generate(model, asked, head=head, max_completion_length=8, generator=seeded(s))[0]
        for s in (0, 0, 1)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_completion_ends_with_its_stop_token() -> None:
    model, asked = tiny(), prompts(4)
    head = head_parts(model)
    free, _ = generate(model, asked, head=head, max_completion_length=8, generator=seeded())
    stops = [int(free[0, 2]), int(free[1, 4])]
    found, mask = generate(
        model,
        asked,
        head=head,
        max_completion_length=8,
        eos_token_id=stops,
        pad_token_id=7,
        generator=seeded(),
    )
    lengths = []
    for row in free.tolist():
        ends = [at + 1 for at, token in enumerate(row) if token in stops]
        lengths.append(min([*ends, 8]))
    assert lengths[0] <= 3
    assert lengths[1] <= 5
    assert mask.sum(1).tolist() == lengths
    for row, length, whole in zip(found, lengths, free, strict=True):
        assert row[:length].tolist() == whole[:length].tolist()
        assert row[length:].tolist() == [7] * (found.shape[1] - length)


def test_nothing_is_read_once_every_row_has_stopped() -> None:
    model, asked, read = tiny(), prompts(2), []
    head = head_parts(model)
    (first, _) = generate(model, asked, head=head, max_completion_length=3, temperature=0.0)
    head.backbone.register_forward_pre_hook(lambda *_: read.append(1))
    stops = [int(first[0, 1]), int(first[1, 0])]
    found, _ = generate(
        model,
        asked,
        head=head,
        max_completion_length=50,
        temperature=0.0,
        eos_token_id=stops,
    )
    assert found.shape[1] == len(read) <= 2


def test_the_modes_of_modules_come_back() -> None:
    model = tiny()
    enable_checkpointing(model)
    frozen = next(m for m in model.modules() if not list(m.children()))
    frozen.eval()
    modes = []
    head_parts(model).backbone.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    found, _ = generate(
        model, prompts(), head=head_parts(model), max_completion_length=3, temperature=0.0
    )
    assert modes == [False] * 3
    assert model.training
    assert not frozen.training
    plain = tiny()
    expected, _ = generate(
        plain, prompts(), head=head_parts(plain), max_completion_length=3, temperature=0.0
    )
    assert torch.equal(found, expected)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_tempered_head_divides_its_logits() -> None:
    def logits(head: HeadParts, hidden: Tensor) -> Tensor:
        z = head.logit_scale * head.head(hidden)
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    hidden, layer = torch.randn(4, 8, generator=seeded()), nn.Linear(8, 11)
    for softcap in (None, 0.3):
        head = HeadParts(nn.Identity(), layer, softcap=softcap, logit_scale=0.5)
        torch.testing.assert_close(
            logits(tempered(head, 0.7), hidden), logits(head, hidden) / 0.7, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("limit", [1, 4])
def test_the_simulated_cache_has_the_bytes_of_its_formula(limit: int) -> None:
    rows, tokens = 4, 16
    model = build_meta("memlab/tiny", dtype=torch.bfloat16).train()
    config = load_config("memlab/tiny")
    kept: list[list[Tensor]] = []
    with simulated_gpu() as device, fake_tensors_are_computed():
        materialize(model, device)
        meter = Meter(device.type, vocab_size=config.vocab_size)

        def label(category: str, tensors: Iterable[Tensor]) -> None:
            kept[:] = [[*tensors]]
            meter.label(category, kept[0])

        with meter:
            asked = torch.ones(rows, tokens, dtype=torch.int64, device=device)
            meter.begin_step()
            with meter.phase("rollout"):
                found, mask = generate(
                    model,
                    asked,
                    head=head_parts(model),
                    max_completion_length=limit,
                    eos_token_id=0,
                    label=label,
                )
            live = [0] * len(CATEGORIES)
            for sample in meter.ledger.samples():
                live = list(sample.bytes)
        assert found.shape == mask.shape == (rows, limit)
        assert int(mask.sum()) == rows * limit
        read = tokens + limit - 1
        heads, size = config.num_key_value_heads, config.head_dim
        expected = 2 * config.num_hidden_layers * rows * heads * read * size * 2
        assert sum(t.untyped_storage().nbytes() for t in kept[0]) == expected
        assert live[CATEGORIES.index("kv_cache")] == expected


def test_the_real_cache_has_the_bytes_of_its_formula() -> None:
    model, config, kept = tiny(), load_config("memlab/tiny"), []

    def label(category: str, tensors: Iterable[Tensor]) -> None:
        kept[:] = [*tensors]
        meter.label(category, kept)

    with Meter("cpu", vocab_size=config.vocab_size) as meter:
        generate(model, prompts(), head=head_parts(model), max_completion_length=4, label=label)
        live = list(meter.ledger.samples())[-1].bytes
    entries = 3 * config.num_key_value_heads * (5 + 4 - 1) * config.head_dim
    expected = 2 * config.num_hidden_layers * entries * 4
    assert sum(t.untyped_storage().nbytes() for t in kept) == expected
    assert live[CATEGORIES.index("kv_cache")] == expected


def test_completions_cost_the_same_real_and_simulated() -> None:
    def events(device: torch.device) -> list[tuple[int, int, int]]:
        model = materialize(built.pop(), device)
        asked = torch.ones(3, 5, dtype=torch.int64, device=device)
        with Meter(device.type, vocab_size=load_config("memlab/tiny").vocab_size) as meter:
            generate(
                model, asked, head=head_parts(model), max_completion_length=4, label=meter.label
            )
        births = (meter.ledger.births[max(k, ~k)] for k in meter.ledger.events)
        return [(k, b.nbytes, b.category) for k, b in zip(meter.ledger.events, births, strict=True)]

    built = [build_meta("memlab/tiny", attn_implementation="eager") for _ in range(2)]
    real = events(torch.device("cpu"))
    with simulated_gpu() as device, fake_tensors_are_computed():
        simulated = events(device)
    assert len(real) > 500
    assert real == simulated


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_an_adapter_takes_part() -> None:
    plain, adapted = tiny(), with_lora(tiny())
    asked = prompts()
    options = {"max_completion_length": 6, "temperature": 0.0}
    found, _ = generate(adapted, asked, head=head_parts(adapted), **options)
    expected = adapted.eval().generate(
        input_ids=asked, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(found, expected[:, 5:])
    assert not torch.equal(found, generate(plain, asked, head=head_parts(plain), **options)[0])


def test_wrong_arguments_are_refused() -> None:
    model = tiny()
    head = head_parts(model)
    for limit in (0, 2.0):
        message = f"max_completion_length must be a whole number of at least 1, not {limit}"
        with pytest.raises(ValueError, match=message):
            generate(model, prompts(), head=head, max_completion_length=limit)
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        generate(model, prompts(), head=head, max_completion_length=1, temperature=-1.0)
    with pytest.raises(ValueError, match=r"prompts must be \(B, P\)"):
        generate(model, prompts()[:, :0], head=head, max_completion_length=1)
