"""Packing beside TRL's, in one run: python tests/benchmarks/bench_packing.py [rows, 1000000]

Placement, two lines a case, on lengths in memory:
  loop : place()    TRL's loop alone, cut out of its source, over lengths that are cut and sorted
                    before the clock starts; of ours the whole of place(): checks of the arguments,
                    cutting, sorting, best fit, and where every piece starts and stops.
  sort and best fit The same work on both sides: lengths that are cut already are sorted, longest
                    first, and put into bins, up to the order of the items and the bins' bounds.
The larger first: the allocator then has memory to hand out again, as after work on any data set,
and does not ask the system for it each time.
End to end: pack_dataset against map_ragged(pack) on the same data set in memory, no caching. Every
time is the least of a few, both sides in turns. Bins: on the committed chat-like lengths.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset
from trl import data_utils

from memlab.data.arrow import map_ragged
from memlab.data.bounds import efficiency, lower_bound
from memlab.data.lengths import chat_like, lengths
from memlab.techniques import packing

MAX_LENGTHS = (1024, 2048, 4096, 8192)


def trl_loop() -> Callable[[Any, int], list[dict]]:
    """The placement loop of TRL's _pack_bfd as a function of (sorted lengths and rows, L)."""
    lines = inspect.getsource(data_utils._pack_bfd).splitlines()
    start = next(i for i, line in enumerate(lines) if "_SegmentTree(seq_length)" in line)
    stop = next(i for i, line in enumerate(lines) if "pc.take(examples" in line)
    body = textwrap.indent(textwrap.dedent("\n".join(lines[start:stop])), "    ")
    scope = dict(vars(data_utils))
    exec(f"def loop(lengths, seq_length):\n{body}\n    return bins", scope)
    return scope["loop"]


def seconds(peer: Callable[[], Any], ours: Callable[[], Any], times: int) -> tuple[float, float]:
    """The least time of each: `times` turns of a call of the peer's, then five of ours."""
    best = [float("inf")] * 2
    for _ in range(times):
        for i, function in enumerate((peer, *[ours] * 5)):
            start = time.perf_counter()
            result = function()
            best[i > 0] = min(best[i > 0], time.perf_counter() - start)
            del result
    return best[0], best[1]


def line(technique: str, peer: float | str, memlab: float | str, ratio: float | str) -> None:
    cells = (f"{x:10.4f}" if isinstance(x, float) else f"{x:>10}" for x in (peer, memlab, ratio))
    print(f"{technique:<52}", *cells, flush=True)


def placement(rows: int, times: int) -> None:
    """TRL's loop against the whole of place(), which must put every piece in the same bin."""
    drawn, loop = np.array(chat_like(rows)), trl_loop()
    for L in MAX_LENGTHS:
        pieces = -(-drawn // L)
        of = np.repeat(np.arange(rows), pieces)
        starts = L * (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
        split = np.minimum(drawn[of] - starts, L)
        for strategy, sizes in (("bfd", np.minimum(drawn, L)), ("bfd_split", split)):
            ids = pa.array(np.arange(len(sizes)))
            pairs = pa.StructArray.from_arrays([pa.array(sizes), ids], ["0", "1"])
            ordered = pairs.sort("descending", by=0)
            theirs, placed = loop(ordered, L), packing.place(drawn, L, strategy)
            where = np.array([item for one in theirs for item in one["ids"]])
            assert np.array_equal(placed.rows, of[where] if strategy == "bfd_split" else where)
            assert np.array_equal(placed.stops - placed.starts, sizes[where])
            assert np.array_equal(np.diff(placed.offsets), [len(one["ids"]) for one in theirs])
            del theirs, placed
            peer, ours = seconds(
                lambda: loop(ordered, L),  # noqa: B023
                lambda: packing.place(drawn, L, strategy),  # noqa: B023
                times,
            )
            title = f"loop : place(), s: {rows:,} rows, L={L}, {strategy}"
            line(title, peer, ours, f"{peer / ours:.0f}x")
            sort, core = seconds(
                lambda: pairs.sort("descending", by=0),  # noqa: B023
                lambda: packing._best_fit(sizes, L),  # noqa: B023
                times,
            )
            title = "    sort and best fit, both"
            line(title, peer + sort, core, f"{(peer + sort) / core:.0f}x")


def end_to_end(rows: int, times: int) -> None:
    """A data set with ids and a mask, in order and shuffled, to a packed data set in memory."""
    offsets = np.append(0, np.cumsum(chat_like(rows)))
    ids = np.random.default_rng(0).integers(0, 151_936, offsets[-1], dtype=np.int32)
    columns = {"input_ids": ids, "completion_mask": (ids % 2).astype(np.int8)}
    lists = {
        name: pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
        for name, values in columns.items()
    }
    in_order = Dataset(pa.table(lists))
    for name, dataset in (("in order", in_order), ("shuffled", in_order.shuffle(seed=0))):
        for strategy in packing.STRATEGIES:
            ours = partial(packing.pack, max_length=1024, strategy=strategy)
            peer, own = seconds(
                lambda: data_utils.pack_dataset(dataset, 1024, strategy),  # noqa: B023
                lambda: map_ragged(dataset, ours),  # noqa: B023
                times,
            )
            title = f"data set, s: {rows:,} rows {name}, {strategy}"
            line(title, peer, own, f"{peer / own:.1f}x")


def bins() -> None:
    """Committed chat-like lengths: TRL's bins, ours, and ours over the lower bound."""
    drawn = lengths("chat_like")
    dataset = Dataset.from_dict({"input_ids": [[0] * n for n in drawn]})
    for L in (512, *MAX_LENGTHS):
        placed = packing.place(drawn, L)
        ours, theirs = len(placed.offsets) - 1, len(data_utils.pack_dataset(dataset, L))
        bound = lower_bound(drawn, L)
        line(f"bins: {len(drawn):,} chat-like rows, L={L}", str(theirs), str(ours), ours / theirs)
        share = efficiency(int((placed.stops - placed.starts).sum()), ours, L)
        line(f"    lower bound; efficiency {share:.4f}", str(bound), str(ours), ours / bound)
        assert ours <= theirs
        assert ours <= 1.0015 * bound


def main() -> None:
    large = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    datasets.disable_progress_bars()
    datasets.disable_caching()
    line("technique", "TRL", "memlab", "ratio")
    bins()
    placement(large, times=2)
    placement(100_000, times=5)
    end_to_end(100_000, times=3)


if __name__ == "__main__":
    main()
