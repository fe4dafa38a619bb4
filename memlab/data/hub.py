"""Data sets by name from the hub, or from local files."""

import re
from pathlib import Path

from datasets import Dataset, config, load_dataset
from datasets.exceptions import DatasetsError

from memlab.data.encoding import kind_of
from memlab.data.online import hub_reachable
from memlab.errors import MemlabError

OFFLINE = ("full", "docstrings", "prompt_completion", "chat")  # memlab's own: no download
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_WORDS = re.compile(r"[A-Za-z0-9]+")


def load_rows(name_or_path: str, split: str = "train") -> Dataset:
    """A data set from a .json, .jsonl or .parquet file, a folder of them, or the hub.

    In a folder, files with the split's name as a word of their path are taken; for "train" all,
    when there are none. A single file is taken whatever the split.

    Raises:
        MemlabError: neither a readable path nor a name that the hub answers to.
        ValueError: its columns are not ones that memlab trains on (see `kind_of`).
    """
    path = Path(name_or_path)
    found = _from_files(path, split) if path.exists() else _from_hub(name_or_path, split)
    kind_of(found)
    return found


def _from_files(path: Path, split: str) -> Dataset:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [file for file in found if file.suffix in _FORMATS and file.is_file()]
    if path.is_dir():
        named = [file for file in found if split in _WORDS.findall(str(file.relative_to(path)))]
        found = named or (found if split == "train" else [])
    kinds = {_FORMATS[file.suffix] for file in found}
    if len(kinds) != 1:
        has = "no such file" if not kinds else "json and parquet mixed"
        raise MemlabError(
            f"dataset {path}, split {split}: {has}; "
            "give .json, .jsonl or .parquet files of one kind"
        )
    try:
        names = [str(file) for file in found]
        return load_dataset(kinds.pop(), data_files={"rows": names}, split="rows")
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MemlabError(f"dataset {path}: not readable ({reason}); check the file") from error


def _from_hub(name: str, split: str) -> Dataset:
    offline = f"offline, take one of {', '.join(OFFLINE)}, or a local file"
    if not (hub_reachable() or config.HF_HUB_OFFLINE):
        raise MemlabError(f"dataset {name}: no such path, and the hub can't be reached; {offline}")
    try:
        return load_dataset(name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MemlabError(f"dataset {name}, split {split}: {reason}; {offline}") from error
