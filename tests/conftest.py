"""Which tests run here: what they need and does not exist is skipped, with the reason printed."""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):  # a GPU machine runs the tests that need none of it
    from hypothesis import settings

    # speed is for benchmarks: a busy machine fails no test; CI tries the same examples each time
    settings.register_profile("memlab", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("memlab")

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores already
    os.environ.setdefault("OMP_NUM_THREADS", "1")

CONSTRAINTS = Path(__file__).parent / "constraints.txt"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Besides the committed constraints: the other end of the supported range, with the same integers.
ALSO_HELD = {"torch": ("2.11.0",), "transformers": ("5.17.0",)}


def unrecorded_versions() -> str:
    """Why recorded integers can't be compared here, or "" when the versions are recorded ones."""
    pins = dict(re.findall(r"^(\S+?)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    reasons = []
    for name, more in ALSO_HELD.items():
        held = (pins[name], *more)
        try:
            here = version(name).split("+")[0]
        except PackageNotFoundError:
            here = "none"
        if here not in held:
            reasons.append(f"integers are recorded for {name} {' and '.join(held)}, here: {here}")
    return "; ".join(reasons)


def chromium() -> str | None:
    """Path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


@functools.cache
def cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_report_header() -> str:
    reason = unrecorded_versions()
    return f"memlab: {reason or 'recorded integers are compared'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unrecorded = unrecorded_versions()
    has_browser = chromium() and importlib.util.find_spec("playwright")
    for item in items:
        if type(item).__name__ == "IPyNbCell":
            # A notebook compares integers too: all its cells run, those marked are compared.
            item.add_marker("integers")
            if unrecorded:
                item.options["check"] = False  # type: ignore[attr-defined]
        elif unrecorded and item.get_closest_marker("integers"):
            item.add_marker(pytest.mark.skip(reason=unrecorded))
        if item.get_closest_marker("browser") and not has_browser:
            item.add_marker(pytest.mark.skip(reason="no Chromium, or no playwright, is installed"))
        if item.get_closest_marker("gpu") and not cuda_is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA card"))


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A simulated card, for the whole of a test."""
    from memlab.instruments.device import simulated_gpu

    with simulated_gpu() as device:
        yield device


@pytest.fixture(scope="session")
def chromium_path() -> str:
    path = chromium()
    assert path, f"no Chromium found for {sys.platform}"
    return path
