"""What lesson 06 says of TRL, constructed with the installed one."""

from pathlib import Path

import pytest

from memlab import Recipe
from memlab.lessons import in_trl

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
