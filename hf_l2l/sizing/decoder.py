"""A decoder of which only numbers are known."""

from __future__ import annotations

import torch
import transformers
from torch import nn


def decoder_of(params: int, layers: int, hidden: int, vocab: int) -> nn.Module:
    """A decoder with gated layers on the meta device, of so many parameters in all, embedding and head counted.

    Raises:
        ValueError: if embedding, head and attention of these sizes take more.
    """
    if min(params, layers, hidden, vocab) < 1:
        raise ValueError(
            "--params, --layers, --hidden and --vocab must be at least 1 (got "
            f"{params}, {layers}, {hidden}, {vocab}); check the numbers"
        )
    inner = (params - 2 * vocab * hidden - 4 * layers * hidden**2) // (3 * layers * hidden)
    if hidden % 64:
        near = max(64, round(hidden / 64) * 64)
        raise ValueError(f"--hidden must be a multiple of 64, the width of a head (got {hidden}); give {near}")
    if inner < 1:
        least = 2 * vocab * hidden + layers * hidden * (4 * hidden + 3)
        raise ValueError(
            f"--params must be more than embedding, head and attention of these sizes take (got {params}); give at "
            f"least {least:,}, or smaller sizes"
        )
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=inner,
        vocab_size=vocab,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model
