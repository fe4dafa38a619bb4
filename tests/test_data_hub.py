"""Data sets from local files, their tokens and labels, and what is refused."""

import json
import logging
from unittest.mock import Mock

import pytest
from datasets import Dataset
from datasets import Image as ImageFeature

from memlab.data import hub
from memlab.data.encoding import kind_of, tokenize
from memlab.data.hub import load_rows
from memlab.data.tokenizer import train_tokenizer
from memlab.errors import MemlabError

TEXTS = [{"text": "the card"}, {"text": "the memory of the other card"}]
PAIRS = [{"prompt": "the card", "completion": " the memory"}]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "the card"},
            {"role": "assistant", "content": "the memory"},
        ]
    }
]


@pytest.fixture(scope="module")
def tiny():
    return train_tokenizer(["the memory of the card", "the other card"] * 4, vocab_size=280)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)


def counted(row, tokenizer) -> str:
    """The text of the labels that count."""
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def write(path, rows) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "kind"), [(TEXTS, "text"), (PAIRS, "prompt_completion"), (CHATS, "chat")]
)
def test_kinds_of_local_files(tmp_path, rows, kind):
    loaded = load_rows(write(tmp_path / "rows.jsonl", rows))
    assert loaded.to_list() == rows
    assert kind_of(loaded) == kind


def test_parquet_and_whole_json(tmp_path):
    Dataset.from_list(TEXTS).to_parquet(tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet")).to_list() == TEXTS
    (tmp_path / "rows.json").write_text(json.dumps(PAIRS))
    assert load_rows(str(tmp_path / "rows.json")).to_list() == PAIRS


def test_folder_and_splits(tmp_path):
    write(tmp_path / "f" / "train-0.jsonl", TEXTS[:1])
    write(tmp_path / "f" / "test-0.jsonl", TEXTS[1:])
    assert load_rows(str(tmp_path / "f")).to_list() == TEXTS[:1]
    assert load_rows(str(tmp_path / "f"), "test").to_list() == TEXTS[1:]
    with pytest.raises(MemlabError, match="split val: no such file"):
        load_rows(str(tmp_path / "f"), "val")
    write(tmp_path / "g" / "b.jsonl", TEXTS[1:])
    write(tmp_path / "g" / "a.jsonl", TEXTS[:1])
    assert load_rows(str(tmp_path / "g")).to_list() == TEXTS


def test_text_counts_everywhere_and_ends(tiny):
    rows = tokenize(Dataset.from_list(TEXTS), tiny, None)
    assert rows.column_names == ["input_ids", "labels"]
    assert rows["input_ids"][0] == rows["labels"][0]
    assert counted(rows[1], tiny) == "the memory of the other card<|endoftext|>"


def test_labels_are_the_completion(tiny):
    (row,) = tokenize(Dataset.from_list(PAIRS), tiny, None)
    assert counted(row, tiny) == " the memory<|endoftext|>"
    assert tiny.decode(row["input_ids"]) == "the card the memory<|endoftext|>"


def test_labels_are_the_completion_of_a_conversation(tiny):
    (chat,) = CHATS
    pair = {"prompt": chat["messages"][:1], "completion": chat["messages"][1:]}
    (row,) = tokenize(Dataset.from_list([pair]), tiny, None)
    assert counted(row, tiny) == "the memory<|im_end|>\n"


def test_labels_are_the_assistants(tiny):
    (row,) = tokenize(Dataset.from_list(CHATS), tiny, None)
    assert counted(row, tiny) == "the memory<|im_end|>"
    assert tiny.decode(row["input_ids"]).startswith("<|im_start|>user\nthe card<|im_end|>")


def test_template_without_marks_counts_all_and_says_so(tiny, monkeypatch, caplog):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(tiny, "chat_template", template)
    with caplog.at_level(logging.WARNING, "memlab"):
        (row,) = tokenize(Dataset.from_list(CHATS), tiny, None)
    assert counted(row, tiny) == "the cardthe memory"
    assert "no {% generation %}" in caplog.text


def test_no_template_is_an_error(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        tokenize(Dataset.from_list(CHATS), tiny, None)


def test_cut_after_labels_were_made_and_dropped_when_none_is_left(tiny):
    long_prompt = {"prompt": "the other card " * 3, "completion": " the"}
    pairs = Dataset.from_list([long_prompt, *PAIRS])
    prompt = len(tiny(PAIRS[0]["prompt"])["input_ids"])
    (row,) = tokenize(pairs, tiny, prompt + 1)
    assert len(row["input_ids"]) == len(row["labels"]) == prompt + 1
    assert [label != -100 for label in row["labels"]] == [False] * prompt + [True]
    with pytest.raises(ValueError, match="max_length=1 leaves no row"):
        tokenize(pairs, tiny, 1)
    with pytest.raises(ValueError, match="max_length=0 is below 1"):
        tokenize(pairs, tiny, 0)


def test_unreachable_hub_names_what_works(offline, monkeypatch):
    monkeypatch.setattr(hub.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(MemlabError, match=r"owner/none: .* take one of full, docstrings"):
        load_rows("owner/none")
    monkeypatch.setattr(hub, "load_dataset", Mock(side_effect=OSError("x")))
    monkeypatch.setattr(hub.config, "HF_HUB_OFFLINE", True)  # then only what is cached is tried
    with pytest.raises(MemlabError, match="owner/none, split train: x; offline, take one of"):
        load_rows("owner/none")


def test_reachable_hub_is_asked_by_name(monkeypatch):
    load = Mock(return_value=Dataset.from_list(TEXTS))
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(hub, "load_dataset", load)
    assert load_rows("owner/name", "test").to_list() == TEXTS
    load.assert_called_once_with("owner/name", split="test")


def test_files_that_can_not_be_read(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{not json")
    with pytest.raises(MemlabError, match=r"bad.jsonl: not readable \(.*\); check the file"):
        load_rows(str(tmp_path / "bad.jsonl"))
    (tmp_path / "x.csv").write_text("text\na")
    with pytest.raises(MemlabError, match=r"give .json, .jsonl or .parquet"):
        load_rows(str(tmp_path / "x.csv"))


def test_unknown_columns(tmp_path):
    with pytest.raises(ValueError, match="columns answer, question are not understood; rename"):
        load_rows(write(tmp_path / "r.jsonl", [{"question": "a", "answer": "b"}]))


def test_images_are_refused_by_name(tiny):
    rows = Dataset.from_list([{"text": "a", "picture": None}])
    with pytest.raises(ValueError, match="column picture: vision-language data is refused"):
        kind_of(rows.cast_column("picture", ImageFeature()))
    with pytest.raises(ValueError, match="column images: vision-language data is refused"):
        kind_of(Dataset.from_list([{"text": "a", "images": ["a.png"]}]))
    content = [{"type": "image"}]
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": content}]}])
    with pytest.raises(ValueError, match="an image in a message: vision-language"):
        tokenize(rows, tiny, None)
