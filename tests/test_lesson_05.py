"""Lesson 05: its exercises, the graphs it counts, its numbers, and what it says of TRL."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lesson_cases import fresh_attempts, said  # noqa: F401

from memlab import Recipe, check
from memlab.lessons import in_trl
from memlab.lessons.rounding import batches, compiled_graphs, total_slots
from memlab.techniques import pad_to_multiple, padding_free
from memlab.techniques.pad_to_multiple import shapes
from memlab.widgets import Grid, grids
from memlab.widgets.multiples import padded_to

# transformers 5.24 announces a new name; TRL sets the old one itself
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


# -------------------------------------------------------------------------------- exercises


def test_slots_of_a_batch() -> None:
    assert check("05a", (416, 512, 8192))
    assert check("05a", torch.tensor([416, 512, 8192]))
    assert "how many rows" in said("05a", [104, 128, 2048])
    assert "one width" in said("05a", [72 + 104 + 16 + 72, 128 + 128 + 64 + 128, 4 * 2048])
    assert "not of the batch's tokens" in said("05a", [4 * (97 + 5), 4 * (97 + 13), 4 * 1902])
    with pytest.raises(TypeError, match="three whole numbers"):
        check("05a", 416)


def test_the_largest_multiple() -> None:
    assert check("05b", 16)
    assert "8 adds 0.78% to the slots, and a larger one fits too." in said("05b", 8)
    assert "32 adds 3.64% to the slots. Set" in said("05b", 32)
    with pytest.raises(TypeError, match="one of 8, 16"):
        check("05b", 12)


def test_shapes_left() -> None:
    assert check("05c", 57)
    assert "without a multiple" in said("05c", 188)
    assert "not every one occurs" in said("05c", 64)
    assert "Those are the batches" in said("05c", 256)


def padded(rows: list[list[int]], multiple: int, label: int, mask: int, more: bool) -> tuple:
    """The right padding, or with one of the usual bugs."""
    longest = max(len(row) for row in rows)
    width = longest + (multiple - longest % multiple if more else -longest % multiple)
    made = tuple(torch.full((len(rows), width), fill) for fill in (0, label, mask))
    for i, row in enumerate(rows):
        for tensor in made[:2]:
            tensor[i, : len(row)] = torch.tensor(row)
        made[2][i, : len(row)] = 1
    return made


def test_a_right_padding_is_right() -> None:
    assert check("05d", lambda rows, m: padded(rows, m, -100, 0, more=False))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda r, m: padded(r, m, -100, 0, more=True), "A length that is a multiple already"),
        (lambda r, m: padded(r, 1, -100, 0, more=False), r"(2, 3) where (2, 4) would do."),
        (lambda r, m: padded(r, m, 0, 0, more=False), "padding has no label"),
        (lambda r, m: padded(r, m, -100, 1, more=False), "the mask is 1 for a token"),
        (lambda r, m: padded([x[::-1] for x in r], m, -100, 0, more=False), "not the rows' ids"),
        (lambda r, m: padded(r, m, -100, 0, more=False)[:2], "Return three tensors"),
        (lambda r, m: (1, 2, 3), "input_ids: return a tensor (B, T)"),
        (lambda r, m: r[9], "raised IndexError"),
    ],
)
def test_a_wrong_padding_is_told_what_is_wrong(answer: object, expected: str) -> None:
    assert expected in said("05d", answer)


# ------------------------------------------------------------------------ graphs and numbers


@pytest.mark.parametrize("multiple", [None, 64])
def test_a_graph_for_each_shape(multiple: int | None) -> None:
    some = batches("docstrings", 4, 1024)[:12]
    assert compiled_graphs(some, multiple) == len(shapes(some, multiple=multiple))


def test_the_lesson_counts_as_its_figure_does() -> None:
    cut = [n for batch in batches("docstrings", 4, 1024) for n in batch]
    of = batches("docstrings", 4, 1024)
    for found in padded_to(np.array(cut), 4, (1, 8, 64)):
        assert found.slots == total_slots(of, found.multiple)
        assert found.shapes == len(shapes(of, multiple=found.multiple))


def test_the_staircase_in_bytes() -> None:
    """Flat up to the row's own length, then in proportion to the slots; not over the defaults."""
    off, defaults = (
        {
            m: sum(grid.at({"pad_to_multiple_of": m}).values())
            for m in grid.axes["pad_to_multiple_of"]
        }
        for grid in (
            Grid.load(grids.folder() / f"{n}.json") for n in ("05_multiples", "05_defaults")
        )
    )
    assert off[8] == off[64] == off[512]
    steps = [off[b] - off[a] for a, b in ((512, 1024), (1024, 1536), (1536, 2048))]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)
    assert off[2048] > 2 * off[512]
    assert defaults[2048] == pytest.approx(defaults[8], rel=1e-4)


# ---------------------------------------------------------------------------------------- TRL


def test_what_the_lesson_shows_can_be_pasted(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    defaults = Recipe.defaults()
    code = repr(in_trl(defaults.replace(pad_to_multiple_of=8), over=defaults))
    pasted = eval(code, {"SFTConfig": lambda **given: given})
    assert pasted == {"pad_to_multiple_of": 8}
    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, **pasted)
    assert config.pad_to_multiple_of == 8


@pytest.mark.parametrize("name", ["SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO"])
def test_the_trainers_that_have_the_switch(name: str) -> None:
    trl = pytest.importorskip("trl")
    assert "pad_to_multiple_of" in getattr(trl, f"{name}Config").__dataclass_fields__


def test_filling_up_a_padding_free_row_is_one_document_of_its_own() -> None:
    rows = [{"input_ids": r, "labels": r} for r in ([1, 2, 3], [4, 5])]
    batch = padding_free.collate(rows, pad_to_multiple_of=8)
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert pad_to_multiple.collate(rows, pad_to_multiple_of=8)["input_ids"].shape == (2, 8)
