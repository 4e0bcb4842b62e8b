"""The models of `throughput.py`, with random weights, random tokens for them, and the operations that a step takes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn


def sizes(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """What the configurations of all models call alike."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, inner), strict=True))


LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False}
MODELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bert-large": (transformers.BertForSequenceClassification, sizes(1024, 24, 16, 4096), 512),
    "llama-1b": (transformers.LlamaForCausalLM, {**sizes(2048, 16, 32, 8192), **LLAMA}, 1024),
    "llama-3b": (transformers.LlamaForCausalLM, {**sizes(3072, 28, 24, 8192), **LLAMA}, 1024),
    "llama-8b": (
        transformers.LlamaForCausalLM,
        {**sizes(4096, 32, 32, 14336), **LLAMA, "tie_word_embeddings": False},
        1024,
    ),
}
"""Name -> class, what its configuration sets (of BERT-large, Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B), and tokens
of a row."""

TINY = {**sizes(32, 2, 4, 64), "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100}

PEAKS = (
    ("H200", 989.4e12),
    ("H100 PCIe", 756.5e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165.2e12),
)
"""A part of a device's name -> its peak FLOP/s for bf16 matrices without sparsity, by NVIDIA's data sheets. The first
that fits counts."""

UBATCH_TOKENS = 8192
"""Of a micro-batch, where the option does not say how many rows it has."""
PATTERN = 1_000_003
"""Random numbers that large weights repeat; a prime, so that no two rows of a matrix are equal."""


def row_of(name: str, options: Namespace) -> int:
    """Tokens of a row."""
    return 16 if options.tiny else MODELS[name][2]


def ubatch_of(name: str, options: Namespace) -> int:
    """Rows of a micro-batch."""
    if options.ubatch_size is not None:
        return int(options.ubatch_size)
    return 2 if options.tiny else UBATCH_TOKENS // row_of(name, options)


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


def on_meta(name: str, tiny: bool) -> nn.Module:
    """The model without memory, for what follows from shapes."""
    with torch.device("meta"):
        return made(name, tiny)


def quickly_made(name: str, tiny: bool, **changes: Any) -> Any:
    """The model with weights that are about random: to draw 8 billion numbers would take longer than to train."""
    with init_empty_weights(include_buffers=False):
        model: Any = made(name, tiny, **changes)
    model.tie_weights()
    pattern = 0.02 * torch.randn(PATTERN, generator=torch.Generator().manual_seed(0))
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and p not in filled:
                filled[p] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
                fill(filled[p], key, pattern)
            if p is not None:
                module._parameters[key] = filled[p]
    return model


@torch.no_grad()
def fill(parameter: torch.Tensor, key: str, pattern: torch.Tensor) -> None:
    """Ones for the weights of norms, zeros for biases, and `pattern` again and again for matrices."""
    if parameter.dim() < 2:
        parameter.fill_(0.0 if key == "bias" else 1.0)
        return
    for part in parameter.view(-1).split(len(pattern)):
        part.copy_(pattern[: len(part)])


def flop_per_step(model: Any, tokens: int, row: int) -> float:
    """Floating-point operations of forward and backward that a step of `tokens` needs in rows of `row` tokens.

    Three times those of the forward: two per token and weight of a matrix, and for scores and values of attention, of
    which a decoder needs half. What is recomputed is not needed, and not counted.
    """
    config = model.config
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    attention = 4 * config.num_hidden_layers * width * row * (0.5 if is_decoder(model) else 1.0)
    return 3.0 * tokens * (2 * sum(w.numel() for w in weights) + attention)


def peak_flop_per_s(device_name: str) -> float | None:
    """By the name of the device; None for one that is not in `PEAKS`."""
    return next((peak for part, peak in PEAKS if part in device_name), None)


def is_decoder(model: nn.Module) -> bool:
    """Whether its rows are labelled with themselves."""
    return isinstance(model, transformers.LlamaForCausalLM)


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of random tokens, all of one length: labelled with themselves for a decoder, else with a class."""

    def __init__(self, model: Any, rows: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, model.config.vocab_size, (rows, tokens), generator=generator)
        self.is_decoder = is_decoder(model)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids if self.is_decoder else int(ids[0]) % 2}
