"""One measured case of `memory.py`: the device bytes of a training step, of the first one and of later ones."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l, estimate
from hf_l2l.logits.chunks import rows_per_chunk

WAYS = ("plain", "checkpointing", "l2l")
"""All on the device; the same with activation checkpointing; layer to layer."""


@dataclass(frozen=True)
class Case:
    """A decoder with random weights, and the batch of its steps.

    Args:
        way: one of `WAYS`.
        layers, hidden, vocab: of the model; heads have 32 entries, the MLP is four times as wide as the model.
        rows, tokens: rows of the device batch, and tokens of a row.
        ubatch: rows of a micro-batch; only L2L has them.
        options: of `L2LConfig`, in the place of those of `measured`.
    """

    way: str
    layers: int
    hidden: int
    vocab: int
    rows: int
    tokens: int
    ubatch: int
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)


def decoder(case: Case) -> nn.Module:
    """A Llama: embedding and head of their own, causal fused attention."""
    torch.manual_seed(0)
    heads = max(case.hidden // 32, 1)
    config = transformers.LlamaConfig(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * case.hidden,
        vocab_size=case.vocab,
        max_position_embeddings=case.tokens,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).train()


def settled_bytes() -> int:
    """What the device holds once all that is gone is collected, and the device's threads have let go of it: when two
    looks in a row find the same."""
    found = [-1, -2]
    while len(found) < 4 or found[-1] != found[-2]:
        gc.collect()
        time.sleep(0.01)
        found.append(int(torch.accelerator.memory_allocated()))
    return found[-1]


def checkpointed(model: nn.Module) -> nn.Module:
    """With activation checkpointing; transformers 5.23 renamed the method."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    return model


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Peak bytes of each step: forward, backward, clipping, and the update by AdamW.

    L2L has its stash and what passes between layers on the host. `shell` and `slots` are what `estimate` says of
    weights and their gradients on the device.
    """
    before = settled_bytes()
    model = decoder(case)
    ids = torch.randint(5, case.vocab, (case.rows, case.tokens))
    batch = {"input_ids": ids, "labels": ids}
    found: dict[str, Any] = {**asdict(case), "parameters": sum(p.numel() for p in model.parameters())}
    if case.way != "l2l":
        model.to(device)
        ids = ids.to(device)
        batch = {"input_ids": ids, "labels": ids}
        if case.way == "checkpointing":
            checkpointed(model)
        # As the Trainer's default on an accelerator.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        found["peaks"] = [step_peak(model, optimizer, batch, before) for _ in range(case.steps)]
        return found
    rows = rows_per_chunk(case.hidden, case.vocab, None)  # the same on any device
    where = {"stash": "host", "boundary": "host", "eps_update": "deferred", "chunked_loss": rows, **case.options}
    config = L2LConfig(device=device, ubatch_size=case.ubatch, **where)
    need = estimate(model, config)
    eps = attach_l2l(model, config)
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
    found["peaks"] = [step_peak(model, optimizer, batch, before, eps) for _ in range(case.steps)]
    detach_l2l(model)
    return {**found, "shell": need.shell, "slots": need.slots}


def step_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: dict[str, Any], before: int, eps: Any = None
) -> int:
    """Peak bytes of one step over what the device held `before` the model; without `optimizer`, the gradients are
    dropped."""
    settled_bytes()
    torch.accelerator.reset_peak_memory_stats()
    model(**batch).loss.backward()
    if eps is None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        eps.clip_grad_norm_(1.0)
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    if eps is not None:
        eps.synchronize()  # the update under the next forward would be part of the next step
    return int(torch.accelerator.max_memory_allocated()) - before


def layer_bytes_per_token(case: Case, device: torch.device) -> float:
    """Bytes that one more token of a row costs one layer by itself, forwards and backwards, without L2L: its input,
    what autograd saves, the gradients of both ends."""

    def peak(tokens: int) -> int:
        before = settled_bytes()
        model = decoder(Case("plain", 1, case.hidden, 10, 1, tokens, 1)).model
        layer, rotary = model.layers[0].to(device), model.rotary_emb.to(device)
        x, gradient = (torch.randn(1, tokens, case.hidden, device=device) for _ in range(2))
        angles = rotary(x, torch.arange(tokens, device=device)[None])
        torch.accelerator.reset_peak_memory_stats()
        layer(x.requires_grad_(), position_embeddings=angles, attention_mask=None).backward(gradient)
        return int(torch.accelerator.max_memory_allocated()) - before

    return (peak(1024) - peak(512)) / 512
