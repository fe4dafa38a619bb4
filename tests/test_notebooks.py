"""The lessons as they are committed, and as they run with other parameters.

pytest also runs each lesson as it is and compares its marked cells (nbval, see pyproject.toml).
"""

import ast
import functools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import papermill
import pytest

from memlab.experiments.row import ROW_TYPE

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
OTHER = {"model": "memlab/tiny", "batch_size": 2, "max_length": 64, "device": "simulated"}
COMPARED = "# NBVAL_CHECK_OUTPUT"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)]+)\)")
STATUS = Path("/proc/self/status")  # Linux has it
SMALL_MACHINE = 1.5e9  # bytes that a lesson may take
MACHINE = re.compile(r"(?<![\w.:/-])/(root|home|tmp|work|Users|usr)/")

every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@functools.cache
def notebook(path: Path) -> dict[str, Any]:
    """An nbformat 4 file; sources joined."""
    read = json.loads(path.read_text(encoding="utf-8"))
    for cell in read["cells"]:
        cell["source"] = "".join(cell["source"])
    return read


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [cell for cell in notebook(path)["cells"] if cell["cell_type"] == kind]


def tagged(path: Path, tag: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook(path)["cells"] if tag in cell["metadata"].get("tags", ())]


def printed(cell: dict[str, Any]) -> str:
    """What a cell shows as text: prints, and the plain form of results."""
    texts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"])
    return "\n".join("".join(text) for text in texts)


def test_there_are_lessons() -> None:
    assert LESSONS


@every_lesson
def test_every_cell_was_run_in_order_without_an_error(path: Path) -> None:
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {o["output_type"] for cell in code for o in cell["outputs"]}
    assert "error" not in kinds
    names = {o.get("name") for cell in code for o in cell["outputs"]}
    assert "stderr" not in names


@every_lesson
def test_nothing_is_committed_that_does_not_open_elsewhere(path: Path) -> None:
    metadata = notebook(path)["metadata"]
    assert set(metadata) == {"kernelspec", "language_info"}
    assert metadata["kernelspec"]["name"] == "python3"
    mimes = {m for cell in cells(path) for o in cell["outputs"] for m in o.get("data", {})}
    assert not [mime for mime in mimes if "widget" in mime]
    assert MACHINE.search(path.read_text(encoding="utf-8")) is None
    ids = [cell["id"] for cell in notebook(path)["cells"]]
    assert len(ids) == len(set(ids))


@every_lesson
def test_cells_are_short_and_define_nothing(path: Path) -> None:
    code = [cell for cell in cells(path) if "solution" not in cell["metadata"].get("tags", ())]
    assert statistics.median(len(cell["source"].splitlines()) for cell in code) <= 13
    for cell in code:
        for node in ast.walk(ast.parse(cell["source"])):
            of_the_learner = 'check("' in cell["source"]  # an exercise may ask for a function
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
            assert of_the_learner or not defines, cell["source"]
        assert "matplotlib" not in cell["source"]


@every_lesson
def test_the_parameters_are_those_of_every_lesson(path: Path) -> None:
    (cell,) = tagged(path, "parameters")
    targets = [node.targets[0] for node in ast.parse(cell["source"]).body]  # type: ignore[attr-defined]
    names = [target.id for target in targets]
    assert sorted(names) == sorted(["model", "batch_size", "max_length", "steps", "device"])


@every_lesson
def test_compared_cells_print_integers_and_nothing_of_a_card(path: Path) -> None:
    compared = [cell for cell in cells(path) if cell["source"].startswith(COMPARED)]
    assert compared
    for cell in compared:
        assert re.search(r"\d", printed(cell)), cell["source"]
        assert not re.search(r"reserved|allocated|step_ms|\.device\b", cell["source"])


@every_lesson
def test_each_exercise_has_a_folded_solution_that_is_right(path: Path) -> None:
    asked = {
        m for cell in cells(path) for m in re.findall(r'check\("(\w+)", \.\.\.', cell["source"])
    }
    solved = set()
    for cell in tagged(path, "solution"):
        if cell["cell_type"] != "code":
            continue
        assert cell["metadata"]["jupyter"]["source_hidden"]
        assert cell["source"].startswith("#"), "a folded cell shows its first line"
        if found := re.search(r'check\("(\w+)"', cell["source"]):
            assert printed(cell).startswith("right: "), printed(cell)
            solved.add(found[1])
    assert len(asked) >= 3
    assert solved == asked


@every_lesson
def test_a_row_of_the_table_is_shown(path: Path) -> None:
    rows = [
        o["data"][ROW_TYPE]
        for c in cells(path)
        for o in c["outputs"]
        if ROW_TYPE in o.get("data", {})
    ]
    assert rows
    assert all(row["technique"] and row["off_bytes"] for row in rows)


@every_lesson
def test_links_lead_somewhere_and_pictures_have_words(path: Path) -> None:
    for cell in cells(path, "markdown"):
        for picture, text, target in LINK.findall(cell["source"]):
            assert text or not picture, f"{target} has no text in its place"
            if not target.startswith(("http", "#")):
                assert (FOLDER / target).is_file(), target


def with_its_peak(path: Path, folder: Path) -> Path:
    """A copy of the lesson whose last cell prints the most memory that its kernel has held."""
    source = f'print(*(line for line in open("{STATUS}") if line.startswith("VmHWM")))'
    cell = {"id": "peak", "cell_type": "code", "source": source, "metadata": {}, "outputs": []}
    read = json.loads(path.read_text(encoding="utf-8"))
    read["cells"].append(cell | {"execution_count": None})
    copy = folder / "with_its_peak.ipynb"
    copy.write_text(json.dumps(read), encoding="utf-8")
    return copy


@every_lesson
def test_it_runs_with_other_parameters(path: Path, tmp_path: Path) -> None:
    done = tmp_path / path.name
    asked = with_its_peak(path, tmp_path) if STATUS.exists() else path
    papermill.execute_notebook(
        asked, done, parameters=OTHER, kernel_name="python3", cwd=FOLDER, progress_bar=False
    )
    compared = [cell for cell in cells(done) if cell["source"].startswith(COMPARED)]
    before = [cell for cell in cells(path) if cell["source"].startswith(COMPARED)]
    assert all(re.search(r"\d", printed(cell)) for cell in compared)
    assert any(printed(a) != printed(b) for a, b in zip(compared, before, strict=True))
    states = json.dumps(notebook(done)["metadata"].get("widgets", {}))
    assert "jupyter-widgets" in states
    assert 'role=\\"alert\\"' not in states  # what an interactive figure says when it fails
    if STATUS.exists():  # a model of any size is simulated in about the same memory
        peak, unit = re.findall(r"^VmHWM:\s+(\d+) (\w+)", printed(cells(done)[-1]))[0]
        assert unit == "kB"
        assert int(peak) * 1024 < SMALL_MACHINE
