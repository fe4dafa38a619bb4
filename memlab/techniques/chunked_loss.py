"""Chunked linear cross-entropy: never hold all the logits.

Computes  F.cross_entropy((h @ w.T).float(), y) over the n labels that are not -100, or its dft form
Without   the (N, V) logits: C rows of them at a time, once more in backward; -100 rows never
Memory    bytes kept for backward, bf16: 4*N*V + 2*(N+V)*D + 8*N -> 2*(N+V)*D + 8*N + 12*n
          (dft 4*N more; scalars: the loss, the number of labels). Peak above h, w, y, dh, dw:
          12*N*V -> max(6*C*V, 2*V*D) + 2*V*D + 2*C*D + 12*n, dw being summed in fp32
          (n <= C or a frozen head: 6*C*V + 2*C*D + 12*n; softcap: 4*C*V more)
Use       loss = chunked_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())
          loss.backward()  # labels[b, t] is the word that follows hidden[b, t]
Price     the logits product runs once more, in backward: four products, full logits take three
Source    Chen et al. 2016, Sublinear Memory Cost; Wijmans et al. 2024, Cut Your Losses; TRL's docs
Unlike    TRL's fused head: plain torch, chunks of rows only, and h goes to the head's dtype, so
          that an fp32 head under bf16 hidden states is never copied. Apache-2.0; torch 2.11 to 2.13
"""

from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import Tensor


def _logits(h, w, bias, scale, softcap) -> Tensor:  # (C, D), (V, D), (V,) -> (C, V), fp32 at least
    z = F.linear(h.to(w.dtype), w, None if bias is None else bias.to(w.dtype))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if scale == 1 else z.mul_(scale)
    return z if softcap is None else z.div_(softcap).tanh_() * softcap


def _add_product(total, a, b) -> None:  # total += a @ b, every sum in total's dtype
    if a.dtype == total.dtype or a.device.type in ("cpu", "mps"):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:  # an accelerator's product sums bf16 into fp32 without copies
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _TokenLogprobs(torch.autograd.Function):  # autocast around changes no dtype inside
    @staticmethod
    def forward(ctx, h, w, y, bias, rows, chunk, scale, softcap):
        logp = h.new_zeros(len(y), dtype=torch.promote_types(w.dtype, torch.float32))
        log_sum = logp.new_empty(len(rows))  # log of the sum of exp(logits), for backward
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at, log_sum_c in zip(rows.split(chunk), log_sum.split(chunk), strict=True):
                z = _logits(h[at], w, bias, scale, softcap)
                top, label = z.amax(1), z.gather(1, y[at, None])[:, 0]
                log_total = z.sub_(top[:, None]).exp_().sum(1).log()
                logp[at] = label - top - log_total
                log_sum_c.copy_(top + log_total)
                del z  # or it would be alive beside the next chunk's
        ctx.save_for_backward(h, w, y, bias, rows, log_sum)
        ctx.options = chunk, scale, softcap
        ctx.set_materialize_grads(False)
        return logp

    @staticmethod
    def backward(ctx, g):  # (N,)
        if torch.is_grad_enabled():  # what is below would be differentiated, and wrongly
            raise RuntimeError("create_graph=True: no second derivatives; take cross_entropy")
        if g is None:
            return (None,) * 8
        (h, w, y, bias, rows, log_sum), (chunk, scale, softcap) = ctx.saved_tensors, ctx.options
        wide = w.dtype if len(rows) <= chunk else log_sum.dtype  # chunks add up in fp32
        dh = torch.zeros_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=wide) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias, dtype=log_sum.dtype) if ctx.needs_input_grad[3] else None
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at, log_sum_c in zip(rows.split(chunk), log_sum.split(chunk), strict=True):
                h_c = h[at].to(w.dtype)
                z = _logits(h_c, w, bias, scale, softcap)
                slope = -1 if softcap is None else (z / softcap).square_().sub_(1)
                dz = z.sub_(log_sum_c[:, None]).exp_()
                dz[torch.arange(len(at), device=at.device), y[at]] -= 1
                dz = dz.mul_(slope).mul_(g[at, None] * scale).to(w.dtype)
                del z, slope
                if dh is not None:
                    dh[at] = (dz @ w).to(h.dtype)
                if dw is not None:
                    _add_product(dw, dz.T, h_c)
                if db is not None:
                    db += dz.sum(0, dtype=db.dtype)
                del dz
        dw, db = dw if dw is None else dw.to(w.dtype), db if db is None else db.to(bias.dtype)
        return dh, dw, None, db, None, None, None, None


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


def token_loss(logp: Tensor, y: Tensor, *, loss_type="nll", num_items_in_batch=None) -> Tensor:
    """Sum of -logp ("nll") or -p.detach() * logp ("dft") over labels / their number in the step.

    ValueError: loss_type, and a number of labels that can't be; a tensor is not read, one would
    wait for its card.
    """
    if loss_type not in ("nll", "dft"):
        raise ValueError(f'loss_type={loss_type!r}: give "nll" or "dft"')
    items = (y != -100).sum() if num_items_in_batch is None else num_items_in_batch
    total = (logp if loss_type == "nll" else logp * logp.detach().exp()).sum()
    if isinstance(items, Tensor) and items.numel() == 1:
        return -total / items.reshape(()).clamp(min=1)
    possible = isinstance(items, Real) and 0 <= float(items) < float("inf")
    if type(items) is bool or not possible or (items == 0 and (y != -100).any()):
        raise ValueError(f"num_items_in_batch={items!r}: give the labels of the step, or None")
    return -total / max(float(items), 1.0)


def chunked_cross_entropy(
    h: Tensor, w: Tensor, y: Tensor, *, chunk=1024, bias=None, logit_scale=1.0, softcap=None, **loss
) -> Tensor:
    """Loss of a step, at least fp32, of the log-probability of each label.

    h (N, D), w (V, D), y (N,) int64, bias (V,); `loss`: the options of token_loss. The logits are
    softcap * tanh(z / softcap) of z = logit_scale * (h @ w.T + bias). ValueError: shapes, y empty,
    chunk, softcap, loss_type. TypeError: dtypes.
    """
    _check(h, w, y, bias, logit_scale, softcap, chunk)
    rows = (y != -100).nonzero()[:, 0]
    logp = _TokenLogprobs.apply(h, w, y, bias, rows, min(int(chunk), len(y)), logit_scale, softcap)
    return token_loss(logp, y, **loss)


def cross_entropy(
    h: Tensor, w: Tensor, y: Tensor, *, chunk=1024, bias=None, logit_scale=1.0, softcap=None, **loss
) -> Tensor:
    """The same from all the logits at once, whatever `chunk`: what it costs to keep them.

    ValueError, TypeError: as chunked_cross_entropy. NaN in a row of -100 reaches the gradients.
    """
    _check(h, w, y, bias, logit_scale, softcap, chunk)
    z = _logits(h, w, bias, logit_scale, softcap)
    return token_loss(-F.cross_entropy(z, y, reduction="none"), y, **loss)
