"""Executes the lessons in place, and leaves in them what may be committed.

python tests/execute.py [NOTEBOOK ...] [--device auto|simulated|cuda] [--warm]

papermill runs each notebook, which stays as it was where a cell fails. Then all that would not open
elsewhere goes: widgets' states and views (their pictures and tables stay), papermill's records and
anything on stderr. What a slow cell printed in pieces is one output. The first cell says how long
Run All took, and on which device: with an empty cache, as for a new user, unless --warm keeps the
cache for a quick look.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VIEW = "application/vnd.jupyter.widget-view+json"
RUN_ALL = re.compile(r"\*Run All:\* .*?\.(?= \*)")
RECORDS = ("papermill", "execution", "ExecuteTime")


def cleaned(notebook: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    """The executed notebook (nbformat 4, as a dict) as it is committed."""
    kept = ("kernelspec", "language_info")
    notebook["metadata"] = {key: notebook["metadata"][key] for key in kept}
    notebook["cells"] = [
        cell
        for cell in notebook["cells"]
        if "injected-parameters" not in cell["metadata"].get("tags", ())
    ]
    for cell in notebook["cells"]:
        for record in RECORDS:
            cell["metadata"].pop(record, None)
        if not cell["metadata"].get("tags", True):
            del cell["metadata"]["tags"]  # papermill adds an empty list
        if cell["cell_type"] == "code":
            outputs = cell["outputs"]
            cell["outputs"] = [o for o in outputs if o.get("name") != "stderr" and _shown(o)]
    _number(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    taken = f"{max(1, round(seconds))} s on {device}"
    said = f"*Run All:* {taken}, where the outputs come from; your device has its own time."
    notebook["cells"][0]["source"] = RUN_ALL.sub(said, "".join(notebook["cells"][0]["source"]))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
    return notebook


def _number(cells: Iterable[dict[str, Any]]) -> None:
    """Counts executed cells anew: the cell of injected parameters was one of them."""
    executed = (cell for cell in cells if cell["execution_count"] is not None)
    for count, cell in enumerate(executed, start=1):
        for counted in (cell, *cell["outputs"]):
            if "execution_count" in counted:
                counted["execution_count"] = count


def _shown(output: dict[str, Any]) -> bool:
    """Takes the widget's view away; whether something is left to show."""
    output.get("data", {}).pop(VIEW, None)
    return bool(output.get("data", True))


def execute(path: Path, device: str = "auto") -> float:
    """Runs one notebook in place and returns the seconds it took. Raises what papermill raises."""
    import papermill

    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder, path.name)
        start = time.monotonic()
        papermill.execute_notebook(
            path,
            done,
            parameters={} if device == "auto" else {"device": device},
            kernel_name="python3",
            cwd=path.parent,
            progress_bar=False,
            coalesce_streams=True,  # nbclient's: one output a stream, however slowly it comes
        )
        seconds = time.monotonic() - start
        notebook = cleaned(json.loads(done.read_text(encoding="utf-8")), seconds, _name(device))
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    return seconds


def _name(device: str) -> str:
    import torch

    if device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "a simulated GPU"


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--device", default="auto", choices=("auto", "simulated", "cuda"))
    parser.add_argument("--warm", action="store_true", help="simulate only what is not cached")
    options = parser.parse_args()
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel first
    for path in options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as cold:
            if not options.warm:
                os.environ["XDG_CACHE_HOME"] = cold
            print(f"{path.name}: {execute(path.resolve(), options.device):.1f} s", flush=True)


if __name__ == "__main__":
    main()
