"""Data sets by name from the hub, or from local files, and their tokens and labels."""

import logging
import re
from pathlib import Path
from typing import Any, cast

from datasets import Dataset, config, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from memlab.data.online import hub_reachable
from memlab.errors import MemlabError

log = logging.getLogger(__name__)

OFFLINE = ("full", "docstrings", "prompt_completion", "chat")  # memlab's own: no download
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_WORDS = re.compile(r"[A-Za-z0-9]+")
_GENERATION = re.compile(r"\{%-?\s*generation\b")


def load_rows(name_or_path: str, split: str = "train") -> Dataset:
    """A data set from a .json, .jsonl or .parquet file, a folder of them, or the hub.

    In a folder, files with the split's name as a word of their path are taken; for "train" all,
    when there are none. A single file is taken whatever the split.

    Raises:
        MemlabError: neither a readable path nor a name that the hub answers to.
        ValueError: its columns are not ones that memlab trains on (see `kind_of`).
    """
    path = Path(name_or_path)
    found = _from_files(path, split) if path.exists() else _from_hub(name_or_path, split)
    kind_of(found)
    return found


def kind_of(dataset: Dataset) -> str:
    """ "text", "prompt_completion" or "chat": by the columns text, prompt + completion, messages.

    Raises:
        ValueError: none of these columns, or images among them.
    """
    columns = set(dataset.column_names)
    images = {
        name
        for name, feature in dataset.features.items()
        if name in ("image", "images", "pixel_values") or "Image(" in repr(feature)
    }
    if images:
        raise _refused(f"column {', '.join(sorted(images))}")
    if "messages" in columns:
        return "chat"
    if {"prompt", "completion"} <= columns:
        return "prompt_completion"
    if "text" in columns:
        return "text"
    raise ValueError(
        f"columns {', '.join(sorted(columns)) or '(none)'} are not understood; "
        "rename to text, to prompt and completion, or to messages"
    )


def tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Dataset:
    """Rows with `input_ids` and `labels` (-100 = no loss), ends cut at max_length tokens.

    Text and completions end with the end-of-text token. Labels count everywhere for text, on the
    completion for prompt and completion (tokenized apart, so that the border is exact), and on
    the assistant's words for chat; a chat template without `{% generation %}` can't tell those
    apart: then every label counts, and a warning is logged. Labels are made before cutting; rows
    with no label left are dropped. The TRL counterpart is SFTTrainer's preparation.

    Raises:
        ValueError: max_length below 1, no row left, no chat template, or columns as in `kind_of`.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} is below 1; take 1 or more, or None to cut none")
    encode = {"text": _text, "prompt_completion": _prompt_completion, "chat": _chat}[
        kind_of(dataset)
    ]

    def row(example: dict[str, Any]) -> dict[str, list[int]]:
        ids, mask = encode(example, tokenizer)
        labels = [token if counts else -100 for token, counts in zip(ids, mask, strict=True)]
        return {"input_ids": ids[:max_length], "labels": labels[:max_length]}

    if encode is _chat and not _marks_assistant(tokenizer):
        log.warning("the chat template has no {% generation %}: the loss counts every token")
    tokens = dataset.map(row, remove_columns=dataset.column_names, desc="tokenize")
    tokens = tokens.filter(lambda example: any(label != -100 for label in example["labels"]))
    if not len(tokens):
        raise ValueError(f"max_length={max_length} leaves no row with a label; take a larger one")
    return tokens


Encoded = tuple[list[int], list[int]]  # ids and, for each, 1 where its label counts


def _text(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    ids = _closed(tokenizer(example["text"])["input_ids"], tokenizer)
    return ids, [1] * len(ids)


def _prompt_completion(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    prompt, completion = example["prompt"], example["completion"]
    if isinstance(prompt, str):
        head = tokenizer(prompt)["input_ids"]
        tail = _closed(tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer)
        return head + tail, [0] * len(head) + [1] * len(tail)
    start = len(_render(tokenizer, prompt, add_generation_prompt=True)["input_ids"])
    both = _render(tokenizer, prompt + completion)["input_ids"]
    return both, [0] * start + [1] * (len(both) - start)


def _chat(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    contents = [message["content"] for message in example["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any("image" in str(part.get("type")) for part in parts):
        raise _refused("an image in column messages")
    marked = _marks_assistant(tokenizer)
    encoded = _render(tokenizer, example["messages"], return_assistant_tokens_mask=marked)
    ids = encoded["input_ids"]
    return ids, encoded["assistant_masks"] if marked else [1] * len(ids)


def _closed(ids: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids with the end-of-text token, once, where the tokenizer has one."""
    eos = cast("int | None", tokenizer.eos_token_id)
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _marks_assistant(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(_GENERATION.search(str(tokenizer.chat_template)))


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any
) -> dict[str, list[int]]:
    """The tokens of a conversation, by the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; take an instruction-tuned model's")
    return cast(Any, tokenizer.apply_chat_template(messages, return_dict=True, **options))


def _refused(what: str) -> ValueError:
    return ValueError(
        f"{what}: vision-language data is refused, because memlab's models read text only and "
        "the number of image tokens depends on each model's processor; take the text alone"
    )


def _from_files(path: Path, split: str) -> Dataset:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [file for file in found if file.suffix in _FORMATS and file.is_file()]
    if path.is_dir():
        named = [file for file in found if split in _WORDS.findall(str(file.relative_to(path)))]
        found = named or (found if split == "train" else [])
    kinds = {_FORMATS[file.suffix] for file in found}
    if len(kinds) != 1:
        has = "no such file" if not kinds else "json and parquet mixed"
        raise MemlabError(
            f"dataset {path}, split {split}: {has}; "
            "give .json, .jsonl or .parquet files of one kind"
        )
    try:
        names = [str(file) for file in found]
        return load_dataset(kinds.pop(), data_files={"rows": names}, split="rows")
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MemlabError(f"dataset {path}: not readable ({reason}); check the file") from error


def _from_hub(name: str, split: str) -> Dataset:
    offline = f"offline, take one of {', '.join(OFFLINE)}, or a local file"
    if not (hub_reachable() or config.HF_HUB_OFFLINE):
        raise MemlabError(f"dataset {name}: no such path, and the hub can't be reached; {offline}")
    try:
        return load_dataset(name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MemlabError(f"dataset {name}, split {split}: {reason}; {offline}") from error
