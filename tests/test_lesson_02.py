"""Lesson 02: its exercises, its helpers, what it says of TRL, and the numbers in its prose."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lesson_cases import fresh_attempts, said  # noqa: F401

from memlab import Recipe
from memlab.data.lengths import lengths
from memlab.data.max_length import Lengths
from memlab.lessons import check, cutting
from memlab.lessons.batch import last_batch
from memlab.widgets import Grid, grids

TINY = {"model": "memlab/tiny", "max_length": 64, "per_device_train_batch_size": 2}


def test_a_share_of_the_tokens() -> None:
    data = Lengths(lengths("chat_like"))
    right = data.shortest(0.95)
    assert data.kept(right) >= 0.95 > data.kept(right - 1)
    assert check("02a", right)
    assert "a smaller one would do" in said("02a", right + 1)
    assert "keeps 94.998%" in said("02a", right - 1)
    rows_whole = sorted(lengths("chat_like"))[int(0.95 * 4095) + 1]
    assert "rows" in said("02a", rows_whole)
    assert "every token" in said("02a", 8192)
    assert cutting.EXERCISES["02a"].hint in said("02a", 0)


def test_slots_of_a_batch() -> None:
    assert check("02b", 4096)
    assert "before it is cut" in said("02b", 4 * 2600)
    assert "padding takes slots" in said("02b", 700 + 90 + 1024 + 310)
    assert "one row" in said("02b", 1024)


def test_surviving_rows() -> None:
    first, last = cutting._survivors()
    assert first < last == 1024
    assert check("02c", (first, last))
    assert "other way round" in said("02c", [last, first])
    assert "is dropped" in said("02c", (1024, 1024))
    whole = sum(n <= 64 for n in lengths("prompt_completion"))
    assert "a cut row stays" in said("02c", (whole, whole))
    assert "for keep_end is right" in said("02c", (first - 1, last))
    with pytest.raises(TypeError, match="02c: give a pair"):
        check("02c", 977)


def padded_first(rows: list, max_length: int) -> list:
    longest = max(len(row["labels"]) for row in rows)
    kept = []
    for row in rows:
        padding = longest - len(row["labels"])
        ids = row["input_ids"] + [0] * padding
        labels = row["labels"] + [-100] * padding
        kept.append({"input_ids": ids[-max_length:], "labels": labels[-max_length:]})
    return kept


def right_cut(rows: list, max_length: int) -> list:
    short = [{name: column[-max_length:] for name, column in row.items()} for row in rows]
    return [row for row in short if any(label != -100 for label in row["labels"])]


def padded_but_dropped(rows: list, max_length: int) -> list:
    return [row for row in padded_first(rows, max_length) if {*row["labels"]} != {-100}]


def from_the_start(rows: list, max_length: int) -> list:
    short = [{name: column[:max_length] for name, column in row.items()} for row in rows]
    return [row for row in short if any(label != -100 for label in row["labels"])]


def ids_only(rows: list, max_length: int) -> list:
    return [{**row, "input_ids": row["input_ids"][-max_length:]} for row in rows]


def in_place(rows: list, max_length: int) -> list:
    for row in rows:
        del row["input_ids"][:-max_length], row["labels"][:-max_length]
    return [row for row in rows if any(label != -100 for label in row["labels"])]


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (padded_first, "without a label came back"),
        (padded_but_dropped, "there is padding|have a label among"),
        (from_the_start, "keep the last|have a label among"),
        (ids_only, "a row is longer than that"),
        (in_place, "changes the rows"),
        (lambda rows, max_length: None, "Return a list of rows"),
        (lambda rows, max_length: 1 / 0, "raised ZeroDivisionError"),
        (lambda rows, max_length: [], "have a label among"),
    ],
)
def test_a_wrong_cut_is_told_why(answer: Callable, finding: str) -> None:
    text = said("02d", answer)
    assert any(part in text for part in finding.split("|")), text


def test_a_right_cut_is_right() -> None:
    verdict = check("02d", right_cut)
    assert verdict, verdict


def test_the_measured_batch_is_described() -> None:
    padded = last_batch(Recipe.off(dataset="chat_like", **TINY))
    assert padded.rows == len(padded.documents) == 2
    assert padded.slots == 2 * max(padded.documents)
    accumulated = last_batch(Recipe.off(dataset="chat_like", gradient_accumulation_steps=2, **TINY))
    assert accumulated.rows == 4
    packed = Recipe.off(dataset="docstrings", packing=True, **TINY)
    whole, filled = last_batch(packed), last_batch(packed.replace(pad_to_multiple_of=100))
    assert whole.slots == whole.tokens
    assert filled.slots == 200 > filled.tokens == whole.tokens
    assert filled.documents == whole.documents


def test_the_numbers_of_its_prose() -> None:
    data = Lengths(lengths("chat_like"))
    rows = len(data.in_order)
    assert (data.longest, round(data.total / rows)) == (8192, 731)
    assert data.cut(1024) / rows < 1 / 5
    assert 0.3 < 1 - data.kept(1024) < 1 / 3  # "nearly a third"
    usual = Grid.load(grids.folder() / "02_defaults.json")
    peaks = {
        n: sum(usual.at({"per_device_train_batch_size": 4, "max_length": n}).values()) / 1e9
        for n in (1024, 2048, 8192)
    }
    assert 2.9 < peaks[8192] - peaks[1024] < 3.3  # "about three GB more"
    assert peaks[2048] - peaks[1024] < 0.3  # "next to nothing"


# transformers 5.24 announces a new name; TRL sets the old one itself
quiet = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@quiet
def test_what_it_says_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    where = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    plain = trl.SFTConfig(**where)
    assert (plain.max_length, plain.truncation_mode) == (1024, "keep_start")
    assert trl.SFTConfig(**where, max_length=None).max_length is None
    with pytest.warns(FutureWarning, match="keep_end"):
        trl.SFTConfig(**where, truncation_mode="keep_end")
    assert trl.GRPOConfig(**where).max_completion_length
    for switch in ("max_prompt_length", "max_completion_length"):
        with pytest.raises(TypeError, match=switch):
            trl.DPOConfig(**where, **{switch: 5})


@quiet
def test_padding_free_alone_is_not_cut_by_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    recipe = Recipe.defaults(padding_free=True, dataset="docstrings")
    with pytest.warns(UserWarning, match="cut the data set to max_length=1024"):
        assert recipe.to_trl(output_dir=str(tmp_path)).max_length is None
