"""The KTO loop: its values are the formula's, and how a step is split changes nothing."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from trainer_cases import chunked, completion_logp, full, ids, one_step, split, tiny, with_lora

from memlab.models.head import head_parts
from memlab.techniques import pad_to_multiple, padding_free
from memlab.techniques.truncation import truncate_kto
from memlab.trainers import kto
from memlab.trainers.reference import frozen_copy

WEIGHTS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}


def rows(count: int = 5, max_length: int | None = 14) -> list[dict]:
    rng = np.random.default_rng(1)
    names = "prompt_ids", "completion_ids"
    made = [{name: ids(rng, 2, 9) for name in names} for _ in range(count)]
    labels = [True, False, False, True, True]
    labelled = [{**row, "label": labels[i % 5]} for i, row in enumerate(made)]
    return truncate_kto(kto.mismatched(labelled), max_length)


def padded(rows: list[dict]) -> dict:
    return kto.collate_rows(rows, pad_to_multiple.collate)


def step_of(model, step: list[dict], reference=None, logprobs=full, **options):
    reference = frozen_copy(tiny(seed=5)) if reference is None else reference
    options = {"head": head_parts(model), "reference": reference, "logprobs": logprobs, **options}
    return one_step(kto.train, model, step, **{**WEIGHTS, **options})


def by_hand(model, reference, rows: list[dict]) -> tuple[float, float]:
    """The loss and the KL estimate."""
    r = {"": [], "KL_": []}
    with torch.no_grad():
        for row in rows:
            for side, found in r.items():
                policy, old = (completion_logp(m, row, side) for m in (model, reference))
                found.append(float(policy - old))
    kl = max(0.0, sum(r["KL_"]) / len(rows))
    total = 0.0
    for gain, row in zip(r[""], rows, strict=True):
        sign, weight = (1, 1.5) if row["label"] else (-1, 0.5)
        total += weight * (1 - 1 / (1 + math.exp(-sign * 0.3 * (gain - kl))))
    return total / len(rows), kl


def test_each_prompt_gets_the_completion_of_the_row_before() -> None:
    made = [{"prompt_ids": [i], "completion_ids": [10 + i], "label": True} for i in (1, 2, 3)]
    batch = padded(truncate_kto(kto.mismatched(made), None))
    assert batch["input_ids"].tolist() == [[1, 11], [2, 12], [3, 13]]
    assert batch["KL_input_ids"].tolist() == [[1, 13], [2, 11], [3, 12]]
    assert batch["KL_labels"].tolist() == [[-100, 13], [-100, 11], [-100, 12]]
    assert batch["desirable"].tolist() == [True] * 3
    with pytest.raises(ValueError, match=r"1 rows: .* give 2"):
        kto.mismatched(made[:1])


@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])
def test_loss_is_the_formula_of_transformers_logits(name: str) -> None:
    model, other, made = tiny(name), tiny(name, seed=5), rows()
    expected, kl = by_hand(model, other, made)
    assert kl > 0.01  # an estimate cut off at 0 would test nothing
    loss, _ = step_of(model, [padded(made)], frozen_copy(other))
    assert loss == pytest.approx(expected, rel=1e-5)


def test_one_batch_equals_micro_batches_and_chunks() -> None:
    made, model, reference = rows(), tiny(), frozen_copy(tiny(seed=5))
    expected = step_of(model, [padded(made)], reference)
    for size in (1, 2):  # 2: micro-batches of unequal sizes; both: of one kind of rows only
        step = [padded(part) for part in split(made, size)]
        assert step_of(model, step, reference) == pytest.approx(expected, rel=1e-5)
    found = step_of(model, [padded(made)], reference, chunked)
    assert found == pytest.approx(expected, rel=1e-5)
    own_kl = sum(
        step_of(model, [padded(part)], reference)[0] * len(part) for part in (made[:2], made[2:])
    )
    assert own_kl / len(made) != pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("multiple", [None, 16])
def test_padding_free_changes_nothing(multiple: int | None) -> None:
    made = rows()
    expected = step_of(tiny(), [padded(made)])
    collate = partial(padding_free.collate, pad_to_multiple_of=multiple)
    batch = kto.collate_rows(made, collate)
    assert multiple is None or len(batch["cu_seqlens"]) == len(made) + 2  # a tail of padding
    found = step_of(
        tiny(flattened=True),
        [batch],
        frozen_copy(tiny(seed=5, flattened=True)),
        inputs=padding_free.model_inputs,
    )
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_an_adapter_switched_off_is_the_reference() -> None:
    model, batch = with_lora(tiny()), padded(rows())
    expected = step_of(model, [batch], frozen_copy(tiny()))
    head = head_parts(model)
    found = one_step(kto.train, model, [batch], head=head, logprobs=full, **WEIGHTS)
    assert found == pytest.approx(expected, rel=1e-5)
    unlike = step_of(model, [batch], frozen_copy(model))  # were the reference the policy
    assert found != pytest.approx(unlike, rel=1e-3)


def test_a_tiny_model_comes_to_tell_good_from_bad() -> None:
    model, made = tiny(), rows(8)
    head, reference = head_parts(model), frozen_copy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = [[padded(made)]] * 20
    losses = [
        loss.item()
        for loss in kto.train(
            model, optimizer, steps, head=head, reference=reference, logprobs=chunked
        )
    ]
    assert losses[0] == pytest.approx(0.5, rel=1e-5)  # policy and reference are equal
    assert losses[-1] < 0.5 * losses[0]


def test_what_cannot_work_is_refused() -> None:
    model, made = tiny(), rows()
    options = {"head": head_parts(model), "logprobs": full}
    with pytest.raises(ValueError, match=r"reference=None: .* has no peft adapter"):
        one_step(kto.train, model, [padded(made)], **options)
    with pytest.raises(ValueError, match="at least 2 rows, not 1"):
        step_of(model, [padded(made[:1])])
    for label in (None, 1, 1.0, "yes", torch.tensor(1), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=f"label={re.escape(repr(label))} of row 0"):
            padded([{**made[0], "label": label}])
    fit = [True, np.bool_(False), torch.tensor(True)]
    batch = padded([{**made[0], "label": label} for label in fit])
    assert batch["desirable"].tolist() == [True, False, True]
    with pytest.raises(ValueError, match="give KL_input_ids and KL_completion_mask"):
        padded([{name: made[0][name] for name in ("input_ids", "completion_mask", "label")}])


def test_a_row_without_a_completion_is_refused_by_its_number() -> None:
    """Its 0 would be judged as a log-probability: a loss that is wrong and finite."""
    whole = [{"prompt_ids": [3, 4], "completion_ids": [5], "label": True} for _ in range(4)]
    whole[3]["completion_ids"] = []
    with pytest.raises(ValueError, match=r"^completion_mask of row 3 has no 1: give a completion"):
        padded(truncate_kto(kto.mismatched(whole), 8))
    short = truncate_kto(kto.mismatched([*whole[:3], {**whole[0], "prompt_ids": [3] * 8}]), 8)
    assert len(padded(short)["desirable"]) == 3  # what truncation empties, it drops
