"""What lesson 06 says of TRL, constructed with the installed one, and of a benchmark's run."""

import json
from pathlib import Path

import pytest

from memlab import Recipe
from memlab.experiments.benchmarks import benchmarks
from memlab.experiments.heads import head_loss
from memlab.lessons import in_trl
from memlab.lessons.chunked import HEADS
from memlab.lessons.head_times import HeadTimes, show_head_times
from memlab.lessons.running import HeadShapes, head_bytes

trl = pytest.importorskip("trl")

# transformers 5.24 announces a new name; TRL sets the old one itself
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def test_the_defaults_are_chunked_under_either_name(tmp_path: Path) -> None:
    recipe = Recipe.defaults()
    config = recipe.to_trl(output_dir=str(tmp_path), use_cpu=True)
    assert config.loss_type == "nll"
    assert config.gradient_checkpointing
    with pytest.warns(FutureWarning, match="chunked_nll"):
        alias = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, loss_type="chunked_nll")
    plain = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert alias.loss_type == plain.loss_type == "nll"


def test_what_the_lesson_shows_can_be_pasted(tmp_path: Path) -> None:
    code = repr(in_trl(Recipe.defaults()))
    pasted = eval(code, {"SFTConfig": lambda **given: given})
    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, **pasted)
    assert (config.loss_type, config.max_length) == ("nll", 1024)


def test_the_switch_of_checkpointing_is_the_one_that_transformers_wants() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    renamed = "activation_checkpointing" in fields
    assert ("activation_checkpointing=True" in repr(in_trl(Recipe.defaults()))) == renamed


def trainer(tmp_path: Path, arguments: dict, **options: object) -> object:
    """A trainer of a tiny model and one row."""
    from datasets import Dataset

    from memlab.data.tokenizer import load_tokenizer
    from memlab.models.build import build_meta, load_config

    config = load_config("memlab/tiny")
    model = build_meta(config).to_empty(device="cpu")
    rows = Dataset.from_dict({"text": ["Fewer bytes, the same gradients."]})
    where = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**where, **arguments),
        train_dataset=rows,
        processing_class=load_tokenizer(),
        **options,
    )


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    with pytest.raises(ValueError, match="lm_head"):
        trainer(tmp_path, {}, peft_config=LoraConfig(target_modules=["lm_head"]))


@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
def test_ligers_fused_cross_entropy_is_refused(tmp_path: Path) -> None:
    fused = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}
    with pytest.raises(ValueError, match="fused_linear_cross_entropy"):
        trainer(tmp_path, fused)


def made_run() -> dict:
    def side(ms: float, errors: tuple[float, ...]) -> dict:
        return {"ms": ms, "ratio": ms / 20, "extra_mib": 1539.6, "errors": errors}

    sides = {
        "full logits": side(40, (1e-3, 2e-3)),
        "a <head>": side(25, (6e-3, 2e-3)),
        "products": {"ms": 20, "ratio": 1.0, "extra_mib": 0.0},
    }
    shape = {"rows": 8192, "vocab": 151_936, "width": 2048, "sides": sides}
    further = {**shape, "sides": {"full logits": side(60, ()), "products": side(20, ())}}
    named = {"device": "a card", "date": "2026-11-29", "versions": {"torch": "2.11.0"}}
    return {**named, "shapes": {"trained": shape, "frozen": further}}


def test_times_are_told_beside_the_products_and_errors_beside_full_logits() -> None:
    shown = HeadTimes(made_run())
    assert shown.lines[0][-1] == "time, frozen"
    assert shown.lines[1:] == [
        ["products", "20.0", "1.00x", "—", "—", "—", "1.00x"],
        ["a <head>", "25.0", "1.25x", "1,540", "6.00x", "1.00x", "—"],
        ["full logits", "40.0", "2.00x", "1,540", "1.00x", "1.00x", "3.00x"],
    ]
    assert repr(shown).splitlines()[0] == (
        "a card, recorded 2026-11-29, torch 2.11.0: 8,192 rows, 151,936 words, width 2,048"
    )
    page = shown._repr_html_()
    assert page.count("<tr>") == 4
    assert "a &lt;head&gt;" in page


def test_the_newest_run_has_what_the_lesson_says_of_it() -> None:
    trained = show_head_times().run["shapes"]["trained"]["sides"]
    ms = {name: side["ms"] for name, side in trained.items()}
    assert ms["memlab fast"] == min(ms[name] for name in ms if name != "products")
    assert ms["memlab fast"] < ms["memlab frugal"] < min(ms["full logits"], ms["Liger"])
    assert ms["memlab chunked"] == max(ms.values())
    assert ms["Liger"] == max(ms[name] for name in ms if name != "memlab chunked")
    assert trained["memlab frugal"]["extra_mib"] < trained["TRL"]["extra_mib"]
    extra = {name: side["extra_mib"] for name, side in trained.items() if name != "CCE"}
    assert extra["memlab chunked"] < extra["TRL"]
    assert extra["Liger"] == min(extra.values())
    masked = show_head_times().run["shapes"]["half masked"]["sides"]
    assert all(masked[name]["ratio"] < 1 for name in ("memlab fast", "memlab frugal", "TRL", "CCE"))
    far = {name: side["errors"][0] for name, side in trained.items() if "errors" in side}
    assert far["CCE"] > 3 * far["full logits"]
    assert far["memlab fast"] < 1.1 * far["full logits"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_simulated_heads_need_what_the_cards_did(frozen: bool) -> None:
    shape = benchmarks("head")[-1]["shapes"]["frozen" if frozen else "trained"]
    shapes = HeadShapes(shape["rows"], shape["vocab"], shape["width"])
    sides = {"all logits": "full logits", "fast": "memlab fast", "frugal": "memlab frugal"}
    for head, side in sides.items():
        extra = head_bytes(head_loss(HEADS[head]), shapes, trained=not frozen).extra
        assert extra / 2**20 == pytest.approx(shape["sides"][side]["extra_mib"], abs=1)


def test_the_lesson_shows_the_newest_run() -> None:
    """Execute the lesson anew after a run of the benchmark was added."""
    (path,) = (Path(__file__).parent.parent / "notebooks").glob("06_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (cell,) = (cell for cell in cells if "".join(cell["source"]).endswith("show_head_times()"))
    assert "".join(cell["outputs"][0]["data"]["text/plain"]) == repr(show_head_times())
