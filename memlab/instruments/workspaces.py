"""Bytes that CUDA operations allocate and free inside themselves, which no meter sees from outside.

They count for the caching allocator: a prediction replays them beside the metered storages. Listed
are those of 1 MiB and more in the allocation history of a training step on an H200.

Sources: PyTorch's flash_api.cpp (mha_bwd), Embedding.cu and EmbeddingBackwardKernel.cu, Reduce.cuh
(setReduceConfig), CUDABlas.cpp (getChosenWorkspaceSize).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators of attention over several documents
from torch import Tensor

CUBLAS_WORKSPACE = 32 << 20  # on Hopper; each thread's cuBLAS handle keeps one
MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR = 132, 2048  # H200

MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.addmm.dtype_out,
}
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default
EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default
SUM_OVER_DIMS = torch.ops.aten.sum.dim_IntList


def workspaces(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Bytes of each workspace inside one call of `func`, in the order of their allocation."""
    if func is FLASH_BACKWARD:
        return _flash_backward(query=args[1], key=args[2])
    if func is VARLEN_BACKWARD:
        return _varlen_backward(query=args[1], key=args[2], cu_seqlens=args[6])
    if func is EMBEDDING_BACKWARD:
        return _embedding_backward(args[0], args[1], args[2])
    if func is SUM_OVER_DIMS:
        return _sum_over_rows(args[0], args[1])
    return ()


def _flash_backward(query: Tensor, key: Tensor) -> tuple[int, ...]:  # (B, H, T, D), (B, Hkv, S, D)
    """Row sums, an fp32 query gradient; for grouped heads, dk and dv of every head."""
    batch, heads, rows, size = query.shape
    grouped = key.shape[1] != heads
    expanded = query.element_size() * batch * heads * key.shape[2] * size
    rows = batch * _round_up(rows, 128)
    return _flash_sums(heads, rows, size) + (2 if grouped else 0) * (expanded,)


def _varlen_backward(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> tuple[int, ...]:
    """The same for documents in one row, (N, H, D) and (N, Hkv, D), each kept 128 rows apart."""
    rows, heads, size = query.shape
    grouped = key.shape[1] != heads
    expanded = query.element_size() * heads * key.shape[0] * size
    rows += 128 * (cu_seqlens.numel() - 1)
    return _flash_sums(heads, rows, size) + (2 if grouped else 0) * (expanded,)


def _flash_sums(heads: int, rows: int, size: int) -> tuple[int, int]:
    return 4 * heads * rows, 4 * heads * rows * _round_up(size, 32 if size <= 128 else 64)


def _embedding_backward(gradient: Tensor, ids: Tensor, words: int) -> tuple[int, ...]:
    """Tokens sorted by word, and an fp32 gradient row for each stretch of up to 10 of one word."""
    tokens = ids.numel()
    if tokens <= 3072:  # a kernel without sorting
        return ()
    rows = tokens // 10 + min(tokens, words)
    return (*(5 * [8 * tokens]), 8 * rows, 4 * rows * gradient.shape[-1])


def _sum_over_rows(x: Tensor, dims: list[int]) -> tuple[int, ...]:
    """Partial sums of many thread blocks: for the gradient of a norm's weight, or of a bias.

    Only sums over all dimensions but the last of a contiguous tensor; others were not seen to need
    any.
    """
    outputs = x.shape[-1] if x.dim() else 0
    if sorted(d % x.dim() for d in dims) != list(range(x.dim() - 1)) or not x.is_contiguous():
        return ()
    vector = 4 if outputs % 4 == 0 else 1  # outputs a thread
    width = min(_power_of_two_below(outputs // vector), 32)
    height = 512 // vector // width
    grid = math.ceil(outputs / vector / width)
    rows_a_thread = math.ceil(x.numel() // outputs / height)
    target = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if rows_a_thread < 256 or grid > target:
        return ()
    blocks = min(math.ceil(target / grid), math.ceil(rows_a_thread / 16))
    blocks = max(blocks, math.ceil(rows_a_thread / 256))
    if blocks == 1:
        return ()
    return (4 * outputs * blocks * width * vector, 4 * grid)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n else 1
