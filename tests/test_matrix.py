"""Each cell of the table technique x trainer, by a run of its trainer or by its refusal.

Two steps of a tiny model on the CPU in fp32, with and without the technique: the values that must
stay do, and the bytes that must go have gone. `python tests/make_readme.py` runs these tests and
writes what passed to notebooks/measured/matrix.json, which the README and lesson 13 show.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memlab.data import lengths
from memlab.data.lengths import Row
from memlab.experiments import Recipe, training
from memlab.experiments.rules import ONLINE, TECHNIQUES, TRAINERS, Technique
from memlab.experiments.simulation import simulate
from memlab.experiments.trainer_batches import last_rows
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.meter import Meter
from memlab.lessons.batch import last_batch

MATRIX = Path(__file__).parent.parent / "notebooks" / "measured" / "matrix.json"
BY_TITLE = {technique.title: technique for technique in TECHNIQUES}
SHAPES = tuple(  # few and short rows in place of the committed ones, all in one batch
    Row(length, ((10 if length > 20 else 4, length),)) for length in (12, 30, 6, 21, 45, 9, 15, 24)
)
WORK = [CATEGORIES.index(name) for name in ("activations", "logits", "temporaries")]
CHUNK = 8  # rows at a time, of which these batches have several
STEPS = 2  # in the first a policy is its reference still


@pytest.fixture(scope="module", autouse=True)
def _made_for_a_small_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "rows", lambda _: SHAPES)
        patch.setattr(training, "LEARNING_RATE", 0.05)
        yield


class Run(NamedTuple):
    """What a run left: a step's loss and gradient norm each, and bytes."""

    losses: list[float]
    norms: list[float]
    peak: int  # bytes at the peak of the last step
    work: int  # the most bytes of activations, logits and temporaries in forward or backward

    def values(self) -> list[Any]:
        """Where rewards are compared with their mean, a loss is 0 but for rounding."""
        return [pytest.approx(loss, rel=1e-5, abs=1e-7) for loss in self.losses] + [
            pytest.approx(norm, rel=1e-5) for norm in self.norms
        ]


def recipe_of(trainer: str, **switches: Any) -> Recipe:
    """The trainer with every technique off, 8 rows a step, the same ones whatever is on."""
    made: dict[str, Any] = {
        "model": "memlab/tiny",
        "dataset": "chat",
        "max_length": None,
        "dtype": "float32",
        "optim": "sgd",
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
    }
    if trainer in ONLINE:
        made |= {"max_completion_length": 7}
    if trainer in ("grpo", "rloo"):
        made |= {"num_generations": 2}
    if trainer == "grpo":
        made |= {"beta": 0.1}  # with a reference, as the others
    if trainer == "gkd":
        made |= {"teacher_model": "memlab/tiny-llama"}
    return Recipe.off(**{**made, "trainer": trainer, **switches})


@cache
def ran(recipe: Recipe) -> Run:
    """The recipe's steps, computed here."""
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [p.grad.double() for g in optimizer.param_groups for p in g["params"]]
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))

    prepared = training.prepare(recipe, "cpu")
    meter = Meter("cpu", vocab_size=prepared.vocab_size)
    torch.manual_seed(0)  # completions are sampled
    hook = register_optimizer_step_pre_hook(note)
    try:
        with meter:
            steps = training.train(prepared, torch.device("cpu"), meter, init=True, chunk=CHUNK)
            losses = []
            for _ in range(recipe.max_steps):
                meter.begin_step()
                losses.append(next(steps).item())
    finally:
        hook.remove()
    samples = list(meter.ledger.samples())
    busy = [sample for sample in samples if sample.phase in ("forward", "backward")]
    return Run(
        losses,
        norms,
        max(sum(sample.bytes) for sample in samples),
        max(sum(sample.bytes[at] for at in WORK) for sample in busy),
    )


def truncation(trainer: str) -> None:
    """Other values, of rows that are cut."""
    whole = recipe_of(trainer)
    longest, limit = max(last_batch(whole).documents), 16
    switch = BY_TITLE["truncation"].setting_of(trainer).removesuffix("=...")
    if switch != "max_length":
        with pytest.raises(ValueError, match=f"max_length=16 with .*give {switch} in its place"):
            whole.replace(max_length=16)
    value = 3 if switch == "max_completion_length" else limit
    limit = longest - (7 - value) if switch == "max_completion_length" else limit
    cut = whole.replace(**{switch: value})
    assert BY_TITLE["truncation"].is_on(cut)
    assert max(last_batch(cut).documents) <= limit < longest
    assert max(batch.slots for batch in last_rows(cut)) <= limit
    before, after = ran(whole), ran(cut)
    assert after.work < before.work
    assert all(map(math.isfinite, after.losses + after.norms))
    assert after.norms != before.norms


def pad_to_a_multiple(trainer: str) -> None:
    whole = recipe_of(trainer)
    padded = whole.replace(pad_to_multiple_of=32)
    assert last_batch(padded).slots > last_batch(whole).slots
    before, after = ran(whole), ran(padded)
    assert [*after.losses, *after.norms] == before.values()
    assert after.work > before.work


def packing(trainer: str) -> None:
    """All rows in one bin, and the same rows in 8."""
    whole = recipe_of(trainer, max_length=192)
    packed = whole.replace(packing=True, per_device_train_batch_size=1)
    assert sorted(last_batch(packed).documents) == sorted(last_batch(whole).documents)
    assert last_batch(packed).slots < last_batch(whole).slots
    before, after = ran(whole), ran(packed)
    assert [*after.losses, *after.norms] == before.values()
    assert after.work < before.work


def leaner(trainer: str, **switches: Any) -> None:
    """The same values in fewer bytes."""
    before, after = ran(recipe_of(trainer)), ran(recipe_of(trainer, **switches))
    assert [*after.losses, *after.norms] == before.values()
    assert after.work < before.work


def checkpointing(trainer: str) -> None:
    leaner(trainer, gradient_checkpointing=True)


def padding_free(trainer: str) -> None:
    leaner(trainer, padding_free=True)


def chunked_loss(trainer: str) -> None:
    leaner(trainer, loss_type="chunked_nll")


def fused_head(trainer: str) -> None:
    for head in ("fast", "frugal") if trainer == "sft" else ("frugal",):
        leaner(trainer, loss_type="chunked_nll", fused_head=head)


def liger(trainer: str) -> None:
    """Fewer bytes on the simulated GPU; tests/test_liger*.py hold the values."""
    pytest.importorskip("liger_kernel")
    whole = recipe_of(trainer, dtype="bfloat16", max_steps=1)
    before, after = simulate(whole), simulate(whole.replace(use_liger_kernel=True))
    assert after.metered_peak_bytes < before.metered_peak_bytes


YES = {
    "truncation": truncation,
    "pad to a multiple": pad_to_a_multiple,
    "gradient checkpointing": checkpointing,
    "packing": packing,
    "padding-free": padding_free,
    "chunked loss": chunked_loss,
    "fused head": fused_head,
    "Liger": liger,
}
SWITCHES: dict[str, dict[str, Any]] = {  # what switches a technique on where it can be refused
    "packing": {"packing": True, "max_length": 192},
    "padding-free": {"padding_free": True},
    "chunked loss": {"loss_type": "chunked_nll"},
    "fused head": {"loss_type": "chunked_nll", "fused_head": "frugal"},
    "Liger": {"use_liger_kernel": True},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("title", BY_TITLE)
def test_cell(title: str, trainer: str, record_property: Any) -> None:
    technique = BY_TITLE[title]
    if trainer in technique.never:
        refused(technique, trainer)
        found = "-"
    elif trainer in technique.idle:
        assert ran(recipe_of(trainer, **SWITCHES[title])) == ran(recipe_of(trainer))
        found = "n/a"
    else:
        YES[title](trainer)
        found = "yes"
    record_property("cell", [title, trainer, found])


def refused(technique: Technique, trainer: str) -> None:
    with pytest.raises(ValueError, match=f"trainer='{trainer}'") as raised:
        recipe_of(trainer, **SWITCHES[technique.title])
    said = str(raised.value)
    assert said == (
        f"{technique.setting} with trainer={trainer!r}: {technique.never[trainer]}; give "
        f"{technique.instead}"
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_batch_is_its_micro_batches(trainer: str) -> None:
    whole = ran(recipe_of(trainer))
    parts = ran(recipe_of(trainer, per_device_train_batch_size=2, gradient_accumulation_steps=4))
    assert [*parts.losses, *parts.norms] == whole.values()
    assert parts.work < whole.work


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_steps_are_worth_comparing(trainer: str) -> None:
    """Gradients that a missing row or a wrong denominator would change, and rows that differ."""
    run = ran(recipe_of(trainer))
    assert all(math.isfinite(loss) for loss in run.losses)
    assert all(norm > 1e-4 for norm in run.norms)
    assert run.norms[0] != pytest.approx(run.norms[1], rel=1e-4)
    assert len(set(last_batch(recipe_of(trainer)).documents)) > 1


def test_each_technique_has_its_test() -> None:
    assert list(YES) == list(BY_TITLE)


def test_the_committed_matrix_is_the_table_of_rules() -> None:
    """Written by the tests above, cell by cell, each when it has passed."""
    found = json.loads(MATRIX.read_text(encoding="utf-8"))
    assert found == {t.title: {name: t.cell(name) for name in TRAINERS} for t in TECHNIQUES}
