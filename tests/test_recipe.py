"""Recipes: TRL's names, checked values, and TRL's own configuration."""

import dataclasses
import warnings

import pytest

from memlab.experiments import Recipe, measure


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
        ("max_length", "8", TypeError, "max_length='8': a str; give int or None"),
        ("max_length", True, TypeError, "a bool; give int or None"),
        ("pad_to_multiple_of", 0, ValueError, "pad_to_multiple_of=0: below 1; give 1 or more"),
        ("pad_to_multiple_of", -8, ValueError, "below 1; give 1 or more"),
        ("pad_to_multiple_of", 8.0, TypeError, "a float; give int or None"),
        ("truncation_mode", "middle", ValueError, "give one of 'keep_start', 'keep_end'"),
        ("packing", 1, TypeError, "packing=1: an int; give bool"),
        ("packing_strategy", "ffd", ValueError, "give one of 'bfd', 'bfd_split', 'wrapped'"),
        ("padding_free", None, TypeError, "padding_free=None: a NoneType; give bool"),
        ("max_steps", 0, ValueError, "below 1"),
        ("per_device_train_batch_size", 2.0, TypeError, "a float; give int"),
        ("gradient_checkpointing", 1, TypeError, "an int; give bool"),
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


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        (
            {"packing": True, "max_length": None, "dataset": "chat"},
            "packing=True with max_length=None: give the length of a bin",
        ),
        ({"max_length": None}, "max_length=None with dataset='full'.*such as 'docstrings'"),
        (
            {"packing": True, "truncation_mode": "keep_end"},
            "truncation_mode='keep_end' with packing=True.*give 'keep_start'",
        ),
        (
            {"packing": True, "packing_strategy": "wrapped", "padding_free": True},
            "padding_free=True with packing_strategy='wrapped'.*give 'bfd' or 'bfd_split'",
        ),
        (
            {"padding_free": True, "attn_implementation": "sdpa"},
            "attn_implementation='sdpa' with padding_free=True.*'memlab_varlen' or 'flash_att",
        ),
        (
            {"packing": True, "attn_implementation": "eager"},
            "attn_implementation='eager' with packing=True: documents of a row would see each",
        ),
        ({"padding_free": True, "attn_implementation": "memlab_attention"}, "would see each other"),
        ({"attn_implementation": "memlab_varlen"}, "without padding_free=True or packing=True"),
        (
            {
                "attn_implementation": "memlab_varlen",
                "packing": True,
                "packing_strategy": "wrapped",
            },
            "has no documents to keep apart",
        ),
    ],
)
def test_switches_that_cannot_work_together(switches: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe.of(**switches)


def test_which_recipes_lay_documents_in_one_row() -> None:
    assert not Recipe.of().flattened
    assert Recipe.of(padding_free=True).flattened
    assert Recipe.of(packing=True).flattened
    assert Recipe.of(packing=True, packing_strategy="bfd_split").flattened
    assert not Recipe.of(packing=True, packing_strategy="wrapped").flattened
    assert not Recipe.of(
        packing=True, packing_strategy="wrapped", attn_implementation="sdpa"
    ).flattened


def test_the_old_name_of_bfd_split_is_rewritten() -> None:
    with pytest.warns(FutureWarning, match="old name of 'bfd_split'"):
        recipe = Recipe(packing=True, packing_strategy="bfd-requeue")
    assert recipe.packing_strategy == "bfd_split"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recipe.replace(max_length=8).packing_strategy == "bfd_split"


@pytest.mark.parametrize(
    ("switches", "device", "says"),
    [
        (
            {"model": "memlab/tiny-gemma2", "padding_free": True},
            "simulated",
            "padding_free=True with memlab/tiny-gemma2, which caps attention scores at 50.0: only "
            "'flash_attention_2' does both, with flash-attn on a CUDA card; give padding_free=F",
        ),
        ({"packing": True, "dtype": "float32"}, "simulated", "give dtype='bfloat16'"),
        (
            {"padding_free": True, "attn_implementation": "flash_attention_2"},
            "simulated",
            "'flash_attention_2' (needs flash-attn|runs on a real CUDA).* take 'memlab_varlen'",
        ),
        (
            {
                "model": "memlab/tiny-gemma2",
                "packing": True,
                "attn_implementation": "flash_attention_2",
            },
            "simulated",
            "'flash_attention_2' (needs flash-attn|runs on a real CUDA).* take packing=False",
        ),
        (
            {
                "padding_free": True,
                "attn_implementation": "flash_attention_2",
                "dtype": "float32",
            },
            "simulated",
            "padding_free=True with dtype='float32'",
        ),
        (
            {"padding_free": True, "attn_implementation": "kernels-community/flash-attn2"},
            "simulated",
            r"is for to_trl\(\).*; memlab runs 'memlab_varlen'",
        ),
        (
            {"max_length": None, "dataset": "chat_like", "model": "memlab/tiny"},
            "simulated",
            "max_length=None: rows of 8192 tokens, and memlab/tiny has 4096 positions",
        ),
        (
            {"pad_to_multiple_of": 5000},
            "simulated",
            "max_length=32 with pad_to_multiple_of=5000: rows of 5000 tokens, and memlab/tiny has",
        ),
        ({"pad_to_multiple_of": 99_999_999, "padding_free": True}, "simulated", "4096 positions"),
        (
            {"model": "Qwen/Qwen3-0.6B", "pad_to_multiple_of": 30_000}
            | {"per_device_train_batch_size": 1000},
            "simulated",
            "times max_length=32 with pad_to_multiple_of=30000: up to 30000000 tokens",
        ),
    ],
)
def test_what_a_model_or_its_device_can_not_do_is_refused(switches, device, says) -> None:
    recipe = Recipe.of(**{"model": "memlab/tiny", "max_length": 32, **switches})
    with pytest.raises(ValueError, match=says):
        measure(recipe, device=device, cache=False)


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:padding_free=True. TRL does not cut such rows:UserWarning")
@pytest.mark.parametrize(
    ("switches", "written"),
    [
        (
            {"packing": True, "packing_strategy": "bfd_split", "max_length": 64},
            {"packing": True, "packing_strategy": "bfd_split", "max_length": 64},
        ),
        ({"padding_free": True}, {"padding_free": True, "max_length": None}),
        ({"padding_free": True, "packing": True}, {"padding_free": True, "max_length": 1024}),
        (
            {"packing": True, "packing_strategy": "wrapped"},
            {"packing": True, "packing_strategy": "wrapped", "padding_free": False},
        ),
        (
            {"truncation_mode": "keep_end", "pad_to_multiple_of": 8},
            {"truncation_mode": "keep_end", "pad_to_multiple_of": 8, "max_length": 1024},
        ),
        ({"max_length": None, "dataset": "chat"}, {"max_length": None}),
    ],
)
def test_sequence_switches_in_trl(tmp_path, switches: dict, written: dict) -> None:
    pytest.importorskip("trl")
    recipe = Recipe.of(**switches)
    config = recipe.to_trl(output_dir=str(tmp_path))
    assert {name: getattr(config, name) for name in written} == written
    attention = config.model_init_kwargs.get("attn_implementation")
    assert attention == ("flash_attention_2" if recipe.flattened else None)
    hub = recipe.replace(attn_implementation="kernels-community/flash-attn2")
    attention = hub.to_trl(output_dir=str(tmp_path)).model_init_kwargs["attn_implementation"]
    assert attention == "kernels-community/flash-attn2"


def test_trl_leaves_the_cutting_of_padding_free_rows_to_the_user(tmp_path) -> None:
    pytest.importorskip("trl")
    with pytest.warns(UserWarning, match="cut the data set to max_length=1024 before") as caught:
        Recipe.of(padding_free=True).to_trl(output_dir=str(tmp_path))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = Recipe.of(padding_free=True, max_length=None, dataset="chat")
        whole.to_trl(output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="dtype='float32' in TRL"):
        Recipe.of(packing=True, dtype="float32").to_trl(output_dir=str(tmp_path))


@pytest.mark.parametrize("switch", ["padding_free", "packing"])
def test_float32_documents_run_on_a_cpu(switch: str) -> None:
    recipe = Recipe.of(
        **{"model": "memlab/tiny", "dtype": "float32", "dataset": "chat", "max_length": 64},
        **{switch: True},
    )
    assert measure(recipe, device="cpu").metered_peak_bytes > 0


def test_every_recipe_constructs_a_trl_configuration(tmp_path) -> None:
    pytest.importorskip("trl")
    for recipe in (
        Recipe.off(loss_type="dft"),
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
