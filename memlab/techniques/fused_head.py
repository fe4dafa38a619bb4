"""Linear cross-entropy on a card: logits become their own gradient, already in the forward pass.

Computes  F.cross_entropy((h @ w.T).float(), y) over the n labels that are not -100, or its dft form
Without   the (N, V) logits, an fp32 copy of any of them or of w, and the product run again
Memory    bytes kept for backward: 4*N*V + 2*(N+V)*D + 8*N -> 4*(n+V)*D + 8*n (frozen w: no V);
          peak above h, w, y, dh, dw, with n = N and G = 2*(N+V)*D (frozen w: 2*N*D):
          12*N*V -> max(2*C*(V+D), G) + G.   Frugal: a tile of words instead of C rows, as many
          logits, the last one kept: kept 2*(N+V)*D + 8*N + 12*n + 2*C*V, peak 2*C*V + 4*N*D
Use       loss = fused_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())
          loss.backward()  # labels[b, t] is the word that follows hidden[b, t]
Price     three products, as full logits, and 6*n*V bytes of traffic between them; frugal makes
          all tiles but one twice (4 - C/n products), and needs no fp32 gradient of w
Source    Liger-Kernel (arXiv 2410.10989) for gradients in the forward pass; Wijmans et al. 2024
Unlike    Liger: dw is summed in fp32 (theirs by default in w's dtype), -100 rows reach no product,
          the scale may be any; off CUDA the torch twins. Apache-2.0; torch 2.11 to 2.13
"""

import functools
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows
    triton = None

BLOCK = 8192  # numbers that one program holds at a time
LAUNCH: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8}


def sums_torch(z, y, first, scale, softcap) -> tuple[Tensor, Tensor]:
    """Logit of y (C,) and log(sum(exp(logits))), at least fp32, of each row of raw logits z (C, V):
    the words from `first` on of a vocabulary, so that y may lie outside. Its logit is 0 then."""
    x, at = _capped(z, scale, softcap), y - first
    inside = (at >= 0) & (at < z.shape[1])
    label = x.gather(1, torch.where(inside, at, 0)[:, None])[:, 0]
    return torch.where(inside, label, 0), x.logsumexp(1)


def to_gradient_torch(z, y, log_sum, weight, first, scale, softcap) -> None:
    """Write over z the gradient of -(weight * log-probability of y).sum(); weight (C,)."""
    x = _capped(z, scale, softcap)
    slope = scale if softcap is None else (1 - (x / softcap) ** 2) * scale
    hit = torch.arange(first, first + z.shape[1], device=z.device) == y[:, None]
    z.copy_(((x - log_sum[:, None]).exp() - hit.to(x.dtype)) * weight[:, None] * slope)


def _capped(z, scale, softcap) -> Tensor:  # raw logits of any shape -> logits, fp32 at least
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    return z if softcap is None else (z / softcap).tanh() * softcap


if triton is not None:

    @triton.jit
    def _load(z, inside, scale, cap, CAPPED: tl.constexpr):
        x = tl.load(z, mask=inside, other=-float("inf")).to(tl.float32) * scale
        if CAPPED:
            x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
        return x

    @triton.jit
    def _sums(
        z, y, out, first, v: tl.constexpr, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)  # a chunk may hold more than 2**31 logits
        word = tl.load(y + row) - first
        inside = (word >= 0) & (word < v)
        label = _load(z + row * v + word, inside, scale, cap, CAPPED)
        tl.store(out + row, tl.where(inside, label, 0.0))
        top, total = -3e38, 0.0  # finite: exp(-inf - top) is 0 where a logit is -inf
        for start in range(0, v, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _load(z + row * v + at, at < v, scale, cap, CAPPED)
            x = tl.where(at < v, x, -float("inf"))
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        tl.store(out + tl.num_programs(0) + row, top + tl.log(total))

    @triton.jit
    def _gradient(
        z, y, log_sum, weight, first, v, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
    ):
        blocks = tl.cdiv(v, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        x = _load(z + row * v + at, at < v, scale, cap, CAPPED)
        d = tl.exp(x - tl.load(log_sum + row)) - tl.where(first + at == tl.load(y + row), 1.0, 0.0)
        if CAPPED:
            d *= 1 - (x / cap) * (x / cap)
        tl.store(z + row * v + at, d * (tl.load(weight + row) * scale), mask=at < v)

    @triton.jit
    def _scale(x, g, out, size, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < size) * tl.load(g), mask=at < size)


def sums_triton(z, y, first, scale, softcap) -> tuple[Tensor, Tensor]:
    """`sums_torch` in one reading of z, which must be contiguous."""
    out = _two_each(z)
    with torch.cuda.device_of(z):
        _sums[(len(z),)](z, y, out, first, z.shape[1], float(scale), **_options(softcap))
    return out[0], out[1]


def to_gradient_triton(z, y, log_sum, weight, first, scale, softcap) -> None:
    """`to_gradient_torch` in one reading and writing of z, which must be contiguous."""
    grid = (len(z) * -(-z.shape[1] // BLOCK),)
    with torch.cuda.device_of(z):
        _gradient[grid](z, y, log_sum, weight, first, z.shape[1], float(scale), **_options(softcap))


def _options(softcap) -> dict[str, Any]:
    return LAUNCH | {"cap": float(softcap or 0), "CAPPED": softcap is not None}


def _kind(z: Tensor) -> str:
    if z.device.type in ("gpu", "meta"):
        return "shapes"  # a simulated card: launches are skipped
    return "triton" if triton and z.is_cuda and z.dtype != torch.float64 else "torch"


def _two_each(z) -> Tensor:  # (2, C)
    return z.new_empty(2, len(z), dtype=torch.promote_types(z.dtype, torch.float32))


def _sums_of(z, *rest):
    if (kind := _kind(z)) == "shapes":
        return _two_each(z).unbind()
    return (sums_triton if kind == "triton" else sums_torch)(z, *rest)


def _to_gradient(z, *rest) -> None:
    if (kind := _kind(z)) != "shapes":
        (to_gradient_triton if kind == "triton" else to_gradient_torch)(z, *rest)


def _labels(w, y, rows) -> Tensor:
    y = y[rows]
    w[:, 0].gather(0, y)  # raises for a label outside V, on a card as its indexing does
    return y


def _product(out, a, b, add: bool) -> None:  # out = a @ b, or += : every sum in out's dtype
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=int(add))
    elif a.device.type in ("cpu", "mps"):
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=int(add))
    else:  # an accelerator's product sums bf16 into fp32 without copies
        torch.addmm(out, a, b, beta=int(add), out_dtype=out.dtype, out=out)


def _alone(step):  # of an autograd function: autocast around it changes no dtype inside
    @functools.wraps(step)
    def run(ctx, x, *rest):
        if torch.is_grad_enabled():  # in backward: nothing here could be differentiated again
            raise RuntimeError("create_graph=True: a fused head has no second derivatives")
        kind = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
        with torch.autocast(kind, enabled=False):
            return step(ctx, x, *rest)

    return run


class _MadeInForward(torch.autograd.Function):
    """Sum of the losses; the gradients are made beside it, in fp32, and only scaled in backward."""

    @staticmethod
    @_alone
    def forward(ctx, h, w, y, bias, rows, chunk, scale, softcap, dft, wanted):
        h_c = h[rows[:chunk]].to(w.dtype)
        z = _raw(h_c, w, bias)  # before all else: the card stood still until `rows` were counted
        y_n, make = _labels(w, y, rows), {"device": h.device}
        make["dtype"] = torch.promote_types(w.dtype, torch.float32)
        logp, weight = torch.empty(len(rows), **make), torch.ones(len(rows), **make)
        for_h, for_w, for_b = (wanted and ctx.needs_input_grad[at] for at in (0, 1, 3))
        dh = torch.empty(len(rows), h.shape[1], **make) if for_h else None
        dw = (torch.empty if len(rows) else torch.zeros)(w.shape, **make) if for_w else None
        db = torch.zeros(len(w), **make) if for_b else None
        for first in range(0, len(rows), chunk):
            here = slice(first, first + chunk)
            if first:
                h_c = h[rows[here]].to(w.dtype)
                z = _raw(h_c, w, bias)
            label, log_sum = _sums_of(z, y_n[here], 0, scale, softcap)
            torch.sub(label, log_sum, out=logp[here])
            if dft:
                torch.exp(logp[here], out=weight[here])
            if for_h or for_w or for_b:
                _to_gradient(z, y_n[here], log_sum, weight[here], 0, scale, softcap)
            if dh is not None:
                _product(dh[here], z, w, add=False)
            if dw is not None:
                _product(dw, z.T, h_c, add=first > 0)
            if db is not None:
                db += z.sum(0, dtype=db.dtype)
            del z, h_c  # or they would be alive beside the next chunk's
        ctx.save_for_backward(rows, dh, dw, db)
        ctx.like = h.shape, h.dtype, w.dtype, None if bias is None else bias.dtype
        return -(weight * logp).sum()

    @staticmethod
    @_alone
    def backward(ctx, g):  # ()
        (rows, dh, dw, db), (shape, *dtypes) = ctx.saved_tensors, ctx.like
        dh, dw, db = (_scaled(x, g, to) for x, to in zip((dh, dw, db), dtypes, strict=True))
        if dh is not None and len(rows) < shape[0]:
            dh = dh.new_zeros(shape).index_copy_(0, rows, dh)
        return dh, dw, None, db, *[None] * 6


class _Recomputed(torch.autograd.Function):
    """Log-probabilities, a tile of words at a time; backward makes all but the last again."""

    @staticmethod
    @_alone
    def forward(ctx, h, w, y, bias, rows, chunk, scale, softcap):
        logp = h.new_zeros(len(y), dtype=torch.promote_types(w.dtype, torch.float32))
        h_n, y_n = h[rows].to(w.dtype), _labels(w, y, rows)
        label = logp.new_zeros(len(rows))
        log_sum, z = torch.full_like(label, -float("inf")), None
        for here in _tiles(len(w), len(rows), chunk):
            z = None  # or it would be alive beside the next tile
            z = _raw(h_n, w[here], None if bias is None else bias[here])
            label_here, log_sum_here = _sums_of(z, y_n, here.start, scale, softcap)
            label += label_here  # 0 for words of other tiles
            log_sum = torch.logaddexp(log_sum, log_sum_here)
        logp[rows] = label - log_sum
        ctx.save_for_backward(h, w, y, bias, rows, log_sum)
        ctx.options, ctx.tile = (chunk, scale, softcap), z
        return logp

    @staticmethod
    @_alone
    def backward(ctx, g):  # (N,)
        (h, w, y, bias, rows, log_sum), (chunk, scale, softcap) = ctx.saved_tensors, ctx.options
        for_h, for_w, for_b = (ctx.needs_input_grad[at] for at in (0, 1, 3))
        h_n, y_n, weight = h[rows].to(w.dtype), y[rows], -g[rows]
        dh = torch.zeros_like(h_n, dtype=log_sum.dtype) if for_h else None
        dw = torch.empty_like(w) if for_w else None
        db = torch.empty_like(bias) if for_b else None
        z, ctx.tile = ctx.tile, None  # a second backward makes it again
        for here in reversed(_tiles(len(w), len(rows), chunk)):
            z = _raw(h_n, w[here], None if bias is None else bias[here]) if z is None else z
            _to_gradient(z, y_n, log_sum, weight, here.start, scale, softcap)
            if dh is not None:
                _product(dh, z, w[here], add=True)
            if dw is not None:
                torch.mm(z.T, h_n, out=dw[here])
            if db is not None:
                db[here] = z.sum(0, dtype=log_sum.dtype)
            z = None
        if dh is not None:
            dh = h.new_zeros(h.shape).index_copy_(0, rows, dh.to(h.dtype))
        return dh, dw, None, db, *[None] * 4


def _tiles(words: int, rows: int, chunk: int) -> list[slice]:  # of about chunk * words logits
    count = max(-(-rows // chunk), 1)
    size = -(-words // count // 256) * 256
    return [slice(first, first + size) for first in range(0, words, size)]


def _raw(h, w, bias) -> Tensor:  # (C, D), (V, D), (V,) -> (C, V)
    return F.linear(h, w, None if bias is None else bias.to(w.dtype))


def _scaled(x: Tensor | None, g: Tensor, dtype) -> Tensor | None:  # rounded once
    if x is None:
        return None
    out = torch.empty_like(x, dtype=dtype)
    if _kind(x) != "triton":  # torch's kernel for two dtypes is slow: 1.5 TB/s on an H200
        return torch.mul(x, g, out=out)
    with torch.cuda.device_of(x):
        _scale[(-(-x.numel() // BLOCK),)](x, g, out, x.numel(), **LAUNCH)
    return out


def _check(h: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, chunk, scale, softcap) -> None:
    if w.ndim != 2 or y.ndim != 1 or h.shape != (len(y), w.shape[1]) or 0 in w.shape:
        shapes = f"{tuple(h.shape)}, {tuple(w.shape)}, {tuple(y.shape)}"
        raise ValueError(f"h, w, y must be of shapes (N, D), (V, D), (N,), V, D > 0, not {shapes}")
    if bias is not None and bias.shape != (len(w),):
        raise ValueError(f"bias must be of shape ({len(w)},), not {tuple(bias.shape)}")
    if not (h.is_floating_point() and w.is_floating_point()) or y.dtype != torch.int64:
        raise TypeError(f"h and w must be floats and y int64, not {h.dtype}, {w.dtype}, {y.dtype}")
    if len(y) == 0:
        raise ValueError("y is empty: give at least one label, -100 where there is no loss")
    if type(chunk) is bool or not isinstance(chunk, Integral) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: give the rows of a chunk, an int of at least 1")
    if not isinstance(scale, Real):
        raise TypeError(f"logit_scale={scale!r}: give a number, 1.0 for no scale")
    capped = isinstance(softcap, Real) and 0 < float(softcap) < float("inf")
    if softcap is not None and not capped:
        raise ValueError(f"softcap={softcap!r}: give a finite positive number, or None for no cap")


def _divisor(items: Any, y: Tensor) -> Any:  # labels of the step, at least 1
    items = (y != -100).sum() if items is None else items
    if isinstance(items, Tensor) and items.numel() == 1:  # not read: that would wait for its card
        return items.reshape(()).clamp(min=1)
    possible = isinstance(items, Real) and 0 <= float(items) < float("inf")
    if type(items) is bool or not possible or (items == 0 and (y != -100).any()):
        raise ValueError(f"num_items_in_batch={items!r}: give the labels of the step, or None")
    return max(float(items), 1.0)


def fused_token_logprobs(
    h: Tensor, w: Tensor, y: Tensor, *, chunk=2048, bias=None, logit_scale=1.0, softcap=None
) -> Tensor:
    """Log-probability of each label, (N,), at least fp32, 0 where -100; what frugal builds on.

    h (N, D), w (V, D), y (N,) int64, bias (V,). A tile of words holds as many logits as `chunk`
    rows do. ValueError: shapes, y empty, chunk, softcap. TypeError: dtypes, logit_scale.
    """
    _check(h, w, y, bias, chunk, logit_scale, softcap)
    options = (y != -100).nonzero()[:, 0], int(chunk), logit_scale, softcap
    return _Recomputed.apply(h, w, y, bias, *options)


def fused_cross_entropy(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    chunk=None,
    bias=None,
    logit_scale=1.0,
    softcap=None,
    frugal=False,
    loss_type="nll",
    num_items_in_batch=None,
) -> Tensor:
    """Sum of -logp ("nll") or -p.detach() * logp ("dft") over labels / their number in the step.

    Shapes and errors as above; `chunk` None: 3072 rows, 4224 where D is at most 1024, 1024 with a
    frozen head, frugal 2048.
    The logits are softcap * tanh(z / softcap) of z = logit_scale * (h @ w.T + bias). ValueError,
    too: loss_type, num_items_in_batch.
    """
    if loss_type not in ("nll", "dft"):
        raise ValueError(f'loss_type={loss_type!r}: give "nll" or "dft"')
    if chunk is None:
        trained = 3072 if w.shape[-1] > 1024 else 4224  # as many bytes, with the fp32 gradient of w
        chunk = 2048 if frugal else trained if w.requires_grad else 1024
    _check(h, w, y, bias, chunk, logit_scale, softcap)
    divisor = _divisor(num_items_in_batch, y)
    options = (y != -100).nonzero()[:, 0], int(chunk), logit_scale, softcap
    if frugal:
        logp = _Recomputed.apply(h, w, y, bias, *options)
        total = -(logp if loss_type == "nll" else logp * logp.detach().exp()).sum()
    else:
        made = loss_type == "dft", torch.is_grad_enabled()
        total = _MadeInForward.apply(h, w, y, bias, *options, *made)
    return total / divisor
