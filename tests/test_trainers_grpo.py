"""The GRPO loop: its values are the formula's, and how a step is split changes nothing."""

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
from trainer_cases import chunked, full, losses_and_norms, tiny, with_lora

from memlab.losses.grpo import LOSS_TYPES
from memlab.models.head import head_parts
from memlab.trainers import grpo, rloo
from memlab.trainers.reference import frozen_copy

LIMIT = 9  # max_completion_length


def step_of(model, *, seed: int = 0, lr: float = 0.0, prompts=None, **options):
    """Losses and gradient norms of one step of two prompts, four completions each."""
    given = {
        "head": head_parts(model),
        "rollout": roll(model, seed),
        "reward": small_ids,
        "logprobs": full,
        "num_generations": 4,
        **options,
    }
    return losses_and_norms(
        grpo.train, model, asked(2) if prompts is None else prompts, lr, **given
    )


def by_hand(model, old, reference, made, loss_type: str, beta: float) -> float:
    rewards = small_ids(made.completions, made.mask)
    means, tokens = [], []
    for at, row in enumerate(rows_of(made)):
        group = rewards[at // 4 * 4 : at // 4 * 4 + 4]
        advantage = float((rewards[at] - group.mean()) / (group.std() + 1e-4))
        with torch.no_grad():
            now, before, fixed = (direct_logps(m, row).tolist() for m in (model, old, reference))
        costs = []
        drift = sum(now) / len(now) - sum(before) / len(before)
        for p, q, r in zip(now, before, fixed, strict=True):
            rho = math.exp(drift if loss_type == "luspo" else p - q)
            gain = min(rho * advantage, min(max(rho, 0.8), 1.2) * advantage)
            costs.append(-gain + beta * (math.exp(r - p) - (r - p) - 1))
        tokens += costs
        means.append(sum(costs) / len(costs))
    return {
        "dapo": sum(tokens) / len(tokens),
        "bnpo": sum(tokens) / len(tokens),
        "grpo": sum(means) / len(means),
        "dr_grpo": sum(tokens) / (len(means) * LIMIT),
        "luspo": sum(tokens) / len(means),
    }[loss_type]


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [*(("memlab/tiny", loss_type) for loss_type in LOSS_TYPES), ("memlab/tiny-gemma2", "dapo")],
)
def test_both_iterations_are_the_formula_of_transformers_logits(name: str, loss_type: str) -> None:
    model, reference = tiny(name), tiny(name, seed=5)
    old, made = copy.deepcopy(model), roll(model)([p for p in asked(2) for _ in range(4)])
    losses = grpo.train(
        model,
        torch.optim.SGD(model.parameters(), lr=3.0),
        [asked(2)],
        head=head_parts(model),
        rollout=roll(model),
        reward=small_ids,
        logprobs=full,
        num_generations=4,
        num_iterations=2,
        reference=frozen_copy(reference),
        beta=0.1,
        loss_type=loss_type,
        max_completion_length=LIMIT,
    )
    assert next(losses).item() == pytest.approx(
        by_hand(old, old, reference, made, loss_type, 0.1), rel=1e-4
    )
    moved = copy.deepcopy(model)  # the weights that the second loss will be of
    assert next(losses).item() == pytest.approx(
        by_hand(moved, old, reference, made, loss_type, 0.1), rel=1e-4
    )
    assert next(losses, None) is None


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo"])
def test_one_batch_equals_micro_batches_and_chunks(loss_type: str) -> None:
    options = {"loss_type": loss_type, "beta": 0.1, "num_iterations": 2, "lr": 0.5}
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 6
    options["reference"] = frozen_copy(tiny(seed=5))
    expected = step_of(tiny(), **options)
    for size in (1, 3):  # 3: parts of unequal sizes, that cut through groups
        found = step_of(tiny(), per_device_train_batch_size=size, **options)
        assert found == pytest.approx(expected, rel=1e-5)
    assert step_of(tiny(), logprobs=chunked, **options) == pytest.approx(expected, rel=1e-5)


def test_a_temperature_divides_the_logits_that_are_trained() -> None:
    model = tiny()
    fixed = roll(model)([p for p in asked(2) for _ in range(4)])

    def colder(*args, logit_scale, **options):
        return full(*args, logit_scale=logit_scale / 0.5, **options)

    options = {"rollout": lambda prompts: fixed, "beta": 0.1}
    options["reference"] = frozen_copy(tiny(seed=5))
    expected = step_of(model, logprobs=colder, **options)
    assert step_of(model, temperature=0.5, **options) == pytest.approx(expected, rel=1e-5)
    assert step_of(model, **options) != pytest.approx(expected, rel=1e-2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_an_adapter_switched_off_is_the_reference() -> None:
    model = with_lora(tiny())
    fixed = roll(model)([p for p in asked(2) for _ in range(4)])
    losses = []
    for reference in (None, frozen_copy(tiny())):
        (loss,) = grpo.train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            [asked(2)],
            head=head_parts(model),
            rollout=lambda prompts: fixed,
            reward=small_ids,
            logprobs=full,
            num_generations=4,
            reference=reference,
            beta=0.5,
            loss_type="grpo",
        )
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 1e-4  # the divergence alone: advantages add up to 0


def test_phases_come_in_their_order() -> None:
    seen = []

    @contextlib.contextmanager
    def phase(name: str):
        seen.append(name)
        yield

    step_of(tiny(), per_device_train_batch_size=4, num_iterations=2, phase=phase)
    once = ["forward", "backward"] * 2 + ["optimizer"]
    assert seen == ["rollout", "reference", *once, *once]


def test_each_step_is_rolled_out_by_the_weights_it_finds() -> None:
    model, found = tiny(), []

    def watched(prompts):
        found.append(model.lm_head.weight.detach().clone())
        return roll(model)(prompts)

    losses = grpo.train(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        [asked(2)] * 2,
        head=head_parts(model),
        rollout=watched,
        reward=small_ids,
        logprobs=full,
        num_generations=4,
    )
    next(losses)
    after = model.lm_head.weight.detach().clone()
    next(losses)
    assert torch.equal(found[1], after)
    assert not torch.equal(found[0], after)


def test_a_tiny_model_comes_to_write_what_is_rewarded() -> None:
    model, rewards = tiny(), []

    def noted(completions, mask):
        rewards.append(small_ids(completions, mask).mean().item())
        return small_ids(completions, mask)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = grpo.train(
        model,
        optimizer,
        [asked(8)] * 15,
        head=head_parts(model),
        rollout=roll(model, eos_token_id=None),
        reward=noted,
        logprobs=chunked,
    )
    assert len(list(losses)) == 15
    assert rewards[0] < 0.65
    assert rewards[-1] > 0.9


def test_its_steps_run_on_the_simulated_gpu() -> None:
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "num_iterations": 2}
    phases = simulated_phases(grpo.train, beta=0.1, **options)
    once = ["forward", "backward"] * 2 + ["optimizer"]
    assert phases == ["rollout", "reference", *once, *once]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.1}, "reference=None: .* has no peft adapter"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"num_iterations": 0}, "num_iterations must be a whole number of at least 1"),
        ({"num_generations": 1}, "num_generations must be a whole number of at least 2"),
        ({"num_generations": 0}, "num_generations must be a whole number of at least 2"),
        ({"num_generations": 2.0}, "num_generations must be a whole number of at least 2"),
        ({"num_iterations": 1.5}, "num_iterations must be a whole number of at least 1"),
        ({"per_device_train_batch_size": 2.0}, "per_device_train_batch_size must be a whole"),
        ({"max_completion_length": 2.0}, "max_completion_length must be a whole number"),
        ({"beta": -1}, "beta must be at least 0, not -1"),
        ({"beta": math.nan}, "beta must be at least 0, not nan"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        (
            {"per_device_train_batch_size": 0},
            "per_device_train_batch_size must be a whole number of at least 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(tiny(), **change)


@pytest.mark.parametrize("trainer", [grpo, rloo])
@pytest.mark.parametrize(
    "change",
    [
        {"num_generations": 1},
        {"num_generations": 2.0},
        {"num_iterations": 1.5},
        {"per_device_train_batch_size": 2.0},
        {"beta": -1},
        {"beta": "a"},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_before_a_rollout(trainer, change: dict) -> None:
    model = tiny()
    (name,) = change
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        trainer.train(
            model,
            torch.optim.SGD(model.parameters()),
            [asked(2)],
            head=head_parts(model),
            rollout=lambda prompts: pytest.fail("a rollout"),
            reward=small_ids,
            logprobs=full,
            **{"beta": 0.0, **change},
        )


@pytest.mark.parametrize("size", [None, 2])
def test_a_reward_with_a_gradient_is_a_reward(size: int | None) -> None:
    weight = torch.ones((), requires_grad=True)
    learnt = lambda ids, mask: weight * small_ids(ids, mask)  # noqa: E731
    expected = step_of(tiny(), per_device_train_batch_size=size)
    assert step_of(tiny(), reward=learnt, per_device_train_batch_size=size) == expected
    assert weight.grad is None
