"""A server that forks a process for each question: fresh each time, and nothing is mixed up."""

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlab.errors import MemlabError
from memlab.experiments import forks
from memlab.experiments.forks import Server

SERVER = """
    import importlib.util, os, signal, sys, time

    spec = importlib.util.spec_from_file_location("forks", sys.argv[1])  # without the package
    forks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forks)

    count = 0

    def answer(question):
        global count
        count += 1
        print("noise on stdout")
        match question.split():
            case ["fail"]:
                raise RuntimeError("out of memory,\\nas it happens")
            case ["exit"]:
                os._exit(3)
            case ["killed"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["end"]:
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            case ["sleep", path]:
                open(path, "w").write(str(os.getpid()))
                time.sleep(60)
            case ["env", name]:
                return os.environ.get(name, "not set")
        return f"{question}: {count}, {os.getpid()}, {os.getppid()}"

    forks.serve(answer)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    path = tmp_path / "served.py"
    path.write_text(textwrap.dedent(SERVER))
    made = Server([sys.executable, str(path), forks.__file__])
    yield made
    made.stop()


def parts(answer: str) -> tuple[str, str, str]:
    count, child, parent = answer.rpartition(": ")[2].split(", ")
    return count, child, parent


def test_each_question_has_a_process_of_its_own_and_all_one_server(server: Server) -> None:
    first, second = parts(server.ask("a b")), parts(server.ask("c"))
    assert first[0] == second[0] == "1"  # nothing is left of the first
    assert first[1] != second[1]
    assert first[2] == second[2]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("fail", "RuntimeError: out of memory,$"),
        ("exit", "status 3"),
        ("killed", f"status {-signal.SIGKILL}"),
        ("end", "ended without an answer"),
    ],
)
def test_what_goes_wrong_is_said_and_the_next_question_is_answered(
    server: Server, question: str, message: str
) -> None:
    with pytest.raises(MemlabError, match=message):
        server.ask(question)
    assert parts(server.ask("next"))[0] == "1"


def test_another_environment_is_another_server(server: Server) -> None:
    env = {**os.environ, "SETTING": "one"}
    assert server.ask("env SETTING", env) == "one"
    before = parts(server.ask("x", env))[2]
    assert server.ask("env SETTING", env | {"SETTING": "two"}) == "two"
    assert parts(server.ask("x", env))[2] != before


def test_an_interruption_ends_what_runs_and_answers_do_not_get_mixed_up(
    server: Server, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    started = tmp_path / "started"
    old = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        with pytest.raises(KeyboardInterrupt):
            server.ask(f"sleep {started}")
    finally:
        signal.signal(signal.SIGALRM, old)
    assert server.ask("after").startswith("after: 1")
    child = int(started.read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the interrupted process still runs")
