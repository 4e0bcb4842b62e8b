"""Models whose layers run on several simulated devices, trained for some steps, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from hf_l2l import attach_l2l, detach_l2l
from models import SMALL, VOCAB, Toy, batch_for
from runs import config_for

LAYERS = 5
_SMALL = {**SMALL, "num_hidden_layers": LAYERS}
_GPT2 = {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB}
_LLAMA = {**_SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32}
_TIED = {**_LLAMA, "attention_dropout": 0.1, "tie_word_embeddings": True}
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "output_router_logits": True}
_T5 = {"d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8, "vocab_size": VOCAB, "decoder_start_token_id": 0}
_DEBERTA = {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
_DEBERTA |= {"position_buckets": 4, "max_relative_positions": 4}
_ALBERT = {**_SMALL, "embedding_size": 8, "hidden_dropout_prob": 0.1}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_SMALL)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TIED)),
    # Two stacks, whose layers add up to an odd number.
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, num_layers=2, num_decoder_layers=3)),
    "deberta": lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**_DEBERTA)),
    # One layer, which is called five times.
    "albert": lambda: hf.AlbertForSequenceClassification(hf.AlbertConfig(**_ALBERT)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_MIXTRAL)),
}


class Trained(NamedTuple):
    """What a training has left."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    moments: list[torch.Tensor]
    drawn: torch.Tensor
    """What the generator of the first device draws next."""

    def differences(self, other: Trained) -> list[str]:
        """What has other bits than in `other`."""
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {"generator": (self.drawn, other.drawn)}
        pairs |= {name: (value, other.weights[name]) for name, value in self.weights.items()}
        for what in ("losses", "norms", "moments"):
            both = zip(getattr(self, what), getattr(other, what), strict=True)
            pairs |= {f"{what} {number}": pair for number, pair in enumerate(both)}
        return [name for name, (one, two) in pairs.items() if not torch.equal(one, two)]


def devices(count: int, kind: str = "sim") -> list[str]:
    """The first so many devices, simulated ones unless another kind is named."""
    return [f"{kind}:{index}" for index in range(count)]


def trained(
    model: nn.Module,
    count: int,
    *,
    steps: int = 3,
    clips: bool = True,
    kind: str = "sim",
    batches: Callable[[nn.Module, int], dict[str, torch.Tensor]] | None = None,
    **options: Any,
) -> Trained:
    """Train `model` on so many devices. Every third batch has other rows; some are masked if the model is no `Toy`."""
    torch.manual_seed(0)
    options = {"ubatch_size": 2, "eps_update": "deferred", **options}
    eps = attach_l2l(model, config_for(model, device=devices(count, kind), **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.train()
    losses, norms = [], []
    for step in range(steps):
        few, masked = 1 if step % 3 == 2 else 0, not isinstance(model, Toy)
        batch = batches(model, step) if batches else batch_for(model, masked=masked, rows=8 - few, seed=step)
        loss = model(**batch).loss
        loss.backward()
        norms.append(eps.clip_grad_norm_(0.5).clone() if clips else torch.zeros(()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    eps.synchronize()
    moments = [t.cpu().clone() for state in optimizer.state.values() for t in state.values()]
    drawn = torch.rand(4, device=f"{kind}:0").cpu()
    detach_l2l(model)
    return Trained(losses, norms, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}, moments, drawn)
