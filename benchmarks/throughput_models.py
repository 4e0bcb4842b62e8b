"""The models of `throughput.py`, made from a configuration with random weights, and random tokens for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn


def sizes(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """What the configurations of both models call alike."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, inner), strict=True))


LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False}
MODELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bert-large": (transformers.BertForSequenceClassification, sizes(1024, 24, 16, 4096), 512),
    "llama-1b": (transformers.LlamaForCausalLM, {**sizes(2048, 16, 32, 8192), **LLAMA}, 1024),
}
"""Name -> class, what its configuration sets (of BERT-large, of Llama-3.2-1B), and tokens of a row."""

TINY = {**sizes(32, 2, 4, 64), "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100}


def made(name: str, tiny: bool, **changes: Any) -> nn.Module:
    """The model, with random weights; `changes` are of its configuration, where that has such a value."""
    torch.manual_seed(0)
    kind, sizes, _ = MODELS[name]
    config = kind.config_class(**sizes)
    changes = {**TINY, **changes} if tiny else changes
    for key in changes.keys() & config.to_dict().keys():
        setattr(config, key, changes[key])
    model: nn.Module = kind(config)
    return model


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of random tokens, all of one length: labelled with themselves for a decoder, else with a class."""

    def __init__(self, model: Any, rows: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, model.config.vocab_size, (rows, tokens), generator=generator)
        self.is_decoder = isinstance(model, transformers.LlamaForCausalLM)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids if self.is_decoder else int(ids[0]) % 2}
