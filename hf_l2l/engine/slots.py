"""Slots: the device memory that all layers pass through, one after the other, and the copies that fill and empty it.

Slots are taken once. Weights arrive on one lane while another layer computes, gradient sums leave on a second one
("transit buffers", arXiv:2002.05645, section 1.2; double buffers of arXiv:2106.02679, appendix C.2). What lies where
in a slot is found once per layer, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch

from hf_l2l.compat import without_interception
from hf_l2l.engine.device_weights import DeviceWeights, OnGradient
from hf_l2l.eps.masters import Masters, MasterUnit
from hf_l2l.eps.weight_copies import Copies, Stage
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import HookErrors


class _Slot:
    """Device memory for one layer, and the point after which it may be written again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Memory made under inference mode could never be trained with.
        with torch.inference_mode(False):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # The memory may have had another use, whose work on the compute stream goes first.
        self.left = stream.record(device)


class _Leaves:
    """The places of one layer's weights in a slot."""

    def __init__(self, unit: MasterUnit, memory: torch.Tensor, on_gradient: OnGradient) -> None:
        self.views = unit.layout.views(memory)
        self.fixed = [view.detach() for view in self.views]
        """What the modules read in a forward sweep."""
        self.trained = list(self.fixed)
        """What they read in a backward sweep: leaves of its graph."""
        for number in unit.trained:
            leaf = self.trained[number] = self.views[number].detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(on_gradient, number))


class _WeightSlot(_Slot):
    """A slot, the layer that lies in it, and the point after which it may be read."""

    def __init__(self, num_bytes: int, device: torch.device, on_gradient: OnGradient) -> None:
        super().__init__(num_bytes, device)
        self.unit: MasterUnit | None = None
        """The layer; None while there is nothing to use."""
        self.versions: list[int] = []
        """Of its masters, when they were read."""
        self.arrived: stream.Point | None = None
        self.stage = Stage()
        self._on_gradient = on_gradient
        self._leaves: WeakKeyDictionary[MasterUnit, _Leaves] = WeakKeyDictionary()

    def leaves_of(self, unit: MasterUnit) -> _Leaves:
        """Where the weights of `unit` lie here, made the first time that it comes."""
        leaves = self._leaves.get(unit)
        if leaves is None:
            leaves = self._leaves[unit] = _Leaves(unit, self.memory, self._on_gradient)
        return leaves

    def is_current(self) -> bool:
        """Whether what lies here are the weights of the layer as they are now."""
        assert self.unit is not None, "asked of a slot in which a layer lies"
        self.unit.wait()  # an update changes the versions
        return self.versions == self.unit.versions()


class WeightSlots:
    """Two slots for weights: one holds the layer that computes, the other receives the next one meanwhile.

    The order of layers is a hint: a layer that was not prefetched is uploaded when it is asked for. What a slot holds
    is used again as long as its masters have not changed, so the last two layers of the forward sweep stay for the
    backward sweep. The memory is that of the largest layer.
    """

    def __init__(
        self, masters: Masters, device: torch.device, copies: Copies, on_gradient: OnGradient, *, overlap: bool = True
    ) -> None:
        """For the layers of `masters`. Without `overlap` weights travel in the order of computation, on its own
        stream."""
        self.device = device
        self.copies = copies
        self.lane = stream.Lane(device, "upload", beside=overlap)
        self._on_gradient = on_gradient
        num_bytes = max(masters.unit(layer).layout.num_bytes for layer in masters.layers)
        self.slots = [_WeightSlot(num_bytes, device, on_gradient) for _ in range(2)]

    def forget(self) -> None:
        """Let nothing that the slots hold be used again: weights may have been written unseen."""
        for slot in self.slots:
            slot.unit = None

    @contextmanager
    def weights(self, unit: MasterUnit, *, requires_grad: bool) -> Iterator[DeviceWeights]:
        """The device weights of `unit`, which stay in their slot as long as the block runs."""
        slot = self._holding(unit) or self._fill(unit)
        self.slots = [slot, *(other for other in self.slots if other is not slot)]  # the one in use comes first
        stream.wait(slot.arrived, wait_reasons.WEIGHTS_UPLOADED)
        leaves = slot.leaves_of(unit)
        try:
            chosen = leaves.trained if requires_grad else leaves.fixed
            yield DeviceWeights(unit, chosen, self.device, self.copies.precision)
        finally:
            slot.left = stream.record(self.device)

    def prefetch(self, unit: MasterUnit) -> None:
        """Start to upload `unit` into the slot that is not in use."""
        if self._holding(unit) is None:
            self._fill(unit)

    def settle(self) -> None:
        """Let the host wait until no upload is on its way."""
        for slot in self.slots:
            stream.wait(slot.arrived, wait_reasons.MASTERS_READ, host=True)

    def _holding(self, unit: MasterUnit) -> _WeightSlot | None:
        for slot in self.slots:
            if slot.unit is unit and slot.is_current():
                return slot
        return None

    def _fill(self, unit: MasterUnit) -> _WeightSlot:
        slot = self.slots[-1]
        # First: it waits for an update that is under way, which is not to hold up the lane.
        sent = self.copies.of_unit(unit, slot.stage)
        if unit.layout.num_bytes > slot.memory.numel():  # the layer has grown, by adapters for one
            self.settle()
            stage, slot = slot.stage, _WeightSlot(unit.layout.num_bytes, self.device, self._on_gradient)
            self.slots[-1], slot.stage = slot, stage
        slot.unit = None  # until all of it is on its way
        slot.versions = unit.versions()
        # A slot made under inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad(), self.lane.entered(), without_interception():
            stream.wait(slot.left, wait_reasons.WEIGHT_SLOT_FREE)
            stream.released(slot.memory)
            views = slot.leaves_of(unit).views
            try:
                with stream.span(self.device, "upload", unit.module):
                    for view, host in zip(views, sent, strict=True):
                        view.copy_(host, non_blocking=self.lane.is_stream)
            finally:  # what was sent before an error is waited for, too
                slot.arrived = slot.stage.left = stream.record(self.device)
        slot.unit = unit
        return slot


class GradientSlots:
    """Slots for the weight gradients of one layer each: sums over the ubatches, made where they leave from.

    With two of them, a layer sums into one while the sums of the layer before leave the other. With one, a layer
    waits at its first gradient until they have left.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.slots = [_GradientSlot(0, device) for _ in range(count)]
        self._errors = HookErrors()
        self._unit: MasterUnit | None = None
        """The layer that computes."""
        self._views: dict[int, torch.Tensor] = {}
        """The number of its parameters -> the place of the sum."""
        self._sums: list[torch.Tensor | None] = []
        """Per parameter."""
        self._is_empty = True
        """Whether no gradient of it has come yet."""

    @contextmanager
    def summing(self, weights: DeviceWeights) -> Iterator[list[torch.Tensor | None]]:
        """Inside, gradients that reach the leaves of `weights` are summed in a slot and not in `leaf.grad`.

        Gives the sums per parameter (views of the slot, like the parameter), None for those that no gradient has
        reached. When the sums have left, `leave` must be told.
        """
        slot, unit = self.slots[0], weights.unit
        self._views = {}
        if not stream.shares_host_memory(self.device):
            if slot.memory.numel() < unit.gradient_layout.num_bytes:
                slot = self.slots[0] = _GradientSlot(unit.gradient_layout.num_bytes, self.device)
            self._views = slot.views_of(unit)
        self._unit, self._is_empty = unit, True
        sums = self._sums = [None] * len(weights.leaves)
        for leaf in weights.leaves:
            leaf.grad = None  # of a backward that failed
        try:
            yield sums
        finally:
            # Leaves refer to this object in a way that Python's collector does not follow, so it refers to no module.
            self._unit, self._sums, self._views = None, [], {}
        self._errors.raise_first()

    def add(self, number: int, leaf: torch.Tensor) -> None:
        """A gradient has reached the leaf of parameter `number`: add it to the sum, in the dtype of the master."""
        gradient = leaf.grad
        # A sparse one is left to its leaf.
        if gradient is None or gradient.layout is not torch.strided or gradient.dtype != leaf.dtype:
            return
        leaf.grad = None
        with self._errors:
            total = self._sums[number]
            if total is not None:
                total.add_(gradient)
                return
            if self._is_empty:
                self._is_empty = False
                stream.wait(self.slots[0].left, wait_reasons.GRADIENT_SLOT_FREE)
            place = self._views.get(number)
            if place is None:  # in shared memory it is to stay: nothing leaves from here
                assert self._unit is not None, "gradients come while a layer computes"
                with without_interception():
                    place = torch.empty_like(self._unit.parameters[number], requires_grad=False)
            self._sums[number] = place.copy_(gradient)

    def leave(self, lane: stream.Lane) -> None:
        """All that the slot in use held has been given to `lane`; the next layer takes the other slot."""
        slot = self.slots.pop(0)
        with lane.entered():
            stream.released(slot.memory)
            slot.left = stream.record(self.device)
        self.slots.append(slot)


class _GradientSlot(_Slot):
    """A slot, and where each layer's gradient sums lie in it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self._views: WeakKeyDictionary[MasterUnit, dict[int, torch.Tensor]] = WeakKeyDictionary()

    def views_of(self, unit: MasterUnit) -> dict[int, torch.Tensor]:
        """The number of each trained parameter -> the place of its sum, found the first time that `unit` comes."""
        views = self._views.get(unit)
        if views is None:
            views = self._views[unit] = dict(zip(unit.trained, unit.gradient_layout.views(self.memory), strict=True))
        return views
