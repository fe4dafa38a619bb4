"""The tokens of a data set, for each trainer, by the columns that it has.

The columns are those of TRL's data set formats; texts may be strings or lists of chat messages.
"""

import logging
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, cast

from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_COLUMNS = {
    "chat": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "text": {"text"},
    "preference": {"chosen", "rejected"},
    "prompt_only": {"prompt"},
}
_GENERATION = re.compile(r"\{%-?\s*generation\b")


def kind_of(dataset: Dataset) -> str:
    """ "chat", "prompt_completion", "text", "preference" or "prompt_only": the first one whose
    columns are there, messages, prompt and completion, text, chosen and rejected, or prompt.

    Raises:
        ValueError: none of these columns, or images among them.
    """
    _refuse_images(dataset)
    for kind, columns in _COLUMNS.items():
        if columns <= set(dataset.column_names):
            return kind
    raise ValueError(
        f"columns {_named(dataset)} are not understood; rename to text, to prompt and completion, "
        "to messages, to chosen and rejected, or to prompt"
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
        ValueError: max_length below 1, no row left, no chat template, or other columns.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length} is below 1; take 1 or more, or None to cut none")
    encoders = {"text": _text, "prompt_completion": _prompt_completion, "chat": _chat}
    encode = encoders.get(kind_of(dataset))
    if encode is None:
        raise ValueError(
            f"columns {_named(dataset)}: no answers to learn from; give text, prompt and "
            "completion, or messages"
        )

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


def tokenize_preference(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows with `prompt_ids`, `chosen_ids` and `rejected_ids`, whole: DPO's pairs.

    From columns chosen and rejected, perhaps prompt; without one, the prompt is what both begin
    with: whole words of strings, whole messages of conversations. Answers that are strings end with
    the end-of-text token. The TRL counterpart is DPOTrainer's preparation, which may cut a word.
    For Reward the prompt goes in front of both: `memlab.data.preferences.scored_rows`.

    Raises:
        ValueError: columns missing, images, texts of two sorts in a row, or no chat template.
    """
    _need(dataset, "chosen", "rejected")

    def row(example: dict[str, Any]) -> dict[str, Any]:
        prompt, chosen, rejected = _explicit(example)
        prompt_ids, (chosen_ids, rejected_ids) = _answers(prompt, (chosen, rejected), tokenizer)
        return {"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}

    return dataset.map(row, remove_columns=dataset.column_names, desc="tokenize")


def tokenize_unpaired_preference(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows with `prompt_ids`, `completion_ids` and the bool `label`, whole: KTO's judged answers.

    From columns prompt, completion and label (true: desirable). Raises ValueError as
    `tokenize_preference`, and for a label that is neither true nor false.
    """
    _need(dataset, "prompt", "completion", "label")

    def row(example: dict[str, Any]) -> dict[str, Any]:
        label = example["label"]
        if label not in (True, False):
            raise ValueError(f"label={label!r} of a row: give true (desirable) or false")
        prompt, (completion,) = _answers(example["prompt"], (example["completion"],), tokenizer)
        return {"prompt_ids": prompt, "completion_ids": completion, "label": label}

    tokens = dataset.map(row, remove_columns=dataset.column_names, desc="tokenize")
    return tokens.cast_column("label", Value("bool"))


def tokenize_prompts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows with `prompt_ids`, whole, of the column prompt, for trainers that complete prompts.

    Raises ValueError as `tokenize_preference`.
    """
    _need(dataset, "prompt")

    def row(example: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_ids": _answers(example["prompt"], (), tokenizer)[0]}

    return dataset.map(row, remove_columns=dataset.column_names, desc="tokenize")


Encoded = tuple[list[int], list[int]]  # ids and, for each, 1 where its label counts


def _text(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    ids = _closed(tokenizer(example["text"])["input_ids"], tokenizer)
    return ids, [1] * len(ids)


def _prompt_completion(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    prompt, (completion,) = _answers(example["prompt"], (example["completion"],), tokenizer)
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def _chat(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    _refuse_images_in(example["messages"])
    marked = _marks_assistant(tokenizer)
    encoded = _render(tokenizer, example["messages"], return_assistant_tokens_mask=marked)
    ids = encoded["input_ids"]
    return ids, encoded["assistant_masks"] if marked else [1] * len(ids)


def _answers(
    prompt: Any, answers: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[list[int]]]:
    """The ids of a prompt, and of each answer to it.

    Strings are tokenized apart; a conversation is rendered whole, and its prompt ends where the
    first of the answers, or what the template puts before one, begins to differ.
    """
    if len({type(text) for text in (prompt, *answers)}) > 1:
        sorts = ", ".join("text" if isinstance(t, str) else "messages" for t in (prompt, *answers))
        raise ValueError(f"a prompt and its answers are {sorts}; give text or messages in all")
    if isinstance(prompt, str):
        tails = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
        return cast(Any, tokenizer(prompt)["input_ids"]), [_closed(t, tokenizer) for t in tails]
    _refuse_images_in(prompt, *answers)
    wholes = [_render(tokenizer, prompt + messages)["input_ids"] for messages in answers]
    if not prompt:
        return [], wholes
    alone = _render(tokenizer, prompt, add_generation_prompt=True)["input_ids"]
    start = _common(alone, *wholes)
    return alone[:start], [whole[start:] for whole in wholes]


def _explicit(example: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected answer of a pair; without a prompt, what both begin with."""
    chosen, rejected = example["chosen"], example["rejected"]
    if "prompt" in example or type(chosen) is not type(rejected):
        return example.get("prompt", chosen), chosen, rejected
    end = _common(chosen[:-1], rejected[:-1])  # something is left to each
    if isinstance(chosen, str):
        end = max(chosen.rfind(" ", 0, end), chosen.rfind("\n", 0, end), 0)
    return chosen[:end], chosen[end:], rejected[end:]


def _common(*sequences: Sequence[Any]) -> int:
    """How many first items are the same in all."""
    beside = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda items: items.count(items[0]) == len(items), beside))


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


def _need(dataset: Dataset, *columns: str) -> None:
    _refuse_images(dataset)
    if missing := [name for name in columns if name not in dataset.column_names]:
        raise ValueError(
            f"columns {_named(dataset)}: {' and '.join(missing)} missing; give {', '.join(columns)}"
        )


def _named(dataset: Dataset) -> str:
    return ", ".join(sorted(dataset.column_names)) or "(none)"


def _refuse_images(dataset: Dataset) -> None:
    images = {
        name
        for name, feature in dataset.features.items()
        if name in ("image", "images", "pixel_values") or "Image(" in repr(feature)
    }
    if images:
        raise _refused(f"column {', '.join(sorted(images))}")


def _refuse_images_in(*conversations: list[dict[str, Any]]) -> None:
    contents = [message["content"] for messages in conversations for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any("image" in str(part.get("type")) for part in parts):
        raise _refused("an image in a message")


def _refused(what: str) -> ValueError:
    return ValueError(
        f"{what}: vision-language data is refused, because memlab's models read text only and "
        "the number of image tokens depends on each model's processor; take the text alone"
    )
