"""Shapes of well-known models, so that they can be built without a network.

Each preset holds the values of the model's public config.json that decide its shape and its
arithmetic, in the spelling of transformers 5 (`rope_parameters` holds theta and scaling).
Importing this file costs nothing: it needs neither torch nor transformers.
"""

import copy
from collections.abc import Mapping
from typing import Any

Shape = dict[str, Any]

PREFIX = "memlab/"  # presets that exist nowhere else


def _rope(theta: float, **scaling: Any) -> Shape:
    return {"rope_type": "default", "rope_theta": theta} | scaling


def _llama3_rope(factor: float) -> Shape:
    return _rope(
        500000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Shape:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1000000.0),
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **rest: Any) -> Shape:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    } | rest


def _mistral(vocab: int, theta: float, window: int | None) -> Shape:
    return {
        "model_type": "mistral",
        "vocab_size": vocab,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(theta),
        "sliding_window": window,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gemma2(**rest: Any) -> Shape:
    return {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(10000.0),
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    } | rest


_TINY: Shape = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

PRESETS: Mapping[str, Shape] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1000000.0),
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    },
    "meta-llama/Llama-3.2-1B": _llama(
        2048,
        8192,
        16,
        32,
        8,
        head_dim=64,
        rope_parameters=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "meta-llama/Llama-3.2-3B": _llama(
        3072,
        8192,
        28,
        24,
        8,
        head_dim=128,
        rope_parameters=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, rope_parameters=_llama3_rope(8.0)),
    "google/gemma-2-2b": _gemma2(),
    "HuggingFaceTB/SmolLM2-135M": _llama(
        576,
        1536,
        30,
        9,
        3,
        vocab_size=49152,
        max_position_embeddings=8192,
        initializer_range=0.041666666666666664,
        rope_parameters=_rope(100000.0),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "mistralai/Mistral-7B-v0.3": _mistral(32768, 1000000.0, None),
    "mistralai/Mistral-7B-v0.1": _mistral(32000, 10000.0, 4096),
    "memlab/tiny": _qwen3(0, 0, 0, 0, tied=True) | _TINY,
    "memlab/tiny-llama": _llama(0, 0, 0, 0, 0, rope_parameters=_rope(10000.0)) | _TINY,
    "memlab/tiny-mistral": _mistral(0, 10000.0, 16) | _TINY,
    "memlab/tiny-gemma2": _gemma2() | _TINY | {"pad_token_id": 0, "query_pre_attn_scalar": 32},
}

ALIASES: Mapping[str, str] = {
    "Qwen/Qwen3-0.6B-Base": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B-Base": "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B-Base": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B-Base": "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B",
    "meta-llama/Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "google/gemma-2-2b-it": "google/gemma-2-2b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistralai/Mistral-7B-v0.1",
}
"""Names whose weights differ, but whose shape is that of the preset."""


def preset(name: str) -> Shape | None:
    """Configuration values of a model known without network (a copy), or None."""
    values = PRESETS.get(ALIASES.get(name, name))
    return None if values is None else copy.deepcopy(values)
