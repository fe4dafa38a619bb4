"""Rollouts: each prompt's own completion, whatever stands beside it, laid out for training."""

import pytest
import torch
from online_cases import LIMIT, asked, direct_logps, roll, rows_of
from torch import Tensor
from trainer_cases import chunked, full, tiny

from memlab.models.head import head_parts
from memlab.techniques.truncation import truncate_prompts
from memlab.trainers.online import rewarded, split, token_logps
from memlab.trainers.rollouts import Rollout


def completions_of(made: Rollout) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(made.completions, made.mask, strict=True)]


def test_prompts_of_unequal_lengths_get_their_own_completions() -> None:
    model, prompts = tiny(), [*asked(), asked()[0]]
    assert len({len(prompt) for prompt in prompts}) > 2
    greedy = roll(model, temperature=0.0)
    made = greedy(prompts)
    alone = [completions_of(greedy([prompt]))[0] for prompt in prompts]
    assert completions_of(made) == alone
    assert len({len(completion) for completion in alone}) > 1
    for prompt, completion, row in zip(prompts, alone, made.input_ids.tolist(), strict=True):
        size = len(prompt) + len(completion)
        assert row[:size] == prompt + completion
        assert set(row[size:]) <= {0}


@pytest.mark.parametrize("multiple", [None, 8])
def test_labels_are_the_completions_where_they_stand(multiple: int | None) -> None:
    model, prompts = tiny(), asked()
    made = roll(model, pad_token_id=1, pad_to_multiple_of=multiple)(prompts)
    shortest = min(map(len, prompts))
    assert made.input_ids.shape[1] - made.labels.shape[1] == shortest
    assert multiple is None or made.input_ids.shape[1] % multiple == 0
    assert made.completions.shape == made.mask.shape
    for prompt, completion, labels in zip(
        prompts, completions_of(made), made.labels.tolist(), strict=True
    ):
        before = [-100] * (len(prompt) - shortest)
        after = [-100] * (len(labels) - len(before) - len(completion))
        assert labels == before + completion + after


def test_prompts_are_cut_as_truncation_cuts_them() -> None:
    model, prompts = tiny(), asked()
    made = roll(model)(prompts)
    rows = [
        {"prompt_ids": prompt, "completion_ids": completion}
        for prompt, completion in zip(prompts, completions_of(made), strict=True)
    ]
    longest = made.completions.shape[1]
    cut = truncate_prompts(rows, longest + 3)
    assert cut != rows
    found = rows_of(roll(model, max_length=longest + 3)(prompts))
    assert [r["input_ids"] for r in found] == [r["prompt_ids"] + r["completion_ids"] for r in cut]
    with pytest.raises(ValueError, match=f"max_length must be above the {longest} tokens"):
        roll(model, max_length=longest)(prompts)


@pytest.mark.parametrize("logprobs", [full, chunked])
@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2"])
def test_log_probabilities_are_those_of_transformers_logits(name: str, logprobs) -> None:
    model = tiny(name)
    made = roll(model)(asked())
    found = token_logps(logprobs, head_parts(model), made.input_ids, made.labels)
    assert bool((found[made.labels == -100] == 0).all())
    for row, logps, labels in zip(rows_of(made), found, made.labels, strict=True):
        torch.testing.assert_close(
            logps[labels != -100], direct_logps(model, row), rtol=1e-5, atol=1e-5
        )


def test_the_head_reads_no_position_before_the_shortest_prompts_last() -> None:
    read = []

    def counting(h: Tensor, w: Tensor, y: Tensor, **head) -> Tensor:
        read.append(len(h))
        return full(h, w, y, **head)

    model = tiny()
    made = roll(model, eos_token_id=None)(asked(3, 5, 6))
    token_logps(counting, head_parts(model), made.input_ids, made.labels)
    assert read == [3 * LIMIT]


def test_a_split_keeps_every_row() -> None:
    columns = {"a": torch.arange(10).view(5, 2), "b": torch.arange(5)}
    parts = split(2, **columns)
    assert [len(part["b"]) for part in parts] == [2, 2, 1]
    for name, column in columns.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), column)
    assert len(split(None, **columns)) == 1
    with pytest.raises(
        ValueError, match="per_device_train_batch_size must be a whole number of at least 1"
    ):
        split(0, **columns)


def test_what_is_no_reward_is_refused() -> None:
    made = roll(tiny(), eos_token_id=None)(asked())
    assert torch.equal(rewarded(lambda ids, mask: mask.sum(1).float(), made), made.mask.sum(1))
    with pytest.raises(TypeError, match=r"tensor of floats, not torch\.int64"):
        rewarded(lambda ids, mask: mask.sum(1), made)
    with pytest.raises(TypeError, match="tensor of floats, not list"):
        rewarded(lambda ids, mask: [1.0] * 4, made)
    with pytest.raises(ValueError, match=r"one number a completion, \(4,\), not \(4, 6\)"):
        rewarded(lambda ids, mask: mask.float(), made)


def test_a_reward_keeps_no_gradient_and_may_be_nan() -> None:
    made, weight = roll(tiny(), eos_token_id=None)(asked()), torch.ones((), requires_grad=True)
    found = rewarded(lambda ids, mask: weight * mask.sum(1), made)
    assert not found.requires_grad
    assert rewarded(lambda ids, mask: mask.sum(1) * torch.nan, made).isnan().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_reward_is_refused(value: float) -> None:
    made = roll(tiny(), eos_token_id=None)(asked())
    rewards = torch.tensor([0.5, torch.nan, value, 0.5])
    with pytest.raises(ValueError, match=f"reward of completion 2 must be finite.* not {value}"):
        rewarded(lambda ids, mask: rewards, made)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts are empty"):
        roll(tiny())([])
    with pytest.raises(ValueError, match=r"prompts must be \(B, P\)"):
        roll(tiny())([[1, 2], []])
    with pytest.raises(ValueError, match="pad_to_multiple_of must be a whole number of at least 1"):
        roll(tiny(), pad_to_multiple_of=0)(asked())


def test_completions_end_at_many_lengths_here() -> None:  # else the tests above show little
    made = roll(tiny())(asked() * 4)
    assert len(made.mask.sum(1).unique()) >= 3
