"""The offline trainers on the simulated GPU: the same code, and where its bytes are."""

from typing import Any

import pytest
import test_trainers_dpo
import test_trainers_gkd
import test_trainers_kto
import test_trainers_reward
import torch
from trainer_cases import chunked

from memlab.instruments.device import simulated_gpu
from memlab.instruments.measurement import CATEGORIES
from memlab.instruments.meter import Meter
from memlab.models.build import build_meta, materialize
from memlab.models.compat import enable_checkpointing, fake_tensors_are_computed
from memlab.models.head import head_parts
from memlab.models.score import build_score_meta, score_parts
from memlab.techniques import pad_to_multiple, padding_free, varlen_attention
from memlab.trainers import dpo, gkd, kto, reward
from memlab.trainers.loop import padded_inputs
from memlab.trainers.reference import frozen

BATCHES: dict[str, Any] = {
    "dpo": lambda collate: dpo.collate_pairs(test_trainers_dpo.pairs(), collate),
    "kto": lambda collate: kto.collate_rows(test_trainers_kto.rows(), collate),
    "reward": lambda collate: reward.collate_pairs(test_trainers_reward.pairs(), collate),
    "gkd": lambda collate: collate(test_trainers_gkd.rows()),
}
TRAINERS: dict[str, Any] = {
    "dpo": dpo.train,
    "kto": kto.train,
    "reward": reward.train,
    "gkd": gkd.train,
}


def peaks(name: str, *, flattened: bool) -> dict[str, dict[str, int]]:
    """The most bytes of each category in each phase of the second step."""
    varlen_attention.register()
    attention = varlen_attention.NAME if flattened else None
    build = build_score_meta if name == "reward" else build_meta
    policy, other = (build("memlab/tiny", attn_implementation=attention) for _ in range(2))
    enable_checkpointing(policy.train())
    batch = BATCHES[name]((padding_free if flattened else pad_to_multiple).collate)
    with simulated_gpu() as device, fake_tensors_are_computed(), Meter(device.type) as meter:
        model = materialize(policy, device)
        options: dict[str, Any] = {"head": (score_parts if name == "reward" else head_parts)(model)}
        if name in ("dpo", "kto"):
            options |= {"reference": frozen(materialize(other, device)), "logprobs": chunked}
        elif name == "gkd":
            options |= {"teacher": frozen(materialize(other, device))}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        meter.watch(model, optimizer)
        if name != "reward":
            meter.watch(other)
        losses = TRAINERS[name](
            model,
            optimizer,
            [[batch, batch]] * 2,
            inputs=padding_free.model_inputs if flattened else padded_inputs,
            phase=meter.phase,
            **options,
        )
        for _ in range(2):
            meter.begin_step()
            assert next(losses).shape == ()
        found: dict[str, dict[str, int]] = {}
        for sample in meter.ledger.samples():
            most = found.setdefault(sample.phase, dict.fromkeys(CATEGORIES, 0))
            for category, size in zip(CATEGORIES, sample.bytes, strict=True):
                most[category] = max(most[category], size)
    return found


@pytest.mark.parametrize("name", TRAINERS)
def test_what_is_alive_when(name: str) -> None:
    padded, flattened = (peaks(name, flattened=flattened) for flattened in (False, True))
    for found in (padded, flattened):
        assert {"forward", "backward", "optimizer"} <= found.keys()
        assert ("reference" in found) == (name != "reward")
        if "reference" in found:  # of the policy nothing but the loss of the micro-batch before
            assert found["reference"]["activations"] <= 512 < found["forward"]["activations"]
            weights = found["backward"]["gradients"]  # as many bytes as the policy has parameters
            assert found["reference"]["parameters"] == pytest.approx(2 * weights, rel=0.01)
    if name != "gkd":  # all its rows are of one length
        before, after = (found["backward"]["activations"] for found in (padded, flattened))
        assert after < before
