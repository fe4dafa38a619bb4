"""What lessons show in their cells besides figures: code, TRL's spelling, readings, questions."""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from made_steps import made_step

from memlab import Comparison, Recipe, check
from memlab.experiments import trl_spelling
from memlab.instruments.meter import Meter, rounded
from memlab.lessons import ask, in_trl, show_code
from memlab.techniques import fused_head
from memlab.widgets import readings, show_comparison


def test_code_is_the_librarys_without_docstrings() -> None:
    shown = repr(show_code(rounded, Meter.begin_step))
    assert shown.startswith("def rounded(nbytes: int) -> int:\n    return -(-nbytes")
    assert "\n\ndef begin_step(self) -> None:\n    self.ledger.begin_step()" in shown
    assert shown.endswith("The rest: memlab/instruments/ledger.py, memlab/instruments/meter.py")
    assert '"""' not in shown


def test_code_may_start_at_a_line() -> None:
    assert repr(show_code(rounded, first="return")).startswith("return -(-nbytes")
    with pytest.raises(ValueError, match="no line of rounded holds 'nothing'"):
        show_code(rounded, first="nothing")


def test_code_links_to_its_file_from_the_notebooks() -> None:
    markdown = show_code(rounded)._repr_markdown_()
    assert markdown.startswith("```python\ndef rounded")
    assert markdown.endswith("(../memlab/instruments/ledger.py)")


def test_a_kernels_code_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fused_head, "_gradient", raising=False)
    monkeypatch.setattr(fused_head, "triton", None)
    shown = repr(show_code(fused_head.to_gradient_torch, (fused_head, "_gradient")))
    assert "\n\n@triton.jit\ndef _gradient(\n    z, y" in shown
    assert shown.endswith("The rest: memlab/techniques/fused_head.py")
    with pytest.raises(ValueError, match="fused_head defines no function _gradients"):
        show_code((fused_head, "_gradients"))


def test_trl_is_spelled_whole_or_by_difference() -> None:
    pytest.importorskip("trl")
    before = Recipe.off()
    after = before.replace(per_device_train_batch_size=2)
    assert "max_length=1024," in repr(in_trl(after))
    lines = repr(in_trl(after, over=before)).splitlines()
    assert lines[1:] == ["    per_device_train_batch_size=2,", ")"]


def test_without_trl_a_cell_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(trl_spelling, "version", missing)
    assert repr(in_trl(Recipe())).startswith("# to_trl needs TRL: pip install")


def test_dots_ask_the_question() -> None:
    assert check("00a", ...) == ask("00a")


def test_readings_say_what_differs() -> None:
    here = made_step()
    card = replace(here, peak_reserved_bytes=2 * (here.peak_reserved_bytes or 0), step_ms=12.34)
    shown = readings({"simulated": here, "card": card, "card again": card})
    said = {name.strip(): compared for name, _, _, compared in shown.rows()}
    assert said["metered peak, bytes"] == said["parameters"] == "= same"
    assert said["peak reserved, bytes"] == "≠ differs by 100.000 %"
    assert said["one step, ms"].startswith("≠ differs: only one")
    shown.left.value = "card again"
    assert "12.3" in shown.page.value
    assert "≠" not in shown.page.value
    assert f"{here.metered_peak_bytes:,}" in repr(shown)
    assert "text/html" in shown._repr_mimebundle_()
    with pytest.raises(ValueError, match="at least one"):
        readings({})


def test_another_reading_stands_beside_its_side() -> None:
    before, after = Recipe.off(), Recipe.defaults()
    card = replace(made_step(), device="a card")
    comparison = Comparison(before, after, made_step(), made_step())
    shown = show_comparison(comparison, beside=lambda recipe: card if recipe == after else None)
    head = re.split(r"  +", shown.table.splitlines()[0])
    assert head[-3:] == ["before", "after", "after: a card"]
