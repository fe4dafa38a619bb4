"""measure and compare: devices, the cache, and figures that add up."""

import json
from pathlib import Path

import pytest
import torch

from memlab.errors import MemlabError
from memlab.experiments import Recipe, card, compare, measure, measuring
from memlab.experiments.simulation import _kept_run, replay, simulated_run
from memlab.instruments.allocator import CachingAllocator
from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.instruments.workspaces import CUBLAS_WORKSPACE, workspaces
from memlab.models.build import load_config

TINY = Recipe.of(model="memlab/tiny", max_length=32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("memlab.data.disk.user_cache_dir", lambda name: str(tmp_path))
    return tmp_path


def test_figures_add_up() -> None:
    m = measure(TINY, device="simulated")
    assert sum(m.by_category.values()) == sum(m.by_op.values()) == m.metered_peak_bytes
    assert m.peak.total == m.metered_peak_bytes
    assert m.peak_allocated_bytes >= m.metered_peak_bytes + 2 * CUBLAS_WORKSPACE
    assert m.peak_reserved_bytes is not None
    assert m.peak_reserved_bytes >= m.peak_allocated_bytes
    assert m.simulated
    assert m.step_ms is None
    assert m.versions["torch"] == torch.__version__.split("+")[0]
    assert {s.phase for s in m.timeline} >= {"forward", "backward", "optimizer"}


def test_a_cached_simulation_is_the_same_and_an_edited_source_simulates_anew(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(TINY, device="simulated")
    (file,) = own_cache.rglob("simulated-*.json")
    with monkeypatch.context() as patch:
        patch.setattr("memlab.experiments.simulation.simulate", lambda *a, **k: pytest.fail("ran"))
        assert measure(TINY, device="simulated") == first
        patch.setattr(measuring, "_source_digest", lambda: "edited")
        with pytest.raises(pytest.fail.Exception):
            measure(TINY, device="simulated")
    file.write_text("{not json")
    assert measure(TINY, device="simulated") == first


def test_a_cached_measurement_that_does_not_add_up_is_made_again(own_cache: Path) -> None:
    first = measure(TINY, device="simulated")
    (file,) = own_cache.rglob("simulated-*.json")
    line = json.loads(json.loads(file.read_text()))
    file.write_text(json.dumps(json.dumps(line | {"metered_peak_bytes": 1})))
    assert measure(TINY, device="simulated") == first


def test_a_cache_folder_that_cannot_be_written_is_no_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = own_cache / "file"
    blocked.write_text("")
    monkeypatch.setattr("memlab.data.disk.user_cache_dir", lambda name: str(blocked))
    assert measure(TINY, device="simulated").simulated


def test_devices_that_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="device='tpu': unknown; give one of auto"):
        measure(TINY, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MemlabError, match="no CUDA card; give device=simulated"):
            measure(TINY, device="cuda")


def test_a_failed_child_gives_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: object) -> str:
        raise MemlabError("torch.OutOfMemoryError: no")

    monkeypatch.setattr(card._children, "ask", failed)
    with pytest.raises(MemlabError, match=r"failed: torch\.OutOfMemoryError: no$"):
        card.measure_in_child(TINY)


def test_a_child_is_told_the_allocator_setting_under_both_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}
    answer = measure(TINY, device="simulated").to_json()

    def ask(question: str, env: dict[str, str]) -> str:
        assert Recipe.of(**json.loads(question)).expandable_segments
        seen.update(env)
        return answer

    monkeypatch.setattr(card._children, "ask", ask)
    card.measure_in_child(TINY.replace(expandable_segments=True))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert seen[name] == "expandable_segments:True"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_a_child_without_a_card_says_so() -> None:
    try:
        with pytest.raises(MemlabError, match="the run on the card failed: "):
            card.measure_in_child(TINY)
    finally:
        card._children.stop()


def test_the_cpu_computes_it() -> None:
    m = measure(TINY, device="cpu")
    assert (m.device, m.simulated, m.peak_reserved_bytes) == ("cpu", False, None)
    assert m.peak_allocated_bytes == m.metered_peak_bytes
    assert (
        m.by_category["parameters"] == measure(TINY, device="simulated").by_category["parameters"]
    )


def test_compare_says_what_changed_and_what_it_saved() -> None:
    off = Recipe.off(model="memlab/tiny", max_length=64)
    comparison = compare(off, off.replace(gradient_checkpointing=True), device="simulated")
    assert comparison.changed == {"gradient_checkpointing": (False, True)}
    before, after = (m.peak_allocated_bytes for m in (comparison.before, comparison.after))
    assert comparison.saved_bytes == before - after > 0
    assert comparison.saved_share == pytest.approx(1 - after / before)
    assert comparison.price is None
    head, first, *_ = comparison.table().splitlines()
    assert head.startswith("MB ")  # tiny, and in GB all would be 0.00
    assert f"{before / 1e6:.2f}" in first


def test_accumulation_needs_less_than_one_large_batch() -> None:
    large = measure(TINY.replace(per_device_train_batch_size=8), device="simulated")
    small = measure(
        TINY.replace(per_device_train_batch_size=2, gradient_accumulation_steps=4),
        device="simulated",
    )
    assert small.metered_peak_bytes < large.metered_peak_bytes
    assert sum(1 for s in small.timeline if s.phase == "forward") > 4


def test_optimizer_state_comes_with_the_second_step() -> None:
    first = measure(TINY.replace(max_steps=1), device="simulated")
    second = measure(TINY, device="simulated")
    state = CATEGORIES.index("optimizer_state")
    assert first.timeline[0].bytes[state] == 0
    assert second.timeline[0].bytes[state] > 1.9 * second.by_category["parameters"]


def test_a_replay_is_the_allocator_model_over_the_ledger() -> None:
    meter = simulated_run(TINY)
    for expandable in (False, True):
        by_hand = CachingAllocator(expandable_segments=expandable)
        by_hand.replay(meter.ledger.allocations())
        replayed = replay(meter.ledger, expandable_segments=expandable)
        assert replayed.reserved_bytes == by_hand.reserved_bytes
        assert replayed.allocated_bytes == by_hand.allocated_bytes


@pytest.mark.parametrize(
    ("rows", "columns", "read"),  # allocation histories of an H200, torch 2.11
    [
        (4096, 1024, 33_554_432),
        (65_536, 128, 67_108_864),
        (32_768, 128, 33_554_432),
        (4096, 2048, 67_108_864),
    ],
)
def test_workspaces_of_row_sums_are_those_a_card_showed(rows: int, columns: int, read: int) -> None:
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    assert workspaces(torch.ops.aten.sum.dim_IntList, (x, [0]))[0] == read
    assert workspaces(torch.ops.aten.sum.dim_IntList, (x[:8], [0])) == ()
    assert workspaces(torch.ops.aten.sum.dim_IntList, (x, [1])) == ()


def test_workspaces_of_an_embedding_are_those_a_card_showed() -> None:
    backward = torch.ops.aten.embedding_dense_backward.default
    ids = torch.empty(4, 1024, dtype=torch.int64, device="meta")
    for size, read in ((1024, 18_452_480), (2048, 36_904_960)):
        gradient = torch.empty(4, 1024, size, dtype=torch.bfloat16, device="meta")
        inside = workspaces(backward, (gradient, ids, 151_936, -1, False))
        assert inside[-2:] == (36_040, read)
        assert workspaces(backward, (gradient[:3], ids[:3], 151_936, -1, False)) == ()


def test_each_thread_keeps_one_cublas_workspace() -> None:
    kept = [w for w in simulated_run(TINY).ledger.workspaces if w.kept]
    assert [w.nbytes for w in kept] == [(CUBLAS_WORKSPACE,)] * 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "read"),
    [
        (16, 8, 128, [262_144, 33_554_432, 16_777_216]),
        (32, 8, 64, [524_288, 33_554_432, 16_777_216]),
    ],
)
def test_workspaces_of_flash_attention_are_those_a_card_showed(
    heads: int, kv_heads: int, size: int, read: list[int]
) -> None:
    q = torch.empty(4, heads, 1024, size, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4, kv_heads, 1024, size, dtype=torch.bfloat16, device="meta")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert workspaces(backward, (None, q, k)) == (*read, read[-1])
    assert workspaces(backward, (None, q, q)) == tuple(read[:2])


def test_workspaces_of_flash_attention_follow_queries_rounded_up_and_keys() -> None:
    q, k = (
        torch.empty(2, heads, rows, 64, dtype=torch.bfloat16, device="meta")
        for heads, rows in ((8, 1050), (4, 3000))
    )
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows, of_keys = 4 * 2 * 8 * 1152, 2 * 2 * 8 * 3000 * 64  # 1152: a multiple of 128, not of 64
    assert workspaces(backward, (None, q, k)) == (rows, rows * 64, of_keys, of_keys)


def test_measurements_are_json_lines() -> None:
    m = measure(TINY, device="simulated")
    assert Measurement.from_json(m.to_json()) == m


def folder_model(folder: Path, **values: int) -> str:
    """A model folder: a Qwen3 configuration with these values."""
    tiny = load_config("memlab/tiny").to_dict() | values
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny))
    return str(folder)


def test_an_edited_model_folder_is_simulated_anew(tmp_path: Path) -> None:
    recipe = TINY.replace(model=folder_model(tmp_path / "my"))
    first = measure(recipe, device="simulated")
    assert measure(recipe, device="simulated", cache=False) == first
    folder_model(tmp_path / "my", vocab_size=4096)
    second = measure(recipe, device="simulated")
    assert second.by_category["parameters"] > first.by_category["parameters"]
    assert measure(recipe, device="simulated", cache=False) == second


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"vocab_size": 0}, "vocab_size=0 in its configuration"),
        ({"max_position_embeddings": 16}, "max_length=32: .* has 16 positions; give at most 16"),
        ({"model_type": "bert"}, "is an encoder"),
    ],
)
def test_a_model_that_cannot_train_so_is_refused(tmp_path: Path, values: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        measure(TINY.replace(model=folder_model(tmp_path / "m", **values)), device="simulated")
    assert "\n" not in str(error.value)


def test_a_broken_configuration_is_one_line(tmp_path: Path) -> None:
    folder = folder_model(tmp_path / "m")
    (Path(folder) / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"config\.json can't be read") as error:
        measure(TINY.replace(model=folder), device="simulated")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "switches",
    [
        {"per_device_train_batch_size": 1 << 24},
        {"gradient_accumulation_steps": 10**6},
        {"max_steps": 10**6},
    ],
)
def test_enormous_runs_are_refused_before_anything_is_made(switches: dict) -> None:
    with pytest.raises(ValueError, match="memlab runs at most") as error:
        measure(TINY.replace(**switches), device="simulated")
    assert next(iter(switches)) in str(error.value)


def test_what_the_caller_has_set_in_torch_does_not_matter() -> None:
    expected = measure(TINY, device="simulated", cache=False)
    _kept_run.cache_clear()
    with torch.no_grad(), torch.device("meta"):
        assert measure(TINY, device="simulated", cache=False) == expected
    _kept_run.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert measure(TINY, device="simulated", cache=False) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    _kept_run.cache_clear()
    with torch.inference_mode(), pytest.raises(MemlabError, match="inference_mode"):
        measure(TINY, device="simulated", cache=False)


@pytest.mark.parametrize("chunk", [0, True, 2.0])
def test_a_chunk_is_a_positive_int(chunk: object) -> None:
    with pytest.raises(ValueError, match="give the rows of a chunk"):
        measure(TINY, device="simulated", chunk=chunk)  # type: ignore[arg-type]
