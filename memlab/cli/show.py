"""What the commands have in common: sizes in words, consoles, a spinner while work goes on."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from memlab.cli.leaving import stopped_at_once
from memlab.instruments.amounts import GB, Unit

NONE = "—"
TINY = "memlab/tiny"  # how the names of models begin that a CPU computes in a moment
CLEAR = "\r\x1b[2K\x1b[?25h"  # empties the spinner's line, shows the cursor again


def amount(size: int | None, unit: Unit = GB) -> str:
    """Bytes in the unit, two decimals; a dash for None."""
    return NONE if size is None else unit.of(size)


def heading(unit: Unit) -> str:
    """The unit in full: "GB (1e9 bytes)"."""
    return f"{unit.name} ({unit.size:.0e} bytes)".replace("e+0", "e")


def percent(part: int, whole: int) -> str:
    return f"{round(100 * part / whole)} %" if whole else NONE


def saving(before: int | None, after: int | None, unit: Unit = GB) -> str:
    """Amount and share saved: "6.52 (48 %)"; "costs 6.52 (48 %)" where more is taken after."""
    if before is None or after is None:
        return NONE
    size = unit.of(abs(before - after))
    costs = "costs " if after > before and size != unit.of(0) else ""
    return f"{costs}{size} ({percent(abs(before - after), before)})"


def stdout() -> Console:
    """As wide as a table needs where stdout is no terminal: nothing is cut in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def print_table(table: Table) -> None:
    stdout().print(table)


def print_note(text: str) -> None:
    """One remark below a table."""
    stdout().print(text, markup=False, highlight=False)


def warn_of_cpu(device: str, *models: str) -> None:
    """Say on stderr that a CPU will be slow, unless the models are tiny."""
    if device == "cpu" and not (models and all(model.startswith(TINY) for model in models)):
        print(
            "memlab: --device cpu computes every step of these models here, for many minutes; "
            "--device simulated takes seconds",
            file=sys.stderr,
        )


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while it lasts, where that is a terminal; Ctrl-C leaves at once."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with stopped_at_once():
            yield
        return
    with console.status(what), stopped_at_once(CLEAR):
        yield


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Names `path` in the OSError of a full disk, which says no path of its own."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            error.filename = str(path)
        raise
