"""Page-locked (pinned) host memory of one engine, for copies that are overlapped with computation.

It holds masters, or the 16-bit copies that are uploaded instead of them, gradients, and the stash if that is on the
host. Memory is allocated in exact size and registered with the device. If the device refuses to register more, the
rest stays pageable: copies then block the host, with the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from hf_l2l.compat import version_kept, without_interception
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Layout, Pages, Room, rooms_in
from hf_l2l.runtime.tensors import on_meta, size_text, tensor_bytes

T = TypeVar("T")


class Progress(Protocol):
    """Iterates over units of work, and may show how many are done."""

    def __call__(self, units: Sequence[T], what: str) -> Iterable[T]: ...


def unseen(units: Sequence[T], what: str) -> Iterable[T]:
    """A `Progress` that shows nothing."""
    return units


class HostMemory:
    """Allocates the page-locked memory of one engine: for masters or copies, gradients, and a stash on the host."""

    def __init__(self, device: torch.device, masters: Masters, progress: Progress = unseen) -> None:
        self.device = device
        self.masters = masters
        self.progress = progress
        self._pages: WeakSet[Pages] = WeakSet()
        self._changes_seen = 0
        """`masters.changes` when memory for gradients was allocated."""
        self._is_refused = False
        """True if masters or copies that are uploaded are in pageable memory."""
        self._warned = False

    @property
    def bytes_locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(len(pages) for pages in list(self._pages) if pages.locked)

    @property
    def bytes_wanted(self) -> int:
        """Bytes that would be page-locked if nothing had been refused, including gradients that training will need."""
        masters = self.masters.all()
        to_come = [
            tensor_bytes([m.gradient_like]) for m in masters if m.parameter.requires_grad and m.gradient_room is None
        ]
        taken = sum(len(pages) for pages in list(self._pages))
        return taken + sum(m.refused_bytes for m in masters) + sum(to_come)

    def adopt(self) -> None:
        """Move parameters that are new, or have other memory now, to page-locked memory; they stay the same objects.

        Parameters that share memory with others are not moved, nor is any if the memory cannot be page-locked.
        """
        if not stream.can_page_lock(self.device):
            return
        masters = self.masters.all()
        with without_interception():  # reading an address needs no wait for values
            new = {m for m in masters if m.address != m.parameter.data_ptr()}
        if not new:
            return
        sharing = _sharing_memory(self.masters.model)
        precision = self.masters.precision
        for unit in self.progress(self._groups(new), "Moving master weights to page-locked memory"):
            is_uploaded = {m: precision.of(m.parameter) == m.parameter.dtype for m in unit}  # itself, and no copy
            movable = [m for m in unit if is_uploaded[m] and _is_plain(m.parameter) and m.parameter not in sharing]
            layout = Layout(m.parameter for m in movable)
            pages = Pages(layout.num_bytes)
            if layout.num_bytes and pages.lock(self.device):
                self._pages.add(pages)
                for master, room in zip(movable, rooms_in(pages, layout), strict=True):
                    _move(master.parameter, room.tensor_like(master.parameter))
            else:
                for master in movable:
                    master.refused_bytes = tensor_bytes([master.parameter])
            self._take_copies([m for m in unit if not is_uploaded[m]])
            for master in unit:
                master.address = master.parameter.data_ptr()
        self._is_refused = any(m.refused_bytes for m in masters)
        self.warn_once()

    def _take_copies(self, masters: Sequence[Master]) -> None:
        """Allocate memory for the copies that are uploaded instead of `masters`, which are not moved themselves."""
        precision = self.masters.precision
        likes = [on_meta(m.parameter, precision.of(m.parameter)) for m in masters]
        layout = Layout(likes)
        if layout.num_bytes and precision.keeps_copies:
            pages = self._new_pages(layout.num_bytes)
            for master, like, room in zip(masters, likes, rooms_in(pages, layout), strict=True):
                master.copy_room = room
                master.refused_bytes = 0 if pages.locked else tensor_bytes([like])

    def copy_like(self, master: Master, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor for a copy of `master` in `dtype`; page-locked if `adopt` allocated it."""
        like = on_meta(master.parameter, dtype)
        room = master.copy_room
        if room is not None and room.is_free and room.num_bytes >= tensor_bytes([like]):
            return room.tensor_like(like)
        with torch.inference_mode(False):
            return torch.empty_like(like, device=stream.HOST)

    def take_gradients(self) -> None:
        """Allocate memory for one gradient per trainable parameter, if that has not been done."""
        if self._changes_seen == self.masters.changes:
            return
        masters = self.masters.all()
        missing = {m for m in masters if m.parameter.requires_grad and m.gradient_room is None}
        groups = self._groups(missing) if missing else []
        for unit in self.progress(groups, "Allocating page-locked memory for gradients"):
            layout = Layout(m.gradient_like for m in unit)
            rooms = rooms_in(self._new_pages(layout.num_bytes), layout)
            for master, room, piece in zip(unit, rooms, layout.pieces, strict=True):
                master.gradient_room, master.gradient_piece = room, piece
        self._changes_seen = self.masters.changes
        self.warn_once()

    def _groups(self, masters: set[Master]) -> list[list[Master]]:
        """Group `masters` as they are copied: layer by layer, and each master of the non-layer modules by itself."""
        groups: list[list[Master]] = []
        remaining = set(masters)
        by_layer = (self.masters.unit(layer).masters for layer in self.masters.layers)
        for candidates in (*by_layer, *([m] for m in self.masters.all())):
            group = [m for m in candidates if m in remaining]
            remaining.difference_update(group)  # a tied master belongs to its first layer
            if group:
                groups.append(group)
        return groups

    def gradient_like(self, master: Master) -> torch.Tensor:
        """A host tensor for the gradient of `master`: the same memory each time, unless a tensor there still lives."""
        room, piece = master.gradient_room, master.gradient_piece
        if room is not None and piece is not None and room.is_free:
            return room.tensor_of(piece)
        return torch.empty_like(master.gradient_like, device=stream.HOST)

    def new_rooms(self, count: int, num_bytes: int, what: str = "the stash") -> list[Room]:
        """Allocate memory for `count` tensors of up to `num_bytes` bytes each; `what` names their use."""
        turns = self.progress(range(count), f"Allocating page-locked memory for {what}")
        return [Room(self._new_pages(num_bytes), 0, num_bytes) for _ in turns]

    def _new_pages(self, num_bytes: int) -> Pages:
        pages = Pages(num_bytes)
        pages.lock(self.device)
        self._pages.add(pages)
        return pages

    def warn_once(self) -> None:
        """Warn once if some memory could not be page-locked."""
        if self._warned or not stream.can_page_lock(self.device):
            return
        if not self._is_refused and all(pages.locked for pages in list(self._pages)):
            return
        self._warned = True
        warnings.warn(
            f"{size_text(self.bytes_locked)} of {size_text(self.bytes_wanted)} of host memory could be page-locked "
            f"for {self.device}, whose driver refused more (code {stream.last_refusal(self.device)}); the rest stays "
            "pageable: results are the same, but copies of it block the host. Give the process more host memory, or "
            "let its container, sandbox or WSL page-lock more (the driver does not ask `ulimit -l`)",
            stacklevel=2,
        )

    @property
    def is_locked(self) -> bool:
        """Whether uploads do not block the host, since all masters or copies are page-locked."""
        return stream.can_page_lock(self.device) and not self._is_refused

    def release(self) -> None:
        """Release the page-locked memory: masters move to ordinary memory of their own."""
        for master in self.masters.all():
            p = master.parameter
            if p.data_ptr() == master.address and not master.refused_bytes and master.copy_room is None:
                _move(p, torch.empty_like(p, requires_grad=False))
        for pages in list(self._pages):
            pages.unlock()


def _move(master: torch.Tensor, to: torch.Tensor) -> None:
    """Move `master` to the memory of `to`, with its own values."""
    # The version stays, so that autograd does not refuse the backward of a graph that uses the master.
    with torch.no_grad(), version_kept(master):
        master.set_(to.copy_(master))  # type: ignore[call-overload]


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether the parameter can be moved to other memory without other effects."""
    return type(parameter) is nn.Parameter and not parameter.is_inference() and not parameter.is_shared()


def _sharing_memory(model: nn.Module) -> set[torch.Tensor]:
    """Parameters whose bytes belong to another parameter or buffer as well: tied by memory, not by name."""
    found: set[torch.Tensor] = set()
    ranges = []
    for tensor in {*model.parameters(), *model.buffers()}:
        if tensor.layout is torch.strided and tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
            start = tensor.data_ptr()
            ranges.append((start, start + (last + 1) * tensor.element_size(), tensor))
    ranges.sort(key=lambda each: each[:2])
    reaches, holder = 0, None
    for start, stop, tensor in ranges:
        if start < reaches and holder is not None:
            found |= {tensor, holder}
        if stop > reaches:
            reaches, holder = stop, tensor
    return found
