"""Bytes of the weights of one model: as they travel, in slots, and with their state on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_l2l.eps.gradients import ROUNDED_AT_ONCE
from hf_l2l.model.precision import Precision
from hf_l2l.model.residency import LayerPlace
from hf_l2l.model.stacks import shell_modules
from hf_l2l.model.units import LARGE
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import on_meta
from hf_l2l.shapes.pieces import Arrived


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer."""

    travels: int
    """What is uploaded."""
    sums: int
    """Sums of gradients (fp32) on the device."""
    state: int
    """Masters and optimizer state, which a resident layer has on the device."""
    gradients: int
    """Gradients in the dtypes of the masters."""
    sent_gradients: int
    """Gradients in the dtypes that the device computes in."""
    copies: int
    """The copies in 16 bits that a resident layer computes with; 0 if it computes with the masters."""
    largest: int
    """The largest trained master."""
    trained: int
    """Parameters that are updated."""
    rounded: int
    """What is rounded to 16 bits at once of the sums that leave; 0 if they leave in fp32."""

    def widened(self, num_bytes: int) -> int:
        """Bytes of so many bytes of gradients when they have the dtypes of the masters."""
        return num_bytes * self.gradients // max(1, self.sent_gradients)


@dataclass(frozen=True)
class WeightBytes:
    """On the device, by name; without the gradients of what is resident, which come later."""

    shell: int
    shell_is_resident: bool
    resident: int
    slots: int
    kept: int


@dataclass(frozen=True)
class SplitHead:
    """An output embedding that several devices have, of which each computes logits in chunks."""

    weights: int
    """Of V x H parameters, their number."""
    hidden: int
    """H"""
    itemsize: int
    """Of what it computes with."""
    is_trained: bool
    tokens: int
    """Of the device batch, each a row of logits."""
    chunk: int
    """Rows of a chunk."""
    devices: int
    """That have chunks."""
    is_done_in_forward: bool
    """Whether the forward computes the gradients."""

    @classmethod
    def of(
        cls, head: nn.Module, itemsize: int, tokens: int, chunk: int, devices: int, is_done_in_forward: bool
    ) -> SplitHead | None:
        """That of a batch with so many tokens on so many devices; None if one computes all of it."""
        weight = getattr(head, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return None
        chunks = -(-tokens // chunk)
        itemsize = min(itemsize, weight.itemsize)
        sizes = weight.numel(), weight.shape[1], itemsize, weight.requires_grad, tokens
        found = cls(*sizes, chunk, min(devices, chunks), is_done_in_forward)
        return found if found.devices > 1 else None

    @property
    def num_bytes(self) -> int:
        """On a device other than the first: weight and sum of its gradients; of a chunk, logits, what a cross-entropy
        makes of them in fp32, and their gradient; hidden states of this chunk and the next one."""
        sums = 4 * self.weights if self.is_trained else 0
        logits = self.chunk * self.weights // self.hidden * (12 + self.itemsize)
        given = min(2, self.tokens // self.chunk // self.devices) * self.chunk * self.hidden * self.itemsize
        return self.weights * self.itemsize + sums + logits + given

    @property
    def copied(self) -> tuple[int, int]:
        """Bytes that pass between the first device and all others in the forward, and in the backward: the weights,
        and the sums of their gradients."""
        others = self.devices - 1
        weights, sums = others * self.weights * self.itemsize, others * 4 * self.weights if self.is_trained else 0
        return (weights + sums, 0) if self.is_done_in_forward else (weights, sums)

    @property
    def spared_flops(self) -> tuple[int, int]:
        """Operations that the first device does not do, in the forward, and in the backward."""
        product = 2 * self.tokens * self.weights * (self.devices - 1) // self.devices
        gradients = product * (2 if self.is_trained else 1)
        return (product + gradients, 0) if self.is_done_in_forward else (product, product + gradients)


class ModelWeights:
    """The bytes of a model's weights, found once."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], precision: Precision, moments: float) -> None:
        """`moments` are bytes of optimizer state for each byte of a trained master."""
        shell = list(shell_modules(model, layers))
        inside = {p for layer in layers for p in layer.parameters()}
        outside = {p for m in shell for p in m._parameters.values() if p is not None} - inside
        buffers = {b: precision.of_buffer(m, n, b) for m in shell for n, b in m._buffers.items() if b is not None}
        tables = {m.weight for m in shell if isinstance(m, nn.Embedding) and m.weight.requires_grad} - inside
        self.layers = [_of(list(layer.parameters()), precision, moments) for layer in layers]
        self.shell = _of(list(outside), precision, moments)
        self.small = _of([p for p in outside if p.numel() < LARGE], precision, moments)
        """Small parameters in no layer, whose gradients ranks add together."""
        self.buffers = sum(b.numel() * dtype.itemsize for b, dtype in buffers.items())
        self.table_sums = sum(4 * t.numel() for t in tables)
        """Sums of the gradients (fp32) of tables of embeddings, to which micro-batches add rows."""
        frozen = {m.weight for m in shell if isinstance(m, nn.Embedding) and not m.weight.requires_grad} - inside
        read = {p for m in shell if not isinstance(m, nn.Embedding) for p in m._parameters.values()}
        self.frozen_tables = sum(t.numel() * precision.of(t).itemsize for t in frozen - read)
        """Frozen tables of embeddings, which no backward reads: they are freed when the forward is over."""
        self.table_gradients = sum(2 * t.numel() for t in tables if precision.of(t).itemsize == 2)
        """Those sums in 16 bits, if the device computes in 16 bits."""
        largest = max(tables, key=torch.Tensor.numel, default=torch.empty(0))
        rounded = largest.numel() * (precision.of_gradient(largest).itemsize % 4)
        besides = rounded if self.table_gradients else -4 * largest.numel()
        self._is_mixed, self._is_rounded = precision.is_mixed, precision.gradients == "16bit"
        self.tables_leaving = self.table_sums + besides
        """Gradients of tables in fp32, as they leave: besides the largest one, unless that was converted."""

    def sent_in_turn(self, arrived: Sequence[Arrived], computed: int) -> int:
        """The most bytes while gradients are computed and sent one after the other: one leaves while the next one is
        computed. `computed` is the most that computing takes, without what is sent and gradients that have waited."""
        besides = computed - max((each.num_bytes for each in arrived), default=0)
        most, leaving = computed, 0
        for numel, num_bytes, is_added in arrived:
            waited = num_bytes if is_added else 0
            sent = 4 * numel if self._is_mixed else num_bytes
            rounded = 2 * numel if self._is_rounded and sent == 4 * numel else 0
            # What is rounded is so after the one before it has left.
            widened = sent + max(leaving, rounded) + (num_bytes if sent != num_bytes else 0)
            most = max(most, besides + leaving + num_bytes + waited, besides + widened - waited)
            leaving = sent
        return most

    def on_device(
        self, places: Sequence[LayerPlace], *, gradient_slots: int, shell_is_resident: bool = False
    ) -> WeightBytes:
        """What the device holds of them in a step, with these places of the layers."""
        pairs = list(zip(self.layers, places, strict=True))
        streamed = [layer for layer, place in pairs if not place.is_resident]
        in_turn = [layer for layer, place in pairs if place.is_fetched_in_backward]
        resident = [layer for layer, place in pairs if place.is_resident]
        shell = self.shell.travels
        if shell_is_resident:
            shell = self.shell.state + self.shell.copies
        return WeightBytes(
            shell=shell + self.buffers,
            shell_is_resident=shell_is_resident,
            resident=sum(layer.state for layer in resident)
            + sum(each.travels for each, place in pairs if place.keeps_copy),
            slots=2 * max((layer.travels for layer in in_turn), default=0)
            + gradient_slots * max((layer.sums for layer in streamed), default=0),
            kept=sum(each.travels for each, place in pairs if place.keeps_weights and not place.keeps_copy),
        )


def _of(parameters: Sequence[torch.Tensor], precision: Precision, moments: float) -> LayerBytes:
    def masters(of: Sequence[torch.Tensor]) -> int:
        short = precision.is_mixed
        return sum(p.numel() * (max(4, p.itemsize) if short and p.requires_grad else p.itemsize) for p in of)

    trained = [p for p in parameters if p.requires_grad]
    travels = Layout(on_meta(p, precision.of(p)) for p in parameters).num_bytes
    rounded = [p for p in parameters if precision.of(p).itemsize < 4 and p.requires_grad]
    return LayerBytes(
        travels=travels,
        sums=Layout(on_meta(p, torch.float32) for p in trained).num_bytes,
        state=masters(parameters) + int(masters(trained) * moments),
        gradients=masters(trained),
        sent_gradients=sum(p.numel() * precision.of(p).itemsize for p in trained),
        copies=sum(p.numel() * precision.of(p).itemsize for p in rounded),
        largest=max((masters([p]) for p in trained), default=0),
        trained=sum(p.numel() for p in trained),
        rounded=2 * min(ROUNDED_AT_ONCE, sum(p.numel() for p in trained if precision.of_gradient(p).itemsize == 2)),
    )
