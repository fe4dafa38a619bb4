"""Padding-free batches: the worked values, and the same loss and gradients as padded and packed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import rows_of
from trainer_cases import one_step

from memlab.experiments import Recipe
from memlab.experiments.heads import HEAD_LOSSES
from memlab.experiments.simulation import simulated_run
from memlab.experiments.training import prepare
from memlab.instruments.ledger import rounded
from memlab.instruments.measurement import CATEGORIES
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.head import head_parts
from memlab.techniques import packing, pad_to_multiple, varlen_attention
from memlab.techniques.padding_free import collate, model_inputs
from memlab.trainers import sft


def row(*ids: int, **columns) -> dict:
    return {"input_ids": list(ids), "labels": list(ids), **columns}


def plain(batch: dict) -> dict:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


# ------------------------------------------------------------------------------------- collation


def test_worked_value():
    batch = collate([row(1, 2, 3), row(4, 5)])
    assert plain(batch) == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "labels": [[-100, 2, 3, -100, 5]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "cu_seqlens": [0, 3, 5],
        "max_seqlen": 3,
    }
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["input_ids"].dtype == batch["position_ids"].dtype == torch.int64


def test_case_9_no_mask_is_made():
    assert "attention_mask" not in collate([row(1, 2), row(3)])
    assert "attention_mask" not in model_inputs(collate([row(1, 2), row(3)]))


def test_cases_7_and_10_positions_restart_at_each_document_of_a_packed_row():
    batch = collate([row(1, 2, 3, 4, 5, seq_lengths=[2, 0, 3])])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 5]
    assert batch["labels"].tolist() == [[-100, 2, -100, 4, 5]]


@pytest.mark.parametrize("empty", [[], np.zeros(0), torch.zeros(0)])
def test_case_11_an_empty_row_leaves_ids_integers(empty):
    batch = collate([row(1, 2), {"input_ids": empty, "labels": empty}, row(3)])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["cu_seqlens"].tolist() == [0, 2, 3]


def test_filling_up_to_a_multiple_makes_a_document_of_its_own():
    batch = collate([row(1, 2, 3), row(4, 5)], pad_to_multiple_of=4, pad_token_id=7)
    assert plain(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 7, 7, 7]],
        "labels": [[-100, 2, 3, -100, 5, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2]],
        "cu_seqlens": [0, 3, 5, 8],
        "max_seqlen": 3,
    }
    assert plain(collate([row(1, 2)], pad_to_multiple_of=8))["max_seqlen"] == 6
    assert plain(collate([row(1, 2)], pad_to_multiple_of=2))["cu_seqlens"] == [0, 2]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    multiple=st.none() | st.integers(1, 20),
)
def test_any_rows(lengths, multiple):
    ids = iter(range(1, sum(lengths) + 1))
    rows = [row(*(next(ids) for _ in range(n))) for n in lengths]
    batch = collate(rows, pad_to_multiple_of=multiple)
    tokens, slots = sum(lengths), batch["input_ids"].shape[1]
    assert slots % (multiple or 1) == 0 <= slots - tokens < (multiple or 1)
    assert batch["input_ids"][0, :tokens].tolist() == list(range(1, tokens + 1))
    assert not batch["input_ids"][0, tokens:].any()
    sizes = batch["cu_seqlens"].diff().tolist()
    assert sizes == [n for n in (*lengths, slots - tokens) if n]
    assert batch["position_ids"][0].tolist() == [i for n in sizes for i in range(n)]
    starts = batch["position_ids"][0] == 0
    expected = batch["input_ids"][0].masked_fill(starts, -100)
    expected[tokens:] = -100
    assert torch.equal(batch["labels"][0], expected)
    assert batch["max_seqlen"] == max(sizes)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([row()], {}, "padding_free: the batch has no token"),
        ([], {}, "padding_free: the batch has no token"),
        ([row(1, 2, 3, seq_lengths=[2, 2])], {}, r"seq_lengths=\[2, 2\] of row 0: .* 3 tokens"),
        ([row(1, 2, 3, seq_lengths=[2])], {}, r"seq_lengths=\[2\] of row 0: .* 3 tokens"),
        ([row(1), row(1, 2, 3, seq_lengths=[-1, 4])], {}, r"\[-1, 4\] of row 1"),
        ([row(1)], {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0: give 1 or more, or None"),
        ([row(1)], {"pad_to_multiple_of": -8}, "pad_to_multiple_of=-8"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "row 0 has 2 input_ids and 1 labels"),
        ([{"input_ids": [1, 2]}], {}, r"columns of row 0 are \['input_ids'\]; give input_ids"),
    ],
)
def test_bad_input_is_named(rows, options, says):
    with pytest.raises(ValueError, match=says):
        collate(rows, **options)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([row(1)], {"pad_to_multiple_of": True}),
        ([row(1)], {"pad_to_multiple_of": 2.0}),
        ([{"input_ids": [1.7, 2.2], "labels": [1, 2]}], {}),
        ([{"input_ids": [[1, 2]], "labels": [[1, 2]]}], {}),
        ([row(1, 2, 3, 4, 5, seq_lengths=[2.5, 2.5])], {}),
        ([{"input_ids": np.array([1j, 2]), "labels": [1, 2]}], {}),
        ([{"input_ids": [1, 2], "labels": torch.tensor([1j, 2])}], {}),
    ],
)
def test_what_is_no_whole_number_is_refused(rows, options):
    with pytest.raises(TypeError):
        collate(rows, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pad_to_multiple_of": "8"}, "pad_to_multiple_of='8': give an int of 1 or more, or None"),
        ({"pad_token_id": "0", "pad_to_multiple_of": 4}, "pad_token_id='0': give the id"),
        ({"pad_token_id": None}, "pad_token_id=None: give the id"),
    ],
)
def test_a_switch_that_is_no_int_is_named(options, says):
    with pytest.raises(TypeError, match=says):
        collate([row(1)], **options)
    assert collate([row(1)], pad_to_multiple_of=np.int64(4), pad_token_id=np.int64(7))["max_seqlen"]


@pytest.mark.parametrize("lengths", [None, 3])
def test_lengths_that_are_no_list_are_named(lengths):
    with pytest.raises(TypeError, match=f"seq_lengths={lengths} of row 1: give a list"):
        collate([row(1), row(1, 2, 3, seq_lengths=lengths)])


def test_an_array_may_run_backwards_or_skip():
    ids = np.arange(1, 7)
    for part in (ids[::-1], ids[::2], ids[4::-2]):
        found = collate([{"input_ids": part, "labels": part}])
        assert plain(found) == plain(collate([row(*part.tolist())]))


def test_rows_may_come_one_by_one_and_in_numpy_s_integers():
    rows = [row(1, 2, 3, seq_lengths=np.array([1, 2])), row(4)]
    found = collate((one for one in rows), pad_to_multiple_of=np.int64(3))  # type: ignore[arg-type]
    assert plain(found) == plain(collate(rows, pad_to_multiple_of=3))


def test_model_inputs_are_on_one_device_and_share_their_lengths():
    inputs = model_inputs(collate([row(1, 2), row(3)]), torch.device("cpu"))
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 2
    assert set(inputs) == {
        *("input_ids", "position_ids"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }


# ----------------------------------------------------------------------------- the same training


def step(name: str, attention: str, micro_batches: list[dict], loss_type: str) -> tuple:
    """Loss and gradient norm."""
    meta = build_meta(name, dtype=torch.float32, attn_implementation=attention)
    model = materialize(meta, "cpu", init=True, seed=3).train()
    flat = "cu_seqlens" in micro_batches[0]
    return one_step(
        sft.train,
        model,
        micro_batches,
        head=head_parts(model),
        head_loss=HEAD_LOSSES[loss_type],
        inputs=model_inputs if flat else sft.padded_inputs,
    )


@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll"])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-llama", "memlab/tiny-mistral"])
def test_padded_padding_free_and_packed_give_the_same_loss_and_gradients(name, loss_type):
    varlen_attention.register()
    rows = rows_of(load_config(name).vocab_size)
    expected = step(name, "eager", [pad_to_multiple.collate(rows)], loss_type)
    columns = {key: [r[key] for r in rows] for key in ("input_ids", "labels")}
    packed = packing.pack(columns, 45, strategy="bfd")
    bins = [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)]
    assert len(bins) < len(rows)
    for batches in (
        [collate(rows)],
        [collate(rows, pad_to_multiple_of=64)],
        [collate(rows[:3]), collate(rows[3:])],
        [collate(bins)],
        [collate([one]) for one in bins],
    ):
        found = step(name, varlen_attention.NAME, batches, loss_type)
        assert found == pytest.approx(expected, rel=1e-5)


def test_documents_that_see_each_other_have_another_loss():
    """What the refusals are for: plain causal attention over the same flat row."""
    varlen_attention.register()
    rows = rows_of(load_config("memlab/tiny").vocab_size)
    batch = collate(rows)
    apart, _ = step("memlab/tiny", varlen_attention.NAME, [batch], "nll")
    mixed = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    together, _ = step("memlab/tiny", "eager", [mixed], "nll")
    assert abs(together / apart - 1) > 1e-4


# ------------------------------------------------------------------------------------------ bytes


SCALAR = 64  # bytes below which a tensor has no slots: a seed, a sum


def alive(recipe: Recipe, moment: str) -> list[tuple[str, int]]:
    """(operation, bytes) of each activation and logit after forward, or at the peak of the step."""
    ledger = simulated_run(recipe).ledger
    samples = [*ledger.samples()]
    last = max(s.event for s in samples if s.phase == "forward")
    event = last if moment == "kept" else max(samples, key=lambda s: s.total).event
    living = set()
    for birth in ledger.events[:event]:
        living ^= {birth if birth >= 0 else ~birth}
    births = [ledger.births[birth] for birth in living]
    counted = [CATEGORIES.index(name) for name in ("activations", "logits")]
    varlen = "torch_attn._varlen_attn.default"  # recomputed, it counts as a temporary
    return [(b.op, b.asked) for b in births if b.category in counted or b.op == varlen]


@pytest.mark.parametrize("moment", ["kept", "peak"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-llama"])
def test_bytes_are_those_of_the_header(name, checkpointing, moment):
    switches = {"model": name, "dataset": "docstrings", "per_device_train_batch_size": 5}
    switches |= {"max_length": 300, "max_steps": 1, "gradient_checkpointing": checkpointing}
    padded = Recipe.off(**switches)
    flat = padded.replace(padding_free=True)
    ((batch,),) = prepare(flat, "gpu").steps
    ((whole,),) = prepare(padded, "gpu").steps
    (rows, longest), tokens = whole["input_ids"].shape, int(whole["attention_mask"].sum())
    assert batch["input_ids"].numel() == tokens < rows * longest
    tables = ("aten._to_copy.default", 2 * load_config(name).head_dim * longest)  # cos, sin
    positions = ("aten.add.Tensor", 8 * longest)  # kept by checkpointing; flat, the batch has them
    before = [one for one in alive(padded, moment) if one != positions]
    assert before.count(tables) == 2
    assert batch["position_ids"].nbytes == 8 * tokens
    assert batch["cu_seqlens"].nbytes == 4 * (rows + 1)
    expected = 0
    for one in before:
        slots = longest if one == tables else rows * longest
        a_slot, rest = divmod(one[1], slots)
        assert rest == 0 or one[1] < SCALAR
        expected += rounded(a_slot * tokens)
    assert sum(rounded(nbytes) for _, nbytes in alive(flat, moment) if nbytes >= SCALAR) == expected
