"""Masked sums over sequences, and the errors that all their losses share."""

import numpy as np
import pytest
import torch

from memlab.losses.sequences import choice, divided, floats, integers, number, sequence_logps, whole

LOGPS = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_sums_what_the_mask_keeps(dtype):
    assert sequence_logps(LOGPS, MASK.to(dtype)).tolist() == [-3, -16]


@pytest.mark.parametrize("junk", [float("nan"), float("-inf"), 7.0])
def test_what_the_mask_drops_counts_nothing(junk):
    logps = LOGPS.masked_fill(MASK == 0, junk).requires_grad_()
    sums = sequence_logps(logps, MASK)
    sums.sum().backward()
    assert sums.tolist() == [-3, -16]
    assert logps.grad is not None
    assert logps.grad.tolist() == MASK.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_in_at_least_fp32(dtype):
    sums = sequence_logps(torch.full((1, 300), -9.0, dtype=dtype), torch.ones(1, 300).bool())
    assert sums.dtype == torch.promote_types(dtype, torch.float32)
    assert sums.item() == -2700  # fp16 and bf16 cannot hold it


def test_gradcheck():
    assert torch.autograd.gradcheck(
        lambda logps: sequence_logps(logps, MASK), LOGPS.double().requires_grad_()
    )


def test_tensors_share_a_dtype():
    a, b, c = floats("(B,)", a=torch.zeros(2).bfloat16(), b=torch.zeros(2).double(), c=LOGPS[0, :2])
    assert a.dtype == b.dtype == c.dtype == torch.float64
    assert floats("(B,)", a=torch.zeros(2).half())[0].dtype == torch.float32


def test_divides_by_the_items_of_the_step():
    total = torch.tensor(12.0)
    assert divided(total, None, 4) == divided(total, 4, 2) == 3
    assert divided(total, None, torch.tensor(4)) == divided(total, torch.tensor(4), 2) == 3
    assert divided(total, 1, 2) == divided(total, torch.tensor(1), 2) == 12
    assert divided(total, np.int64(4), 2) == divided(total, 4.0, 2) == 3
    assert divided(total * 0, 0, 0) == divided(total * 0, 0, torch.tensor(0)) == 0
    assert divided(total * 0, None, 0) == divided(total * 0, torch.tensor(0), 2) == 0


def test_bad_items_of_the_step():
    total = torch.tensor(12.0)
    for items in (-3, np.int64(-3), -0.5, float("nan")):
        with pytest.raises(ValueError, match=f"num_pairs must be at least 0, .* not .*{items}"):
            divided(total, items, 4, "num_pairs")
    for here in (4, torch.tensor(4)):
        with pytest.raises(ValueError, match=r"num_items must be .*, 0 where it has none .* not 0"):
            divided(total, 0, here)
    for items in ("4", True):
        with pytest.raises(TypeError, match=f"num_items must be a number .* not {items!r}"):
            divided(total, items, 4)


def test_bad_tensors():
    with pytest.raises(ValueError, match=r"logps must have the shape \(B, T\).* not \(3,\)"):
        sequence_logps(LOGPS[0], MASK[0])
    with pytest.raises(ValueError, match="logps hold no row"):
        sequence_logps(LOGPS[:0], MASK[:0])
    with pytest.raises(ValueError, match=r"mask must have the shape \(2, 3\), not \(2, 2\)"):
        sequence_logps(LOGPS, MASK[:, :2])
    with pytest.raises(TypeError, match=r"mask must be a tensor of bools or ints, not torch.float"):
        sequence_logps(LOGPS, MASK.float())
    with pytest.raises(TypeError, match="mask must be a tensor of bools or ints, not list"):
        sequence_logps(LOGPS, MASK.tolist())
    with pytest.raises(TypeError, match=r"logps must be a tensor of floats, not torch.int64"):
        sequence_logps(MASK, MASK)
    with pytest.raises(TypeError, match="logps must be a tensor of floats, not list"):
        sequence_logps(LOGPS.tolist(), MASK)
    with pytest.raises(ValueError, match=r"a and b .* all the same, not \(2,\), \(3,\)"):
        floats("(B,)", a=torch.zeros(2), b=torch.zeros(3))
    with pytest.raises(TypeError, match=r"torch.bool, not torch.int64"):
        integers("which", MASK, LOGPS, only=torch.bool)


def test_bad_switches():
    number("beta", 2, lambda b: b > 1, "above 1")
    for value in (1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"beta must be above 1, not {value}"):
            number("beta", value, lambda b: b > 1, "above 1")
    for value in ("2", None, True):
        with pytest.raises(TypeError, match=f"beta must be a number above 1, not {value!r}"):
            number("beta", value, lambda b: b > 1, "above 1")
    for value in (2, np.int64(3)):
        whole("size", value, 2)
    for value in (1, 2.0, 2.5, float("nan")):
        with pytest.raises(
            ValueError, match=f"size must be a whole number of at least 2, not {value}"
        ):
            whole("size", value, 2)
    with pytest.raises(TypeError, match="size must be a number a whole"):
        whole("size", "2", 2)
    choice("kind", "a", ("a", "b"))
    for value in ("c", None, ["a"]):
        with pytest.raises(ValueError, match="kind must be one of a, b, not "):
            choice("kind", value, ("a", "b"))
