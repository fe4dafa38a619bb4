"""Models: published sizes, building without memory, giving memory, loading, taking apart."""

import math
import time

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, PreTrainedModel

from memlab.errors import MemlabError
from memlab.models import build
from memlab.models.build import build_meta, load_config, load_pretrained, materialize
from memlab.models.compat import disable_checkpointing, enable_checkpointing
from memlab.models.head import head_parts
from memlab.models.presets import ALIASES, PRESETS, preset

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "google/gemma-2-2b": 2_614_341_888,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
}
TINY = ["memlab/tiny", "memlab/tiny-llama", "memlab/tiny-mistral", "memlab/tiny-gemma2"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "hub_reachable", lambda: False)


def tiny(name: str = "memlab/tiny", **kwargs: object) -> PreTrainedModel:
    model = build_meta(name, dtype=torch.float32, **kwargs)  # type: ignore[arg-type]
    return materialize(model, "cpu", init=True)


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name: str, count: int):
    model = build_meta(name)
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert torch.get_default_dtype() == torch.float32


def test_every_preset_is_published_or_tiny():
    assert set(PRESETS) == {*PUBLISHED, *TINY}
    assert set(ALIASES.values()) <= set(PRESETS)


def test_an_alias_has_the_shape_of_its_preset():
    assert preset("Qwen/Qwen2.5-0.5B-Instruct") == preset("Qwen/Qwen2.5-0.5B")
    assert load_config("Qwen/Qwen2.5-0.5B-Instruct").hidden_size == 896


def test_a_preset_cannot_be_changed_through_a_copy():
    values = preset("memlab/tiny")
    assert values is not None
    values["rope_parameters"]["rope_theta"] = values["hidden_size"] = 0
    assert load_config("memlab/tiny").hidden_size == 128
    assert load_config("memlab/tiny").rope_parameters["rope_theta"] == 1000000.0


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Qwen3-06B", "unknown model 'Qwen/Qwen3-06B': did you mean 'Qwen/Qwen3-0.6B'"),
        ("qwen/qwen3-4b", "did you mean 'Qwen/Qwen3-4B'"),
        ("nobody/nothing", "known offline are Qwen/Qwen3-0.6B.*hub could not be reached"),
        ("", "unknown model ''"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "'Qwen/Qwen2.5-VL-3B-Instruct' is a vision-language"),
    ],
)
def test_unknown_names_are_refused_in_one_line(name: str, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(name)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_given_up_soon(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")  # an address kept for examples
    start = time.monotonic()
    assert not build.hub_reachable(timeout_s=0.5)
    assert time.monotonic() - start < 5


def test_vision_and_encoder_configurations_are_refused(tmp_path):
    for text, why in [
        ('{"model_type": "qwen2_5_vl"}', "vision-language model"),
        ('{"model_type": "t5"}', "not a causal language model"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=why):
            load_config(str(tmp_path))


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without a config\.json"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("name", TINY)
def test_a_local_folder_loads_back_with_equal_values(name: str, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(str(tmp_path), dtype=torch.float32)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.usefixtures("offline")
def test_weights_that_are_not_here_are_a_clear_error(tmp_path):
    with pytest.raises(MemlabError, match="hub could not be reached"):
        load_pretrained("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match="no trained weights"):
        load_pretrained("memlab/tiny")
    load_config("memlab/tiny").save_pretrained(tmp_path)
    with pytest.raises(MemlabError, match="no weights in the folder"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", [name for name in TINY if "mistral" not in name])  # a window
def test_initial_loss_is_that_of_a_uniform_guess(name: str):
    ids = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
    loss = next_token_loss(tiny(name), ids)
    assert abs(loss.item() - math.log(512)) < 0.3


@pytest.mark.parametrize("name", ["memlab/tiny", "memlab/tiny-gemma2", "meta-llama/Llama-3.2-1B"])
def test_init_gives_what_transformers_itself_builds(name: str):
    config = load_config(name)
    config.update({"num_hidden_layers": 1, "vocab_size": 512})
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:1]
    ours = materialize(build_meta(config, dtype=torch.float32), "cpu", init=True)
    theirs = type(ours)(config)
    assert {n: b.tolist() for n, b in ours.named_buffers()} == {
        n: b.tolist() for n, b in theirs.named_buffers()
    }
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.mean(), b.mean(), rtol=0, atol=1e-3, msg=name)
        torch.testing.assert_close(a.std(), b.std(), rtol=0.05, atol=0, msg=name)


def test_init_draws_from_its_seed_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first, again = (materialize(build_meta("memlab/tiny"), "cpu", init=True) for _ in range(2))
    other = materialize(build_meta("memlab/tiny"), "cpu", init=True, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weight = first.lm_head.weight
    assert torch.equal(weight, again.lm_head.weight)
    assert not torch.equal(weight, other.lm_head.weight)


@pytest.mark.parametrize("name", TINY)
def test_materialize_keeps_ties_and_requires_grad(name: str):
    model = build_meta(name)
    model.model.norm.weight.requires_grad_(False)
    tied = model.config.tie_word_embeddings
    materialize(model, "cpu")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not model.model.norm.weight.requires_grad
    assert model.lm_head.weight.requires_grad
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_materialize_keeps_parameter_classes_attributes_and_real_values():
    class Special(nn.Parameter):
        pass

    module = nn.Linear(3, 2, device="meta")
    module.weight = Special(torch.empty(2, 3, device="meta"), requires_grad=False)
    module.weight.note = "kept"  # type: ignore[attr-defined]
    module.bias = nn.Parameter(torch.tensor([1.0, 2.0]))
    materialize(module, "cpu")
    assert type(module.weight) is Special
    assert module.weight.note == "kept"  # type: ignore[attr-defined]
    assert not module.weight.requires_grad
    assert module.bias.tolist() == [1.0, 2.0]


def test_init_needs_a_transformers_model():
    with pytest.raises(TypeError, match="not Linear"):
        materialize(nn.Linear(2, 2, device="meta"), "cpu", init=True)


@pytest.mark.parametrize("name", TINY)
def test_head_parts_make_the_models_logits(name: str):
    model = tiny(name)
    parts = head_parts(model)
    ids = torch.arange(24).view(2, 12)
    logits = parts.head(parts.backbone(ids).last_hidden_state) * parts.logit_scale
    if parts.softcap is not None:
        logits = parts.softcap * torch.tanh(logits / parts.softcap)
    torch.testing.assert_close(logits, model(ids).logits)
    assert (parts.softcap == 30.0) == (name == "memlab/tiny-gemma2")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_head_parts_know_logit_scales_and_adapters():
    from peft import LoraConfig, get_peft_model

    config = GraniteConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, logits_scaling=8.0,
    )  # fmt: skip
    model = materialize(build_meta(config, dtype=torch.float32), "cpu", init=True)
    parts = head_parts(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    ids = torch.arange(8).view(1, 8)
    logits = parts.head(parts.backbone(ids).last_hidden_state) * parts.logit_scale
    torch.testing.assert_close(logits, model(ids).logits)
    assert parts.logit_scale == 0.125
    with pytest.raises(TypeError, match="Linear is not a causal language model"):
        head_parts(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},  # of tied weights
    ],
)
def test_an_adapter_on_the_head_is_refused(adapted: dict):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(**adapted))
    with pytest.raises(
        ValueError, match=r"adapts lm_head, the head: .* would leave the adapter out"
    ):
        head_parts(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": "all-linear"},  # but the head, says peft
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_elsewhere_or_a_head_trained_whole_is_in_the_logits(adapted: dict):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(**adapted))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    parts, ids = head_parts(model), torch.arange(12).view(2, 6)
    hidden = parts.backbone(input_ids=ids).last_hidden_state
    logits = nn.functional.linear(hidden, parts.head.weight, parts.head.bias)
    torch.testing.assert_close(logits, model(input_ids=ids).logits)


def test_checkpointing_runs_each_layer_once_more():
    model = tiny().train()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.arange(16).view(1, 16)
    gradients = []
    for switch, expected in [(enable_checkpointing, 2), (disable_checkpointing, 1)]:
        calls.clear()
        switch(model)
        next_token_loss(model, ids).backward()
        assert len(calls) == expected
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
        model.zero_grad()
    torch.testing.assert_close(*gradients)
