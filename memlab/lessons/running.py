"""Small runs that exercises are judged by: a head and its loss, under the meter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.instruments.device import simulated_gpu
from memlab.instruments.meter import Meter


class HeadShapes(NamedTuple):
    """N tokens, V words, D hidden."""

    tokens: int
    words: int
    hidden: int


@contextlib.contextmanager
def simulated_head(shapes: HeadShapes) -> Iterator[tuple[Meter, tuple[Tensor, Tensor, Tensor]]]:
    """On the simulated GPU, metered: hidden h (N, D) and head w (V, D), bf16; labels y (N,).

    Raises MemlabError where this torch can't simulate.
    """
    n, v, d = shapes
    with simulated_gpu() as device, Meter(device.type, vocab_size=v) as meter:
        h = torch.empty(n, d, dtype=torch.bfloat16, device=device, requires_grad=True)
        w = torch.empty(v, d, dtype=torch.bfloat16, device=device, requires_grad=True)
        y = torch.zeros(n, dtype=torch.int64, device=device)
        meter.begin_step()
        yield meter, (h, w, y)


class HeadBytes(NamedTuple):
    """Bytes that a loss leaves for backward, and those at its peak through backward.

    `extra` counts neither the inputs nor their gradients.
    """

    kept: int
    extra: int


def head_bytes(
    loss: Callable[..., Tensor], shapes: HeadShapes, *, trained: bool = True
) -> HeadBytes:
    """Of `loss(h, w, y)` on the simulated GPU; `trained` tells whether w needs a gradient.

    Raises MemlabError where this torch can't simulate.
    """
    with simulated_head(shapes) as (meter, (h, w, y)):
        w.requires_grad_(trained)
        start = meter.live_bytes
        value = loss(h, w, y)
        kept = meter.live_bytes - start
        value.sum().backward()
        del value
        end = meter.live_bytes
    return HeadBytes(kept, max(sample.total for sample in meter.ledger.samples()) - end)
