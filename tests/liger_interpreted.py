"""Run with TRITON_INTERPRET=1: Liger's kernels on a CPU, against the layers that they stand for.

Prints a JSON object: for each case the loss without and with them, and the largest gradient error
of any parameter, relative to its largest entry. Triton's interpreter knows no libdevice, and leaves
floating-point arguments as they are: both are mended here.
"""

import contextlib
import json

import numpy as np
import torch
import triton
import triton.language as tl
from transformers import AutoConfig
from triton.language.extra import libdevice
from triton.runtime import interpreter

from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import enable_checkpointing
from memlab.models.head import head_parts
from memlab.techniques import liger
from memlab.techniques.chunked_loss import cross_entropy
from memlab.trainers.loop import apply_head

convert = interpreter._implicit_cvt


def with_floats(argument):
    if type(argument) is float:
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return convert(argument)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def rsqrt(x):
    return 1 / tl.sqrt(x)


interpreter._implicit_cvt = with_floats
libdevice.tanh, libdevice.rsqrt = tanh, rsqrt

OFF = dict.fromkeys(("rms_norm", "rope", "swiglu"), False)


def config_of(name: str):
    if name != "qwen2":
        return load_config(name)
    shape = load_config("memlab/tiny").to_dict() | {"model_type": "qwen2"}
    kept = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    kept += " num_key_value_heads max_position_embeddings tie_word_embeddings rope_parameters"
    return AutoConfig.for_model("qwen2", **{key: shape[key] for key in kept.split()})


def step(name: str, checkpointing: bool, switches: dict | None, fused: bool):
    config = config_of(name)
    meta = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    model = materialize(meta, "cpu", init=True, seed=3).train()
    with torch.no_grad():  # initial norms are all ones, or all zeros
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight += torch.linspace(-0.3, 0.4, len(module.weight))
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(1, 15).view(2, 7) * 5
    labels = torch.arange(14) * 7
    labels[3] = -100
    patched = contextlib.nullcontext() if switches is None else liger.kernels(model, **switches)
    function = liger.cross_entropy if fused else cross_entropy
    with patched:
        arguments = {"input_ids": ids}
        loss = apply_head(function, head_parts(model), arguments, labels, num_items_in_batch=11)
        loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


CASES = {
    "qwen3 rms_norm": ("memlab/tiny", False, OFF | {"rms_norm": True}, False),
    "qwen3 rope": ("memlab/tiny", False, OFF | {"rope": True}, False),
    "qwen3 swiglu": ("memlab/tiny", False, OFF | {"swiglu": True}, False),
    "qwen3 head": ("memlab/tiny", False, None, True),
    "qwen3 checkpointing": ("memlab/tiny", True, {}, True),
    "qwen2": ("qwen2", False, {}, True),
    "llama": ("memlab/tiny-llama", False, {}, True),
    "mistral": ("memlab/tiny-mistral", False, {}, True),
    "gemma2": ("memlab/tiny-gemma2", False, {}, True),  # its head caps the logits
}

if __name__ == "__main__":
    found, plain = {}, {}
    for case, (name, checkpointing, switches, fused) in CASES.items():
        if name not in plain:
            plain[name] = step(name, False, None, False)
        (expected, gradients), (loss, others) = (
            plain[name],
            step(name, checkpointing, switches, fused),
        )
        pairs = zip(gradients, others, strict=True)
        error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        found[case] = expected, loss, error
    print(json.dumps(found))
