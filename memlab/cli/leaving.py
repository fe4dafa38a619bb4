"""Ends of the process that can't wait: stopped by Ctrl-C, or with nobody left to read the output.

An interrupted autograd keeps C++ frames alive; an exception, or a normal exit, that goes through
them ends in SIGABRT.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Flush what was printed, kill the processes that this one started, and end it here."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    kill_children()
    os._exit(status)


def kill_children() -> None:
    """Kill what this process started, and what that started in its turn."""
    import psutil  # here: what refuses or helps at once has no need of it

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


@contextlib.contextmanager
def stopped_at_once(clear: str = "") -> Iterator[None]:
    """While it lasts, Ctrl-C leaves at once, with `clear` written before its one line.

    Does nothing outside the main thread, where no signal handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        os.write(2, f"{clear}memlab: stopped\n".encode())  # print may be what was interrupted
        leave(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
