"""`Estimate`: the memory report of a run, before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.memory import memory_estimate
from hf_l2l.memory.device_memory import DEVICE_NAMES, KEPT_WEIGHTS, RESIDENT, SHELL, SLOTS
from hf_l2l.memory.host_limits import process_bytes
from hf_l2l.memory.ledger import (
    COPIES,
    GRADIENTS,
    HOST_NAMES,
    HOST_STASH,
    MASTERS,
    MOMENTS,
    NORMS,
    OTHER,
    STATE_WINDOW,
    TRANSIENTS,
)
from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.memory.memory_report import Bytes, MemoryReport
from hf_l2l.pipeline.schedule import Turn
from hf_l2l.plan.phases import Phases, phases_of_l2l, phases_of_plain
from hf_l2l.plan.plain import PlainBytes
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes
from hf_l2l.shapes.inputs import left_out
from hf_l2l.stash.rooms import rounded_up


@dataclass(frozen=True)
class Largest:
    """The largest model that fits."""

    layers: int
    """0 if not even one fits."""
    parameters: int
    """Of all its layers and what is outside; those of adapters do not count."""


@dataclass(frozen=True)
class Estimate(MemoryEstimate):
    """Bytes that depend on the model alone, and, for a batch of a given size, the memory report before the run.

    `print` shows the report, and so does a notebook.
    """

    report: MemoryReport | None = None
    """Tier -> name -> bytes "now" (between steps) and at the "peak", with the names of `eps.memory_report()`; None
    without the number of rows."""
    rows: int = 0
    """Rows that are on the device at once."""
    phase: str = ""
    """What runs when the device holds most."""
    plain: int = 0
    """Device bytes at the peak of transformers' Trainer, with the whole model on the device."""
    plain_checkpointing: int = 0
    """Those with activation checkpointing."""
    phases: Mapping[str, Phases] = field(default_factory=dict)
    """Of "l2l", "plain" and "plain_checkpointing": phase ("load", "attach", "train", "save", "resume") -> bytes."""
    largest: Mapping[str, Largest] = field(default_factory=dict)
    """For bytes of host memory that were asked about: by setting (see `hf_l2l.sizing.capacity`), the largest model."""
    notes: tuple[str, ...] = ()
    """What is left out, in sentences."""

    @property
    def device_peak(self) -> int:
        """Device bytes at the peak, of the first of several devices; without the number of rows, those that do not
        depend on it."""
        return self.device_bytes if self.report is None else self.report["device"]["total"]["peak"]

    def __str__(self) -> str:
        text = super().__repr__() if self.report is None else str(self.report)
        return "\n".join([text, *self.notes])

    def _repr_html_(self) -> str:
        return f"<pre>{self!r}</pre>" if self.report is None else self.report._repr_html_()


def without_batch(state: MemoryEstimate) -> Estimate:
    """What is known without a batch."""
    return Estimate(**_values(state))


def _values(state: MemoryEstimate) -> dict[str, Any]:
    return {each.name: getattr(state, each.name) for each in fields(MemoryEstimate)}


def _of_device(run: RunShapes, config: L2LConfig, turn: Turn) -> tuple[str, dict[str, Bytes]]:
    """One of the devices, and its bytes by name."""
    found = run.on_device(config, turn.number)
    held, peak = found.held, found.peak()[1]
    sizes = {name: {"now": 0, "peak": peak.get(name, 0)} for name in DEVICE_NAMES}
    between = {RESIDENT: held.resident, SLOTS: held.slots, KEPT_WEIGHTS: held.kept}
    between[SHELL] = held.shell if config.resident != "none" and turn.is_first else 0
    for name, size in between.items():
        sizes[name]["now"] = size
    return "device" if turn.is_first else f"{run.device.type}:{turn.number}", sizes


def report_of(run: RunShapes, config: L2LConfig) -> tuple[MemoryEstimate, MemoryReport, str]:
    """What depends on the model alone, the report before the run, and what runs when the device holds most."""
    state = memory_estimate.estimate(run.model, config, run.optimizer, run.device)
    stash, boundary, ubatch = run.resolved(config)
    phase, peak = run.peak(config)
    count = len(run.turns)
    devices = dict(_of_device(run, config, turn) for turn in run.turns)
    host = host_bytes(run, config, state)
    title = (
        f"Estimated memory of {type(run.model).__name__}: {run.rows} rows in micro-batches of {ubatch}, "
        f"stash {stash}, boundary {boundary}{f', layers on {count} devices in turn' if count > 1 else ''}"
    )
    report = MemoryReport(
        title,
        devices,
        host,
        {"now": 0, "peak": 0},
        f"The device holds most in the {phase}.",
    )
    return state, report, phase


def estimate_of(run: RunShapes, config: L2LConfig) -> Estimate:
    """The report before the run, with these options."""
    state, report, phase = report_of(run, config)
    plain = PlainBytes(
        run.model,
        run.inputs,
        run.moments,
        layer_classes=config.layer_classes,
        fuses=run.fuses,
        autocast=run.autocast,
    )
    peaks = {name: plain.peak(checkpointing=name != "plain") for name in ("plain", "plain_checkpointing")}
    of_plain = {name: phases_of_plain(plain.weights, run.moments, most) for name, most in peaks.items()}
    return Estimate(
        **_values(state),
        plain=peaks["plain"],
        plain_checkpointing=peaks["plain_checkpointing"],
        report=report,
        rows=run.rows,
        phase=phase,
        phases={"l2l": phases_of_l2l(run, config, state, report), **of_plain},
        notes=tuple(_notes(run)),
    )


def _notes(run: RunShapes) -> Iterator[str]:
    missing = left_out(run.model, run.inputs)
    if missing:
        yield (
            f"a {type(run.model).__name__} takes {' and '.join(missing)}, too: this is the memory for batches of text "
            "alone"
        )


def host_bytes(run: RunShapes, config: L2LConfig, state: MemoryEstimate) -> dict[str, dict[str, int]]:
    """Bytes of the host by name, "now" and at the "peak"; `state` is that of the same run and options."""
    stash, _, _ = run.resolved(config)
    stashed, passing = stash_rooms(run, config)
    rooms = 0 if stash != "host" else stashed + passing
    parameters = sum(1 for p in run.model.parameters() if p.requires_grad)
    found = {
        MASTERS: 0 if state.on_disk else state.masters,
        GRADIENTS: state.gradients,
        MOMENTS: 0 if state.on_disk else state.moments,
        STATE_WINDOW: state.state_window,
        COPIES: state.copies,
        HOST_STASH: rooms,
        NORMS: 8 * parameters,
        TRANSIENTS: state.widened,
        OTHER: max(0, process_bytes()[0] - _present(run.model)),
    }
    lasts = {TRANSIENTS: 0}
    return {name: {"now": lasts.get(name, found.get(name, 0)), "peak": found.get(name, 0)} for name in HOST_NAMES}


def stash_rooms(run: RunShapes, config: L2LConfig) -> tuple[int, int]:
    """Bytes of rooms in host memory: for inputs of layers, which grow with their number, and for what passes between
    them."""
    _, boundary, _ = run.resolved(config)
    traced, places = run.traced(run.rows), run.places(config)
    uses = Counter[int]()
    own, most = 0, 0
    shared: dict[int, tuple[int, bool]] = {}
    calls = [call for call in traced.calls if call.in_graph and not places[call.number].keeps_input]
    for call in calls:
        uses.update({a.memory for a in call.arguments})
    for argument in {a.memory: a for call in calls for a in call.arguments}.values():
        if argument.shape[:1] != (run.rows,):
            continue
        if uses[argument.memory] == 1:
            # With what passes in rooms of the same kind, all of them become rooms that were rounded up.
            own += rounded_up(argument.num_bytes) if boundary == "host" else argument.num_bytes
            most = max(most, argument.num_bytes)
        else:
            shared[argument.memory] = argument.num_bytes, argument.needs_gradient
    # What layers share is stashed at its first use, when that is not known yet.
    if boundary != "host":
        return own, sum(size for size, _ in shared.values())
    last = traced.pieces[-1]
    # What the final norm returns is there, too, if a head reads it in chunks, or a part of it is read; and so are rows
    # of a table that code of the model still has.
    normed = run.has_chunked_head or (not run.has_head and last.forward_peak >= most)
    besides = traced.besides[1] if traced.besides[0][:1] == (run.rows,) else 0
    # Of what passes to several layers, the sum of its gradients is there, too, and the gradient that is added to it.
    several = sum((3 if needs else 1) * max(size, most) for size, needs in shared.values())
    return own, (3 if normed else 2) * rounded_up(most) + besides + several


def _present(model: nn.Module) -> int:
    """Bytes of the model in the memory of this process, as far as it is on the host."""
    return tensor_bytes([t for t in (*model.parameters(), *model.buffers()) if t.device == stream.HOST])
