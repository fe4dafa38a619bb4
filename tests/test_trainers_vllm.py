"""Rollouts by vLLM: its engine gets the policy's weights, then its completions are laid out.

A fake engine stands for vLLM's but in the last test: it completes by the weights that it was given.
"""

import copy
import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from online_cases import LIMIT, STOPS, asked, roll, small_ids
from torch import nn
from trainer_cases import chunked, tiny, with_lora

from memlab.errors import MemlabError
from memlab.instruments.device import simulated_gpu
from memlab.models.build import build_meta, load_config, materialize
from memlab.models.head import head_parts
from memlab.trainers import grpo, vllm_rollouts
from memlab.trainers.generate import generate
from memlab.trainers.vllm_weights import SWITCH, push, weights


class FakeEngine:
    """`vllm.LLM` as far as memlab calls it: a model of the same shape with weights of its own."""

    def __init__(self, model: nn.Module, max_model_len: int = 64, resets: bool = True) -> None:
        self.model = copy.deepcopy(model)
        nn.init.normal_(self.model.get_input_embeddings().weight)
        self.resets, self.calls, self.sampling = resets, [], []
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=object()),
            vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cuda")),
        )

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        self.calls.append(method)
        given = dict(kwargs["weights_iterator"])
        assert list(given) == [name for name, _ in self.model.named_parameters()]
        self.model.load_state_dict(given, strict=False)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def generate(self, prompts: list, sampling: list, *, use_tqdm: bool) -> list:
        self.calls.append("generate")
        self.sampling = sampling
        return [
            self._completed(asked["prompt_token_ids"], params)
            for asked, params in zip(prompts, sampling, strict=True)
        ]

    def _completed(self, ids: list[int], params: SimpleNamespace) -> SimpleNamespace:
        seed = params.seed
        completion, mask = generate(
            self.model,
            torch.tensor([ids]),
            head=head_parts(self.model),
            max_completion_length=params.max_tokens,
            eos_token_id=params.stop_token_ids,
            temperature=params.temperature,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=completion[mask].tolist())])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    module.LLM = lambda *folder, **options: SimpleNamespace(folder=folder, options=options)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delenv(SWITCH, raising=False)
    return module


def by_vllm(llm, model: nn.Module, prompts=None, **options):
    options = {"max_completion_length": LIMIT, "eos_token_id": STOPS, **options}
    given = asked() if prompts is None else prompts
    return vllm_rollouts.rollout(llm, model, given, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"pad_token_id": 1}, {"max_length": LIMIT + 2}, {"pad_to_multiple_of": 8}],
)
def test_its_completions_are_laid_out_as_memlabs_own(fake, options: dict) -> None:
    model, prompts = tiny(), [*asked(), asked()[0]]
    own = roll(model, temperature=0.0, **options)(prompts)
    made = by_vllm(FakeEngine(model), model, prompts, temperature=0.0, **options)
    assert len(own.mask.sum(1).unique()) > 1
    for name, found, expected in zip(own._fields, made, own, strict=True):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


def test_weights_go_first_then_old_prefixes_are_forgotten(fake) -> None:
    model = tiny()
    llm = FakeEngine(model)
    before = by_vllm(llm, model, temperature=0.0)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    after = by_vllm(llm, model, temperature=0.0)
    assert llm.calls == ["reload_weights", "reset_prefix_cache", "generate"] * 2
    assert not torch.equal(before.completions, after.completions)
    assert torch.equal(after.input_ids, roll(model, temperature=0.0)(asked()).input_ids)


def test_what_it_is_asked_for(fake) -> None:
    model, prompt = tiny(), asked()[0]
    llm = FakeEngine(model)
    draws = torch.Generator().manual_seed(0)
    options = {"temperature": 0.5, "generator": draws}
    made = by_vllm(llm, model, [prompt] * 4, eos_token_id=7, **options)
    assert len(made.completions.unique(dim=0)) > 1  # the same prompt, other seeds
    (asked_for, *_), seeds = llm.sampling, {params.seed for params in llm.sampling}
    assert len(seeds) == 4
    expected = {"max_tokens": LIMIT, "temperature": 0.5, "stop_token_ids": [7]}
    expected |= {"ignore_eos": True, "detokenize": False, "seed": asked_for.seed}
    assert vars(asked_for) == expected
    by_vllm(llm, model, [prompt] * 4, **options)
    assert not seeds & {params.seed for params in llm.sampling}
    by_vllm(llm, model, eos_token_id=None)
    assert [(p.seed, p.stop_token_ids) for p in llm.sampling] == [(None, [])] * 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_added_to_copies(dtype: torch.dtype) -> None:
    plain = tiny().to(dtype)
    model = with_lora(copy.deepcopy(plain))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = dict(weights(model))
    inner = dict(weights(model.get_base_model()))
    assert all(torch.equal(value, inner[name]) for name, value in given.items())
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged_adapters"))
    expected = dict(model.merge_and_unload(safe_merge=True).named_parameters())
    assert list(given) == list(expected)
    for name, value in expected.items():
        assert torch.equal(given[name], value), name
    moved = [n for n, value in plain.named_parameters() if not torch.equal(given[n], value)]
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_module_trained_whole_is_given_as_it_was_trained() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    norm = model.model.norm.weight.detach().clone()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        adapted.get_base_model().model.norm.modules_to_save["default"].weight.add_(1)
    given = dict(weights(adapted))
    assert list(given) == names
    assert torch.equal(given["model.norm.weight"], norm + 1)


def test_grpo_trains_on_what_it_writes(fake) -> None:
    rewards = []

    def noted(completions, mask):
        rewards.append(small_ids(completions, mask).mean().item())
        return small_ids(completions, mask)

    model = tiny()
    losses = grpo.train(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-2),
        [asked(4)] * 8,
        head=head_parts(model),
        rollout=partial(
            vllm_rollouts.rollout,
            FakeEngine(model),
            model,
            max_completion_length=LIMIT,
            generator=torch.Generator().manual_seed(0),
        ),
        reward=noted,
        logprobs=chunked,
    )
    assert all(math.isfinite(loss) for loss in losses)
    assert rewards[-1] > rewards[0] + 0.15


def test_an_engine_is_built_of_the_policys_shape(fake, monkeypatch) -> None:
    seen = {}

    def built(folder: str, **options):
        seen.update(json.loads(Path(folder, "config.json").read_text()), **options)
        return SimpleNamespace(folder=folder)

    fake.LLM = built
    model = tiny().to(torch.bfloat16)
    llm = vllm_rollouts.engine(model, max_model_len=64)
    assert seen["architectures"] == [type(model).__name__]
    assert seen["hidden_size"] == model.config.hidden_size
    assert (seen["dtype"], seen["load_format"]) == (torch.bfloat16, "dummy")
    assert (seen["max_model_len"], seen["gpu_memory_utilization"]) == (64, 0.3)
    assert not Path(llm.folder).exists()
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(ValueError, match=f"{SWITCH} must be 0, .* not 1"):
        vllm_rollouts.engine(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.005}, r"temperature must be at least 0\.01, or 0"),
        (
            {"max_completion_length": 0},
            "max_completion_length must be a whole number of at least 1",
        ),
        ({"max_completion_length": 62}, "max_model_len must be at least 6[4-9], .* not 63"),
        ({"prompts": []}, "prompts are empty"),
        ({"prompts": [[1, 2], []]}, "prompts must have at least one token each"),
        ({"max_length": LIMIT}, f"max_length must be above the {LIMIT} tokens"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(fake, change: dict, message: str) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=message):
        by_vllm(FakeEngine(model, max_model_len=63), model, **{"eos_token_id": None, **change})


def test_what_the_engine_cannot_take_is_refused() -> None:
    model = tiny()
    llm = FakeEngine(model)
    elsewhere = FakeEngine(model)
    elsewhere.llm_engine = SimpleNamespace()
    with pytest.raises(ValueError, match=f"llm must live in this process: .* {SWITCH}=0"):
        push(elsewhere, model)
    with pytest.raises(MemlabError, match="vllm kept prefixes"):
        push(FakeEngine(model, resets=False), model)
    on_cpu = FakeEngine(model)
    on_cpu.llm_engine.vllm_config.device_config.device_type = "cpu"
    assert model.config.tie_word_embeddings
    with pytest.raises(ValueError, match="tie_word_embeddings must be False for vllm on a CPU"):
        push(on_cpu, model)
    with simulated_gpu() as device:
        simulated = materialize(build_meta("memlab/tiny"), device)
        with pytest.raises(ValueError, match="no simulated device"):
            push(llm, simulated)
    quantized = tiny()
    projection = quantized.model.layers[1].self_attn.q_proj
    packed = projection.weight.detach().to(torch.uint8)
    projection.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight is quantized"):
        push(llm, quantized)
    assert llm.calls == []  # nothing was begun that a refusal would leave half done


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_that_vllm_would_misread_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    two = with_lora(tiny())
    two.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="one adapter for vllm, not default, other"):
        weights(two)
    model = tiny("memlab/tiny-gemma2")
    assert model.config.tie_word_embeddings
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="vllm takes no adapter on tied embeddings"):
        weights(adapted)


def test_without_vllm_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MemlabError, match=r'pip install "\.\[vllm\]"'):
        vllm_rollouts.engine(tiny())


def completed_by_both(device: str) -> list[list[list[int]]]:
    """Greedy completions by vLLM and by memlab in turn, before and after the weights change."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    config = load_config("memlab/tiny")
    config.tie_word_embeddings = device != "cpu"
    plain = materialize(build_meta(config, dtype=torch.float32), device, init=True, seed=3)
    other = materialize(build_meta(config, dtype=torch.float32), device, init=True, seed=4)
    llm = vllm_rollouts.engine(plain, max_model_len=64, enforce_eager=True)
    found = []
    for model in (plain, other, with_lora(copy.deepcopy(other))):
        prompts = [torch.tensor(prompt, device=device) for prompt in asked()]
        theirs = by_vllm(llm, model, prompts, temperature=0.0)
        for made in (theirs, roll(model, temperature=0.0)(prompts)):
            assert made.completions.device.type == device
            found.append(made.input_ids.tolist())
    return found


@pytest.mark.filterwarnings("ignore")  # what vLLM warns of when it is imported
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_vllm_completes_as_memlab_does(device: str) -> None:
    platform = pytest.importorskip("vllm.platforms").current_platform.device_type
    if platform != device:
        pytest.skip(f"this vLLM is for {platform}")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:  # vLLM seeds, and stays
        plain, own, other, own_other, adapted, own_adapted = child.submit(
            completed_by_both, device
        ).result()
    assert (plain, other, adapted) == (own, own_other, own_adapted)
    assert plain != other != adapted
