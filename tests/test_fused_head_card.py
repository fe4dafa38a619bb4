"""On a card: the compiled kernels, 2^32 logits, and gradient errors of real vocabularies."""

import pytest
import torch
from fused_cases import (
    OPTIONS,
    TOLERANCES,
    check_all,
    check_extremes,
    check_kernels,
    errors,
)
from head_cases import Meter, run

from memlab.instruments.device import simulated_gpu
from memlab.techniques.chunked_loss import cross_entropy
from memlab.techniques.fused_head import fused_cross_entropy, fused_token_logprobs

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("frugal", [False, True], ids=["fast", "frugal"])


def drawn(n: int, v: int, d: int, *, masked: float = 0.0):
    """h (n, d), w (v, d), y (n,) in bf16, made on the card."""
    rng = torch.Generator("cuda").manual_seed(0)
    h, w = (torch.randn(size, d, generator=rng, device="cuda") for size in (n, v))
    y = torch.randint(v, (n,), generator=rng, device="cuda")
    y[torch.rand(n, generator=rng, device="cuda") < masked] = -100
    return h.bfloat16(), (w / d**0.5).bfloat16(), y


def test_compiled_kernels_equal_their_twins() -> None:
    whole = [(dtype, options) for dtype in TOLERANCES for options in OPTIONS]
    check_all("cuda", whole=whole)


@pytest.mark.parametrize("v", [32_768, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_compiled_kernels_take_the_vocabularies_in_use(v: int, softcap: float | None) -> None:
    check_kernels(torch.bfloat16, v, 1.0, softcap, "cuda")
    check_extremes(v, "cuda")


@MODES
@pytest.mark.parametrize(("n", "v"), [(2**20, 4096), (2**14, 2**18)])
def test_more_logits_than_32_bits_can_count(n: int, v: int, frugal: bool) -> None:
    h, w, y = drawn(n, v, 64)
    whole = run(fused_cross_entropy, h, w, y, chunk=n, frugal=frugal)
    parts = run(fused_cross_entropy, h, w, y, chunk=n // 64, frugal=frugal)
    assert max(errors(whole, [x.double() for x in parts])) < 2e-3
    for at in (slice(0, 64), slice(n - 64, n)):  # the first and the last rows, apart
        _, dh, _ = run(cross_entropy, h[at].double(), w.double(), y[at], num_items_in_batch=n)
        assert errors([whole[1][at]], [dh])[0] < 6e-3


@MODES
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(
    ("n", "v", "d", "masked"),
    [(4096, 151_936, 1024, 0.0), (4096, 151_936, 1024, 0.5), (2048, 262_144, 1152, 0.2)],
)
def test_gradients_are_as_exact_as_those_of_full_logits(
    n: int, v: int, d: int, masked: float, softcap: float | None, frugal: bool
) -> None:
    h, w, y = drawn(n, v, d, masked=masked)
    exact = run(cross_entropy, h.double(), w.double(), y, softcap=softcap)
    full = errors(run(cross_entropy, h, w, y, softcap=softcap), exact)
    fused = errors(run(fused_cross_entropy, h, w, y, softcap=softcap, frugal=frugal), exact)
    print(f"\nloss, dh, dw off: full logits {full}, fused {fused}")
    assert fused[0] <= 1.1 * full[0] + 1e-6
    for mine, theirs in zip(fused[1:], full[1:], strict=True):
        assert mine <= 1.1 * theirs


@MODES
def test_every_label_masked(frugal: bool) -> None:
    h, w, y = drawn(64, 1000, 32, masked=1.0)
    value, *grads = run(fused_cross_entropy, h, w, y, frugal=frugal)
    assert value == 0
    assert all(not g.any() for g in grads)


def test_token_logprobs_carry_any_gradient() -> None:
    h, w, y = drawn(3000, 50_000, 256, masked=0.3)
    rise = torch.linspace(-1, 2, len(y), device="cuda")

    def weighted(logprobs, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        logp = logprobs(*leaves, y)
        return [logp.detach(), *torch.autograd.grad((logp * rise).sum(), leaves)]

    def full(h, w, y):
        return -torch.nn.functional.cross_entropy((h @ w.T).double(), y, reduction="none")

    exact = weighted(full, h.double(), w.double())
    naive = errors(weighted(full, h, w), exact)
    for mine, theirs in zip(
        errors(weighted(fused_token_logprobs, h, w), exact), naive, strict=True
    ):
        assert mine <= 1.1 * theirs + 1e-6


@pytest.mark.parametrize("mode", ["fast", "frozen", "frugal"])
def test_peak_is_that_of_the_simulated_card(mode: str) -> None:
    n, v, d = 4096, 50_000, 1024

    def made(device: torch.device) -> list[torch.Tensor]:
        h, w = (torch.ones(m, d, dtype=torch.bfloat16, device=device) for m in (n, v))
        y = torch.where(torch.arange(n) % 3 == 0, -100, 7).to(device)
        return [h.requires_grad_(), w.requires_grad_(mode != "frozen"), y]

    def step(h, w, y) -> None:
        h.grad = w.grad = None
        fused_cross_entropy(h, w, y, chunk=512, frugal=mode == "frugal").backward()

    with simulated_gpu() as gpu:
        tensors = made(gpu)
        with Meter(*tensors) as meter:
            step(*tensors)
    tensors = made(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    step(*tensors)
    workspaces = torch.cuda.memory_allocated() - before
    workspaces -= sum(t.grad.untyped_storage().nbytes() for t in tensors if t.grad is not None)
    torch.cuda.reset_peak_memory_stats()
    step(*tensors)
    peak = torch.cuda.max_memory_allocated() - before - workspaces
    assert abs(peak - meter.peak) <= 2**20
