"""TRL's own loss code without its trainers: methods of its classes called on stand-ins."""

import dataclasses
import inspect
from collections import defaultdict
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch


class Stub(SimpleNamespace):
    """Has the attributes it was given; every other one is None, as a switch that is off."""

    def __getattr__(self, name):
        return None


def trl_class(module, name):
    """A class of TRL; skips where TRL is missing or its inner workings may have changed."""
    found = pytest.importorskip(module)
    if not version("trl").startswith("1.16."):
        pytest.skip(f"calls methods inside TRL 1.16; here is {version('trl')}")
    return getattr(found, name)


def defaults(function, config, but=()):
    """The defaults of `function`'s switches that a TRL config class has too, and TRL's own."""
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    ours = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name in theirs and name not in but
    }
    return ours, {name: theirs[name] for name in ours}


def trainer(**attributes):
    """A stand-in for a trainer on one process, without accumulation."""
    same = lambda x, **_: x  # noqa: E731
    accelerator = Stub(
        device=torch.device("cpu"),
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        process_index=0,
        num_processes=1,
        unwrap_model=same,
    )
    defaults = {
        "accelerator": accelerator,
        "model": Stub(training=True),
        "ref_model": "reference",
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_logs": {
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": defaultdict(list),
        },
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "current_gradient_accumulation_steps": 1,
        "top_entropy_quantile": 1.0,
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
        "precompute_ref_logps": True,
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1),
        "args": Stub(steps_per_generation=1, gradient_accumulation_steps=1),
        "num_iterations": 1,
    }
    return Stub(**{**defaults, **attributes})


def language_model(log_probs):
    """A stand-in for TRL's fused model: whatever it is asked, these (B, T) log-probabilities."""
    nothing = torch.zeros_like(log_probs)
    return lambda **_: Stub(
        log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )


def scored_rollouts(cls, monkeypatch, rewards, num_generations, policy, reference, mask, **more):
    """What TRL's online trainer `cls` makes of rollouts: a dict with the advantages.

    rewards (B,), policy and reference (B, T) log-probabilities, mask (B, T) of completions, each
    a row of ones and then zeros.
    """
    rows, lengths = len(rewards), mask.sum(1).tolist()
    completions = [[1] * length for length in lengths]
    if cls.__name__ == "GRPOTrainer":
        made = [[2]] * rows, completions, None, completions, None, {}, None, None
    else:
        made = [[2]] * rows, completions, completions
    logps = {"reference": reference}
    stub = trainer(
        _generate=lambda prompts: made,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (
            logps.get(model, policy) if isinstance(model, str) else policy,
            None,
            None,
        ),
        _calculate_rewards=lambda *_: rewards[:, None],
        _tokenizer=Stub(pad_token_id=0),
        num_generations=num_generations,
        reward_funcs=[None],
        **more,
    )
    module = __import__(cls.__module__, fromlist=["_"])
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())
    return cls._generate_and_score_completions(stub, [{"prompt": "p"}] * rows)
