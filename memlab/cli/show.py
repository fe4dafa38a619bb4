"""What the commands have in common: sizes in words, consoles, a spinner while work goes on."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

NONE = "—"


def gb(size: int | None) -> str:
    """Bytes in GB (1e9 bytes), two decimals; a dash for None."""
    return NONE if size is None else f"{round(size / 1e9, 2) + 0:.2f}"  # + 0: no "-0.00"


def percent(part: int, whole: int) -> str:
    return f"{round(100 * part / whole)} %" if whole else NONE


def saving(before: int | None, after: int | None) -> str:
    """GB and share saved: "6.52 (48 %)"; negative where it costs."""
    if before is None or after is None:
        return NONE
    return f"{gb(before - after)} ({percent(before - after, before)})"


def stdout() -> Console:
    """As wide as a table needs where stdout is no terminal: nothing is cut in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def print_table(table: Table) -> None:
    stdout().print(table)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while it lasts, where that is a terminal."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield
