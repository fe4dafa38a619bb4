"""What each trainer has and has not: the table, and recipes that it refuses or completes."""

import math
import re
from typing import Any

import pytest

from memlab.experiments import Recipe, heads, measure
from memlab.experiments.rules import CLASHES, OF_SOME, ONLINE, OWN, TECHNIQUES, TRAINERS, Clash, own
from memlab.techniques.chunked_logprobs import full_token_logprobs, token_logprobs

# The rows of the table that a user reads: what each trainer goes with.
TABLE = {
    "truncation": "yes yes yes yes yes yes yes yes",
    "pad to a multiple": "yes yes yes yes yes yes yes yes",
    "gradient checkpointing": "yes yes yes yes yes yes yes yes",
    "packing": "yes - - - - - - -",
    "padding-free": "yes yes yes yes - - - -",
    "chunked loss": "yes yes n/a yes yes yes yes yes",
    "fused head": "yes yes - yes yes yes yes -",
    "Liger": "yes yes - yes yes - - yes",
}
GIVEN: dict[str, Any] = {  # a value of each switch that some trainers have
    "truncation_mode": "keep_end",
    "beta": 0.3,
    "max_completion_length": 16,
    "num_generations": 4,
    "teacher_model": "memlab/tiny-llama",
}


def small(trainer: str, **switches: Any) -> Recipe:
    """A recipe of the trainer that runs in a moment."""
    short = {"max_completion_length": 8} if trainer in ONLINE else {}
    sizes = {"model": "memlab/tiny", "max_length": 32, "dtype": "float32"}
    return Recipe.of(trainer=trainer, **{**sizes, **short, **switches})


def test_the_table() -> None:
    found = {t.title: " ".join(t.cell(trainer) for trainer in TRAINERS) for t in TECHNIQUES}
    assert found == TABLE


def test_reasons_are_of_trainers_that_exist_and_go_into_a_sentence() -> None:
    for technique in TECHNIQUES:
        assert technique.never.keys() | technique.idle.keys() <= TRAINERS.keys()
        assert not technique.never.keys() & technique.idle.keys()
        for reason in (*technique.never.values(), *technique.idle.values()):
            assert reason == reason.strip(" .")
            assert "\n" not in reason


def test_a_technique_knows_whether_it_is_on() -> None:
    on = Recipe.of(packing=True, padding_free=True, pad_to_multiple_of=8, fused_head="fast")
    off = Recipe.off(max_length=None, dataset="chat")
    liger = Recipe.of(use_liger_kernel=True)
    by_title = {technique.title: technique.is_on for technique in TECHNIQUES}
    assert [title for title, is_on in by_title.items() if is_on(off)] == []
    assert [title for title, is_on in by_title.items() if not is_on(on)] == [
        "chunked loss",
        "Liger",
    ]
    assert by_title["chunked loss"](Recipe())
    assert by_title["Liger"](liger)
    assert not by_title["chunked loss"](liger)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("switch", OF_SOME)
def test_a_switch_of_some_trainers(switch: str, trainer: str) -> None:
    switches = {"trainer": trainer, switch: GIVEN[switch]}
    if trainer in OF_SOME[switch]:
        assert getattr(Recipe.of(**switches), switch) == GIVEN[switch]
        return
    if (switch, trainer) == ("max_completion_length", "dpo"):
        with pytest.raises(TypeError, match=r"=16 with trainer='dpo': .* filter the data set by "):
            Recipe.of(**switches)
        return
    with pytest.raises(ValueError, match=f"{switch}=.* with trainer='{trainer}': only ") as raised:
        Recipe.of(**switches)
    assert all(repr(other) in str(raised.value) for other in OF_SOME[switch])
    assert str(raised.value).endswith("have it; leave it out") or len(OF_SOME[switch]) == 1


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"trainer": "dpo", "loss_type": "dft"}, "it weighs the labels of 'sft'; give 'chunked_"),
        ({"trainer": "dpo", "loss_type": "sigmoid"}, "an argument of memlab.trainers.dpo.train; a"),
        ({"trainer": "dpo", "loss_type": "ipo"}, "changes no bytes of trainer='dpo'"),
        ({"trainer": "online_dpo", "loss_type": "hinge"}, "memlab.trainers.online_dpo.train"),
        ({"trainer": "grpo", "loss_type": "dr_grpo"}, "memlab.trainers.grpo.train"),
        ({"trainer": "grpo", "loss_type": "sigmoid"}, "unknown; give one of 'nll'"),
        ({"trainer": "sft", "loss_type": "sigmoid"}, "unknown; give one of 'nll'"),
        (
            {"use_liger_kernel": True, "loss_type": "chunked_nll"},
            "loss_type='chunked_nll' with use_liger_kernel=True.*give loss_type='nll'",
        ),
        ({"use_liger_kernel": True, "loss_type": "dft"}, "give loss_type='nll'"),
        ({"fused_head": "fast", "loss_type": "nll"}, "keeps all logits: give loss_type='chunked_n"),
        (
            {"dtype": "float16", "optim": "adamw_torch"},
            "dtype='float16': AdamW's eps of 1e-8 .* 0 / 0 .*; give one of 'bfloat16', 'float32'",
        ),
        ({"fused_head": "quick"}, "unknown; give one of None, 'fast', 'frugal'"),
        (
            {"fused_head": "fast", "trainer": "dpo"},
            "fused_head='fast' with trainer='dpo'.*'frugal'",
        ),
        ({"trainer": "kto", "per_device_train_batch_size": 1}, "give 2 rows or more a step"),
        ({"trainer": "dpo", "beta": 0}, "beta=0.0 with trainer='dpo'.*give a number above 0"),
        ({"trainer": "kto", "beta": 0.0}, "give a number above 0"),
        ({"trainer": "online_dpo", "beta": 0.0}, "give a number above 0"),
        ({"trainer": "rloo", "beta": -0.1}, "beta=-0.1: below 0.0; give 0.0 or more"),
        ({"trainer": "gkd", "beta": 1.5}, "beta=1.5 with trainer='gkd'.*give 0 to 1"),
        ({"trainer": "grpo", "num_generations": 1}, "num_generations=1: below 2; give 2 or more"),
        ({"trainer": "rloo", "max_completion_length": 0}, "below 1; give 1 or more"),
    ],
)
def test_values_that_a_trainer_can_not_take(switches: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        Recipe.of(**switches)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"trainer": "dpo", "beta": "0.1"}, "beta='0.1': a str; give float or None"),
        ({"trainer": "dpo", "beta": True}, "beta=True: a bool; give float or None"),
        ({"trainer": "grpo", "num_generations": 2.0}, "a float; give int or None"),
        ({"trainer": "gkd", "teacher_model": 3}, "teacher_model=3: an int; give str or None"),
        ({"use_liger_kernel": 1}, "use_liger_kernel=1: an int; give bool"),
        ({"fused_head": True}, "fused_head=True: a bool; give str or None"),
        ({"trainer": None}, "trainer=None: a NoneType; give str"),
        ({"model": object()}, "model=<object.*>: an object; give str"),
    ],
)
def test_values_of_other_types(switches: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Recipe.of(**switches)


def test_a_whole_number_is_a_beta() -> None:
    recipe = Recipe.of(trainer="rloo", beta=1)
    assert recipe == Recipe.of(trainer="rloo", beta=1.0)
    assert type(recipe.beta) is float  # so that both are one simulation on disk


def test_the_head_follows_liger() -> None:
    assert Recipe().loss_type == "chunked_nll"
    assert Recipe(use_liger_kernel=True).loss_type == "nll"
    assert Recipe.off(use_liger_kernel=True).loss_type == "nll"
    assert Recipe(trainer="dpo", fused_head="frugal").loss_type == "chunked_nll"
    assert Recipe(fused_head="fast", loss_type="dft").fused_head == "fast"


def test_what_is_left_open_is_the_trainers() -> None:
    for trainer, values in OWN.items():
        recipe = Recipe.of(trainer=trainer, per_device_train_batch_size=16)
        assert {switch: own(recipe, switch) for switch in values} == values
    assert own(Recipe(), "beta") is None
    assert own(Recipe.of(trainer="dpo", beta=0.4), "beta") == 0.4
    assert own(Recipe.of(trainer="rloo", beta=0), "beta") == 0  # given, though it is false


@pytest.mark.parametrize(("size", "accumulate", "generations"), [(4, 1, 4), (3, 4, 4), (16, 2, 8)])
def test_generations_divide_the_completions_of_a_step(size, accumulate, generations) -> None:
    recipe = Recipe.of(
        trainer="grpo", per_device_train_batch_size=size, gradient_accumulation_steps=accumulate
    )
    assert own(recipe, "num_generations") == generations


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_bytes_here_and_simulated(trainer: str) -> None:
    """Metered alike; the card's kernels differ from this CPU's, so not to the byte."""
    here, card = (measure(small(trainer), device=device) for device in ("cpu", "simulated"))
    assert here.by_category["parameters"] == card.by_category["parameters"]
    assert here.metered_peak_bytes == pytest.approx(card.metered_peak_bytes, rel=0.05)
    phases = {sample.phase for sample in here.timeline}
    assert phases == {sample.phase for sample in card.timeline}
    assert ("rollout" in phases) == (trainer in ONLINE)
    assert ("reference" in phases) == (trainer not in ("sft", "reward", "grpo"))


def test_a_second_model_where_there_is_one() -> None:
    def parameters(trainer: str, **switches: Any) -> int:
        return measure(small(trainer, **switches), device="simulated").by_category["parameters"]

    one = parameters("sft")
    assert parameters("grpo") == one  # its beta is 0
    for trainer, switches in (("grpo", {"beta": 0.1}), ("dpo", {}), ("rloo", {}), ("gkd", {})):
        assert parameters(trainer, **switches) == 2 * one
    assert parameters("rloo", beta=0) == one
    other = parameters("sft", model="memlab/tiny-llama")
    assert parameters("gkd", teacher_model="memlab/tiny-llama") == one + other
    with pytest.raises(ValueError, match=r"has 151936 words, and memlab/tiny 512: give a teacher"):
        parameters("gkd", teacher_model="Qwen/Qwen3-0.6B")


def test_groups_that_do_not_come_out_even_are_refused_at_once() -> None:
    step = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    with pytest.raises(ValueError, match="3 completions, not a multiple of num_generations=2"):
        Recipe(trainer="rloo", **step)
    with pytest.raises(ValueError, match="num_generations=8; give 8 completions"):
        Recipe(trainer="grpo", num_generations=8)


@pytest.mark.parametrize("dataset", ["docstrings", "chat_like"])
@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name != "sft"])
def test_plain_text_is_refused_at_once(trainer: str, dataset: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"dataset='{dataset}' with trainer='{trainer}': plain text has no prompts; "
        "give 'full' or 'prompt_completion' or 'chat'$",
    ):
        Recipe(trainer=trainer, dataset=dataset)
    for taken in ("full", "prompt_completion", "chat"):
        assert Recipe(trainer=trainer, dataset=taken)


@pytest.mark.parametrize(
    ("switches", "longest"),
    [
        ({"trainer": "grpo"}, 512),  # TRL's own limit
        ({"trainer": "rloo", "max_completion_length": 64}, 64),
        ({"trainer": "online_dpo", "dataset": "chat"}, 64),
    ],
)
def test_completions_that_leave_no_room_for_a_prompt(
    switches: dict[str, Any], longest: int
) -> None:
    with pytest.raises(
        ValueError,
        match=f"max_length={longest} with max_completion_length={longest}: .* no room for a "
        f"prompt; give a max_length above {longest}$",
    ):
        Recipe.of(max_length=longest, **switches)
    assert Recipe.of(max_length=longest + 1, **switches)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_max_length_that_would_cut_nothing_is_refused(trainer: str) -> None:
    with pytest.raises(
        ValueError, match=r"dataset='chat': .* give max_completion_length in"
    ) as bad:
        Recipe(trainer=trainer, dataset="chat", max_length=16)
    assert str(bad.value).startswith(f"max_length=16 with trainer={trainer!r} and dataset='chat'")
    for taken in ({}, {"max_length": None}, {"max_length": 1024}):  # nobody asked for a cut
        assert Recipe.of(trainer=trainer, dataset="chat", **taken)
    assert Recipe(trainer=trainer, max_length=768)  # rows that are made have that length


def test_truncation_is_what_cuts_there() -> None:
    (technique,) = [t for t in TECHNIQUES if t.title == "truncation"]
    assert technique.setting_of("sft") == "max_length=..."
    for trainer in ("grpo", "rloo"):
        assert technique.setting_of(trainer) == "max_completion_length=..."
        assert not technique.is_on(Recipe(trainer=trainer))
        assert technique.is_on(Recipe(trainer=trainer, max_completion_length=9))


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: clash.values)
def test_what_clashes_is_told_in_one_line(clash: Clash) -> None:
    said = clash(Recipe())
    assert "\n" not in said
    assert "{" not in said
    assert re.fullmatch(r"\w+=.*[:;] give \S.*[^.]", said)
    assert not clash.when(Recipe())
    assert not clash.when(Recipe.off())


def test_the_value_that_was_given_is_named() -> None:
    with pytest.raises(ValueError, match="fused_head='fast' with trainer='reward'"):
        Recipe(trainer="reward", fused_head="fast")


def test_liger_and_the_fused_head_are_told_apart_from_the_loss_type() -> None:
    with pytest.raises(ValueError, match="fused_head='fast' with use_liger_kernel=True"):
        Recipe(fused_head="fast", use_liger_kernel=True)


@pytest.mark.parametrize("beta", [math.nan, math.inf])
def test_betas_are_finite(beta: float) -> None:
    with pytest.raises(ValueError, match=f"beta={beta}: give a finite number"):
        Recipe(trainer="dpo", beta=beta)
    with pytest.raises(TypeError, match="beta=1000"):
        Recipe(trainer="dpo", beta=10**400)


def test_a_switch_that_trl_dropped_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="no trainer has it any more; filter the data set"):
        Recipe.of(trainer="dpo", max_prompt_length=3)


def test_log_probabilities_beside_liger_come_in_chunks() -> None:
    chunked = heads.logprobs(Recipe(trainer="kto", use_liger_kernel=True))
    assert chunked.func is token_logprobs
    assert heads.logprobs(Recipe.off(trainer="kto")) is full_token_logprobs
