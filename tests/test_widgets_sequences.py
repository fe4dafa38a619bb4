"""Figures of the sequence lessons: their numbers against slow counting, what they draw and say."""

import base64
import io
import itertools
import re
from collections.abc import Callable

import ipywidgets
import numpy as np
import pytest
from made_steps import made_step
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from memlab.data.lengths import chat_like
from memlab.data.max_length import batch_widths
from memlab.instruments.measurement import CATEGORIES, Measurement
from memlab.techniques.packing import STRATEGIES, place
from memlab.widgets import (
    Grid,
    explore_layouts,
    explore_lengths,
    explore_multiples,
    explore_packing,
)
from memlab.widgets.bins import SHOWN, packed
from memlab.widgets.layouts import layouts
from memlab.widgets.length_explorer import spread
from memlab.widgets.live import Live
from memlab.widgets.multiples import largest_within, padded_to
from memlab.widgets.png import png
from memlab.widgets.rows import data_sets, length_steps, percent

SKEWED = [4096, 512, 512, 512]
CHAT = np.array(chat_like(600))
BATCH = "per_device_train_batch_size"


def grid() -> Grid:
    """1 GB and 2 MB a token, over 256 to 8192 tokens in batches of 1 and 4."""
    axes = {BATCH: (1, 4), "max_length": (256, 1024, 4096, 8192)}
    values = {
        f"{rows}, {length}": (10**9, *(0,) * (len(CATEGORIES) - 2), 2 * 10**6 * rows * length)
        for rows in axes[BATCH]
        for length in axes["max_length"]
    }
    return Grid(axes, values)


def all_four(lengths: object = CHAT) -> list[Live]:
    return [
        explore_lengths(lengths, grid=grid(), max_length=1024),
        explore_layouts(lengths, bytes_a_slot=4e6),
        explore_multiples(lengths),
        explore_packing(lengths, bytes_a_slot=4e6),
    ]


def drawn_texts(shown: Live) -> list[tuple[str, Bbox]]:
    """The texts of one picture and where they stand, those that move with the controls too."""
    over = shown.draw_over()
    texts = {t for artist in (shown.figure, *over) for t in artist.findobj(Text)}
    found = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_visible()]
    for artist in over:
        artist.remove()
    return [(text, box) for text, box in found if text]


def said(shown: Live) -> str:
    return " ".join(text for text, _ in drawn_texts(shown))


def clashes(shown: Live) -> list[tuple[str, str]]:
    """Pairs of texts that stand on one another, or beyond the figure's edge."""
    texts, figure = drawn_texts(shown), shown.figure.bbox.padded(1)
    found = [
        (a, b)
        for (a, x), (b, y) in itertools.combinations(texts, 2)
        if x.padded(-1, -3).overlaps(y)
    ]
    return found + [
        (a, "edge") for a, x in texts if not figure.contains(*x.min) or not figure.contains(*x.max)
    ]


# what they share


@pytest.mark.parametrize(
    "call", [explore_lengths, explore_layouts, explore_multiples, explore_packing]
)
def test_lengths_that_are_none_are_refused(call: Callable) -> None:
    for wrong, error in (([], "at least one"), ({}, "empty"), ([3, 0], "length of 0")):
        with pytest.raises(ValueError, match=rf"^{call.__name__}.*{error}"):
            call(wrong)
    with pytest.raises(TypeError, match="whole numbers"):
        call([1.5])


@pytest.mark.parametrize("which", range(4))
def test_a_bundle_holds_view_picture_and_table_without_addresses(which: int) -> None:
    shown = all_four()[which]
    data, metadata = shown._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"] == repr(shown) == repr(all_four()[which])
    assert " at 0x" not in repr(shown)
    assert metadata["image/png"]["alt"] == shown.says()
    assert shown.failure is None


def controls(shown: Live) -> list:
    kinds = (ipywidgets.SelectionSlider, ipywidgets.IntSlider, ipywidgets.Dropdown)
    return [c for c in shown.view.children if isinstance(c, kinds)]


@pytest.mark.parametrize("which", range(4))
def test_controls_are_described_and_redraw_the_one_figure(which: int) -> None:
    shown = all_four()[which]
    figure, first = shown.figure, shown.image.value
    for control in controls(shown):
        assert control.description
        assert getattr(control, "continuous_update", False) is False
    sliders = [c for c in controls(shown) if len(getattr(c, "options", ())) > 2]
    for slider in sliders:
        before, start = shown.status.value, slider.index
        slider.index = start - 1 if start else start + 1
        assert shown.failure is None
        assert shown.status.value != before
        assert shown.image.value != first
        slider.index = start
        assert shown.image.value == first
    assert shown.figure is figure
    assert len(sliders) >= 2


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("lengths", [SKEWED, CHAT, [7], [512] * 9])
def test_no_text_stands_on_another_or_beyond_the_edge(which: int, lengths: object) -> None:
    shown = all_four(lengths)[which]
    assert clashes(shown) == []
    for control in controls(shown):
        if isinstance(control, ipywidgets.SelectionSlider) and len(control.options) > 2:
            start = control.index
            for index in {0, len(control.options) // 2, len(control.options) - 1}:
                control.index = index
                assert shown.failure is None
                assert clashes(shown) == [], (control.description, control.value)
            control.index = start


@pytest.mark.parametrize("which", range(4))
def test_a_step_leaves_nothing_behind_and_draws_few_things_however_many_rows(which: int) -> None:
    shown = all_four(chat_like(20_000))[which]
    before = len(shown.figure.findobj())
    shown.redraw()
    assert len(shown.figure.findobj()) == before
    artists = [a for artist in (shown.figure, *shown.draw_over()) for a in artist.findobj()]
    assert len(artists) < 600


def test_an_error_is_shown_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explore_multiples(SKEWED)
    monkeypatch.setattr(shown, "says", lambda: 1 / 0)
    shown.multiple.value = 64
    assert "ZeroDivisionError" in shown.error.value
    assert isinstance(shown.failure, ZeroDivisionError)


def test_a_choice_of_data_sets_is_a_dropdown() -> None:
    sets = {"chat": CHAT, "equal": [512] * 8}
    for shown in all_four(sets):
        shown.data.value = "equal"  # type: ignore[attr-defined]
        assert shown.failure is None
    assert explore_lengths(CHAT).data.layout.display == "none"


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(png(pixels)))) == pixels).all()


def test_percentages_are_never_a_false_nothing_or_all() -> None:
    shares = (0, 0.0002, 0.034, 1 - 0.98, 0.413, 0.995, 0.99999, 1, 3.765)
    texts = "0, <0.1, 3.4, 2, 41, 99.5, >99.9, 100, 376"
    assert ", ".join(percent(s).removesuffix(" %") for s in shares) == texts


def test_steps_hold_both_ends_and_what_is_asked_for() -> None:
    assert length_steps(256, 1000, 300) == [256, 300, 320, 384, 448, 512, 640, 768, 896, 1000]
    assert length_steps(5, 5) == [5]


def test_batches_are_as_wide_as_their_longest_row() -> None:
    widths, rows = batch_widths(np.array([3, 9, 4, 1, 7]), 2)
    assert widths.tolist() == [9, 4, 7]
    assert rows.tolist() == [2, 2, 1]
    assert list(data_sets("f", [3, 4])) == ["rows"]


# a grid between its steps


def test_a_peak_between_steps_is_interpolated_and_says_so() -> None:
    made, batch = grid(), {BATCH: 1}
    assert made.peak({**batch, "max_length": 1024}, along="max_length") == (3_048_000_000, True)
    assert made.peak({**batch, "max_length": 2560}, along="max_length") == (6_120_000_000, False)
    for beyond in (255, 8193):
        with pytest.raises(ValueError, match=f"{beyond} is beyond the grid; give 256 to 8192"):
            made.peak({**batch, "max_length": beyond}, along="max_length")


# lengths


def test_the_skewed_batch_costs_what_one_counts() -> None:
    shown = explore_lengths(SKEWED, grid=grid(), max_length=1024, keep=0.9)
    cut = shown.cut(1024)
    assert cut.rows == 1 / 4
    assert cut.tokens == pytest.approx(3072 / 5632)
    assert cut.padding == pytest.approx(1 - (1024 + 3 * 512) / 4096)
    assert (cut.peak, cut.simulated) == (10**9 + 2 * 10**6 * 4 * 1024, True)
    assert shown.shortest == 4096 - 563
    assert "90 % kept from 3,533 on" in said(shown)
    assert "25 % of the rows cut" in said(shown)
    assert "9.19 GB" in said(shown)


def test_all_numbers_move_with_the_slider_and_the_batch() -> None:
    shown = explore_lengths(CHAT, grid=grid(), max_length=1024)
    for length, size in ((1024, 4), (1280, 4), (1280, 1)):
        shown.max_length.value, shown.batch.value = length, size
        kept = np.minimum(CHAT, length)
        slots = sum(len(b) * b.max() for b in np.split(kept, range(size, len(kept), size)))
        for number in ((kept < CHAT).mean(), 1 - kept.sum() / CHAT.sum(), 1 - kept.sum() / slots):
            assert percent(float(number)) in shown.status.value
        assert f"{1 + 0.002 * size * length:.2f} GB" in shown.status.value
        assert ("(interpolated)" in shown.status.value) == (length == 1280)
        assert ("≈" in said(shown)) == (length == 1280)


def test_the_second_slider_names_the_smallest_max_length() -> None:
    shown = explore_lengths(CHAT, grid=grid())
    for share in (0.8, 0.95, 1.0):
        shown.keep.value = share
        kept = [
            np.minimum(CHAT, n).sum() / CHAT.sum() for n in (shown.shortest - 1, shown.shortest)
        ]
        assert kept[0] < share <= kept[1]
        assert f"kept from {shown.shortest:,} on" in shown.status.value
        assert f"{shown.shortest:,}" in said(shown)


def test_the_histogram_holds_every_token_and_those_lost() -> None:
    shown = explore_lengths(CHAT, max_length=512)
    assert shown._heights.sum() == pytest.approx(1)
    for edge, share in zip(shown._edges[1:], shown._heights.cumsum(), strict=True):
        assert share == pytest.approx(CHAT[edge >= CHAT].sum() / CHAT.sum())
    lost = shown._in_bins(np.maximum(shown.lengths.ascending - 512, 0))
    assert lost.sum() == pytest.approx(shown.cut(512).tokens)
    assert lost[shown._edges[1:] <= 512].sum() == 0


def test_a_peak_beyond_the_grid_is_not_made_up() -> None:
    for rows, at in (([20_000, 30], 20_000), ([4, 4, 5], 5)):
        shown = explore_lengths(rows, grid=grid())
        assert shown.failure is None
        assert shown.cut(at).peak is None
        assert re.search(r"^100 %.*%$", repr(shown), re.M)


def test_simulate_exactly_takes_the_field_and_shows_errors() -> None:
    asked = []

    def exact(setting: dict) -> Measurement:
        asked.append(setting)
        if setting["max_length"] < 2:
            raise ValueError("max_length=1: below 2; give 2 or more")
        return made_step()

    shown = explore_lengths(CHAT, grid=grid(), max_length=1024, exact=exact)
    shown.keep.value = 0.9
    assert shown.field.value == shown.shortest
    shown.button.click()
    assert asked == [{BATCH: 4, "max_length": shown.shortest}]
    assert f"Simulated exactly, max_length {shown.shortest:,}: 19.78 GB" in shown.status.value
    assert "exactly 19.78 GB" in said(shown)
    shown.batch.value = 1
    assert "exactly" not in shown.status.value
    shown.field.value = 1
    shown.button.click()
    assert "below 2; give 2 or more" in shown.error.value
    assert not shown.button.disabled


def test_simulate_exactly_goes_no_further_than_the_longest_row_of_the_data_set() -> None:
    asked = []

    def exact(setting: dict) -> Measurement:
        asked.append(setting["max_length"])
        return made_step()

    sets = {"chat": CHAT, "short": [3, 5, 4, 3]}
    shown = explore_lengths(sets, grid=grid(), max_length=1024, exact=exact)
    shown.field.value = int(CHAT.max()) + 1
    shown.button.click()
    assert asked == [CHAT.max()]
    assert shown.field.value == CHAT.max()
    shown.data.value = "short"
    assert shown.field.value == 5
    shown.field.value = 700
    shown.button.click()
    assert asked[-1] == shown.field.value == 5
    shown.max_length.value = 4096
    assert shown.field.value == 5
    shown.data.value = "chat"
    assert shown.field.value == 4096
    shown.field.value = 700
    shown.button.click()
    assert asked[-1] == 700
    assert explore_lengths([3, 5], grid=grid(), max_length=1024, exact=exact).field.value == 5


def test_the_peak_rises_no_further_than_the_longest_row() -> None:
    shown = explore_lengths({"chat": [8192, 9], "short": [2000, 9]}, grid=grid())
    shown.data.value = "short"
    over = shown.draw_over()
    (ax,) = (artist for artist in over if isinstance(artist, Axes))
    curve = {int(x): y for x, y in zip(*ax.lines[0].get_data(), strict=True)}
    for artist in over:
        artist.remove()
    whole = 10**9 + 2 * 10**6 * 4 * 2000
    assert {x: curve[x] for x in (2000, 4096, 8192)} == dict.fromkeys((2000, 4096, 8192), whole)
    assert shown.cut(2000).peak == whole


def test_a_length_explorer_without_a_grid_shows_no_memory() -> None:
    assert "GB" not in said(explore_lengths(CHAT))
    with pytest.raises(ValueError, match="exact needs a grid"):
        explore_lengths(CHAT, exact=lambda setting: made_step())
    with pytest.raises(ValueError, match=f"{BATCH}=3"):
        explore_lengths(CHAT, grid=grid(), batch_size=3)
    with pytest.raises(ValueError, match="keep=0"):
        explore_lengths(CHAT, keep=0)


def test_labels_are_spread_in_order_within_bounds() -> None:
    assert spread([0.5, 0.5, 0.1], 0.1, 0.0, 1.0) == pytest.approx([0.5, 0.6, 0.1])
    assert spread([1.0, 0.99, 0.0], 0.1, 0.05, 0.95) == pytest.approx([0.95, 0.85, 0.05])


# layouts


def test_the_skewed_batch_in_four_layouts() -> None:
    shown = explore_layouts(SKEWED, multiple=1024, max_length=4096, bytes_a_slot=3.96e6)
    assert [(len(x.widths), x.slots) for x in shown.layouts] == [
        (4, 16_384),
        (4, 16_384),
        (1, 5_632),
        (2, 5_632),
    ]
    assert "66 % of the padded batch is padding" in said(shown)
    assert re.search(r"padded +4 +16,384 +34 % +64.88$", repr(shown), re.M)
    shown.max_length.value = 512
    assert [x.slots for x in shown.layouts] == [2048, 4096, 2048, 2048]
    assert "3,584 tokens lost" in shown.status.value
    assert "Rows of equal length" in said(shown)


@pytest.mark.parametrize("seed", range(5))
def test_each_layout_holds_each_token_once(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 200, 9)
    kept = np.minimum(lengths, 128)
    for layout in layouts(lengths, 128, 48):
        sizes = layout.right - layout.left
        assert np.bincount(layout.documents, sizes).tolist() == kept.tolist()
        taken = [range(*span) for span in zip(layout.left, layout.right, strict=True)]
        slots = [(row, i) for row, span in zip(layout.row, taken, strict=True) for i in span]
        assert len(set(slots)) == len(slots) == kept.sum()
        assert all(i < layout.widths[row] for row, i in slots)
        assert layout.useful == pytest.approx(kept.sum() / layout.slots)
    padded, multiple, free, filled = layouts(lengths, 128, 48)
    assert padded.slots == 9 * kept.max()
    assert multiple.slots == 9 * -(-kept.max() // 48) * 48
    assert free.slots == filled.slots == kept.sum()
    assert filled.widths.max() <= 128


def test_the_batch_slider_ends_at_the_last_batch() -> None:
    shown = explore_layouts(CHAT[:10], batch_size=4, batch=3)
    assert shown.lengths.tolist() == CHAT[8:10].tolist()
    shown.batch_size.value = 8
    assert (shown.batch.value, shown.batch.max) == (2, 2)
    assert shown.lengths.tolist() == CHAT[8:10].tolist()
    assert shown.failure is None
    with pytest.raises(ValueError, match="batch=4; give 1 to 3"):
        explore_layouts(CHAT[:10], batch=4)


# multiples


@pytest.mark.parametrize(("rows", "size"), [(600, 4), (10, 4), (7, 1), (3, 8)])
def test_slots_and_shapes_are_what_a_slow_count_gives(rows: int, size: int) -> None:
    batches = np.split(CHAT[:rows], range(size, rows, size))
    for found in padded_to(CHAT[:rows], size, (1, 8, 96, 2048)):
        shapes = [(len(b), -(-b.max() // found.multiple) * found.multiple) for b in batches]
        assert found.slots == sum(n * width for n, width in shapes)
        assert found.shapes == len(set(shapes))
        assert found.added == pytest.approx(
            found.slots / sum(len(b) * b.max() for b in batches) - 1
        )


def test_a_last_batch_of_fewer_rows_is_a_shape_of_its_own() -> None:
    (found,) = padded_to(np.array([5, 5, 5]), 2, (8,))
    assert (found.slots, found.shapes) == (24, 2)


def test_the_largest_multiple_within_a_share_is_named() -> None:
    shown = explore_multiples([500] * 4, batch_size=4, waste=0.02, multiples=(8, 64, 128, 512))
    assert [p.slots for p in shown.found] == [2000, 2016, 2048, 2048, 2048]
    assert shown.best.multiple == 8
    assert "8 is the largest multiple that adds at most 2 % to the slots" in said(shown)
    shown.waste.value = 0.05
    assert shown.best.multiple == 512
    assert "512 is the largest" in said(shown)
    assert largest_within(shown.found, 0.0).multiple == 1


def test_a_multiple_of_2048_quadruples_a_row_of_512() -> None:
    shown = explore_multiples([512], batch_size=1, multiple=2048)
    assert (shown.chosen.slots, shown.chosen.added) == (2048, 3.0)
    assert "+300 %" in said(shown)


# packing


def test_bins_of_the_worked_example() -> None:
    shown = explore_packing([5, 2, 3, 1], max_length=4)
    bfd, split, wrapped = shown.packed
    assert [p.bins for p in shown.packed] == [3, 3, 3]
    assert (bfd.lost, split.lost, wrapped.lost) == (pytest.approx(1 / 11), 0, 0)
    assert (bfd.split, split.split, wrapped.split) == (0, 1 / 4, 2 / 4)
    assert bfd.efficiency == 10 / 12
    assert split.efficiency == 11 / 12
    assert "bfd loses 9.1 % of the tokens" in said(shown)
    assert {"1", "2", "3", "4"} <= {text for text, _ in drawn_texts(shown)}


def test_a_document_that_ends_with_a_bin_is_not_split() -> None:
    found = packed(np.array([4, 2, 2, 3, 2]), 4, "wrapped")
    assert (found.bins, found.split) == (4, 1 / 5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_length", [64, 512, 20_000, 10**6])
def test_numbers_come_from_all_rows_and_the_picture_from_some_bins(
    strategy: str, max_length: int
) -> None:
    whole, found = place(CHAT, max_length, strategy), packed(CHAT, max_length, strategy)
    sizes = whole.stops - whole.starts
    assert found.bins == len(whole.offsets) - 1
    assert found.tokens == sizes.sum()
    assert found.lost == pytest.approx(1 - sizes.sum() / CHAT.sum())
    assert found.split == pytest.approx((np.bincount(whole.rows) > 1).mean())
    assert found.efficiency == pytest.approx(sizes.sum() / (found.bins * max_length))
    shown = found.placement
    assert len(shown.offsets) - 1 == min(found.bins, SHOWN)
    everything = set(zip(*whole[:3], strict=True))
    assert set(zip(*shown[:3], strict=True)) <= everything
    filled = np.add.reduceat(shown.stops - shown.starts, shown.offsets[:-1])
    assert filled.max() <= max_length
    if strategy == "wrapped" and found.bins > SHOWN:
        assert (filled == max_length).all()


def test_a_useful_token_takes_more_where_rows_do_not_fit_together() -> None:
    mixes = {"just above half": [520] * 100, "halves": [512] * 100}
    shown = explore_packing(mixes, max_length=1024, bytes_a_slot=4e6)
    assert shown.packed[0].efficiency == 520 / 1024
    assert "A useful token takes 7.88 MB packed, 4.00 padded; nothing is lost" in said(shown)
    shown.data.value = "halves"
    assert "A useful token takes 4.00 MB packed, 4.00 padded" in said(shown)


def test_fewer_rows_are_the_first_ones() -> None:
    shown = explore_packing(CHAT, max_length=2048)
    shown.rows.value = 30
    assert shown.lengths.tolist() == CHAT[:30].tolist()
    assert "30 rows in bins of 2,048 tokens" in shown.status.value
