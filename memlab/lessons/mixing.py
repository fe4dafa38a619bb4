"""Which documents of a packed row a model lets see each other, found by changing their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlab.models.build import build_meta, materialize
from memlab.techniques import padding_free, varlen_attention
from memlab.techniques.packing import pack

MODEL = "memlab/tiny"

Row = dict[str, Any]


def who_sees_whom(lengths: Sequence[int], max_length: int, strategy: str) -> list[list[str]]:
    """Packs documents of these lengths, and says for each what the model's answers depend on.

    Documents are A, B, C and so on. Each row of the result starts with a document, or the part of
    it that lies in one packed row, and goes on with the documents whose tokens change its logits
    when they change: "B" alone, unless documents mix. A tiny model computes it, here, in fp32.
    Raises ValueError as `pack` does.
    """
    names = [np.full(n, i) for i, n in enumerate(lengths)]
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 500, (n,), generator=random).numpy() for n in lengths]
    packed = pack({"input_ids": ids, "document": names}, max_length, strategy=strategy)
    seen = []
    for i, documents in enumerate(packed["document"]):
        row: Row = {"input_ids": packed["input_ids"][i], "labels": packed["input_ids"][i]}
        if "seq_lengths" in packed:
            row["seq_lengths"] = packed["seq_lengths"][i]
        seen += _in_row(row, documents, apart=strategy != "wrapped")
    return seen


def _in_row(row: Row, documents: np.ndarray, *, apart: bool) -> list[list[str]]:
    """For each document of a packed row: its name, then the names of those that it depends on."""
    present = np.unique(documents).tolist()
    logits = _logits(row, apart=apart)
    moved = {}
    for changed in present:
        ids = np.where(documents == changed, row["input_ids"] % 500 + 1, row["input_ids"])
        other = _logits({**row, "input_ids": ids}, apart=apart)
        moved[changed] = (other != logits).any(dim=1).numpy()
    return [
        [_name(one), *(_name(other) for other in present if moved[other][documents == one].any())]
        for one in present
    ]


@lru_cache
def _model(*, apart: bool) -> Any:
    varlen_attention.register()
    attention = varlen_attention.NAME if apart else "sdpa"
    model = build_meta(MODEL, dtype=torch.float32, attn_implementation=attention)
    return materialize(model, "cpu", init=True).eval()


@torch.no_grad()
def _logits(row: Row, *, apart: bool) -> Tensor:  # (T, V)
    if apart:
        inputs = padding_free.model_inputs(padding_free.collate([row]))
    else:
        inputs = {"input_ids": torch.as_tensor(row["input_ids"])[None]}
    return _model(apart=apart)(**inputs).logits[0]


def _name(document: int) -> str:
    return chr(ord("A") + document)
