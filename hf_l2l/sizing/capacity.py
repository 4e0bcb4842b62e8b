"""The largest model that a host holds, by the options that say in which dtypes it keeps what.

A larger model is one with more layers like those of the given one: the same modules outside the layers, and layers
that have the average size of its own. What grows with the layers is their masters, gradients, moments and copies, and
their inputs, if the stash is in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.memory import memory_estimate
from hf_l2l.memory.host_remedies import keeps_8_bits
from hf_l2l.memory.ledger import HOST_STASH
from hf_l2l.model.stacks import find_stacks
from hf_l2l.plan.estimate import Largest, host_bytes, stash_rooms
from hf_l2l.plan.run_shapes import RunShapes

_PLAIN: dict[str, Any] = {"cmp": None, "grad_dtype": "fp32", "moment_dtype": "fp32", "host_copies": "kept"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": _PLAIN,
    "cmp": {**_PLAIN, "cmp": "bf16"},
    "cmp, 16-bit gradients": {**_PLAIN, "cmp": "bf16", "grad_dtype": "16bit"},
    "cmp, 16-bit gradients, bf16 moments": {**_PLAIN, "cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "cmp, 16-bit gradients, bf16 moments, copies per sweep": {
        "cmp": "bf16",
        "grad_dtype": "16bit",
        "moment_dtype": "bf16",
        "host_copies": "per_sweep",
    },
    "cmp, 16-bit gradients, 8-bit moments, copies per sweep": {
        "cmp": "bf16",
        "grad_dtype": "16bit",
        "moment_dtype": "8bit",
        "host_copies": "per_sweep",
    },
}
"""What the options are called here -> the options. Each keeps less on the host than the one before it, but for the
first two; with 16-bit gradients or moments, optimizers that are not computed in one pass take room for the update of a
large weight in fp32."""

LORA, RANK = "LoRA, 16-bit base", 16
"""Adapters of this rank on every matrix of the layers, trained with fp32 masters; all else is frozen, in 16 bits."""


class _Growth:
    """A model of any number of layers like those of one that is given."""

    def __init__(self, model: nn.Module, layers: nn.Module, count: int) -> None:
        self.count = count
        self.in_layers = sum(p.numel() for p in layers.parameters())
        self.outside = sum(p.numel() for p in model.parameters()) - self.in_layers

    def within(self, num_bytes: int, *, outside: int, in_layers: int) -> Largest:
        """The largest one of so many bytes, if the given one takes these bytes in its layers, and outside."""
        layers = max(0, (num_bytes - outside) * self.count // max(1, in_layers))
        return Largest(layers, self.outside + layers * self.in_layers // self.count if layers else 0)


def settings_of(optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """Those of `SETTINGS` that an optimizer can have; None is for AdamW."""
    keeps = optimizer is None or keeps_8_bits(optimizer)
    return {name: each for name, each in SETTINGS.items() if keeps or each["moment_dtype"] != "8bit"}


def largest_models(run: RunShapes, config: L2LConfig, host_memory: int) -> dict[str, Largest]:
    """The largest model for each of the settings, and for `LORA`, in so many bytes of host memory.

    Args:
        run: a model and its device batch.
        config: the options; those of the settings take the place of theirs, and nothing is resident.
        host_memory: bytes, in which this process with its libraries fits, too.
    """
    layers = _layers_of(run, config)
    growth = _Growth(run.model, layers, len(layers))
    found, runs = {}, dict[str | None, RunShapes]()
    for name, options in settings_of(run.optimizer).items():
        asked = _asked(config, options)
        if asked.cmp not in runs:  # the sizes of layer inputs depend on it alone
            runs[asked.cmp] = run_with(run, config, options)
        state, stash, others = _parts(runs[asked.cmp], asked)
        of_layers = memory_estimate.estimate(layers, asked, run.optimizer, run.device).host_bytes
        found[name] = growth.within(host_memory, outside=others + state - of_layers, in_layers=of_layers + stash)
    _, stash, others = _parts_of_lora(run, config)
    in_layers = 2 * growth.in_layers + _PER_ADAPTER * _adapter_parameters(layers) + stash
    found[LORA] = growth.within(host_memory, outside=2 * growth.outside + others, in_layers=in_layers)
    return found


def run_with(run: RunShapes, config: L2LConfig, options: dict[str, Any]) -> RunShapes:
    """The same model and batch, the options of a setting in the place of those of `config`; nothing is resident."""
    return RunShapes(
        run.model,
        _asked(config, options),
        run.inputs,
        optimizer=run.optimizer,
        device=run.device,
        device_memory=run.device_memory,
        devices=len(run.turns),
        given=run.given,
    )


def lora_bytes(run: RunShapes, config: L2LConfig) -> int:
    """Bytes of the host at the peak for `LORA`, this process with its libraries among them."""
    _, stash, others = _parts_of_lora(run, config)
    frozen = sum(p.numel() for p in run.model.parameters())
    return 2 * frozen + _PER_ADAPTER * _adapter_parameters(_layers_of(run, config)) + stash + others


def _parts_of_lora(run: RunShapes, config: L2LConfig) -> tuple[int, int, int]:
    """As `_parts`, of which the first is that of training all weights."""
    # Of "cmp": with 16-bit state, the update of a large weight may take room, and here adapters alone are updated.
    its = run_with(run, config, SETTINGS["cmp"])
    return _parts(its, its.config)


def _asked(config: L2LConfig, options: dict[str, Any]) -> L2LConfig:
    return L2LConfig(**{name: getattr(config, name) for name in _OF_BATCH}, **options)


def _layers_of(run: RunShapes, config: L2LConfig) -> nn.ModuleList:
    return nn.ModuleList([layer for stack in find_stacks(run.model, config.layer_classes) for layer in stack.layers])


def _parts(run: RunShapes, config: L2LConfig) -> tuple[int, int, int]:
    """Bytes of the host at the peak: of weights, gradients and optimizer state; of inputs of layers; of all else."""
    state = memory_estimate.estimate(run.model, config, run.optimizer, run.device)
    host = host_bytes(run, config, state)
    stash = stash_rooms(run, config)[0] if host[HOST_STASH]["peak"] else 0
    whole = sum(size["peak"] for size in host.values())
    return state.host_bytes, stash, whole - state.host_bytes - stash


_OF_BATCH = (
    *("ubatch_size", "stash", "spill_dir", "boundary", "device_stash", "kept_weights", "kept_graphs"),
    *("chunked_loss", "head_device", "device", "layer_classes"),
)
"""Options by which it is decided where inputs of layers are."""

_PER_ADAPTER = 4 + 4 + 8 + 2
"""Bytes per parameter of an adapter: master, gradient, the moments of Adam, and the 16-bit copy."""


def _adapter_parameters(layers: nn.Module) -> int:
    matrices = [p for p in layers.parameters() if p.dim() >= 2]
    return sum(RANK * p.shape[:-2].numel() * (p.shape[-2] + p.shape[-1]) for p in matrices)
