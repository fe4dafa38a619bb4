"""Lesson 04: its exercises, who sees whom, what it says of TRL, and the numbers in its prose."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lesson_cases import fresh_attempts, said  # noqa: F401
from made_steps import made_step

from memlab import Recipe
from memlab.data.lengths import lengths
from memlab.lessons import check, packed
from memlab.lessons.batch import last_batch
from memlab.lessons.mixing import who_sees_whom
from memlab.widgets import Grid, grids


def test_bins_of_equal_rows() -> None:
    assert check("04a", 3)
    assert "more than one" in said("04a", 6)
    assert "Three rows of 4" in said("04a", 2)


def test_tokens_lost() -> None:
    sizes = np.array(lengths("docstrings"))
    lost = int(np.maximum(sizes - 256, 0).sum())
    assert check("04b", (lost, 0, 0))
    assert check("04b", [np.int64(lost), 0, 0])
    assert "not their tokens" in said("04b", (int((sizes > 256).sum()), 0, 0))
    assert "only what is beyond" in said("04b", (int(sizes[sizes > 256].sum()), 0, 0))
    assert "before it places it" in said("04b", (0, 0, 0))
    assert "Look again at bfd_split, wrapped" in said("04b", (lost, 1, 1))


def test_bytes_a_useful_token(monkeypatch: pytest.MonkeyPatch) -> None:
    categories = {**made_step().by_category, "parameters": 10**9, "optimizer_state": 2 * 10**9}
    reading = replace(made_step(), metered_peak_bytes=19 * 10**9, by_category=categories)
    monkeypatch.setattr(packed, "measure", lambda recipe, device: reading)
    tokens = last_batch(Recipe.off(dataset="docstrings", packing=True)).tokens
    assert tokens == 4094
    assert check("04c", 16e9 / tokens / 1e6)
    assert "are there anyway" in said("04c", 19e9 / tokens / 1e6)
    assert "MiB" in said("04c", 16e9 / tokens / 2**20)
    assert "GB" in said("04c", 16e9 / tokens / 1e9)


def greedy(*, longest_first: bool, tightest: bool) -> Callable[[list[int], int], list[list[int]]]:
    def fit(lengths: list[int], max_length: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for length in sorted(lengths, reverse=True) if longest_first else lengths:
            fitting = [each for each in bins if sum(each) + length <= max_length]
            if fitting:
                (max(fitting, key=sum) if tightest else fitting[0]).append(length)
            else:
                bins.append([length])
        return bins

    return fit


def as_they_come(lengths: list[int], max_length: int) -> list[list[int]]:
    """What the lesson asks to improve."""
    bins: list[list[int]] = [[]]
    for length in lengths:
        if sum(bins[-1]) + length > max_length:
            bins.append([])
        bins[-1].append(length)
    return bins


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (as_they_come, "are enough"),
        (greedy(longest_first=False, tightest=True), "are enough"),
        (lambda lengths, max_length: [lengths], "more than 9 tokens"),
        (lambda lengths, max_length: [[n] for n in lengths[1:]], "each length once"),
        (lambda lengths, max_length: [[], *([n] for n in lengths)], "a bin is empty"),
        (lambda lengths, max_length: 3, "Return a list of bins"),
        (lambda lengths, max_length: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_packer_is_told_why(answer: Callable, finding: str) -> None:
    assert finding in said("04d", answer)


def test_a_right_packer_is_right() -> None:
    verdict = check("04d", greedy(longest_first=True, tightest=True))
    assert verdict, verdict


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_best_fit_keeps_documents_apart(strategy: str) -> None:
    seen = who_sees_whom([5, 2, 3, 1], 4, strategy)
    assert {document for document, *_ in seen} == set("ABCD")
    assert all(others == [document] for document, *others in seen)


def test_wrapped_lets_a_document_see_what_stands_before_it() -> None:
    seen = who_sees_whom([5, 2, 3, 1], 4, "wrapped")  # AAAA ABBC CCD
    assert seen == [
        ["A", "A"],
        ["A", "A"],
        ["B", "A", "B"],
        ["C", "A", "B", "C"],
        ["C", "C"],
        ["D", "C", "D"],
    ]


def test_torchtunes_figures_come_out() -> None:
    claim = Grid.load(grids.folder() / "04_claim.json")

    def gib(packing: bool, loss_type: str, checkpointing: bool) -> float:
        setting = (packing, loss_type, checkpointing)
        return sum(claim.at(dict(zip(claim.axes, setting, strict=True))).values()) / 2**30

    padded, full = gib(False, "nll", False), gib(True, "nll", False)
    assert padded == pytest.approx(25.5, rel=0.02)
    assert full == pytest.approx(60.0, rel=0.05)  # "within a few percent"
    assert gib(True, "chunked_nll", True) == pytest.approx(24.9, rel=0.03)
    chunked = gib(True, "chunked_nll", False)
    assert 1 - chunked / full == pytest.approx(1 - 42.9 / 51.0, abs=0.01)  # "a sixth"
    both = gib(False, "chunked_nll", True)
    assert abs(gib(True, "chunked_nll", True) - both) < 0.01  # "no difference"


def test_the_numbers_of_its_prose() -> None:
    sizes = lengths("docstrings")
    assert round(sum(sizes) / len(sizes)) == 167
    off = Recipe.off(dataset="docstrings")
    assert last_batch(off.replace(packing=True)).tokens > 6 * last_batch(off).tokens


# transformers 5.24 announces a new name; TRL sets the old one itself
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_what_it_says_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    recipe = Recipe.defaults(dataset="docstrings", packing=True)
    config = recipe.to_trl(output_dir=str(tmp_path))
    assert (config.packing, config.packing_strategy, config.max_length) == (True, "bfd", 1024)
    assert config.model_init_kwargs["attn_implementation"] == "flash_attention_2"
    assert not {"packing", "packing_strategy"} & set(trl.DPOConfig.__dataclass_fields__)
    with pytest.warns(FutureWarning, match="bfd_split"):
        Recipe.defaults(packing=True, packing_strategy="bfd-requeue")
