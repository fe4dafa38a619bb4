"""Lesson 13: its exercises, what a reference takes, when the cache wins, what it says of TRL."""

import copy
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lesson_cases import fresh_attempts, said  # noqa: F401
from torch import Tensor

from memlab import Recipe, check, measure
from memlab.experiments.rules import TECHNIQUES, TRAINERS
from memlab.lessons import matrix
from memlab.lessons.adapters import reference_bytes
from memlab.lessons.batch import last_batch
from memlab.lessons.matrix import show_matrix
from memlab.lessons.trainers import bend, counted, tops
from memlab.models.build import load_config
from memlab.widgets import Grid, grids, show_steps
from memlab.widgets.steps import PHASES, highest, peak_phase

# transformers 5.24 announces a new name; TRL sets the old one itself
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

TINY = "memlab/tiny"

# -------------------------------------------------------------------------------- exercises


def test_trainers_are_ranked() -> None:
    assert check("13a", ["sft", "reward", "dpo"])
    assert check("13a", ("SFT", "Reward", "DPO"))
    assert "begin with the lowest" in said("13a", ["dpo", "reward", "sft"])
    assert "both sides of a pair" in said("13a", ["reward", "sft", "dpo"])
    assert "a second model" in said("13a", ["sft", "dpo", "reward"])
    with pytest.raises(TypeError, match="3 names"):
        check("13a", ["sft", "dpo"])


def test_bytes_of_a_reference() -> None:
    right = reference_bytes("Qwen/Qwen3-1.7B")
    assert check("13b", (right, 0))
    assert check("13b", [1.002 * right, 0])
    for whole, lora, expected in (
        (right, right, "in memory already"),
        (right / 2, 0, "the number of parameters"),
        (2 * right, 0, "That is fp32"),
        (4 * right, 0, "a model in training"),
        (right / 1e9, 0, "That is GB"),
    ):
        assert expected in said("13b", (whole, lora))


def test_completions_until_the_cache_wins() -> None:
    right = bend()
    assert check("13c", right)
    assert "not yet there" in said("13c", right - 4)
    assert "there, and below" in said("13c", right + 4)
    assert "a multiple of 4" in said("13c", right + 1)


def test_the_bend_is_where_whole_steps_have_it() -> None:
    right = bend()
    assert right > 8, "two micro-batches are what it is worked out from"
    for completions in (right - 4, right):
        rollout, training = tops(measure(counted(completions), device="simulated"))
        assert (rollout > training) == (completions == right)


def adapter_off(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return model(ids).logits


def of_a_copy(model: Any, ids: Tensor) -> Tensor:
    return adapter_off(copy.deepcopy(model), ids)


def silenced(model: Any, ids: Tensor) -> Tensor:
    return adapter_off(model.eval(), ids)


def left_off(model: Any, ids: Tensor) -> Tensor:
    model.base_model.disable_adapter_layers()
    return adapter_off(model, ids)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda model, ids: model(ids).logits, "not the logits"),
        (of_a_copy, "a copy of the model"),
        (silenced, "dropout must come back"),
        (lambda model, ids: ids, "a tensor of shape (2, 12, 512)"),
        (lambda model: model, "raised TypeError"),
    ],
)
def test_a_wrong_reference_is_told_what_is_wrong(answer: Callable, expected: str) -> None:
    assert expected in said("13d", answer)


def test_the_adapter_must_come_back() -> None:
    assert check("13d", adapter_off)
    assert "on again" in said("13d", left_off)


# ------------------------------------------------------------------ what the lesson says


def test_a_reference_is_two_bytes_a_parameter_and_none_with_an_adapter() -> None:
    step = measure(Recipe.defaults(model=TINY), device="simulated")
    weights = step.by_category["parameters"]
    assert reference_bytes(TINY) == weights
    assert reference_bytes(TINY, dtype="float32") == pytest.approx(2 * weights, rel=0.01)
    assert reference_bytes(TINY, lora=True) == 0


def test_rows_that_go_through_the_model() -> None:
    short = {"max_completion_length": 64}
    for trainer in TRAINERS:
        online = trainer in ("grpo", "rloo", "online_dpo")
        batch = last_batch(Recipe.defaults(trainer=trainer, **(short if online else {})))
        pairs = trainer in ("dpo", "reward", "online_dpo")
        assert (batch.rows, batch.slots) == ((8, 8192) if pairs else (4, 4096))


def test_the_peak_moves_to_the_rollout_at_every_length() -> None:
    grid = Grid.load(grids.folder() / "13_completions.json")
    bends = []
    for length in grid.axes["max_completion_length"]:
        settings = [
            {"completions": n, "max_completion_length": length} for n in grid.axes["completions"]
        ]
        cached = [grid.at(setting)["kv_cache"] > 0 for setting in settings]
        assert cached == sorted(cached), "once it has moved, it stays"
        assert cached[:2] == [False, False]  # the second is the lesson's dashed line
        assert cached[-1]
        bends.append(cached.index(True))
    assert bends == sorted(bends, reverse=True), "longer ones bend earlier"


def test_all_at_once_training_stays_higher() -> None:
    grid = Grid.load(grids.folder() / "13_at_once.json")
    for setting in grid.settings():
        assert grid.at(setting)["kv_cache"] == 0


def test_a_number_of_completions_that_can_not_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="completions=20: give a multiple of 8"):
        grids.GRIDS["13_completions"].at({"max_completion_length": 64, "completions": 20})


def test_the_table_says_why_for_each_no() -> None:
    shown = show_matrix()
    assert "truncation, GRPO, RLOO: by max_completion_length=..." in repr(shown)
    for technique in TECHNIQUES:
        for why in {**technique.never, **technique.idle}.values():
            assert why in repr(shown)
            assert why in shown._repr_markdown_()
    assert shown.cells[0][1:] == list(TRAINERS.values())
    assert shown.cells[4] == ["packing", "yes", *["-"] * 7]


def test_the_table_is_what_its_tests_left(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "matrix.json").write_text('{"packing": {"sft": "yes", "gkd": "-"}}')
    monkeypatch.setattr(matrix, "folder", lambda: tmp_path)
    assert show_matrix().cells[1:] == [["packing", "yes", *[""] * 6, "-"]]


# ------------------------------------------------------------------------------ the figure


def test_a_column_a_phase() -> None:
    small = {"model": TINY, "max_length": 64, "per_device_train_batch_size": 2}
    sampled = {"max_completion_length": 8, "gradient_accumulation_steps": 2}
    steps = {
        "SFT": measure(Recipe.defaults(**small), device="simulated"),
        "RLOO": measure(Recipe.defaults(trainer="rloo", **small, **sampled), device="simulated"),
    }
    assert list(highest(steps["SFT"])) == ["forward", "backward", "optimizer"]
    assert list(highest(steps["RLOO"])) == list(PHASES)
    for step in steps.values():
        assert highest(step)[peak_phase(step)] == step.metered_peak_bytes
    shown = show_steps(steps)
    assert "rollout  reference  forward  backward  optimizer  peak" in repr(shown)
    assert "RLOO: 0." in shown.alt
    assert shown.png(40).startswith(b"\x89PNG")


def test_a_figure_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is empty"):
        show_steps({})
    step = measure(Recipe.defaults(model=TINY, max_length=64), device="simulated")
    with pytest.raises(ValueError, match="SFT kept no timeline"):
        show_steps({"SFT": dataclasses.replace(step, timeline=())})


def test_training_hardly_grows_where_the_rollout_nearly_does_as_the_completions() -> None:
    steps = (tops(measure(counted(n), device="simulated")) for n in (8, 32))
    (rollout, training), (more, still) = steps
    assert training <= still < 1.02 * training
    assert 3.6 < more / rollout < 4


def test_the_cache_is_what_the_formula_says() -> None:
    grid = Grid.load(grids.folder() / "13_completions.json")
    peak = grid.at({"max_completion_length": 256, "completions": 64})
    config = load_config("Qwen/Qwen3-0.6B")
    entries = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert peak["kv_cache"] == 2 * entries * 2 * 64 * (256 + 256 - 1)


# ------------------------------------------------------------------------------------- TRL


def test_what_the_lesson_says_of_trl() -> None:
    trl = pytest.importorskip("trl")
    for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO"):
        assert hasattr(trl, f"{name}Trainer")
    for module, name in (("online_dpo", "OnlineDPO"), ("gkd", "GKD")):
        assert hasattr(importlib.import_module(f"trl.experimental.{module}"), f"{name}Trainer")

    def default(config: type, name: str) -> Any:
        return {field.name: field.default for field in dataclasses.fields(config)}[name]

    assert default(trl.DPOConfig, "precompute_ref_log_probs") is False
    assert default(trl.KTOConfig, "precompute_ref_log_probs") is False
    assert (default(trl.GRPOConfig, "beta"), default(trl.RLOOConfig, "beta")) == (0.0, 0.05)
    assert default(trl.GRPOConfig, "use_vllm") is False
    assert default(trl.GRPOConfig, "num_generations") == 8
    for config in (trl.GRPOConfig, trl.RLOOConfig):
        assert default(config, "max_completion_length") == 512
        assert "max_length" not in {field.name for field in dataclasses.fields(config)}
    online = importlib.import_module("trl.experimental.online_dpo").OnlineDPOConfig
    assert default(online, "max_new_tokens") == 64


def test_trl_refuses_completions_that_are_not_whole_groups(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    sizes = {"per_device_train_batch_size": 3, "num_generations": 2}
    with pytest.raises(ValueError, match="num_generations"):
        trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **sizes)
