"""The series and its copy, and `memlab run` on it: with small lessons made here."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from memlab import series
from memlab.cli import main
from memlab.cli.lab import jupyter_command
from memlab.cli.report import CAPTION
from memlab.cli.run import cells
from memlab.experiments.row import ROW_TYPE, Row

ROW = {
    "technique": "LoRA",
    "off_bytes": 19_790_000_000,
    "defaults_bytes": 6_040_000_000,
    "after_bytes": 19_890_000_000,
    "after_defaults_bytes": 3_460_000_000,
    "price": "+8 % (H200, recorded)",
    "setting": "docstrings, 4 x 1024",
    "growth": "583 -> 4,090 useful tokens a step",
}
PNG = "iVBORw0KGgo="  # the start of any PNG file


def lesson(path: Path, *sources: str, solution: str = "answer = 42") -> None:
    """A notebook at `path` with a parameters cell, these code cells, and a solution."""
    cells = [
        new_markdown_cell("# A lesson"),
        new_code_cell('device = "auto"', metadata={"tags": ["parameters"]}),
        *[new_code_cell(source, execution_count=1) for source in sources],
        new_code_cell(solution, metadata={"tags": ["solution"]}),
    ]
    cells[2]["outputs"] = [nbformat.v4.new_output("stream", text="an answer\n")]
    notebook = new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "widgets": {},
        },
    )
    nbformat.write(notebook, path)


def showing(mimes: dict[str, Any], alt: str | None = None) -> str:
    """A cell that shows these."""
    metadata = {"image/png": {"alt": alt}} if alt else {}
    return f"from IPython.display import display\ndisplay({mimes!r}, raw=True, metadata={metadata})"


@pytest.fixture
def lessons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two lessons in the place of the real ones."""
    folder = tmp_path / "notebooks"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "idea.svg").write_text("<svg/>")
    (folder / "INSTRUCTORS.md").write_text("the usual wrong guess")
    (folder / ".gitkeep").touch()
    lesson(folder / "01_where_it_goes.ipynb", showing({ROW_TYPE: ROW}))
    lesson(folder / "06_chunks.ipynb", "import sys; sys.prefix")
    monkeypatch.setattr(series, "series_folder", lambda: folder)
    return folder


def test_lessons_are_found_by_number_and_name(lessons: Path) -> None:
    assert [lesson.number for lesson in series.find_lessons()] == ["01", "06"]
    assert [lesson.title for lesson in series.find_lessons(["6"])] == ["chunks"]
    assert series.find_lessons(["06_chunks", "01"]) == series.find_lessons()
    with pytest.raises(ValueError, match=r"no lesson '99': the lessons are 01, 06"):
        series.find_lessons(["99"])


def test_the_copy_gives_no_answers_away(lessons: Path, tmp_path: Path) -> None:
    copied = series.copy_series(tmp_path / "copy")
    assert copied.written == ("01_where_it_goes.ipynb", "06_chunks.ipynb", "images/idea.svg")
    text = (tmp_path / "copy" / "06_chunks.ipynb").read_text()
    assert "sys.prefix" in text
    assert "an answer" not in text
    assert "answer = 42" not in text
    notebook = nbformat.read(tmp_path / "copy" / "06_chunks.ipynb", 4)
    nbformat.validate(notebook)
    assert all(cell.get("execution_count") is None for cell in notebook.cells)
    assert "widgets" not in notebook.metadata


def test_solutions_are_kept_on_request(lessons: Path, tmp_path: Path) -> None:
    copied = series.copy_series(tmp_path / "copy", solutions=True)
    assert "INSTRUCTORS.md" in copied.written
    original = (lessons / "06_chunks.ipynb").read_bytes()
    assert (tmp_path / "copy" / "06_chunks.ipynb").read_bytes() == original


def test_a_changed_file_is_never_overwritten(lessons: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    series.copy_series(copy)
    (copy / "01_where_it_goes.ipynb").write_text("mine")
    lesson(lessons / "01_where_it_goes.ipynb", "2")
    lesson(lessons / "06_chunks.ipynb", "2")
    (copy / "images" / "idea.svg").unlink()
    copied = series.copy_series(copy)
    assert copied.kept == ("01_where_it_goes.ipynb",)
    assert copied.written == ("06_chunks.ipynb", "images/idea.svg")  # old and unchanged; deleted
    assert (copy / "01_where_it_goes.ipynb").read_text() == "mine"
    assert series.copy_series(copy).kept == ("01_where_it_goes.ipynb",)  # still, the next time


def test_a_file_that_was_there_before_is_kept(lessons: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "06_chunks.ipynb").write_text("mine")
    (copy / series.MANIFEST).write_text("not json")
    assert series.copy_series(copy).kept == ("06_chunks.ipynb",)
    assert (copy / "06_chunks.ipynb").read_text() == "mine"


def test_lab_listens_on_this_machine_only(lessons: Path, tmp_path: Path) -> None:
    command = jupyter_command(tmp_path, browser=False)
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--no-browser" in command
    assert "--LabApp.default_url=/lab/tree/01_where_it_goes.ipynb" in command
    assert "--no-browser" not in jupyter_command(tmp_path, browser=True)


def test_lab_copies_and_says_what_it_kept(
    lessons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert main(["lab", str(copy), "--copy-only"]) == 0
    (copy / "06_chunks.ipynb").write_text("mine")
    assert main(["lab", str(copy), "--copy-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == ["06_chunks.ipynb"]


def test_rows_show_both_before_sides() -> None:
    assert cells(Row(**ROW)) == (
        "LoRA\ndocstrings, 4 x 1024",
        "19.79\n",
        "\n6.04",
        "19.89\n3.46",
        "costs 0.10 (1 %)\n2.58 (43 %)",
        "+8 % (H200, recorded)",
    )
    alone = {"technique": "chunked loss", "off_bytes": 10**10, "after_bytes": 6 * 10**9}
    assert cells(Row(**alone)) == (
        "chunked loss",
        "10.00",
        "—",
        "6.00",
        "4.00 (40 %)",
        "—",
    )


def test_run_prints_rows_and_writes_the_report(
    lessons: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figure = {"image/png": PNG, "text/plain": "before 2 GB, after <1> GB\nby category"}
    figures = (showing(figure), showing(figure, alt='Bars, "before" taller'))
    lesson(lessons / "06_chunks.ipynb", *figures, "assert device == 'simulated'", "1 / 0")
    monkeypatch.chdir(tmp_path)
    output = Path("report")
    status = main(["run", "--output", str(output), "--device", "simulated"])
    printed = capsys.readouterr().out
    assert status == 1  # a lesson failed, the others ran
    lines = [line.split() for line in printed.splitlines()]
    assert "LoRA 19.79 19.89 costs 0.10 (1 %) +8 % (H200,".split() in lines
    assert "docstrings, 4 x 1024 6.04 3.46 2.58 (43 %) recorded)".split() in lines
    why = "Where a row costs, a step holds more. LoRA: 583 -> 4,090 useful tokens a step."
    assert printed.splitlines()[-2] == why
    assert "ZeroDivisionError: division by zero" in printed
    assert CAPTION in " ".join(printed.split())
    assert str(output / "report.html") in printed
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "<td>LoRA\ndocstrings, 4 x 1024</td>" in page
    assert "<p>Where a row costs, a step holds more. LoRA: 583 -&gt; 4,090 useful" in page
    assert "a price belongs to the line it stands on" in page
    assert f'src="data:image/png;base64,{PNG}" alt="before 2 GB, after &lt;1&gt; GB"' in page
    assert 'alt="Bars, &quot;before&quot; taller"' in page
    assert '<td colspan="5">failed: ZeroDivisionError: division by zero</td>' in page


def test_a_row_that_is_none_fails_its_lesson_only(
    lessons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson(lessons / "06_chunks.ipynb", showing({ROW_TYPE: {"saved": 1}}))
    assert main(["run", "06", "--output", str(tmp_path / "report")]) == 1
    assert "a row that can't be read" in capsys.readouterr().out


def test_a_folder_in_a_lessons_place_is_refused(
    lessons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report" / "01_where_it_goes.ipynb").mkdir(parents=True)
    assert main(["run", "01", "--output", str(tmp_path / "report")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "01_where_it_goes.ipynb (Is a directory)" in told


def test_a_full_disk_names_the_folder(
    lessons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert main(["lab", str(tmp_path / "copy"), "--copy-only"]) == 2
    assert f"{tmp_path / 'copy'} (No space left on device): free space" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send there")
def test_ctrl_c_ends_a_run_and_its_kernel_quietly(lessons: Path, tmp_path: Path) -> None:
    started = tmp_path / "kernel"
    pid = f"import os, time; open({str(started)!r}, 'w').write(f'{{os.getpid()}} ')"
    lesson(lessons / "06_chunks.ipynb", f"{pid}; time.sleep(60)")
    code = (
        "import sys; from pathlib import Path; from memlab import series; from memlab.cli import "
        f"main; series.series_folder = lambda: Path({str(lessons)!r}); sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "run", "06", "--output", str(tmp_path / "report")]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as run:
        for _ in range(300):
            if started.exists() and started.read_text().endswith(" "):
                break
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=30)
    assert (run.returncode, told) == (130, "memlab: stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_run_speaks_json(lessons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "01", "--json", "--output", str(tmp_path / "report")]) == 0
    told = capsys.readouterr()
    row, report = map(json.loads, told.out.splitlines())
    assert re.fullmatch(r"memlab: 01 where it goes: \d+ s \(1 of 1\)\n", told.err)
    assert row == ROW
    assert Path(report["report"]).is_file()


def test_real_lessons_are_numbered_and_in_order() -> None:
    numbers = [lesson.number for lesson in series.find_lessons()]
    assert numbers == sorted(set(numbers))
