"""Truncation: the worked values, TRL's own code, and what must hold for any rows."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.techniques.pad_to_multiple import collate
from memlab.techniques.truncation import (
    truncate_completions,
    truncate_dpo,
    truncate_gkd,
    truncate_kto,
    truncate_padded,
    truncate_prompts,
    truncate_reward,
    truncate_sft,
)

MODES = ("keep_start", "keep_end")
KINDS = {"lists": list, "tuples": tuple, "arrays": np.array, "tensors": torch.tensor}
COMPLETIONS = [  # masks 00011 and 011
    {"input_ids": [3, 4, 5, 6, 7], "labels": [-100, -100, -100, 6, 7]},
    {"input_ids": [8, 9, 10], "labels": [-100, 9, 10]},
]
PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}

ids = st.lists(st.integers(1, 99), max_size=9)
sft_rows = st.lists(
    st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=9).map(
        lambda row: {
            "input_ids": [token for token, _ in row],
            "labels": [token if counts else -100 for token, counts in row],
            "some_mask": [int(counts) for _, counts in row],
        }
    ),
    max_size=5,
)
pairs = st.lists(
    st.fixed_dictionaries({"prompt_ids": ids, "chosen_ids": ids, "rejected_ids": ids}), max_size=4
)
max_lengths = st.integers(1, 20)


def plain(rows):
    """Rows as dicts of lists and numbers, whatever they are made of."""

    def value(column):
        column = list(column) if isinstance(column, tuple) else column
        return column.tolist() if hasattr(column, "tolist") else column

    return [{name: value(column) for name, column in row.items()} for row in rows]


def converted(rows, kind):
    return [{n: kind(c) if isinstance(c, list) else c for n, c in row.items()} for row in rows]


def as_rows(rows):
    return [{"input_ids": row, "labels": list(row)} for row in rows]


# ------------------------------------------------------------------------------------------- SFT


def test_sft_worked_value():
    cut = truncate_sft(as_rows([[1, 2, 3], [4, 5, 6, 7], [8]]), 2)
    assert [row["input_ids"] for row in cut] == [[1, 2], [4, 5], [8]]
    assert [row["labels"] for row in cut] == [[1, 2], [4, 5], [8]]


def test_sft_completion_only_worked_value():
    assert truncate_sft(COMPLETIONS, 3) == [COMPLETIONS[1]]
    assert truncate_sft(COMPLETIONS, 3, truncation_mode="keep_end") == [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        COMPLETIONS[1],
    ]


@settings(deadline=None)
@given(rows=sft_rows, max_length=max_lengths, mode=st.sampled_from(MODES))
def test_sft_is_a_slice_of_every_column_with_a_label(rows, max_length, mode):
    part = slice(max_length) if mode == "keep_start" else slice(-max_length, None)
    expected = [{name: column[part] for name, column in row.items()} for row in rows]
    expected = [row for row in expected if any(label != -100 for label in row["labels"])]
    for kind in KINDS.values():
        got = truncate_sft(converted(rows, kind), max_length, truncation_mode=mode)
        assert plain(got) == expected
        assert all(type(c) is type(kind([])) for row in got for c in row.values())


@settings(deadline=None, max_examples=8)
@given(rows=sft_rows, max_length=max_lengths, mode=st.sampled_from(MODES))
def test_sft_equals_trl(rows, max_length, mode):
    trainer = pytest.importorskip("trl").SFTTrainer
    datasets = pytest.importorskip("datasets")
    made = [{"input_ids": [0], "labels": [0]}]  # one row that stays, so that types are known
    made += [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    args = SimpleNamespace(
        max_length=max_length,
        truncation_mode=mode,
        dataset_num_proc=None,
        shuffle_dataset=False,
        use_liger_kernel=False,
    )
    datasets.disable_progress_bars()
    prepared = trainer._prepare_dataset(
        SimpleNamespace(), datasets.Dataset.from_list(made), None, args, False, None, "train"
    )
    assert truncate_sft(made, max_length, truncation_mode=mode) == prepared.to_list()


def test_other_values_travel_along():
    row = {**COMPLETIONS[1], "source": "a book", "weight": 0.5, "score": torch.tensor(2.0)}
    (cut,) = truncate_sft([row], 2)
    assert cut == {**row, "input_ids": [8, 9], "labels": [-100, 9]}


# ------------------------------------------------------------------- cases 17 and 18: what is kept


def test_case_17_keep_end_keeps_the_answer_of_a_padded_batch():
    rows = [*as_rows([[1, 2, 3, 4, 5, 6]]), {"input_ids": [7, 8], "labels": [-100, 8]}]
    kept = collate(truncate_sft(rows, 3, truncation_mode="keep_end"))
    assert kept["input_ids"].tolist() == [[4, 5, 6], [7, 8, 0]]
    assert kept["labels"].tolist() == [[4, 5, 6], [-100, 8, -100]]

    lost = truncate_padded(rows, 3, truncation_mode="keep_end")  # what it must never do
    assert plain(lost) == [
        {"input_ids": [4, 5, 6], "labels": [4, 5, 6]},
        {"input_ids": [0, 0, 0], "labels": [-100] * 3},
    ]


@settings(deadline=None)
@given(rows=sft_rows, max_length=max_lengths)
def test_case_17_keep_end_always_keeps_the_last_token(rows, max_length):
    answers = [row for row in rows if row["labels"] and row["labels"][-1] != -100]
    cut = truncate_sft(answers, max_length, truncation_mode="keep_end")
    assert [row["labels"][-1] for row in cut] == [row["labels"][-1] for row in answers]


@settings(deadline=None)
@given(rows=pairs, max_length=max_lengths)
def test_case_17_in_dpo(rows, max_length):
    rows = [row for row in rows if row["chosen_ids"] and row["rejected_ids"]]
    for row, cut in zip(
        rows, truncate_dpo(rows, max_length, truncation_mode="keep_end"), strict=True
    ):
        for side in ("chosen", "rejected"):
            answer = row[f"{side}_ids"][-max_length:]
            assert cut[f"{side}_input_ids"][-len(answer) :] == answer
            assert sum(cut[f"{side}_completion_mask"]) == len(answer)


@settings(deadline=None)
@given(rows=sft_rows, max_length=max_lengths, mode=st.sampled_from(MODES))
def test_case_18_sft_every_row_left_has_a_loss(rows, max_length, mode):
    for row in truncate_sft(rows, max_length, truncation_mode=mode):
        labels = torch.tensor(row["labels"])
        assert F.cross_entropy(torch.zeros(len(labels), 100), labels).isfinite()


def test_case_18_the_naive_twin_makes_the_nan():
    assert truncate_sft(COMPLETIONS[:1], 3) == []
    labels = torch.tensor(truncate_padded(COMPLETIONS[:1], 3)[0]["labels"])
    assert F.cross_entropy(torch.zeros(3, 100), labels).isnan()


@settings(deadline=None)
@given(rows=pairs, max_length=max_lengths)
def test_case_18_dpo_and_kto_leave_each_completion_a_token(rows, max_length):
    rows = [row for row in rows if row["chosen_ids"] and row["rejected_ids"]]
    cut = truncate_dpo(rows, max_length)
    assert len(cut) == sum(len(row["prompt_ids"]) < max_length for row in rows)
    assert all(sum(row[f"{s}_completion_mask"]) for row in cut for s in ("chosen", "rejected"))
    kto = [{"prompt_ids": r["prompt_ids"], "completion_ids": r["chosen_ids"]} for r in rows]
    assert [row["completion_mask"] for row in truncate_kto(kto, max_length)] == [
        row["chosen_completion_mask"] for row in cut
    ]


def test_case_18_without_a_prompt_online_dpo_and_gkd_refuse():
    with pytest.raises(ValueError, match=r"max_length=8 beside completions of 8.*at least 1"):
        truncate_prompts([{"prompt_ids": [1], "completion_ids": [2] * 8}], 8)
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [1] * 3, "labels": [1] * 3}]
    with pytest.raises(ValueError, match="max_length=5: no prompt left in row 1"):
        truncate_gkd(rows, 5)
    with pytest.raises(ValueError, match="max_length=1: no prompt left in row 0"):
        truncate_gkd(rows[:1], 1)
    with pytest.raises(ValueError, match="no prompt left in row 0"):
        truncate_gkd([{"input_ids": [], "labels": []}], 1)


# ------------------------------------------------------------------------------ DPO, KTO, Reward


def test_dpo_worked_value():
    assert truncate_dpo([PAIR], 3, truncation_mode="keep_end") == [
        {
            "chosen_input_ids": [3, 4, 5],
            "chosen_completion_mask": [0, 1, 1],
            "rejected_input_ids": [2, 3, 6],
            "rejected_completion_mask": [0, 0, 1],
        }
    ]
    assert truncate_dpo([PAIR], 3) == []  # the prompt alone fills it
    assert truncate_dpo([PAIR], 4)[0]["chosen_input_ids"] == [1, 2, 3, 4]
    assert truncate_dpo([PAIR], None)[0]["chosen_input_ids"] == [1, 2, 3, 4, 5]


@settings(deadline=None)
@given(rows=pairs, max_length=st.none() | max_lengths, mode=st.sampled_from(MODES))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_dpo_equals_trl(kind, rows, max_length, mode):
    collator = pytest.importorskip("trl.trainer.dpo_trainer").DataCollatorForPreference
    got = truncate_dpo(converted(rows, kind), max_length, truncation_mode=mode)
    if max_length is not None and mode == "keep_start":  # as DPOTrainer._prepare_dataset drops them
        rows = [row for row in rows if len(row["prompt_ids"]) < max_length]
    assert len(got) == len(rows)
    if not rows:
        return
    batch = collator(pad_token_id=0, max_length=max_length, truncation_mode=mode)(rows)
    sides = [(row, side) for side in ("chosen_", "rejected_") for row in plain(got)]
    for i, (row, side) in enumerate(sides):
        real = batch["attention_mask"][i].bool()
        assert row[f"{side}input_ids"] == batch["input_ids"][i][real].tolist()
        assert row[f"{side}completion_mask"] == batch["completion_mask"][i][real].tolist()


@settings(deadline=None)
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt_ids": ids, "a": ids, "b": ids}), max_size=4),
    max_length=st.none() | max_lengths,
    with_kl=st.booleans(),
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kto_equals_trl(kind, rows, max_length, with_kl):
    collator = pytest.importorskip("trl.trainer.kto_trainer").DataCollatorForUnpairedPreference
    rows = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row["a"], "label": True}
        | ({"KL_completion_ids": row["b"]} if with_kl else {})
        for row in rows
    ]
    got = plain(truncate_kto(converted(rows, kind), max_length))
    if max_length is not None:
        rows = [row for row in rows if len(row["prompt_ids"]) < max_length]
    assert len(got) == len(rows)
    if not rows:
        return
    batch = collator(pad_token_id=0, max_length=max_length)(rows)
    masks = {n for n in batch if n.endswith("attention_mask")}
    assert got[0].keys() == batch.keys() - masks
    for i, row in enumerate(got):
        for prefix in ("", "KL_") if with_kl else ("",):
            real = batch[f"{prefix}attention_mask"][i].bool()
            for name in (f"{prefix}input_ids", f"{prefix}completion_mask"):
                assert row[name] == batch[name][i][real].tolist()
        assert row["label"] is True


@settings(deadline=None, max_examples=8)
@given(rows=pairs, max_length=max_lengths)
def test_reward_equals_trl(rows, max_length):
    trainer = pytest.importorskip("trl").RewardTrainer
    datasets = pytest.importorskip("datasets")
    made = [{"chosen_ids": [1], "rejected_ids": [2], "margin": 0.5}]
    made += [
        {**made[0], "chosen_ids": r["chosen_ids"], "rejected_ids": r["rejected_ids"]} for r in rows
    ]
    args = SimpleNamespace(max_length=max_length, dataset_num_proc=None)
    datasets.disable_progress_bars()
    prepared = trainer._prepare_dataset(
        SimpleNamespace(), datasets.Dataset.from_list(made), None, args, "train"
    )
    assert truncate_reward(made, max_length) == prepared.to_list()
    assert truncate_reward(made, None) == made


def test_reward_drops_a_pair_of_which_one_side_is_too_long():
    rows = [{"chosen_ids": [1] * a, "rejected_ids": [2] * b} for a, b in [(3, 1), (1, 3), (2, 2)]]
    assert truncate_reward(rows, 2) == rows[2:]


@settings(deadline=None)
@given(prompt=ids, chosen=ids, max_length=st.none() | st.integers(10, 20))
def test_joined_ids_stay_whole_numbers_beside_an_empty_part(prompt, chosen, max_length):
    """An empty tensor is one of floats (case 11, before the batch is made)."""
    row = {"prompt_ids": prompt, "completion_ids": chosen}
    for kind in (np.array, torch.tensor):
        (cut,) = truncate_kto(converted([row], kind), max_length)
        if prompt or chosen:
            assert "int64" in str(cut["input_ids"].dtype)
            assert "int64" in str(cut["completion_mask"].dtype)


@pytest.mark.parametrize("switch", ["max_prompt_length", "max_completion_length"])
def test_switches_that_dpo_lost_say_to_filter_beforehand(switch):
    with pytest.raises(TypeError, match=rf"{switch}=512: .* filter .* beforehand"):
        truncate_dpo([PAIR], 4, **{switch: 512})


# -------------------------------------------------------------------- GRPO, RLOO, Online DPO, GKD


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_completions_are_cut_and_prompts_never(kind):
    row = {
        "prompt_ids": [1, 2, 3, 4, 5],
        "prompt_mask": [1, 1, 1, 1, 1],
        "prompt": "a text",
        "completion_ids": [6, 7, 8],
        "completion_mask": [1, 1, 0],
        "sampling_per_token_logps": [-0.5, -0.25, -1.0],
        "advantages": 0.5,
    }
    (cut,) = plain(truncate_completions(converted([row], kind), 2))
    assert cut == row | {
        "completion_ids": [6, 7],
        "completion_mask": [1, 1],
        "sampling_per_token_logps": [-0.5, -0.25],
    }
    assert plain(truncate_completions(converted([row], kind), None)) == [row]


def test_prompts_make_room_for_the_longest_completion():
    rows = [
        {"prompt_ids": [1, 2, 3, 4], "prompt_mask": [0, 1, 1, 1], "completion_ids": [9]},
        {"prompt_ids": [5], "prompt_mask": [1], "completion_ids": [8, 8, 8]},
    ]
    cut = truncate_prompts(rows, 5)
    assert [row["prompt_ids"] for row in cut] == [[3, 4], [5]]
    assert [row["prompt_mask"] for row in cut] == [[1, 1], [1]]
    assert [row["completion_ids"] for row in cut] == [[9], [8, 8, 8]]
    assert truncate_prompts(rows, 7) == truncate_prompts(rows, None) == rows
    assert truncate_prompts([], 7) == []


@settings(deadline=None)
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt_ids": ids, "completion_ids": ids}), min_size=1),
    room=st.integers(1, 12),
)
def test_prompts_equal_trl(rows, room):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is experimental
        trainer = pytest.importorskip("trl.experimental.online_dpo").OnlineDPOTrainer
    longest = [max(len(r[n]) for r in rows) for n in ("prompt_ids", "completion_ids")]
    max_length, seen = longest[1] + room, {}

    def model(input_ids, **kwargs):
        seen.update(kwargs, input_ids=input_ids)
        raise StopIteration  # the rest of the forward pass is none of ours

    def padded(row, width, side):
        gap = [0] * (width - len(row))
        return gap + row if side == "left" else row + gap

    prompts = torch.tensor([padded(r["prompt_ids"], longest[0], "left") for r in rows])
    answers = torch.tensor([padded(r["completion_ids"], longest[1], "right") for r in rows])
    batch = prompts.long(), (prompts > 0).long(), answers.long(), (answers > 0).long()
    with pytest.raises(StopIteration):
        trainer._forward(SimpleNamespace(max_length=max_length), model, *batch)
    assert seen["input_ids"].shape[1] <= max_length
    for i, row in enumerate(truncate_prompts(rows, max_length)):
        real = seen["attention_mask"][i].bool()
        assert row["prompt_ids"] + row["completion_ids"] == seen["input_ids"][i][real].tolist()


@pytest.mark.parametrize("max_length", [3, 4, 6, 7, 50, None])
def test_gkd_equals_trl(max_length):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collator_type = pytest.importorskip("trl.experimental.utils").DataCollatorForChatML
    tokenizer = pytest.importorskip("memlab.data.tokenizer").load_tokenizer()
    chat = [
        {"role": "user", "content": "How many tokens has a row that is much longer?"},
        {"role": "assistant", "content": "Four"},
    ]
    collators = {n: collator_type(tokenizer, max_length=n) for n in (max_length or 500, 500)}

    def row(limit):
        batch = collators[limit]([{"messages": chat}])
        return {name: batch[name][0].tolist() for name in ("input_ids", "labels")}

    whole = row(500)
    answer = sum(label != -100 for label in whole["labels"])
    assert 3 <= answer < len(whole["labels"])
    if max_length is not None and max_length <= answer:
        with pytest.raises(ValueError, match="prompt"):
            row(max_length)
        with pytest.raises(ValueError, match=f"max_length={max_length}: no prompt"):
            truncate_gkd([whole], max_length)
    else:
        assert truncate_gkd([whole], max_length) == [row(max_length or 500)]


# --------------------------------------------------------------------------------- every function

EVERY = {
    truncate_sft: COMPLETIONS,
    truncate_padded: COMPLETIONS,
    truncate_dpo: [PAIR],
    truncate_kto: [{"prompt_ids": [1], "completion_ids": [2, 3], "KL_completion_ids": [4]}],
    truncate_reward: [{"chosen_ids": [1, 2], "rejected_ids": [3]}],
    truncate_completions: [{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}],
    truncate_prompts: [{"prompt_ids": [1, 2, 3], "completion_ids": [4]}],
    truncate_gkd: COMPLETIONS,
}
every = pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)


def switch_of(function):
    return "max_completion_length" if function is truncate_completions else "max_length"


@every
@pytest.mark.parametrize("length", [0, -1, -1024])
def test_a_length_below_1_is_refused(function, length):
    with pytest.raises(
        ValueError, match=f"{switch_of(function)}={length}: give at least 1, or None"
    ):
        function(EVERY[function], length)


@every
@pytest.mark.parametrize("length", [True, False, 3.0, "3", np.bool_(True)])
def test_a_length_that_is_no_int_is_refused(function, length):
    with pytest.raises(TypeError, match=f"{switch_of(function)}=.*: give an int"):
        function(EVERY[function], length)


@every
def test_numpy_s_ints_are_taken(function):
    rows = EVERY[function]
    assert plain(function(rows, np.int64(4))) == plain(function(rows, 4))


@pytest.mark.parametrize("mode", ["keep_middle", "KEEP_END", None, ""])
@pytest.mark.parametrize("function", [truncate_sft, truncate_padded, truncate_dpo])
def test_an_unknown_mode_is_refused(function, mode):
    for max_length in (2, None):
        with pytest.raises(ValueError, match=f'truncation_mode={mode!r}: give "keep_start" or'):
            function(EVERY[function], max_length, truncation_mode=mode)


@every
@pytest.mark.parametrize("max_length", [4, None])
def test_inputs_stay_as_they_are_and_new_rows_come_out(function, max_length):
    rows = [
        {**row, "extra": 1.5} if function is not truncate_padded else row for row in EVERY[function]
    ]
    before = [{name: list(c) if isinstance(c, list) else c for name, c in r.items()} for r in rows]
    for row in function(rows, max_length):
        assert function is truncate_padded or row["extra"] == 1.5
        row.clear()
    assert rows == before


@every
def test_none_cuts_and_drops_nothing(function):
    rows = EVERY[function]
    assert len(function(rows, None)) == len(rows)
    if function not in (truncate_padded, truncate_dpo, truncate_kto):
        assert function(rows, None) == rows


def test_none_keeps_rows_without_a_label():
    rows = [{"input_ids": [1], "labels": [-100]}, {"input_ids": [], "labels": []}]
    assert truncate_sft(rows, None) == rows
    assert truncate_sft(rows, 9) == []


@every
def test_no_rows_give_no_rows(function):
    assert function([], 4) == []


@every
def test_a_missing_column_is_named(function):
    for name in EVERY[function][0]:
        if name == "KL_completion_ids" or (function, name) == (truncate_completions, "prompt_ids"):
            continue
        rows = [dict(row) for row in EVERY[function]]
        del rows[-1][name]
        with pytest.raises(ValueError, match=f"columns of row .* give .*{name}"):
            function(rows, 4)


def test_a_kl_column_that_one_row_lacks_is_named():
    row = EVERY[truncate_kto][0]
    rows = [{n: c for n, c in row.items() if n != "KL_completion_ids"}, row]
    with pytest.raises(ValueError, match=r"columns of row 0 .*give .*KL_completion_ids"):
        truncate_kto(rows, 4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (truncate_sft, "labels"),
        (truncate_sft, "completion_mask"),
        (truncate_gkd, "labels"),
        (truncate_completions, "completion_mask"),
        (truncate_prompts, "prompt_mask"),
    ],
)
def test_unequal_columns_are_refused(function, name, kind):
    rows = converted([EVERY[function][0], EVERY[function][0] | {name: [-100] * 7}], kind)
    for max_length in (4, None):
        with pytest.raises(
            ValueError, match=f"columns of row 1 have shapes .*'{name}': .7,.*; give one"
        ):
            function(rows, max_length)


@every
@pytest.mark.parametrize(
    "wrong", [torch.ones(1, 5, dtype=torch.int64), [[1, 2], [3]], np.ones((2, 2)), "a text"]
)
def test_what_is_not_of_one_dimension_is_refused(function, wrong):
    for max_length in (4, None):
        row = dict.fromkeys(EVERY[function][0], wrong)
        with pytest.raises(ValueError, match=r"columns of row 1 are .*; give .*_ids.*, 1-D"):
            function([EVERY[function][0], row], max_length)


@every
def test_rows_may_come_from_a_generator(function):
    rows = EVERY[function]
    assert function((row for row in rows), 4) == function(rows, 4)
    assert function(iter(rows), None) == function(rows, None) != []


def test_a_list_and_a_tensor_make_a_list_of_numbers():
    (row,) = truncate_kto([{"prompt_ids": [1], "completion_ids": torch.tensor([2, 3])}], 9)
    assert row == {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
    assert [type(token) for token in row["input_ids"]] == [int] * 3


def test_a_packed_row_is_refused():
    with pytest.raises(ValueError, match="seq_lengths"):
        truncate_sft([{"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": [2]}], 1)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), max_length=max_lengths)
def test_a_batch_has_the_header_s_bytes(lengths, max_length):
    rows = as_rows([[1] * n for n in lengths])
    for cut, longest in (
        (rows, max(lengths)),
        (truncate_sft(rows, max_length), min(max(lengths), max_length)),
    ):
        assert sum(t.nbytes for t in collate(cut).values()) == 24 * len(lengths) * longest


def test_arrays_are_cut_without_a_copy():
    ids = np.arange(10)
    (cut,) = truncate_sft([{"input_ids": ids, "labels": ids}], 4)
    assert cut["input_ids"].base is ids
