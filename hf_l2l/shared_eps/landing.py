"""Where the gradients of each rank land, to be added: slots of shared memory, or memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from hf_l2l.eps.masters import Master
from hf_l2l.ranks.shared_pages import SharedPages
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import ALIGNMENT, elements
from hf_l2l.shared_eps.host_memory import SharedMemory
from hf_l2l.shared_eps.items import Item

SLOTS = 2
PRESENT, CONTINUES, MORE = 1, 2, 4
"""Bits for each parameter of an item: the rank has a gradient of it; there is a sum of earlier backwards; there are
graphs whose backwards may add to it."""


class Landed(NamedTuple):
    """A part of an item that is in the slot of this rank, or will be at a point."""

    number: int
    """Of the slot's use, the same on all ranks."""
    item: Item
    start: int
    stop: int
    """Bytes of the item's layout."""
    bits: bytes
    at: stream.Point | None
    """When it is there; None if it is."""
    memory: torch.Tensor
    """The slot (uint8, one dimension)."""


class Landing:
    """The slots of all ranks: shared memory, of which each rank writes its own part."""

    def __init__(self, team: Team, slot_bytes: int) -> None:
        self._places = {rank: place for place, rank in enumerate(team.near)}
        self.slot_bytes = aligned(slot_bytes)
        self.pages: SharedPages = team.share(len(team.near) * SLOTS * self.slot_bytes, "gradients of each rank")

    def slot(self, rank: int, number: int) -> torch.Tensor:
        """The memory (uint8, one dimension) of a rank in which use `number` lands."""
        start = (self._places[rank] * SLOTS + number % SLOTS) * self.slot_bytes
        return self.pages.bytes_at(start, self.slot_bytes)

    def release(self) -> None:
        """Make the memory pageable again."""
        self.pages.unlock()


class DeviceLanding:
    """Memory of this rank's device, in the place of its slots."""

    def __init__(self, slot_bytes: int, lane: stream.Lane) -> None:
        """For copies that are made on `lane`."""
        self.slot_bytes, self._lane = aligned(slot_bytes), lane

    def slot(self, rank: int, number: int) -> torch.Tensor:
        """New memory (uint8, one dimension) for the next gradients of this rank."""
        with self._lane.entered():
            return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._lane.device)

    def release(self) -> None:
        """Nothing is left: the memory is free with its tensors."""


def landing_for(
    team: Team, slot_bytes: int, memory: SharedMemory, lane: stream.Lane, *, on_device: bool
) -> Landing | DeviceLanding:
    """Where the gradients land that `lane` copies: on its device, or in shared memory, which `memory` page-locks."""
    if on_device:
        return DeviceLanding(slot_bytes, lane)
    landing = Landing(team, slot_bytes)
    memory.lock(landing.pages)
    memory.warn_once()
    return landing


def kept_with(
    before: torch.Tensor | None, gradient: torch.Tensor, room: Callable[[], torch.Tensor], *, is_stream: bool
) -> torch.Tensor:
    """A host tensor with the sum of `before` and a gradient, which may be on a device: at the end of what the present
    lane has been given, if it `is_stream`. `room` makes one."""
    if not is_stream:
        return stream.download(gradient) if before is None else before.add_(gradient)
    if before is None:
        before = room()
    else:
        gradient = gradient + before.to(gradient.device, non_blocking=True)
    return before.copy_(gradient, non_blocking=True)


def refuse_sparse(gradients: Iterable[tuple[Master, torch.Tensor]]) -> None:
    """Raise ValueError for gradients that do not have all elements."""
    sparse = next((m for m, gradient in gradients if gradient.layout is not torch.strided), None)
    if sparse is not None:
        raise ValueError(
            f"ranks add dense gradients (got a sparse one of {sparse.name}); make the embedding with sparse=False"
        )


def aligned(num_bytes: int) -> int:
    """So many bytes, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def bits_of(item: Item, present: set[Master], continuing: set[Master], *, more: bool) -> bytes:
    """What this rank tells of each parameter of an item; `more` says that it has graphs with more gradients."""
    return bytes(PRESENT * (m in present) | CONTINUES * (m in continuing) | MORE * more for m in item.masters)


Slot = tuple[int, torch.Tensor]
"""The number of a use of a slot of this rank, and its memory (uint8, one dimension)."""


def in_slots(
    item: Item,
    gradients: Mapping[Master, torch.Tensor],
    flat: torch.Tensor | None,
    bits: bytes,
    lane: stream.Lane,
    slot: Slot,
    next_slot: Callable[[], Slot],
) -> Iterator[Landed]:
    """Start to copy all gradients of an item, on the lane, which is entered; yields each part as it has a slot.

    Args:
        item: what lands.
        gradients: this rank's, on any device; others are left out.
        flat: device memory that holds all of them in the layout of the item; None if they lie apart.
        bits: what this rank tells of each parameter.
        lane: where the copies are made.
        slot: the first slot.
        next_slot: returns a further one, if the item is larger than a slot.
    """
    layout, (number, memory) = item.layout, slot
    if layout.num_bytes <= memory.numel():
        if flat is not None:
            assert flat.numel() == layout.num_bytes, "what lies in another order comes without it"
            memory[: layout.num_bytes].copy_(flat, non_blocking=True)
        else:
            for master, view in zip(item.masters, layout.views(memory), strict=True):
                if master in gradients:
                    view.copy_(gradients[master], non_blocking=True)
        yield Landed(number, item, 0, layout.num_bytes, bits, lane.record(), memory)
        return
    piece, whole = layout.pieces[0], gradients.get(item.masters[0])
    if whole is not None and piece.stride is not None and whole.stride() != piece.stride:
        whole = torch.empty_strided(piece.shape, piece.stride, dtype=piece.dtype, device=whole.device).copy_(whole)
    for part, (start, stop) in enumerate(item.pieces(memory.numel())):
        if part:
            number, memory = next_slot()
        if whole is not None:
            size = piece.dtype.itemsize
            part_of_it = elements(whole)[start // size : stop // size]
            memory[: stop - start].view(piece.dtype).copy_(part_of_it, non_blocking=True)
        yield Landed(number, item, start, stop, bits, lane.record(), memory)
