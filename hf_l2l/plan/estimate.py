"""`Estimate`: the memory report of a run, before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.memory import memory_estimate
from hf_l2l.memory.device_memory import DEVICE_NAMES, SHELL, SLOTS
from hf_l2l.memory.host_limits import process_bytes
from hf_l2l.memory.ledger import COPIES, GRADIENTS, HOST_NAMES, HOST_STASH, MASTERS, MOMENTS, NORMS, OTHER, TRANSIENTS
from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.memory.memory_report import MemoryReport
from hf_l2l.model.precision import Precision, computing_dtype
from hf_l2l.model.stacks import find_stacks
from hf_l2l.plan.device_bytes import DeviceBytes, Weights
from hf_l2l.plan.inputs import example_inputs
from hf_l2l.plan.plain import PlainBytes
from hf_l2l.plan.traced import Traced, Tracer
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes
from hf_l2l.stash.boundary import fewest_bytes_on_host
from hf_l2l.stash.tiers import SHARE

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "auto": torch.bfloat16}


@dataclass(frozen=True)
class Estimate(MemoryEstimate):
    """Bytes that depend on the model alone, and, for a batch of a given size, the memory report before the run.

    `print` shows the report, and so does a notebook.
    """

    report: MemoryReport | None = None
    """Tier -> name -> bytes "now" (between steps) and at the "peak", with the names of `eps.memory_report()`; None
    without the number of rows."""
    phase: str = ""
    """What runs when the device holds most."""
    plain: int = 0
    """Device bytes at the peak of transformers' Trainer, with the whole model on the device."""
    plain_checkpointing: int = 0
    """Those with activation checkpointing."""

    @property
    def device_peak(self) -> int:
        """Device bytes at the peak; without the number of rows, those that do not depend on it."""
        return self.device_bytes if self.report is None else self.report["device"]["total"]["peak"]

    def __str__(self) -> str:
        return super().__repr__() if self.report is None else str(self.report)

    def _repr_html_(self) -> str:
        return f"<pre>{self!r}</pre>" if self.report is None else self.report._repr_html_()


def estimate(
    model: nn.Module,
    config: L2LConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    device_memory: int | None = None,
) -> Estimate:
    """Estimate the memory for training `model` layer to layer, from shapes alone; nothing is allocated.

    Args:
        model: the model; it may be on the meta device.
        config: the options; None for the defaults.
        optimizer: the optimizer that will update the model, or Accelerate's wrapper of it; it is not changed. None
            assumes two moments per trainable parameter.
        rows: rows of the device batch. Without rows and inputs, bytes that depend on the batch are left out.
        tokens: tokens per row, of models of texts (see `example_inputs`).
        inputs: the arguments of one call of the model, labels included, instead of rows and tokens; on any device.
        device_memory: bytes of the device in all, by which "auto" of `stash` and `boundary` decides; None takes those
            of the execution device.

    Raises:
        ValueError: if no inputs can be made for the model, or it has no stack of layers.
    """
    config = config or L2LConfig()
    state = memory_estimate.estimate(model, config, optimizer)
    if inputs is None:
        if rows is None:
            return Estimate(**_values(state))
        inputs = example_inputs(model, rows, tokens)
    run = RunShapes(model, config, inputs, device_memory=device_memory)
    return run.estimate(state)


def _values(state: MemoryEstimate) -> dict[str, Any]:
    return {each.name: getattr(state, each.name) for each in fields(MemoryEstimate)}


def computes_in(config: L2LConfig, device: torch.device | None) -> torch.dtype | None:
    """The 16-bit dtype in which layers will compute; None if they compute in the dtype of their masters. Without a
    device, "auto" is taken for bfloat16."""
    if config.cmp is None:
        return None
    return _SHORT[config.cmp] if device is None else computing_dtype(config.cmp, device)


class RunShapes:
    """What is traced of one model and batch, for any number of rows per micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        config: L2LConfig,
        inputs: Mapping[str, torch.Tensor],
        *,
        device_memory: int | None = None,
    ) -> None:
        """`inputs` are those of the whole device batch; `device_memory` is as for `estimate`."""
        device = stream.execution_device(config.device)
        self.device = None if stream.shares_host_memory(device) else device
        self.model, self.inputs = model, dict(inputs)
        self.precision = Precision(model, computes_in(config, self.device), gradients=config.grad_dtype)
        self.rows = max(t.shape[0] for t in inputs.values() if t.dim())
        self.device_memory = device_memory or (None if self.device is None else stream.memory_of(self.device))
        composes = self.device is not None and self.device.type not in _FUSING
        self._tracer = Tracer(
            model,
            self.precision,
            layer_classes=config.layer_classes,
            chunked_loss=config.chunked_loss != "off",
            fuses=_without_dropout if composes else _always,
        )
        self.config = config
        self._traced: dict[tuple[int, bool], Traced] = {}

    def traced(self, rows: int, *, by_rows: bool = False) -> Traced:
        """The trace of so many rows (see `Tracer`)."""
        key = rows, by_rows
        if key not in self._traced:
            part = {
                name: torch.empty((t.shape[0] * rows // self.rows, *t.shape[1:]), dtype=t.dtype, device="meta")
                if t.dim() and t.shape[0] % self.rows == 0
                else t
                for name, t in self.inputs.items()
            }
            self._traced[key] = self._tracer.trace(part, by_rows=by_rows)
        return self._traced[key]

    def resolved(self, config: L2LConfig) -> tuple[str, str, int]:
        """Where the stash is, and the boundary, and the rows of a micro-batch: without "auto" and None."""
        ubatch = min(config.ubatch_size or self.rows, self.rows)
        whole = self.traced(self.rows)
        own = max((a.num_bytes for a in whole.calls[0].arguments if a.needs_gradient), default=0)
        stash: str = config.stash
        if stash == "auto":
            fits = self.device_memory is not None and own * len(whole.calls) * SHARE <= self.device_memory
            stash = "device" if fits and config.boundary != "host" else "host"
        boundary: str = config.boundary
        if stash == "device":
            boundary = "device"
        elif boundary == "auto":
            fewest = fewest_bytes_on_host(self.device_memory)
            boundary = "host" if fewest is not None and own >= fewest else "device"
        return stash, boundary, ubatch

    def on_device(self, config: L2LConfig) -> DeviceBytes:
        """The device memory of a step."""
        stash, boundary, ubatch = self.resolved(config)
        whole = self.traced(self.rows)
        by_rows = boundary == "host"
        part = self.traced(ubatch, by_rows=by_rows) if ubatch < self.rows else None
        weights = Weights.of(self.model, config, self.precision)
        all_logits = self._tracer.makes_all_logits
        return DeviceBytes(weights, whole, part, stash=stash, boundary=boundary, makes_all_logits=all_logits)

    def estimate(self, state: MemoryEstimate, config: L2LConfig | None = None) -> Estimate:
        """The report before the run, for other options of `config` if given; `state` is what they make of it."""
        config = config or self.config
        stash, boundary, ubatch = self.resolved(config)
        phase, peak = self.on_device(config).peak()
        if config.resident == "shell":
            # Gradients and optimizer state are there, too.
            peak[SHELL] = state.shell
        device = {name: {"now": 0, "peak": peak.get(name, 0)} for name in DEVICE_NAMES}
        device[SLOTS]["now"] = peak.get(SLOTS, 0)
        host = self._host(config, state, stash, boundary)
        title = (
            f"Estimated memory of {type(self.model).__name__}: {self.rows} rows in micro-batches of {ubatch}, "
            f"stash {stash}, boundary {boundary}"
        )
        report = MemoryReport(title, device, host, {"now": 0, "peak": 0}, f"The device holds most in the {phase}.")
        moments = state.moments * (2 if config.moment_dtype == "bf16" else 1)
        plain = PlainBytes(self.model, self.inputs, moments)
        return Estimate(
            **_values(state),
            report=report,
            phase=phase,
            plain=plain.peak(checkpointing=False),
            plain_checkpointing=plain.peak(checkpointing=True),
        )

    def _host(self, config: L2LConfig, state: MemoryEstimate, stash: str, boundary: str) -> dict[str, dict[str, int]]:
        calls = self.traced(self.rows).calls
        own = [max((a.num_bytes for a in call.arguments if a.needs_gradient), default=0) for call in calls]
        rooms = 0 if stash != "host" else sum(own) + (2 * max(own) if boundary == "host" else 0)
        parameters = sum(1 for p in self.model.parameters() if p.requires_grad)
        transients = 0
        if config.moment_dtype == "bf16" or config.grad_dtype == "16bit":
            # Two updates run at once, each of a layer, or of a large weight outside the layers.
            transients = 12 * 2 * largest_update(self.model, config)
        found = {
            MASTERS: state.masters,
            GRADIENTS: state.gradients,
            MOMENTS: state.moments,
            COPIES: state.copies,
            HOST_STASH: rooms,
            NORMS: 8 * parameters,
            TRANSIENTS: transients,
            OTHER: max(0, process_bytes()[0] - _present(self.model)),
        }
        lasts = {TRANSIENTS: 0}
        return {name: {"now": lasts.get(name, found.get(name, 0)), "peak": found.get(name, 0)} for name in HOST_NAMES}


def largest_update(model: nn.Module, config: L2LConfig) -> int:
    """The number of parameters that are updated at once, at most: of a layer, or of a large weight in no layer."""
    layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
    of_layers = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    inside = {p for layer in layers for p in layer.parameters()}
    return max(
        [*of_layers, *(p.numel() for p in model.parameters() if p not in inside and p.requires_grad)], default=0
    )


_FUSING = ("cuda", "xpu", "hpu", "npu", "mps")
"""Devices whose attention is one kernel with dropout, too."""


def _always(*_: Any) -> bool:
    return True


def _without_dropout(query: Any, key: Any, value: Any, mask: Any, dropout: float) -> bool:
    return dropout == 0


def _present(model: nn.Module) -> int:
    """Bytes of the model in the memory of this process, as far as it is on the host."""
    return tensor_bytes([t for t in (*model.parameters(), *model.buffers()) if t.device == stream.HOST])
