"""A reward model's loop: its values are the formula's, and how a step is split changes nothing."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import trainer_cases
from trainer_cases import ids, one_step, split

from memlab.models.build import build_meta, materialize
from memlab.models.head import head_parts
from memlab.models.score import build_score_meta, score_parts
from memlab.techniques import pad_to_multiple, padding_free, varlen_attention
from memlab.techniques.truncation import truncate_reward
from memlab.trainers import reward

OPTIONS = {"center_rewards_coefficient": 0.05}


def tiny(name: str = "memlab/tiny", *, flattened: bool = False):
    if flattened:
        varlen_attention.register()
    attention = varlen_attention.NAME if flattened else None
    meta = build_score_meta(name, dtype=torch.float32, attn_implementation=attention)
    return materialize(meta, "cpu", init=True, seed=3).train()


def pairs(count: int = 4, *, margin: bool = True) -> list[dict]:
    rng = np.random.default_rng(1)
    names = "chosen_ids", "rejected_ids"
    rows = [{name: ids(rng, 2, 14) for name in names} for _ in range(count)]
    return truncate_reward(
        [{**r, "margin": 0.3 * i} if margin else r for i, r in enumerate(rows)], 13
    )


def padded(rows: list[dict]) -> dict:
    return reward.collate_pairs(rows, pad_to_multiple.collate)


def step_of(model, step: list[dict], **options) -> tuple[float, float]:
    return one_step(reward.train, model, step, head=score_parts(model), **{**OPTIONS, **options})


@pytest.mark.parametrize("margin", [True, False])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-llama", "memlab/tiny-gemma2"])
def test_loss_is_the_formula_of_transformers_scores(name: str, margin: bool) -> None:
    model, rows, total = tiny(name), pairs(margin=margin), 0.0
    with torch.no_grad():
        for row in rows:  # one at a time, for transformers needs a padding token for more
            chosen, rejected = (
                model(input_ids=torch.tensor([row[side]])).logits.item()
                for side in ("chosen_ids", "rejected_ids")
            )
            difference = chosen - rejected - row.get("margin", 0)
            total += math.log1p(math.exp(-difference)) + 0.05 * (chosen + rejected) ** 2
    loss, _ = step_of(model, [padded(rows)])
    assert loss == pytest.approx(total / len(rows), rel=1e-5)


def test_one_batch_equals_micro_batches() -> None:
    model, rows = tiny(), pairs()
    expected = step_of(model, [padded(rows)])
    for size in (1, 3):  # 3: micro-batches of unequal sizes
        step = [padded(part) for part in split(rows, size)]
        assert step_of(model, step) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("multiple", [None, 32])
def test_padding_free_changes_nothing(multiple: int | None) -> None:
    rows = pairs()
    expected = step_of(tiny(), [padded(rows)])
    batch = reward.collate_pairs(rows, partial(padding_free.collate, pad_to_multiple_of=multiple))
    assert multiple is None or len(batch["cu_seqlens"]) == 2 * len(rows) + 2  # a tail of padding
    found = step_of(tiny(flattened=True), [batch], inputs=padding_free.model_inputs)
    assert found == pytest.approx(expected, rel=1e-5)


def test_padding_to_a_multiple_changes_nothing() -> None:
    model, rows = tiny(), pairs()
    wider = reward.collate_pairs(rows, partial(pad_to_multiple.collate, pad_to_multiple_of=32))
    assert wider["input_ids"].shape[1] == 32
    assert step_of(model, [wider]) == pytest.approx(step_of(model, [padded(rows)]), rel=1e-5)


def test_a_tiny_model_learns_which_answer_was_chosen() -> None:
    model, batch = tiny(), padded(pairs(8, margin=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [
        loss.item()
        for loss in reward.train(model, optimizer, [[batch]] * 20, head=score_parts(model))
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_what_cannot_work_is_refused() -> None:
    rows = pairs()
    with pytest.raises(ValueError, match="margin: in 3 rows of 4"):
        padded([*rows[:3], {name: rows[3][name] for name in ("chosen_ids", "rejected_ids")}])
    with pytest.raises(ValueError, match="give rejected_ids, at least one token"):
        padded([{**rows[0], "rejected_ids": []}])
    with pytest.raises(ValueError, match="a batch of 3 rows holds no pairs"):
        step_of(tiny(), [{name: column[:3] for name, column in padded(rows).items()}])
    model = trainer_cases.tiny()
    with pytest.raises(ValueError, match=r"head must have 1 output, a score, not \d\d+"):
        one_step(reward.train, model, [padded(rows)], head=head_parts(model))
    with pytest.raises(TypeError, match="is no reward model"):
        score_parts(build_meta("memlab/tiny"))
