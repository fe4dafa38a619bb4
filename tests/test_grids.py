"""The grids behind the lessons' sliders: made by one command, and still what is simulated."""

import json
from pathlib import Path

import pytest

from memlab.experiments import Recipe
from memlab.widgets import Grid, grids

SIZES = {"model": "memlab/tiny", "per_device_train_batch_size": 1, "max_length": 64}
TINY = grids.GridSpec(Recipe.defaults(**SIZES), {"chunk": (16, 64), "max_length": (64, 128)})


@pytest.mark.integers
@pytest.mark.parametrize("name", grids.GRIDS)
def test_a_setting_of_each_grid_is_simulated_again(name: str) -> None:
    if name.startswith("07"):
        pytest.importorskip("liger_kernel", reason="no liger-kernel here")
        pytest.importorskip("triton", reason="no Triton here")
    grid = Grid.load(grids.folder() / f"{name}.json")
    assert grid.differences(grids.GRIDS[name].at, sample=1, seed=6) == []


@pytest.mark.parametrize("name", grids.GRIDS)
def test_each_grid_holds_what_its_spec_says(name: str) -> None:
    grid, spec = Grid.load(grids.folder() / f"{name}.json"), grids.GRIDS[name]
    assert {axis: tuple(values) for axis, values in spec.axes.items()} == dict(grid.axes)
    assert Recipe.of(**json.loads(grid.about["recipe"])) == spec.base


def test_the_command_writes_a_grid_and_finds_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grids, "GRIDS", {"99_tiny": TINY})
    monkeypatch.setattr(grids, "folder", lambda: tmp_path / "grids")
    assert grids.main(["99"]) == 0
    assert capsys.readouterr().out == "wrote 99_tiny.json\n"
    assert grids.main(["99", "--sample", "2"]) == 0
    path = tmp_path / "grids" / "99_tiny.json"
    peaks = json.loads(path.read_text())["values"]["16, 64"]
    changed = path.read_text().replace(str(peaks[0]), str(peaks[0] + 512))
    path.write_text(changed)
    assert grids.main(["99", "--sample", "4"]) == 1
    assert f"recorded {sum(peaks) + 512} B" in capsys.readouterr().out


def test_a_chunk_and_a_switch_are_both_simulated() -> None:
    base = Recipe.off(model="memlab/tiny", loss_type="chunked_nll")
    spec = grids.GridSpec(base, {"chunk": (64, 4096), "max_length": (512, 1024)})
    small, large = (spec.at({"chunk": chunk, "max_length": 1024}) for chunk in (64, 4096))
    assert small.metered_peak_bytes < large.metered_peak_bytes
    assert small != spec.at({"chunk": 64, "max_length": 512})
