"""The example in a trainer's docstring runs as it stands there."""

import math
import textwrap
from types import ModuleType

import pytest
import torch
from online_cases import asked
from trainer_cases import tiny

from memlab.trainers import dpo, grpo, kto

GIVEN = {
    "dpo": [{"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [7]}] * 2,
    "kto": [
        {"prompt_ids": [3, 4], "completion_ids": [5, 6], "label": True},
        {"prompt_ids": [8], "completion_ids": [7, 9], "label": False},
    ],
}


def example(module: ModuleType) -> str:
    _, _, text = (module.__doc__ or "").partition("::\n")
    return textwrap.dedent(text)


@pytest.mark.parametrize("module", [dpo, kto, grpo], ids=lambda module: module.__name__)
def test_the_example_in_a_docstring_runs(module: ModuleType, capsys) -> None:
    name = module.__name__.rpartition(".")[2]
    model = tiny()
    before = model.lm_head.weight.detach().clone()
    torch.manual_seed(0)  # for completions
    exec(example(module), {"model": model, "rows": GIVEN.get(name), "prompts": asked(2)})
    (loss,) = map(float, capsys.readouterr().out.split())
    expected = {"dpo": math.log(2), "kto": 0.5}  # policy and reference are equal
    assert loss == pytest.approx(expected.get(name, loss), rel=1e-5)
    assert math.isfinite(loss)
    assert name == "grpo" or not torch.equal(model.lm_head.weight, before)
