"""Host memory that the device copies from and to while both compute: registered ("page-locked"), of exact size.

The allocator of pinned memory that torch has rounds sizes up to powers of two; here each piece is as large as what it
holds, up to a page. What the device refuses to register stays ordinary memory: copies then hold up the host, and are
as right. Every tensor made here has a storage of its own, so that saving one does not copy its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l import stream
from hf_l2l.config import size_text
from hf_l2l.layout import Layout, shaped_like
from hf_l2l.pending import untouched
from hf_l2l.precision import Precision
from hf_l2l.stacks import tensor_bytes

T = TypeVar("T")


class Watch(Protocol):
    """Goes through units of work, and may show how far it has come."""

    def __call__(self, units: Sequence[T], what: str) -> Iterable[T]: ...


def _unwatched(units: Sequence[T], what: str) -> Iterable[T]:
    return units


class Pages(mmap.mmap):
    """Whole pages of memory that nothing else lies in; registered as long as it is `locked`.

    Shared with forked processes, not copied for them: after a copy on write the device would go on reading the old
    page, and a data loader's workers are forked while masters are registered.
    """

    def __new__(cls, num_bytes: int) -> Pages:
        return super().__new__(cls, -1, max(num_bytes, 1))

    def __init__(self, num_bytes: int) -> None:
        self.locked: tuple[int, torch.device] | None = None
        self._process = os.getpid()

    def lock(self, device: torch.device) -> bool:
        """Register the pages with the device; False where that is refused."""
        assert self.locked is None, "pages are registered once"
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if stream.can_page_lock(device) and stream.page_lock(address, len(self), device):
            self.locked = address, device
        return self.locked is not None

    def unlock(self) -> None:
        """Make them ordinary memory again."""
        if self.locked is not None:
            stream.page_unlock(*self.locked)
            self.locked = None

    def __del__(self) -> None:
        # The device must not keep addresses that will be somebody else's. At the end of the process it forgets all,
        # and a forked one has no device.
        if not sys.is_finalizing() and os.getpid() == self._process:
            self.unlock()


class Room:
    """Host memory for one tensor at a time."""

    def __init__(self, pages: Pages, start: int, stop: int) -> None:
        self._view = memoryview(pages)[start:stop]
        self.num_bytes = stop - start
        self._references = self._count()

    def _count(self) -> int:
        return sys.getrefcount(self._view)

    @property
    def is_free(self) -> bool:
        """Whether no tensor over this memory lives, view or alias."""
        return self._count() == self._references

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor over this memory with the dtype, shape and strides of `tensor`, and any values."""
        with torch.inference_mode(False):
            if tensor.numel() == 0:
                return torch.empty_like(tensor, device=stream.HOST)
            memory = torch.frombuffer(self._view, dtype=torch.uint8)
            stream.released(memory)  # by the tensor that was here before
            return shaped_like(memory, tensor)


class HostMemory:
    """The registered memory of one engine: its masters, their gradients, and the stash where it is on the host."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        layers: Sequence[nn.Module] = (),
        watch: Watch = _unwatched,
        precision: Precision | None = None,
    ) -> None:
        self.device = device
        self.precision = precision or Precision(model)
        self.model = model
        self.layers = layers
        self.watch = watch
        self._pages: WeakSet[Pages] = WeakSet()
        self._addresses: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Master -> where it was when `adopt` was done with it."""
        self._refused: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Master -> bytes, for those that stayed in ordinary memory."""
        self._gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Master -> the room of its gradient."""
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Master -> the room of the copy that travels in its place."""
        self._warned = False

    @property
    def bytes_locked(self) -> int:
        """Registered now."""
        return sum(len(pages) for pages in list(self._pages) if pages.locked)

    @property
    def bytes_wanted(self) -> int:
        """That would be registered if nothing had been refused, with the gradients that training will need."""
        to_come = [p for p in self.model.parameters() if p.requires_grad and self._gradient_room(p) is None]
        taken = sum(len(pages) for pages in list(self._pages))
        return taken + sum(int(size) for size in self._refused.values()) + tensor_bytes(to_come)

    def adopt(self) -> None:
        """Move parameters that are new, or lie elsewhere now, into registered memory; they stay the same objects.

        What cannot be registered stays where it is, as do parameters that share memory with others.
        """
        if not stream.can_page_lock(self.device):
            return
        with untouched():  # an address is no value
            new: set[torch.Tensor] = {p for p in self.model.parameters() if self._addresses.get(p) != p.data_ptr()}
        if not new:
            return
        sharing = _sharing_memory(self.model)
        for unit in self.watch(self._units(new), "Moving master weights to page-locked memory"):
            travels = {p: self.precision.of(p) == p.dtype for p in unit}
            layout = Layout(p for p in unit if travels[p] and _is_plain(p) and p not in sharing)
            pages = Pages(layout.num_bytes)
            if layout.num_bytes and pages.lock(self.device):
                self._pages.add(pages)
                for master, room in _rooms(pages, layout).items():
                    _move(master, room.tensor_like(master))
            else:
                self._refused.update({p: tensor_bytes([p]) for p in layout.offsets})
            self._take_copies([p for p in unit if not travels[p]])
            self._addresses.update({p: p.data_ptr() for p in unit})
        self.warn_once()

    def _take_copies(self, masters: Sequence[torch.Tensor]) -> None:
        """Take the memory for what travels in the place of `masters`, which themselves stay where they are."""
        likes = {p: on_meta(p, self.precision.of(p)) for p in masters}
        layout = Layout(likes.values())
        if layout.num_bytes:
            pages = self._new_pages(layout.num_bytes)
            rooms = _rooms(pages, layout)
            self._copies.update({p: rooms[like] for p, like in likes.items()})
            if not pages.locked:
                self._refused.update({p: tensor_bytes([like]) for p, like in likes.items()})

    def copy_like(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A host tensor for a copy of `master` in `dtype`, with any values: registered where `adopt` found that."""
        like = on_meta(master, dtype)
        room: Room | None = self._copies.get(master)
        if room is not None and room.is_free and room.num_bytes >= tensor_bytes([like]):
            return room.tensor_like(like)
        with torch.inference_mode(False):
            return torch.empty_like(like, device=stream.HOST)

    def take_gradients(self) -> None:
        """Take the memory for one gradient per trainable parameter, where that has not been done."""
        missing: set[torch.Tensor] = {
            p for p in self.model.parameters() if p.requires_grad and self._gradient_room(p) is None
        }
        for unit in self.watch(self._units(missing) if missing else [], "Taking page-locked memory for gradients"):
            layout = Layout(unit)
            self._gradients.update(_rooms(self._new_pages(layout.num_bytes), layout))
        self.warn_once()

    def _units(self, parameters: set[torch.Tensor]) -> list[list[torch.Tensor]]:
        """`parameters` in the groups in which they travel: layer by layer, and each of the others by itself."""
        units: list[list[torch.Tensor]] = []
        left = set(parameters)
        for masters in (*(layer.parameters() for layer in self.layers), *([p] for p in self.model.parameters())):
            unit: list[torch.Tensor] = [p for p in masters if p in left]
            left.difference_update(unit)  # what is tied belongs to the first
            if unit:
                units.append(unit)
        return units

    def gradient_like(self, master: torch.Tensor) -> torch.Tensor:
        """A host tensor for the gradient of `master`: always the same memory, unless somebody still holds that."""
        room = self._gradient_room(master)
        if room is not None and room.is_free:
            return room.tensor_like(master)
        return torch.empty_like(master, requires_grad=False)

    def _gradient_room(self, master: torch.Tensor) -> Room | None:
        """The one that was taken, unless the parameter has grown since: embeddings are resized."""
        room: Room | None = self._gradients.get(master)
        return room if room is not None and room.num_bytes >= tensor_bytes([master]) else None

    def new_rooms(self, count: int, num_bytes: int) -> list[Room]:
        """Memory for `count` tensors of up to `num_bytes` bytes each."""
        turns = self.watch(range(count), "Taking page-locked memory for the stash")
        return [Room(self._new_pages(num_bytes), 0, num_bytes) for _ in turns]

    def _new_pages(self, num_bytes: int) -> Pages:
        pages = Pages(num_bytes)
        pages.lock(self.device)
        self._pages.add(pages)
        return pages

    def warn_once(self) -> None:
        """Say it once if something could not be registered."""
        if self._warned or not stream.can_page_lock(self.device):
            return
        if not self._refused and all(pages.locked for pages in list(self._pages)):
            return
        self._warned = True
        warnings.warn(
            f"{size_text(self.bytes_locked)} of {size_text(self.bytes_wanted)} of host memory could be page-locked "
            f"for {self.device}; the rest stays pageable: results are the same, but copies of it hold up the host. "
            "Raise the limit on locked memory (`ulimit -l`, or the container's memory)",
            stacklevel=2,
        )

    @property
    def is_locked(self) -> bool:
        """Whether all masters are where copies from them do not hold up the host."""
        return stream.can_page_lock(self.device) and not self._refused

    def release(self) -> None:
        """Give the registered memory back: masters move to ordinary memory of their own."""
        for master, address in list(self._addresses.items()):
            if master.data_ptr() == address and master not in self._refused and master not in self._copies:
                _move(master, torch.empty_like(master, requires_grad=False))
        for pages in list(self._pages):
            pages.unlock()
        for known in (self._addresses, self._refused, self._gradients, self._copies):
            known.clear()


def on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Shape and strides of `tensor` with another dtype."""
    with untouched():
        return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def _move(master: torch.Tensor, to: torch.Tensor) -> None:
    """Let `master` have the memory of `to`, with its own values."""
    # A graph that is still to be run backwards finds what it was made with.
    with torch.no_grad(), _unsafe_preserve_version_counter(master):
        master.set_(to.copy_(master))  # type: ignore[call-overload]


def _rooms(pages: Pages, layout: Layout) -> dict[torch.Tensor, Room]:
    """One room per tensor of the layout."""
    return {t: Room(pages, start, start + tensor_bytes([t])) for t, start in layout.offsets.items()}


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether giving the parameter other memory changes nothing else."""
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
