"""memlab doctor: what is installed here, and what is in the way."""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from platformdirs import user_cache_dir
from rich.table import Table

from memlab import __version__
from memlab.cli.show import print_table, working
from memlab.errors import MemlabError

OK, NOTE, BROKEN = "ok", "note", "broken"
OPTIONAL = ("trl", "triton", "flash-attn", "vllm", "bitsandbytes")


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str  # OK, NOTE (works, but something is worth knowing), BROKEN
    says: str


def main(options: argparse.Namespace) -> int:
    """Print the findings; raises MemlabError, on one line, when something needed is broken."""
    with working("looking around"):
        findings = list(examine())
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        print_table(_table(findings))
    if broken := [f"{f.subject}: {f.says}" for f in findings if f.state == BROKEN]:
        raise MemlabError("; ".join(broken))
    return 0


def examine() -> Iterator[Finding]:
    yield Finding(
        "memlab", OK, f"{__version__}, Python {platform.python_version()}, {sys.platform}"
    )
    yield from packages()
    yield from devices()
    yield from allocator_settings()
    yield hub()
    yield folder("cache", Path(user_cache_dir("memlab")), "XDG_CACHE_HOME", "LOCALAPPDATA")
    yield jupyter_folder()


def packages() -> Iterator[Finding]:
    """Each dependency's version against the range that memlab asks for, then the optional ones."""
    try:
        requirements = requires("memlab") or []
    except PackageNotFoundError:
        requirements = []
        yield Finding("dependencies", NOTE, "not checked: memlab runs from a folder, uninstalled")
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            yield Finding(requirement.name, BROKEN, f"missing: pip install '{_plain(requirement)}'")
            continue
        fits = requirement.specifier.contains(here, prereleases=True)
        advice = f"{here} is untried: pip install '{_plain(requirement)}'"
        yield Finding(requirement.name, OK if fits else BROKEN, here if fits else advice)
    for name in OPTIONAL:
        try:
            yield Finding(name, OK, version(name))
        except PackageNotFoundError:
            yield Finding(name, NOTE, "not installed, optional")


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def devices() -> Iterator[Finding]:
    """The card, or what stands in for it."""
    if importlib.util.find_spec("torch") is None:
        return  # said among the packages
    import torch

    from memlab.instruments.device import simulation_missing

    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        yield Finding("device", OK, f"{card.name}, {card.total_memory / 1e9:.1f} GB")
    else:
        yield Finding("device", OK, "no CUDA card: lessons run on the simulated GPU")
    missing = simulation_missing()
    yield Finding("simulated GPU", BROKEN if missing else OK, missing or "torch has what it needs")


def allocator_settings() -> Iterator[Finding]:
    """The caching allocator's environment variables; vLLM's sleep mode reads only the old name."""
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    for name in (old, new):
        yield Finding(name, OK, os.environ.get(name) or "not set")
    if os.environ.get(new) and not os.environ.get(old):
        yield Finding(old, NOTE, f"only {new} is set: vLLM's sleep mode reads {old}, set it too")


def hub() -> Finding:
    """Whether models and data sets can be loaded by name; without, they are built from presets."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return Finding("hub", NOTE, "huggingface_hub is not installed: models come from presets")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", NOTE, "HF_HUB_OFFLINE is set: models come from presets")
    from memlab.data.online import hub_reachable

    if hub_reachable():
        return Finding("hub", OK, "reachable")
    return Finding("hub", NOTE, "not reachable: models come from presets, which is enough")


def folder(subject: str, path: Path, *variables: str) -> Finding:
    """Whether a file can be written in a folder, which is made where it is missing.

    Where not, it names the environment variable that put the folder there: the first of `variables`
    that does, else HOME.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        values = ((name, os.environ.get(name)) for name in variables)
        inside = (name for name, value in values if value and path.is_relative_to(value))
        advice = f"free it, or set {next(inside, 'HOME')} to a folder that can be"
        return Finding(subject, BROKEN, f"{path} can't be written ({error.strerror}): {advice}")
    return Finding(subject, OK, f"{path} can be written")


def jupyter_folder() -> Finding:
    """Where Jupyter keeps what it needs to reach a kernel."""
    from jupyter_core.paths import jupyter_runtime_dir

    variables = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "XDG_DATA_HOME", "APPDATA")
    return folder("jupyter", Path(jupyter_runtime_dir()), *variables)


def _table(findings: list[Finding]) -> Table:
    table = Table()
    for name in ("what", "state", "says"):
        table.add_column(name)
    colours = {OK: "green", NOTE: "yellow", BROKEN: "bold red"}
    for finding in findings:
        table.add_row(
            finding.subject, f"[{colours[finding.state]}]{finding.state}[/]", finding.says
        )
    return table
