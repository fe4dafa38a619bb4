"""Figures and widgets: what they show, say and compute; no torch, made-up steps."""

import base64
import dataclasses
import html
import itertools
import json
import re
from pathlib import Path

import ipywidgets
import pytest
from made_steps import made_step
from matplotlib.collections import LineCollection

from memlab.errors import MemlabError
from memlab.instruments.measurement import CATEGORIES, Measurement, Sample
from memlab.widgets import Grid, explore, predict, scrub, show_bars, show_timeline
from memlab.widgets.explorer import Explore
from memlab.widgets.figures import bars, new_figure, phases, timeline
from memlab.widgets.style import LOOKS, change, gb

OFF = made_step()
ON = made_step(checkpointing=True, logits_mb=150)
CHUNKS = (32, 256, 1024, 4096)


def step_of(setting: dict) -> Measurement:
    return made_step(checkpointing=True, logits_mb=max(20, setting["chunk"] * 6 // 10))


def texts(ax: object) -> list[str]:
    return [t.get_text() for t in ax.texts]  # type: ignore[attr-defined]


def test_gb_and_change() -> None:
    assert gb(19_786_000_000) == "19.79 GB"
    assert change(20_000_000_000, 5_000_000_000) == "−15.00 GB (−75 %)"
    assert change(0, 10_000_000) == "+0.01 GB"


def test_every_category_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(CATEGORIES)
    assert len({look.colour for look in LOOKS.values()}) == len(CATEGORIES)
    assert len({look.hatch for look in LOOKS.values()}) == len(CATEGORIES)


def test_bars_are_as_long_as_the_bytes_and_say_totals_and_reserved() -> None:
    ax = new_figure(8, 2).add_axes((0.1, 0.2, 0.8, 0.7))
    bars(ax, [("before", OFF), ("after", ON)])
    for y, m in enumerate((OFF, ON)):
        filled = [p for p in ax.patches if round(p.get_y() + 0.31) == y and p.get_fill()]
        widths = [round(p.get_width()) for p in filled]
        assert widths == [n for n in m.by_category.values() if n]
        assert gb(m.metered_peak_bytes) in texts(ax)
        assert f"reserved {gb(m.peak_reserved_bytes)}" in texts(ax)  # type: ignore[arg-type]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["before", "after"]


def test_bars_name_every_category_once_inside_or_in_the_key() -> None:
    ax = new_figure(8, 2).add_axes((0.1, 0.2, 0.8, 0.7))
    bars(ax, [("before", OFF)])
    inside = {t.split("\n")[0] for t in texts(ax)}
    key = {t.get_text() for a in ax.artists for t in getattr(a, "texts", [])}
    names = {LOOKS[c].name for c, n in OFF.by_category.items() if n}
    assert names <= inside | key
    assert not inside & key


def test_bars_stay_inside_the_figure() -> None:
    figure = new_figure(8, 2)
    ax = figure.add_axes((0.1, 0.2, 0.88, 0.7))
    bars(ax, [("before", OFF), ("after", ON)])
    figure.canvas.draw()
    right = figure.bbox.x1
    assert all(t.get_window_extent().x1 <= right for t in ax.texts)


def test_timeline_marks_the_peak_and_names_phases() -> None:
    ax = new_figure(8, 3).add_axes((0.1, 0.1, 0.8, 0.8))
    timeline(ax, OFF)
    (x,), (y,) = ax.lines[-1].get_data()
    assert (x, y) == (OFF.peak.event, OFF.metered_peak_bytes)
    assert {"forward", "backward", f"peak {gb(OFF.metered_peak_bytes)}"} <= set(texts(ax))


@pytest.mark.parametrize("step", [made_step(micro_batches=8, batch=1), ON])
def test_alternating_phases_are_all_named(step: Measurement) -> None:
    ax = new_figure(8, 3).add_axes((0.1, 0.1, 0.8, 0.8))
    timeline(ax, step)
    key = {t.get_text() for a in ax.artists for t in getattr(a, "texts", [])}
    assert {s.phase for s in step.timeline} <= set(texts(ax)) | key


def test_phases_cover_the_step_without_gaps() -> None:
    runs = phases(made_step(micro_batches=2))
    assert [name for name, _, _ in runs][:3] == ["forward", "backward", "forward"]
    assert all(a[2] == b[1] for a, b in itertools.pairwise(runs))


def test_a_missing_timeline_or_row_is_an_error() -> None:
    bare = dataclasses.replace(OFF, timeline=())
    for show in (show_timeline, scrub):
        with pytest.raises(ValueError, match="no timeline"):
            show(bare)
    with pytest.raises(ValueError, match="empty"):
        show_bars({})


def test_shown_gives_picture_alt_text_and_the_same_numbers_as_text() -> None:
    shown = show_bars({"before": OFF, "after": ON})
    data, metadata = shown._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == repr(shown)
    assert re.search(r"metered peak +19\.78 +5\.05$", repr(shown))
    assert gb(OFF.metered_peak_bytes, unit=False) in metadata["image/png"]["alt"]
    assert f'<img alt="{html.escape(shown.alt)}"' in shown.html()
    assert repr(shown) == repr(show_bars({"before": OFF, "after": ON}))
    assert shown.png(50) == show_bars({"before": OFF, "after": ON}).png(50)


@pytest.mark.parametrize(("events", "stems"), [((0, 500, 1000), 0), ((0, 990, 991, 1000), 1)])
def test_a_ring_on_a_thin_spike_has_a_stem(events: tuple[int, ...], stems: int) -> None:
    heights = [20, *(21 + 10 * (event > 0) for event in events[1:-1]), 20]
    heights[2:-1] = [22] * len(heights[2:-1])  # beside the spike
    rest = (0,) * (len(CATEGORIES) - 1)
    step = tuple(
        Sample(event, "backward", (height * 10**8, *rest))
        for event, height in zip(events, heights, strict=True)
    )
    figure = new_figure(9, 3)
    ax = figure.add_axes((0.06, 0.1, 0.9, 0.8))
    timeline(ax, dataclasses.replace(OFF, timeline=step, metered_peak_bytes=31 * 10**8))
    drawn = [lines for lines in ax.collections if isinstance(lines, LineCollection)]
    assert len(drawn) == stems
    for lines in drawn:
        ((low, high),) = lines.get_segments()
        assert tuple(low) == (990, 22 * 10**8)
        assert tuple(high) == (990, 31 * 10**8)


def test_timelines_are_drawn_on_one_scale() -> None:
    figure = new_figure(8, 5)
    show_timeline({"before": OFF, "after": ON})._draw(figure)
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()


def grid() -> Grid:
    axes = {"chunk": CHUNKS, "layers": (2, 28)}
    return Grid.simulate(
        axes, lambda s: made_step(layers=s["layers"], logits_mb=s["chunk"]), {"torch": "2.13"}
    )


def test_grid_round_trips_and_finds_what_changed(tmp_path: Path) -> None:
    made = grid()
    made.save(tmp_path / "grid.json")
    assert len(json.loads((tmp_path / "grid.json").read_text())["values"]) == 8
    read = Grid.load(tmp_path / "grid.json")
    assert read == made
    setting = {"chunk": 256, "layers": 28}
    assert sum(read.at(setting).values()) == made_step(logits_mb=256).metered_peak_bytes
    same = read.differences(lambda s: made_step(layers=s["layers"], logits_mb=s["chunk"]))
    assert same == []
    assert len(read.differences(lambda s: OFF, sample=3)) == 3


@pytest.mark.parametrize("text", ["", "[]", '{"axes": {"chunk": [1]}, "categories": []}'])
def test_a_corrupt_grid_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "grid.json").write_text(text)
    with pytest.raises(MemlabError, match="no grid") as error:
        Grid.load(tmp_path / "grid.json")
    assert "\n" not in str(error.value)


def test_moving_a_slider_redraws_with_one_figure() -> None:
    shown = explore(grid(), start={"chunk": 256})
    figure, pictures = shown.figure, [shown.image.value]
    for chunk in (1024, 4096):
        shown.controls["chunk"].value = chunk
        pictures.append(shown.image.value)
        assert gb(sum(grid().at(shown.setting).values())) in shown.status.value
    assert len(set(pictures)) == 3
    assert shown.figure is figure
    shown.controls["chunk"].value = 256
    assert shown.image.value == pictures[0]
    shown.controls["layers"].value = 28
    assert shown.along == "layers"
    assert shown.failure is None


def test_controls_are_described_keyboard_friendly_and_not_continuous() -> None:
    shown = explore(grid(), labels={"chunk": "rows a chunk"})
    assert [c.description for c in shown.controls.values()] == ["rows a chunk", "layers"]
    assert not any(c.continuous_update for c in shown.controls.values())
    words = explore(lambda s: OFF, axes={"optim": ["sgd", "adamw"]})
    assert isinstance(words.controls["optim"], ipywidgets.Dropdown)


def exact_marks(shown: Explore) -> list[float]:
    """Where the curve's picture has diamonds, in steps along the axis."""
    return [line.get_xdata()[0] for line in shown._ax.lines if line.get_marker() == "D"]


def test_simulate_exactly_shows_the_result_or_the_error() -> None:
    def exact(setting: dict) -> Measurement:
        if setting["chunk"] < 1:
            raise ValueError("chunk=0: below 1; give 1 or more")
        return step_of(setting)

    shown = explore({c: step_of({"chunk": c}) for c in CHUNKS}, axes="chunk", exact=exact)
    before = shown.image.value
    shown.fields["chunk"].value = 2000
    shown.button.click()
    assert gb(step_of({"chunk": 2000}).metered_peak_bytes) in shown.status.value
    assert shown.image.value != before
    assert exact_marks(shown) == [pytest.approx(2 + (2000 - 1024) / (4096 - 1024))]
    shown.fields["chunk"].value = 0
    shown.button.click()
    assert isinstance(shown.failure, ValueError)
    assert "below 1; give 1 or more" in shown.error.value
    assert not shown.button.disabled
    shown.controls["chunk"].value = 256
    assert shown.failure is None
    assert shown.error.value == ""
    assert exact_marks(shown) == []
    assert "exactly" not in shown.status.value


def test_an_exact_setting_lies_between_its_neighbours_of_unsorted_steps() -> None:
    shown = explore(step_of, axes={"chunk": [4096, 32, 1024]}, exact=step_of)
    shown.fields["chunk"].value = 528
    shown.button.click()
    assert exact_marks(shown) == [1.5]


def test_a_reference_may_follow_the_setting() -> None:
    def full(setting: dict) -> int:
        return 10**9 * setting["max_length"]

    steps = {"chunk": [32, 256], "max_length": [1, 20]}
    shown = explore(step_of, axes=steps, reference=("all logits", full))
    assert "all logits: 1.00 GB" in shown.status.value
    shown.controls["max_length"].value = 20
    assert "all logits: 20.00 GB" in shown.status.value
    assert shown._limit() == 20 * 10**9
    assert shown.failure is None


def test_an_error_in_an_observer_is_shown_not_lost() -> None:
    def broken(setting: dict) -> Measurement:
        if setting["chunk"] == 256:
            raise RuntimeError("no\nmemory <here>")
        return step_of(setting)

    shown = explore(broken, axes={"chunk": list(CHUNKS)})
    shown.controls["chunk"].value = 256
    assert "RuntimeError: no memory &lt;here&gt;" in shown.error.value
    shown.controls["chunk"].value = 1024
    assert shown.error.value == ""


def test_explore_refuses_axes_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="axes"):
        explore({32: OFF})
    with pytest.raises(ValueError, match="axes"):
        explore(step_of, axes={"chunk": []})
    with pytest.raises(ValueError, match="chunk=7"):
        explore(grid(), start={"chunk": 7})


def test_scrub_starts_at_the_peak_and_follows_the_slider() -> None:
    shown = scrub(OFF)
    assert shown.sample == OFF.peak
    first = shown.image.value
    shown.slider.value = 3
    assert shown.image.value != first
    assert gb(OFF.timeline[3].total) in shown.status.value
    assert re.search(r"alive +19\.78", repr(shown))


def test_interactive_bundles_hold_view_picture_and_text() -> None:
    for shown in (explore(grid()), scrub(OFF)):
        data, metadata = shown._repr_mimebundle_()
        assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
        assert metadata["image/png"]["alt"] == shown.says()
        assert " at 0x" not in data["text/plain"]
    bundle = predict("Which?", ["a", "b"])._repr_mimebundle_()
    assert bundle["text/plain"] == "Which?\n  ( ) a\n  ( ) b"


def test_a_guess_is_locked_once_and_shown_beside_the_answer() -> None:
    question = predict("Which bar shrinks?", ["logits", "activations"])
    assert question.guess is None
    assert "no guess" in question.beside("logits")
    question.button.click()
    assert "choose one of" in question.status.value
    question.choice.value = "activations"
    question.button.click()
    assert question.guess == "activations"
    assert question.choice.disabled
    assert question.beside("logits").endswith("You guessed: activations. The answer: logits.")
    with pytest.raises(ValueError, match="locked"):
        question.lock("logits")


def test_sentences_guessed_and_right_stay_readable() -> None:
    question = predict("What happens?", ["it halves", "it falls by less than half"])
    question.lock("it halves")
    right = "What happens? You guessed: it halves. The answer: it falls by less than half."
    assert question.beside("it falls by less than half") == right


def test_a_guess_of_a_number_has_a_range() -> None:
    question = predict("Peak?", (0, 20), unit="GB")
    with pytest.raises(ValueError, match="from 0 to 20"):
        question.lock(21)
    question.lock(5.5)
    assert question.beside(5.4) == "Peak? You guessed 5.50 GB; it is 5.40 GB."
    with pytest.raises(ValueError, match="low < high"):
        predict("Peak?", (5, 5))
    with pytest.raises(ValueError, match="two or more"):
        predict("Which?", ["one"])
