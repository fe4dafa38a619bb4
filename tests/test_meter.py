"""The meter reads the same events from real CPU tensors as from simulated ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memlab.experiments.recipe import Recipe
from memlab.experiments.training import prepare, train
from memlab.instruments.device import simulated_gpu
from memlab.instruments.ledger import Ledger
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.meter import Meter, rounded
from memlab.models.compat import fake_tensors_are_computed

MB = 1 << 20


def metered(step: Callable[[torch.device, Meter], object], *, simulated: bool) -> Meter:
    with simulated_gpu() if simulated else nullcontext(torch.device("cpu")) as device:
        meter = Meter(device.type)
        with meter:
            step(device, meter)
        return meter


def trained(recipe: Recipe, *, simulated: bool) -> Meter:
    """A run with batches that are made on the device, so that the host's are no part of it."""
    prepared = prepare(recipe, "cpu")
    host = prepared.steps

    def on(device: torch.device) -> Iterator[list[dict[str, Tensor]]]:
        for micro_batches in host:
            yield [
                {
                    name: batch[name].to(device) if simulated else batch[name].clone()
                    for name in ("input_ids", "labels")
                }
                for batch in micro_batches
            ]

    with simulated_gpu() if simulated else nullcontext(torch.device("cpu")) as device:
        meter = Meter(device.type, vocab_size=prepared.vocab_size)
        steps: list = on(device)  # type: ignore[assignment]
        with fake_tensors_are_computed(), meter:
            for _ in train(replace(prepared, steps=steps), device, meter, init=False):
                meter.begin_step()
        return meter


def history(ledger: Ledger) -> list[tuple[int, int, int]]:
    """Every event with its bytes and category; which operation made them is the device's affair."""
    births = (ledger.births[max(event, ~event)] for event in ledger.events)
    return [
        (event, birth.nbytes, birth.category)
        for event, birth in zip(ledger.events, births, strict=True)
    ]


@pytest.mark.parametrize(
    "switches",
    [
        {"loss_type": "nll", "gradient_checkpointing": False},
        {"loss_type": "nll"},
        {"gradient_checkpointing": False},
        {"dataset": "chat"},
        {"loss_type": "dft", "dataset": "prompt_completion"},
        {"optim": "sgd", "gradient_accumulation_steps": 2, "dataset": "docstrings"},
        {"model": "memlab/tiny-gemma2"},
        {"model": "memlab/tiny-llama", "dtype": "float32"},
    ],
    ids=lambda switches: "-".join(str(value) for value in switches.values()),
)
def test_a_step_on_real_cpu_tensors_equals_the_simulated_one(switches: dict) -> None:
    recipe = Recipe.of(
        **{"model": "memlab/tiny", "max_length": 64, "attn_implementation": "eager", **switches}
    )
    real, simulated = (trained(recipe, simulated=which) for which in (False, True))
    assert len(real.ledger.events) > 500
    assert history(real.ledger) == history(simulated.ledger)
    assert real.ledger.phases == simulated.ledger.phases
    assert real.live_bytes == simulated.live_bytes


def test_boolean_masks_equal_and_their_integer_indices_are_not_counted() -> None:
    flags = torch.arange(600).remainder(3) == 0

    def step(device: torch.device, meter: Meter) -> None:
        mask = flags.to(device, copy=True)
        x = torch.ones(600, 40, device=device, requires_grad=True)
        picked = x[mask]
        assert picked.shape == (200, 40)
        alive = rounded(600) + rounded(600 * 160) + rounded(200 * 160)
        assert meter.live_bytes == alive  # no integer indices beside them
        y = torch.zeros(600, 40, device=device)
        y[mask] = picked.detach()
        (picked.sum() / mask.sum()).backward()
        assert int(mask.nonzero().shape[0]) == 200

    real, simulated = (metered(step, simulated=which) for which in (False, True))
    assert history(real.ledger) == history(simulated.ledger)


def test_storage_resizes_are_seen() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        x = torch.empty(MB, device=device)
        assert meter.live_bytes == 4 * MB
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(0)  # FSDP2 frees what may be free already
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(8 * MB)
        assert meter.live_bytes == 8 * MB
        y = torch.empty(0, device=device)
        y.resize_(1000)
        assert meter.live_bytes == 8 * MB + rounded(4000)
        del x
        assert meter.live_bytes == rounded(4000)

    real, simulated = (metered(step, simulated=which) for which in (False, True))
    assert history(real.ledger) == history(simulated.ledger)


def test_a_resized_parameter_stays_one() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        x = torch.empty(MB, device=device)
        meter.label("parameters", [x])
        for nbytes in (0, 4 * MB, 8 * MB):  # emptied, filled again, grown
            x.untyped_storage().resize_(nbytes)
            last = list(meter.ledger.samples())[-1]
            assert last.bytes[CATEGORIES.index("parameters")] == nbytes == last.total

    for simulated in (False, True):
        metered(step, simulated=simulated)


def test_a_view_is_no_second_storage_and_sizes_are_rounded() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        x = torch.empty(129, device=device)  # 516 B
        views = (x[3:], x.t(), x.expand(4, 129), x.detach())
        assert meter.live_bytes == 1024
        del x
        assert meter.live_bytes == 1024
        del views
        assert meter.live_bytes == 0

    for simulated in (False, True):
        metered(step, simulated=simulated)


def test_categories_follow_who_made_a_storage_and_when() -> None:
    vocabulary, width = 640, 128

    def step(device: torch.device, meter: Meter) -> None:
        meter.vocab_size = vocabulary
        with device:
            body, head = nn.Linear(width, width), nn.Linear(width, vocabulary, bias=False)
        model = nn.Sequential(body, nn.GELU(), head)
        optimizer = torch.optim.AdamW(model.parameters())
        meter.watch(model, optimizer)
        x = torch.ones(1000, width, device=device)
        for _ in range(2):
            meter.begin_step()
            with meter.phase("forward"):
                loss = checkpoint(model, x, use_reentrant=False).float().logsumexp(-1).mean()
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()

    for simulated in (False, True):
        meter = metered(step, simulated=simulated)
        samples = list(meter.ledger.samples())
        peak = dict(
            zip(CATEGORIES, max(samples, key=lambda sample: sample.total).bytes, strict=True)
        )
        weights = rounded(4 * width * width) + rounded(4 * width) + rounded(4 * width * vocabulary)
        assert peak["parameters"] == weights
        assert peak["optimizer_state"] >= 2 * weights
        assert peak["logits"] >= 4 * 1000 * vocabulary
        assert peak["kv_cache"] == 0
        gradients = CATEGORIES.index("gradients")
        in_optimizer = [s.bytes[gradients] for s in samples if s.phase == "optimizer"]
        assert max(in_optimizer) == weights
        activations = CATEGORIES.index("activations")
        kept = rounded(4 * 1000 * width)  # the checkpoint rebuilds what is inside
        in_backward = [s.bytes[activations] for s in samples if s.phase == "backward"]
        assert max(in_backward) >= 2 * kept


def test_an_in_place_write_to_a_saved_tensor_still_raises() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        a = torch.ones(8, device=device, requires_grad=True)
        b = a.exp()
        b.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()

    for simulated in (False, True):
        metered(step, simulated=simulated)


def test_bytes_on_the_host_are_counted_apart() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        x = torch.empty(MB, device=device)
        meter.begin_step()
        host = x.to("cpu")
        assert meter.host_bytes == 4 * MB
        more = x.to("cpu")
        del host
        assert (meter.host_bytes, meter.host_peak_bytes) == (4 * MB, 8 * MB)
        meter.begin_step()  # what lies there already counts
        assert meter.host_peak_bytes == 4 * MB
        del more
        assert meter.host_bytes == 0

    meter = metered(step, simulated=True)
    assert meter.host_peak_bytes == 4 * MB
    assert max(sample.total for sample in meter.ledger.samples()) == 4 * MB


def test_nothing_is_counted_after_the_meter() -> None:
    with simulated_gpu() as device:
        meter = Meter(device.type)
        with meter:
            x = torch.empty(100, device=device)
        events, phases = len(meter.ledger.events), len(meter.ledger.phases)
        del x
        with meter.phase("forward"):
            pass
        assert len(meter.ledger.phases) == phases
        y = torch.empty(100, device=device)
    del y
    assert len(meter.ledger.events) == events == 1


def test_a_failed_step_leaves_the_process_as_it_was() -> None:
    resize, lifted = torch.UntypedStorage.resize_, torch._C._only_lift_cpu_tensors()

    def failing_step(device: torch.device, meter: Meter) -> None:
        with meter.phase("forward"):
            torch.empty(100, device=device)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        metered(failing_step, simulated=True)
    assert torch.UntypedStorage.resize_ is resize
    assert torch._C._only_lift_cpu_tensors() == lifted
    assert torch.autograd.is_multithreading_enabled()
    assert torch.ones(2).sum() == 2


def test_a_caches_storages_can_be_named() -> None:
    def step(device: torch.device, meter: Meter) -> None:
        keys = [torch.empty(2, 4, 16, device=device) for _ in range(3)]
        meter.label("kv_cache", keys)
        meter.label("kv_cache", [None, "not a tensor"])
        last = list(meter.ledger.samples())[-1]
        assert last.bytes[CATEGORIES.index("kv_cache")] == 3 * 512 == last.total

    for simulated in (False, True):
        metered(step, simulated=simulated)


def test_a_frozen_models_weights_are_parameters() -> None:
    """The policy's bytes and once more as many: gradients and optimizer state are the policy's."""
    width, words = 128, 640

    def step(device: torch.device, meter: Meter) -> None:
        with device:
            policy, other = (nn.Linear(width, words, bias=False) for _ in range(2))
            backbone = nn.LayerNorm(width, bias=False)
        backbone.register_buffer("positions", torch.zeros(width, device=device))
        weights, rest = rounded(4 * width * words), 2 * rounded(4 * width)
        optimizer = torch.optim.SGD(policy.parameters(), momentum=0.9)
        meter.watch(policy, optimizer)
        for part in (backbone, other.requires_grad_(False)):  # as of trainers' HeadParts
            meter.watch(part.requires_grad_(False))
        for _ in range(2):
            meter.begin_step()
            x = torch.ones(10, width, device=device)
            with meter.phase("reference"), torch.no_grad():
                fixed = other(backbone(x))
            with meter.phase("backward"):
                (policy(x) - fixed).sum().backward()
            with meter.phase("optimizer"):
                optimizer.step()
        last = dict(zip(CATEGORIES, list(meter.ledger.samples())[-1].bytes, strict=True))
        assert last["parameters"] == 2 * weights + rest
        assert last["gradients"] == last["optimizer_state"] == weights

    for simulated in (False, True):
        meter = metered(step, simulated=simulated)
        assert {"reference", "backward"} <= {name for _, name in meter.ledger.phases}
