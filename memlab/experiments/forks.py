"""Questions to a fresh process that need not import anything: a server forks one for each.

Importing torch and transformers takes longer than many a small run. The server does so once, and
touches no card; a fork of it answers one question and ends, so that nothing of an earlier one is
left. Where there is no fork (Windows), a server answers once and ends itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping

from memlab.errors import MemlabError


class Server:
    """A process that runs `command`, whose program calls `serve`; started when first asked."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._running: tuple[subprocess.Popen[str], dict[str, str]] | None = None
        atexit.register(self.stop)

    def ask(self, question: str, env: Mapping[str, str] | None = None) -> str:
        """The answer to one line of text, given in the environment `env` (None: this one's).

        Raises MemlabError with a line that says what went wrong. An interruption, or another
        environment than before, ends the server; the next question starts another.
        """
        process = self._process(dict(os.environ if env is None else env))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:
            self.stop()
            raise
        if not line:
            self.stop()
            raise MemlabError("its process ended without an answer")
        failed, text = json.loads(line)
        if failed:
            raise MemlabError(text)
        return text

    def stop(self) -> None:
        """End the server and the process that is answering."""
        if self._running is None:
            return
        (process, _), self._running = self._running, None
        if process.poll() is None:
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.communicate()

    def _process(self, env: dict[str, str]) -> subprocess.Popen[str]:
        if self._running and (self._running[0].poll() is not None or self._running[1] != env):
            self.stop()
        if self._running is None:
            process = subprocess.Popen(
                self.command,
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches it through `ask` alone
            )
            self._running = process, env
        return self._running[0]


def serve(answer: Callable[[str], str]) -> None:
    """Answer each line of stdin by one on stdout, from a fork. What the answering prints is not
    part of it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for question in sys.stdin:
        if not hasattr(os, "fork"):
            print(_answered(answer, question), file=out, flush=True)
            return
        print(_forked(answer, question), file=out, flush=True)


def _forked(answer: Callable[[str], str], question: str) -> str:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        with os.fdopen(sink, "w") as pipe:
            pipe.write(_answered(answer, question))
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        line = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return line or json.dumps([True, f"its process ended with status {status}"])


def _answered(answer: Callable[[str], str], question: str) -> str:
    try:
        return json.dumps([False, answer(question.rstrip("\n"))])
    except Exception as error:
        return json.dumps([True, traceback.format_exception_only(error)[-1].split("\n")[0]])
