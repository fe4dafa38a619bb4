"""The one place that knows how supported transformers versions spell things differently."""

from typing import Any


def enable_checkpointing(model: Any, checkpoint_kwargs: dict[str, Any] | None = None) -> None:
    """Checkpoint every decoder layer of a transformers (or peft) model, non-reentrant by default.

    `checkpoint_kwargs` go to `torch.utils.checkpoint.checkpoint`. transformers 5.2x renamed
    `gradient_checkpointing_enable`, and warns when the old name is called.
    """
    kwargs = {"use_reentrant": False} | (checkpoint_kwargs or {})
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def disable_checkpointing(model: Any) -> None:
    """Undo `enable_checkpointing`."""
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()
