"""Page-locked (pinned) host memory of one engine, for copies that are overlapped with computation.

It holds masters, or the 16-bit copies that are uploaded instead of them, gradients, and the stash if that is on the
host. Memory is allocated in exact size and registered with the device. If the device refuses to register more, the
rest stays pageable: copies then block the host, with the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch

from hf_l2l.compat import version_kept, without_interception
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.model.kept_state import known_tensors
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import ALIGNMENT, Layout, Pages, Room, block_of, pages_ahead, placed
from hf_l2l.runtime.tensors import (
    can_move,
    is_plain,
    is_quantized,
    on_meta,
    parts_of,
    sharing_memory,
    size_text,
    tensor_bytes,
)

T = TypeVar("T")


class Progress(Protocol):
    """Iterates over units of work, and may show how many are done."""

    def __call__(self, units: Sequence[T], what: str) -> Iterable[T]: ...


def unseen(units: Sequence[T], what: str) -> Iterable[T]:
    """A `Progress` that shows nothing."""
    return units


class Plan(NamedTuple):
    """What of a group of masters is to be in page-locked memory."""

    group: Sequence[Master]
    chosen: list[tuple[Master, int]]
    """What gets memory, for itself or for its copy: master and number of its part."""
    copied: set[Master]
    """Those of which 16-bit copies are uploaded."""
    layout: Layout
    """Of the memory."""


class HostMemory:
    """Allocates the page-locked memory of one engine: for masters or copies, gradients, and a stash on the host."""

    def __init__(self, device: torch.device, masters: Masters, progress: Progress = unseen) -> None:
        self.device = device
        self.masters = masters
        self.progress = progress
        self._pages: WeakSet[Pages] = WeakSet()
        self.moves_masters = True
        """Whether masters that are uploaded themselves move to page-locked memory."""
        self._gradients_placed_at = 0
        """`masters.changes` when memory for gradients was allocated."""
        self._is_refused = False
        """True if masters or copies that are uploaded are in pageable memory."""
        self._blocks_found_at = 0
        """`masters.changes` when the blocks of the units were found."""
        self._warned = False

    def count_locked(self) -> int:
        """`bytes_locked`, for the ledger."""
        return self.bytes_locked

    @property
    def bytes_locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(len(pages) for pages in list(self._pages) if pages.locked)

    @property
    def bytes_wanted(self) -> int:
        """Bytes that would be page-locked if nothing had been refused, including gradients that training will need."""
        masters = self.masters.on_host()
        to_come = [
            tensor_bytes([m.gradient_like]) for m in masters if m.parameter.requires_grad and m.gradient_room is None
        ]
        taken = sum(len(pages) for pages in list(self._pages))
        # Copies whose pages were refused have them all the same.
        refused = sum(m.refused_bytes for m in masters if m.copy_room is None)
        return taken + refused + sum(to_come)

    def adopt(self) -> None:
        """Move parameters that are new, or have other memory now, to page-locked memory; they stay the same objects.

        Parameters that share memory with others are not moved, nor is any if the memory cannot be page-locked.
        """
        if not stream.can_page_lock(self.device):
            return
        masters = self.masters.on_host()
        with without_interception():  # reading an address needs no wait for values
            new = {m for m in masters if m.address != m.parts[0].data_ptr()}
        if new:
            # A layer is placed as a whole, so that it stays one block after one of its parameters has changed.
            new.update(
                m for unit in self.masters.layer_units if not new.isdisjoint(unit.masters) for m in unit.masters
            )
            sharing = sharing_memory(known_tensors(self.masters.model))
            plans = [self._plan(group, sharing) for group in self._groups(new)]
            sizes = [plan.layout.num_bytes for plan in plans if plan.layout.num_bytes]
            with closing(pages_ahead(sizes, self.device)) as made:
                for plan in self.progress(plans, "Moving master weights to page-locked memory"):
                    if plan.layout.num_bytes:
                        self._place(plan, next(made))
                    for master in plan.group:
                        master.address = master.parts[0].data_ptr()
            self._is_refused = any(m.refused_bytes for m in masters)
            self.warn_once()
        if new or self._blocks_found_at != self.masters.changes:
            self._blocks_found_at = self.masters.changes
            for unit in self.masters.layer_units:
                unit.upload_block = block_of([part for m in unit.masters for part in m.upload_parts], unit.layout)

    def _plan(self, group: Sequence[Master], sharing: set[torch.Tensor]) -> Plan:
        """What of a group is to be in page-locked memory: masters that can be moved, and copies of others."""
        precision = self.masters.precision
        chosen: list[tuple[Master, int]] = []
        likes: list[torch.Tensor] = []
        copied: set[Master] = set()
        for master in group:
            p = master.parameter
            master.upload_parts = [None] * len(master.parts)
            master.copy_room = master.copy = None
            master.refused_bytes = 0
            may_move = set(movable_parts(p, sharing)) if self.moves_masters else set()
            for number, (part, dtype) in enumerate(precision.of_parts(p)):
                if dtype != part.dtype:
                    copied.add(master)
                if precision.keeps_copies if master in copied else part in may_move:
                    chosen.append((master, number))
                    with without_interception():
                        likes.append(torch.empty_like(part, dtype=dtype, device="meta", requires_grad=False))
        return Plan(group, chosen, copied, Layout(likes))

    def _place(self, plan: Plan, pages: Pages) -> None:
        """Use `pages` for all that is uploaded of a group: masters, which move there, and copies of others.

        Masters stay where they are if the device has refused to page-lock the pages.
        """
        chosen, locked = plan.chosen, pages.locked is not None
        masters = {master for master, _ in chosen}
        if locked or not plan.copied.isdisjoint(masters):
            self._pages.add(pages)
            for (master, number), (part, room) in zip(chosen, placed(pages, plan.layout), strict=True):
                if master in plan.copied:
                    master.upload_parts[number], master.copy_room = part, room
                elif locked:
                    master.upload_parts[number] = part
                    move(master.parts[number], room.tensor_of(part.piece))
        if not locked:
            for master in masters:
                master.refused_bytes = tensor_bytes([master.parameter])

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
        if self._gradients_placed_at == self.masters.changes:
            return
        masters = self.masters.on_host()
        missing = {m for m in masters if m.parameter.requires_grad and m.gradient_room is None}
        # As for the weights: a layer is one block, also after it has got a parameter more.
        for unit in self.masters.layer_units:
            if not missing.isdisjoint(unit.masters):
                missing.update(unit.trained_masters)
        groups = self._groups(missing) if missing else []
        layouts = [gradient_layout(group) for group in groups]
        new = self._new_pages([layout.num_bytes for layout in layouts], "gradients")
        for group, layout, pages in zip(groups, layouts, new, strict=True):
            for master, (part, room) in zip(group, placed(pages, layout), strict=True):
                master.gradient_part, master.gradient_room = part, room
        self._gradients_placed_at = self.masters.changes
        for layer in self.masters.layer_units:
            _find_gradient_block(layer)
        self.warn_once()

    def _groups(self, masters: set[Master]) -> list[list[Master]]:
        """Group `masters` as they are copied: layer by layer, and each master of the non-layer modules by itself."""
        groups: list[list[Master]] = []
        remaining = set(masters)
        by_layer = (self.masters.unit(layer).masters for layer in self.masters.layers)
        for candidates in (*by_layer, *([m] for m in self.masters.on_host())):
            group = [m for m in candidates if m in remaining]
            remaining.difference_update(group)  # a tied master belongs to its first layer
            if group:
                groups.append(group)
        return groups

    def gradient_like(self, master: Master) -> torch.Tensor:
        """A host tensor for the gradient of `master`: the same memory each time, unless a tensor there still lives."""
        part, room = master.gradient_part, master.gradient_room
        if part is not None and room is not None and room.is_free:
            return room.tensor_of(part.piece)
        return torch.empty_like(master.gradient_like, device=stream.HOST)

    def new_rooms(self, count: int, num_bytes: int, what: str = "the stash") -> list[Room]:
        """Allocate memory for `count` tensors of up to `num_bytes` bytes each; `what` names their use."""
        return [Room(pages, 0, num_bytes) for pages in self._new_pages([num_bytes] * count, what)]

    def _new_pages(self, sizes: Sequence[int], what: str) -> Iterator[Pages]:
        """New pages for so many bytes each, page-locked if possible; `what` names their use."""
        with closing(pages_ahead(sizes, self.device)) as made:
            for _ in self.progress(sizes, f"Allocating page-locked memory for {what}"):
                pages = next(made)
                self._pages.add(pages)
                yield pages

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
        keeps = self.moves_masters or (self.masters.precision.is_mixed and self.masters.precision.keeps_copies)
        return stream.can_page_lock(self.device) and not self._is_refused and keeps

    def release(self) -> None:
        """Release the page-locked memory: masters move to ordinary memory of their own."""
        for master in self.masters.on_host():
            for p, part in zip(master.parts, master.upload_parts, strict=True):
                if part is not None and p.data_ptr() == part.block.addresses[part.number] != 0:
                    move(p, torch.empty_like(p, requires_grad=False))
        for pages in list(self._pages):
            pages.unlock()
        stream.forget_refusal(self.device)  # for the next model


class SmallTensors:
    """Page-locked memory for small tensors, such as the norms of a backward, which are all dropped together.

    One block serves all of them; if it does not suffice, the next one has twice its size. So a program that needs as
    many in every step allocates in the first one alone.
    """

    def __init__(self, memory: HostMemory, what: str) -> None:
        """`what` names their use."""
        self._memory = memory
        self._what = what
        self._rooms: list[Room] = []
        self._left: torch.Tensor | None = None
        """What nothing uses yet of the block in use."""

    def tensor_like(self, tensor: torch.Tensor, expected_bytes: int) -> torch.Tensor:
        """An uninitialised host tensor with the dtype and shape of `tensor`, a contiguous one.

        The first block has at least `expected_bytes` bytes.
        """
        num_bytes = tensor_bytes([tensor])
        aligned = -(-num_bytes // 8) * 8  # so that tensors of every dtype can follow
        if self._left is None or self._left.numel() < aligned:
            self._left = self._block(max(aligned, expected_bytes))
        taken, self._left = self._left[:num_bytes], self._left[aligned:]
        return taken.view(tensor.dtype).view(tensor.shape)

    def host_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        return sum(room.num_bytes for room in self._rooms)

    def drop(self) -> None:
        """Use the memory again for the next tensors, as soon as those handed out so far are gone."""
        self._left = None

    def _block(self, num_bytes: int) -> torch.Tensor:
        """A free block of at least so many bytes, the largest there is, or a new one."""
        fitting = [room for room in self._rooms if room.is_free and room.num_bytes >= num_bytes]
        if not fitting:
            is_full = self._left is not None  # else all blocks are in use, and one more of the size will do
            largest = max((room.num_bytes for room in self._rooms), default=0)
            num_bytes = max(num_bytes, 2 * largest if is_full else largest)
            fitting = self._memory.new_rooms(1, num_bytes, self._what)
            self._rooms = [room for room in self._rooms if not room.is_free] + fitting
        room = max(fitting, key=lambda room: room.num_bytes)
        return room.tensor_like(torch.empty(room.num_bytes, dtype=torch.uint8, device="meta"))


def _find_gradient_block(unit: MasterUnit) -> None:
    """Record whether all gradients of a layer can be downloaded in one copy."""
    trained = unit.trained_masters
    block = block_of([m.gradient_part for m in trained], gradient_layout(trained))
    dtypes = {(m.gradient_like.dtype, m.dtype) for m in trained}
    unit.gradients_are_rounded = dtypes == {(torch.bfloat16, torch.float32)}
    alike = unit.gradients_are_rounded or all(on_host == on_device for on_host, on_device in dtypes)
    unit.gradient_block = block if alike else None


def gradient_layout(masters: Sequence[Master]) -> Layout:
    """Places on the host for gradients, in the order of those on the device, element by element.

    Gradients kept in 16 bits then begin at half the bytes, so that all sums of a layer are rounded and copied at once.
    """
    with without_interception():
        halved = all([2 * m.gradient_like.itemsize == m.parameter.itemsize for m in masters])
    return Layout((m.gradient_like for m in masters), ALIGNMENT // 2 if halved else ALIGNMENT)


def movable_parts(parameter: torch.Tensor, sharing: set[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a parameter that can be moved to other memory; not those in `sharing`, whose memory others use."""
    # What a quantized parameter holds are ordinary tensors, which can have other memory behind its back.
    moves = can_move if is_quantized(parameter) else is_plain
    return [part for part in parts_of(parameter) if moves(part) and part not in sharing]


def move(master: torch.Tensor, to: torch.Tensor) -> None:
    """Move `master` to the memory of `to`, with its own values."""
    # The version stays, so that autograd does not refuse the backward of a graph that uses the master.
    with torch.no_grad(), version_kept(master):
        master.set_(to.copy_(master))  # type: ignore[call-overload]
