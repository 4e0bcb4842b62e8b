"""One block of memory for several tensors: their layout in it, and page-locked (pinned) host memory in whole pages.

torch's allocator of pinned memory rounds sizes up to powers of two; a block here is rounded up to whole pages. Every
tensor made here has its own storage, so that saving one does not copy its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable

import torch

from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes


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
        self._references = self._count()

    def _count(self) -> int:
        return sys.getrefcount(self._view)

    @property
    def is_free(self) -> bool:
        """Whether no tensor over this memory is alive, views and aliases included."""
        return self._count() == self._references

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised host tensor over this memory with the dtype, shape and strides of `tensor`."""
        with torch.inference_mode(False):
            if tensor.numel() == 0:
                return torch.empty_like(tensor, device=stream.HOST)
            memory = torch.frombuffer(self._view, dtype=torch.uint8)
            stream.released(memory)  # by the previous tensor
            return shaped_like(memory, tensor)


def rooms_in(pages: Pages, layout: Layout) -> dict[torch.Tensor, Room]:
    """One room per tensor of the layout."""
    return {t: Room(pages, start, start + tensor_bytes([t])) for t, start in layout.offsets.items()}


_ALIGNMENT = 256  # bytes, as of a separate allocation on any device: how kernels round may depend on alignment


class Layout:
    """Offsets of tensors in a block of memory, each tensor once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.offsets: dict[torch.Tensor, int] = {}
        """Tensor -> its first byte."""
        self.num_bytes = 0
        for tensor in tensors:
            if tensor not in self.offsets:
                self.offsets[tensor] = self.num_bytes
                self.num_bytes += -(-_num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT

    def view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The part of `memory` (uint8, one dimension) for `tensor`, with its dtype and shape."""
        start = self.offsets[tensor]
        return shaped_like(memory[start : start + _num_bytes(tensor)], tensor)


def shaped_like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes of `memory` (uint8, one dimension) with the dtype, the shape and the strides of `tensor`.

    A tensor with gaps between its elements gets contiguous strides.
    """
    flat = memory[: _num_bytes(tensor)].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else flat.view(tensor.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of the elements of a dense tensor, in memory order."""
    assert is_dense(tensor), "a tensor with gaps has no such view"
    return tensor.as_strided((tensor.numel(),), (1,))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
