"""Real prose without a download: the documentation strings of installed Python packages.

Sources are parsed, never imported. The strings differ between package versions, so no metered
figure may depend on them: lengths and label masks come from `memlab.data.lengths`.
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from itertools import cycle, groupby
from pathlib import Path
from typing import Any, NamedTuple

from memlab.data.disk import cached_json
from memlab.errors import MemlabError

STDLIB = "stdlib"

# package -> files and folders read, in this order; a missing package or path is skipped
SOURCES: dict[str, tuple[str, ...]] = {
    STDLIB: (
        *("argparse.py", "asyncio", "collections", "concurrent", "datetime.py", "decimal.py"),
        *("difflib.py", "email", "fractions.py", "functools.py", "heapq.py", "http", "inspect.py"),
        *("json", "logging", "multiprocessing", "pathlib.py", "random.py", "shutil.py"),
        *("statistics.py", "subprocess.py", "tarfile.py", "tempfile.py", "textwrap.py"),
        *("threading.py", "typing.py", "unittest", "urllib", "zipfile.py"),
    ),
    "numpy": ("lib", "linalg", "ma", "_core", "polynomial", "fft"),
    "torch": ("nn", "optim", "utils/data", "distributions", "autograd", "functional.py", "amp"),
    "transformers": ("generation", "trainer.py", "training_args.py", "pipelines", "integrations"),
    "datasets": (".",),
    "huggingface_hub": (".",),
}
_SHORTEST = 40  # characters; below it a docstring is a label, not prose
_TURNS = 4  # at most so many questions in one conversation
_LAYOUT = 1  # raise it when Doc or what is read changes: cache files of another layout are ignored


class Doc(NamedTuple):
    """One documentation string and what it documents."""

    name: str  # dotted, e.g. "torch.nn.modules.linear.Linear.forward"
    signature: str  # "def forward(self, input: Tensor) -> Tensor"; "" for a module
    text: str


@lru_cache
def docstrings() -> tuple[Doc, ...]:
    """The documentation strings of the `SOURCES` that are installed, each text once.

    Deterministic for given package versions, by which the disk cache is keyed. Takes about three
    seconds without the cache.

    Raises:
        MemlabError: no Python source can be read (a frozen or compiled-only installation).
    """
    cached = cached_json(f"docstrings-{source_key()}.json", _read_all)
    found = tuple(Doc(*fields) for fields in cached)
    if not found:
        raise MemlabError("no Python source files found to take text from; install numpy or torch")
    return found


def source_versions() -> dict[str, str]:
    """The installed versions of what `docstrings` reads, Python's first."""
    versions = {"python": platform.python_version()}
    for package in sorted(SOURCES.keys() - {STDLIB}):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def source_key() -> str:
    """A short key for cache files of what is made from `docstrings`."""
    made_from = json.dumps([_LAYOUT, SOURCES, source_versions()])
    return hashlib.sha256(made_from.encode()).hexdigest()[:16]


def plain_text(docs: Iterable[Doc]) -> list[str]:
    """The texts alone."""
    return [doc.text for doc in docs]


def prompt_completion(docs: Iterable[Doc]) -> list[dict[str, str]]:
    """Signature -> documentation string, as rows {"prompt", "completion"}; modules are left out."""
    return [
        {"prompt": f"{doc.signature}:\n", "completion": doc.text} for doc in docs if doc.signature
    ]


def preference(docs: Iterable[Doc]) -> list[dict[str, str]]:
    """Rows {"prompt", "chosen", "rejected"}: a signature, its documentation string, another's.

    The rejected answer is that of the next row; the last row's that of the first. Raises ValueError
    for fewer than two docs with a signature.
    """
    rows = prompt_completion(docs)
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} docs with a signature: a worse answer is another's; give 2")
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]


def unpaired_preference(docs: Iterable[Doc]) -> list[dict[str, Any]]:
    """Rows {"prompt", "completion", "label"}: is it the signature's own documentation string?

    Rows 0, 2, 4 ... have their own and label True, the others that of the next row. Raises as
    `preference`.
    """
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(preference(docs), cycle(("chosen", "rejected")), strict=False)
    ]


def prompt_only(docs: Iterable[Doc]) -> list[dict[str, str]]:
    """Rows {"prompt"}: the signatures alone; modules are left out."""
    return [{"prompt": row["prompt"]} for row in prompt_completion(docs)]


def conversational(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with each string as one chat message: a prompt is the user's, the rest the
    assistant's. Other values stay.
    """
    return [{name: _message(name, value) for name, value in row.items()} for row in rows]


def _message(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [{"role": "user" if column == "prompt" else "assistant", "content": value}]


def chat(docs: Iterable[Doc]) -> list[dict[str, list[dict[str, str]]]]:
    """Questions about neighbours, as rows {"messages": [...]}: one to four turns a conversation.

    Consecutive docs of one owner (the methods of a class, the functions of a module) share
    conversations, so that rows have several assistant spans.
    """
    rows = []
    documented = (doc for doc in docs if doc.signature)
    for owner, members in groupby(documented, key=lambda doc: doc.name.rpartition(".")[0]):
        group = list(members)
        for start in range(0, len(group), _TURNS):
            rows.append({"messages": _conversation(owner, group[start : start + _TURNS])})
    return rows


def _conversation(owner: str, docs: Sequence[Doc]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": f"You explain the Python code of {owner}."}]
    for doc in docs:
        question = f"What does `{doc.name.rpartition('.')[2]}` do?\n\n{doc.signature}"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": doc.text})
    return messages


def _read_all() -> list[Doc]:
    """Every source's docs in order, each text once."""
    unique: dict[str, Doc] = {}
    for package, paths in SOURCES.items():
        folder = _folder(package)
        if folder is None:
            continue
        for file in _files(folder, paths):
            inside = file.relative_to(folder).with_suffix("").parts
            parts = inside if package == STDLIB else (package, *inside)
            for doc in _parse(file, ".".join(parts).removesuffix(".__init__")):
                unique.setdefault(doc.text, doc)
    return list(unique.values())


def _folder(package: str) -> Path | None:
    """Where a package's source lies, without importing it; None when it is not installed."""
    if package == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


def _files(folder: Path, paths: Sequence[str]) -> Iterator[Path]:
    """The Python files at these paths below a package's folder, tests left out."""
    for path in paths:
        start = folder / path
        found = [start] if start.suffix == ".py" else sorted(start.rglob("*.py"))
        for file in found:
            inside = file.relative_to(folder).parts
            if file.is_file() and not {"test", "tests"}.intersection(inside):
                yield file


def _parse(file: Path, module: str) -> Iterator[Doc]:
    """The docs of one file in source order; nothing when it can't be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield from _walk(tree, module, "")


def _walk(node: ast.AST, name: str, signature: str) -> Iterator[Doc]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
        if len(text) >= _SHORTEST:
            yield Doc(name, signature, text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}", _signature(child))


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"
