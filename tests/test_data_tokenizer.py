"""The tokenizer made on the spot, and what is taken when a name can't be had."""

import logging
import threading
import time

import pytest
from transformers import PreTrainedTokenizerFast

from memlab.data import online, tokenizer
from memlab.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tiny() -> PreTrainedTokenizerFast:
    return train_tokenizer(["the memory of the card", "the other card"] * 4, vocab_size=280)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(tokenizer, "hub_reachable", lambda: False)


@pytest.mark.parametrize("line", ["the card", "naïve → 日本語 🙂", " two  spaces , and\ttabs\n"])
def test_any_string_round_trips_within_the_vocabulary(tiny, line):
    ids = tiny(line)["input_ids"]
    assert tiny.decode(ids) == line
    assert max(ids) < len(tiny) <= 280


def test_special_tokens(tiny):
    assert (tiny.pad_token_id, tiny.eos_token_id) == (0, 1)
    assert tiny("<|im_end|>")["input_ids"] == [3]


def test_assistant_mask_covers_the_answers_alone(tiny):
    messages = [
        {"role": "user", "content": "the card?"},
        {"role": "assistant", "content": "the memory"},
        {"role": "user", "content": "other?"},
        {"role": "assistant", "content": "the other card"},
    ]
    out = tiny.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    assert tiny.decode(said) == "the memory<|im_end|>the other card<|im_end|>"
    prompt = tiny.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nthe card?<|im_end|>\n<|im_start|>assistant\n"


def test_vocabulary_must_hold_the_bytes():
    with pytest.raises(ValueError, match="vocab_size=259 is too small; take 260"):
        train_tokenizer(["a"], vocab_size=259)


def test_own_tokenizer_fits_every_preset():
    own = load_tokenizer()
    assert len(own) == tokenizer.VOCAB_SIZE
    ids = own("def forward(self, input: Tensor) -> Tensor")["input_ids"]
    assert len(ids) < 15  # trained on such text: bytes would be 42


def test_local_folder(tiny, tmp_path, offline, caplog):
    caplog.set_level(logging.INFO, "memlab")
    tiny.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("the card")["input_ids"] == tiny("the card")["input_ids"]
    assert "loaded from the folder" in caplog.text


def test_unreachable_name_falls_back_and_says_so(offline, caplog):
    assert len(load_tokenizer("some-owner/no-such-model")) == tokenizer.VOCAB_SIZE
    assert "some-owner/no-such-model: not loaded" in caplog.text
    assert "taking memlab's own" in caplog.text


def test_a_hub_that_never_answers_costs_little_time(monkeypatch):
    answer = threading.Event()

    def never(*args, **kwargs):
        answer.wait(5)
        raise OSError

    monkeypatch.setattr(online, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(online.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(online.urllib.request, "urlopen", never)
    start = time.monotonic()
    assert not online.hub_reachable.__wrapped__()
    assert time.monotonic() - start < 1
    answer.set()


def test_offline_switch_asks_nobody(monkeypatch):
    monkeypatch.setattr(online.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(online.urllib.request, "urlopen", lambda *a, **k: pytest.fail("asked"))
    assert not online.hub_reachable.__wrapped__()
