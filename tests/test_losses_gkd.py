"""The generalized Jensen-Shannon divergence: worked values, TRL's values, its two limits."""

import math

import pytest
import torch

from memlab.losses.gkd import generalized_jsd

LABELS = torch.tensor([3, -100, 0, 5, 5, -100, 1])
SWITCHES = [{"beta": beta, "temperature": t} for beta in (0, 0.1, 0.5, 1) for t in (1.0, 2.5)]


def logits(dtype=torch.float64, rows=7):
    """Student and teacher, (N, 6) each."""
    rng = torch.Generator().manual_seed(6)
    made = 2 * torch.randn(2, rows, 6, generator=rng, dtype=torch.float64)
    return [row.to(dtype).requires_grad_() for row in made]


def test_worked_values():
    student = torch.tensor([[0.25, 0.75]]).log()
    teacher = torch.tensor([[0.5, 0.5]]).log()
    label = torch.tensor([0])
    kl = lambda p, q: sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))  # noqa: E731
    p, q = (0.5, 0.5), (0.25, 0.75)
    value = lambda beta: generalized_jsd(student, teacher, label, beta=beta).item()  # noqa: E731
    assert value(0) == pytest.approx(kl(p, q))
    assert value(1) == pytest.approx(kl(q, p))
    mixed = (0.2 * 0.5 + 0.8 * 0.25, 0.2 * 0.5 + 0.8 * 0.75)  # beta of the teacher
    assert value(0.2) == pytest.approx(0.2 * kl(p, mixed) + 0.8 * kl(q, mixed))


@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_equals_trl(switches, dtype, items):
    cls = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    student, teacher = logits(dtype)
    theirs = cls.generalized_jsd_loss(
        student[None], teacher[None], LABELS[None], num_items_in_batch=items, **switches
    )
    ours = generalized_jsd(student, teacher, LABELS, items, **switches)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    grads = torch.autograd.grad(ours, [student, teacher])
    trl_grads = torch.autograd.grad(theirs, [student, teacher])
    torch.testing.assert_close(grads, trl_grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradcheck(switches):
    batch = logits(rows=3)
    assert torch.autograd.gradcheck(lambda *b: generalized_jsd(*b, LABELS[:3], **switches), batch)


def test_the_ends_are_what_it_tends_to_per_unit():
    student, teacher = logits()
    value = lambda beta: generalized_jsd(student, teacher, LABELS, beta=beta)  # noqa: E731
    torch.testing.assert_close(value(1e-6) / 1e-6, value(0), rtol=1e-4, atol=0)
    torch.testing.assert_close(value(1 - 1e-6) / 1e-6, value(1), rtol=1e-4, atol=0)
    assert value(0) != value(1)


def test_half_is_symmetric_and_bounded_by_log_2():
    student, teacher = logits()
    there = generalized_jsd(student, teacher, LABELS)
    torch.testing.assert_close(there, generalized_jsd(teacher, student, LABELS))
    assert 0 < there < math.log(2)
    far = generalized_jsd(1e3 * student, -1e3 * student, LABELS)
    torch.testing.assert_close(far.item(), math.log(2))


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_equal_models_cost_nothing(beta):
    student, _ = logits()
    value = generalized_jsd(student, student.detach() + 3, LABELS, beta=beta)  # shifted: the same
    value.backward()
    torch.testing.assert_close(value.item(), 0.0, rtol=0, atol=1e-15)
    torch.testing.assert_close(student.grad, torch.zeros_like(student), rtol=0, atol=1e-15)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_log_probabilities_do_as_well(switches):
    student, teacher = logits()
    ours = generalized_jsd(student, teacher, LABELS, **switches)
    shifted = (student.log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(generalized_jsd(*shifted, LABELS, **switches), ours)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_micro_batches_of_unequal_sizes_make_the_step(beta):
    whole, split, items = logits(), logits(), (LABELS != -100).sum()
    step, total = generalized_jsd(*whole, LABELS, beta=beta), 0
    step.backward()
    for where in (slice(0, 1), slice(1, 5), slice(5, 7)):
        loss = generalized_jsd(*(row[where] for row in split), LABELS[where], items, beta=beta)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, step)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_no_valid_label_is_a_connected_zero(beta, items):
    student, teacher = logits()
    value = generalized_jsd(student, teacher, torch.full((7,), -100), items, beta=beta)
    value.backward()
    assert value == 0
    assert student.grad is not None
    assert not student.grad.any()


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_promotes_to_at_least_fp32(beta, dtype):
    batch = logits(dtype)
    value = generalized_jsd(*batch, LABELS, beta=beta)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    wide = generalized_jsd(*(row.double() for row in batch), LABELS, beta=beta)
    torch.testing.assert_close(value.double(), wide, rtol=1e-5, atol=0)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_label_count_nothing_whatever_they_hold(junk, beta):
    ignored = (LABELS == -100)[:, None]
    clean = logits()
    spoilt = [row.detach().masked_fill(ignored, junk).requires_grad_() for row in clean]
    value = generalized_jsd(*spoilt, LABELS, beta=beta)
    expected = generalized_jsd(*clean, LABELS, beta=beta)
    torch.testing.assert_close(value, expected)
    grads = torch.autograd.grad(value, spoilt)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, clean))
    assert not any(grad[ignored[:, 0]].any() for grad in grads)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_that_are_never_said_count_nothing(dtype, beta):
    """0 log 0 is 0: as if those words were not in the vocabulary."""
    words = torch.tensor([False, True, False, False, False, True])
    clean = logits(dtype)
    expected = generalized_jsd(*(row[:, ~words] for row in clean), LABELS, beta=beta)
    silent = [row.detach().masked_fill(words, -math.inf).requires_grad_() for row in clean]
    value = generalized_jsd(*silent, LABELS, beta=beta)
    torch.testing.assert_close(value, expected)
    grads = torch.autograd.grad(value, silent)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, clean))


@pytest.mark.parametrize("silent", ["student", "teacher"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_a_word_that_one_of_the_two_never_says(beta, silent):
    word = torch.tensor([False, True, False, False, False, False])
    clean, almost, never = logits(), logits(), logits()
    which = ("student", "teacher").index(silent)
    almost[which] = clean[which].detach().masked_fill(word, -700.0).requires_grad_()
    never[which] = clean[which].detach().masked_fill(word, -math.inf).requires_grad_()
    value = generalized_jsd(*never, LABELS, beta=beta)
    grads = torch.autograd.grad(value, never)
    assert value.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    if beta == (0, 1)[which]:  # the other one says it: the true value is infinite
        assert value > 1e27
        return
    limit = generalized_jsd(*almost, LABELS, beta=beta)
    torch.testing.assert_close(value, limit)
    torch.testing.assert_close(grads, torch.autograd.grad(limit, almost))


def test_a_row_without_any_finite_logit_stays_to_be_seen():
    student, teacher = logits()
    for junk in (-math.inf, math.nan, math.inf):
        spoilt = teacher.detach().index_fill(0, torch.tensor(0), junk)
        assert generalized_jsd(student, spoilt, LABELS).isnan()


def test_bad_input():
    student, teacher = logits()
    for beta in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"beta must be between 0 and 1, not {beta}"):
            generalized_jsd(student, teacher, LABELS, beta=beta)
    with pytest.raises(TypeError, match="beta must be a number between 0 and 1, not 'half'"):
        generalized_jsd(student, teacher, LABELS, beta="half")
    with pytest.raises(ValueError, match="temperature must be above 0, not 0"):
        generalized_jsd(student, teacher, LABELS, temperature=0)
    with pytest.raises(ValueError, match=r"num_items must be at least 0, .* not -4"):
        generalized_jsd(student, teacher, LABELS, -4)
    with pytest.raises(ValueError, match=r"student and teacher .*\(N, V\).*\(7, 6\), \(7, 5\)"):
        generalized_jsd(student, teacher[:, :5], LABELS)
    with pytest.raises(ValueError, match=r"labels must have the shape \(7,\), not \(2,\)"):
        generalized_jsd(student, teacher, LABELS[:2])
    with pytest.raises(TypeError, match=r"labels must be a tensor of torch.int64, not torch.int32"):
        generalized_jsd(student, teacher, LABELS.int())
    with pytest.raises(TypeError, match="student must be a tensor of floats"):
        generalized_jsd(student.long(), teacher, LABELS)
    with pytest.raises(ValueError, match="hold no row"):
        generalized_jsd(student[:0], teacher[:0], LABELS[:0])
