"""What pip installs: the lessons in the wheel, the ranges, the versions that are recorded."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import conftest
import pytest
from packaging.requirements import Requirement

import memlab
from memlab import series

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(re.findall(r"^(\S+?)==(\S+)", (ROOT / "tests/constraints.txt").read_text(), re.M))


def requirements() -> dict[str, Requirement]:
    project = PYPROJECT["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return {found.name: found for found in map(Requirement, texts)}


def test_versions_agree() -> None:
    assert PYPROJECT["project"]["version"] == memlab.__version__


@pytest.mark.parametrize("name", sorted(PINS))
def test_recorded_versions_are_in_range(name: str) -> None:
    assert requirements()[name].specifier.contains(PINS[name])


def test_what_moves_integers_is_capped_and_recorded() -> None:
    for name in ("torch", "transformers"):
        assert "<" in {specifier.operator for specifier in requirements()[name].specifier}
        assert name in PINS


def test_liger_is_for_linux_only() -> None:
    marker = requirements()["liger-kernel"].marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"})
    assert not marker.evaluate({"sys_platform": "win32"})


def test_binder_pins_what_is_recorded() -> None:
    script = (ROOT / "binder" / "postBuild").read_text()
    pins = dict(re.findall(r'"(\w+)==([\d.]+)"', script))
    assert pins == {name: PINS[name] for name in ("jupyterlab", "ipywidgets")}
    assert "set -e" in script
    torch = requirements()["torch"].specifier
    assert (
        f"pytorch-cpu{','.join(sorted(map(str, torch), reverse=True))}"
        in (ROOT / "binder" / "environment.yml").read_text()
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built as `pip wheel` builds it."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return folder / built.stdout.split()[-1]


def test_the_wheel_carries_the_lessons(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    lessons = {lesson.path.name for lesson in series.find_lessons()}
    assert {path.name for path in (tmp_path / "memlab" / "_lessons").glob("*.ipynb")} == lessons
    assert (tmp_path / "memlab" / "data" / "lengths.json").is_file()
    code = "from memlab import series; print(series.series_folder())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == tmp_path / "memlab" / "_lessons"


def test_the_wheel_has_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (entry,) = [name for name in file.namelist() if name.endswith("entry_points.txt")]
        assert "memlab = memlab.cli:main" in file.read(entry).decode()


@pytest.mark.parametrize(
    ("torch", "transformers", "recorded"),
    [
        (PINS["torch"], PINS["transformers"], True),
        (f"{PINS['torch']}+cpu", "5.17.0", True),
        (PINS["torch"], "5.18.0", False),
        ("2.12.0", PINS["transformers"], False),
    ],
)
def test_integers_are_compared_under_recorded_versions_only(
    torch: str, transformers: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"torch": torch, "transformers": transformers}
    monkeypatch.setattr(conftest, "version", here.__getitem__)
    assert (conftest.unrecorded_versions() == "") == recorded
