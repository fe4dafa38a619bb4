"""Liger's layer kernels and its fused cross-entropy, for one model, undone afterwards.

Computes   RMSNorm, RoPE and SwiGLU (Gemma: GEGLU) by one Triton kernel each, and the cross-entropy
           of h @ w.T a chunk of rows at a time, its gradients made in the forward pass
Instead of operations that each keep what they read, and all the logits
Memory     bytes kept for backward a token, bf16: RMSNorm of D 6*D + 4 -> 2*D + 4 (its input, which
           a residual holds anyway); SwiGLU of F 8*F -> 6*F; RoPE: none either way, but it turns q
           and k where they are. Head: 4*N*V + 2*(N+V)*D -> 2*(N+V)*D, peak above those 12*N*V ->
           2*C*V, C = N / ceil(V / D) rounded up to a power of 2
Use        with liger.kernels(model): loss = liger.cross_entropy(hidden, head.weight, labels)
Price      backward overwrites what was kept: once only; dw is summed in w's dtype
Source     Hsu et al. 2024, arXiv 2410.10989; liger-kernel 0.8.5
Unlike     apply_liger_kernel_to_*, which set names in transformers' modules, so that later models
           get them too: this gives the layers of one model another `forward`, no class or module.
           Apache-2.0; transformers 5.17 to 5.24
"""

import inspect
import os
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2")  # how those of their classes begin
FAMILIES = {name.lower(): name for name in NAMES}  # by transformers' model_type
PLACES = ("cuda", "gpu", "meta")  # "gpu" is a simulated card


@contextmanager
def kernels(
    model: nn.Module, *, rms_norm: bool = True, rope: bool = True, swiglu: bool = True
) -> Iterator[None]:
    """Inside, the layers of this transformers model, peft-wrapped or not, run by Liger's kernels.

    No other model's do, and afterwards, an error included, its own no longer do either. Raises
    ValueError for an architecture or activation they don't compute, and on a CPU; ImportError
    without liger-kernel and triton.
    """
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise _refusal(f"of {family!r}", f"a transformers model of {', '.join(FAMILIES)}")
    gemma = family == "gemma2"
    activation = config.hidden_activation if gemma else config.hidden_act
    if swiglu and activation != ("gelu_pytorch_tanh" if gemma else "silu"):
        raise _refusal(f"with the activation {activation!r}", "swiglu=False")
    _check_device(next(model.parameters()))
    kinds = {"RMSNorm": (rms_norm, _norm), "Attention": (rope, _rotating), "MLP": (swiglu, _gated)}
    names = {FAMILIES[family] + k: make for k, (wanted, make) in kinds.items() if wanted}
    found = [module for module in model.modules() if type(module).__name__ in names]
    if missing := names.keys() - {type(module).__name__ for module in found}:
        raise _refusal(f"without layers called {', '.join(sorted(missing))}", "another model")
    with ExitStack() as undo:
        for module in found:
            forward, own = names[type(module).__name__](type(module), gemma), vars(module)
            if "forward" in own:
                undo.callback(own.update, forward=own["forward"])
            else:
                undo.callback(own.pop, "forward")
            own["forward"] = types.MethodType(forward, module)
        yield


def _norm(kind: type[nn.Module], gemma: bool) -> Callable[..., Tensor]:
    options = (1.0, "gemma", False) if gemma else (0.0, "llama", True)  # offset, casts, in place

    def forward(module: Any, x: Tensor) -> Tensor:
        eps = module.eps if gemma else module.variance_epsilon
        return _ops(x.device).LigerRMSNormFunction.apply(x, module.weight, eps, *options)

    return forward


def _gated(kind: type[nn.Module], gemma: bool) -> Callable[..., Tensor]:
    function = load()[0].LigerGELUMulFunction if gemma else load()[0].LigerSiLUMulFunction

    def forward(module: Any, x: Tensor) -> Tensor:
        return module.down_proj(function.apply(module.gate_proj(x), module.up_proj(x)))

    return forward


def _rotating(kind: type[nn.Module], gemma: bool) -> Callable[..., Any]:
    """The class's own forward, which finds Liger's function under the global name of RoPE's."""
    own: Any = inspect.unwrap(kind.forward)
    if "apply_rotary_pos_emb" not in own.__code__.co_names:
        raise _refusal(f"with a {kind.__name__} that calls no apply_rotary_pos_emb", "rope=False")
    names = own.__globals__ | {"apply_rotary_pos_emb": load()[0].LigerRopeFunction.apply}
    return types.FunctionType(own.__code__, names, None, own.__defaults__, own.__closure__)


def cross_entropy(
    h, w, y, *, bias=None, logit_scale=1.0, softcap=None, num_items_in_batch=None
) -> Tensor:  # h (N, D), w (V, D), y (N,) int64, -100 where there is no loss, bias (V,)
    """Sum of -log p(label) / the step's labels (None: these); fp32. ValueError, ImportError."""
    if logit_scale != 1:
        raise _refusal(f"with {logit_scale=}", "a model without one")
    if softcap is not None and (isinstance(softcap, str) or not softcap > 0):
        raise ValueError(f"{softcap=}: give a positive number, or None for no cap")
    n: Any = num_items_in_batch
    number = not isinstance(n, Tensor | None)
    if number and (isinstance(n, bool | str) or n < 0 or (n == 0 and (y != -100).any())):
        raise ValueError(f"{num_items_in_batch=}: give the labels of the step, or None")
    _check_device(h)
    options = (bias, None, -100, 0.0, 0.0, "sum", softcap)
    total = _ops(h.device).LigerFusedLinearCrossEntropyFunction.apply(h, w, y, *options)[0]
    count = (y != -100).sum() if n is None else n
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _refusal(what: str, instead: str) -> ValueError:
    said = f"use_liger_kernel=True {what}: Liger's kernels don't do it here"
    return ValueError(f"{said}; give use_liger_kernel=False, or {instead}")


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type not in PLACES and os.environ.get("TRITON_INTERPRET") != "1":
        raise _refusal(f"on {tensor.device.type!r}", "a CUDA card or a simulated one")


@cache
def load() -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Liger's operators, and functions of its that ask for "cuda" (`_codes`). Allocates once.
    Raises ImportError without liger-kernel."""
    try:
        from liger_kernel import ops
        from liger_kernel.ops import fused_linear_cross_entropy, rms_norm
    except ImportError as error:
        needed = "liger-kernel and triton, which only Linux has: install them"
        raise ImportError(f"use_liger_kernel=True needs {needed}, or give False") from error
    modules = fused_linear_cross_entropy, rms_norm
    found = [f for m in modules for f in vars(m).values() if inspect.isfunction(f)]
    return ops, [_codes(f) for f in found if f.__module__ in {m.__name__ for m in modules}]


def _codes(function: Any) -> tuple[Any, Any, Any]:  # its code, and that of a simulated card
    code = function.__code__
    gpu = [tuple("gpu" if x == "cuda" else x for x in t) for t in (code.co_consts, code.co_names)]
    return function, code, code.replace(co_consts=gpu[0], co_names=gpu[1])


def _ops(device: torch.device) -> Any:
    for function, real, simulated in load()[1]:
        function.__code__ = simulated if device.type == "gpu" else real
    return load()[0]
