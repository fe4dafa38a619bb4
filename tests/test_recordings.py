"""Today's predictions against what a card read: the same integers, the same allocator."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memlab.errors import MemlabError
from memlab.experiments import Recipe, measure, price, record, recorded
from memlab.experiments.recordings import Recording, load, recordings
from memlab.instruments.measurement import Measurement

MIB = 1 << 20


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

    allocated = abs(predicted.peak_allocated_bytes - read.peak_allocated_bytes)
    if recording.recipe.expandable_segments:
        assert allocated <= MIB
    else:
        assert allocated <= max(0.0015 * read.peak_allocated_bytes, 8 * MIB)
    assert predicted.peak_reserved_bytes is not None
    assert read.peak_reserved_bytes is not None
    reserved = abs(predicted.peak_reserved_bytes - read.peak_reserved_bytes)
    assert reserved <= max(0.01 * read.peak_reserved_bytes, 20 * MIB)


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
