"""Imports inside memlab go only downward (the layers are listed in the README)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "memlab"

GROUND = ("techniques", "losses", "instruments", "models", "data")
TRAINERS = ("losses", "models", "data")
EXPERIMENTS = (*GROUND, "trainers")
ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GROUND, ()),
    "trainers": TRAINERS,
    "experiments": EXPERIMENTS,
    "widgets": (*EXPERIMENTS, "experiments"),
    "lessons": (*EXPERIMENTS, "experiments"),
    "cli": (*EXPERIMENTS, "experiments"),
}
CLI = ("series",)  # modules that belong to the command line's layer
EVERYWHERE = ("errors", "")  # memlab.errors, and memlab itself for its version


def layer_of(dotted: str) -> str:
    """The layer of a module named by its path below memlab: "losses.sft" -> "losses"."""
    top = dotted.split(".")[0]
    return "cli" if top in CLI else top


def memlab_imports(source: str, package: str) -> list[str]:
    """Paths below memlab of all that a module in `package` ("memlab.losses") imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found += [f"{module}.{alias.name}" for alias in node.names]
    return [name[len("memlab.") :] for name in found if name.startswith("memlab.")]


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each import of `module` ("memlab.losses.sft") that goes sideways or upward."""
    package = module if is_package else module.rpartition(".")[0]
    layer = layer_of(module.removeprefix("memlab").lstrip("."))
    if layer in EVERYWHERE or layer == "__main__":
        return []
    assert layer in ALLOWED, f"{module} is in no layer: add it to ALLOWED or CLI in {__file__}"
    return [
        f"{module} imports memlab.{name}"
        for name in memlab_imports(source, package)
        if layer_of(name) in ALLOWED
        and layer_of(name) != layer
        and layer_of(name) not in ALLOWED[layer]
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_only_downward(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert violations(source, module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_widgets_import_widget_libraries(path: Path) -> None:
    tops = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    if layer_of(module_name(path).removeprefix("memlab").lstrip(".")) != "widgets":
        assert not tops & {"ipywidgets", "matplotlib"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memlab.losses.bad", "from memlab.techniques.chunked_loss import chunk"),  # sideways
        ("memlab.losses.bad", "from ..models import build"),  # the same, relative
        ("memlab.losses.bad", "from .. import models"),
        ("memlab.losses.bad", "import memlab.models.build as b"),
        ("memlab.losses.bad", "def f():\n    from memlab import trainers"),  # hidden in a function
        ("memlab.trainers.bad", "from memlab.techniques import packing"),  # comes as an argument
        ("memlab.trainers.bad", "from memlab.experiments import Recipe"),  # upward
        ("memlab.experiments.bad", "from memlab.widgets import bars"),
        ("memlab.widgets.bad", "from memlab.series import copy_series"),
        ("memlab.instruments.bad", "import memlab.cli"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memlab.losses.good", "import torch\nfrom memlab.errors import MemlabError"),
        ("memlab.losses.good", "from memlab import __version__\nfrom . import sft"),
        ("memlab.trainers.good", "from memlab.losses.sft import nll\nfrom ..data import text"),
        ("memlab.cli", "from memlab.series import copy_series\nfrom memlab import experiments"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []
