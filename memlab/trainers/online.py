"""What the trainers on rollouts share: checked rewards, micro-batches, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlab.losses.sequences import whole
from memlab.models.head import HeadParts
from memlab.trainers.loop import Batch, HeadFunction, hidden_states, on_hidden
from memlab.trainers.rollouts import Rollout

Reward = Callable[[Tensor, Tensor], Tensor]  # completions (B, C), mask (B, C) -> floats (B,)


def rewarded(reward: Reward, made: Rollout) -> Tensor:
    """`reward(completions, mask)`: (B,) floats, without gradient; NaN for what nobody could score.

    Raises TypeError for what is no tensor of floats, ValueError for other shapes and for infinity,
    which has no mean.
    """
    rewards = reward(made.completions, made.mask)
    if not isinstance(rewards, Tensor) or not rewards.is_floating_point():
        found = rewards.dtype if isinstance(rewards, Tensor) else type(rewards).__name__
        raise TypeError(f"reward must return a tensor of floats, not {found}")
    if rewards.shape != (len(made.mask),):
        raise ValueError(
            f"reward must return one number a completion, ({len(made.mask)},), not "
            f"{tuple(rewards.shape)}"
        )
    rewards = rewards.detach()
    if not isinstance(rewards, FakeTensor):
        known = rewards.cpu()  # looked at there: no allocation on the device
        infinite = known.isinf().nonzero()
        if len(infinite):
            at = int(infinite[0])
            raise ValueError(
                f"reward of completion {at} must be finite, or NaN for one that can't be scored, "
                f"not {known[at].item()}"
            )
    return rewards


def split(size: int | None, **columns: Tensor) -> list[Batch]:
    """Micro-batches of `size` rows (None: one of all) of columns of as many rows each.

    Raises ValueError for a size that is no whole number of at least 1.
    """
    check_size(size)
    rows = len(next(iter(columns.values())))
    size = rows if size is None else size
    parts = {name: column.split(size) for name, column in columns.items()}
    return [dict(zip(parts, slices, strict=True)) for slices in zip(*parts.values(), strict=True)]


def check_size(size: int | None) -> None:
    """Raise the errors of `split` before a step has run."""
    if size is not None:
        whole("per_device_train_batch_size", size, 1, ", or None")


def token_logps(logprobs: HeadFunction, head: HeadParts, ids: Tensor, labels: Tensor) -> Tensor:
    """log p of each label, (B, S), at least fp32, 0 where it is -100.

    ids (B, T), labels (B, S) of the last S positions: the head reads hidden states of the S
    positions before each, no others. `logprobs` is as in `loop.apply_head`.
    """
    hidden = hidden_before(head, ids, labels)
    return on_hidden(logprobs, head, hidden, labels.flatten()).view(labels.shape)


def hidden_before(head: HeadParts, ids: Tensor, labels: Tensor) -> Tensor:
    """The hidden states (B, S, D) that predict `labels`, as for `token_logps`."""
    return hidden_states(head, {"input_ids": ids})[:, -labels.shape[1] - 1 : -1]
