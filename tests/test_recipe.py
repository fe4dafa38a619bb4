"""Recipes: TRL's names, checked values, and TRL's own configuration."""

import dataclasses
import warnings

import pytest

from memlab.experiments import Recipe


def test_off_and_defaults_differ_in_what_trl_has_on() -> None:
    assert Recipe.off().changes(Recipe.defaults()) == {
        "loss_type": ("nll", "chunked_nll"),
        "gradient_checkpointing": (False, True),
    }
    assert Recipe.off(loss_type="dft").loss_type == "dft"
    assert Recipe.off().replace(gradient_checkpointing=True, loss_type="chunked_nll") == Recipe()


@pytest.mark.parametrize(
    ("switch", "value", "error", "says"),
    [
        ("max_length", 0, ValueError, "max_length=0: below 2; give 2 or more"),
        ("max_length", 1, ValueError, "below 2"),
        ("max_length", "8", TypeError, "max_length='8': a str; give int"),
        ("max_length", True, TypeError, "a bool; give int"),
        ("max_steps", 0, ValueError, "below 1"),
        ("per_device_train_batch_size", 2.0, TypeError, "a float; give int"),
        ("gradient_checkpointing", 1, TypeError, "a int; give bool"),
        ("loss_type", "nl", ValueError, "unknown; give one of 'nll', 'chunked_nll', 'dft'"),
        ("dataset", "imdb", ValueError, "give one of 'full'"),
        ("attn_implementation", "flash", ValueError, "give one of None, 'memlab_attention'"),
        ("trainer", "ppo", ValueError, "give one of 'sft'"),
        ("los_type", "nll", ValueError, "unknown switch los_type: did you mean loss_type"),
        ("packng", True, ValueError, "the switches are model, trainer"),
    ],
)
def test_bad_values_name_the_switch_the_value_and_what_works(
    switch: str, value: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as raised:
        Recipe.of(**{switch: value})
    message = str(raised.value)
    assert says in message
    assert switch in message
    assert "\n" not in message


def test_every_recipe_constructs_a_trl_configuration(tmp_path) -> None:
    pytest.importorskip("trl")
    for recipe in (
        Recipe.off(),
        Recipe.defaults(max_length=512, gradient_accumulation_steps=4),
        Recipe.of(loss_type="dft", optim="sgd", dtype="float32", attn_implementation="eager"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # TRL's own spelling, nothing deprecated
            config = recipe.to_trl(output_dir=str(tmp_path))
        written = dataclasses.asdict(config)
        for name in ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
            assert written[name] == getattr(recipe, name)
        assert written["optim"] == recipe.optim
        assert written["model_init_kwargs"]["dtype"] == recipe.dtype
        checkpointing = written.get("activation_checkpointing", written["gradient_checkpointing"])
        assert checkpointing is recipe.gradient_checkpointing
        assert written["loss_type"] == {"chunked_nll": "nll"}.get(
            recipe.loss_type, recipe.loss_type
        )
