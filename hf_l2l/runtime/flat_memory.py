"""One block of memory for several tensors: their layout in it, and page-locked (pinned) host memory in whole pages.

torch's allocator of pinned memory rounds sizes up to powers of two; a block here is rounded up to whole pages. Every
tensor made here has its own storage, so that saving one does not copy its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_l2l.compat import without_interception
from hf_l2l.runtime import stream
from hf_l2l.runtime.worker import usable_cores

_THREADS = 4
"""The most threads that make pages present and lock them."""
TOUCHED_AT_ONCE = 32 * 2**20  # bytes; so that all threads share the pages of one large block
_HUGE_FROM = 16 * 2**20  # bytes; a block is rounded up to whole huge pages, which wastes little from this size on


class Pages(mmap.mmap):
    """Whole pages of host memory for one use; page-locked while `locked` is set.

    Shared with forked processes, not copied on write: after a copy the device would still read the old page, and the
    workers of data loaders are forked while masters are page-locked. (Newer kernels copy pages that a device uses at
    the fork, for each process that is forked: masters would take their memory several times.) That is also why most
    systems give no huge pages: Linux has them for shared memory only where `shmem_enabled` says so.
    """

    def __new__(cls, num_bytes: int) -> Pages:
        return super().__new__(cls, -1, max(num_bytes, 1))

    def __init__(self, num_bytes: int) -> None:
        self.locked: tuple[int, torch.device] | None = None
        self._process = os.getpid()
        if len(self) >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages refuses the advice
                self.madvise(mmap.MADV_HUGEPAGE)

    def touch(self, start: int, stop: int) -> None:
        """Make the pages of these bytes present, which the system else does one by one, when each is used first; to be
        called before anything is stored in them. Other threads continue meanwhile."""
        # The first write to a page makes it present. Not `mmap.madvise`, beside which no thread of Python runs.
        torch.frombuffer(self, dtype=torch.uint8)[start : min(stop, len(self)) : mmap.PAGESIZE].fill_(0)

    def lock(self, device: torch.device) -> bool:
        """Page-lock the memory for `device`; False if that is impossible or refused."""
        assert self.locked is None, "pages are locked once"
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if stream.can_page_lock(device) and stream.page_lock(address, len(self), device):
            self.locked = address, device
        return self.locked is not None

    def unlock(self) -> None:
        """Make the memory pageable again."""
        if self.locked is not None:
            stream.page_unlock(*self.locked)
            self.locked = None

    def __del__(self) -> None:
        # The device must not keep addresses that the system will reuse. The end of the process frees them anyway; a
        # forked process has no device.
        if not sys.is_finalizing() and os.getpid() == self._process:
            self.unlock()


def pages_ahead(sizes: Iterable[int], device: torch.device) -> Generator[Pages]:
    """New pages for so many bytes each, in this order, page-locked for `device` if it can do that and grants it.

    Up to four threads make the next ones while the caller fills those before: the system clears each page, which takes
    longer than to copy to it. As many blocks are made ahead as there are threads. Errors are raised here.
    """
    if not stream.can_page_lock(device):
        yield from map(Pages, sizes)
        return
    remaining, count = iter(sizes), min(_THREADS, usable_cores())
    pool = ThreadPoolExecutor(count, "hf_l2l pages")
    try:
        under_way = deque(_begun(pool, size, device) for size in islice(remaining, count))
        while under_way:
            pages = under_way.popleft().result()
            under_way.extend(_begun(pool, size, device) for size in islice(remaining, 1))
            yield pages
    finally:
        pool.shutdown(cancel_futures=True)


def _begun(pool: ThreadPoolExecutor, num_bytes: int, device: torch.device) -> Future[Pages]:
    """Let the threads of `pool` make pages present, and then lock them."""
    pages = Pages(num_bytes)
    touched = []
    if stream.last_refusal(device) is None:  # what will not be locked may be given when it is used
        starts = range(0, len(pages), TOUCHED_AT_ONCE)
        touched = [pool.submit(pages.touch, start, start + TOUCHED_AT_ONCE) for start in starts]

    def locked() -> Pages:
        for each in touched:  # all of them have begun, since tasks begin in order
            each.result()
        pages.lock(device)
        return pages

    return pool.submit(locked)


class Room:
    """Host memory that holds one tensor at a time."""

    def __init__(self, pages: mmap.mmap, start: int, stop: int) -> None:
        """These bytes of `pages`, which live as long as the room and the tensors made of it."""
        self._view = memoryview(pages)[start:stop]
        self.num_bytes = stop - start
        self._storage: StorageWeakRef | None = None
        """Of the tensor that was made here last, and of all its views."""

    @property
    def is_free(self) -> bool:
        """Whether no tensor over this memory lives, view or alias."""
        return self._storage is None or self._storage.expired()

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised host tensor over this memory with the dtype, shape and strides of `tensor`."""
        return self.tensor_of(Layout([tensor]).pieces[0])

    def tensor_of(self, piece: Piece) -> torch.Tensor:
        """An uninitialised host tensor over this memory, of the kind that `piece` says."""
        with torch.inference_mode(False):
            if piece.start == piece.stop:
                return torch.empty(piece.shape, dtype=piece.dtype)
            flat = torch.frombuffer(self._view[: piece.stop - piece.start], dtype=piece.dtype)
            self._storage = StorageWeakRef(flat.untyped_storage())
            return piece.shaped(flat)


ALIGNMENT = 256  # bytes, as of a separate allocation on any device: how kernels round may depend on alignment


class Piece(NamedTuple):
    """Where one tensor lies in a piece of memory, and what it is."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None
    """None for one with gaps between its elements, which is contiguous here."""

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The bytes `memory` (uint8, one dimension, as many as the tensor has) as such a tensor."""
        return self.shaped(memory.view(self.dtype))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements `flat` (one dimension, of its dtype) as such a tensor."""
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)


class Layout:
    """The places of some tensors in a piece of memory."""

    def __init__(self, tensors: Iterable[torch.Tensor], alignment: int = ALIGNMENT) -> None:
        """Each tensor begins at a multiple of `alignment` bytes."""
        self.pieces: list[Piece] = []
        """In the order of the tensors."""
        self.num_bytes = 0
        with without_interception():
            for tensor in tensors:
                stride = tensor.stride() if is_dense(tensor) else None
                stop = self.num_bytes + _num_bytes(tensor)
                self.pieces.append(Piece(self.num_bytes, stop, tensor.dtype, tensor.shape, stride))
                self.num_bytes = -(-stop // alignment) * alignment

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `memory` (uint8, one dimension) that are like the tensors."""
        return [piece.view_of(memory[piece.start : piece.stop]) for piece in self.pieces]


class Block:
    """Pages that hold the tensors of one layout, so that all of them can be copied at once. It does not keep them."""

    def __init__(self, pages: Pages, layout: Layout, at: int = 0) -> None:
        """From byte `at` of the pages on."""
        self.layout = layout
        self._pages = weakref.ref(pages)
        self._at = at
        start = torch.frombuffer(pages, dtype=torch.uint8).data_ptr() + at
        self.addresses = [start + each.start if each.stop > each.start else 0 for each in layout.pieces]
        """Of the tensors; 0 for one without elements."""

    @property
    def flat(self) -> torch.Tensor | None:
        """All of it (uint8, one dimension); None if the pages are gone."""
        pages = self._pages()
        if pages is None:
            return None
        with torch.inference_mode(False):
            return torch.frombuffer(pages, dtype=torch.uint8, count=self.layout.num_bytes, offset=self._at)


class BlockPart(NamedTuple):
    """The place of one tensor in a block."""

    block: Block
    number: int

    @property
    def piece(self) -> Piece:
        """What the tensor is."""
        return self.block.layout.pieces[self.number]


def placed(pages: Pages, layout: Layout, at: int = 0) -> list[tuple[BlockPart, Room]]:
    """A block of these pages, from byte `at` on: the place and the memory of each tensor of the layout."""
    block = Block(pages, layout, at)
    rooms = [Room(pages, at + each.start, at + each.stop) for each in layout.pieces]
    return [(BlockPart(block, number), room) for number, room in enumerate(rooms)]


def block_of(parts: Iterable[BlockPart | None], layout: Layout) -> Block | None:
    """The block that consists of these parts, in this order, and has this layout; None if there is none."""
    parts = list(parts)
    first = parts[0] if parts else None
    if first is None or len(parts) != len(first.block.layout.pieces) or layout.num_bytes == 0:
        return None
    same = all([part is not None and part == (first.block, number) for number, part in enumerate(parts)])
    return first.block if same and first.block.layout.pieces == layout.pieces else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of the elements of a dense tensor, in memory order."""
    assert is_dense(tensor), "a tensor with gaps has no such view"
    return tensor.as_strided((tensor.numel(),), (1,))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
