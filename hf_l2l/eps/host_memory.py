"""Host memory that the device copies from and to while both compute: registered ("page-locked"), of exact size.

Which tensors of a model lie in it: masters, or the 16-bit copies that travel in their place, gradients, and the stash
where it is on the host. What the device refuses to register stays ordinary memory: copies then hold up the host, and
are as right.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.model.precision import Precision
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Layout, Pages, Room, rooms_in
from hf_l2l.runtime.tensors import on_meta, size_text, tensor_bytes, untouched

T = TypeVar("T")


class Watch(Protocol):
    """Goes through units of work, and may show how far it has come."""

    def __call__(self, units: Sequence[T], what: str) -> Iterable[T]: ...


def _unwatched(units: Sequence[T], what: str) -> Iterable[T]:
    return units


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
        to_come = [
            p.numel() * self.precision.of_gradient(p).itemsize
            for p in self.model.parameters()
            if p.requires_grad and self._gradient_room(p) is None
        ]
        taken = sum(len(pages) for pages in list(self._pages))
        return taken + sum(int(size) for size in self._refused.values()) + sum(to_come)

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
                for master, room in rooms_in(pages, layout).items():
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
        if layout.num_bytes and self.precision.keeps_copies:
            pages = self._new_pages(layout.num_bytes)
            rooms = rooms_in(pages, layout)
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
            likes = {p: on_meta(p, self.precision.of_gradient(p)) for p in unit}
            layout = Layout(likes.values())
            rooms = rooms_in(self._new_pages(layout.num_bytes), layout)
            self._gradients.update({p: rooms[like] for p, like in likes.items()})
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
        dtype = self.precision.of_gradient(master)
        if room is not None and room.is_free:
            return room.tensor_like(on_meta(master, dtype))
        with untouched():
            return torch.empty_like(master, dtype=dtype, requires_grad=False)

    def _gradient_room(self, master: torch.Tensor) -> Room | None:
        """The one that was taken, unless the parameter has grown since: embeddings are resized."""
        room: Room | None = self._gradients.get(master)
        size = master.numel() * self.precision.of_gradient(master).itemsize
        return room if room is not None and room.num_bytes >= size else None

    def new_rooms(self, count: int, num_bytes: int, what: str = "the stash") -> list[Room]:
        """Memory for `count` tensors of up to `num_bytes` bytes each."""
        turns = self.watch(range(count), f"Taking page-locked memory for {what}")
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
        """Whether what travels is where copies from it do not hold up the host."""
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
        self.precision.release()


def _move(master: torch.Tensor, to: torch.Tensor) -> None:
    """Let `master` have the memory of `to`, with its own values."""
    # A graph that is still to be run backwards finds what it was made with.
    with torch.no_grad(), _unsafe_preserve_version_counter(master):
        master.set_(to.copy_(master))  # type: ignore[call-overload]


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
