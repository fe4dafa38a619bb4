"""Data-dependent code on a simulated GPU: the values of small integer tensors are known."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes

from memlab.instruments.device import simulated_device, simulated_gpu

LABELS = torch.tensor([[5, -100, 7], [-100, 3, 3]])


HOST = {
    "transposed": LABELS.t(),
    "row": LABELS[1],
    "every other": LABELS[:, ::2],
    "expanded": LABELS[0].expand(4, 3),
    "expanded columns": LABELS[:, :1].expand(2, 4),
    "permuted with gaps": torch.arange(48).reshape(2, 3, 8)[..., ::2].permute(2, 0, 1),
}


@pytest.fixture(autouse=True)
def gpu() -> Iterator[torch.device]:
    with simulated_gpu() as device:
        yield device


def test_values_follow_integers_through_operations(gpu: torch.device) -> None:
    labels = LABELS.to(gpu)
    keep = labels != -100
    assert int(keep.sum()) == 4
    assert (labels.clamp(min=0) * 2).max().item() == 14
    assert labels[keep].tolist() == [5, 7, 3, 3]
    assert labels.flatten().unique().tolist() == [-100, 3, 5, 7]
    assert keep.nonzero().shape == (4, 2)
    assert torch.equal(labels, labels.clone())
    assert torch.masked_select(labels, keep).shape == (4,)
    assert torch.tensor(2.5, device=gpu).item() == 2.5
    assert torch.arange(5, device=gpu)[1:].tolist() == [1, 2, 3, 4]
    assert bool((torch.zeros(3, dtype=torch.int64, device=gpu) == 0).all())


@pytest.mark.parametrize("host", HOST.values(), ids=HOST)
@pytest.mark.parametrize("layout", [torch.preserve_format, torch.contiguous_format])
def test_copies_lie_in_memory_as_on_a_real_device(
    gpu: torch.device, host: torch.Tensor, layout: torch.memory_format
) -> None:
    with _disable_current_modes():
        real = host.to("cpu", copy=True, memory_format=layout)
    card = host.to(gpu, memory_format=layout)
    assert card.stride() == real.stride()
    assert card.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    assert card.tolist() == real.tolist()


def test_in_place_operations_change_the_values(gpu: torch.device) -> None:
    labels = LABELS.to(gpu)
    labels[labels == -100] = 9
    assert labels.tolist() == [[5, 9, 7], [9, 3, 3]]
    labels.add_(1)
    assert labels[0].tolist() == [6, 10, 8]
    assert LABELS.tolist() == [[5, -100, 7], [-100, 3, 3]], "the host's tensor was written to"


def test_values_overwritten_by_unknown_ones_are_forgotten_in_every_view(gpu: torch.device) -> None:
    labels = LABELS.to(gpu)
    row = labels[0]
    unknown = torch.empty(2, 3, device=gpu).argmax(-1, keepdim=True)
    labels.copy_(unknown.expand(2, 3))
    with pytest.raises(DataDependentOutputException):
        row.sum().item()


def test_an_unknown_mask_says_what_would_work(gpu: torch.device) -> None:
    x = torch.empty(4, 3, device=gpu)
    with pytest.raises(NotImplementedError, match="derive it from integer tensors"):
        x[x > 0]


def test_a_row_indexed_by_a_mask_has_its_gradient(gpu: torch.device) -> None:
    x = torch.empty(2, 3, 4, device=gpu, requires_grad=True)
    picked = x[LABELS.to(gpu) != -100]
    picked.sum().backward()
    assert picked.shape == (4, 4)
    assert x.grad is not None
    assert x.grad.shape == x.shape


@given(st.lists(st.integers(-100, 5), min_size=1, max_size=40))
def test_masks_pick_as_many_as_on_the_host(values: list[int]) -> None:

    with _disable_current_modes():
        real = torch.tensor(values)
    card = real.to(simulated_device())
    assert card[card > 0].shape == (sum(v > 0 for v in values),)
    assert card[card > 0].tolist() == [v for v in values if v > 0]
