"""Models by name: their configuration, the bare shape on `meta`, its tensors on a device, weights.

A model is built in two steps, so that nothing real is ever allocated twice, and so that adapters
and kernels can be attached in between: `build_meta` makes it without memory, `materialize` gives
each parameter and buffer its memory on a device. On a real device that can also fill them; on a
simulated one (inside `FakeTensorMode`) there is nothing to fill.
"""

import copy
import difflib
import hashlib
import re
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import constants, get_session, snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from memlab.errors import MemlabError
from memlab.models.attention import resolve_attention
from memlab.models.presets import ALIASES, PREFIX, PRESETS, preset

M = TypeVar("M", bound=nn.Module)

_HUB_TIMEOUT_S = 4.0
_VISION_NAME = re.compile(
    r"(^|[-_/.])(vl|vlm|vision|llava|pixtral|paligemma\d?|smolvlm\d?)([-_.]|$)"
)


def load_config(name: str) -> PreTrainedConfig:
    """Configuration of a causal language model.

    `name` is a preset (`memlab.models.presets`, no network), a local folder with a config.json,
    or any other hub name, where the hub can be reached or has the file cached. Raises ValueError
    with close matches when it is none of them, and for models that do not only read text.
    """
    values = preset(name)
    if values is not None:
        return AutoConfig.for_model(**values, name_or_path=name)
    folder = Path(name)
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {name!r} is a folder without a config.json: give one with it")
        config = _folder_config(name)
    else:
        config = _hub_config(name)
    return _sound(name, _text_only(name, config))


def config_digest(name: str) -> str:
    """Tells apart what `name` stood for at different times: a folder's configuration may change.

    Raises ValueError as `load_config`.
    """
    if preset(name) is not None:
        return "preset"
    content = load_config(name).to_json_string(use_diff=False)
    return hashlib.sha256(content.encode()).hexdigest()


def _folder_config(name: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # whatever a broken file makes transformers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model {name!r}: its config.json can't be read ({reason})") from None


def _hub_config(name: str) -> PreTrainedConfig:
    why = "the hub does not have it"
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):  # not cached
        pass
    if hub_reachable():
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            why = f"the hub answered: {_first_line(error)}"
    else:
        why = "the hub could not be reached"
    if _VISION_NAME.search(name.lower()):
        raise ValueError(_vision_refusal(name))
    known = [*PRESETS, *ALIASES]
    by_lower = {k.lower(): k for k in known}
    close = [by_lower[k] for k in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(
        f"unknown model {name!r}: {hint}known offline are {', '.join(PRESETS)}; or give a local "
        f"folder with a config.json; {why}"
    )


def _text_only(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    if getattr(config, "vision_config", None) is not None or "vision_config" in config.sub_configs:
        raise ValueError(_vision_refusal(name))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model {name!r} ({config.model_type}) is not a causal language model: memlab measures "
            "decoders that read and write text"
        )
    return config


def _sound(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    if getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"model {name!r} ({config.model_type}) is an encoder: memlab measures decoders"
        )
    for value in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        found = getattr(config, value, 1)
        if isinstance(found, int) and found < 1:
            raise ValueError(
                f"model {name!r}: {value}={found} in its configuration; 1 or more works"
            )
    return config


def _vision_refusal(name: str) -> str:
    return (
        f"model {name!r} is a vision-language model, which memlab does not cover: its memory "
        "depends on images, not only on tokens; take a text model, such as 'Qwen/Qwen3-0.6B'"
    )


def hub_reachable(timeout_s: float = _HUB_TIMEOUT_S) -> bool:
    """Whether the hub answers within `timeout_s` seconds; False at once under HF_HUB_OFFLINE."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout_s)
    except Exception:  # of whichever client this version of the hub library uses
        return False
    return True


def build_meta(
    model: str | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model without memory: every parameter and buffer on the meta device.

    `attn_implementation` is a name as `memlab.models.attention.resolve_attention` returns it;
    None takes its default. Parameters are of `dtype`; rotary frequencies stay fp32. Raises
    ValueError as `load_config`.
    """
    config = load_config(model) if isinstance(model, str) else copy.deepcopy(model)
    attention = attn_implementation or resolve_attention(config, None, "cpu")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def materialize(model: M, device: torch.device | str, *, init: bool = False, seed: int = 0) -> M:
    """Give every meta parameter and buffer memory on `device`, in place; returns the model.

    Ties, `requires_grad`, parameter classes and their attributes stay; tensors that are on a real
    device already move to `device`. Works tensor by tensor, so also inside FakeTensorMode, where
    `module.to()` fails. With `init` (real devices only) the values are those of the
    architecture's own initialisation, drawn from `seed` (other numbers on CUDA than on a CPU),
    rotary frequencies included; without it they are whatever the memory holds. Raises TypeError for
    `init` of a model that is not transformers'.
    """
    made: dict[int, torch.Tensor] = {}
    kept = []  # keeps the originals alive, so that no id is used twice
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in made:
                    made[id(old)] = _materialized(old, device)
                    kept.append(old)
                table[name] = made[id(old)]  # type: ignore[assignment]
    if init:
        _initialize(model, torch.device(device), seed)
    return model


def _materialized(old: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if old.is_meta:
        new = torch.empty(old.shape, dtype=old.dtype, device=device)
    else:
        new = old.detach().to(device)
    if isinstance(old, nn.Parameter):
        attributes = dict(vars(old))
        if type(old) is nn.Parameter:
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        else:
            new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
        vars(new).update(attributes)
    return new


def _initialize(model: nn.Module, device: torch.device, seed: int) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"init needs a transformers model, not {type(model).__name__}")
    for module in model.modules():  # transformers marks what it believes to be done
        vars(module).pop("_is_hf_initialized", None)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            vars(tensor).pop("_is_hf_initialized", None)
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(seed)
        model.initialize_weights()


def load_pretrained(
    name: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The model with its trained weights, from a local folder, the hub's cache or the hub.

    Raises ValueError for unknown names and for presets that exist nowhere else ("memlab/..."),
    and MemlabError when the weights are not here and the hub does not give them.
    """
    if name.startswith(PREFIX):
        raise ValueError(f"model {name!r} has no trained weights: build it with random ones")
    config = load_config(name)
    attention = attn_implementation or resolve_attention(config, None, torch.device(device).type)
    folder = _weights_folder(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except OSError as error:
        raise MemlabError(
            f"no weights in the folder {folder}: save_pretrained writes them"
        ) from error
    return model.to(device)  # type: ignore[arg-type]


def _weights_folder(name: str) -> str:
    """A local folder as it is, else the hub's files in its cache, brought there where reachable."""
    if Path(name).is_dir():
        return name
    reachable = hub_reachable()
    try:
        return snapshot_download(
            name,
            local_files_only=not reachable,
            allow_patterns=["*.json", "*.safetensors"],
            ignore_patterns=["consolidated*", "original/*"],  # second copies of the same weights
        )
    except (OSError, ValueError) as error:
        why = f"does not give them: {_first_line(error)}" if reachable else "could not be reached"
        raise MemlabError(
            f"the weights of {name!r} are not on this machine, and the hub {why}; give a local "
            "folder, or build the model with random weights"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
