"""Rollouts by vLLM, in this process: its engine samples, the policy's weights go to it before.

Each rollout hands all weights of the policy to the engine (`vllm_weights.push`) and samples with
`LLM.generate`, as entrypoints/llm.py of vLLM 0.26.0 has it. The engine keeps weights and a KV cache
of its own, which no meter of memlab sees. Tried with vLLM 0.32.0 on a CPU, in fp32, where greedy
completions are those of `generate.generate`; not tried yet on a card.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.losses.sequences import number, whole
from memlab.trainers.generate import stop_ids
from memlab.trainers.rollouts import Rollout, checked, laid_out
from memlab.trainers.vllm_weights import SWITCH, push, unwrapped


def engine(model: Any, *, gpu_memory_utilization: float = 0.3, **options: Any) -> Any:
    """A `vllm.LLM` of the policy's shape and dtype, for token ids; weights come with a rollout.

    `gpu_memory_utilization` is the share of the card for its weights and cache; `options` are
    others of `vllm.LLM`. Sets VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment; vLLM then seeds
    the random numbers of this process, too (`seed`, 0). Raises MemlabError without vLLM, ValueError
    where that variable is set otherwise.
    """
    vllm = _vllm()
    if os.environ.setdefault(SWITCH, "0") != "0":
        raise ValueError(
            f"{SWITCH} must be 0, so that weights reach vLLM, not {os.environ[SWITCH]}"
        )
    policy = unwrapped(model)
    options = {"dtype": policy.dtype, "load_format": "dummy", "skip_tokenizer_init": True} | options
    config = copy.deepcopy(policy.config)
    config.architectures = [type(policy).__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return vllm.LLM(folder, gpu_memory_utilization=gpu_memory_utilization, **options)


def rollout(
    llm: Any,
    model: Any,
    prompts: Sequence[Any],
    *,
    pad_token_id: int = 0,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    **options: Any,
) -> Rollout:
    """As `rollouts.rollout`, by the engine `llm`: `push`, then `complete`, whose `options` these
    are. Give `functools.partial(rollout, llm, model, ...)` to a trainer. Raises what they
    raise: ValueError, MemlabError.
    """
    rows = [row.cpu() for row in checked(prompts, pad_to_multiple_of)]
    push(llm, model)
    completions = complete(llm, [row.tolist() for row in rows], **options)
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    new = [torch.tensor([completions[at]]) for at in order]
    made = laid_out(
        order,
        [rows[at][None] for at in order],
        new,
        [torch.ones_like(ids, dtype=torch.bool) for ids in new],
        pad_token_id=pad_token_id,
        max_length=max_length,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    device = next(model.parameters()).device
    return Rollout(*(column.to(device) for column in made))


def complete(
    llm: Any,
    prompts: list[list[int]],
    *,
    max_completion_length: int,
    eos_token_id: int | Sequence[int] | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """A completion for each prompt, token ids with the stop token that ends them, as `generate`'s.

    `generator` draws a seed for each one (slower in vLLM); None leaves it to the engine's own seed.
    Raises ValueError for an empty prompt, lengths out of range, and what vLLM would change without
    an error: temperatures between 0 and 0.01, completions that its max_model_len cuts. TypeError
    for what is no number, MemlabError without vLLM.
    """
    whole("max_completion_length", max_completion_length, 1)
    number("temperature", temperature, lambda t: t == 0 or t >= 0.01, "at least 0.01, or 0: greedy")
    lengths = sorted(map(len, prompts))
    if not lengths[0]:
        raise ValueError("prompts must have at least one token each")
    limit, wanted = llm.model_config.max_model_len, lengths[-1] + max_completion_length
    if wanted > limit:
        raise ValueError(f"max_model_len must be at least {wanted}, prompt and all, not {limit}")
    seeds: list[int | None] = [None] * len(prompts)
    if generator is not None:  # one for all would give equal prompts equal completions
        size = (len(prompts),)
        seeds = torch.randint(2**31, size, generator=generator, device=generator.device).tolist()
    ends = {"stop_token_ids": stop_ids(eos_token_id), "ignore_eos": True}  # and no others
    options = {"max_tokens": max_completion_length, "temperature": temperature, **ends}
    sampling = [_vllm().SamplingParams(seed=seed, detokenize=False, **options) for seed in seeds]
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [list(out.outputs[0].token_ids) for out in llm.generate(asked, sampling, use_tqdm=False)]


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise MemlabError(f'vllm: {error}; pip install ".[vllm]" brings it (Linux)') from error
    return vllm
