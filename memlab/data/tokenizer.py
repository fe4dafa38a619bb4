"""A tokenizer made on the spot, or a hub's or a folder's where there is one."""

import json
import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from memlab.data.disk import cached_json
from memlab.data.online import hub_reachable
from memlab.data.text import docstrings, plain_text, source_key

log = logging.getLogger(__name__)

VOCAB_SIZE = 8192  # below the vocabulary of every preset, so that ids fit all of them
PAD, EOS, START, END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# `generation` marks what the assistant says: return_assistant_tokens_mask reads it
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (Sennrich et al. 2016, on bytes as in GPT-2) of these texts.

    Every id is below `vocab_size`, which must hold the 256 bytes and 4 special tokens; few texts
    may give fewer. Ids 0 to 3 are pad, end of text, and the two marks of a chat turn.

    Raises:
        ValueError: vocab_size below 260.
    """
    return _wrap(_train(texts, vocab_size))


def load_tokenizer(name_or_path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or of the hub; without a name, or offline, memlab's own.

    memlab's own has `VOCAB_SIZE` ids, is trained on `docstrings` in about three seconds and then
    cached on disk. Which one was taken is logged (info; warning when a name could not be had).
    Loading runs no code from the hub.
    """
    if name_or_path is None:
        return _own()
    is_folder = Path(name_or_path).is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, local_files_only=is_folder or not hub_reachable()
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        log.warning("tokenizer %s: not loaded (%s); taking memlab's own", name_or_path, reason)
        return _own()
    log.info("tokenizer %s: loaded from %s", name_or_path, "the folder" if is_folder else "the hub")
    return tokenizer


@lru_cache
def _own() -> PreTrainedTokenizerFast:
    def make() -> dict:
        return json.loads(_train(plain_text(docstrings()), VOCAB_SIZE).to_str())

    saved = cached_json(f"tokenizer-{VOCAB_SIZE}-{source_key()}.json", make)
    log.info("tokenizer: memlab's own, byte-level BPE, %d ids", VOCAB_SIZE)
    return _wrap(Tokenizer.from_str(json.dumps(saved)))


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    special = [PAD, EOS, START, END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        smallest = len(alphabet) + len(special)
        raise ValueError(f"vocab_size={vocab_size} is too small; take {smallest} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
