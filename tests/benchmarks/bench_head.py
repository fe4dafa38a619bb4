"""Forward and backward of the head, h (N, D) @ w.T (D, V), side by side on a card.

    python tests/benchmarks/bench_head.py

Three shapes: a trained head, a frozen one, and half of the labels masked. Sides: full logits, the
heads of TRL, Liger and cut-cross-entropy where installed, memlab's, and bare products. `extra` is
peak memory above what was allocated before the call, gradients of an earlier call included in that;
an error is that of a gradient against fp64, |x - exact| / |exact|, and beside it its ratio to the
error of full logits. A card lowers its clocks under products, raises them under lighter work, and
changes as it warms up: a side is timed after WARM seconds of its own calls, then the products in
the same way, and the ratio is the median of the rounds' ratios. Prints a table a shape, and one
JSON line, as notebooks/measured/benchmarks.jsonl keeps them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.experiments.versions import versions
from memlab.techniques.chunked_loss import chunked_cross_entropy, cross_entropy
from memlab.techniques.fused_head import fused_cross_entropy

MIB = 2**20
WARM = 0.4  # seconds, until the clocks are those of this load


class Shape(NamedTuple):
    """One head: rows, vocabulary, width, share of labels that count, and whether w is trained."""

    rows: int
    vocab: int
    width: int
    labelled: float
    trained: bool


# name -> shape, and what memlab is to reach: (ms / bare products, extra MiB) of fast and of frugal
SHAPES = {
    "trained": (
        Shape(8192, 151_936, 2048, 1.0, True),
        {"fast": (1.20, 1539), "frugal": (1.45, 700)},
    ),
    "frozen": (Shape(8192, 151_936, 2048, 1.0, False), {"fast": (1.20, 400)}),
    "half masked": (Shape(16_384, 151_936, 1024, 0.5, True), {"fast": (0.62, None)}),
}


def made(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels."""
    rng = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, generator=rng, device="cuda")
    h = (draw(shape.rows, shape.width) * 0.5).bfloat16().requires_grad_()
    w = (draw(shape.vocab, shape.width) * 0.02).bfloat16().requires_grad_(shape.trained)
    y = torch.randint(shape.vocab, (shape.rows,), generator=rng, device="cuda")
    y[torch.rand(shape.rows, generator=rng, device="cuda") >= shape.labelled] = -100
    return h, w, y


def sides(chunks: list[int]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Losses by name; what is not installed is left out."""
    peers = {
        "TRL": ("trl", trl_head),
        "Liger": ("liger_kernel", liger_head),
        "Liger, fp32 sums": ("liger_kernel", partial(liger_head, accum_dtype=torch.float32)),
        "CCE": ("cut_cross_entropy", cce_head),
        "CCE, no filter": ("cut_cross_entropy", partial(cce_head, filter_eps=None)),
    }
    found: dict[str, Callable[..., Tensor]] = {"full logits": cross_entropy}
    found |= {name: head for name, (module, head) in peers.items() if find_spec(module)}
    found["memlab chunked"] = chunked_cross_entropy
    found["memlab fast"] = fused_cross_entropy
    found["memlab frugal"] = partial(fused_cross_entropy, frugal=True)
    for chunk in chunks:
        found[f"memlab fast, {chunk} rows"] = partial(fused_cross_entropy, chunk=chunk)
        found[f"memlab frugal, {chunk} rows"] = partial(
            fused_cross_entropy, frugal=True, chunk=chunk
        )
    return found


def trl_head(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """TRL 1.16's head as its SFT trainer calls it: labelled rows only, tiles of 32,768 words."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    kept = y != -100
    options: Any = (1.0, 32_768, None, 1.0, ())  # temperature, tile, softcap, scale, statistics
    logp = ChunkedLogProbFunction.apply(h[kept], w, None, y[kept], *options)[0]
    return -logp.sum() / kept.sum()


def liger_head(h: Tensor, w: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Liger's fused linear cross-entropy; it sums dw in w's dtype unless told otherwise."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(**options)(w, h, y)


def cce_head(h: Tensor, w: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Cut-cross-entropy; by default it leaves small gradients out."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(h, w, y, **options)


def products(h: Tensor, w: Tensor, y: Tensor) -> None:
    """The matrix products alone, over all rows, in chunks of 4096."""
    with torch.no_grad():
        for h_c in h.split(4096):
            z = h_c @ w.T
            torch.mm(z, w)
            if w.requires_grad:
                torch.mm(z.T, h_c)


def exact_gradients(h: Tensor, w: Tensor, y: Tensor, *, chunk: int = 512) -> list[Tensor]:
    """dh and dw in fp64; chunks of rows only keep the logits small."""
    with torch.no_grad():
        wide, rows = w.double(), (y != -100).nonzero()[:, 0]
        dh, dw = torch.zeros_like(h, dtype=torch.float64), torch.zeros_like(wide)
        for at in rows.split(chunk):
            h_c = h[at].double()
            dz = (h_c @ wide.T).softmax(1)
            dz[torch.arange(len(at), device=y.device), y[at]] -= 1
            dz /= len(rows)
            dh[at] = dz @ wide
            dw.addmm_(dz.T, h_c)
    return [dh, dw] if w.requires_grad else [dh]


class Side:
    """One way to run the head, on tensors that all share."""

    def __init__(self, loss: Callable[..., Any], h: Tensor, w: Tensor, y: Tensor) -> None:
        self.loss, self.inputs = loss, (h, w, y)

    def run(self) -> None:
        """Forward and backward, with the gradients of an earlier call dropped first."""
        for leaf in self.inputs[:2]:
            leaf.grad = None
        value = self.loss(*self.inputs)
        if value is not None:
            value.backward()

    def extra(self) -> float:
        """MiB at the peak above what was allocated before; the call before leaves its gradients."""
        self.run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def errors(self, exact: list[Tensor]) -> list[float]:
        """Of dh and, with a trained head, dw."""
        self.run()
        grads = [leaf.grad for leaf in self.inputs[:2] if leaf.requires_grad]
        return [
            float((g.double() - e).norm() / e.norm()) if g is not None else float("nan")
            for g, e in zip(grads, exact, strict=True)
        ]

    def ms(self, calls: int = 8) -> float:
        """Milliseconds of a call, the mean of a few without a pause."""
        until = time.perf_counter() + WARM
        while time.perf_counter() < until:
            self.run()
            torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls


def measure(
    shape: Shape, losses: dict[str, Callable[..., Tensor]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Side -> ms, ratio to the bare products, extra MiB, errors of dh and dw. A side that fails
    says so in place of figures."""
    h, w, y = made(shape)
    exact = exact_gradients(h, w, y)
    runs = {name: Side(loss, h, w, y) for name, loss in losses.items()}
    table: dict[str, dict[str, Any]] = {}
    for name, run in tuple(runs.items()):
        try:
            table[name] = {"errors": run.errors(exact)}
        except Exception as error:  # a peer may not take this torch: the others still count
            table[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            del runs[name]
    del exact
    bare = Side(products, h, w, y)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for name, run in runs.items():
        table[name]["extra_mib"] = round(run.extra(), 1)
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append((run.ms(), bare.ms()))
    for name, pairs in times.items():
        ratio = statistics.median(ms / beside for ms, beside in pairs)
        table[name] |= {
            "ms": round(statistics.median(ms for ms, _ in pairs), 2),
            "ratio": round(ratio, 3),
            "ratios": [round(ms / beside, 3) for ms, beside in pairs],
        }
    every = [beside for pairs in times.values() for _, beside in pairs]
    table["products"] = {"ms": round(statistics.median(every), 2), "ratio": 1.0}
    table["products"]["extra_mib"] = round(bare.extra(), 1)
    return table


def show(name: str, shape: Shape, goals: dict[str, Any], table: dict[str, dict[str, Any]]) -> None:
    """Print the table of one shape, and what memlab was to reach."""
    print(f"\n{name}: {shape}")
    print(f"{'':<28}{'ms':>8}{'x products':>12}{'extra MiB':>11}  errors of dh, dw (x full logits)")
    full = table["full logits"].get("errors", [])
    for side, row in table.items():
        if "failed" in row:
            print(f"{side:<28} {row['failed']}")
            continue
        found = [
            f"{e:.2e} ({e / f:.2f})" for e, f in zip(row.get("errors", []), full, strict=False)
        ]
        figures = f"{row['ms']:>8.1f}{row['ratio']:>12.3f}{row['extra_mib']:>11.0f}"
        print(f"{side:<28}{figures}  {'  '.join(found)}")
    for mode, (ratio, extra) in goals.items():
        limit = "" if extra is None else f" and {extra} MiB extra"
        print(f"to reach, {mode}: {ratio} x products{limit}; errors 1.1 x full logits")


def main() -> None:
    """Measure, print, and give the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--chunks", nargs="*", type=int, default=[], help="more rows a chunk")
    parser.add_argument("--sides", nargs="*", help="of the table's names, full logits first")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = {}
    for name in options.shapes:
        shape, goals = SHAPES[name]
        losses = sides(options.chunks)
        losses = {side: losses[side] for side in options.sides or losses}
        table = measure(shape, losses, options.rounds)
        show(name, shape, goals, table)
        found[name] = shape._asdict() | {"sides": table}
        torch.cuda.empty_cache()
    result = {
        "benchmark": "head",
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "shapes": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
