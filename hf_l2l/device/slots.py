"""Slots: device memory that all layers use, one after the other, for their weights and for their gradient sums.

Slots are allocated once ("transit buffers", arXiv:2002.05645, section 1.2; double buffers of arXiv:2106.02679,
appendix C.2), and the views of a layer's tensors in a slot are made once per layer. Weights are uploaded on one lane
while another layer computes; gradient sums are downloaded on a second lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from hf_l2l.compat import in_whole_backward, without_interception
from hf_l2l.device.device_weights import DeviceWeights, OnGradient, as_leaves, as_parameter
from hf_l2l.device.ubatch_norms import UbatchNorms, norm_of_gradient
from hf_l2l.eps.masters import Masters, MasterUnit
from hf_l2l.eps.weight_copies import Copies, Stage
from hf_l2l.model.batch_dims import Ubatch
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import HookErrors
from hf_l2l.runtime.tensors import with_own_version


class _Slot:
    """Device memory for one layer, and the point after which it may be written again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Autograd refuses tensors over memory that was created under inference mode.
        with torch.inference_mode(False):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # The allocator may hand out memory that work on the compute stream still uses.
        self.freed = stream.record(device)


class _Leaves:
    """One layer's weights in a slot."""

    def __init__(self, unit: MasterUnit, memory: torch.Tensor, on_gradient: OnGradient) -> None:
        self.flat = memory[: unit.layout.num_bytes]
        self.views = unit.layout.views(memory)
        """Of the parts of its parameters."""
        # Each has a version of its own, unlike views: a layer that sets a weight to itself, as adapters of experts do,
        # must not make the others look changed.
        self.fixed = as_leaves(unit, [with_own_version(view) for view in self.views])
        """The tensors that the modules read in a forward sweep."""
        self.trained = list(self.fixed)
        """The tensors that they read in a backward sweep: leaves of its graph."""
        for number in unit.trained:
            leaf = self.trained[number] = as_parameter(self.fixed[number]).requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(on_gradient, number))


class _WeightSlot(_Slot):
    """A slot, the layer whose weights it holds, and the point after which they may be read."""

    def __init__(self, num_bytes: int, device: torch.device, on_gradient: OnGradient) -> None:
        super().__init__(num_bytes, device)
        self.unit: MasterUnit | None = None
        """The layer; None while the slot holds no usable weights."""
        self.versions: list[int] = []
        """Versions of its masters when their upload began."""
        self.uses: list[int] = []
        """What they have counted as uses by then, if the weights are a copy that stays."""
        self.uploaded: stream.Point | None = None
        self.sources: list[torch.Tensor] = []
        """What they are uploaded from, until that is over, or left to `Copies`."""
        self.stage = Stage()
        self._on_gradient = on_gradient
        self._leaves: WeakKeyDictionary[MasterUnit, _Leaves] = WeakKeyDictionary()

    def leaves_of(self, unit: MasterUnit) -> _Leaves:
        """The weights of `unit` in this slot, as tensors that are made at its first upload."""
        leaves = self._leaves.get(unit)
        if leaves is None:
            leaves = self._leaves[unit] = _Leaves(unit, self.memory, self._on_gradient)
        return leaves

    def is_right(self) -> bool:
        """Whether nothing can have changed the masters of its layer since their upload began."""
        assert self.unit is not None, "called for slots that hold a layer"
        return all([m.is_there for m in self.unit.masters]) and [m.uses for m in self.unit.masters] == self.uses

    def is_current(self) -> bool:
        """Whether the slot holds the current weights of its layer."""
        assert self.unit is not None, "called for slots that hold a layer"
        self.unit.wait()  # an update changes the versions
        return self.versions == self.unit.versions()


class WeightSlots:
    """Two slots for weights: one holds the layer that computes, the next layer is uploaded into the other. And one for
    each layer that keeps its weights.

    Prefetching is a hint: a layer that was not prefetched is uploaded when its call needs it. Weights in a slot are
    reused as long as their masters have not changed, so the last two layers of the forward sweep are not uploaded
    again for the backward sweep. Each of the two has the size of the largest layer that uses them.
    """

    def __init__(
        self,
        masters: Masters,
        device: torch.device,
        copies: Copies,
        on_gradient: OnGradient,
        lane: stream.Lane,
        keeping: Sequence[MasterUnit] | None = None,
    ) -> None:
        """Allocate slots for the layers of `masters`, whose uploads run on `lane`; of those that keep their weights,
        for those among `keeping` (None: all)."""
        self.device = device
        self.copies = copies
        self.lane = lane
        self._on_gradient = on_gradient
        in_turn = [unit for unit in masters.layer_units if unit.place.is_fetched_in_backward]
        num_bytes = max([unit.layout.num_bytes for unit in in_turn], default=0)
        self.slots = [_WeightSlot(num_bytes, device, on_gradient) for _ in range(2 if in_turn else 0)]
        self._kept: WeakKeyDictionary[MasterUnit, _WeightSlot] = WeakKeyDictionary()
        """The slots of the layers that keep their weights."""
        self._stage_of_kept = Stage()
        for unit in masters.layer_units if keeping is None else keeping:
            if unit.place.keeps_weights:
                self._own_slot(unit)

    def forget(self, units: Collection[MasterUnit]) -> None:
        """Never reuse the weights in the slots: the masters may have been written in a way that no version shows. Uses
        of those whose copies stay are known. Of layers that are not among `units`, as those of a call with other
        parameters, nothing stays."""
        for unit in [unit for unit in self._kept if unit not in units]:
            slot = self._kept.pop(unit)
            _wait_until_unused(slot)
            slot.unit = None  # else the slot would keep its own key alive
        for slot in (*self.slots, *self._kept.values()):
            if slot.unit is None or not slot.unit.place.keeps_copy or not slot.is_right():
                slot.unit = None

    def kept_memory(self, *, copies: bool) -> list[torch.Tensor]:
        """The memory of weights that are kept: of those that are until their backward, or of `copies`, which stay."""
        return [slot.memory for unit, slot in self._kept.items() if unit.place.keeps_copy == copies]

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory for 16-bit copies that are made for each upload."""
        return sum(stage.num_bytes for stage in (*(slot.stage for slot in self.slots), self._stage_of_kept))

    @contextmanager
    def weights(self, unit: MasterUnit, *, requires_grad: bool) -> Iterator[DeviceWeights]:
        """The device weights of `unit`, which stay in their slot during the block."""
        slot = self._holding(unit) or self._fill(unit)
        if slot in self.slots:  # the slot in use comes first
            self.slots = [slot, *(other for other in self.slots if other is not slot)]
        stream.wait(slot.uploaded, wait_reasons.WEIGHTS_UPLOADED)
        leaves = slot.leaves_of(unit)
        try:
            chosen = leaves.trained if requires_grad else leaves.fixed
            yield DeviceWeights(unit, chosen, self.device, self.copies.precision)
        finally:
            slot.freed = stream.record(self.device)

    def prefetch(self, unit: MasterUnit) -> None:
        """Start to upload `unit` into the slot that is not in use."""
        if self._holding(unit) is None:
            self._fill(unit)

    def settle(self) -> None:
        """Make the host wait until all uploads have finished."""
        for slot in (*self.slots, *self._kept.values()):
            stream.wait(slot.uploaded, wait_reasons.MASTERS_READ, host=True)
            slot.sources = []

    def leave_reading(self) -> None:
        """A forward is over whose backward may follow: let those who write to masters wait for the uploads."""
        for slot in (*self.slots, *self._kept.values()):
            unit = slot.unit
            if unit is None:  # an upload that has failed
                stream.wait(slot.uploaded, wait_reasons.MASTERS_READ, host=True)
            else:
                self.copies.leave_reading(unit.masters, slot.uploaded, slot.sources)
            slot.sources = []

    def _holding(self, unit: MasterUnit) -> _WeightSlot | None:
        for slot in [self._own_slot(unit)] if unit.place.keeps_weights else self.slots:
            if slot.unit is unit and slot.is_current():
                return slot
        return None

    def _own_slot(self, unit: MasterUnit) -> _WeightSlot:
        """The slot of a layer that keeps its weights, which is made if the layer has become another one."""
        slot = self._kept.get(unit)
        if slot is None:
            slot = self._kept[unit] = _WeightSlot(unit.layout.num_bytes, self.device, self._on_gradient)
            slot.stage = self._stage_of_kept
        return slot

    def _fill(self, unit: MasterUnit) -> _WeightSlot:
        slot = self._own_slot(unit) if unit.place.keeps_weights else self.slots[-1]
        # First: this waits for an update of the masters, before the lane gets any work.
        sources = self.copies.of_unit(unit, slot.stage)
        if unit.layout.num_bytes > slot.memory.numel():  # the layer has grown, by adapters, for example
            self.settle()
            _wait_until_unused(slot)
            stage, slot = slot.stage, _WeightSlot(unit.layout.num_bytes, self.device, self._on_gradient)
            self.slots[-1], slot.stage = slot, stage
        slot.unit = None  # until all copies have been submitted
        slot.sources = sources.tensors
        slot.versions = unit.versions()
        if unit.place.keeps_copy:
            slot.uses = [master.uses for master in unit.masters]
            self.copies.stay(unit.masters)
        # Autograd refuses views that were created under inference mode.
        with torch.inference_mode(False), torch.no_grad(), self.lane.entered(), without_interception():
            stream.wait(slot.freed, wait_reasons.WEIGHT_SLOT_FREE)
            stream.released(slot.memory)
            leaves, lane = slot.leaves_of(unit), self.lane
            try:
                with stream.span(self.device, "upload", unit.module):
                    if sources.flat is not None:
                        leaves.flat.copy_(sources.flat, non_blocking=lane.is_stream)
                    else:
                        for view, host in zip(leaves.views, sources.tensors, strict=True):
                            view.copy_(host, non_blocking=lane.is_stream)
            finally:  # also after an error: copies that were submitted before it are waited for
                slot.uploaded = slot.stage.left = stream.record(self.device)
        slot.unit = unit
        return slot


def _wait_until_unused(slot: _Slot) -> None:
    """Make the host wait until the device needs the memory of a slot no more, which is about to be freed: a call may
    have used it in another stream than that for which it was allocated, of which the allocator does not know."""
    stream.wait(slot.freed, wait_reasons.WEIGHT_SLOT_FREE, host=True)


class LayerSums(NamedTuple):
    """The gradient sums of one layer."""

    totals: list[torch.Tensor | None]
    """Per parameter, its sum; None for a parameter without a gradient."""
    flat: torch.Tensor | None
    """The slot's memory (uint8, one dimension) for the sums of all trained parameters, in the unit's gradient layout;
    None if the sums are in memory of their own, since nothing of the layer travels."""


class GradientSlots:
    """Slots for gradient sums: the weight gradients of one layer each, summed over the ubatches on the device.

    With two slots, a layer sums into one while the sums of the layer before are downloaded from the other. With one
    slot, a layer waits at its first gradient until that download has finished.
    """

    def __init__(self, device: torch.device, count: int, masters: Masters) -> None:
        """`count` slots, which are allocated when they are needed, for the largest of the layers of `masters`."""
        self.device = device
        self._masters = ref(masters)
        """Hooks of leaves refer to this object: with a reference to modules they would keep the model alive."""
        self.slots = [_GradientSlot(0, device) for _ in range(count)]
        self.norms: UbatchNorms | None = None
        """Takes the norms of the gradients of each micro-batch, while somebody wants them."""
        self._norms: dict[int, list[torch.Tensor]] = {}
        """Those of the layer that computes, by the number of the parameter."""
        self._errors: HookErrors | None = None
        """What the hooks of the layer raised."""
        self._unit: MasterUnit | None = None
        """The layer that computes."""
        self._views: dict[int, torch.Tensor] = {}
        """The number of a parameter of the layer -> the memory of its gradient sum."""
        self._sums: list[torch.Tensor | None] = []
        """Per parameter of the layer, its gradient sum."""
        self._is_empty = True
        """True until the first gradient of the layer is added."""

    @contextmanager
    def summing(
        self,
        weights: DeviceWeights,
        ubatches: Sequence[Ubatch | None],
        *,
        in_slot: bool,
        before: LayerSums | None = None,
    ) -> Iterator[LayerSums]:
        """Inside, gradients of the leaves of `weights`, of one after the other of `ubatches`, are summed in a slot, or
        in memory of their own, and not in `leaf.grad`; they are added to the sums of a call of the layer `before`, if
        that has left them in the slot.

        Yields the sums; after their downloads have been submitted, `leave` must be called.
        """
        slot, unit = self.slots[0], weights.unit
        self._views, flat = {}, None
        if in_slot:
            if slot.memory.numel() < unit.gradient_layout.num_bytes:
                slot = self.slots[0] = _GradientSlot(self._num_bytes(unit), self.device)
            self._views, flat = slot.views_of(unit), slot.memory[: unit.gradient_layout.num_bytes]
        # The sums before are in this slot, since nobody has called `leave` after them; no download reads it.
        self._unit, self._is_empty, self._norms = unit, before is None, {}
        errors = self._errors = HookErrors()
        sums = self._sums = [None] * len(weights.leaves) if before is None else before.totals
        for leaf in weights.leaves:
            leaf.grad = None  # a backward that failed may have left one
        try:
            yield LayerSums(sums, flat)
            if self.norms is not None and in_whole_backward():
                self.norms.add(unit, ubatches, self._norms, self.device)
        finally:
            # Hooks of the leaves refer to this object, which Python's garbage collector does not see. A reference from
            # here to a module would therefore keep the model alive.
            self._unit, self._sums, self._views, self._norms, self._errors = None, [], {}, {}, None
        errors.raise_first()

    def _num_bytes(self, unit: MasterUnit) -> int:
        """Of a slot that is allocated now: a larger layer that follows must find it large enough, since the memory of
        a slot that is replaced is freed only when its download has finished."""
        masters = self._masters()
        streamed = [] if masters is None else [each for each in masters.layer_units if not each.place.is_resident]
        return max(each.gradient_layout.num_bytes for each in (unit, *streamed))

    def add(self, number: int, leaf: torch.Tensor) -> None:
        """Add the gradient of the leaf of parameter `number` to its sum, in the dtype of the master."""
        gradient, errors = leaf.grad, self._errors
        if errors is None or self._unit is None:  # a backward of the program's own came to a weight that a layer kept
            return
        # Sparse gradients are summed by autograd, in the leaf.
        if gradient is None or gradient.layout is not torch.strided or gradient.dtype != leaf.dtype:
            if self.norms is not None:
                self.norms.problem = f"{type(self._unit.module).__name__}, which has sparse gradients"
            return
        leaf.grad = None
        with errors:
            if self.norms is not None:
                self._norms.setdefault(number, []).append(norm_of_gradient(gradient))
            total = self._sums[number]
            if total is not None:
                total.add_(gradient)
                return
            place = self._views.get(number)
            if place is not None and self._is_empty:
                self._is_empty = False
                stream.wait(self.slots[0].freed, wait_reasons.GRADIENT_SLOT_FREE)
            if place is None:  # nothing is downloaded: the sum itself becomes p.grad
                with without_interception():
                    place = torch.empty_like(self._unit.parameters[number], requires_grad=False)
            self._sums[number] = place.copy_(gradient)

    def leave(self, lane: stream.Lane) -> None:
        """All downloads from the slot in use have been submitted to `lane`; the next layer uses the other slot."""
        slot = self.slots.pop(0)
        with lane.entered():
            stream.released(slot.memory)
            slot.freed = stream.record(self.device)
        self.slots.append(slot)


class _GradientSlot(_Slot):
    """A slot, and the views in it for each layer's gradient sums."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self._views: WeakKeyDictionary[MasterUnit, dict[int, torch.Tensor]] = WeakKeyDictionary()

    def views_of(self, unit: MasterUnit) -> dict[int, torch.Tensor]:
        """The number of each trained parameter -> the memory of its sum; made at the first backward of `unit`."""
        views = self._views.get(unit)
        if views is None:
            views = self._views[unit] = dict(zip(unit.trained, unit.gradient_layout.views(self.memory), strict=True))
        return views
