"""Chunked log-probabilities: what preference and policy losses need of the logits, not the logits.

Computes  log p(y) of each row, for DPO, KTO, GRPO or RLOO; entropy and top-1 hit on request
Without   the (N, V) logits: C rows at a time, 2**24 logits of them in fp32; -100 rows never
Memory    bytes kept for backward, bf16: 4*N*V + 2*(N+V)*D + 8*N -> 2*(N+V)*D + 8*N + 8*n
          (n rows are labelled). Peak above h, w, y, the result, dh, dw, with
          X = 2*C*V + 12*min(C*V, 2**24), dw being summed in fp32:
          12*N*V -> max(X, 2*V*D) + 2*V*D + 2*C*D + 8*n
          (n <= C or a frozen head: X + 2*C*D + 8*n); 12 is 16 with a softcap
Use       logp = token_logprobs(hidden.flatten(0, 1), head.weight, labels.flatten())
          logp.sum().backward()  # labels[b, t] is the word that follows hidden[b, t]
Price     the logits product runs once more, in backward: four products, full logits take three
Source    Chen et al. 2016, Sublinear Memory Cost; Wijmans et al. 2024, Cut Your Losses; TRL's docs
Unlike    TRL's: plain torch, a chunk's logits stay in the head's dtype, and h goes to it, so that
          an fp32 head under bf16 hidden states is never copied. Apache-2.0; torch 2.11 to 2.13
"""

from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE = 2**24  # logits of a chunk in fp32 at once, with what autograd keeps of them


def _logits(h, w, bias) -> Tensor:  # (C, D), (V, D), (V,) -> (C, V), in the head's dtype
    return F.linear(h.to(w.dtype), w, None if bias is None else bias.to(w.dtype))


def _parts(z, *columns) -> list[tuple[Tensor, ...]]:  # (C, V), (C,): of S rows, so many at once
    return [x.split(max(1, WIDE // z.shape[1])) for x in (z, *columns)]


def _of_logits(z, y, scale, softcap, stats=False) -> tuple[Tensor, ...]:  # (S, V), (S,) -> (S,)
    x = z.to(torch.promote_types(z.dtype, torch.float32))
    x = x if scale == 1 else x * scale
    x = x if softcap is None else (x / softcap).tanh() * softcap
    logp = -F.cross_entropy(x, y, reduction="none")
    return (logp, torch.special.entr(x.softmax(1)).sum(1), z.argmax(1) == y) if stats else (logp,)


def _add_product(total, a, b) -> None:  # total += a @ b, every sum in total's dtype
    if a.dtype == total.dtype or a.device.type in ("cpu", "mps"):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:  # an accelerator's product sums bf16 into fp32 without copies
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _ByChunks(torch.autograd.Function):  # autocast around changes no dtype inside
    @staticmethod
    def forward(ctx, h, w, y, bias, rows, chunk, scale, softcap, stats):
        found = []
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at in rows.split(chunk):
                z = _logits(h[at], w, bias)
                for z_s, y_s in zip(*_parts(z, y[at]), strict=True):
                    found.append(_of_logits(z_s, y_s, scale, softcap, stats))
                del z, z_s  # or they would be alive beside the next chunk's
        columns = [torch.cat(values) for values in zip(*found, strict=True)]
        columns = [v.new_zeros(len(y)).index_copy_(0, rows, v) for v in columns]
        ctx.save_for_backward(h, w, y, bias, rows)
        ctx.options = chunk, scale, softcap
        ctx.mark_non_differentiable(*columns[1:])
        return tuple(columns)

    @staticmethod
    def backward(ctx, g, *_):  # (N,)
        if torch.is_grad_enabled():  # what is below would be differentiated, and wrongly
            raise RuntimeError("create_graph=True: no second derivatives; take full_token_logprobs")
        (h, w, y, bias, rows), (chunk, *options) = ctx.saved_tensors, ctx.options
        wide = torch.promote_types(w.dtype, torch.float32)
        wide_dw = w.dtype if len(rows) <= chunk else wide  # chunks add up in fp32
        dh = torch.zeros_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=wide_dw) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[3] else None
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at in rows.split(chunk):
                h_c = h[at].to(w.dtype)
                z = _logits(h_c, w, bias)
                for z_s, y_s, g_s in zip(*_parts(z, y[at], g[at]), strict=True):
                    with torch.enable_grad():  # logits become their gradient
                        x = z_s.detach().requires_grad_()
                        z_s.copy_(torch.autograd.grad(_of_logits(x, y_s, *options), x, g_s)[0])
                if dh is not None:
                    dh[at] = (z @ w).to(h.dtype)
                if dw is not None:
                    _add_product(dw, z.T, h_c)
                if db is not None:
                    db += z.sum(0, dtype=db.dtype)
                del z, z_s, x
        dw, db = dw if dw is None else dw.to(w.dtype), db if db is None else db.to(bias.dtype)
        return dh, dw, None, db, None, None, None, None, None


def _check(h: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, scale, softcap, chunk) -> None:
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


def _by_chunks(h, w, y, bias, scale, softcap, chunk, *, stats) -> tuple[Tensor, ...]:
    _check(h, w, y, bias, scale, softcap, chunk)
    rows = (y != -100).nonzero()[:, 0]
    return _ByChunks.apply(h, w, y, bias, rows, min(int(chunk), len(y)), scale, softcap, stats)


def token_logprobs(
    h: Tensor, w: Tensor, y: Tensor, *, bias=None, logit_scale=1.0, softcap=None, chunk=1024
) -> Tensor:
    """Log-probability of each label (N,), at least fp32, 0 where -100; for any gradient a token.

    h (N, D), w (V, D), y (N,) int64, bias (V,). The logits are softcap * tanh(z / softcap) of
    z = logit_scale * (h @ w.T + bias). ValueError: shapes, y empty, chunk, softcap. TypeError:
    dtypes.
    """
    return _by_chunks(h, w, y, bias, logit_scale, softcap, chunk, stats=False)[0]


def token_stats(
    h: Tensor, w: Tensor, y: Tensor, *, bias=None, logit_scale=1.0, softcap=None, chunk=1024
) -> tuple[Tensor, ...]:
    """Log-probability, entropy (nats) and top-1 hit (bool) of each label, all (N,), 0 where -100.

    The last two carry no gradient. Arguments, ValueError and TypeError as for `token_logprobs`.
    """
    return _by_chunks(h, w, y, bias, logit_scale, softcap, chunk, stats=True)


def full_token_logprobs(
    h: Tensor, w: Tensor, y: Tensor, *, bias=None, logit_scale=1.0, softcap=None, chunk=1024
) -> Tensor:
    """The same, errors too, of all logits, whatever `chunk`; NaN in -100 rows reaches gradients."""
    _check(h, w, y, bias, logit_scale, softcap, chunk)
    return _of_logits(_logits(h, w, bias), y, logit_scale, softcap)[0]
