"""What the trainers' tests share: a tiny model, rows of unequal lengths, and a look at one step."""

import contextlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.models.build import build_meta, materialize
from memlab.techniques import varlen_attention
from memlab.techniques.chunked_logprobs import token_logprobs

VOCABULARY = 60  # ids that the rows use; the model knows more


def tiny(name: str = "memlab/tiny", *, seed: int = 3, flattened: bool = False) -> nn.Module:
    if flattened:
        varlen_attention.register()
    attention = varlen_attention.NAME if flattened else None
    meta = build_meta(name, dtype=torch.float32, attn_implementation=attention)
    return materialize(meta, "cpu", init=True, seed=seed).train()


def with_lora(model: nn.Module) -> nn.Module:
    """The model behind a peft adapter whose product is not zero, as after some training."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return adapted


def ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(1, VOCABULARY, rng.integers(low, high)).tolist()


def full(h: Tensor, w: Tensor, y: Tensor, *, bias, logit_scale, softcap) -> Tensor:
    """Log-probabilities of tokens from all the logits at once."""
    z = logit_scale * F.linear(h, w, bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return -F.cross_entropy(z, y, reduction="none")


def chunked(h: Tensor, w: Tensor, y: Tensor, **head) -> Tensor:
    return token_logprobs(h, w, y, chunk=7, **head)


def completion_logp(model: nn.Module, row: dict, prefix: str = "") -> Tensor:
    """Slowly and directly, a row at a time: transformers' logits, the completion's tokens."""
    tokens, mask = row[f"{prefix}input_ids"], row[f"{prefix}completion_mask"]
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    logps = logits.log_softmax(-1)
    return sum(logps[t - 1, tokens[t]] for t in range(1, len(tokens)) if mask[t])


class Phases(list):
    """A `phase` for a trainer: the names in the order in which they came."""

    @contextlib.contextmanager
    def __call__(self, name: str):
        self.append(name)
        yield


def split(rows: list, size: int) -> list[list]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def losses_and_norms(train, model: nn.Module, step, lr: float = 0.0, **options) -> list[float]:
    """Of each optimizer step of one step: the loss; then the norms of all gradients before each."""
    norms = []
    trained = [p for p in model.parameters() if p.requires_grad]

    def note_norm(*_: object) -> None:
        gradients = [p.grad.double() for p in trained if p.grad is not None]
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))

    optimizer = torch.optim.SGD(trained, lr=lr)
    optimizer.register_step_pre_hook(note_norm)
    losses = [loss.item() for loss in train(model, optimizer, [step], **options)]
    return [*losses, *norms]


def one_step(train, model: nn.Module, step: list, **options) -> tuple[float, float]:
    """Loss and gradient norm of one step, before an optimizer changes anything."""
    loss, norm = losses_and_norms(train, model, step, **options)
    return loss, norm
