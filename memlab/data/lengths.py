"""Committed token lengths and label masks: what metered figures are made from.

Strings and tokenizers differ between machines; memory depends only on lengths and on which labels
count. `lengths.json` fixes both, so that a figure is the same integer whatever is installed.
`python -m memlab.data.lengths` measures the installed docstrings anew and rewrites the file: every
figure of the kinds "docstrings", "prompt_completion" and "chat" then changes, so commit it only on
purpose ("chat_like" comes from a formula and stays).

Layout, by kind, one row an item, in shuffled order: an integer is a length of which every label
counts; a list [length, start, end, ...] has the spans of labels that count, ends excluded.
"""

import json
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

from memlab.errors import MemlabError

KINDS = ("docstrings", "prompt_completion", "chat", "chat_like")

_COUNTS = {"docstrings": 1024, "prompt_completion": 1024, "chat": 512, "chat_like": 4096}
_LONGEST = 8192

T = TypeVar("T")


class Row(NamedTuple):
    """The shape of one training row."""

    length: int  # tokens
    spans: tuple[tuple[int, int], ...]  # [start, end) of the labels that count, in order


@lru_cache
def rows(kind: str) -> tuple[Row, ...]:
    """The committed rows of a kind: "docstrings", "prompt_completion", "chat", "chat_like".

    The last is a length distribution like that of chat data sets, for packing: see `chat_like`.

    Raises:
        ValueError: unknown kind.
        MemlabError: the committed file is missing or damaged.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; take one of {', '.join(KINDS)}")
    try:
        stored = json.loads(files("memlab.data").joinpath("lengths.json").read_text("utf-8"))
        return tuple(_row(item) for item in stored[kind])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MemlabError(f"memlab/data/lengths.json is damaged ({error}); reinstall") from error


def lengths(kind: str) -> tuple[int, ...]:
    """The token lengths alone of a kind's rows, for histograms and packing.

    Raises ValueError for an unknown kind, MemlabError for a data file that can't be read.
    """
    return tuple(row.length for row in rows(kind))


def chat_like(count: int, *, seed: int = 0) -> list[int]:
    """`count` lengths in tokens with a heavy tail: a mix of two lognormal distributions.

    85 % have a median of 350 tokens and sigma 0.8 (questions and short answers), 15 % a median of
    1500 and sigma 0.9 (long conversations), within 16 to 8192. Synthetic: chosen to look like
    instruction data, fitted to no one data set. The same on every platform, because only `random()`
    of the generator is used.
    """
    source = random.Random(seed)
    drawn = []
    for _ in range(count):
        median, sigma = (350, 0.8) if source.random() < 0.85 else (1500, 0.9)
        z = NormalDist().inv_cdf(max(source.random(), 1e-12))
        drawn.append(min(max(round(median * math.exp(sigma * z)), 16), _LONGEST))
    return drawn


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """The items in an order that depends on nothing but their number and the seed."""
    source = random.Random(seed)  # random() alone is promised to stay the same in every version
    keys = [source.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def _row(item: int | list[int]) -> Row:
    if isinstance(item, int):
        return Row(item, ((0, item),))
    length, *marks = item
    return Row(length, tuple(zip(marks[::2], marks[1::2], strict=True)))


def _item(mask: Sequence[bool]) -> int | list[int]:
    """What the file stores for a row with this label mask."""
    if all(mask):
        return len(mask)
    flips = [i for i in range(len(mask)) if mask[i] != (i > 0 and mask[i - 1])]
    return [len(mask), *flips, *([len(mask)] if mask[-1] else [])]


def _measure() -> dict[str, Any]:
    """What `lengths.json` holds, from the docstrings of the installed packages."""
    from datasets import Dataset  # only this command needs the heavy libraries

    from memlab.data import encoding, text
    from memlab.data.tokenizer import load_tokenizer

    docs = text.docstrings()
    by_kind = {
        "docstrings": [{"text": line} for line in text.plain_text(docs)],
        "prompt_completion": text.prompt_completion(docs),
        "chat": text.chat(docs),
    }
    measured: dict[str, Any] = {
        "source": {"command": "python -m memlab.data.lengths", **text.source_versions()}
    }
    for kind, strings in by_kind.items():
        sample = shuffled(strings, seed=0)[: _COUNTS[kind]]
        tokens = encoding.tokenize(Dataset.from_list(sample), load_tokenizer(), _LONGEST)
        measured[kind] = [_item([label != -100 for label in row]) for row in tokens["labels"]]
    return measured | {"chat_like": chat_like(_COUNTS["chat_like"])}


def _main() -> None:
    path = Path(__file__).with_name("lengths.json")
    path.write_text(_one_line_a_kind(_measure()), encoding="utf-8")
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")


def _one_line_a_kind(measured: dict[str, Any]) -> str:
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in measured.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    _main()
