"""A rollout that is mostly not run leaves the ledger of one that is, event for event."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from online_cases import small_ids
from torch import Tensor
from trainer_cases import chunked
from transformers import PreTrainedConfig

from memlab.experiments.simulation import replay
from memlab.instruments import extrapolation
from memlab.instruments.device import simulated_gpu
from memlab.instruments.extrapolation import Extrapolation
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.trainers import grpo
from memlab.trainers.generate import Take, one_by_one
from memlab.trainers.rollouts import Rollout, rollout

RUN = extrapolation.FIRST + extrapolation.LAST  # tokens of a prompt's length that are run
Tokens = Callable[[int], Iterator[Tensor]]


def shape(name: str, **changes: object) -> PreTrainedConfig:
    config = load_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def qwen3(layers: int = 2) -> PreTrainedConfig:
    return shape(
        "Qwen/Qwen3-1.7B", num_hidden_layers=layers, layer_types=["full_attention"] * layers
    )


def rolled(
    config: PreTrainedConfig,
    prompts: list[int],
    limit: int,
    *,
    extrapolate: bool,
    dtype: torch.dtype = torch.bfloat16,
    attention: str | None = None,
    **options: Any,
) -> tuple[Meter, int, Rollout]:
    """The meter after a rollout of prompts of these lengths, the passes it took, the rollout."""
    model = build_meta(config, dtype=dtype, attn_implementation=attention).train()
    passes = []
    with simulated_gpu() as device, fake_tensors_are_computed():
        materialize(model, device)
        head = head_parts(model)
        head.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
        with Meter(device.type, vocab_size=config.vocab_size) as meter:
            meter.watch(model)
            meter.begin_step()
            with meter.phase("rollout"):
                made = rollout(
                    model,
                    [[5] * length for length in prompts],
                    head=head,
                    max_completion_length=limit,
                    label=meter.label,
                    take=Extrapolation(meter) if extrapolate else one_by_one,
                    **options,
                )
            after = torch.ones(3, device=device)  # and goes on as after the whole run
            del after
    return meter, len(passes), made


def assert_same(fast: Meter, slow: Meter) -> None:
    assert fast.ledger.events == slow.ledger.events
    assert fast.ledger.births == slow.ledger.births
    assert fast.ledger.phases == slow.ledger.phases
    assert fast.ledger.workspaces == slow.ledger.workspaces
    assert fast.ledger.step_start == slow.ledger.step_start
    assert fast.live_bytes == slow.live_bytes
    assert fast.alive(0) == slow.alive(0)
    assert (fast.host_bytes, fast.host_peak_bytes) == (slow.host_bytes, slow.host_peak_bytes)


CASES = {
    "tiny": (lambda: load_config("memlab/tiny"), [5, 5, 5], 20, {}),
    "tiny-odd-sizes": (lambda: load_config("memlab/tiny"), [7], 17, {"dtype": torch.float32}),
    "tiny-grouped": (lambda: load_config("memlab/tiny"), [4, 9, 4, 1], 9, {"eos_token_id": 3}),
    "tiny-greedy": (lambda: load_config("memlab/tiny"), [3] * 5, 9, {"temperature": 0.0}),
    "tiny-eager": (lambda: load_config("memlab/tiny"), [11, 11], 14, {"attention": "eager"}),
    "tiny-gemma2": (lambda: load_config("memlab/tiny-gemma2"), [6, 6], 11, {}),
    "tiny-llama": (lambda: load_config("memlab/tiny-llama"), [6, 2], 9, {}),
    "qwen3": (qwen3, [64] * 8, 24, {}),
    "qwen3-float32": (qwen3, [17, 40, 17], 11, {"dtype": torch.float32}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_ledger_is_that_of_a_whole_run(case: str) -> None:
    config, prompts, limit, options = CASES[case]
    (fast, few, short), (slow, all_of_them, whole) = (
        rolled(config(), prompts, limit, extrapolate=which, **options) for which in (True, False)
    )
    lengths = len(set(prompts))
    assert (few, all_of_them) == (RUN * lengths, limit * lengths)
    assert_same(fast, slow)
    assert [x.shape for x in short] == [x.shape for x in whole]
    for expandable in (False, True):
        a, b = (replay(m.ledger, expandable_segments=expandable) for m in (fast, slow))
        assert a.peak_allocated_bytes == b.peak_allocated_bytes
        assert a.peak_reserved_bytes == b.peak_reserved_bytes


@pytest.mark.parametrize("limit", range(1, RUN + 3))
def test_short_completions_are_run(limit: int) -> None:
    config = load_config("memlab/tiny")
    fast, slow = (rolled(config, [4, 4], limit, extrapolate=w)[0] for w in (True, False))
    assert_same(fast, slow)


@pytest.mark.parametrize(("prompt", "run"), [(6, 9 + extrapolation.LAST), (20, RUN)])
def test_a_window_that_fills_up_is_run_token_by_token(prompt: int, run: int) -> None:
    """One that is full from the start is not."""

    def config() -> PreTrainedConfig:
        return shape("memlab/tiny-gemma2", sliding_window=10)

    (fast, passes, short), (slow, _, whole) = (
        rolled(config(), [prompt] * 2, 9, extrapolate=which) for which in (True, False)
    )
    assert passes == run
    assert_same(fast, slow)
    assert short.mask.shape == whole.mask.shape


def test_training_goes_on_as_after_a_whole_run() -> None:
    def run(take: Callable[[Meter], Take]) -> tuple[Meter, int]:
        passes = []
        model = build_meta("memlab/tiny", dtype=torch.bfloat16).train()
        with simulated_gpu() as device, fake_tensors_are_computed():
            materialize(model, device)
            meter = Meter(device.type, vocab_size=load_config("memlab/tiny").vocab_size)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            with meter:
                meter.watch(model, optimizer)
                head = head_parts(model)
                head.backbone.register_forward_pre_hook(
                    lambda *_: None if torch.is_grad_enabled() else passes.append(1)
                )
                losses = grpo.train(
                    model,
                    optimizer,
                    [[[5] * 8, [6] * 8]] * 2,
                    head=head,
                    rollout=partial(
                        rollout,
                        model,
                        head=head,
                        max_completion_length=16,
                        label=meter.label,
                        take=take(meter),
                    ),
                    reward=small_ids,
                    logprobs=chunked,
                    num_generations=4,
                    per_device_train_batch_size=4,
                    phase=meter.phase,
                )
                assert [loss.shape for loss in losses] == [()] * 2
        return meter, len(passes)

    (fast, few), (slow, many) = run(Extrapolation), run(lambda _: one_by_one)
    assert_same(fast, slow)
    assert (few, many) == (
        RUN + extrapolation.FIRST,
        2 * 16,
    )  # the second rollout is like the first


def counted(tokens: Callable[[torch.device], Tokens], limit: int, take: str) -> tuple[Meter, int]:
    with simulated_gpu() as device, Meter(device.type) as meter:
        taken = (
            Extrapolation(meter)(tokens(device), limit)
            if take == "extrapolated"
            else one_by_one(tokens(device), limit)
        )
        assert [tuple(token.shape) for token in taken] == [(2, 1)] * limit
        meter.label("logits", taken[-1:])  # of this token alone
    return meter, len(taken)


def steady(device: torch.device, at: int, state: list[Tensor]) -> None:
    state[:] = [torch.empty(100 + 3 * at, device=device)]


def every_third(device: torch.device, at: int, state: list[Tensor]) -> None:
    steady(device, at, state)
    if at % 3 == 2:
        torch.empty(8, device=device)


def quadratic(device: torch.device, at: int, state: list[Tensor]) -> None:
    state[:] = [torch.empty(100 + at * at, device=device)]


def in_buckets(device: torch.device, at: int, state: list[Tensor]) -> None:
    state[:] = [torch.empty(1000 * (1 + at // 10), device=device)]


def hoarding(device: torch.device, at: int, state: list[Tensor]) -> None:
    state.append(torch.empty(100, device=device))


def kept_for_three(device: torch.device, at: int, state: list[Tensor]) -> None:
    state[:] = [*state[-2:], torch.empty(100, device=device)]


def on_the_host(device: torch.device, at: int, state: list[Tensor]) -> None:
    steady(device, at, state)
    state.append(torch.empty(at, device=device).to("cpu"))


def through_the_host(device: torch.device, at: int, state: list[Tensor]) -> None:
    steady(device, at, state)
    torch.empty(at, device=device).to("cpu")


@pytest.mark.parametrize(
    "body",
    [
        steady,
        every_third,
        quadratic,
        in_buckets,
        hoarding,
        kept_for_three,
        on_the_host,
        through_the_host,
    ],
    ids=lambda body: body.__name__,
)
def test_what_does_not_repeat_is_run(body: Callable) -> None:
    ran = []

    def tokens(device: torch.device) -> Tokens:
        def start(first: int) -> Iterator[Tensor]:
            state: list[Tensor] = []
            if first:
                body(device, first - 1, state)

            def running() -> Iterator[Tensor]:
                at = first
                while True:
                    ran.append(at)
                    body(device, at, state)
                    yield torch.empty(2, 1, device=device)
                    at += 1

            return running()

        return start

    limit = 30
    fast, _ = counted(tokens, limit, "extrapolated")
    few = len(ran)
    slow, _ = counted(tokens, limit, "one by one")
    assert few == (RUN if body is steady else limit + extrapolation.LAST)
    assert_same(fast, slow)


def test_what_the_tokens_set_apart_leave_behind_is_an_error() -> None:
    left: list[Tensor] = []

    def tokens(device: torch.device) -> Tokens:
        def running(first: int) -> Iterator[Tensor]:
            while True:
                if first:
                    left.append(torch.empty(100, device=device))
                yield torch.empty(2, 1, device=device)

        return running

    with pytest.raises(RuntimeError, match="left storages behind, made by aten"):
        counted(tokens, 30, "extrapolated")
