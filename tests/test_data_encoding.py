"""Preference, judged and prompt-only data sets of TRL's formats, and their tokens."""

import json

import pytest
from datasets import Dataset

from memlab.data.encoding import (
    kind_of,
    tokenize,
    tokenize_preference,
    tokenize_prompts,
    tokenize_unpaired_preference,
)
from memlab.data.hub import load_rows
from memlab.data.tokenizer import train_tokenizer
from memlab.techniques.truncation import truncate_dpo, truncate_kto

END = "<|endoftext|>"
PAIR = {"prompt": "the card", "chosen": " the memory", "rejected": " the other"}


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


QUESTION = [said("user", "the card")]
GOOD, BAD = [said("assistant", "the memory")], [said("assistant", "the other")]


@pytest.fixture(scope="module")
def tiny():
    return train_tokenizer(["the memory of the card", "the other card"] * 4, vocab_size=280)


def load(tmp_path, *rows: dict) -> Dataset:
    """The rows, through a local file."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_rows(str(tmp_path / "rows.jsonl"))


def read(dataset: Dataset, tokenizer) -> list[dict]:
    """Each row's columns as text."""
    return [
        {name: v if isinstance(v, bool) else tokenizer.decode(v) for name, v in row.items()}
        for row in dataset
    ]


def test_pairs_of_strings(tiny, tmp_path):
    tokens = tokenize_preference(load(tmp_path, PAIR), tiny)
    assert read(tokens, tiny) == [
        {
            "prompt_ids": "the card",
            "chosen_ids": f" the memory{END}",
            "rejected_ids": f" the other{END}",
        }
    ]
    (row,) = truncate_dpo(tokens, 4)
    assert len(row["chosen_input_ids"]) == 4


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("the card is big", "the card was big", "the card"),
        ("the card is", "the cards are", "the"),  # whole words
        ("Q: a?\nyes", "Q: a?\nno", "Q: a?"),
        ("a b", "a b c", "a"),  # something is left to each
        ("a b", "a b", "a"),
        ("yes", "no", ""),
    ],
)
def test_the_prompt_of_strings_is_what_both_begin_with(tiny, chosen, rejected, prompt):
    tokens = tokenize_preference(
        Dataset.from_list([{"chosen": chosen, "rejected": rejected}]), tiny
    )
    assert read(tokens, tiny) == [
        {
            "prompt_ids": prompt,
            "chosen_ids": chosen[len(prompt) :] + END,
            "rejected_ids": rejected[len(prompt) :] + END,
        }
    ]


@pytest.mark.parametrize("explicit", [True, False])
def test_pairs_of_conversations(tiny, tmp_path, explicit):
    row = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
    if not explicit:
        row = {"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}
    assert read(tokenize_preference(load(tmp_path, row), tiny), tiny) == [
        {
            "prompt_ids": "<|im_start|>user\nthe card<|im_end|>\n<|im_start|>assistant\n",
            "chosen_ids": "the memory<|im_end|>\n",
            "rejected_ids": "the other<|im_end|>\n",
        }
    ]


def test_equal_conversations_leave_an_answer_to_each(tiny):
    same = QUESTION + GOOD
    (row,) = read(
        tokenize_preference(Dataset.from_list([{"chosen": same, "rejected": same}]), tiny), tiny
    )
    assert row["chosen_ids"] == row["rejected_ids"] == "the memory<|im_end|>\n"


def test_a_prompt_ends_where_the_template_begins_to_differ(tiny, monkeypatch):
    """As where a template thinks aloud after a prompt, and leaves that out of an answer."""
    monkeypatch.setattr(
        tiny,
        "chat_template",
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant <think>' }}{% endif %}",
    )
    row = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
    (made,) = read(tokenize_preference(Dataset.from_list([row]), tiny), tiny)
    assert made["prompt_ids"] + made["chosen_ids"] == "userthe cardassistantthe memory"
    assert made["prompt_ids"] + made["rejected_ids"] == "userthe cardassistantthe other"
    assert made["prompt_ids"].startswith("userthe card")
    assert "think" not in made["prompt_ids"]


@pytest.mark.parametrize("chat", [False, True])
def test_judged_answers(tiny, tmp_path, chat):
    prompt, answer = (QUESTION, GOOD) if chat else ("the card", " the memory")
    rows = [{"prompt": prompt, "completion": answer, "label": label} for label in (True, False)]
    tokens = tokenize_unpaired_preference(load(tmp_path, *rows), tiny)
    made = read(tokens, tiny)
    assert [row["label"] for row in made] == [True, False]
    ending = "the memory<|im_end|>\n" if chat else f" the memory{END}"
    assert {row["completion_ids"] for row in made} == {ending}
    assert made[0]["prompt_ids"].endswith("assistant\n" if chat else "the card")
    assert len(truncate_kto(tokens, None)) == 2


def test_labels_are_true_or_false(tiny):
    row = {"prompt": "a", "completion": "b", "label": 2}
    with pytest.raises(ValueError, match="label=2 of a row: give true"):
        tokenize_unpaired_preference(Dataset.from_list([row]), tiny)
    (made,) = tokenize_unpaired_preference(Dataset.from_list([{**row, "label": 1}]), tiny)
    assert made["label"] is True


def test_prompts_alone(tiny, tmp_path):
    assert read(tokenize_prompts(load(tmp_path, {"prompt": "the card"}), tiny), tiny) == [
        {"prompt_ids": "the card"}
    ]
    assert read(tokenize_prompts(load(tmp_path, {"prompt": QUESTION}), tiny), tiny) == [
        {"prompt_ids": "<|im_start|>user\nthe card<|im_end|>\n<|im_start|>assistant\n"}
    ]
    assert tokenize_prompts(Dataset.from_list([PAIR]), tiny).column_names == ["prompt_ids"]


@pytest.mark.parametrize(
    ("make", "columns", "missing"),
    [
        (tokenize_preference, ["prompt", "chosen"], "rejected"),
        (tokenize_preference, ["text"], "chosen and rejected"),
        (tokenize_unpaired_preference, ["prompt", "completion"], "label"),
        (tokenize_prompts, ["chosen", "rejected"], "prompt"),
    ],
)
def test_missing_columns_are_named(tiny, make, columns, missing):
    rows = Dataset.from_list([dict.fromkeys(columns, "a")])
    named = ", ".join(sorted(columns))
    with pytest.raises(ValueError, match=f"columns {named}: {missing} missing; give "):
        make(rows, tiny)


def test_text_and_messages_in_one_row_are_refused(tiny):
    row = {"prompt": "the card", "chosen": GOOD, "rejected": BAD}
    with pytest.raises(ValueError, match="are text, messages, messages; give text or messages"):
        tokenize_preference(Dataset.from_list([row]), tiny)
    with pytest.raises(ValueError, match="give text or messages in all"):
        tokenize_preference(Dataset.from_list([{"chosen": GOOD, "rejected": "b"}]), tiny)


def test_images_are_refused(tiny):
    with pytest.raises(ValueError, match="column images: vision-language data is refused"):
        tokenize_preference(Dataset.from_list([{**PAIR, "images": ["a.png"]}]), tiny)
    shown = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(ValueError, match="an image in a message: vision-language"):
        tokenize_prompts(Dataset.from_list([{"prompt": shown}]), tiny)


def test_kinds_and_what_sft_can_not_learn_from(tiny):
    pairs, prompts = Dataset.from_list([PAIR]), Dataset.from_list([{"prompt": "a"}])
    assert [kind_of(pairs), kind_of(prompts)] == ["preference", "prompt_only"]
    judged = Dataset.from_list([{"prompt": "a", "completion": "b", "label": True}])
    assert kind_of(judged) == "prompt_completion"
    for rows in (pairs, prompts):
        with pytest.raises(ValueError, match="no answers to learn from; give text, prompt and"):
            tokenize(rows, tiny, None)
