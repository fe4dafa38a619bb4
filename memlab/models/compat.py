"""The one place that knows how supported transformers versions spell things differently."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import import_utils


def checkpointing_switch() -> str:
    """What this transformers calls `gradient_checkpointing`, in arguments and in methods."""
    renamed = "activation_checkpointing"
    return renamed if hasattr(PreTrainedModel, f"{renamed}_enable") else "gradient_checkpointing"


def enable_checkpointing(model: Any, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
    """Checkpoint every decoder layer of a transformers (or peft) model, non-reentrant by default.

    `checkpoint_kwargs` go to `torch.utils.checkpoint.checkpoint`. transformers 5.2x renamed
    `gradient_checkpointing_enable`, and warns when the old name is called.
    """
    kwargs = {"use_reentrant": False} | (checkpoint_kwargs or {})
    switch = checkpointing_switch()
    getattr(model, f"{switch}_enable")(**{f"{switch}_kwargs": kwargs})


def disable_checkpointing(model: Any) -> None:
    """Undo `enable_checkpointing`."""
    getattr(model, f"{checkpointing_switch()}_disable")()


def cache_argument(backbone: Any) -> str:
    """What this transformers calls the KV cache that a decoder is given."""
    renamed = "cache"
    arguments = inspect.signature(backbone.forward).parameters
    return renamed if renamed in arguments else "past_key_values"


@contextlib.contextmanager
def fake_tensors_are_computed() -> Iterator[None]:
    """Inside, transformers takes the path of a real tensor for a fake one.

    It takes a fake tensor for a trace, and then leaves out what depends on values (is any row
    packed? is the mask all ones?). A simulated GPU answers those, and must do what a card does.
    """
    is_fake = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = is_fake
