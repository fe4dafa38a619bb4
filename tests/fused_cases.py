"""What the fused head's tests share: inputs, one step, and the kernels beside their torch twins.

`python fused_cases.py` compares kernels and twins on the CPU, in Triton's interpreter. It must be
chosen before triton is imported: TRITON_INTERPRET=1.
"""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.techniques import fused_head
from memlab.techniques.chunked_loss import cross_entropy
from memlab.techniques.fused_head import fused_cross_entropy

OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "dft"},
    {"logit_scale": 0.25},
    {"softcap": 2.0},
    {"softcap": 3.0, "logit_scale": 1.7, "loss_type": "dft", "num_items_in_batch": 50},
    {"num_items_in_batch": torch.tensor(41)},
]
# of a gradient that a kernel wrote and its twin's
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def inputs(
    n: int = 29,
    v: int = 23,
    d: int = 7,
    dtype: torch.dtype = torch.float64,
    *,
    masked: float = 0.3,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h (n, d), w (v, d), y (n,) and a bias (v,)."""
    rng = torch.Generator().manual_seed(0)
    h, w, bias = (
        torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype)
        for shape in ((n, d), (v, d), (v,))
    )
    y = torch.randint(v, (n,), generator=rng)
    y[torch.rand(n, generator=rng) < masked] = -100
    return h, w, y.to(device), bias


def run(
    loss: Callable[..., Tensor],
    h: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    times: float = 1.0,
    **options: Any,
) -> list[Tensor]:
    """Value and gradients of times * loss: loss, dh, dw and, with a bias, dbias."""
    leaves = [t.detach().clone().requires_grad_() for t in (h, w, bias) if t is not None]
    value = loss(leaves[0], leaves[1], y, bias=leaves[2] if len(leaves) > 2 else None, **options)
    (value * times).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|x - exact| / |exact| of each."""
    return [float((x.double() - e).norm() / e.norm()) for x, e in zip(found, exact, strict=True)]


def assert_same(a: list[Tensor], b: list[Tensor], tol: float) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


def rounded(nbytes):
    return -(-nbytes // 512) * 512


class Meter(TorchDispatchMode):
    """Live and peak bytes of the storages born inside, each rounded up to 512 B."""

    def __init__(self, *before):
        super().__init__()
        self.live = self.peak = 0
        self.seen = weakref.WeakSet(t.untyped_storage() for t in before)

    def _drop(self, nbytes):
        self.live -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in {t.untyped_storage() for t in tree_leaves(out) if torch.is_tensor(t)}:
            if storage not in self.seen:
                self.seen.add(storage)
                nbytes = rounded(storage.nbytes())
                self.live += nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, nbytes)
        return out

    def __enter__(self):
        self.threads = torch.autograd.set_multithreading_enabled(False)  # else backward is unseen
        return super().__enter__()

    def __exit__(self, *exc):
        self.threads.__exit__(*exc)
        return super().__exit__(*exc)


def check_kernels(dtype: torch.dtype, v: int, scale: float, softcap: float | None, device: str):
    """Both kernels equal their twins, for words inside and outside the tile."""
    rng = torch.Generator().manual_seed(v)
    z = (4 * torch.randn(5, v, generator=rng)).to(device, dtype)
    first = 300
    y = torch.tensor([first, first + v - 1, 0, first + v, first + v // 2], device=device)
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], device=device)
    sums = fused_head.sums_torch(z, y, first, scale, softcap)
    torch.testing.assert_close(fused_head.sums_triton(z, y, first, scale, softcap), sums)
    mine, twin = z.clone(), z.clone()
    rest = (y, sums[1], weight, first, scale, softcap)
    fused_head.to_gradient_triton(mine, *rest)
    fused_head.to_gradient_torch(twin, *rest)
    torch.testing.assert_close(mine, twin, rtol=TOLERANCES[dtype], atol=5e-6)
    assert not mine[4].any()
    inside = (y >= first) & (y < first + v)
    hit = mine[inside, (y - first)[inside]].float() * weight[inside].sign()
    assert (hit <= 1e-5).all()  # p - 1


def check_extremes(v: int, device: str) -> None:
    """Rows of -inf, huge and NaN logits."""
    z = torch.zeros(4, v)
    z[0] = -float("inf")  # all words but one are ruled out, the first block whole
    z[0, v - 1] = 3.0
    z[1, 0], z[1, 1:] = 3e4, -3e4
    z[2, v - 1] = float("nan")
    z[3] = -1e30
    z = z.to(device)
    y, ones = torch.tensor([v - 1, 0, 0, 3], device=device), torch.ones(4, device=device)
    mine = fused_head.sums_triton(z, y, 0, 1.0, None)
    torch.testing.assert_close(mine, fused_head.sums_torch(z, y, 0, 1.0, None), equal_nan=True)
    twin = z.clone()
    fused_head.to_gradient_triton(z, y, mine[1], ones, 0, 1.0, None)
    fused_head.to_gradient_torch(twin, y, mine[1], ones, 0, 1.0, None)
    torch.testing.assert_close(z, twin, equal_nan=True)


def check_whole_loss(
    dtype: torch.dtype, options: dict[str, Any], frugal: bool, device: str
) -> None:
    """The loss through the kernels is the loss through their twins, or in half precision as far
    from fp64."""
    h, w, y, bias = inputs(37, 5003, 16, dtype, masked=0.4, device=device)
    h, w, found = h * 0.5, w * 0.5, {}
    for kind in ("triton", "torch"):
        with mock.patch.object(fused_head, "_kind", return_value=kind) as asked:
            options_of = {"chunk": 9, "frugal": frugal, **options}
            found[kind] = run(fused_cross_entropy, h, w, y, bias, **options_of)
            assert asked.called
    exact = run(cross_entropy, h.double(), w.double(), y, bias.double(), **options)
    if dtype == torch.float32:
        assert_same(found["triton"], found["torch"], 1e-5)
        assert max(errors(found["triton"], exact)) < 3e-6
    else:
        for mine, twin in zip(*(errors(x, exact) for x in found.values()), strict=True):
            assert mine <= 1.02 * twin + 1e-6


def check_all(device: str, *, whole: list[tuple[torch.dtype, dict]]) -> None:
    """Kernels, extremes, and the whole loss for the (dtype, options) of `whole`, in both modes."""
    for dtype in TOLERANCES:
        for v in (1, 7, 130, 4097, 9001):
            for scale, softcap in ((0.3, None), (1.7, 5.0)):
                check_kernels(dtype, v, scale, softcap, device)
    for v in (4096 + 11, 12):
        check_extremes(v, device)
    for dtype, options in whole:
        for frugal in (False, True):
            check_whole_loss(dtype, options, frugal, device)


if __name__ == "__main__":
    # not bf16: the interpreter rounds it towards 0, a card to the nearest
    check_all("cpu", whole=[(torch.float32, OPTIONS[4]), (torch.float16, OPTIONS[0])])
    print("kernels equal their twins")
