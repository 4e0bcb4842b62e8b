"""Placement: how the weights and buffers of modules trade places with device copies.

A module tree keeps its own parameters, the fp32 masters in host memory. For the time of a call the tensors its modules
read are replaced by copies on the execution device; afterwards the masters stand in their places again, whatever
happened. Used by `relay` for layers, whose copies `transit` makes, and by `shell` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hf_l2l.eps.weight_copies import Copies
from hf_l2l.model.precision import Precision
from hf_l2l.runtime import stream


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
        travelling: Copies | None = None,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Upload the parameters of `modules`, or what travels in their place, but for those whose device copies are
        given."""
        self.travelling = travelling
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
                if given is None:
                    given = stream.upload(place.tensor if travelling is None else travelling.of(place.tensor), device)
                self.leaves[place.tensor] = given.detach()
        if requires_grad:
            for master, leaf in self.leaves.items():
                leaf.requires_grad_(master.requires_grad)

    @property
    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(master, gradient sum on the device) for every master that a gradient reached."""
        for master, leaf in self.leaves.items():
            if leaf.grad is not None:
                yield master, leaf.grad.to(master.dtype)

    @contextmanager
    def resident(self, *, keep_buffers: bool = True) -> Iterator[None]:
        """Let the modules read the device copies instead of the masters.

        Buffers come along. What the modules write into them goes back to the host when `keep_buffers` is True (a
        forward), and is thrown away otherwise (a recompute, whose writes have already happened once).
        """
        precision = None if self.travelling is None else self.travelling.precision
        buffers = self.buffers = _DeviceBuffers(self.modules, self.device, keep=keep_buffers, precision=precision)
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


class _DeviceBuffers:
    """Device copies of the buffers of some modules."""

    def __init__(
        self, modules: Iterable[nn.Module], device: torch.device, *, keep: bool, precision: Precision | None = None
    ) -> None:
        self.keep = keep
        self.precision = precision
        mixed = precision is not None and precision.is_mixed
        self.copies: list[_BufferCopy] = []
        # A kept buffer in shared memory is written where it lies: there is nothing to trade.
        if keep and stream.shares_host_memory(device) and not mixed:
            return
        made: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                # Batch norm kernels write running statistics without telling the version counter.
                unseen = isinstance(module, _NormBase) and module.training
                for name, buffer in module._buffers.items():
                    if buffer not in made:
                        assert buffer is not None
                        # As transformers loads a checkpoint in 16 bits: what is in none keeps its dtype.
                        short = precision is not None and name not in module._non_persistent_buffers_set
                        dtype = precision.of(buffer) if precision is not None and short else buffer.dtype
                        made[buffer] = buffer.detach().to(device, dtype, copy=True)
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
                if copy.dtype != buffer.dtype and self.precision is not None:
                    self.precision.keep(buffer)  # what is written to may add up small numbers


class _BufferCopy(NamedTuple):
    place: Place
    copy: torch.Tensor | None
    version: int
    written_unseen: bool


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
