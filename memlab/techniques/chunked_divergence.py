"""Chunked divergence of two models' words: the loss of distillation, without their logits.

Computes  the mean of the generalized JSD over a step's labels (beta 0: KL(teacher || student))
Without   both (N, V) of logits: C rows at a time, 2**24 logits of them in fp32; -100 rows never
Memory    kept for backward, bf16, H = 2*(N+V)*D of both models: 24*N*V + H -> H + 8*n
          (n rows are labelled). Peak above H, y, dh, dw, with X = 4*C*V + 36*min(C*V, 2**24):
          40*N*V -> max(X, 2*V*D) + 2*V*D + 2*C*D + 8*n, dw being summed in fp32 (n <= C or a frozen
          head: X + 2*C*D + 8*n); 36 is 20 where beta is 0 or 1; 40 and 24 with a softcap
Use       divergence(h, w, y, teacher={"h": h_t, "w": w_t}).backward()  # only of h, w, bias
Price     both logits products run once more, in backward: six products, full logits take four
Source    Agarwal et al. 2023 (arXiv 2306.13649), eq. 1; Chen et al. 2016, Sublinear Memory Cost
Unlike    TRL's: takes hidden states of any widths, sums dw in fp32. Apache-2.0; torch 2.11 to 2.13
"""

import math
from numbers import Integral, Real

import torch
from torch import Tensor

WIDE = 2**24  # logits of a chunk in fp32 at once, with what autograd keeps of them


def _logits(h, w, bias) -> Tensor:  # (C, D), (V, D), (V,) -> (C, V), in the head's dtype
    return torch.nn.functional.linear(h.to(w.dtype), w, None if bias is None else bias.to(w.dtype))


def _log_softmax(z, scale, softcap) -> Tensor:  # (S, V) -> (S, V), at least fp32
    x = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    x = x if softcap is None else (x / softcap).tanh() * softcap
    x.detach().clamp_(min=x.detach().amax(1, keepdim=True) - 1e30)  # -inf: 0 * log(0) is 0
    return x.log_softmax(1)


def _of_logits(z, z_teacher, student, teacher, beta) -> Tensor:  # (S, V), (S, V) -> (S,)
    q, p = _log_softmax(z, *student), _log_softmax(z_teacher, *teacher)
    if beta in (0, 1):
        return (p.exp() * (p - q)).sum(1) if beta == 0 else (q.exp() * (q - p)).sum(1)
    m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * (p.exp() * (p - m)).sum(1) + (1 - beta) * (q.exp() * (q - m)).sum(1)


def _add_product(total, a, b) -> None:  # total += a @ b, every sum in total's dtype
    if a.dtype == total.dtype or a.device.type in ("cpu", "mps"):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:  # an accelerator's product sums bf16 into fp32 without copies
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _ByChunks(torch.autograd.Function):  # autocast around changes no dtype inside
    @staticmethod
    def forward(ctx, h, w, bias, rows, h_t, w_t, bias_t, chunk, s, options):
        ctx.save_for_backward(h, w, bias, rows, h_t, w_t, bias_t)
        ctx.options, found = (chunk, s, options), []
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at in rows.split(chunk):
                z, z_teacher = _logits(h[at], w, bias), _logits(h_t[at], w_t, bias_t)
                for part in zip(z.split(s), z_teacher.split(s), strict=True):
                    found.append(_of_logits(*part, *options).sum())
                del z, z_teacher, part  # or they would be alive beside the next chunk's
        return torch.stack(found).sum()

    @staticmethod
    def backward(ctx, g):  # ()
        if torch.is_grad_enabled():  # what is below would be differentiated, and wrongly
            raise RuntimeError("create_graph=True: no second derivatives; take full_divergence")
        (h, w, bias, rows, *teacher), (chunk, s, options) = ctx.saved_tensors, ctx.options
        wide = torch.promote_types(w.dtype, torch.float32)
        wide_dw = w.dtype if len(rows) <= chunk else wide  # chunks add up in fp32
        dh = torch.zeros_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=wide_dw) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
            for at in rows.split(chunk):
                h_c = h[at].to(w.dtype)
                z, z_teacher = _logits(h_c, w, bias), _logits(teacher[0][at], *teacher[1:])
                for z_s, z_t in zip(z.split(s), z_teacher.split(s), strict=True):
                    with torch.enable_grad():  # logits become their gradient
                        leaf = z_s.detach().requires_grad_()
                        total = _of_logits(leaf, z_t, *options).sum()
                        z_s.copy_(torch.autograd.grad(total, leaf, g)[0])
                del z_teacher, z_t
                if dh is not None:
                    dh[at] = (z @ w).to(h.dtype)
                if dw is not None:
                    _add_product(dw, z.T, h_c)
                if db is not None:
                    db += z.sum(0, dtype=db.dtype)
                del z, z_s, leaf, total
        dw, db = dw if dw is None else dw.to(w.dtype), db if db is None else db.to(bias.dtype)
        return dh, dw, db, *[None] * 7


def _head(who, y, temperature, h, w, bias=None, logit_scale=1.0, softcap=None):
    if w.ndim != 2 or y.ndim != 1 or h.shape != (len(y), w.shape[1]) or 0 in h.shape + w.shape:
        shapes = f"{tuple(h.shape)}, {tuple(w.shape)}, {tuple(y.shape)}"
        raise ValueError(f"{who}: h, w, y must be (N, D), (V, D), (N,), all above 0, not {shapes}")
    if bias is not None and bias.shape != (len(w),):
        raise ValueError(f"{who}: bias must be of shape ({len(w)},), not {tuple(bias.shape)}")
    if not (h.is_floating_point() and w.is_floating_point()) or y.dtype != torch.int64:
        raise TypeError(f"h and w must be floats and y int64, not {h.dtype}, {w.dtype}, {y.dtype}")
    capped = softcap is None or (isinstance(softcap, Real) and 0 < float(softcap) < math.inf)
    if not capped or not isinstance(logit_scale, Real):
        raise ValueError(f"{who}: {softcap=}, {logit_scale=}: give numbers, softcap finite above 0")
    return (h, w, bias), (logit_scale / temperature, softcap and softcap / temperature)


def _heads(h, w, y, head, teacher, beta, temperature, chunk):
    kinds = all(map(isinstance, (beta, temperature, chunk), (Real, Real, Integral)))
    if not kinds or not (0 <= beta <= 1 and temperature > 0 and chunk > 0) or chunk is True:
        raise ValueError(f"{beta=}, {temperature=}, {chunk=}: give 0 to 1, above 0, an int above 0")
    student, of_student = _head("student", y, temperature, h, w, **head)
    other, of_teacher = _head("teacher", y, temperature, **teacher)
    if len(w) != len(other[1]):
        raise ValueError(f"teacher: {len(other[1])} words, student: {len(w)}; give one vocabulary")
    return student, other, (of_student, of_teacher, beta)


def _divided(total, y, items) -> Tensor:
    items = (y != -100).sum() if items is None else items
    if isinstance(items, Tensor) and items.numel() == 1:
        return total / items.reshape(()).clamp(min=1)
    possible = isinstance(items, Real) and 0 <= float(items) < math.inf
    if type(items) is bool or not possible or (items == 0 and (y != -100).any()):
        raise ValueError(f"num_items_in_batch={items!r}: give the labels of the step, or None")
    return total / max(float(items), 1.0)


def divergence(
    h, w, y, *, teacher, num_items_in_batch=None, beta=0.5, temperature=1.0, chunk=1024, **head
) -> Tensor:
    """Sum over labelled rows / `num_items_in_batch` of the step (None: these), at least fp32.

    Student: h (N, D), w (V, D) and as `head` bias (V,), logit_scale, softcap, which make the logits
    softcap * tanh(z / softcap) of z = logit_scale * (h @ w.T + bias); `teacher` has its own by
    these names, its D may differ. y (N,) int64: only -100 matters. ValueError, TypeError: inputs.
    """
    student, other, options = _heads(h, w, y, head, teacher, beta, temperature, chunk)
    sizes = min(int(chunk), len(y)), max(1, WIDE // len(w))
    total = _ByChunks.apply(*student, (y != -100).nonzero()[:, 0], *other, *sizes, options)
    return _divided(total, y, num_items_in_batch)


def full_divergence(
    h, w, y, *, teacher, num_items_in_batch=None, beta=0.5, temperature=1.0, chunk=1024, **head
) -> Tensor:
    """The same, errors too, of all logits, whatever `chunk`; NaN in -100 rows reaches gradients."""
    student, other, options = _heads(h, w, y, head, teacher, beta, temperature, chunk)
    rows = _of_logits(_logits(*student), _logits(*other).detach(), *options)
    return _divided(torch.where(y != -100, rows, 0.0).sum(), y, num_items_in_batch)
