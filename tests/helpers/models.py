"""Tiny models of eight families with random weights, their batches, and the comparison of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.utils import ModelOutput

from devices import DEVICE
from hf_l2l import L2LConfig, attach_l2l

ROWS, TOKENS, VOCAB = 8, 6, 60
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
}


WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(dropout: float = 0.0, **more: Any) -> nn.Module:
    config = hf.BertConfig(**{**SMALL, **more}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return hf.BertForSequenceClassification(config)


def roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**SMALL, **WITHOUT_DROPOUT, pad_token_id=1))


def electra() -> nn.Module:
    return hf.ElectraForSequenceClassification(hf.ElectraConfig(**SMALL, **WITHOUT_DROPOUT, embedding_size=8))


def albert(layers: int = 2) -> nn.Module:
    """One layer that is called so often."""
    sizes = {**SMALL, "num_hidden_layers": layers, "embedding_size": 8}
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**sizes))


def deberta_v2() -> nn.Module:
    """The relative embeddings have 2 x 4 rows: as many as the batch."""
    config = hf.DebertaV2Config(
        **SMALL,
        **WITHOUT_DROPOUT,
        pooler_dropout=0.0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=ROWS // 2,
        max_relative_positions=ROWS // 2,
        share_att_key=True,
        conv_kernel_size=3,
        conv_act="gelu",
    )
    return hf.DebertaV2ForSequenceClassification(config)


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama(**more: Any) -> nn.Module:
    sizes = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 32, **more}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))


def t5(dropout: float = 0.0) -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": VOCAB}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0))


def vit() -> nn.Module:
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    config = hf.ViTConfig(**sizes, **WITHOUT_DROPOUT, image_size=8, patch_size=4, num_labels=2)
    return hf.ViTForImageClassification(config)


class Block(nn.Module):
    """A layer of `Toy`."""

    def __init__(self, width: int, dropout: float, *, buffers: bool) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if buffers:
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and hasattr(self, "seen"):
            self.seen += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 0.25)
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """A stack of few operations between an embedding and a head, with the same weights whenever one is made.

    Args:
        layers, width: how many blocks, and the features of each row that passes through them.
        tied: whether the head has the weight of the embedding.
        dropout: of each block.
        buffers: whether a block writes into buffers of its own whenever it trains.
        calls: how often each block is called in a forward, one pass over all blocks after the other, as in ALBERT.
    """

    def __init__(
        self,
        layers: int = 3,
        width: int = 8,
        *,
        tied: bool = True,
        dropout: float = 0.1,
        buffers: bool = False,
        calls: int = 1,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
            self.blocks = nn.ModuleList(Block(width, dropout, buffers=buffers) for _ in range(layers))
        if tied:
            self.head.weight = self.embed.weight
        self.calls = calls

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x)
        logits = self.head(x)
        return ModelOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (bert, roberta, electra, deberta_v2, gpt2, llama, t5, vit)
}


def batch_for(model: nn.Module, *, masked: bool = True, rows: int = ROWS, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch the model trains on; `masked` makes its rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    labels = torch.randint(0, 2, (rows,), generator=generator)
    if "ViT" in type(model).__name__:
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=dtype), "labels": labels}
    ids = torch.randint(5, VOCAB, (rows, TOKENS), generator=generator)
    batch = {"input_ids": ids, "labels": labels if "Sequence" in type(model).__name__ else ids.clone()}
    if masked:
        lengths = 2 + torch.arange(rows) % (TOKENS - 1)
        batch["attention_mask"] = (torch.arange(TOKENS) < lengths[:, None]).long()
        if batch["labels"].dim() == 2:
            batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


Gradients = dict[str, torch.Tensor | None]


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def train_once(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One forward and backward; returns the loss on the host."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach().cpu()


def reference(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of a plain copy of `model` on the CPU."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = train_once(plain, batch)
    return loss, gradients(plain)


def attached(model: nn.Module, **options: Any) -> nn.Module:
    attach_l2l(model, L2LConfig(**options))
    return model


def relative_error(found: Gradients, expected: Gradients) -> float:
    """The largest difference of any entry, relative to the largest entry of all gradients."""
    assert found.keys() == expected.keys()
    missing = [n for n in expected if (found[n] is None) != (expected[n] is None)]
    assert not missing, f"gradients on one side only: {missing}"
    pairs = [(found[n], expected[n]) for n in expected if expected[n] is not None]
    assert pairs
    scale = max(e.abs().max().item() for _, e in pairs if e is not None)
    return max((f - e).abs().max().item() for f, e in pairs if f is not None and e is not None) / scale


def assert_same_bits(found: Gradients, expected: Gradients) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert (other is None) == (gradient is None), name
        assert gradient is None or (other is not None and torch.equal(other, gradient)), name


def assert_bits_of_plain(found: Gradients, expected: Gradients) -> None:
    """The same bits as plain torch has on the host; on CUDA, which adds in another order, close values."""
    if DEVICE == "cuda":
        assert relative_error(found, expected) <= 1e-5
    else:
        assert_same_bits(found, expected)


def has_bits_of_plain(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """As `assert_bits_of_plain`, for one tensor."""
    found = found.cpu()
    return torch.allclose(found, expected, 1e-5, 1e-6) if DEVICE == "cuda" else torch.equal(found, expected)


EXACT = 1e-6 if DEVICE == "cuda" else 1e-12
"""By which float64 may differ from the plain model on the host: some families compute a part of it in float32."""
TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-5 if DEVICE == "cuda" else 1e-6}
