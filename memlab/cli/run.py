"""memlab run: execute the lessons, print their rows of the table, write a report."""

import argparse
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import papermill
from jupyter_core.utils import ensure_event_loop
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from memlab.cli.leaving import kill_children
from memlab.cli.report import CAPTION, write_report
from memlab.cli.show import NONE, amount, print_note, saving, stdout, warn_of_cpu, writing_to
from memlab.errors import MemlabError
from memlab.experiments.row import ROW_TYPE, Row
from memlab.series import Lesson, find_lessons

COLUMNS = ("technique", "before: off", "before: defaults", "after", "saved", "step-time price")


@dataclass(frozen=True)
class Failed:
    """A lesson that did not run to its end."""

    lesson: str
    error: str


def cells(row: Row | Failed) -> tuple[str, ...]:
    """The text of each of COLUMNS: a line over everything off, one over TRL's defaults."""
    if isinstance(row, Failed):
        return (row.lesson, f"failed: {row.error}", "", "", "", "")
    off, defaults = row.off_bytes, row.defaults_bytes
    after, after_defaults = row.after_bytes, row.after_defaults_bytes
    over_off = (amount(after), saving(off, after))
    lines = [(amount(off), amount(defaults), *over_off)]
    if after_defaults is not None:
        over_defaults = (amount(after_defaults), saving(defaults, after_defaults))
        lines = [(amount(off), "", *over_off), ("", amount(defaults), *over_defaults)]
    sizes = map("\n".join, zip(*lines, strict=True))
    technique = f"{row.technique}\n{row.setting}" if row.setting else row.technique
    return (technique, *sizes, row.price or NONE)


def why_costs(rows: Sequence[Row | Failed]) -> str | None:
    """One line on the rows that cost memory: what a step holds more of there; None without any."""
    said = [f"{row.technique}: {row.growth}" for row in rows if isinstance(row, Row) and row.growth]
    return f"Where a row costs, a step holds more. {'; '.join(said)}." if said else None


def main(options: argparse.Namespace) -> int:
    lessons = find_lessons(options.lessons)
    if not lessons:
        raise ValueError(
            "this memlab carries no lessons: install a release, or a checkout that does"
        )
    if options.device == "cuda":
        require_card()
    warn_of_cpu(options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row | Failed] = []
    console = Console(stderr=True)
    with _progress(console) as progress:
        task = progress.add_task("", total=sum(map(_length, lessons)))
        # Where stdout is the same terminal, the bar and the rows must come from one console.
        out = console if console.is_terminal and sys.stdout.isatty() else stdout()
        if not options.json:
            out.print(CAPTION, highlight=False)
            out.print(_line(COLUMNS, style="bold"))
        for done, lesson in enumerate(lessons, 1):
            started = time.monotonic()
            progress.update(task, description=f"{lesson.number} {lesson.title}")
            tick = functools.partial(progress.advance, task)
            for row in run_lesson(lesson, options.output, device=options.device, tick=tick):
                rows.append(row)
                if options.json:
                    print(json.dumps(asdict(row)), flush=True)
                elif isinstance(row, Failed):
                    out.print(*cells(row), style="red", markup=False, highlight=False)
                else:
                    out.print(_line(cells(row)))
            if not console.is_terminal:  # where there is no bar to see
                took = f"{time.monotonic() - started:.0f} s"
                told = f"memlab: {lesson.number} {lesson.title}: {took} ({done} of {len(lessons)})"
                print(told, file=sys.stderr, flush=True)
    why = why_costs(rows)
    if why and not options.json:
        print_note(why)
    with writing_to(options.output):
        report = write_report(options.output, lessons, COLUMNS, list(map(cells, rows)), why)
    print(json.dumps({"report": str(report)}) if options.json else f"report: {report}")
    return 1 if any(isinstance(row, Failed) for row in rows) else 0


def require_card() -> None:
    """Raises MemlabError where there is no CUDA card, before a lesson is run in vain."""
    import torch

    if not torch.cuda.is_available():
        raise MemlabError("--device cuda: torch finds no CUDA card; give --device simulated")


def run_lesson(
    lesson: Lesson, output: Path, *, device: str = "auto", tick: Callable[[], object] = lambda: None
) -> Iterator[Row | Failed]:
    """Execute a lesson into `output`, calling `tick` at each cell, and yield its rows.

    A failure is a row too: what ran before it is kept.
    """
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel first
    done = output.resolve() / lesson.path.name
    failure = None
    try:
        with writing_to(done):
            _execute(
                lesson.path,
                done,
                parameters={} if device == "auto" else {"device": device},
                kernel_name="python3",
                cwd=lesson.path.parent,
                progress_bar=False,
                on_cell_start=lambda **_: tick(),
                extra_arguments=["--log-level=CRITICAL"],  # what a cell raises is in the notebook
            )
    except (PapermillException, DeadKernelError, TimeoutError) as error:
        failure = last_line(error)
    try:
        yield from rows_of(done)
    except TypeError as error:
        failure = failure or f"a row that can't be read: {error}"
    if failure:
        yield Failed(f"{lesson.number} {lesson.title}", failure)


def _execute(*args: Any, **kwargs: Any) -> None:
    """papermill.execute_notebook, in a thread: there it leaves Ctrl-C to us.

    Raises KeyboardInterrupt when that comes, with the kernel and its children killed: asked
    politely, a kernel in the middle of a backward pass aborts and says so.
    """
    with ThreadPoolExecutor(1) as worker:
        work = worker.submit(_with_a_loop, papermill.execute_notebook, *args, **kwargs)
        try:
            work.result()
        except KeyboardInterrupt:
            logging.getLogger("papermill").disabled = True  # it tells that the kernel died
            kill_children()
            raise


def _with_a_loop(work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Do work that needs an event loop, in a thread that has none; the loop is closed after it."""
    loop = ensure_event_loop()
    try:
        work(*args, **kwargs)
    finally:
        loop.close()


def _length(lesson: Lesson) -> int:
    return len(json.loads(lesson.path.read_bytes())["cells"])


def rows_of(notebook: Path) -> Iterator[Row]:
    """The rows that an executed notebook shows; raises TypeError for one with unknown fields."""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        for output in cell.get("outputs", ()):
            if row := output.get("data", {}).get(ROW_TYPE):
                yield Row(**row)


def last_line(error: BaseException) -> str:
    """What an error says in its last line, without a terminal's colours."""
    name = getattr(error, "ename", type(error).__name__)
    lines = str(getattr(error, "evalue", error)).strip().splitlines()
    return f"{name}: {lines[-1]}" if lines else name


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )


def _line(texts: tuple[str, ...], *, style: str = "") -> Table:
    """One row, its columns as wide as in every other row; 80 columns hold it."""
    line = Table.grid(padding=(0, 1, 0, 0))
    for name, width in zip(COLUMNS, (20, 7, 8, 6, 19, 15), strict=True):
        line.add_column(width=width, justify="left" if name == "technique" else "right")
    line.add_row(*texts, style=style)
    return line
