"""What host and device hold at most in the phases of a training: loading, attaching, steps, saving, resuming.

Of the host these are bytes that only the end of their use frees. A model that is loaded from safetensors is mapped:
its pages come on top until the weights have other memory, and the system takes them back where memory is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hf_l2l.config import L2LConfig
from hf_l2l.memory import memory_estimate
from hf_l2l.memory.ledger import OTHER
from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.memory.memory_report import TOTAL, MemoryReport
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes


class PhaseBytes(NamedTuple):
    """The most bytes at once in one phase."""

    host: int
    """Host memory, without Python and libraries."""
    files: int
    """Pages of the checkpoint's weights that are mapped besides; the system can take them back."""
    device: int


Phases = Mapping[str, PhaseBytes]
"""By the names "load", "attach", "train", "save" and "resume"."""


def phases_of_l2l(run: RunShapes, config: L2LConfig, state: MemoryEstimate, report: MemoryReport) -> Phases:
    """Of training layer to layer; `state` and `report` are those of this run and these options."""
    # What is resident leaves the host when the model is attached, and comes back to be saved.
    streamed = replace(config, resident="none", resident_layers=0, resident_update="device")
    everything = memory_estimate.estimate(run.model, streamed, run.optimizer, run.device)
    resident = everything.masters - state.masters
    moments = everything.moments
    mapped = tensor_bytes(run.model.parameters())
    # What travels as it is gets page-locked memory at once; of what is rounded, that has the copies.
    moved = state.state_window or state.masters
    if run.precision.is_mixed or stream.shares_host_memory(run.device):
        moved = state.state_window
    at_resume = state.state_window or state.masters + moments
    held, most = (sum(size[when] for n, size in report["host"].items() if n not in _APART) for when in ("now", "peak"))
    on_device = report["device"][TOTAL]
    return {
        "load": PhaseBytes(0, mapped, 0),
        "attach": PhaseBytes(moved + state.copies, mapped, resident),
        "train": PhaseBytes(most, mapped if run.precision.is_mixed else 0, on_device["peak"]),
        "save": PhaseBytes(held + resident, 0, on_device["now"]),
        "resume": PhaseBytes(at_resume + state.copies, mapped, resident + moments - state.moments),
    }


_APART = (OTHER, TOTAL)


def phases_of_plain(weights: int, moments: int, peak: int) -> Phases:
    """Of transformers' Trainer on a device, with so many bytes of `weights`, of the optimizer's state, and at the
    `peak` of a step."""
    return {
        "load": PhaseBytes(0, weights, 0),
        "attach": PhaseBytes(0, weights, weights),
        "train": PhaseBytes(0, 0, peak),
        # The weights are copied to the host before they are written; the optimizer's state is, tensor by tensor.
        "save": PhaseBytes(weights, 0, weights + moments),
        "resume": PhaseBytes(moments, weights, weights + moments),
    }
