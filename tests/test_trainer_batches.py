"""From a recipe of any trainer to its steps: the rows that truncation leaves, in seeded order."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import chunked, split, tiny

from memlab.data import lengths
from memlab.data.lengths import Row, shuffled
from memlab.data.preferences import (
    binary_rows,
    preference_rows,
    prompt_rows,
    prompted_rows,
    scored_rows,
)
from memlab.experiments import Recipe
from memlab.experiments.batching import micro_batches
from memlab.experiments.rules import IN_GROUPS, OF_SOME, ONLINE, own
from memlab.experiments.trainer_batches import last_rows, last_step, longest_row, step_batches
from memlab.models.build import build_meta, materialize
from memlab.models.head import head_parts
from memlab.models.score import build_score_meta, score_parts
from memlab.techniques.chunked_loss import cross_entropy
from memlab.techniques.truncation import (
    truncate_dpo,
    truncate_gkd,
    truncate_kto,
    truncate_reward,
)
from memlab.trainers import dpo, gkd, grpo, kto, online_dpo, reward, rloo, sft
from memlab.trainers.reference import frozen
from memlab.trainers.rollouts import rollout

IGNORE = -100
OFFLINE = ("dpo", "reward", "kto", "gkd")
SHAPES = (
    Row(5, ((3, 5),)),
    Row(9, ((2, 9),)),
    Row(12, ((10, 12),)),
    Row(8, ((1, 3), (5, 7))),
    Row(4, ((1, 4),)),
    Row(30, ((12, 30),)),
    Row(6, ((4, 6),)),
)


@pytest.fixture(scope="module", autouse=True)
def _short_rows():
    """ "chat" has few and short rows here."""
    committed = lengths.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "rows", lambda kind: SHAPES if kind == "chat" else committed(kind))
        yield


def recipe_of(*, trainer: str = "sft", **switches: Any) -> Recipe:
    """A recipe with those of the switches that the trainer has."""
    has = {k: v for k, v in switches.items() if trainer in OF_SOME.get(k, (trainer,))}
    made = {"dataset": "chat", "max_length": 20, **has}
    if trainer in IN_GROUPS and made["dataset"] != "full":
        del made["max_length"]  # it would cut nothing, and is refused
    return Recipe.of(trainer=trainer, **made)


def made(count: int = 1, *, vocab_size: int = 97, fill: Any = "text", **switches: Any) -> list:
    return step_batches(recipe_of(**switches), count=count, vocab_size=vocab_size, fill=fill)


def rows_in(batch: dict) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of a batch's rows without padding; nothing learns a first token."""
    if "cu_seqlens" in batch:
        sizes = batch["cu_seqlens"].diff().tolist()
        ids, labels = batch["input_ids"][0].split(sizes), batch["labels"][0].split(sizes)
    else:
        sizes = batch["attention_mask"].sum(1).tolist()
        ids, labels = batch["input_ids"], batch["labels"]
    return [
        (i[:n].tolist(), [IGNORE, *row[1:n].tolist()])
        for i, row, n in zip(ids, labels, sizes, strict=True)
    ]


def units(trainer: str, batch: dict) -> list[tuple]:
    """What a batch holds, a pair or a row at a time."""
    rows = rows_in(batch)
    if trainer in ("dpo", "reward"):
        pairs = len(rows) // 2  # flattened, a tail of padding may come after them
        return list(zip(rows[:pairs], rows[pairs : 2 * pairs], strict=True))
    if trainer == "kto":
        desirable = batch["desirable"].tolist()
        others = rows_in({name[3:]: c for name, c in batch.items() if name.startswith("KL_")})
        return list(zip(rows, others, desirable, strict=False))[: len(desirable)]
    return [(row,) for row in rows]


def joined(row: dict, prefix: str = "") -> tuple[list[int], list[int]]:
    ids, mask = row[f"{prefix}input_ids"], row[f"{prefix}completion_mask"]
    return ids.tolist(), [IGNORE, *np.where(mask, ids, IGNORE)[1:].tolist()]


def expected(trainer: str, rows: list, step: int, count: int, max_length: int, mode: str, seed):
    """The units of `count` steps of `step` rows, from the truncation of each trainer."""

    def drawn(left: list) -> list:
        order = shuffled(left, seed)
        return [order[i % len(order)] for i in range(step * count)]

    match trainer:
        case "dpo":
            left = drawn(truncate_dpo(preference_rows(rows), max_length, truncation_mode=mode))
            return [(joined(row, "chosen_"), joined(row, "rejected_")) for row in left]
        case "reward":
            left = drawn(truncate_reward(scored_rows(preference_rows(rows)), max_length))
            sides = [
                [row[f"{side}_ids"].tolist() for side in ("chosen", "rejected")] for row in left
            ]
            return [tuple((ids, [IGNORE, *ids[1:]]) for ids in pair) for pair in sides]
        case "kto":
            judged = drawn([r for r in binary_rows(rows) if len(r["prompt_ids"]) < max_length])
            whole = [r for part in split(judged, step) for r in kto.mismatched(part)]
            left = truncate_kto(whole, max_length)
            assert len(left) == len(judged)
            return [(joined(row), joined(row, "KL_"), row["label"]) for row in left]
        case _:
            fit = [r for r in rows if (r["labels"][-max_length:] == IGNORE)[0]]
            left = drawn(truncate_gkd(fit, max_length))
            return [((r["input_ids"].tolist(), r["labels"].tolist()),) for r in left]


@settings(max_examples=60, deadline=None)
@given(
    trainer=st.sampled_from(OFFLINE),
    size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    max_length=st.integers(10, 40),
    multiple=st.none() | st.integers(2, 9),
    flat=st.booleans(),
    mode=st.sampled_from(("keep_start", "keep_end")),
    seed=st.integers(0, 2),
)
def test_rows_are_those_that_truncation_leaves(
    trainer, size, accumulate, max_length, multiple, flat, mode, seed
):
    size += trainer == "kto"
    switches = {
        "trainer": trainer,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulate,
        "max_length": max_length,
        "pad_to_multiple_of": multiple,
        "padding_free": flat and trainer != "gkd",
        "truncation_mode": mode if trainer == "dpo" else "keep_start",
        "seed": seed,
    }
    steps = made(2, **switches)
    assert [len(step) for step in steps] == [accumulate] * 2
    batches = [batch for step in steps for batch in step]
    held = [units(trainer, batch) for batch in batches]
    if trainer != "gkd" and flat and multiple:  # a tail of padding is no pair
        assert all(batch["input_ids"].numel() % multiple == 0 for batch in batches)
    assert [len(part) for part in held] == [size] * len(batches)
    rows = prompted_rows("chat", vocab_size=97, seed=seed)
    wanted = expected(
        trainer, rows, size * accumulate, 2, max_length, switches["truncation_mode"], seed
    )
    assert [unit for part in held for unit in part] == wanted
    longest = max(len(row[0]) for part in held for unit in part for row in unit[:2])
    assert longest <= max_length
    for batch in batches:
        if "attention_mask" in batch:
            assert batch["input_ids"].shape[1] % (multiple or 1) == 0


@pytest.mark.parametrize("trainer", ONLINE)
def test_a_step_of_an_online_trainer_is_its_prompts(trainer):
    switches: dict = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    switches |= {"num_generations": 2, "max_length": 8, "max_completion_length": 4}
    steps = made(2, trainer=trainer, seed=1, **switches)
    size = 8 if trainer == "online_dpo" else 4
    prompts = prompt_rows(prompted_rows("chat", vocab_size=97, seed=1))
    order = shuffled([row["prompt_ids"].tolist() for row in prompts], 1)
    drawn = [order[i % len(order)] for i in range(2 * size)]  # never cut by max_length
    assert [[prompt.tolist() for prompt in step] for step in steps] == split(drawn, size)
    assert all(prompt.dtype == torch.int64 for step in steps for prompt in step)


@pytest.mark.parametrize(("trainer", "prompts"), [("grpo", 2), ("rloo", 8)])
def test_generations_of_a_prompt_where_none_are_given(trainer, prompts):
    (step,) = made(1, trainer=trainer, per_device_train_batch_size=16)
    assert len(step) == prompts


@pytest.mark.parametrize("fill", ["text", "zeros"])
@pytest.mark.parametrize("length", [2, 7, 64])
def test_full_rows_are_max_length_tokens_for_every_trainer(length, fill):
    full = {"dataset": "full", "max_length": length, "per_device_train_batch_size": 2}
    for trainer, rows in (("dpo", 4), ("reward", 4), ("kto", 2), ("gkd", 2), ("sft", 2)):
        for batch in made(2, trainer=trainer, fill=fill, **full)[1]:
            assert batch["input_ids"].shape == (rows, length)
            assert batch["attention_mask"].all()
            learnt = {"sft": length, "reward": length}.get(trainer, length - length // 2)
            assert (batch["labels"] != IGNORE).sum(1).tolist() == [learnt] * rows
            if trainer == "kto":
                assert batch["KL_input_ids"].shape == (rows, length)
    for trainer in ONLINE:
        switches = {"max_completion_length": length - 1, "num_generations": 2}
        (step,) = made(1, trainer=trainer, fill=fill, **full, **switches)
        assert {len(prompt) for prompt in step} == {1}
    (step,) = made(1, trainer="online_dpo", **{**full, "max_length": 300})
    assert [len(prompt) for prompt in step] == [300 - 64] * 2  # 64 is the trainer's own


def test_one_full_pair_has_two_answers():
    for trainer in ("dpo", "reward"):
        full = {"dataset": "full", "max_length": 30, "per_device_train_batch_size": 1}
        ((batch,),) = made(1, trainer=trainer, vocab_size=5000, **full)
        chosen, rejected = batch["input_ids"]
        assert torch.equal(chosen[:15], rejected[:15])
        assert not torch.equal(chosen, rejected)


def test_sft_steps_are_its_micro_batches():
    recipe = recipe_of(gradient_accumulation_steps=2)
    steps = step_batches(recipe, count=2, vocab_size=97)
    flat = micro_batches(recipe, count=4, vocab_size=97)
    assert [len(step) for step in steps] == [2, 2]
    for one, other in zip([b for step in steps for b in step], flat, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("trainer", [*OFFLINE, *ONLINE, "sft"])
def test_the_measured_step_is_the_last(trainer):
    short = {"max_completion_length": 7} if trainer in ONLINE else {}
    recipe = recipe_of(trainer=trainer, max_steps=3, num_generations=2, seed=1, **short)
    last = last_step(recipe)
    wanted = step_batches(recipe, count=3, vocab_size=1, fill="zeros")[2]
    for one, other in zip(last, wanted, strict=True):
        if trainer in ONLINE:
            one, other = {"prompt": one}, {"prompt": other}
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("trainer", [*OFFLINE, "sft"])
def test_rows_of_the_measured_step(trainer, flattened):
    if flattened and trainer == "gkd":
        pytest.skip("gkd has no padding-free rows")
    recipe = recipe_of(trainer=trainer, gradient_accumulation_steps=2, padding_free=flattened)
    step, rows = last_step(recipe), last_rows(recipe)
    assert [(b["labels"].shape, b["labels"].numel()) for b in step] == [
        ((r.rows, r.slots), r.rows * r.slots) for r in rows
    ]
    assert [list(r.documents) for r in rows] == [[len(ids) for ids, _ in rows_in(b)] for b in step]
    most = longest_row(recipe.replace(max_length=None))
    assert all(max(r.documents) <= min(most, 20) for r in rows)


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("max_length", [12, 40])
@pytest.mark.parametrize("trainer", ONLINE)
def test_rows_that_a_rollout_makes(trainer, max_length, multiple):
    recipe = recipe_of(
        trainer=trainer,
        gradient_accumulation_steps=2,
        max_length=max_length,
        max_completion_length=7,
        pad_to_multiple_of=multiple,
    )
    model = tiny()
    repeats = own(recipe, "num_generations") or 2
    rolled = rollout(
        model,
        [prompt for prompt in last_step(recipe) for _ in range(repeats)],
        head=head_parts(model),
        max_completion_length=7,
        max_length=max_length if trainer == "online_dpo" else None,
        pad_to_multiple_of=multiple,
    )
    rows = last_rows(recipe)
    assert sum(r.rows for r in rows) == len(rolled.input_ids)
    assert {r.slots for r in rows} == {rolled.input_ids.shape[1]}
    assert [r.rows for r in rows] == [8 if trainer == "online_dpo" else 4] * 2
    assert all(max(r.documents) <= longest_row(recipe) for r in rows)
    if multiple is None:
        assert max(max(r.documents) for r in rows) == rolled.input_ids.shape[1]


# dpo, kto: the shortest prompt and a token; reward: its longer answer too; gkd: the shortest answer
# and a token
@pytest.mark.parametrize(("trainer", "least"), [("dpo", 5), ("kto", 5), ("reward", 10), ("gkd", 4)])
def test_max_length_that_leaves_nothing_is_refused(trainer, least, monkeypatch):
    shapes = (Row(9, ((6, 9),)), Row(10, ((4, 10),)))
    monkeypatch.setattr(lengths, "rows", lambda kind: shapes)
    fault = rf"max_length={least - 1} leaves trainer='{trainer}' no row of dataset='chat'; take at "
    with pytest.raises(ValueError, match=f"{fault}least {least}$"):
        made(trainer=trainer, max_length=least - 1)
    assert made(trainer=trainer, max_length=least)


def test_nothing_is_cut_without_a_max_length():
    for trainer in OFFLINE:
        steps = made(1, trainer=trainer, max_length=None, per_device_train_batch_size=len(SHAPES))
        assert max(len(unit[0][0]) for unit in units(trainer, steps[0][0])) >= 14


def test_completions_that_are_no_whole_groups_are_refused():
    with pytest.raises(
        ValueError,
        match="gradient_accumulation_steps=3 with trainer='grpo': 12 completions, not a multiple "
        "of num_generations=8; give 16 completions",
    ):
        made(trainer="grpo", num_generations=8, gradient_accumulation_steps=3)


TRAIN: dict[str, Any] = {
    "sft": partial(sft.train, head_loss=cross_entropy),
    "dpo": partial(dpo.train, logprobs=chunked),
    "reward": reward.train,
    "kto": partial(kto.train, logprobs=chunked),
    "gkd": gkd.train,
    "grpo": partial(grpo.train, logprobs=chunked, num_generations=2),
    "rloo": partial(rloo.train, logprobs=chunked, num_generations=2),
    "online_dpo": partial(online_dpo.train, logprobs=chunked),
}


@pytest.mark.parametrize("name", TRAIN)
@pytest.mark.parametrize("dataset", ["full", "prompt_completion"])
def test_the_trainer_takes_them(name, dataset):
    """One step of each trainer on memlab/tiny: a loss."""
    sizes = {"max_length": 40, "max_completion_length": 8, "num_generations": 2}
    steps = made(1, trainer=name, dataset=dataset, per_device_train_batch_size=2, **sizes)
    build, parts = (build_score_meta, score_parts) if name == "reward" else (build_meta, head_parts)
    model: Any = materialize(build("memlab/tiny"), "cpu", init=True, seed=0)
    options: dict[str, Any] = {"head": parts(model)}
    if name in ("dpo", "kto", "online_dpo", "rloo"):
        options["reference"] = frozen(tiny(seed=4))
    if name == "gkd":
        options["teacher"] = frozen(tiny(seed=4))
    if name in ONLINE:
        options["rollout"] = partial(
            rollout, model, head=head_parts(model), max_completion_length=8, max_length=40
        )
        options["reward"] = lambda ids, mask: (ids * mask).sum(1) / 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (loss,) = TRAIN[name](model, optimizer, steps, **options)
    assert torch.isfinite(loss)
