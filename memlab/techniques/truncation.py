"""Truncation: no row longer than max_length, cut before padding, as each trainer cuts it.

Computes    column[:max_length] (keep_start) or column[-max_length:] (keep_end) of a row's columns
Instead of  cutting the padded batch (truncate_padded): keep_end would keep padding, not answers
Memory      ids, labels and mask of B rows: 24*B*max(len) -> 24*B*min(max(len), max_length) bytes;
            activations shrink alike, the scores of eager attention with the square
Use         rows = truncate_sft(rows, 1024, truncation_mode="keep_end")
            # rows: [{"input_ids": [3, 4], "labels": [-100, 4]}, ...], lists, arrays or tensors
Price       what the cut tokens would teach; in time, one slice a column (of an array, a view)
Source      TRL's docs, Reducing Memory Usage; the trainers and collators of TRL 1.16
Unlike      TRL: no `datasets`; all columns of a row are cut together; refuses 0 (there keep_end
            cuts nothing) and a length without room for a prompt. Apache-2.0; torch 2.11 to 2.13
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, cat

Rows = Iterable[Mapping[str, Any]]  # a column is (T,): a list, an array or a tensor
IGNORE = -100  # the label of a token without a loss


def truncate_sft(rows: Rows, max_length: int | None, *, truncation_mode="keep_start") -> list[dict]:
    """Rows of `input_ids`, `labels` and masks; those without a valid label left are dropped.
    As below: new rows; other values travel along; None cuts and drops nothing. ValueError: a length
    below 1, unknown modes, columns missing, unequal or not 1-D. TypeError: the length is no int."""
    cut = _cut(rows, _part(max_length, truncation_mode), ("input_ids", "labels"))
    return cut if max_length is None else [row for row in cut if _has_label(row["labels"])]


def truncate_padded(rows: Rows, max_length: int | None, *, truncation_mode="keep_start"):
    """truncate_sft (its ValueError, TypeError) done wrong: padded on the right and then cut, lists.
    keep_end leaves short rows nothing but padding; rows without a label stay, and give a NaN."""
    rows, pads = _need(rows, "input_ids", "labels"), {"labels": [IGNORE]}
    longest = max((len(row["labels"]) for row in rows), default=0)
    padded = [{n: [*c] + pads.get(n, [0]) * (longest - len(c)) for n, c in r.items()} for r in rows]
    return _cut(padded, _part(max_length, truncation_mode), ("input_ids", "labels"))


def truncate_dpo(rows: Rows, max_length, *, truncation_mode="keep_start", **removed) -> list[dict]:
    """`prompt_ids`, `chosen_ids`, `rejected_ids` -> prompt + completion as `chosen_input_ids` and
    `chosen_completion_mask` (1 = completion), likewise `rejected_`. With keep_start, rows whose
    prompt alone fills max_length go first. TypeError: removed switches; ValueError: as above."""
    for switch, value in removed.items():
        raise TypeError(f"{switch}={value!r}: no switch of DPO; filter or cut the rows beforehand")
    sides = {"chosen_": "chosen_ids", "rejected_": "rejected_ids"}
    return _join(rows, _part(max_length, truncation_mode), sides)


def truncate_kto(rows: Rows, max_length: int | None) -> list[dict]:
    """`prompt_ids`, `completion_ids`, perhaps `KL_completion_ids` -> `input_ids` and
    `completion_mask`, likewise `KL_`; cut and dropped as by truncate_dpo: ValueError, TypeError."""
    rows, name = [*rows], "KL_completion_ids"
    kl = {"KL_": name} if any(name in row for row in rows) else {}
    return _join(rows, _part(max_length), {"": "completion_ids", **kl})


def truncate_reward(rows: Rows, max_length: int | None) -> list[dict]:
    """`chosen_ids`, `rejected_ids`: never cut, dropped if one is too long. ValueError, TypeError"""
    limit, rows = _part(max_length).stop, _need(rows, *(sides := ("chosen_ids", "rejected_ids")))
    return [dict(r) for r in rows if limit is None or max(len(r[name]) for name in sides) <= limit]


def truncate_completions(rows: Rows, max_completion_length: int | None) -> list[dict]:
    """GRPO, RLOO: the first tokens stay, of `completion_ids` and each column beside it; a column
    whose name begins with "prompt" is never cut. ValueError, TypeError: as truncate_sft."""
    part = _part(max_completion_length, switch="max_completion_length")
    return _cut(rows, part, ("completion_ids",), lambda name: not name.startswith("prompt"))


def truncate_prompts(rows: Rows, max_length: int | None) -> list[dict]:
    """Online DPO, a whole batch: `prompt_ids` (and prompt_ columns) lose tokens on the left, until
    padded they fit in max_length beside the longest completion. ValueError, TypeError: as above."""
    part, rows = _part(max_length), _need(rows, "completion_ids")
    longest = max((len(row["completion_ids"]) for row in rows), default=0)
    if max_length is not None:
        room = f"max_length={max_length} beside completions of {longest}, so room for prompts"
        part = _part(max_length - longest, "keep_end", switch=room)
    return _cut(rows, part, ("prompt_ids",), lambda name: name.startswith("prompt_"))


def truncate_gkd(rows: Rows, max_length: int | None) -> list[dict]:
    """The last tokens of `input_ids`, `labels` and masks stay, and so does a row without a label.
    ValueError, as in TRL: no prompt (-100) at its start to generate from. TypeError: as above."""
    cut = _cut(rows, _part(max_length, "keep_end"), ("input_ids", "labels"))
    for i, row in enumerate(cut):
        if [*row["labels"][:1]] != [IGNORE]:
            raise ValueError(f"max_length={max_length}: no prompt left in row {i}; give more")
    return cut


def _part(length: int | None, mode: str = "keep_start", *, switch: str = "max_length") -> slice:
    if mode not in ("keep_start", "keep_end"):
        raise ValueError(f'truncation_mode={mode!r}: give "keep_start" or "keep_end"')
    if length is None:
        return slice(None)
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"{switch}={length!r}: give an int, or None for no cut")
    if length < 1:
        raise ValueError(f"{switch}={length}: give at least 1, or None for no cut")
    return slice(int(length)) if mode == "keep_start" else slice(-int(length), None)


def _need(rows: Rows, *names: str) -> list[Mapping[str, Any]]:
    for i, row in enumerate(rows := [*rows]):
        if not row.keys() >= {*names} or any(np.ndim(row[name][:1]) != 1 for name in names):
            raise ValueError(f"columns of row {i} are {sorted(row)}; give {', '.join(names)}, 1-D")
    return rows


def _cut(rows: Rows, part: slice, needs: tuple[str, ...], chosen: Callable = bool) -> list[dict]:
    cut = []
    for row in _need(rows, *needs):
        names = [n for n, c in row.items() if chosen(n) and (type(c) is list or np.ndim(c))]
        sizes = {n: tuple(getattr(row[n], "shape", (len(row[n]),))) for n in names}
        if len({*sizes.values()}) > 1:
            raise ValueError(f"columns of row {len(cut)} have shapes {sizes}; give one length")
        cut.append({**row, **{n: row[n][part] for n in names}})
    return cut


def _has_label(labels: Any) -> bool:
    if hasattr(labels, "any"):
        return bool((labels != IGNORE).any())
    return [*labels] != [IGNORE] * len(labels)


def _join(rows: Rows, part: slice, sides: dict[str, str]) -> list[dict]:
    gone, joined = ("prompt_ids", *sides.values()), []
    for row in _need(rows, *gone):
        if part.stop is not None and len(row["prompt_ids"]) >= part.stop:
            continue  # keep_start would leave no completion
        new = {name: column for name, column in row.items() if name not in gone}
        for prefix, name in sides.items():
            ids, mask = _concatenate(row["prompt_ids"], row[name])
            new |= {f"{prefix}input_ids": ids[part], f"{prefix}completion_mask": mask[part]}
        joined.append(new)
    return joined


def _concatenate(prompt: Any, completion: Any):  # (P,), (C,) -> (P + C,), and 1 = completion
    if isinstance(prompt, list | tuple):
        return [*prompt, *map(int, completion)], [0] * len(prompt) + [1] * len(completion)
    parts = [part for part in (prompt, completion) if len(part)] or [prompt]  # empty: any dtype
    ids = cat(parts) if isinstance(prompt, Tensor) else np.concatenate(parts)
    mask = ids * 0
    mask[len(prompt) :] = 1
    return ids, mask
