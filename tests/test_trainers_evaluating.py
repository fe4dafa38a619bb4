"""Dropout is off in whatever is only looked at: references, teachers, old policies, rollouts."""

import contextlib

import numpy as np
import pytest
import torch
from online_cases import asked, roll, small_ids
from torch import Tensor, nn
from trainer_cases import full, ids, tiny, with_lora

from memlab.models.head import head_parts
from memlab.techniques import pad_to_multiple
from memlab.techniques.truncation import truncate_dpo, truncate_kto
from memlab.trainers import dpo, gkd, grpo, kto, online_dpo, rloo


class Phase(list):
    """A `phase`: for each call of a `Noise`, the phase it was in, and whether it made noise."""

    now = ""

    @contextlib.contextmanager
    def __call__(self, name: str):
        self.now = name
        yield


class Noise(nn.Dropout):
    def __init__(self, phase: Phase) -> None:
        super().__init__(0.5)
        self.phase = phase

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        self.phase.append((self.phase.now, not torch.equal(found, input)))
        return found


def noisy(phase: Phase, seed: int = 3) -> nn.Module:
    """A model in training mode, with dropout behind its last layer."""
    model = tiny(seed=seed)
    model.model.norm = nn.Sequential(model.model.norm, Noise(phase))
    return model.train()


def pairs() -> list[dict]:
    rng = np.random.default_rng(1)
    names = "prompt_ids", "chosen_ids", "rejected_ids"
    rows = truncate_dpo([{name: ids(rng, 2, 9) for name in names} for _ in range(3)], 14)
    return [dpo.collate_pairs(rows, pad_to_multiple.collate)]


def judged() -> list[dict]:
    rng = np.random.default_rng(1)
    names = "prompt_ids", "completion_ids"
    rows = [{**{name: ids(rng, 2, 9) for name in names}, "label": i > 1} for i in range(3)]
    rows = truncate_kto(kto.mismatched(rows), 14)
    return [kto.collate_rows(rows, pad_to_multiple.collate)]


def answers() -> list[dict]:
    rng = np.random.default_rng(1)
    rows = [[ids(rng, 2, 9), ids(rng, 2, 9)] for _ in range(3)]
    made = [{"input_ids": p + a, "labels": [-100] * len(p) + a} for p, a in rows]
    return [pad_to_multiple.collate(made)]


ONLINE = {"reward": small_ids}
CASES = {
    "dpo": (dpo, pairs, {}),
    "kto": (kto, judged, {}),
    "gkd": (gkd, answers, {}),
    "grpo": (grpo, lambda: asked(2), {"beta": 0.1, **ONLINE}),
    "rloo": (rloo, lambda: asked(2), {"beta": 0.1, **ONLINE}),
    "online_dpo": (online_dpo, lambda: asked(2), ONLINE),
    "grpo, old": (grpo, lambda: asked(2), {"num_iterations": 2, **ONLINE}),
    "rloo, old": (rloo, lambda: asked(2), {"beta": 0.0, "num_iterations": 2, **ONLINE}),
}
BY_ADAPTER = [(name, True) for name in CASES if name != "gkd" and "old" not in name]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("name", "adapter"), [*((name, False) for name in CASES), *BY_ADAPTER])
def test_dropout_is_off_outside_of_the_forward_pass(name: str, adapter: bool) -> None:
    (trainer, step, options), phase = CASES[name], Phase()
    model = noisy(phase)
    model = with_lora(model).train() if adapter else model
    given = {"head": head_parts(model), "phase": phase, **options}
    other = head_parts(noisy(phase, seed=5))  # in training mode, as a caller may leave it
    if trainer is gkd:
        given["teacher"] = other
    else:
        given |= {"logprobs": full, "reference": None if adapter else other}
    if "reward" in options:
        given["rollout"] = roll(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in trainer.train(model, optimizer, [step()], **given):
        assert all(module.training for module in model.modules())
        assert all(module.training for module in other.backbone.modules())
    assert {noise for name, noise in phase if name == "forward"} == {True}
    assert {noise for name, noise in phase if name == "reference"} == {False}
    assert {noise for name, noise in phase if name == "rollout"} <= {False}
