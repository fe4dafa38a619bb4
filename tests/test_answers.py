"""Answers told again are what a fake tensor's mode would answer, aliases included."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from memlab import Recipe
from memlab.experiments.simulation import simulated_run
from memlab.instruments.answers import Answers, _fit
from memlab.instruments.device import simulated_gpu

aten = torch.ops.aten


def looked_at(output, inputs):
    """All that is to be known of an output: what it is, whose storage it has, its mode's notes."""
    if not isinstance(output, FakeTensor):
        return output
    storage = output.untyped_storage()
    notes = {name: value for name, value in vars(output).items() if name != "_memlab_twin"}
    return (
        (tuple(output.shape), output.stride(), output.dtype, output.fake_device),
        (output.storage_offset(), storage.nbytes(), output.requires_grad, output.layout),
        [storage._cdata == given.untyped_storage()._cdata for given in inputs],
        torch._C._dispatch_keys(output),
        notes,
    )


@pytest.fixture
def crosschecked(monkeypatch):
    """The operations that were answered from memory, each beside what the mode answers now."""
    told, call = [], Answers.__call__

    def both(answers, func, args, kwargs):
        asked = []

        answer = call(answers, _Asked(func, asked), args, kwargs)
        if not asked:
            told.append(func)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            with_mode = func(*args, **kwargs)
            assert type(answer) is type(with_mode), func
            found, expected = (
                [looked_at(x, inputs) for x in tree_leaves(out)] for out in (answer, with_mode)
            )
            assert found == expected, func
        return answer

    monkeypatch.setattr(Answers, "__call__", both)
    return told


class _Asked:
    """An operation that notes its calls, and is else the operation."""

    def __init__(self, func, calls):
        self.func, self.calls = func, calls

    def __call__(self, *args, **kwargs):
        self.calls.append(self.func)
        return self.func(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.func, name)

    def __hash__(self):
        return hash(self.func)

    def __eq__(self, other):
        return self.func == other.func


TRAINERS = ("sft", "dpo", "reward", "kto", "gkd", "rloo")
SMALL = {"model": "memlab/tiny", "max_length": 64}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_step_of_each_trainer(trainer, crosschecked):
    sampled = {"max_completion_length": 4} if trainer == "rloo" else {}
    simulated_run(Recipe.defaults(trainer=trainer, **SMALL, **sampled))
    assert len(crosschecked) > 300
    assert {aten.mm.default, aten._unsafe_view.default, aten.detach.default} <= {*crosschecked}


@pytest.mark.parametrize(
    "recipe", [Recipe.off(**SMALL), Recipe.defaults(padding_free=True, **SMALL)]
)
def test_the_ledger_is_the_same_without(recipe, monkeypatch):
    quick = simulated_run(recipe).ledger
    monkeypatch.setattr(Answers, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs))
    plain = simulated_run(recipe).ledger
    for name in ("births", "events", "phases", "workspaces", "step_start"):
        assert getattr(quick, name) == getattr(plain, name)


def test_equal_numbers_of_other_types_are_other_questions():
    with simulated_gpu() as device:
        x = torch.empty(4, dtype=torch.int64, device=device)
        answered = [(x + n).dtype for n in (1, 1.0, True, 1, 1.0)]
        torch.set_default_dtype(torch.float64)
        try:
            answered.append((x + 1.0).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    kinds = [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32, torch.float64]
    assert answered == kinds


def test_a_tensor_that_shares_does_so_with_its_own_input():
    with simulated_gpu() as device:
        for _ in range(3):
            x = torch.empty(4, 6, device=device)
            parts = [x.t(), x[1:], *x.split(2), *(half.t() for half in x.split(2))]
            assert all(p.untyped_storage()._cdata == x.untyped_storage()._cdata for p in parts)
            assert [p.storage_offset() for p in parts] == [0, 6, 0, 12, 0, 12]
            y = x + 1
            assert y.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert y.add_(1) is y


def test_autograd_sees_views_and_leaves_as_ever():
    with simulated_gpu() as device:
        for _ in range(3):
            w = torch.empty(4, 6, device=device, requires_grad=True)
            view = w.t()
            assert view._base is w
            assert view.requires_grad
            y = view * 2
            assert not y.is_leaf
            y.sum().backward()
            assert w.grad.shape == w.shape


def test_values_are_not_remembered():
    with simulated_gpu() as device:
        for n in range(3):
            ids = torch.tensor([n, 0, 1], device=device)
            assert (ids + 1).tolist() == [n + 1, 1, 2]
            assert len(ids[ids != 0]) == (1 if n == 0 else 2)


@pytest.mark.parametrize(
    "func", [aten.nonzero.default, aten.add_.Tensor, aten.mm.out, aten.t_.default]
)
def test_what_writes_or_depends_on_values_is_asked_anew(func):
    assert not _fit(func)
    assert _fit(aten.mm.default)
