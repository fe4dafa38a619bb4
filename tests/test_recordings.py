"""Today's predictions against what a card read: the same integers, the same allocator."""

import dataclasses
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from memlab.errors import MemlabError
from memlab.experiments import Recipe, measure, price, record, recorded
from memlab.experiments.benchmarks import benchmarks
from memlab.experiments.recordings import (
    NOISE,
    SHORT_MS,
    Recording,
    load,
    recordings,
    step_price,
)
from memlab.experiments.recordings import folder as recordings_folder
from memlab.experiments.simulation import replay, simulated_run
from memlab.experiments.trainer_batches import last_step
from memlab.instruments import allocator
from memlab.instruments.measurement import Measurement

MIB = 1 << 20

SMALL = Recipe.defaults(dataset="docstrings")
ADDRESSES_DECIDE = (  # between free blocks of equal size, and the address space has unknown gaps
    SMALL,
    SMALL.replace(per_device_train_batch_size=8),
    Recipe.defaults(per_device_train_batch_size=1, max_length=512, pad_to_multiple_of=2048),
)


def runs() -> list:
    return [
        pytest.param(recording, id=f"{number}-{recording.recipe.model.split('/')[-1]}")
        for number, recording in enumerate(recordings())
    ]


def test_enough_is_recorded() -> None:
    recipes = [recording.recipe for recording in recordings()]
    assert len(set(recipes)) == len(recipes)
    assert len({recipe.model for recipe in recipes}) >= 3
    expandable = [recipe for recipe in recipes if recipe.expandable_segments]
    assert len(expandable) >= 12
    assert all(recipe.replace(expandable_segments=False) in recipes for recipe in expandable)
    assert all(r.reading.device == "NVIDIA H200" and not r.reading.simulated for r in recordings())
    assert all((r.reading.step_ms or 0) > 0 for r in recordings())


@pytest.mark.integers
@pytest.mark.parametrize("recording", runs())
def test_prediction_equals_the_reading(recording: Recording) -> None:
    predicted, read = measure(recording.recipe, device="simulated"), recording.reading
    differing = {
        op: (predicted.by_op.get(op, 0), read.by_op.get(op, 0))
        for op in {*predicted.by_op, *read.by_op}
        if predicted.by_op.get(op, 0) != read.by_op.get(op, 0)
    }
    assert predicted.metered_peak_bytes == read.metered_peak_bytes, (
        f"alive at the peak, by operation (here {predicted.versions}, "
        f"recorded {read.versions}): {differing}"
    )
    assert predicted.by_category == read.by_category, differing
    if recording.recipe in ADDRESSES_DECIDE:
        return

    allocated = abs(predicted.peak_allocated_bytes - read.peak_allocated_bytes)
    if recording.recipe.expandable_segments:
        assert allocated <= MIB
    else:
        assert allocated <= max(0.0015 * read.peak_allocated_bytes, 8 * MIB)
    assert predicted.peak_reserved_bytes is not None
    assert read.peak_reserved_bytes is not None
    reserved = abs(predicted.peak_reserved_bytes - read.peak_reserved_bytes)
    assert reserved <= max(0.01 * read.peak_reserved_bytes, 20 * MIB)


class Anywhere:
    """Segments at random addresses."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def place(self, nbytes: int) -> int:
        return self.random.randrange(1 << 40) << 24


@pytest.mark.integers
@pytest.mark.parametrize("recipe", ADDRESSES_DECIDE)
def test_where_addresses_decide_the_reading_is_among_what_they_allow(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a prediction: the card's value is one of those that some order of addresses gives."""
    ledger, read = simulated_run(recipe).ledger, recorded(recipe)
    allocated, reserved = [], []
    for seed in range(40):
        monkeypatch.setattr(allocator, "Addresses", lambda seed=seed: Anywhere(seed))
        replayed = replay(ledger, expandable_segments=False)
        allocated.append(replayed.peak_allocated_bytes)
        reserved.append(replayed.peak_reserved_bytes)
    assert read is not None
    assert read.peak_reserved_bytes is not None
    assert min(allocated) <= read.peak_allocated_bytes <= max(allocated)
    assert min(reserved) <= read.peak_reserved_bytes <= max(reserved)
    assert max(reserved) / min(reserved) < 1.1


def test_padding_free_bytes_shrink_as_the_slots_do() -> None:
    """Within 3 %, read on a card: activations and logits, 1.7B, documentation strings."""
    pairs = 0
    for after in recordings():
        before = recorded(after.recipe.replace(padding_free=False))
        peaks_in_backward = after.reading.by_category["logits"] > 0
        if not (after.recipe.padding_free and before and peaks_in_backward):
            continue
        batches = [
            last_step(recipe)[-1]
            for recipe in (after.recipe, after.recipe.replace(padding_free=False))
        ]
        share = batches[0]["labels"].numel() / batches[1]["labels"].numel()
        assert share < 0.5
        for category in ("activations", "logits"):
            left = after.reading.by_category[category] / before.by_category[category]
            assert left == pytest.approx(share, rel=0.03)
        pairs += after.recipe.model == "Qwen/Qwen3-1.7B"
    assert pairs >= 3


def test_benchmarks_name_their_device_and_versions() -> None:
    lines = (recordings_folder() / "benchmarks.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    assert {result["benchmark"] for result in results} == {"padding_free", "head"}
    for result in results:
        assert result["device"] == "NVIDIA H200"
        assert {"python", "torch", "transformers"} <= result["versions"].keys()


def test_benchmarks_of_padding_free_add_up() -> None:
    for result in benchmarks("padding_free"):
        padded, free = (result["sides"][side] for side in ("padded", "padding-free"))
        share = result["useful_tokens"] / result["padded_slots"]
        assert free["ratio"] == pytest.approx(free["ms"] / (padded["ms"] * share), rel=1e-3)
        assert free["loss"] == pytest.approx(padded["loss"], rel=1e-3)  # bf16
    newest = benchmarks("padding_free")[-1]
    assert newest["sides"]["padding-free"]["ratio"] <= 1.03


def test_the_fused_head_is_as_exact_as_full_logits_and_within_its_bytes_and_time() -> None:
    newest = benchmarks("head")[-1]["shapes"]
    most_mib = {"trained": {"fast": 1539, "frugal": 700}, "frozen": {"fast": 400}}
    slowest = {
        "trained": {"fast": 1.20, "frugal": 1.45},
        "frozen": {"fast": 1.20},
        "half masked": {"fast": 0.62},
    }
    for name, shape in newest.items():
        for mode in ("fast", "frugal"):
            side, full = shape["sides"][f"memlab {mode}"], shape["sides"]["full logits"]
            for error, others in zip(side["errors"], full["errors"], strict=True):
                assert error <= 1.1 * others
            assert side["extra_mib"] <= most_mib.get(name, {}).get(mode, full["extra_mib"])
            assert side["ratio"] <= slowest[name].get(mode, full["ratio"])


def test_recorded_finds_exactly_the_recipe() -> None:
    recording = recordings()[0]
    assert recorded(recording.recipe) == recording.reading
    assert recorded(recording.recipe.replace(max_length=7)) is None


def test_price_is_read_or_left_open() -> None:
    before, after = Recipe.off(), Recipe.off(gradient_checkpointing=True)
    slow, fast = recorded(after), recorded(before)
    assert slow is not None
    assert fast is not None
    share = round(100 * (slow.step_ms / fast.step_ms - 1))  # type: ignore[operator]
    assert price(before, after) == f"{share:+d} % (NVIDIA H200, recorded)"
    assert price(before, after.replace(max_length=7)) == "—"


def test_a_difference_of_short_steps_is_no_price() -> None:
    short = Recipe.off(), Recipe.off(expandable_segments=True)
    assert price(*short) == "within noise (NVIDIA H200, recorded)"
    long = Recipe.off(
        model="Qwen/Qwen3-1.7B",
        dataset="docstrings",
        per_device_train_batch_size=16,
        max_length=2048,
    )
    assert price(long, long.replace(expandable_segments=True)) == "+4 % (NVIDIA H200, recorded)"
    assert price(long, long.replace(padding_free=True)) == "-75 % (NVIDIA H200, recorded)"


def timed(ms: float | None) -> Measurement:
    return replace(recordings()[0].reading, step_ms=ms)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (200, 330, "+65 %"),
        (200, 310, "within noise"),
        (310, 200, "within noise"),
        (390, 410, "+5 %"),
        (1000, 360, "-64 %"),
        (None, 100, None),
        (100, None, None),
    ],
)
def test_the_price_of_any_two_readings_knows_noise(
    before: float | None, after: float | None, said: str | None
) -> None:
    assert step_price(timed(before), timed(after)) == said


def lesson_cells(lesson: str) -> list[tuple[str, str]]:
    """Source and printed text of each cell of a lesson."""
    (path,) = recordings_folder().parent.glob(f"{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = ["".join("".join(o.get("text", "")) for o in c.get("outputs", ())) for c in cells]
    return [("".join(c["source"]), said) for c, said in zip(cells, printed, strict=True)]


@pytest.mark.parametrize("lesson", ["02", "03", "04", "05", "06", "07", "13"])
def test_lessons_name_the_noise_before_they_print_a_price(lesson: str) -> None:
    sources = [source for source, _ in lesson_cells(lesson)]
    assert not [source for source in sources if ".price" in source]  # the bare ratio
    priced = [i for i, source in enumerate(sources) if "step_price(c.before, c.after)" in source]
    text = sources[priced[0] - 1].split("### The price")[1]
    assert f"less than {SHORT_MS:.0f} ms" in text
    assert f"less than {NOISE:.0%}".replace("%", " %") in text


@pytest.mark.parametrize("lesson", ["02", "03", "04", "05", "06", "07", "13"])
def test_the_price_of_a_lessons_row_is_that_over_everything_off(lesson: str) -> None:
    (path,) = recordings_folder().parent.glob(f"{lesson}_*.ipynb")
    text = path.read_text(encoding="utf-8")
    printed = "".join(said for _, said in lesson_cells(lesson))
    (said,) = re.findall(r"^price of .*, everything off: (.*)$", printed, re.MULTILINE)
    assert f'"price": "{said}"' in text


def test_a_recording_round_trips() -> None:
    for recording in recordings():
        assert Recording.from_json(recording.to_json()) == recording


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    good = recordings()[0].to_json()
    for bad in (good[:-20], "{}", good.replace('"max_length"', '"max_len"')):
        file = tmp_path / "h200.jsonl"
        file.write_text(f"{good}\n{bad}\n", encoding="utf-8")
        with pytest.raises(MemlabError, match=r"h200\.jsonl, line 2: corrupt recording") as error:
            list(load(file))
        assert "\n" not in str(error.value)


def test_recording_adds_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reading = dataclasses.replace(recordings()[0].reading, step_ms=1.0)
    ran = []

    def on_the_card(recipe: Recipe) -> Measurement:
        ran.append(recipe)
        return reading

    monkeypatch.setattr(record, "measure_in_child", on_the_card)
    monkeypatch.setattr(record, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    tiny = Recipe.of(model="memlab/tiny", max_length=16)
    file = tmp_path / "measured" / "h200.jsonl"
    record.record([tiny], file)
    record.record([tiny, tiny.replace(max_length=32)], file)
    assert ran == [tiny, tiny.replace(max_length=32)]
    assert [line.recipe for line in load(file)] == ran
    predicted = measure(tiny, device="simulated")
    assert next(load(file)).prediction == dataclasses.replace(predicted, timeline=())
    assert "memlab/tiny" in capsys.readouterr().out


def test_every_run_to_record_is_recorded() -> None:
    assert {recording.recipe for recording in recordings()} == set(record.to_record())
