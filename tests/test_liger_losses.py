"""Liger's losses give the values of memlab's own, however a step is split, or say why not."""

import itertools
import math
import subprocess
import sys
from typing import Any

import head_cases
import numpy as np
import pytest
import test_trainers_dpo
import test_trainers_gkd
import test_trainers_grpo
import test_trainers_kto
import test_trainers_simulated
import torch
from online_cases import simulated_phases
from torch import Tensor
from trainer_cases import chunked, full, one_step, split, tiny, with_lora

from memlab.instruments.device import simulated_gpu
from memlab.instruments.meter import Meter
from memlab.losses.dpo import dpo as dpo_of_logps
from memlab.losses.gkd import generalized_jsd
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.compat import fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.techniques import chunked_logprobs, liger_losses, pad_to_multiple, padding_free
from memlab.trainers import dpo, grpo, kto
from memlab.trainers.reference import frozen, frozen_copy

pytest.importorskip("liger_kernel", reason="no liger-kernel here")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Liger imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


ITEMS = [
    ("dpo", "num_pairs"),
    ("kto", "num_rows"),
    ("grpo", "num_items"),
    ("jsd", "num_items_in_batch"),
]
SHAPES = [(8, 256, 8192, 64), (4, 256, 8192, 128)]  # rows, tokens, words, width


def dpo_steps(size: int, **options: Any) -> tuple[float, float]:
    step = [test_trainers_dpo.padded(part) for part in split(test_trainers_dpo.pairs(), size)]
    return test_trainers_dpo.step_of(options.pop("model", None) or tiny(), step, **options)


def kto_steps(size: int, **options: Any) -> tuple[float, float]:
    step = [test_trainers_kto.padded(part) for part in split(test_trainers_kto.rows(), size)]
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0, **options}
    return test_trainers_kto.step_of(weights.pop("model", None) or tiny(), step, **weights)


def gkd_steps(size: int, **options: Any) -> tuple[float, float]:
    step = [test_trainers_gkd.padded(part) for part in split(test_trainers_gkd.rows(), size)]
    return test_trainers_gkd.step_of(tiny(), step, **options)


@pytest.mark.parametrize("size", [4, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sigmoid", "beta": 0.3},
        {"loss_type": "hinge"},
        {"loss_type": "robust", "label_smoothing": 0.1},
    ],
    ids=lambda options: options["loss_type"],
)
def test_dpo(options: dict, size: int) -> None:
    expected = dpo_steps(4, **options)
    assert dpo_steps(size, fused_loss=liger_losses.dpo, **options) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("size", [5, 1, 3])
def test_kto(size: int) -> None:
    assert kto_steps(size, fused_loss=liger_losses.kto) == pytest.approx(kto_steps(5), rel=1e-5)


@pytest.mark.parametrize("size", [4, 1, 3])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gkd(beta: float, size: int) -> None:
    options = {"beta": beta, "temperature": 1.7}
    expected = gkd_steps(4, **options)
    found = gkd_steps(size, divergence=liger_losses.jsd, **options)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_grpo(loss_type: str, size: int | None) -> None:
    options = {
        "loss_type": loss_type,
        "beta": 0.1,
        "num_iterations": 2,
        "lr": 0.5,
        "temperature": 0.8,
        "epsilon_high": 0.3,
        "reference": frozen_copy(tiny(seed=5)),
    }
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 6
    step_of = test_trainers_grpo.step_of
    expected = step_of(tiny(), **options)
    options |= {"fused_loss": liger_losses.grpo, "per_device_train_batch_size": size}
    assert step_of(tiny(), **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_with_an_adapter_the_reference_is_the_model_without_it(name: str) -> None:
    module, cases = {"dpo": (dpo, test_trainers_dpo), "kto": (kto, test_trainers_kto)}[name]
    made = cases.pairs() if name == "dpo" else cases.rows()
    step = [cases.padded(part) for part in split(made, 2)]
    expected, found = (
        one_step(module.train, model, step, head=head_parts(model), logprobs=full, fused_loss=fused)
        for model, fused in ((with_lora(tiny()), f) for f in (None, getattr(liger_losses, name)))
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_bias_and_its_gradient() -> None:
    torch.manual_seed(0)
    h, w, b, th, tw, tb = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 4), (9, 4), (9,), (6, 5), (9, 5), (9,))
    )
    y = torch.tensor([1, -100, 2, 3, -100, 8])
    other = {"h": th.detach(), "w": tw.detach(), "bias": tb.detach()}
    expected = generalized_jsd(h @ w.T + b, (th @ tw.T + tb).detach(), y, 7, beta=0.3)
    found = liger_losses.jsd(h, w, y, bias=b, teacher=other, num_items_in_batch=7, beta=0.3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, e in zip(
        torch.autograd.grad(found, (h, w, b)), torch.autograd.grad(expected, (h, w, b)), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def refused(call, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


def test_what_liger_lacks_is_refused_by_name() -> None:
    fused = {"fused_loss": liger_losses.dpo}
    refused(
        lambda: dpo_steps(4, loss_type="ipo", **fused),
        r"loss_type='ipo' with use_liger_kernel=True: .* 'sigmoid', 'robust' or 'hinge'",
    )
    refused(
        lambda: dpo_steps(4, label_smoothing=0.1, **fused),
        r"label_smoothing=0.1 with use_liger_kernel=True: .* 0.0, or loss_type='robust'",
    )
    refused(
        lambda: kto_steps(5, desirable_weight=2.0, fused_loss=liger_losses.kto),
        r"desirable_weight, undesirable_weight=\(2.0, 1.0\) with use_liger_kernel=True",
    )
    refused(
        lambda: test_trainers_grpo.step_of(tiny(), loss_type="cispo", fused_loss=liger_losses.grpo),
        "loss_type='cispo' with use_liger_kernel=True",
    )
    refused(
        lambda: test_trainers_grpo.step_of(
            tiny(), loss_type="dr_grpo", fused_loss=liger_losses.grpo
        ),
        "loss_type='dr_grpo' divides by max_completion_length=None: give 1 or more",
    )
    h, w, y = torch.randn(4, 3), torch.randn(9, 3), torch.tensor([1, 2, 3, 4])
    for head in ({"softcap": 30.0}, {"logit_scale": 0.5}):
        name, value = next(iter(head.items()))
        refused(
            lambda head=head: liger_losses.jsd(h, w, y, teacher={"h": h, "w": w}, **head),
            f"the head's {name}={value} with use_liger_kernel=True: .* give a model without one",
        )
    larger = {"h": h, "w": torch.randn(12, 3)}
    refused(lambda: liger_losses.jsd(h, w, y, teacher=larger), "teacher's vocabulary=12 .* 9")


def loss_of(name: str, labels: list[int] | None = None, **options: Any) -> Any:
    """Liger's loss of 4 rows of 3 tokens, its gradients, and the head's two tensors and labels."""
    torch.manual_seed(0)
    h, w, rh, rw = (torch.randn(shape, requires_grad=True) for shape in ((12, 4), (9, 4)) * 2)
    y = torch.tensor(labels or [1, 2, 3] * 4)
    other = {"h": rh.detach(), "w": rw.detach()}
    loss = getattr(liger_losses, name)(h, w, y, **asked_of(name, 4, other) | options)
    return loss, torch.autograd.grad(loss, (h, w)), (h, w, y, other)


@pytest.mark.parametrize(("name", "items"), ITEMS)
def test_a_number_that_can_not_be_is_named(name: str, items: str) -> None:
    for value in (-3, "3", True):
        refused(lambda value=value: loss_of(name, **{items: value}), f"{value!r} items in the step")
    kinds = ("grpo", "dr_grpo") if name == "grpo" else (None,)
    for kind in kinds:  # dapo counts tokens, of which a step may have none
        options = {"loss_type": kind, "max_completion_length": 3} if kind else {}
        refused(
            lambda options=options: loss_of(name, **{items: 0}, **options), "0 items in the step"
        )
    wrong = (0.5, math.nan, math.inf, [4], torch.tensor([2, 3]), torch.ones(0), np.array([4]))
    for kind, value in itertools.product(("dapo", *kinds) if name == "grpo" else kinds, wrong):
        options = {"loss_type": kind, "max_completion_length": 3} if kind else {}
        options[items] = value
        refused(
            lambda options=options: loss_of(name, **options), "items in the step: give a number"
        )
    extra = {"ref_logps": torch.zeros(4, 3)} if name == "grpo" else {}
    refused(lambda: loss_of(name, beta="0.1", **extra), "beta='0.1': give ")


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_no_items_where_there_are_labels_are_refused(loss_type: str) -> None:
    refused(lambda: loss_of("grpo", num_items=0, loss_type=loss_type), "0 items in the step")


@pytest.mark.parametrize(("name", "items"), [("jsd", "num_items_in_batch"), ("grpo", "num_items")])
def test_none_of_a_step_may_be_labels(name: str, items: str) -> None:
    loss, grads, _ = loss_of(name, [-100] * 12, **{items: 0})
    assert loss == 0
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(("name", "items"), ITEMS)
def test_numbers_of_items_may_be_numpy_s_or_tensors(name: str, items: str) -> None:
    """A tensor is not read: one below 1 counts as 1."""

    def of(n: Any) -> list[Tensor]:
        loss, grads, _ = loss_of(name, **{items: n})
        assert loss.shape == ()
        return [loss, *grads]

    for value, number in ((0, 1), (-3, 1), (7, 7), ([7], 7), ([[7.0]], 7)):
        torch.testing.assert_close(of(torch.tensor(value)), of(number))
    torch.testing.assert_close(of(np.int64(7)), of(7))


def test_rows_may_be_counted_by_numpy() -> None:
    for name in ("dpo", "kto"):
        assert loss_of(name, rows=np.int64(4))[0] == loss_of(name)[0]


@pytest.mark.parametrize("name", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("label", [9, -5])
def test_a_label_that_is_no_word_is_an_error(name: str, label: int) -> None:
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds .* size 9"):
        loss_of(name, [label] + [1] * 11)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "robust"])
@pytest.mark.parametrize("labels", [[-100] * 12, [-100] * 6 + [1] * 6])
def test_dpo_without_chosen_labels(labels: list[int], loss_type: str) -> None:
    options = {"loss_type": loss_type, "label_smoothing": 0.1 * (loss_type == "robust")}
    found, grads, (h, w, y, other) = loss_of("dpo", labels, num_pairs=3, **options)
    heads, plain = ((h, w), (other["h"], other["w"])), chunked_logprobs.full_token_logprobs
    logps = [part for head in heads for part in plain(*head, y).view(4, 3).sum(1).split(2)]
    expected = dpo_of_logps(*logps, num_pairs=3, **options)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, e in zip(grads, torch.autograd.grad(expected, (h, w)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", ["kto", "grpo", "jsd"])
def test_no_label_at_all_has_no_gradient(name: str) -> None:
    loss, grads, _ = loss_of(name, [-100] * 12)
    assert loss.isfinite()
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("dpo", {"beta": float("nan")}, "beta=nan: give a number above 0"),
        ("dpo", {"beta": 0}, "beta=0: give a number above 0"),
        ("dpo", {"rows": 3}, "rows=3: give two a pair"),
        ("kto", {"beta": -1.0}, "beta=-1.0: give a number above 0"),
        ("jsd", {"beta": 3}, "beta=3: give 0 to 1"),
        ("jsd", {"temperature": 0}, "temperature=0: give a number above 0"),
        ("jsd", {"temperature": float("inf")}, "temperature=inf: give a number above 0"),
        ("grpo", {"epsilon": -1}, "epsilon=-1: give a number from 0 up"),
        ("grpo", {"epsilon_high": -1}, "epsilon_high=-1: give a number from 0 up"),
        ("grpo", {"logit_scale": 0}, "logit_scale=0: give a finite number above 0"),
        ("grpo", {"logit_scale": math.nan}, "logit_scale=nan: give a finite number above 0"),
        ("grpo", {"logit_scale": "1"}, "logit_scale='1': give a finite number above 0"),
        ("grpo", {"beta": 0.1}, "beta=0.1 needs the reference model: give ref_logps, or beta=0.0"),
        (
            "grpo",
            {"loss_type": "dr_grpo", "max_completion_length": 0},
            "divides by max_completion_length=0: give 1 or more",
        ),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, options: dict, match: str) -> None:
    refused(lambda: loss_of(name, **options), match)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_rows_laid_end_to_end_are_refused(name: str) -> None:
    module = {"dpo": dpo, "kto": kto}[name]
    batch = test_trainers_simulated.BATCHES[name](padding_free.collate)
    model = tiny(flattened=True)
    losses = module.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        [[batch]],
        head=head_parts(model),
        logprobs=full,
        fused_loss=getattr(liger_losses, name),
        reference=frozen_copy(model),
        inputs=padding_free.model_inputs,
    )
    refused(lambda: next(losses), "padding_free=True with a fused loss")


def test_without_liger_the_switch_says_what_to_install() -> None:
    script = """
import sys
sys.modules["liger_kernel"] = None
import torch
from memlab.techniques import liger, liger_losses
h, w, y = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([1, 2])
for call in (lambda: liger_losses.jsd(h, w, y, teacher={"h": h, "w": w}), liger.load):
    try:
        call()
    except ImportError as error:
        assert "use_liger_kernel=True needs liger-kernel" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def asked_of(name: str, rows: int, other: dict) -> dict:
    """What Liger's loss of so many rows needs beside the head's input."""
    return {
        "dpo": {"rows": rows, "reference": other},
        "kto": {
            "rows": rows,
            "reference": other,
            "desirable": torch.arange(rows) > 1,
            "kl": torch.zeros(()),
        },
        "grpo": {"advantages": torch.arange(float(rows))},
        "jsd": {"teacher": other},
    }[name]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product(("dpo", "kto", "grpo", "jsd"), SHAPES),
        ("grpo", (1, 2560, 8192, 16)),  # a row of more tokens than are taken at a time
    ],
)
def test_bytes_are_those_of_the_header(name: str, shape: tuple[int, ...], trained: bool) -> None:
    rows, tokens, words, width = shape
    n, given = rows * tokens, {"dtype": torch.bfloat16}
    h = torch.randn(n, width, **given, requires_grad=True)
    w = torch.randn(words, width, **given, requires_grad=trained)
    other = {"h": torch.randn(n, width, **given), "w": torch.randn(words, width, **given)}
    y = torch.arange(n) % words
    options = asked_of(name, rows, other)
    before = [t for t in [h, w, y, *other.values(), *options.values()] if torch.is_tensor(t)]
    with head_cases.Meter(*before) as meter:
        loss = getattr(liger_losses, name)(h, w, y, **options)
        dw = trained or name == "jsd"  # which makes it even of a frozen head
        kept = 2 * (n + (words if dw else 0)) * width
        assert meter.live == kept + 512  # the loss
        in_passing = {
            "dpo": 16 * 2 * tokens * words,
            "kto": 14 * tokens * words,
            "jsd": 34 * 1024 * words,
            "grpo": 20 * min(tokens, 2048) * 4096 + (4 * words * width if trained else 0),
        }[name]
        loss.backward()
    assert meter.peak - kept == pytest.approx(in_passing, rel=0.01)


def batch_of(name: str, rows: int = 8, tokens: int = 256) -> dict:
    """Rows of which half are answers, as `techniques.truncation` gives them."""
    ids, mask = list(range(tokens)), [0] * (tokens // 2) + [1] * (tokens // 2)
    both = {"input_ids": ids, "completion_mask": mask}
    if name == "gkd":
        return pad_to_multiple.collate([{"input_ids": ids, "labels": ids}] * rows)
    if name == "kto":
        row = both | {f"KL_{key}": value for key, value in both.items()} | {"label": True}
        return kto.collate_rows([row] * rows, pad_to_multiple.collate)
    row = {f"{side}_{key}": value for side in ("chosen", "rejected") for key, value in both.items()}
    return dpo.collate_pairs([row] * rows, pad_to_multiple.collate)


def simulated_peak(name: str, **options: Any) -> int:
    """Bytes of the second step of a tiny model with Qwen3's vocabulary."""
    config = load_config("memlab/tiny")
    config.vocab_size = 151_936
    policy, other = (build_meta(config) for _ in range(2))
    batch = batch_of(name)
    with simulated_gpu() as device, fake_tensors_are_computed(), Meter(device.type) as meter:
        model, second = materialize(policy.train(), device), frozen(materialize(other, device))
        options |= {"head": head_parts(model)}
        if name == "gkd":
            options |= {"teacher": second}
        else:
            options = {"reference": second, "logprobs": chunked} | options
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        meter.watch(model, optimizer)
        train = test_trainers_simulated.TRAINERS[name]
        losses = train(model, optimizer, [[batch]] * 2, phase=meter.phase, **options)
        for _ in range(2):
            meter.begin_step()
            assert next(losses).shape == ()
    return max(sample.total for sample in meter.ledger.samples())


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("dpo", {"fused_loss": liger_losses.dpo}),
        ("kto", {"fused_loss": liger_losses.kto}),
        ("gkd", {"divergence": liger_losses.jsd}),
    ],
)
def test_fewer_bytes_than_all_the_logits(name: str, fused: dict) -> None:
    plain = {} if name == "gkd" else {"logprobs": full}
    assert simulated_peak(name, **fused) < 0.7 * simulated_peak(name, **plain)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_grpo_runs_on_the_simulated_gpu(loss_type: str) -> None:
    options = {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "loss_type": loss_type}
    phases = simulated_phases(grpo.train, fused_loss=liger_losses.grpo, **options)
    assert phases.count("optimizer") == 2
