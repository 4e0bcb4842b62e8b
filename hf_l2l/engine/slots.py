"""Transit: the device memory that all layers pass through, one after the other, and the copies that fill and empty it.

Slots are taken once. Weights arrive on one lane while another layer computes, gradient sums leave on a second one
("transit buffers", arXiv:2002.05645, section 1.2; double buffers of arXiv:2106.02679, appendix C.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hf_l2l.engine.device_weights import DeviceWeights
from hf_l2l.eps.weight_copies import Copies, Stage
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import HookErrors
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import untouched


class _Slot:
    """Device memory for one layer, and the point after which it may be written again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Memory made under inference mode could never be trained with.
        with torch.inference_mode(False):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # The memory may have been somebody else's, whose work on the compute stream goes first.
        self.left = stream.record(device)


class _WeightSlot(_Slot):
    """A slot, the layer that lies in it, and the point after which it may be read."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self.copies: dict[torch.Tensor, torch.Tensor] | None = None
        """Master -> its copy here; None while there is nothing to use."""
        self.versions: list[int] = []
        """Of the masters, when they were read."""
        self.arrived: stream.Point | None = None
        self.stage = Stage()

    def holds(self, layer: nn.Module) -> bool:
        """Whether the copies are those of `layer` as its weights are now."""
        if self.copies is None:
            return False
        masters = list(layer.parameters())  # each once, as in the layout
        return (
            len(masters) == len(self.copies)
            and all(a is b for a, b in zip(masters, self.copies, strict=True))
            and self.versions == [master._version for master in masters]
        )


class WeightSlots:
    """Two slots for weights: one holds the layer that computes, the other receives the next one meanwhile.

    The order of layers is a hint: a layer that was not prefetched is uploaded when it is asked for. What a slot holds
    is used again as long as its masters have not changed, so the last two layers of the forward sweep stay for the
    backward sweep. The memory is that of the largest layer.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, travelling: Copies, *, overlap: bool = True
    ) -> None:
        """For what `travelling` has in the place of masters. Without `overlap` weights travel in the order of
        computation, on its own stream."""
        self.device = device
        self.travelling = travelling
        self.lane = stream.Lane(device, "upload", beside=overlap)
        num_bytes = max(Layout(map(travelling.like, layer.parameters())).num_bytes for layer in layers)
        self.slots = [_WeightSlot(num_bytes, device) for _ in range(2)]

    def forget(self) -> None:
        """Let nothing that the slots hold be used again: somebody may have written weights unseen."""
        for slot in self.slots:
            slot.copies = None

    @contextmanager
    def weights(self, layer: nn.Module, *, requires_grad: bool) -> Iterator[DeviceWeights]:
        """The device weights of `layer`, which stay in their slot as long as the block runs."""
        slot = self._holding(layer) or self._fill(layer)
        self.slots = [slot, *(other for other in self.slots if other is not slot)]  # the one in use comes first
        stream.wait(slot.arrived, wait_reasons.WEIGHTS_UPLOADED)
        assert slot.copies is not None
        try:
            yield DeviceWeights(
                layer.modules(),
                self.device,
                requires_grad=requires_grad,
                travelling=self.travelling,
                copies=slot.copies,
            )
        finally:
            slot.left = stream.record(self.device)

    def prefetch(self, layer: nn.Module) -> None:
        """Start to upload `layer` into the slot that is not in use."""
        if self._holding(layer) is None:
            self._fill(layer)

    def settle(self) -> None:
        """Let the host wait until no upload is on its way."""
        for slot in self.slots:
            stream.wait(slot.arrived, wait_reasons.MASTERS_READ, host=True)

    def _holding(self, layer: nn.Module) -> _WeightSlot | None:
        return next((slot for slot in self.slots if slot.holds(layer)), None)

    def _fill(self, layer: nn.Module) -> _WeightSlot:
        slot = self.slots[-1]
        # First: it waits for an update that is under way, which is not to hold up the lane.
        sent = self.travelling.of_layer(layer.parameters(), slot.stage)
        layout = Layout(sent.values())
        if layout.num_bytes > slot.memory.numel():  # the layer has grown, by adapters for one
            self.settle()
            stage, slot = slot.stage, _WeightSlot(layout.num_bytes, self.device)
            self.slots[-1], slot.stage = slot, stage
        slot.copies = None  # until all of it is on its way
        slot.versions = [master._version for master in sent]
        # A slot made under inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad(), self.lane.entered():
            stream.wait(slot.left, wait_reasons.WEIGHT_SLOT_FREE)
            stream.released(slot.memory)
            copies = {master: layout.view(slot.memory, host) for master, host in sent.items()}
            try:
                with stream.span(self.device, "upload", layer):
                    for master, copy in copies.items():
                        copy.copy_(sent[master], non_blocking=self.lane.is_stream)
            finally:  # what was sent before an error is waited for, too
                slot.arrived = slot.stage.left = stream.record(self.device)
        slot.copies = copies
        return slot


class GradientSlots:
    """Slots for the weight gradients of one layer each: sums over the ubatches, made where they leave from.

    With two of them, a layer sums into one while the sums of the layer before leave the other. With one, a layer
    waits at its first gradient until they have left.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.slots = [_Slot(0, device) for _ in range(count)]

    @contextmanager
    def summing(self, weights: DeviceWeights) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Inside, gradients that reach the leaves of `weights` are summed in a slot and not in `leaf.grad`.

        Gives master -> sum (a view of the slot, like the master), for those that a gradient has reached. When the sums
        have left, `leave` must be told.
        """
        slot, errors = self.slots[0], HookErrors()
        leaves = {master: leaf for master, leaf in weights.leaves.items() if leaf.requires_grad}
        layout = Layout(leaves)
        sums: dict[torch.Tensor, torch.Tensor] = {}
        if slot.memory.numel() < layout.num_bytes and not stream.shares_host_memory(self.device):
            slot = self.slots[0] = _Slot(layout.num_bytes, self.device)

        def add(master: torch.Tensor, leaf: torch.Tensor) -> None:
            gradient = leaf.grad
            # A sparse one is left to its leaf.
            if gradient is None or gradient.layout is not torch.strided or gradient.dtype != leaf.dtype:
                return
            leaf.grad = None
            with errors:
                if not sums:
                    stream.wait(slot.left, wait_reasons.GRADIENT_SLOT_FREE)
                if master in sums:
                    sums[master].add_(gradient)
                else:
                    sums[master] = self._place(slot, layout, master).copy_(gradient)

        handles = [
            leaf.register_post_accumulate_grad_hook(lambda leaf, master=master: add(master, leaf))
            for master, leaf in leaves.items()
        ]
        try:
            yield sums
        finally:
            for handle in handles:
                handle.remove()
        errors.raise_first()

    def _place(self, slot: _Slot, layout: Layout, master: torch.Tensor) -> torch.Tensor:
        if stream.shares_host_memory(self.device):  # it is to stay: nothing leaves from here
            with untouched():
                return torch.empty_like(master, requires_grad=False)
        return layout.view(slot.memory, master)

    def leave(self, lane: stream.Lane) -> None:
        """All that the slot in use held has been given to `lane`; the next layer takes the other slot."""
        slot = self.slots.pop(0)
        with lane.entered():
            stream.released(slot.memory)
            slot.left = stream.record(self.device)
        self.slots.append(slot)
