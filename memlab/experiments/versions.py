"""The versions that a measurement depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import memlab


def versions() -> dict[str, str]:
    """Python's, memlab's and those of the libraries whose code a training step runs."""
    found = {"python": platform.python_version(), "memlab": memlab.__version__}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package).split("+")[0]
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
