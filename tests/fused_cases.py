"""What the fused head's tests share: inputs, one step, and the kernels beside their torch twins.

`python fused_cases.py` compares kernels and twins on the CPU, in Triton's interpreter. It must be
chosen before triton is imported: TRITON_INTERPRET=1.
"""

from typing import Any
from unittest import mock

import torch
from head_cases import assert_same, inputs, run
from torch import Tensor

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


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|x - exact| / |exact| of each."""
    return [float((x.double() - e).norm() / e.norm()) for x, e in zip(found, exact, strict=True)]


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
