"""The policy's weights, handed to vLLM's engine in this process, as those of a checkpoint.

vLLM's own loader takes them, which splits, fuses and repacks them: `reload_weights` of its worker,
v1/worker/gpu_model_runner.py and model_executor/model_loader/reload of vLLM 0.26.0. TRL 1.16 calls
the bare model's `load_weights`, and adds an adapter to the policy and takes it out again, which
rounds weights in bf16; here the sum is made beside them, a layer at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import MemlabError

SWITCH = "VLLM_ENABLE_V1_MULTIPROCESSING"


def push(llm: Any, model: Any) -> None:
    """Give `weights(model)` to the engine, rounded to its dtype, and forget cached prefixes.

    Raises ValueError for a simulated model, for an engine that is not in this process, for tied
    embeddings on a CPU, where vLLM keeps a packed copy of the head, and as `weights` does;
    MemlabError when prefixes can't be forgotten, since requests are running.
    """
    if isinstance(next(model.parameters()), FakeTensor):
        raise ValueError("vllm runs on no simulated device: give rollouts.rollout to the trainer")
    if not hasattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker"):
        raise ValueError(f"llm must live in this process: build it under {SWITCH}=0")
    on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
    if on_cpu and unwrapped(model).config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings must be False for vllm on a CPU; a card takes both")
    with torch.no_grad():
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights(model)})
    if not llm.reset_prefix_cache():
        raise MemlabError("vllm kept prefixes of the old weights: let its running requests finish")


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of a checkpoint and tensors: tied weights once, a peft adapter in its weight.

    Raises ValueError for quantized weights, fused experts, more than one adapter, and one on tied
    embeddings, which vLLM knows as one weight.
    """
    policy, adapters = unwrapped(model), list(getattr(model, "peft_config", ()))
    if len(adapters) > 1:
        raise ValueError(f"peft_config must hold one adapter for vllm, not {', '.join(adapters)}")
    ends = (policy.get_input_embeddings(), policy.get_output_embeddings())
    changed = any(hasattr(end, "base_layer") or hasattr(end, "modules_to_save") for end in ends)
    if policy.config.tie_word_embeddings and changed:
        raise ValueError("peft_config: vllm takes no adapter on tied embeddings, others it does")
    layers = [name for name, module in policy.named_modules() if hasattr(module, "base_layer")]
    inside = tuple(f"{name}." for name in layers)
    found = {
        name: parameter
        for name, parameter in policy.named_parameters()
        if (".base_layer." in name or not name.startswith(inside))
        and ".original_module." not in name
    }
    for name, parameter in found.items():
        if not parameter.is_floating_point() or ".experts." in name:
            kind = "fused" if parameter.is_floating_point() else "quantized"
            raise ValueError(f"{name} is {kind}: vllm rollouts take plain weights of dense models")
    extra = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.)")
    return ((extra.sub("", name), _value(policy, name, found[name])) for name in found)


def _value(policy: Any, name: str, parameter: Tensor) -> Tensor:
    """The parameter of that name, or the sum of it and its adapter; all stay as they were."""
    owner, adapted, own = name.partition(".base_layer.")
    if not adapted:
        return parameter.detach()
    layer = policy.get_submodule(owner)
    base = layer.get_base_layer()
    before = {name: parameter.data for name, parameter in base.named_parameters()}
    layer.merge(safe_merge=True)  # into copies
    value = base.get_parameter(own).data
    for name, data in before.items():
        base.get_parameter(name).data = data
    layer.merged_adapters.clear()
    return value


def unwrapped(model: Any) -> Any:
    """The transformers model, out of peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
