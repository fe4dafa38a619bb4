"""Lesson 07: its exercises, parts of Liger, a share of several cards, and what it says of TRL."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lesson_cases import fresh_attempts, said  # noqa: F401
from made_steps import made_step
from torch import Tensor

from memlab import Recipe, check, measure
from memlab.errors import MemlabError
from memlab.experiments import rules
from memlab.experiments.benchmarks import benchmarks
from memlab.experiments.kernels import LAYERS, PARTS, measure_parts
from memlab.experiments.sharded import one_of
from memlab.instruments.measurement import CATEGORIES
from memlab.lessons import in_trl, kernels
from memlab.lessons import liger as exercises
from memlab.models.build import load_config
from memlab.widgets import Grid, explore_waterfall, grids, show_waterfall
from memlab.widgets.waterfall import falls, signed_gb

# transformers 5.24 announces a new name, TRL 1.16 the end of its switch
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning"),
]

SMALL = Recipe.off(model="memlab/tiny", max_length=64)

needs_liger = pytest.mark.skipif(bool(kernels.liger_missing()), reason=kernels.liger_missing())


def grid(name: str) -> Grid:
    return Grid.load(grids.folder() / f"{name}.json")


def peak(name: str, **setting: Any) -> int:
    return sum(grid(name).at(setting).values())


# -------------------------------------------------------------------------------- exercises


@needs_liger
def test_wide_layers_outweigh_the_head_until_they_are_checkpointed() -> None:
    assert check("07a", ("rms_norm", "head"))
    assert check("07a", ["rms_norm", "head"])
    assert "kB off a token without checkpointing" in said("07a", ("head", "head"))
    assert "'rms_norm' takes 0 kB off a token with" in said("07a", ("rms_norm", "rms_norm"))


@needs_liger
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bytes_that_layers_lose_are_the_formulas(checkpointing: bool) -> None:
    config = load_config(exercises.ASKED)
    heads = config.num_attention_heads + config.num_key_value_heads
    norms = 4 * (2 * config.hidden_size + heads * config.head_dim)
    found = exercises._removed(checkpointing)
    expected = {"rms_norm": norms, "rope": 0, "swiglu": 2 * config.intermediate_size}
    for layer in LAYERS:
        left = 0 if checkpointing else config.num_hidden_layers * expected[layer]
        assert found[layer] == left
    if torch.cuda.is_available():
        return  # Liger's head then takes a simulated card for none, and another path
    assert found["head"] == pytest.approx(
        12 * config.vocab_size - 2 * config.vocab_size * config.hidden_size / 4096, rel=0.02
    )


@needs_liger
def test_the_half_is_where_all_the_logits_are_twice_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(recipe: Recipe, **_: Any) -> Any:
        assert recipe.gradient_checkpointing
        total = 5_000 if recipe.use_liger_kernel else 3_000 + 7 * (recipe.max_length or 0)
        return replace(made_step(), metered_peak_bytes=total)

    monkeypatch.setattr(exercises, "measure", made)
    exercises._peak.cache_clear()
    assert check("07b", 1024)
    assert check("07b", torch.tensor(1024))
    assert "At 960:" in said("07b", 960)
    assert "A shorter row will do" in said("07b", 1088)
    assert "1024: with Liger" in exercises._why_half()
    exercises._peak.cache_clear()


@pytest.mark.parametrize("asked", ["07a", "07b"])
def test_without_liger_an_exercise_says_so(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    answer: Any = ("head", "head") if asked == "07a" else 1024
    assert "No liger_kernel here" in said(asked, answer)
    assert "nothing can be run" in repr(check(asked, answer))


def test_trainers_are_those_of_the_rules() -> None:
    liger = next(t for t in rules.TECHNIQUES if t.title == "Liger")
    valid = [trainer for trainer in rules.TRAINERS if liger.cell(trainer) == "yes"]
    assert check("07c", valid)
    assert check("07c", set(valid))
    assert "1 more" in said("07c", valid[1:])
    assert "liger-kernel has no loss for it" in said("07c", [*valid, "rloo"])
    assert "no trainer 'ppo'" in said("07c", [*valid, "ppo"])


class Norm(torch.autograd.Function):
    """What the lesson gives to start from; `lean` is what it wants."""

    lean = True

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        wide = x.float()
        r = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x if cls.lean else wide, w, r)
        return (wide * r * w).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, r = ctx.saved_tensors
        (g,) = gradients
        normed, gw = x.float() * r, g.float() * w
        dx = r * (gw - normed * (gw * normed).mean(-1, keepdim=True))
        return dx.to(g.dtype), (g.float() * normed).sum(0).to(w.dtype), None


class Wide(Norm):
    lean = False


def test_a_norm_that_keeps_its_input() -> None:
    assert check("07d", Norm.apply)
    assert exercises._kept_a_row(Norm.apply) == 4


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Wide.apply, r"leaves 1,028 bytes for backward; operation by operation it is 2,052"),
        (exercises.plain_norm, r"leaves 2,052 bytes"),
        (lambda x, w, eps: exercises.plain_norm(x, w, 0.1), "The value is not"),
        (lambda x, w, eps: exercises.plain_norm(x, w, eps).sum(), "the shape of x"),
        (lambda x, w, eps: exercises.plain_norm(x.detach(), w.detach(), eps), "not connected to x"),
        (lambda x, w, eps: exercises.plain_norm(x, w.detach(), eps), "no gradient of w"),
        (lambda x, w: x, "raised TypeError"),
    ],
)
def test_usual_mistakes_about_a_norm(norm: Callable[..., Any], expected: str) -> None:
    assert expected in said("07d", norm)


def test_forms_of_answers() -> None:
    for exercise, answer in {
        "07a": ("head", "liger"),
        "07b": 1000,
        "07c": "sft",
        "07d": 3,
    }.items():
        with pytest.raises(TypeError, match=exercise):
            check(exercise, answer)


# -------------------------------------------------------------------------------- parts of Liger


@needs_liger
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_part_and_all_parts_are_what_recipes_measure(checkpointing: bool) -> None:
    recipe = SMALL.replace(gradient_checkpointing=checkpointing)
    for parts, same in {(): recipe, PARTS: recipe.replace(use_liger_kernel=True)}.items():
        found, expected = measure_parts(recipe, parts), measure(same, device="simulated")
        assert found.by_category == expected.by_category
        assert found.timeline == expected.timeline


def test_parts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"parts=\['gelu'\]: unknown; give some of rms_norm"):
        measure_parts(SMALL, {"gelu"})
    for wrong in ({"trainer": "dpo"}, {"padding_free": True}, {"use_liger_kernel": True}):
        with pytest.raises(ValueError, match="give padded rows, trainer='sft' and False"):
            measure_parts(SMALL.replace(**wrong), ())


def test_without_liger_the_shipped_peak_is_shown_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(kernels, "measure", lambda recipe, **_: made_step())
    shipped = grid("07_kernels").at
    off = Recipe.off()
    found = kernels.compare_with_liger(
        off, off.replace(use_liger_kernel=True), device="auto", shipped=shipped
    )
    assert "No triton here" in capsys.readouterr().out
    every = {"gradient_checkpointing": False, "max_length": 1024, "kernels": kernels.ALL}
    assert found.after.by_category == shipped(every)
    assert found.after.metered_peak_bytes == sum(shipped(every).values())
    assert found.after.timeline == ()
    for other in ({"max_length": 100}, {"model": "memlab/tiny"}, {"max_steps": 3}):
        recipe = off.replace(use_liger_kernel=True, **other)
        with pytest.raises(MemlabError, match=r"No triton here .* give those, or install") as error:
            kernels.compare_with_liger(off, recipe, device="auto", shipped=shipped)
        assert "\n" not in str(error.value)


def test_a_card_of_several_holds_its_share_at_its_own_highest_moment() -> None:
    step = made_step()
    assert one_of(1, step).by_category == step.by_category
    eight = one_of(8, step)
    spread = ("parameters", "gradients", "optimizer_state")
    sums = [
        sum(n // 8 if c in spread else n for c, n in zip(CATEGORIES, sample.bytes, strict=True))
        for sample in step.timeline
    ]
    assert eight.metered_peak_bytes == sum(eight.by_category.values()) == max(sums)
    with pytest.raises(ValueError, match="cards=0"):
        one_of(0, step)
    with pytest.raises(ValueError, match="a timeline"):
        one_of(8, eight)


# -------------------------------------------------------------------------------- what it says


def test_waterfalls_add_up_and_say_shares() -> None:
    kept = grid("07_kernels")
    for mode, fall in falls(kept, 1024).items():
        at = {"gradient_checkpointing": mode, "max_length": 1024}
        assert fall.before == peak("07_kernels", **at, kernels="none")
        assert fall.after == fall.steps[-1][1] == peak("07_kernels", **at, kernels=kernels.ALL)
    shown = show_waterfall(kept, 1024, title="kernel by kernel")
    assert shown.png().startswith(b"\x89PNG")
    assert "RoPE 0" in shown.alt
    assert (signed_gb(-7_133_000_000), signed_gb(-4_194_304)) == ("−7.13", "−0.004")
    assert "all" in repr(shown)
    with pytest.raises(KeyError):
        show_waterfall(kept, 1000)


def test_the_slider_redraws_and_the_button_simulates_both_ends() -> None:
    asked = []

    def exact(setting: dict[str, Any]) -> int:
        asked.append(setting)
        return 10**10 // (2 if setting["use_liger_kernel"] else 1)

    figure = explore_waterfall(grid("07_kernels"), start=1024, exact=exact)
    before = figure.image.value
    figure.length.value = 2048
    assert figure.failure is None
    assert figure.image.value != before
    assert figure.field.value == 2048
    figure.field.value = 1300
    figure.button.click()
    assert [setting["max_length"] for setting in asked] == [1300] * 4
    assert "max_length 1300: without checkpointing 10.00 GB to 5.00 GB" in figure.status.value
    figure.length.value = 256
    assert "1300" not in figure.status.value
    with pytest.raises(ValueError, match="start=1000 is not on the grid"):
        explore_waterfall(grid("07_kernels"), start=1000)


def test_with_checkpointing_one_side_is_a_line_and_the_other_a_floor() -> None:
    at = {"gradient_checkpointing": True}
    without = [peak("07_kernels", **at, max_length=n, kernels="none") for n in (512, 1024, 1536)]
    assert without[2] - without[1] == pytest.approx(without[1] - without[0], rel=1e-3)
    floor = [peak("07_kernels", **at, max_length=n, kernels=kernels.ALL) for n in (512, 1536)]
    assert floor[1] == pytest.approx(floor[0], rel=1e-3)


def test_layer_kernels_and_checkpointing_remove_the_same_bytes() -> None:
    layers = "rms_norm+rope+swiglu"
    for on, most in ((False, 0.85), (True, 1.0)):
        at = {"gradient_checkpointing": on, "max_length": 1024}
        left = peak("07_kernels", **at, kernels=layers) / peak("07_kernels", **at, kernels="none")
        assert left < most
        assert left > 0.8 or not on
    assert left > 0.99
    for length, near in ((1024, 0), (4096, 0.02)):  # as shares of the peak without Liger
        at = {"gradient_checkpointing": True, "max_length": length}
        none, alone, every = (
            peak("07_kernels", **at, kernels=k) for k in ("none", "head", kernels.ALL)
        )
        assert alone / none == pytest.approx(every / none, abs=near)


def test_the_floor_is_that_of_the_chunked_loss() -> None:
    at = {"gradient_checkpointing": True, "max_length": 1024}
    assert peak("07_kernels", **at, kernels=kernels.ALL) == peak("06_chunks", **at, chunk=512)


def test_the_claim_is_true_of_eight_cards_and_long_rows() -> None:
    def left(length: int, cards: int) -> float:
        at = {"max_length": length, "cards": cards}
        with_liger, without = (peak("07_claim", **at, use_liger_kernel=on) for on in (True, False))
        return with_liger / without

    assert left(4096, 8) < 0.4 < left(512, 8)
    assert left(512, 1) == 1
    assert left(4096, 1) > 0.6


def test_one_pair_a_step_gains_nothing() -> None:
    for pairs, gains in ((1, False), (2, True)):
        at = {"per_device_train_batch_size": pairs}
        with_liger, without = (peak("07_pairs", **at, use_liger_kernel=on) for on in (True, False))
        assert (with_liger < without) == gains


def test_fused_is_slower_where_the_head_is_trained() -> None:
    shapes = benchmarks("head")[-1]["shapes"]
    trained, frozen = (shapes[name]["sides"] for name in ("trained", "frozen"))
    assert trained["Liger"]["ms"] > 1.3 * trained["full logits"]["ms"]
    assert frozen["Liger"]["ms"] < frozen["full logits"]["ms"]
    assert trained["Liger"]["errors"][1] > trained["full logits"]["errors"][1]


@pytest.mark.filterwarnings("ignore:use_liger_kernel=True. TRL's SFT has kernels:UserWarning")
def test_trl_spells_it_as_kernels(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    recipe = Recipe.off(use_liger_kernel=True)
    shown = repr(in_trl(recipe, over=Recipe.off()))
    assert "'use_kernels': True" in shown
    assert "TRL's SFT has kernels for its layers, and a chunked head of its own" in shown
    config = recipe.to_trl(output_dir=str(tmp_path), use_cpu=True)
    assert config.model_init_kwargs["use_kernels"]
    assert trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, use_liger_kernel=True)
