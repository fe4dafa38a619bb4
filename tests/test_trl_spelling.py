"""Recipes of every trainer in TRL's words: each value arrives, and what TRL lacks is said."""

import dataclasses
import inspect
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from memlab.errors import MemlabError
from memlab.experiments import Recipe, trl_spelling
from memlab.experiments.rules import TRAINERS
from memlab.experiments.trl_spelling import arguments, config_name, done_without
from memlab.lessons import in_trl

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:max_length=.* TRL's .* cuts completions only:UserWarning"),
    pytest.mark.filterwarnings("ignore:loss_type='nll'. TRL's .* makes logits in ch:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning"),
    pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated"),
]
ABSENT = object()

# What a recipe's switches become, beside those that all trainers share.
WRITTEN: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"trainer": "dpo", "max_length": 512, "truncation_mode": "keep_end", "beta": 0.3},
        "DPOConfig",
        {"max_length": 512, "truncation_mode": "keep_end", "beta": 0.3, "loss_type": ["sigmoid"]},
    ),
    ({"trainer": "dpo", "pad_to_multiple_of": 8}, "DPOConfig", {"pad_to_multiple_of": 8}),
    ({"trainer": "dpo", "beta": 1}, "DPOConfig", {"beta": 1.0}),
    (
        {"trainer": "reward", "max_length": 256, "pad_to_multiple_of": 64},
        "RewardConfig",
        {"max_length": 256, "pad_to_multiple_of": 64, "beta": ABSENT, "truncation_mode": ABSENT},
    ),
    (
        {"trainer": "kto", "max_length": 128, "pad_to_multiple_of": 16, "beta": 0.2},
        "KTOConfig",
        {"max_length": 128, "pad_to_multiple_of": 16, "beta": 0.2, "loss_type": "kto"},
    ),
    (
        {"trainer": "grpo", "max_completion_length": 64, "pad_to_multiple_of": 8, "beta": 0.04},
        "GRPOConfig",
        {
            "max_completion_length": 64,
            "num_generations": 4,  # TRL's 8 do not divide 4 completions
            "pad_to_multiple_of": 8,
            "beta": 0.04,
            "max_length": ABSENT,
            "loss_type": "dapo",
        },
    ),
    (
        {"trainer": "grpo", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        "GRPOConfig",
        {"num_generations": 8, "max_completion_length": 512, "generation_batch_size": 32},
    ),
    (
        {"trainer": "rloo", "num_generations": 4, "max_completion_length": 32},
        "RLOOConfig",
        {"num_generations": 4, "max_completion_length": 32, "beta": 0.05, "max_length": ABSENT},
    ),
    (
        {"trainer": "online_dpo", "loss_type": "nll", "max_completion_length": 32, "beta": 0.2},
        "OnlineDPOConfig",
        {"max_new_tokens": 32, "max_length": 1024, "beta": 0.2, "max_completion_length": ABSENT},
    ),
    (
        {"trainer": "gkd", "loss_type": "nll", "teacher_model": "Qwen/Qwen3-1.7B", "beta": 0.1},
        "GKDConfig",
        {
            "teacher_model_name_or_path": "Qwen/Qwen3-1.7B",
            "teacher_model_init_kwargs": {"dtype": "bfloat16"},
            "max_length": 1024,
            "beta": 0.1,
            "lmbda": 0.0,
        },
    ),
]


@pytest.mark.parametrize(("switches", "kind", "written"), WRITTEN)
def test_a_trainers_own_switches(tmp_path, switches, kind, written) -> None:
    recipe = Recipe.of(**switches)
    config = recipe.to_trl(output_dir=str(tmp_path))
    assert type(config).__name__ == kind == config_name(recipe)
    assert {name: getattr(config, name, ABSENT) for name in written} == written


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_all_trainers_share(tmp_path, trainer: str) -> None:
    recipe = Recipe.of(
        trainer=trainer,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        loss_type="nll",
        gradient_checkpointing=False,
        optim="sgd",
        dtype="float32",
        attn_implementation="eager",
        max_steps=5,
        seed=7,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # TRL's own spelling, nothing deprecated
        written = dataclasses.asdict(recipe.to_trl(output_dir=str(tmp_path)))
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed"):
        assert written[name] == getattr(recipe, name)
    assert written["optim"] == "sgd"
    assert written["bf16"] is False
    assert written["model_init_kwargs"] == {"dtype": "float32", "attn_implementation": "eager"}
    checkpointing = written.get("activation_checkpointing", written["gradient_checkpointing"])
    assert checkpointing is False
    assert arguments(recipe).keys() <= written.keys()  # no name that TRL takes and forgets


@pytest.mark.filterwarnings("ignore:use_liger_kernel=True. TRL's .* has kernels:UserWarning")
@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "grpo", "gkd"])
def test_liger_is_what_trl_calls_it_now(tmp_path, trainer: str) -> None:
    config = Recipe.of(trainer=trainer, use_liger_kernel=True).to_trl(output_dir=str(tmp_path))
    assert config.model_init_kwargs["use_kernels"] is True
    assert config.use_liger_kernel is False  # which its trainers call deprecated


@pytest.mark.parametrize(
    ("switches", "line"),
    [
        ({"trainer": "dpo", "padding_free": True}, "padding_free=True: TRL's DPO does without"),
        ({"trainer": "reward", "padding_free": True}, "padding_free=True: TRL's Reward does with"),
        ({"trainer": "kto", "padding_free": True}, "padding_free=True: TRL's KTO does without"),
        (
            {"trainer": "online_dpo", "loss_type": "nll", "pad_to_multiple_of": 8},
            "pad_to_multiple_of=8: TRL's Online DPO does without, and pads to the longest row",
        ),
        (
            {"trainer": "gkd", "loss_type": "nll", "pad_to_multiple_of": 8},
            "pad_to_multiple_of=8: TRL's GKD does without",
        ),
        ({"trainer": "gkd"}, "loss_type='chunked_nll': TRL's GKD .* keeps all logits"),
        ({"trainer": "online_dpo"}, "loss_type='chunked_nll': TRL's Online DPO .* all logits"),
        (
            {"trainer": "gkd", "use_liger_kernel": True},
            "use_liger_kernel=True: TRL's GKD has kernels for its layers, and keeps all logits",
        ),
        *(
            (
                {"trainer": trainer, "use_liger_kernel": True, "dataset": "chat"},
                f"use_liger_kernel=True: TRL's {TRAINERS[trainer]} has kernels for its layers, and "
                "a chunked head of its own for the loss",
            )
            for trainer in ("sft", "dpo", "kto", "grpo")
        ),
        *(
            (
                {"trainer": trainer, "loss_type": "nll", "dataset": "chat"},
                f"loss_type='nll': TRL's {TRAINERS[trainer]} makes logits in chunks, and has no",
            )
            for trainer in ("sft", "dpo", "kto", "grpo", "rloo")
        ),
        *(
            (
                {"trainer": trainer, "max_length": 768},
                f"max_length=768: TRL's {TRAINERS[trainer]} cuts completions only, so cut the prom",
            )
            for trainer in ("grpo", "rloo")
        ),
        ({"fused_head": "fast"}, "fused_head='fast': TRL's SFT does without, and has its own"),
        (
            {"trainer": "gkd", "loss_type": "nll", "max_length": None, "dataset": "chat"},
            "max_length=None: TRL's GKD cuts all the same",
        ),
    ],
)
def test_what_trl_does_without_is_said(tmp_path, switches, line: str) -> None:
    recipe = Recipe.of(**switches)
    import_module(trl_spelling.CONFIGS[recipe.trainer].rpartition(".")[0])  # may warn by itself
    with pytest.warns(UserWarning, match=line) as caught:
        config = recipe.to_trl(output_dir=str(tmp_path))
    (warning,) = [one for one in caught if "TRL's" in str(one.message)]
    assert warning.filename == __file__
    assert "attn_implementation" not in config.model_init_kwargs  # no flash for nothing
    assert getattr(config, "padding_free", False) is False
    assert f"    # {warning.message}" in repr(in_trl(recipe)).splitlines()
    assert "#" not in repr(in_trl(recipe, over=recipe)).partition("\n")[2]


def test_a_recipe_that_trl_has_whole_warns_of_nothing() -> None:
    for trainer in TRAINERS:
        chat = Recipe.of(trainer=trainer, dataset="chat")
        if trainer in ("online_dpo", "gkd"):
            assert done_without(chat.replace(loss_type="nll")) == []
        else:
            assert done_without(chat.replace(pad_to_multiple_of=8)) == []
    assert done_without(Recipe.of(trainer="reward", loss_type="nll")) == []  # it has no words


def test_what_trl_is_said_to_chunk_is_what_its_trainers_do() -> None:
    """Those that are not said to keep all logits give their models a head that has none."""
    for trainer in TRAINERS:
        name = config_name(Recipe.of(trainer=trainer)).replace("Config", "Trainer")
        home = "trl.experimental." if trainer in ("online_dpo", "gkd") else "trl.trainer."
        inner = f"{trainer}.{trainer}_trainer" if "experimental" in home else f"{trainer}_trainer"
        source = inspect.getsource(import_module(home + inner))
        assert f"class {name}" in source
        said = done_without(Recipe.of(trainer=trainer, loss_type="nll", dataset="chat"))
        assert ("add_fused_lm_head(" in source) == bool(said)


def test_an_older_trl_has_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_spelling, "version", lambda _: "1.14.0")
    whole = Recipe.off()
    assert done_without(whole) == []
    assert arguments(whole)["loss_type"] == "nll"
    assert arguments(Recipe())["loss_type"] == "chunked_nll"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_without_trl_each_trainer_says_how_to_get_it(trainer, monkeypatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(trl_spelling, "version", missing)
    for spell in (arguments, done_without):
        with pytest.raises(MemlabError, match="to_trl needs TRL: pip install"):
            spell(Recipe.of(trainer=trainer))


def test_online_dpo_needs_a_number_in_trl() -> None:
    recipe = Recipe.of(trainer="online_dpo", max_length=None, dataset="chat")
    with pytest.raises(ValueError, match=r"max_length=None with TRL's .*give the longest"):
        recipe.to_trl()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_lessons_show_each_trainers_code(tmp_path, trainer: str) -> None:
    recipe = Recipe.of(trainer=trainer, loss_type="nll")
    code = repr(in_trl(recipe))
    assert code.startswith(f"{config_name(recipe)}(  # TRL ")
    assert f"    per_device_train_batch_size={recipe.per_device_train_batch_size}," in code
    made = eval(code, {config_name(recipe): dict})  # it is Python, and what to_trl gives
    assert made == arguments(recipe)
