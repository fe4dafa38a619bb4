"""The SFT loop: its losses are TRL's, and how a step is split changes nothing."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import trainer_cases
from torch import Tensor, nn

from memlab.experiments import Recipe
from memlab.experiments.batching import micro_batches
from memlab.experiments.heads import HEAD_LOSSES
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing
from memlab.models.head import HeadParts, head_parts
from memlab.techniques.pad_to_multiple import collate
from memlab.trainers import sft

MODELS = ("memlab/tiny", "memlab/tiny-llama", "memlab/tiny-gemma2")


def tiny(name: str = "memlab/tiny", *, checkpointing: bool = False) -> nn.Module:
    model = materialize(build_meta(name, dtype=torch.float32), "cpu", init=True, seed=3).train()
    if checkpointing:
        enable_checkpointing(model)
    return model


def rows(count: int = 4, max_length: int = 48) -> list[dict[str, Tensor]]:
    """Micro-batches of one row each, of unequal lengths, with masked prompts."""
    recipe = Recipe.of(dataset="chat", per_device_train_batch_size=1, max_length=max_length, seed=1)
    vocabulary = load_config("memlab/tiny").vocab_size
    return micro_batches(recipe, count=count, vocab_size=vocabulary)


def whole(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return collate([{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in rows])


def one_step(
    model: nn.Module, micro_batches: list[dict[str, Tensor]], loss_type: str = "chunked_nll"
) -> tuple[float, float]:
    """Loss and gradient norm, before the optimizer changes anything."""
    return trainer_cases.one_step(
        sft.train,
        model,
        micro_batches,
        head=head_parts(model),
        head_loss=HEAD_LOSSES[loss_type],
    )


@pytest.mark.parametrize("name", MODELS)
def test_one_batch_equals_micro_batches_of_unequal_lengths(name: str) -> None:
    split = rows()
    lengths = {int(b["attention_mask"].sum()) for b in split}
    counts = {int((b["labels"] != -100).sum()) for b in split}
    assert len(lengths) > 1 or len(counts) > 1
    expected = one_step(tiny(name), [whole(split)])
    assert one_step(tiny(name), split) == pytest.approx(expected, rel=1e-5)
    mean_of_means = sum(one_step(tiny(name), [b])[0] for b in split) / len(split)
    assert mean_of_means != pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_techniques_keep_loss_and_gradients(name: str) -> None:
    batch = [whole(rows())]
    expected = one_step(tiny(name), batch, "nll")
    assert one_step(tiny(name), batch, "chunked_nll") == pytest.approx(expected, rel=1e-5)
    assert one_step(tiny(name, checkpointing=True), batch) == pytest.approx(expected, rel=1e-5)


def test_a_micro_batch_without_labels_changes_nothing() -> None:
    split = rows(3)
    blank = {**split[0], "labels": torch.full_like(split[0]["labels"], -100)}
    expected = one_step(tiny(), split)
    for loss_type in ("nll", "chunked_nll"):
        found = one_step(tiny(), [split[0], blank, *split[1:]], loss_type)
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_step_without_any_label_is_refused() -> None:
    batch = {**rows(1)[0]}
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.raises(ValueError, match="all -100 in every micro-batch"):
        one_step(tiny(), [batch])


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_that_of_transformers(name: str) -> None:
    model, batch = tiny(name), whole(rows())
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert one_step(model, [batch], "nll")[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll"])
def test_loss_is_that_of_logits_scaled_biased_capped_and_shifted(loss_type: str) -> None:
    class Backbone(nn.Embedding):
        def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    torch.manual_seed(0)
    body, head = Backbone(11, 8), nn.Linear(8, 11)
    step, total, count = [], torch.zeros(()), 0
    for shape in ((2, 5), (1, 9)):  # rows whose first label is no prompt's
        labels = torch.randint(11, shape)
        z = 0.5 * (body.weight[labels] @ head.weight.T + head.bias)
        z = 0.3 * torch.tanh(z / 0.3)
        total = total + F.cross_entropy(
            z[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        count += labels[:, 1:].numel()
        step.append({"input_ids": labels, "labels": labels})
    (loss,) = sft.train(
        model := nn.Sequential(body, head),
        torch.optim.SGD(model.parameters(), lr=0.0),
        [step],
        head=HeadParts(body, head, softcap=0.3, logit_scale=0.5),
        head_loss=HEAD_LOSSES[loss_type],
    )
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # TRL's own, of its own configuration
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # accelerate's, without a card
@pytest.mark.parametrize("loss_type", ["chunked_nll", "dft"])
def test_loss_is_that_of_trl(tmp_path, loss_type: str) -> None:
    from datasets import Dataset
    from trl import SFTTrainer

    from memlab.data.tokenizer import train_tokenizer

    model, batch = tiny(), whole(rows())
    recipe = Recipe.defaults(
        model="memlab/tiny", loss_type=loss_type, gradient_checkpointing=False, dtype="float32"
    )
    config = recipe.to_trl(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
        model_init_kwargs=None,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2, 3]]}),
        processing_class=train_tokenizer(["a few words to learn from"] * 4, vocab_size=300),
    )
    labels = (batch["labels"][:, 1:] != -100).sum()
    inputs = {name: column.clone() for name, column in batch.items()}
    theirs = trainer.compute_loss(model, inputs, num_items_in_batch=labels)
    theirs.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert one_step(tiny(), [batch], loss_type) == pytest.approx((theirs.item(), norm), rel=1e-5)


def test_gradients_left_on_the_model_are_no_part_of_a_step() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, 6, 7, 8]])}
    norms = []
    for left in (False, True):
        model = trainer_cases.tiny()
        if left:
            model(input_ids=batch["input_ids"]).logits.sum().backward()
        options = {"head": head_parts(model), "head_loss": HEAD_LOSSES["nll"]}
        norms.append(trainer_cases.one_step(sft.train, model, [batch], **options))
    assert norms[0] == norms[1]


def test_a_loss_keeps_the_precision_of_its_model() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, 6, 7, 8]])}
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        model = trainer_cases.tiny().to(dtype)
        options = {"head": head_parts(model), "head_loss": HEAD_LOSSES["nll"]}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        (loss,) = sft.train(model, optimizer, [[batch]], **options)
        assert loss.dtype == expected


def test_float16_weights_need_an_eps_that_is_not_0_there() -> None:
    """AdamW keeps its states in the weights' dtype: without the rule the second step is NaN."""
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, 6, 7, 8]])}

    def losses(eps: float, dtype: torch.dtype) -> list[float]:
        model = trainer_cases.tiny().to(dtype)
        options = {"head": head_parts(model), "head_loss": HEAD_LOSSES["nll"]}
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, eps=eps, foreach=True)
        return [x.item() for x in sft.train(model, optimizer, [[batch]] * 3, **options)]

    with pytest.raises(ValueError, match=r"eps=1e-08 with weights of float16: .* bfloat16 or flo"):
        losses(1e-8, torch.float16)
    for eps, dtype in ((1e-4, torch.float16), (1e-8, torch.bfloat16)):
        assert all(map(math.isfinite, losses(eps, dtype)))


def test_a_tiny_model_learns_its_rows() -> None:
    model, batch = tiny(), [whole(rows(8))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [
        loss.item()
        for loss in sft.train(
            model,
            optimizer,
            [batch] * 30,
            head=head_parts(model),
            head_loss=HEAD_LOSSES["chunked_nll"],
        )
    ]
    assert losses[-1] < 0.5 * losses[0]
