"""The online DPO loop: its values are the formula's, and how a step is split changes nothing."""

import contextlib
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
from memlab.trainers import online_dpo
from memlab.trainers.reference import frozen_copy


def step_of(model, reference="another", **options):
    """Loss and gradient norm of one step of four prompts."""
    given = {
        "head": head_parts(model),
        "rollout": roll(model),
        "reward": small_ids,
        "logprobs": full,
        "reference": frozen_copy(tiny(seed=5)) if reference == "another" else reference,
        **options,
    }
    return losses_and_norms(online_dpo.train, model, asked(), **given)


def by_hand(model, reference, made, loss_type: str, rewards: list[float]) -> float:
    differences = []
    for row in rows_of(made):
        with torch.no_grad():
            now, fixed = (direct_logps(m, row) for m in (model, reference))
        strayed = now - fixed
        differences.append(float(strayed.mean() if loss_type == "ipo" else strayed.sum()))
    total = 0.0
    for at in range(0, len(differences), 2):
        margin = differences[at] - differences[at + 1]
        margin = -margin if rewards[at] < rewards[at + 1] else margin
        if loss_type == "ipo":
            total += (margin - 1 / (2 * 0.3)) ** 2
        else:
            total += math.log1p(math.exp(-0.3 * margin))
    return total / (len(differences) // 2)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_loss_is_the_formula_of_transformers_logits(loss_type: str) -> None:
    model, other = tiny(), tiny(seed=5)
    made = roll(model)([p for p in asked() for _ in range(2)])
    rewards = small_ids(made.completions, made.mask).tolist()
    loss, _ = step_of(model, frozen_copy(other), loss_type=loss_type, beta=0.3)
    assert loss == pytest.approx(by_hand(model, other, made, loss_type, rewards), rel=1e-5)


@pytest.mark.parametrize(
    ("scores", "same_as"),
    [
        ([1, 0, 0, 1, 3, 3, 2, -1], [1, 0, 0, 1, 1, 0, 1, 0]),  # of equals the first is chosen
        ([math.nan, 0, 0, math.nan, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0, 1, 0]),  # nobody could score it
    ],
)
def test_the_higher_reward_is_chosen(scores: list[float], same_as: list[float]) -> None:
    model, other = tiny(), tiny(seed=5)
    made = roll(model)([p for p in asked() for _ in range(2)])
    loss, _ = step_of(
        model, frozen_copy(other), reward=lambda *_: torch.tensor(scores).float(), beta=0.3
    )
    expected = by_hand(model, other, made, "sigmoid", [float(score) for score in same_as])
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_one_batch_equals_micro_batches_and_chunks(loss_type: str) -> None:
    expected = step_of(tiny(), loss_type=loss_type)
    for size in (1, 3):  # 3: parts of unequal sizes
        found = step_of(tiny(), per_device_train_batch_size=size, loss_type=loss_type)
        assert found == pytest.approx(expected, rel=1e-5)
    found = step_of(tiny(), logprobs=chunked, loss_type=loss_type)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_pair_is_forwarded_together() -> None:
    read = []

    def counting(h, w, y, **head):
        read.append(len(h))
        return full(h, w, y, **head)

    made = roll(tiny())([p for p in asked() for _ in range(2)])
    step_of(tiny(), logprobs=counting, per_device_train_batch_size=2)
    assert read == [4 * made.labels.shape[1]] * 4  # reference and policy, twice


def test_phases_come_in_their_order() -> None:
    seen = []

    @contextlib.contextmanager
    def phase(name: str):
        seen.append(name)
        yield

    step_of(tiny(), per_device_train_batch_size=2, phase=phase)
    assert seen == ["rollout", *["reference", "forward", "backward"] * 2, "optimizer"]


def test_a_tiny_model_comes_to_write_what_is_rewarded() -> None:
    model, rewards = tiny(), []

    def noted(completions, mask):
        rewards.append(small_ids(completions, mask).mean().item())
        return small_ids(completions, mask)

    losses = online_dpo.train(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-2),
        [asked(8)] * 15,
        head=head_parts(model),
        rollout=roll(model, eos_token_id=None),
        reward=noted,
        logprobs=chunked,
        reference=frozen_copy(model),
    )
    first, *rest = [loss.item() for loss in losses]
    assert first == pytest.approx(math.log(2), rel=1e-5)  # policy and reference are equal
    assert len(rest) == 14
    assert rewards[0] < 0.7
    assert rewards[-1] > 0.85


def test_its_steps_run_on_the_simulated_gpu() -> None:
    phases = simulated_phases(online_dpo.train, per_device_train_batch_size=1)
    assert phases == ["rollout", *["reference", "forward", "backward"] * 2, "optimizer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": None}, "reference=None: .* has no peft adapter"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        (
            {"per_device_train_batch_size": 0},
            "per_device_train_batch_size must be a whole number of at least 1",
        ),
        ({"reward": lambda *_: torch.ones(3)}, "one number a completion"),
    ],
)
def test_what_cannot_work_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(tiny(), **change)
