"""Models whose layers run on several simulated devices, trained for some steps, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import SMALL, VOCAB, batch_for

LAYERS = 5
_SMALL = {**SMALL, "num_hidden_layers": LAYERS}
DROPOUT = 0.1


def _bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**_SMALL))


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=LAYERS, n_head=2, n_positions=32, vocab_size=VOCAB))


def _llama() -> nn.Module:
    config = hf.LlamaConfig(
        **_SMALL,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attention_dropout=DROPOUT,
        tie_word_embeddings=True,
    )
    return hf.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    """Two stacks, whose layers add up to an odd number."""
    config = hf.T5Config(
        d_model=16, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=2, d_kv=8, vocab_size=VOCAB,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4, max_relative_positions=4,
        share_att_key=True,
    )  # fmt: skip
    return hf.DebertaV2ForSequenceClassification(config)


def _albert() -> nn.Module:
    """One layer, which is called five times."""
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**_SMALL, embedding_size=8, hidden_dropout_prob=DROPOUT))


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **_SMALL, num_key_value_heads=1, num_local_experts=4, max_position_embeddings=32, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "deberta": _deberta,
    "albert": _albert,
    "mixtral": _mixtral,
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
        pairs = {
            **{f"loss {i}": pair for i, pair in enumerate(zip(self.losses, other.losses, strict=True))},
            **{f"norm {i}": pair for i, pair in enumerate(zip(self.norms, other.norms, strict=True))},
            **{name: (value, other.weights[name]) for name, value in self.weights.items()},
            **{f"moment {i}": pair for i, pair in enumerate(zip(self.moments, other.moments, strict=True))},
            "generator": (self.drawn, other.drawn),
        }
        return [name for name, (one, two) in pairs.items() if not torch.equal(one, two)]


def devices(count: int, kind: str = "sim") -> list[str]:
    """The first so many devices, simulated ones unless another kind is named."""
    return [f"{kind}:{index}" for index in range(count)]


def trained(
    model: nn.Module,
    count: int,
    *,
    steps: int = 3,
    rows: int = 8,
    clips: bool = True,
    kind: str = "sim",
    batches: Callable[[nn.Module, int], dict[str, torch.Tensor]] | None = None,
    **options: Any,
) -> Trained:
    """Train `model` on so many devices. Batches have masked rows, and every third one has other rows."""
    torch.manual_seed(0)
    options = {"ubatch_size": 2, "eps_update": "deferred", **options}
    eps = attach_l2l(model, L2LConfig(device=devices(count, kind), **options))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.train()
    losses, norms = [], []
    for step in range(steps):
        few = 1 if step % 3 == 2 else 0
        batch = batches(model, step) if batches else batch_for(model, rows=rows - few, seed=step)
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
