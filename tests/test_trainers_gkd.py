"""The GKD loop: its values are the formula's, and how a step is split changes nothing."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trainer_cases import Phases, ids, one_step, split, tiny

from memlab.models.head import HeadParts, head_parts
from memlab.techniques import pad_to_multiple, padding_free
from memlab.techniques.truncation import truncate_gkd
from memlab.trainers import gkd
from memlab.trainers.on_policy import on_policy
from memlab.trainers.reference import frozen_copy
from memlab.trainers.rollouts import rollout


def rows(count: int = 4) -> list[dict]:
    """A prompt of unequal length without labels, then an answer."""
    rng, made = np.random.default_rng(1), []
    for _ in range(count):
        prompt, answer = ids(rng, 4, 9), ids(rng, 2, 9)
        made.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return truncate_gkd(made, 11)


def padded(rows: list[dict]) -> dict[str, Tensor]:
    return pad_to_multiple.collate(rows)


def step_of(model, step: list[dict], teacher=None, **options) -> tuple[float, float]:
    teacher = frozen_copy(tiny(seed=5)) if teacher is None else teacher
    return one_step(gkd.train, model, step, head=head_parts(model), teacher=teacher, **options)


def kl(p: Tensor, q: Tensor) -> float:
    return (p * (p / q).log()).sum().item()


@pytest.mark.parametrize(("beta", "temperature"), [(0.5, 1.0), (0.1, 2.0), (0.0, 1.0), (1.0, 0.9)])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])
def test_loss_is_the_formula_of_transformers_logits(
    name: str, beta: float, temperature: float
) -> None:
    student, teacher, made = tiny(name), tiny(name, seed=5), rows()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in made:
            p, q = (
                (
                    m(input_ids=torch.tensor([row["input_ids"]])).logits[0].double() / temperature
                ).softmax(-1)
                for m in (teacher, student)
            )
            for t, label in enumerate(row["labels"][1:]):
                if label == -100:
                    continue
                m = beta * p[t] + (1 - beta) * q[t]
                if beta in (0, 1):
                    total += kl(p[t], q[t]) if beta == 0 else kl(q[t], p[t])
                else:
                    total += beta * kl(p[t], m) + (1 - beta) * kl(q[t], m)
                count += 1
    loss, _ = step_of(
        student, [padded(made)], frozen_copy(teacher), beta=beta, temperature=temperature
    )
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_one_batch_equals_micro_batches() -> None:
    model, made = tiny(), rows()
    expected = step_of(model, [padded(made)])
    for size in (1, 3):  # 3: micro-batches of unequal sizes
        step = [padded(part) for part in split(made, size)]
        assert step_of(model, step) == pytest.approx(expected, rel=1e-5)
    means = [step_of(model, [padded([row])])[0] for row in made]
    assert sum(means) / len(means) != pytest.approx(expected[0], rel=1e-5)


def test_the_teacher_may_be_of_another_width_and_learns_nothing() -> None:
    class Backbone(nn.Embedding):
        def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    torch.manual_seed(0)
    student, teacher = (nn.Sequential(Backbone(60, d), nn.Linear(d, 60)) for d in (8, 5))
    batch = padded(rows())
    (loss,) = gkd.train(
        student,
        torch.optim.SGD(student.parameters(), lr=0.1),
        [[batch]],
        head=HeadParts(student[0], student[1], softcap=0.3, logit_scale=0.5),
        teacher=HeadParts(teacher[0], teacher[1], softcap=None, logit_scale=2.0),
        beta=0.0,
    )
    torch.manual_seed(0)  # the student before its step
    student = nn.Sequential(Backbone(60, 8), nn.Linear(8, 60))
    keep = batch["labels"][:, 1:] != -100
    inputs = batch["input_ids"][:, :-1][keep]
    q = 0.3 * torch.tanh(0.5 * student[1](student[0].weight[inputs]) / 0.3)
    p = 2.0 * teacher[1](teacher[0].weight[inputs])
    assert loss.item() == pytest.approx(kl(p.softmax(-1), q.softmax(-1)) / len(inputs), rel=1e-5)
    assert all(p.grad is None for p in teacher.parameters())
    assert teacher.training


def test_a_tiny_model_comes_to_think_as_its_teacher() -> None:
    model, batch = tiny(), padded(rows(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [
        loss.item()
        for loss in gkd.train(
            model,
            optimizer,
            [[batch]] * 20,
            head=head_parts(model),
            teacher=frozen_copy(tiny(seed=5)),
        )
    ]
    assert losses[-1] < 0.5 * losses[0]
    assert math.isfinite(losses[-1])


def test_what_cannot_work_is_refused() -> None:
    model, batch = tiny(), padded(rows())
    with pytest.raises(ValueError, match="teacher: the student itself"):
        step_of(model, [batch], head_parts(model))
    with pytest.raises(ValueError, match="beta must be between 0 and 1"):
        step_of(model, [batch], beta=2.0)
    blank = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(ValueError, match="all -100 in every micro-batch"):
        step_of(model, [blank])
    assert step_of(model, [batch, blank]) == pytest.approx(step_of(model, [batch]), rel=1e-5)


def greedy(model):
    return partial(rollout, model, head=head_parts(model), max_completion_length=3, temperature=0)


def test_on_policy_the_student_completes_the_prompts_itself() -> None:
    model, made = tiny(), rows()
    step = [padded(part) for part in split(made, 3)]
    phases = Phases()
    (own,) = on_policy([step], greedy(model), lmbda=1, phase=phases)
    assert phases == ["rollout"]
    assert [len(batch["input_ids"]) for batch in own] == [3, 1]
    for row, tokens, labels in zip(
        made,
        torch.cat([batch["input_ids"] for batch in own]),
        torch.cat([batch["labels"] for batch in own]),
        strict=True,
    ):
        prompt = row["input_ids"][: row["labels"].count(-100)]
        with torch.no_grad():
            expected = list(prompt)
            for _ in range(3):
                logits = model(input_ids=torch.tensor([expected])).logits
                expected.append(int(logits[0, -1].argmax()))
        assert tokens[: len(expected)].tolist() == expected
        counted = labels != -100
        assert tokens[counted].tolist() == expected[-3:]
        assert counted.nonzero()[0] == len(prompt)


def test_on_policy_steps_are_made_by_the_student_of_then_and_a_split_changes_nothing() -> None:
    whole, parts = [padded(rows())], [padded([row]) for row in rows()]
    losses = []
    for step in (whole, parts):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = on_policy([step] * 3, greedy(model), lmbda=0.6)
        options = {"head": head_parts(model), "teacher": frozen_copy(tiny(seed=5))}
        losses.append([loss.item() for loss in gkd.train(model, optimizer, steps, **options)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # three steps add up their roundings


def test_on_policy_takes_its_share_of_the_steps() -> None:
    step, model = [padded(rows(2))], tiny()
    for lmbda, least, most in ((0, 0, 0), (0.5, 3, 17), (1, 20, 20)):
        mixed = on_policy([step] * 20, greedy(model), lmbda=lmbda)
        assert least <= sum(made is not step for made in mixed) <= most
    with pytest.raises(ValueError, match="lmbda must be between 0 and 1"):
        next(on_policy([step], greedy(model), lmbda=1.5))
    blank = {**step[0], "labels": torch.full_like(step[0]["labels"], -100)}
    flattened = padding_free.collate(rows(2))
    with pytest.raises(ValueError, match="padding_free=True with on_policy"):
        next(on_policy([[flattened]], greedy(model), lmbda=1))
    with pytest.raises(ValueError, match="labels of row 0: on_policy needs a prompt"):
        next(on_policy([[blank]], greedy(model), lmbda=1))
