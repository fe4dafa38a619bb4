"""A small model that really learns, to show what documents that see each other do to its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.data.lengths import shuffled
from memlab.data.rows import rows
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.head import head_parts
from memlab.techniques import varlen_attention
from memlab.techniques.chunked_loss import cross_entropy
from memlab.techniques.pad_to_multiple import collate
from memlab.trainers import sft

MODEL = "memlab/tiny"
SHORTEST, LONGEST = 16, 128  # tokens: each document has a past worth looking at
UNSEEN = 32  # documents that training leaves out
ROWS, RATE = 8, 3e-3

Row = dict[str, Any]


class Outcome(NamedTuple):
    """What a batch does to a model."""

    losses: Tensor  # (labels,) fp64: of each token that has a label, in the rows' order
    gradient: Tensor  # (P,) of their mean, by every parameter

    @property
    def loss(self) -> float:
        """The mean over labels."""
        return self.losses.mean().item()


def unseen_documents(count: int) -> list[Row]:
    """Docstrings that `trained_model` is not trained on, at most UNSEEN: `input_ids`, `labels`."""
    return _documents()[:count]


def trained_model(steps: int = 50) -> Any:
    """A tiny transformers model after `steps` steps on docstrings, on the CPU in fp32: seconds."""
    varlen_attention.register()
    model = build_meta(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    materialize(model, "cpu", init=True).train()
    seen = _documents()[UNSEEN:]
    order = [row for epoch in range(1 + ROWS * steps // len(seen)) for row in shuffled(seen, epoch)]
    batches = [[collate(order[ROWS * i :][:ROWS])] for i in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with _one_thread():
        for _ in sft.train(
            model, optimizer, batches, head=head_parts(model), head_loss=cross_entropy
        ):
            pass
    return model.eval()


def run(model: Any, attention: str, labels: Tensor, inputs: Mapping[str, Any]) -> Outcome:
    """Forward and backward of `inputs` by the model with this attention; labels (B, T)."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    with _one_thread():
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1).double()  # (N, V)
        targets = sft.shifted(labels)
        losses = F.cross_entropy(logits, targets, reduction="none")[targets != -100]
        losses.mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return Outcome(losses.detach(), gradient)


def _documents() -> list[Row]:
    whole = rows("docstrings", vocab_size=load_config(MODEL).vocab_size)
    return [
        {name: column[:LONGEST] for name, column in row.items()}
        for row in whole
        if len(row["input_ids"]) >= SHORTEST
    ]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The same sums on any number of cores, and no slower for products as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
