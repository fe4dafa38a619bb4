"""Questions to a fresh process that need not import anything: a server forks one for each.

Importing torch and transformers takes longer than many a small run. The server does so once, and
touches no card; a fork of it answers one question and ends, so that nothing of an earlier one is
left. Where there is no fork (Windows), a server answers once and ends itself.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import IO, Any

from memlab.errors import MemlabError


class Server:
    """A process that runs `command`, whose program calls `serve`; started when first asked."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._process: subprocess.Popen[str] | None = None
        self._env: dict[str, str] = {}
        self._log: IO[str] | None = None
        self._lock, self._owner = Lock(), os.getpid()
        atexit.register(self.stop)

    def ask(self, question: str, env: Mapping[str, str] | None = None) -> str:
        """The answer to one line of text, given in the environment `env` (None: this one's).

        One at a time: further threads wait. An interruption, or another environment than before,
        ends the server; the next question starts another. Raises MemlabError with a line that says
        what went wrong, ValueError for more than one line.
        """
        if "\n" in question:
            raise ValueError(f"question={question!r}: give one line")
        with self._lock:
            process = self._started(dict(os.environ if env is None else env))
            try:
                line = _exchange(process, question)
            except BaseException:
                self.stop()
                raise
            if not line:
                raise MemlabError(f"its process ended without an answer{self._last_words()}")
            failed, text = json.loads(line)
            if failed:
                raise MemlabError(text)
            return text

    def stop(self) -> None:
        """End the server and the process that is answering."""
        if self._process is None or os.getpid() != self._owner:  # a fork of the one that asks
            return
        process, self._process = self._process, None
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
        if self._log is not None:
            self._log.close()

    def _started(self, env: dict[str, str]) -> subprocess.Popen[str]:
        if self._process is not None and (self._process.poll() is not None or self._env != env):
            self.stop()
        if self._process is None:
            self._env = env
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
            self._process = subprocess.Popen(
                self.command,
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C reaches it through `ask` alone
            )
        return self._process

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        self.stop()
        return f": {lines[-1]}" if lines else ""


def _exchange(process: subprocess.Popen[str], question: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:  # it ended, and has said why
        return ""
    return process.stdout.readline()


def serve(answer: Callable[[str], str]) -> None:
    """Answer each line of stdin by one on stdout, from a fork. What the answering prints is not
    part of it. Whoever asks is gone when stdin ends: the answering is ended then, too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for question in sys.stdin:
        if not hasattr(os, "fork"):
            print(_answered(answer, question), file=out, flush=True)
            return
        line = _forked(answer, question, out)
        if line is None:
            return
        print(line, file=out, flush=True)


def _forked(answer: Callable[[str], str], question: str, out: IO[Any]) -> str | None:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        os.close(out.fileno())  # or whoever asks would not see the server end
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with os.fdopen(sink, "w") as pipe:
            pipe.write(_answered(answer, question) + "\n")
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        waiting, _, _ = select.select([pipe, sys.stdin], [], [])
        if pipe not in waiting:  # nothing is asked before an answer: it is the end
            os.kill(child, signal.SIGKILL)
        line = pipe.readline()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if pipe not in waiting:
        return None
    return line.rstrip("\n") or json.dumps([True, f"its process ended with status {status}"])


def _answered(answer: Callable[[str], str], question: str) -> str:
    try:
        return json.dumps([False, answer(question.rstrip("\n"))])
    except Exception as error:
        kind = type(error)
        said = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
        return json.dumps([True, said.splitlines()[0]])
