"""What the tests of chunked heads share: made inputs, gradients, and a count of bytes."""

import weakref
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BAD_COUNTS = [  # labels of a step that can't be: change, error, what it says
    ({"num_items_in_batch": -3}, ValueError, "num_items_in_batch=-3: give the labels"),
    ({"num_items_in_batch": 0}, ValueError, "num_items_in_batch=0: give the labels"),
    ({"num_items_in_batch": "3"}, ValueError, "num_items_in_batch='3': give the labels"),
    ({"num_items_in_batch": True}, ValueError, "num_items_in_batch=True: give the labels"),
    ({"num_items_in_batch": float("inf")}, ValueError, "num_items_in_batch=inf: give the lab"),
    ({"num_items_in_batch": float("nan")}, ValueError, "num_items_in_batch=nan: give the lab"),
    ({"num_items_in_batch": torch.ones(2)}, ValueError, r"num_items_in_batch=tensor\(\[1., 1"),
]


def inputs(n=29, v=23, d=7, dtype=torch.float64, masked=0.3, seed=0, device="cpu"):
    """h (n, d), w (v, d), y (n,) and a bias (v,)."""
    rng = torch.Generator().manual_seed(seed)
    h, w, bias = (
        torch.randn(shape, generator=rng, dtype=torch.float64).to(device, dtype)
        for shape in ((n, d), (v, d), (v,))
    )
    y = torch.randint(v, (n,), generator=rng)
    y[torch.rand(n, generator=rng) < masked] = -100
    return h, w, y.to(device), bias


def run(loss, h, w, y, bias=None, *, times=1.0, forward_in=None, **options):
    """Value and gradients of times * loss: loss, dh, dw and, with a bias, dbias."""
    leaves = [t.detach().clone().requires_grad_() for t in (h, w, bias) if t is not None]
    options["bias"] = leaves[2] if len(leaves) > 2 else None
    with forward_in or nullcontext():
        value = loss(leaves[0], leaves[1], y, **options)
    (value * times).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(a, b, tol):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


def assert_autocast_changes_nothing(loss, **options):
    """Around the forward pass alone, as usual, and around both."""
    h, w, y, bias = inputs(dtype=torch.float32)
    given = (4 * h, w, y, bias)  # logits that bf16 rounds by much
    plain = run(loss, *given, **options)
    for dtype in (torch.bfloat16, torch.float16):
        around = torch.autocast("cpu", dtype)
        assert_same(run(loss, *given, forward_in=around, **options), plain, 0)
        with around:
            assert_same(run(loss, *given, **options), plain, 0)


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


def saved_tensors(node):
    """Tensors that a graph keeps, by its nodes' `saved_tensors` and `_saved_*` attributes."""
    found = [*getattr(node, "saved_tensors", ())]
    found += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    for parent, _ in node.next_functions:
        if parent is not None:
            found += saved_tensors(parent)
    return [t for t in found if torch.is_tensor(t)]
