"""The RLOO loop: its values are the formula's, and how a step is split changes nothing."""

import contextlib
import copy
import math

import pytest
import torch
from online_cases import (
    asked,
    direct_logps,
    roll,
    rows_of,
    simulated_phases,
    small_ids,
)
from trainer_cases import chunked, full, losses_and_norms, tiny

from memlab.models.head import head_parts
from memlab.trainers import rloo
from memlab.trainers.reference import frozen_copy


def step_of(model, *, lr: float = 0.0, **options):
    """Losses and gradient norms of one step of two prompts, four completions each."""
    given = {
        "head": head_parts(model),
        "rollout": roll(model),
        "reward": small_ids,
        "logprobs": full,
        "num_generations": 4,
        **options,
    }
    return losses_and_norms(rloo.train, model, asked(2), lr, **given)


def by_hand(model, old, reference, made, beta: float) -> float:
    rewards = small_ids(made.completions, made.mask).tolist()
    ratios, strayed = [], []
    for row in rows_of(made):
        with torch.no_grad():
            now, then, fixed = (float(direct_logps(m, row).sum()) for m in (model, old, reference))
        ratios.append(math.exp(now - then))
        strayed.append(then - fixed)
    total = 0.0
    scores = [r - beta * s for r, s in zip(rewards, strayed, strict=True)]
    for at, rho in enumerate(ratios):
        group = scores[at // 4 * 4 : at // 4 * 4 + 4]
        advantage = scores[at] - (sum(group) - scores[at]) / 3
        total -= min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
    return total / len(ratios)


@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])
def test_both_iterations_are_the_formula_of_transformers_logits(name: str) -> None:
    model, reference = tiny(name), tiny(name, seed=5)
    old, made = copy.deepcopy(model), roll(model)([p for p in asked(2) for _ in range(4)])
    losses = rloo.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        [asked(2)],
        head=head_parts(model),
        rollout=roll(model),
        reward=small_ids,
        logprobs=full,
        num_generations=4,
        num_iterations=2,
        reference=frozen_copy(reference),
        beta=0.5,
    )
    # at first every ratio is 1, and advantages add up to 0
    assert next(losses).item() == pytest.approx(0, abs=1e-5)
    moved = copy.deepcopy(model)  # the weights that the second loss will be of
    expected = by_hand(moved, old, reference, made, 0.5)
    assert abs(expected) > 1e-2
    assert next(losses).item() == pytest.approx(expected, rel=1e-3)
    assert next(losses, None) is None


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_one_batch_equals_micro_batches_and_chunks(beta: float) -> None:
    options = {"beta": beta, "num_iterations": 2, "lr": 0.3, "normalize_advantages": True}
    options["reference"] = frozen_copy(tiny(seed=5))
    expected = step_of(tiny(), **options)
    for size in (1, 3):  # 3: parts of unequal sizes, that cut through groups
        found = step_of(tiny(), per_device_train_batch_size=size, **options)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    found = step_of(tiny(), logprobs=chunked, **options)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_divergence_is_a_part_of_the_reward() -> None:
    reference = frozen_copy(tiny(seed=5))
    flat = {"reward": lambda ids, mask: torch.ones(len(ids)), "reference": reference}
    (_, unmoved), (_, moved) = step_of(tiny(), beta=0.0, **flat), step_of(tiny(), **flat)
    assert unmoved == 0.0
    assert moved > 1e-3


def test_no_reference_is_asked_for_without_a_divergence() -> None:
    seen = []

    @contextlib.contextmanager
    def phase(name: str):
        seen.append(name)
        yield

    def counting(h, w, y, **head):
        seen.append("read")
        return full(h, w, y, **head)

    step_of(tiny(), beta=0.0, logprobs=counting, phase=phase)
    assert seen == ["rollout", "reference", "forward", "read", "backward", "optimizer"]
    seen.clear()
    step_of(tiny(), reference=frozen_copy(tiny()), logprobs=counting, phase=phase)
    assert seen[:4] == ["rollout", "reference", "read", "read"]


def test_a_temperature_divides_the_logits_that_are_trained() -> None:
    model = tiny()
    fixed = roll(model)([p for p in asked(2) for _ in range(4)])

    def colder(*args, logit_scale, **options):
        return full(*args, logit_scale=logit_scale / 0.5, **options)

    options = {"rollout": lambda prompts: fixed, "reference": frozen_copy(tiny(seed=5))}
    expected = step_of(model, logprobs=colder, **options)[1]
    assert step_of(model, temperature=0.5, **options)[1] == pytest.approx(expected, rel=1e-5)
    assert step_of(model, **options)[1] != pytest.approx(expected, rel=1e-2)


def test_a_tiny_model_comes_to_write_what_is_rewarded() -> None:
    model, rewards = tiny(), []

    def noted(completions, mask):
        rewards.append(small_ids(completions, mask).mean().item())
        return small_ids(completions, mask)

    losses = rloo.train(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-2),
        [asked(8)] * 15,
        head=head_parts(model),
        rollout=roll(model, eos_token_id=None),
        reward=noted,
        logprobs=chunked,
        num_generations=4,
        beta=0.0,
    )
    assert len(list(losses)) == 15
    assert rewards[0] < 0.65
    assert rewards[-1] > 0.9


def test_its_steps_run_on_the_simulated_gpu() -> None:
    phases = simulated_phases(rloo.train, num_generations=4, per_device_train_batch_size=4)
    assert phases == ["rollout", "reference", *["forward", "backward"] * 2, "optimizer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "reference=None: .* has no peft adapter"),
        ({"beta": -1.0}, "beta must be at least 0"),
        ({"beta": 0.0, "num_iterations": 0}, "num_iterations must be a whole number of at least 1"),
        ({"beta": 0.0, "num_generations": 1}, "num_generations must be a whole number"),
        ({"beta": 0.0, "temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_what_cannot_work_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(tiny(), **change)
