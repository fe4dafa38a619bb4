"""What benchmarks measured on a card, as the lessons show it.

One JSON line a run in the lessons' `measured/` folder, as the scripts of `tests/benchmarks/` print
them: a name, the card, the date, the versions, and what was measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.experiments.recordings import folder

FILE = "benchmarks.jsonl"
NAMED = ("benchmark", "device", "date", "versions")  # in every line


def benchmarks(name: str, path: Path | None = None) -> list[dict[str, Any]]:
    """The runs of the benchmark `name`, newest last; of the committed file, unless given another.

    Each a dict with "device", "date" (ISO), "versions", and what its script measured. None where
    the file is missing. Raises MemlabError for a corrupt line, naming it.
    """
    path = path or folder() / FILE
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            run = json.loads(line)
            missing = [key for key in NAMED if key not in run]
        except (ValueError, TypeError) as error:
            raise _corrupt(path, number, str(error)) from None
        if missing:
            raise _corrupt(path, number, f"without {', '.join(missing)}")
        if run["benchmark"] == name:
            found.append(run)
    return sorted(found, key=lambda run: run["date"])  # stable: the file's order within a day


def _corrupt(path: Path, number: int, reason: str) -> MemlabError:
    return MemlabError(f"{path.name}, line {number}: corrupt ({reason}); restore the file")
