"""One block of memory for several tensors: their layout in it, and page-locked (pinned) host memory in whole pages.

torch's allocator of pinned memory rounds sizes up to powers of two; a block here is rounded up to whole pages. Every
tensor made here has its own storage, so that saving one does not copy its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_l2l.compat import without_interception
from hf_l2l.runtime import stream


class Pages(mmap.mmap):
    """Whole pages of host memory for one use; page-locked while `locked` is set.

    Shared with forked processes, not copied on write: after a copy the device would still read the old page, and the
    workers of data loaders are forked while masters are page-locked.
    """

    def __new__(cls, num_bytes: int) -> Pages:
        return super().__new__(cls, -1, max(num_bytes, 1))

    def __init__(self, num_bytes: int) -> None:
        self.locked: tuple[int, torch.device] | None = None
        self._process = os.getpid()

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


class Room:
    """Host memory that holds one tensor at a time."""

    def __init__(self, pages: Pages, start: int, stop: int) -> None:
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
            if 0 in piece.shape:
                return torch.empty(piece.shape, dtype=piece.dtype)
            memory = torch.frombuffer(self._view, dtype=torch.uint8)
            self._storage = StorageWeakRef(memory.untyped_storage())
            return piece.view_of(memory[: piece.stop - piece.start])


def rooms_in(pages: Pages, layout: Layout) -> list[Room]:
    """One room per tensor of the layout."""
    return [Room(pages, each.start, each.stop) for each in layout.pieces]


_ALIGNMENT = 256  # bytes, as of a separate allocation on any device: how kernels round may depend on alignment


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
        flat = memory.view(self.dtype)
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)


class Layout:
    """The places of some tensors in a piece of memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.pieces: list[Piece] = []
        """In the order of the tensors."""
        self.num_bytes = 0
        with without_interception():
            for tensor in tensors:
                stride = tensor.stride() if is_dense(tensor) else None
                stop = self.num_bytes + _num_bytes(tensor)
                self.pieces.append(Piece(self.num_bytes, stop, tensor.dtype, tensor.shape, stride))
                self.num_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `memory` (uint8, one dimension) that are like the tensors."""
        return [piece.view_of(memory[piece.start : piece.stop]) for piece in self.pieces]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of the elements of a dense tensor, in memory order."""
    assert is_dense(tensor), "a tensor with gaps has no such view"
    return tensor.as_strided((tensor.numel(),), (1,))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
