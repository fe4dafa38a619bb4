"""A server that forks a process for each question: fresh each time, and nothing is mixed up."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
            case ["grandchild"]:
                if os.fork() == 0:
                    time.sleep(60)
            case ["read"]:
                return repr(sys.stdin.read())
            case ["server"]:
                os.kill(os.getppid(), signal.SIGKILL)
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
        ("server", "ended without an answer"),
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
    assert gone(int(started.read_text()))


def gone(process: int) -> bool:
    """Has it ended, within a few seconds?"""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(50):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_nothing_runs_on_when_whoever_asks_is_killed(server: Server, tmp_path: Path) -> None:
    started, asks = tmp_path / "started", tmp_path / "asks.py"
    asks.write_text(
        "import sys\nfrom memlab.experiments.forks import Server\n"
        "Server(sys.argv[2:]).ask(f'sleep {sys.argv[1]}')\n"
    )
    command = [sys.executable, str(asks), str(started), *server.command]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as p:
        while not (started.exists() and started.read_text()):
            time.sleep(0.1)
        p.kill()
    assert gone(int(started.read_text()))


def test_threads_get_their_own_answers(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(server.ask, map(str, range(12)))]
    assert [answer.partition(":")[0] for answer in answers] == [*map(str, range(12))]


def test_a_process_left_behind_and_stdin_hold_no_answer_up(server: Server) -> None:
    begun = time.monotonic()
    assert server.ask("grandchild").startswith("grandchild: 1")
    assert server.ask("read") == "''"
    assert time.monotonic() - begun < 30


def test_a_fork_of_whoever_asks_leaves_the_server_alone(server: Server) -> None:
    server.ask("a")
    child = os.fork()
    if child == 0:
        server.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert server.ask("b").startswith("b: 1")


def test_a_question_is_one_line(server: Server) -> None:
    with pytest.raises(ValueError, match="give one line"):
        server.ask("a\nb")
    assert server.ask("c").startswith("c: 1")


def test_a_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import missing_module")
    server = Server([sys.executable, str(tmp_path / "broken.py")])
    with pytest.raises(MemlabError, match=r"an answer: ModuleNotFoundError: .*missing_mod"):
        server.ask("a")
