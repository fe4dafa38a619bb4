"""The README: CI runs its commands, the parser knows them, its links lead somewhere."""

import contextlib
import io
import re
import shlex
import tomllib
from importlib.metadata import version
from pathlib import Path

import make_readme
import pytest

from memlab.cli import _parser
from memlab.experiments.recipe import CHOICES
from memlab.experiments.rules import TECHNIQUES, TRAINERS, WITH_PROMPTS
from memlab.lessons.matrix import show_matrix
from memlab.series import find_lessons

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def between(marker: str) -> str:
    """What stands between two markers, without fences."""
    found = re.search(rf"<!-- {marker}:start -->\n(.*?)<!-- {marker}:end -->", README, re.DOTALL)
    assert found, f"no {marker} markers in README.md"
    return "".join(line for line in found[1].splitlines(True) if not line.startswith("```"))


def test_the_two_commands() -> None:
    assert between("run-command") == "pip install -e . && memlab run\n"
    assert between("test-command") == 'pip install -e ".[test]" && pytest\n'


def test_ci_runs_the_readmes_test_command() -> None:
    assert "test-command:start" in CI
    assert 'eval "$command"' in CI
    assert "pip install -e" not in CI  # only by way of the README


def test_powershell_has_the_same_two_commands() -> None:
    for marker in ("run-command", "test-command"):
        install, command = between(marker).strip().split(" && ")
        assert f"{install} ; if ($?) {{ {command} }}" in README


def test_the_development_commands_are_those_of_ci() -> None:
    for command in ("ruff format --check .", "ruff check .", "pyright", "pytest"):
        assert re.search(rf"^{re.escape(command)}", CI, re.MULTILINE) or command in between(
            "test-command"
        )
        assert f"\n{command}\n" in README


@pytest.mark.parametrize("command", re.findall(r"`(memlab [a-z][^`]*)`", README))
def test_the_parser_knows_each_command(command: str) -> None:
    _parser().parse_args(shlex.split(command)[1:])


def links() -> list[str]:
    return re.findall(r"\]\(([^)#][^)]*)\)", README)


@pytest.mark.parametrize("link", links())
def test_links_lead_to_files(link: str) -> None:
    assert "://" not in link
    assert (ROOT / link).exists()


def test_every_lesson_is_linked() -> None:
    linked = {link for link in links() if re.match(r"notebooks/\d\d_", link)}
    assert linked == {f"notebooks/{lesson.path.name}" for lesson in find_lessons()}


def test_every_data_set_is_named() -> None:
    (line,) = [text for text in README.split("\n\n") if text.startswith("`dataset`")]
    assert all(f"`{name}`" in line for name in CHOICES["dataset"])
    for_all, _, of_sft = line.partition("`trainer`")[0].partition("SFT")
    assert all(f"`{name}`" in for_all for name in WITH_PROMPTS)
    assert all(f"`{name}`" in of_sft for name in {*CHOICES["dataset"]} - {*WITH_PROMPTS})


def test_every_trainer_is_named() -> None:
    (line,) = [text for text in README.split("\n\n") if text.startswith("`dataset`")]
    assert all(f"`{name}`" in line for name in CHOICES["trainer"])


def test_the_matrix_is_the_one_that_its_tests_wrote() -> None:
    made = make_readme.with_section(README, "matrix", show_matrix().table())
    assert made == README, "run: python tests/make_readme.py"


def test_a_technique_that_has_another_switch_somewhere_is_named() -> None:
    (line,) = [text for text in README.split("\n\n") if text.startswith("`dataset`")]
    for technique in TECHNIQUES:
        for trainer, setting in technique.settings.items():
            said = rf"{technique.title}\s[^;:.]*{TRAINERS[trainer]}[^;:.]*`{setting[:-4]}`"
            assert re.search(said, line)


def test_trl_is_asked_for_as_the_package_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]["test"]
    (needed,) = [extra for extra in extras if extra.startswith("trl")]
    (row,) = [line for line in README.splitlines() if ".to_trl()" in line]
    assert f'`pip install "{needed}"`' in row


def test_what_a_newcomer_needs_stands_beside_the_commands() -> None:
    beside = README.partition("<!-- test-command:end -->")[2].partition("![")[0]
    assert "git clone" in beside
    assert "CPU wheel" in beside
    for what in ("installing takes", "`memlab run`", "`pytest`"):
        assert re.search(rf"{what} (about )?\d", beside)


def test_pictures_have_alt_text() -> None:
    assert all(len(alt) > 20 for alt in re.findall(r"!\[(.*?)\]\(", README, re.DOTALL))


def test_python_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = re.findall(r"Python (\d\.\d+) or newer", README)
    assert project["requires-python"] == f">={needed}"


def test_the_layers_are_those_of_the_test() -> None:
    from test_layers import ALLOWED

    table = README.partition("| layer | may import |")[2]
    for layer in ALLOWED:
        assert f"`{layer}`" in table


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_code_runs(code: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert "peak allocated" in printed.getvalue()


def test_no_file_names_one_machine_or_an_index() -> None:
    folders = "|".join(("wor" + "k", "roo" + "t", "tm" + "p"))  # so that this file names none
    hosts = "|".join(rf"{name}\.org" for name in ("py" + "pi", "python" + "hosted", "np" + "mjs"))
    forbidden = re.compile(rf"(?<![\w.])/(?:{folders})/\w[^\s\"']*|{hosts}")
    kinds = {
        ".py",
        ".ipynb",
        ".md",
        ".toml",
        ".yml",
        ".yaml",
        ".txt",
        ".cfg",
        ".json",
        ".jsonl",
        "",
    }
    paths = [path for path in ROOT.glob("*.*") if path.is_file()]
    for folder in ("memlab", "tests", "notebooks", "binder", ".ci"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = {
        path.relative_to(ROOT).as_posix(): bad
        for path in paths
        if path.suffix in kinds and (bad := forbidden.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.integers
def test_the_table_is_what_the_runs_give() -> None:
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines()[1:])
    if version("transformers") != pinned["transformers"]:
        pytest.skip("reserved bytes drift with transformers' own code")
    assert make_readme.with_table(README) == README, "run: python tests/make_readme.py"
