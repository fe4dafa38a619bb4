"""The DPO loop: its values are the formula's, and how a step is split changes nothing."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from trainer_cases import (
    Phases,
    chunked,
    completion_logp,
    full,
    ids,
    one_step,
    split,
    tiny,
    with_lora,
)

from memlab.models.compat import enable_checkpointing
from memlab.models.head import head_parts
from memlab.techniques import pad_to_multiple, padding_free
from memlab.techniques.truncation import truncate_dpo
from memlab.trainers import dpo
from memlab.trainers.completions import Completions
from memlab.trainers.reference import frozen_copy


def pairs(count: int = 4, max_length: int | None = 14) -> list[dict]:
    rng = np.random.default_rng(1)
    names = "prompt_ids", "chosen_ids", "rejected_ids"
    return truncate_dpo(
        [{name: ids(rng, 2, 9) for name in names} for _ in range(count)], max_length
    )


def padded(rows: list[dict]) -> dict:
    return dpo.collate_pairs(rows, pad_to_multiple.collate)


def step_of(model, step: list[dict], reference=None, logprobs=full, **options):
    reference = frozen_copy(tiny(seed=5)) if reference is None else reference
    options = {"head": head_parts(model), "reference": reference, "logprobs": logprobs, **options}
    return one_step(dpo.train, model, step, **options)


def by_hand(model, reference, rows: list[dict], loss_type: str = "sigmoid") -> float:
    total = 0.0
    with torch.no_grad():
        for row in rows:
            r = {}
            for side in ("chosen_", "rejected_"):
                difference = completion_logp(model, row, side) - completion_logp(
                    reference, row, side
                )
                counted = sum(row[f"{side}completion_mask"])
                r[side] = float(difference) / (counted if loss_type == "ipo" else 1)
            if loss_type == "ipo":
                total += (r["chosen_"] - r["rejected_"] - 1 / (2 * 0.3)) ** 2
            else:
                z = 0.3 * (r["chosen_"] - r["rejected_"])
                total += 0.9 * math.log1p(math.exp(-z)) + 0.1 * math.log1p(math.exp(z))
    return total / len(rows)


def test_a_batch_holds_the_chosen_rows_then_the_rejected() -> None:
    rows = truncate_dpo(
        [
            {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
            {"prompt_ids": [6], "chosen_ids": [7, 8, 9], "rejected_ids": [10]},
        ],
        None,
    )
    batch = padded(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [6, 7, 8, 9], [1, 2, 4, 5], [6, 10, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, -100, 3, -100],
        [-100, 7, 8, 9],
        [-100, -100, 4, 5],
        [-100, 10, -100, -100],
    ]


def test_rows_laid_end_to_end_are_summed_each() -> None:
    rows = truncate_dpo([{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}], None)
    batch = dpo.collate_pairs(rows, partial(padding_free.collate, pad_to_multiple_of=4))
    completions = Completions.of(batch, torch.device("cpu"))
    assert completions.targets.tolist() == [2, 3, -100, 4, -100, -100, -100, -100]
    assert completions.sums(2 ** torch.arange(8)).tolist() == [7, 24, 224]
    assert completions.lengths().tolist() == [2, 1, 0]


@pytest.mark.parametrize("logprobs", [full, chunked])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])
def test_loss_is_the_formula_of_transformers_logits(name: str, loss_type: str, logprobs) -> None:
    model, other, rows = tiny(name), tiny(name, seed=5), pairs()
    options = {"label_smoothing": 0.1} if loss_type == "sigmoid" else {}
    options |= {"loss_type": loss_type, "beta": 0.3}
    loss, _ = step_of(model, [padded(rows)], frozen_copy(other), logprobs, **options)
    assert loss == pytest.approx(by_hand(model, other, rows, loss_type), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_one_batch_equals_micro_batches_and_chunks(loss_type: str) -> None:
    rows = pairs()
    expected = step_of(tiny(), [padded(rows)], loss_type=loss_type)
    for size in (1, 3):  # 3: micro-batches of unequal sizes
        step = [padded(part) for part in split(rows, size)]
        assert step_of(tiny(), step, loss_type=loss_type) == pytest.approx(expected, rel=1e-5)
    found = step_of(tiny(), [padded(rows)], logprobs=chunked, loss_type=loss_type)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("multiple", [None, 16])
def test_padding_free_changes_nothing(loss_type: str, multiple: int | None) -> None:
    rows = pairs()
    expected = step_of(tiny(), [padded(rows)], loss_type=loss_type)
    collate = partial(padding_free.collate, pad_to_multiple_of=multiple)
    batch = dpo.collate_pairs(rows, collate)
    assert multiple is None or len(batch["cu_seqlens"]) == 2 * len(rows) + 2  # a tail of padding
    found = step_of(
        tiny(flattened=True),
        [batch],
        frozen_copy(tiny(seed=5, flattened=True)),
        loss_type=loss_type,
        inputs=padding_free.model_inputs,
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_checkpointing_changes_nothing() -> None:
    batch, model = padded(pairs()), tiny()
    expected = step_of(model, [batch])
    enable_checkpointing(model)
    assert step_of(model, [batch]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_an_adapter_switched_off_is_the_reference() -> None:
    model, rows = with_lora(tiny()), pairs()
    head, batch = head_parts(model), padded(rows)
    expected = step_of(model, [batch], frozen_copy(tiny()))
    model.base_model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    found = one_step(dpo.train, model, [batch], head=head, logprobs=chunked)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[0] != pytest.approx(math.log(2), rel=1e-3)  # were the reference the policy
    assert [module.training for module in model.modules()] == modes


def test_the_reference_neither_learns_nor_leaves_a_mode_behind() -> None:
    model = tiny()
    reference = frozen_copy(model)
    before = {name: p.clone() for name, p in reference.backbone.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.model.layers[0].eval()
    next(
        dpo.train(
            model,
            optimizer,
            [[padded(pairs())]],
            head=head_parts(model),
            reference=reference,
            logprobs=full,
        )
    )
    assert all(torch.equal(p, before[name]) for name, p in reference.backbone.named_parameters())
    assert any(not torch.equal(p, before[n]) for n, p in model.model.named_parameters())
    assert model.training
    assert not model.model.layers[0].training


def test_phases_come_in_their_order() -> None:
    rows, phases = pairs(), Phases()
    step_of(tiny(), [padded(rows[:2]), padded(rows[2:])], phase=phases)
    assert phases == ["reference", "forward", "backward"] * 2 + ["optimizer"]


def test_a_tiny_model_comes_to_prefer_what_was_chosen() -> None:
    model = tiny()
    head, reference, batch = head_parts(model), frozen_copy(model), padded(pairs(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = [[batch]] * 20
    losses = [
        loss.item()
        for loss in dpo.train(
            model, optimizer, steps, head=head, reference=reference, logprobs=chunked
        )
    ]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)  # policy and reference are equal
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": None}, "reference=None: .* has no peft adapter"),
        ({"reference": "itself"}, "the trained model itself"),
        ({"loss_type": "kto"}, "loss_type must be one of"),
        ({"beta": 0.0}, "beta must be above 0"),
    ],
)
def test_what_cannot_work_is_refused(change: dict, message: str) -> None:
    model = tiny()
    head = head_parts(model)
    options = {"reference": frozen_copy(model), **change}
    if options["reference"] == "itself":
        options["reference"] = head
    with pytest.raises(ValueError, match=message):
        one_step(dpo.train, model, [padded(pairs())], head=head, logprobs=full, **options)


def test_rows_that_are_no_pairs_are_refused() -> None:
    batch = {name: column[:3] for name, column in padded(pairs()).items()}
    with pytest.raises(ValueError, match="a batch of 3 rows holds no pairs"):
        step_of(tiny(), [batch])
    with pytest.raises(ValueError, match="give chosen_input_ids and chosen_completion_mask"):
        padded([{"input_ids": [1], "labels": [1]}])
    uneven = {"chosen_input_ids": [1, 2], "chosen_completion_mask": [1]}
    with pytest.raises(ValueError, match=r"of row 0: one a token, not \(2,\) and \(1,\)"):
        padded([uneven])


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("ids", [[], [7, 8]])
@pytest.mark.parametrize("collate", [pad_to_multiple.collate, padding_free.collate])
def test_a_pair_without_an_answer_is_refused_by_its_row(side, ids, collate) -> None:
    """Its 0 would be judged as a log-probability: a loss that is wrong and finite."""
    rows = [{f"{s}_ids": [3, 4] for s in ("prompt", "chosen", "rejected")} for _ in range(3)]
    rows[2] |= {"prompt_ids": ids, f"{side}_ids": []}
    cut = truncate_dpo(rows, 8)
    with pytest.raises(ValueError, match=f"{side}_completion_mask of row 2 has no 1: give a compl"):
        dpo.collate_pairs(cut, collate)
