"""The list columns of a `datasets.Dataset` as flat NumPy values and where rows lie, and back.

Works on Arrow's buffers: no Python object a token, and no copy of the values where Arrow holds a
column in one chunk, shuffled or not. Whatever rearranges tokens can then be NumPy alone:

    packed = map_ragged(dataset, partial(pack, max_length=1024, strategy="bfd"))

datasets and pyarrow are imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_MOST = 2**31 - 1  # values that a chunk of a list column can hold: its offsets are int32


class Ragged(NamedTuple):
    """Rows of unequal length: row i is values[starts[i]:stops[i]], wherever that lies."""

    values: np.ndarray  # (N,)
    starts: np.ndarray  # (rows,) int64
    stops: np.ndarray  # (rows,) int64


def to_ragged(dataset: Dataset) -> dict[str, Ragged]:
    """Every column of the data set, in its order of rows (after select, shuffle, ...).

    Null rows become empty ones. Values may be views of the data set's memory, not to be written to.

    Raises:
        TypeError: no Dataset, or a column that is not a list of numbers (TRL's rule: nothing is
            dropped in silence; remove_columns does).
        ValueError: a null among a row's numbers.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise TypeError(f"dataset={type(dataset).__name__}: give a datasets.Dataset (one split)")
    table = dataset.data.table
    columns = {name: _column(name, table[name]) for name in dataset.column_names}
    if dataset._indices is None:
        return columns
    order = dataset._indices.column(0).to_numpy().astype(np.int64)
    return {
        name: Ragged(values, starts[order], stops[order])
        for name, (values, starts, stops) in columns.items()
    }


def from_ragged(columns: Mapping[str, Any], like: Dataset | None = None) -> Dataset:
    """A data set in memory of these columns (anything with the fields of `Ragged`).

    From `like` it takes features, info, split and format; new columns join the format's columns.
    """
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features
    from datasets.fingerprint import generate_random_fingerprint

    info = DatasetInfo() if like is None else like.info.copy()
    known = info.features or Features()
    types = {field.name: field.type for field in known.arrow_schema}
    table = pa.table({name: _array(rows, types.get(name)) for name, rows in columns.items()})
    inferred = Features.from_arrow_schema(table.schema)
    same = {name: known[name] for name in inferred if types.get(name) == table[name].type}
    info.features = Features({**inferred, **same})
    # by itself a Dataset would hash all the values for its fingerprint
    made = Dataset(
        table,
        info=info,
        split=None if like is None else like.split,
        fingerprint=generate_random_fingerprint(),
    )
    if like is None:
        return made
    shown = like.format
    new = [name for name in made.column_names if name not in like.column_names]
    shown["columns"] = [name for name in shown["columns"] if name in made.column_names] + new
    return made.with_format(**shown.pop("format_kwargs"), **shown)


def map_ragged(
    dataset: Dataset, function: Callable[[dict[str, Ragged]], Mapping[str, Any]]
) -> Dataset:
    """The data set that `function` makes of all the rows at once, columns in, columns out.

    The result lies in memory. Raises as `to_ragged`, and what the function raises.
    """
    return from_ragged(function(to_ragged(dataset)), like=dataset)


def _column(name: str, column: pa.ChunkedArray) -> Ragged:
    sizes, values = [np.zeros(1, np.int64)], [np.zeros(0, _dtype(name, column.type))]
    for chunk in column.chunks:
        if chunk.null_count == len(chunk):
            sizes.append(np.zeros(len(chunk), np.int64))
            continue
        flat = chunk.flatten()  # heeds the chunk's own offset, and leaves null rows out
        if flat.null_count:
            raise ValueError(f"column {name} has nulls in its rows: give a number for each")
        sizes.append(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        if len(flat):
            values.append(flat.to_numpy(zero_copy_only=False))
    joined = values[1] if len(values) == 2 else np.concatenate(values)
    ends = np.cumsum(np.concatenate(sizes), dtype=np.int64)
    return Ragged(joined, ends[:-1], ends[1:])


def _dtype(name: str, kind: pa.DataType) -> Any:
    """What NumPy makes of a list column's values; int64 where there are none to tell."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind)
    number = kind.value_type if is_list else kind  # pyright: ignore[reportAttributeAccessIssue]
    if types.is_null(number):  # rows that are all empty, or no rows
        return np.int64
    if is_list and any(
        test(number) for test in (types.is_integer, types.is_floating, types.is_boolean)
    ):
        return number.to_pandas_dtype()
    advice = f"remove_columns({name!r})"
    if types.is_fixed_size_list(kind) and not types.is_nested(number := kind.value_type):
        advice = f'cast_column({name!r}, datasets.List(datasets.Value("{number}")))'
    elif types.is_nested(kind):
        advice = f"give each row one list of numbers (map), or {advice}"
    raise TypeError(f"column {name} holds {kind}, not lists of numbers: {advice}")


def _contiguous(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values with one row after the other, and offsets (rows + 1,) into them."""
    values, starts, stops = rows.values, rows.starts, rows.stops
    if np.array_equal(starts[1:], stops[:-1]):
        return values, np.append(starts[:1], stops) if len(starts) else np.zeros(1, np.int64)
    offsets = np.append(0, np.cumsum(stops - starts))
    joined = np.empty(offsets[-1], values.dtype)
    source, target = values.data, joined.data  # quicker than an array a row
    spans = (x.tolist() for x in (starts, stops, offsets[:-1], offsets[1:]))
    for start, stop, to, end in zip(*spans, strict=True):
        target[to:end] = source[start:stop]
    return joined, offsets


def _array(rows: Any, kind: pa.DataType | None) -> pa.ChunkedArray:
    """List array, large if `kind` is; else in as few chunks as int32 offsets allow."""
    import pyarrow as pa

    values, offsets = _contiguous(rows)
    if kind is not None and pa.types.is_large_list(kind):
        array = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
        return pa.chunked_array([array])
    chunks, start = [], 0
    while start < len(offsets) - 1 or not chunks:
        base = offsets[start]
        fitting = int(np.searchsorted(offsets, base + _MOST, side="right")) - 1
        stop = min(max(fitting, start + 1), len(offsets) - 1)
        own = pa.array(offsets[start : stop + 1] - base, pa.int32())
        chunks.append(pa.ListArray.from_arrays(own, pa.array(values[base : offsets[stop]])))
        start = stop
    return pa.chunked_array(chunks)
