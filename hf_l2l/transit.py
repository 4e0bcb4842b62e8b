"""Transit: how weights and buffers trade places with device copies, and how gradients come back.

A module tree keeps its own parameters, the fp32 masters in host memory. For the time of a call the tensors its modules
read are replaced by copies on the execution device ("transit buffers", arXiv:2002.05645, section 1.2); afterwards the
masters stand in their places again, whatever happened. Used by `relay` for layers and by `shell` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hf_l2l import stream


class Place(NamedTuple):
    """Where a module keeps one tensor: `slots` is its table of parameters or of buffers."""

    slots: dict[str, Any]
    name: str
    tensor: Any
    """A tensor, or None where a buffer is empty."""


class DeviceWeights:
    """Device copies of the parameters of some modules, one per master however often it is tied.

    The copies are leaves: after a backward through them `gradients` holds, per master, the sum of what arrived
    (arXiv:2002.05645, algorithm 2: gradients are summed over the ubatches on the device).
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        device: torch.device,
        *,
        requires_grad: bool,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Upload the parameters of `modules`, but for those whose device copies are given."""
        self.modules = list(modules)
        self.device = device
        self.places = [
            Place(module._parameters, name, parameter)
            for module in self.modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.leaves: dict[torch.Tensor, torch.Tensor] = {}
        # Copies made under inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad():
            for place in self.places:
                if place.tensor in self.leaves:
                    continue
                given = None if copies is None else copies.get(place.tensor)
                self.leaves[place.tensor] = stream.upload(place.tensor, device) if given is None else given.detach()
        if requires_grad:
            for master, leaf in self.leaves.items():
                leaf.requires_grad_(master.requires_grad)

    @property
    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(master, gradient sum on the device) for every master that a gradient reached."""
        for master, leaf in self.leaves.items():
            if leaf.grad is not None:
                yield master, leaf.grad

    @contextmanager
    def resident(self, *, keep_buffers: bool = True) -> Iterator[None]:
        """Let the modules read the device copies instead of the masters.

        Buffers come along. What the modules write into them goes back to the host when `keep_buffers` is True (a
        forward), and is thrown away otherwise (a recompute, whose writes have already happened once).
        """
        buffers = self.buffers = _DeviceBuffers(self.modules, self.device, keep=keep_buffers)
        try:
            for slots, name, master in self.places:
                slots[name] = self.leaves[master]
            buffers.place()
            yield
        finally:
            for slots, name, master in self.places:
                slots[name] = master
            buffers.restore()

    @contextmanager
    def masters_back(self) -> Iterator[None]:
        """Inside `resident`, let the modules read the masters and the host's buffers for a while."""
        lent = [*self.places, *(copy.place for copy in self.buffers.copies)]
        standing = [slots.get(name) for slots, name, _ in lent]
        try:
            for slots, name, tensor in lent:
                slots[name] = tensor
            yield
        finally:
            for (slots, name, _), stood in zip(lent, standing, strict=True):
                slots[name] = stood


class WeightSlots:
    """Two places on the device that the weights of all layers pass through ("transit buffers", arXiv:2002.05645,
    section 1.2): one holds the layer that computes, the other receives the next one meanwhile.

    The order of layers is a hint: a layer that was not prefetched is uploaded when it is asked for. What a slot holds
    is used again as long as its masters have not changed, so the last two layers of the forward sweep stay for the
    backward sweep. The memory is taken once, for the largest layer.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.lane = stream.Lane(device)
        num_bytes = max(_Layout(layer).num_bytes for layer in layers)
        self.slots = [_Slot(num_bytes, device) for _ in range(2)]

    def forget(self) -> None:
        """Let nothing that the slots hold be used again: somebody may have written weights unseen."""
        for slot in self.slots:
            slot.copies = None

    @contextmanager
    def weights(self, layer: nn.Module, *, requires_grad: bool) -> Iterator[DeviceWeights]:
        """The device weights of `layer`, which stay in their slot as long as the block runs."""
        slot = self._holding(layer) or self._fill(layer)
        self.slots = [slot, *(other for other in self.slots if other is not slot)]  # the one in use comes first
        stream.wait(slot.arrived, "a layer computes when its weights have arrived")
        assert slot.copies is not None
        try:
            yield DeviceWeights(layer.modules(), self.device, requires_grad=requires_grad, copies=slot.copies)
        finally:
            slot.left = stream.record(self.device)

    def prefetch(self, layer: nn.Module) -> None:
        """Start to upload `layer` into the slot that is not in use."""
        if self._holding(layer) is None:
            self._fill(layer)

    def settle(self) -> None:
        """Let the host wait until no upload is on its way."""
        for slot in self.slots:
            stream.host_wait(slot.arrived, "masters may be written once a call has returned")

    def _holding(self, layer: nn.Module) -> _Slot | None:
        return next((slot for slot in self.slots if slot.holds(layer)), None)

    def _fill(self, layer: nn.Module) -> _Slot:
        slot = self.slots[-1]
        slot.copies = None  # until all of it is on its way
        layout = _Layout(layer)
        # A slot made under inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad(), self.lane.entered():
            stream.wait(slot.left, "a slot is filled when the layer that was in it has computed")
            copies = {master: layout.view(slot.memory, master) for master in layout.offsets}
            for master, copy in copies.items():
                copy.copy_(master, non_blocking=self.lane.overlaps)
            slot.arrived = stream.record(self.device)
        slot.copies = copies
        slot.versions = [master._version for master in copies]
        return slot


class _Slot:
    """Device memory for one layer, what lies in it, and the two events that guard it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.copies: dict[torch.Tensor, torch.Tensor] | None = None
        """Master -> its copy here; None while there is nothing to use."""
        self.versions: list[int] = []
        """Of the masters, when they were read."""
        self.arrived: Any = None
        """The copies have landed."""
        # The memory may have been somebody else's, whose work on the compute stream goes first.
        self.left: Any = stream.record(device)
        """The layer that was here last has computed."""

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


class _Layout:
    """Where the parameters of one layer lie in a slot."""

    _ALIGNMENT = 256  # bytes, of a tensor's own memory on every device: kernels round by how memory is aligned

    def __init__(self, layer: nn.Module) -> None:
        self.offsets: dict[torch.Tensor, int] = {}
        """Master -> its first byte; a tied master has one place."""
        self.num_bytes = 0
        for master in layer.parameters():
            self.offsets[master] = self.num_bytes
            size = master.numel() * master.element_size()
            self.num_bytes += -(-size // self._ALIGNMENT) * self._ALIGNMENT

    def view(self, memory: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """The part of `memory` that is like `master`."""
        start = self.offsets[master]
        flat = memory[start : start + master.numel() * master.element_size()].view(master.dtype)
        return flat.as_strided(master.shape, master.stride()) if _dense(master) else flat.view(master.shape)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without a gap, in whatever order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


class _DeviceBuffers:
    """Device copies of the buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, keep: bool) -> None:
        self.keep = keep
        self.copies: list[_BufferCopy] = []
        # A kept buffer in shared memory is written where it lies: there is nothing to trade.
        if keep and stream.shares_host_memory(device):
            return
        made: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                # Batch norm kernels write running statistics without telling the version counter.
                unseen = isinstance(module, _NormBase) and module.training
                for name, buffer in module._buffers.items():
                    if buffer not in made:
                        assert buffer is not None
                        made[buffer] = buffer.detach().to(device, copy=True)
                    place = Place(module._buffers, name, buffer)
                    self.copies.append(_BufferCopy(place, made[buffer], _version(made[buffer]), unseen))

    def place(self) -> None:
        for (slots, name, _), copy, _, _ in self.copies:
            slots[name] = copy

    @torch.no_grad()
    def restore(self) -> None:
        """Put the host buffers back, with what the call wrote or assigned when that is to be kept."""
        for (slots, name, buffer), copy, version, unseen in self.copies:
            now = slots.get(name)
            slots[name] = buffer
            if not self.keep:
                continue
            if now is not copy:  # the module assigned another tensor to its buffer
                slots[name] = None if now is None else stream.download(now.detach())
            elif copy is not None and (unseen or copy._version != version):
                buffer.copy_(copy)


class _BufferCopy(NamedTuple):
    place: Place
    copy: torch.Tensor | None
    version: int
    written_unseen: bool


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
