"""Every trainer with the chunked head: the loss and the gradients of all the logits at once."""

from dataclasses import replace
from functools import partial

import pytest
import test_trainers_dpo
import test_trainers_gkd
import test_trainers_grpo
import test_trainers_kto
import test_trainers_online_dpo
import test_trainers_rloo
import torch
from torch import nn
from trainer_cases import one_step, split, tiny, with_lora

from memlab.models.head import HeadParts, head_parts
from memlab.techniques import chunked_divergence, chunked_logprobs
from memlab.techniques.chunked_divergence import divergence, full_divergence
from memlab.techniques.chunked_logprobs import full_token_logprobs, token_logprobs
from memlab.trainers import dpo, gkd
from memlab.trainers.reference import frozen_copy

HEADS = {
    "full": {"logprobs": full_token_logprobs, "divergence": full_divergence},
    "chunked": {
        "logprobs": partial(token_logprobs, chunk=7),
        "divergence": partial(divergence, chunk=7),
    },
}


def other() -> HeadParts:
    return frozen_copy(tiny(seed=5))


def step(trainer: str, model: nn.Module, head: str, **options) -> list[float]:
    """Losses and gradient norms of one step, of two iterations where a trainer has them."""
    which = "divergence" if trainer == "gkd" else "logprobs"
    options = {which: HEADS[head][which], **options}
    if trainer == "gkd":
        batch = test_trainers_gkd.padded(test_trainers_gkd.rows())
        return [*test_trainers_gkd.step_of(model, [batch], other(), **options)]
    if trainer in ("dpo", "kto"):
        module = {"dpo": test_trainers_dpo, "kto": test_trainers_kto}[trainer]
        batch = module.padded(module.pairs() if trainer == "dpo" else module.rows())
        return [*module.step_of(model, [batch], other(), **options)]
    if trainer == "online_dpo":
        return [*test_trainers_online_dpo.step_of(model, other(), **options)]
    module = {"grpo": test_trainers_grpo, "rloo": test_trainers_rloo}[trainer]
    again = {"reference": other(), "beta": 0.1, "num_iterations": 2, "lr": 0.3}
    return module.step_of(model, **again, **options)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Chunks are widened three of their rows at a time."""
    for module in (chunked_logprobs, chunked_divergence):
        monkeypatch.setattr(module, "WIDE", 3 * 512)


@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])  # that one has a softcap
@pytest.mark.parametrize("trainer", ["dpo", "kto", "grpo", "rloo", "online_dpo", "gkd"])
def test_chunks_change_nothing(trainer: str, name: str) -> None:
    expected, found = (step(trainer, tiny(name), head) for head in HEADS)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(norm > 1e-3 for norm in found[len(found) // 2 :])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize("trainer", ["dpo", "gkd"])
def test_a_frozen_head_under_an_adapter(trainer: str) -> None:
    model = with_lora(tiny())
    expected, found = (step(trainer, model, head) for head in HEADS)
    assert found == pytest.approx(expected, rel=1e-5)
    assert head_parts(model).head.weight.grad is None


@pytest.mark.parametrize("head", HEADS)
def test_case_12_a_micro_batch_that_is_all_masked_leaves_the_others_unchanged(head: str) -> None:
    batch = test_trainers_gkd.padded(test_trainers_gkd.rows())
    blank = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    options = {"divergence": HEADS[head]["divergence"]}
    expected = test_trainers_gkd.step_of(tiny(), [batch], **options)
    found = test_trainers_gkd.step_of(tiny(), [blank, batch, blank], **options)
    assert found == pytest.approx(expected, rel=1e-5)

    pairs = test_trainers_dpo.padded(test_trainers_dpo.pairs())
    blank = {**pairs, "labels": torch.full_like(pairs["labels"], -100)}
    options = {"logprobs": HEADS[head]["logprobs"]}
    loss, norm = test_trainers_dpo.step_of(tiny(), [pairs], **options)
    found = test_trainers_dpo.step_of(tiny(), [blank, pairs], **options)
    flat = torch.tensor(2.0).log().item()  # of a pair that nothing is known about
    assert found == pytest.approx(((loss + flat) / 2, norm / 2), rel=1e-5)


@pytest.mark.parametrize("size", [1, 3])  # 3: micro-batches of unequal sizes
@pytest.mark.parametrize("trainer", ["dpo", "kto", "gkd"])
def test_case_13_micro_batches_make_the_step(trainer: str, size: int) -> None:
    module = {"dpo": test_trainers_dpo, "kto": test_trainers_kto, "gkd": test_trainers_gkd}[trainer]
    which = "divergence" if trainer == "gkd" else "logprobs"
    rows = module.pairs() if trainer == "dpo" else module.rows()
    model, options = tiny(), {which: HEADS["chunked"][which]}
    expected = module.step_of(model, [module.padded(rows)], other(), **options)
    parts = [module.padded(part) for part in split(rows, size)]
    assert module.step_of(model, parts, other(), **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("trainer", ["dpo", "gkd"])
def test_case_14_an_fp32_head_on_a_bf16_decoder(trainer: str) -> None:
    model, frozen = (tiny(seed=seed).bfloat16() for seed in (3, 5))
    heads = []
    for decoder in (model, frozen):
        found = head_parts(decoder)
        head = nn.Linear(*reversed(found.head.weight.shape), bias=False)
        head.weight.data.copy_(found.head.weight)
        heads.append(replace(found, head=head))
    student, fixed = heads
    fixed.head.requires_grad_(False)
    model.lm_head = student.head
    values = []
    for head in HEADS:
        if trainer == "dpo":
            batch = test_trainers_dpo.padded(test_trainers_dpo.pairs())
            options = {"reference": fixed, "logprobs": HEADS[head]["logprobs"]}
            values.append(one_step(dpo.train, model, [batch], head=student, **options))
        else:
            batch = test_trainers_gkd.padded(test_trainers_gkd.rows())
            options = {"teacher": fixed, "divergence": HEADS[head]["divergence"]}
            values.append(one_step(gkd.train, model, [batch], head=student, **options))
    assert values[1] == pytest.approx(values[0], rel=2e-3)  # the decoder's gradients are bf16


def test_case_15_weights_of_rows_reach_the_gradients() -> None:
    norms = []
    for weights in ({}, {"desirable_weight": 3.0, "undesirable_weight": 0.25}):
        expected, found = (step("kto", tiny(), head, **weights) for head in HEADS)
        assert found == pytest.approx(expected, rel=1e-5)
        norms.append(found[1])
    assert norms[0] != pytest.approx(norms[1], rel=0.1)


def test_case_16_label_smoothing_is_honoured() -> None:
    losses = []
    for smoothing in (0.0, 0.3):
        expected, found = (step("dpo", tiny(), head, label_smoothing=smoothing) for head in HEADS)
        assert found == pytest.approx(expected, rel=1e-5)
        losses.append(found)
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)
