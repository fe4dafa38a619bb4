"""Whole trainers of TRL on the same batch: loss and gradient norm are ours."""

import math

import pytest
import test_trainers_dpo
import test_trainers_kto
from trainer_cases import chunked, full, one_step, tiny

from memlab.data.tokenizer import train_tokenizer
from memlab.models.head import head_parts
from memlab.trainers import dpo, kto
from memlab.trainers.reference import frozen_copy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),  # TRL's own, of its own configuration
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),  # accelerate's, without a card
]


def theirs(trainer_type, config_type, folder, row: dict, batch: dict, **options):
    """Loss and gradient norm that a trainer of TRL makes of the batch."""
    from datasets import Dataset

    model = tiny()
    trainer = trainer_type(
        model=model,
        ref_model=tiny(seed=5),
        args=config_type(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(batch["input_ids"]),
            **options,
        ),
        train_dataset=Dataset.from_list([row] * len(batch["input_ids"])),
        processing_class=train_tokenizer(["a few words to learn from"] * 4, vocab_size=300),
    )
    loss = trainer.compute_loss(model, {name: column.clone() for name, column in batch.items()})
    loss.backward()
    gradients = [p.grad.double() for p in model.parameters()]
    return loss.item(), math.sqrt(sum(float(g.square().sum()) for g in gradients))


def masked(batch: dict, prefix: str = "") -> dict:
    """Our columns under TRL's names; it masks its completions, where we label them."""
    return {
        f"{prefix}input_ids": batch[f"{prefix}input_ids"],
        f"{prefix}attention_mask": batch[f"{prefix}attention_mask"],
        f"{prefix}completion_mask": (batch[f"{prefix}labels"] != -100).long(),
    }


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_dpo(tmp_path, loss_type: str) -> None:
    from trl import DPOConfig, DPOTrainer

    batch = test_trainers_dpo.padded(test_trainers_dpo.pairs())
    row = {"prompt": "a few", "chosen": " words", "rejected": " to"}
    options = {"loss_type": loss_type, "beta": 0.3}
    given = {**options, "loss_type": [loss_type]}
    expected = theirs(DPOTrainer, DPOConfig, tmp_path, row, masked(batch), **given)
    model, reference = tiny(), frozen_copy(tiny(seed=5))
    common = {"head": head_parts(model), "reference": reference, "logprobs": chunked, **options}
    assert one_step(dpo.train, model, [batch], **common) == pytest.approx(expected, rel=1e-5)


def test_kto(tmp_path) -> None:
    from trl import KTOConfig, KTOTrainer

    batch = test_trainers_kto.padded(test_trainers_kto.rows())
    row = {"prompt": "a few", "completion": " words", "label": True}
    options = test_trainers_kto.WEIGHTS
    columns = {**masked(batch), **masked(batch, "KL_"), "label": batch["desirable"]}
    expected = theirs(KTOTrainer, KTOConfig, tmp_path, row, columns, **options)
    model, reference = tiny(), frozen_copy(tiny(seed=5))
    common = {"head": head_parts(model), "reference": reference, "logprobs": full, **options}
    assert one_step(kto.train, model, [batch], **common) == pytest.approx(expected, rel=1e-5)
