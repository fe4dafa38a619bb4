"""Lesson 03: its exercises, what contamination does, what it says of TRL and of its numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lesson_cases import fresh_attempts, said  # noqa: F401

from memlab import Recipe, check
from memlab.data.lengths import lengths
from memlab.experiments.benchmarks import benchmarks
from memlab.lessons import contamination, in_trl
from memlab.lessons.batch import last_batch
from memlab.techniques import pad_to_multiple, padding_free, varlen_attention
from memlab.widgets import Grid, grids

trl = pytest.importorskip("trl")

# transformers 5.24 announces a new name; TRL sets the old one itself
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


# -------------------------------------------------------------------------------- exercises

BOUNDS, LABELS = [0, 3, 4, 8], [-100, 6, 7, -100, -100, 10, 11, 12]


def test_bounds_and_labels() -> None:
    assert check("03a", (BOUNDS, LABELS))
    assert check("03a", [torch.tensor(BOUNDS), torch.tensor(LABELS)])


@pytest.mark.parametrize(
    ("bounds", "labels", "expected"),
    [
        ([3, 1, 4], LABELS, "Those are the lengths"),
        ([3, 4, 8], LABELS, "starts somewhere, too"),
        ([0, 3, 4], LABELS, "ends somewhere, too"),
        ([2, 3, 7], LABELS, "Ends are excluded"),
        ([0, 8], LABELS, "cu_seqlens is not that"),
        (BOUNDS, [5, 6, 7, 8, 9, 10, 11, 12], "learnt from the end of another"),
        (BOUNDS, [5, 6, -100, -100, 9, 10, 11, -100], "first token of a document"),
        (BOUNDS, [6, 7, -100, -100, 10, 11, 12, -100], "the loss shifts them"),
        (BOUNDS, [0] * 8, "The labels are not that"),
    ],
)
def test_usual_mistakes_about_borders(bounds: list, labels: list, expected: str) -> None:
    assert expected in said("03a", (bounds, labels))


def test_a_pair_of_docstrings_that_saves_nothing_is_among_the_first_thirty() -> None:
    cut = [min(n, 1024) for n in lengths("docstrings")]
    pairs = [cut[i : i + 2] for i in range(0, 60, 2)]
    assert any(pad_to_multiple.slots(pair) == sum(pair) for pair in pairs)
    eights = [cut[i : i + 8] for i in range(0, len(cut), 8)]
    assert min(1 - sum(rows) / pad_to_multiple.slots(rows) for rows in eights) > 0.3


def test_only_equal_rows_save_nothing() -> None:
    assert check("03b", [400] * 5)
    assert "9,980 slots; 7,980 would be saved" in said("03b", [1996, 1, 1, 1, 1])
    assert "4 rows with 1,600 tokens" in said("03b", [400] * 4)


Batch = dict[str, Any]


def changed(**columns: Callable[[Batch], Any]) -> Callable[[list[dict]], Batch]:
    """The reference collation with some columns made otherwise."""

    def collate(rows: list[dict]) -> Batch:
        batch = padding_free.collate(rows)
        return {**batch, **{name: make(batch) for name, make in columns.items()}}

    return collate


def with_empty_documents(batch: Batch) -> torch.Tensor:
    return torch.tensor([0, 7, 7, 30, 31, 40], dtype=torch.int32)


def test_the_reference_is_a_right_collation() -> None:
    assert check("03c", padding_free.collate)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (changed(labels=lambda b: b["input_ids"]), "labels: the first token of each"),
        (changed(position_ids=lambda b: torch.arange(40)[None]), "position_ids: they start again"),
        (changed(cu_seqlens=with_empty_documents), "one without tokens leaves none"),
        (
            changed(
                cu_seqlens=lambda b: torch.tensor([0, 40], dtype=torch.int32),
                max_seqlen=lambda b: 40,
            ),
            "cu_seqlens: 0, then where each document ends",
        ),
        (changed(max_seqlen=lambda b: 40), "max_seqlen: the longest"),
        (changed(cu_seqlens=lambda b: b["cu_seqlens"].long()), "int32"),
        (changed(max_seqlen=lambda b: torch.tensor(23)), "a Python int"),
        (changed(labels=lambda b: b["labels"][0]), "one row of N tokens is (1, N)"),
        (changed(input_ids=lambda b: b["input_ids"].float()), "input_ids: give an int64 tensor"),
        (changed(attention_mask=lambda b: b["labels"]), "no attention mask"),
        (pad_to_multiple.collate, "Return a dict of"),
        (lambda rows: rows[0]["nothing"], "raised KeyError"),
    ],
)
def test_a_wrong_collation_is_told_what_is_wrong(answer: object, expected: str) -> None:
    assert expected in said("03c", answer)


# --------------------------------------------------------------------- documents that mix


def test_what_contamination_does_to_loss_and_gradient() -> None:
    model = contamination.trained_model(steps=6)
    documents = contamination.unseen_documents(6)
    padded, row = pad_to_multiple.collate(documents), padding_free.collate(documents)
    ids, positions = row["input_ids"], row["position_ids"]
    ones = torch.ones_like(ids)
    mask = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
    exact = contamination.run(model, "sdpa", padded["labels"], mask)

    def off_by(attention: str, inputs: dict) -> tuple[float, float]:
        outcome = contamination.run(model, attention, row["labels"], inputs)
        gradient = (outcome.gradient - exact.gradient).norm() / exact.gradient.norm()
        return abs(outcome.loss / exact.loss - 1), float(gradient)

    apart = off_by(varlen_attention.NAME, padding_free.model_inputs(row))
    assert max(apart) < 1e-5
    # transformers reads the documents from the positions, where there is no mask
    assert max(off_by("sdpa", {"input_ids": ids, "position_ids": positions})) < 1e-5
    for inputs in (
        {"input_ids": ids},
        {"input_ids": ids, "position_ids": positions, "attention_mask": ones},
    ):
        loss, gradient = off_by("sdpa", inputs)
        assert 1e-6 < loss < 0.1 < 50 * gradient  # seen in the gradient more than in the loss
        assert gradient > 10 * loss


def test_the_small_model_learns_the_same_everywhere() -> None:
    threads = torch.get_num_threads()
    labels = pad_to_multiple.collate(contamination.unseen_documents(4))
    inputs = {name: labels[name] for name in ("input_ids", "attention_mask")}
    losses = [
        contamination.run(contamination.trained_model(steps), "sdpa", labels["labels"], inputs).loss
        for steps in (1, 4, 4)
    ]
    assert losses[2] == losses[1] < losses[0]
    assert torch.get_num_threads() == threads


def test_unseen_documents_are_kept_from_training() -> None:
    documents = contamination._documents()
    assert len(contamination.unseen_documents(99)) == 99
    assert len(documents) > 8 * contamination.ROWS + contamination.UNSEEN
    assert {len(row["labels"]) for row in documents} <= set(range(16, 129))


# ------------------------------------------------------------------------- numbers and TRL


def test_rows_of_the_lesson() -> None:
    off = Recipe.off(dataset="docstrings", per_device_train_batch_size=8)
    padded, flat, packed = (
        last_batch(off.replace(**switch))
        for switch in ({}, {"padding_free": True}, {"packing": True})
    )
    assert padded.documents == flat.documents  # the same ones in the same step
    assert (padded.slots, flat.slots) == (8 * max(padded.documents), sum(padded.documents))
    assert len(packed.documents) > 4 * len(flat.documents)


def test_equal_rows_save_nothing_and_cost_a_trace() -> None:
    equal = Grid.load(grids.folder() / "03_equal.json")
    before, after = (sum(equal.at({"padding_free": on}).values()) for on in (False, True))
    assert 0 < after / before - 1 < 1e-3


def test_over_the_defaults_bytes_come_back_with_rows() -> None:
    grid = Grid.load(grids.folder() / "03_batches.json")
    saved = []
    for rows in grid.axes["per_device_train_batch_size"]:
        before, after = (
            sum(grid.at({"per_device_train_batch_size": rows, "padding_free": on}).values())
            for on in (False, True)
        )
        saved.append(1 - after / before)
    assert saved[0] < 1e-4
    assert saved == sorted(saved)
    assert saved[-1] > 0.5


def test_what_the_lesson_shows_can_be_pasted(tmp_path: Path) -> None:
    defaults = Recipe.defaults(dataset="docstrings", per_device_train_batch_size=8)
    code = repr(in_trl(defaults.replace(padding_free=True), over=defaults))
    pasted = eval(code, {"SFTConfig": lambda **given: given})
    assert pasted["model_init_kwargs"]["attn_implementation"] == "flash_attention_2"
    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, **pasted)
    assert config.padding_free
    assert config.max_length is None


def trainer(tmp_path: Path, **switches: Any) -> object:
    """A trainer of a tiny model and one row."""
    from datasets import Dataset

    from memlab.data.tokenizer import load_tokenizer
    from memlab.models.build import build_meta, load_config

    where = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    return trl.SFTTrainer(
        model=build_meta(load_config("memlab/tiny")).to_empty(device="cpu"),
        args=trl.SFTConfig(**where, **switches),
        train_dataset=Dataset.from_dict({"text": ["Fewer slots, the same gradients."]}),
        processing_class=load_tokenizer(),
    )


def test_trl_refuses_a_max_length_that_it_would_not_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_length"):
        trainer(tmp_path, padding_free=True, max_length=1024)


def test_trl_makes_no_mask_either() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    made = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    )
    assert "attention_mask" not in made
    ours = padding_free.collate([{"input_ids": r, "labels": r} for r in ([1, 2, 3], [4, 5])])
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(made[name], ours[name])


def test_large_batches_are_as_near_to_their_useful_share_as_the_lesson_says() -> None:
    runs = [run for run in benchmarks("padding_free") if run["useful_tokens"] > 25_000]
    ratios = {
        run["useful_tokens"] / run["padded_slots"]: run["sides"]["padding-free"]["ratio"]
        for run in runs
    }
    assert ratios[max(ratios)] == min(ratios.values())
    assert max(ratios.values()) < 1.06
    filled, padded = (runs[-1]["sides"][name]["ms"] for name in ("padded, all labelled", "padded"))
    assert filled > 1.01 * padded
