"""Host memory in whole pages, which a device may register, and the rooms in it that tensors come to lie in.

The allocator of pinned memory that torch has rounds sizes up to powers of two; here each piece is as large as what it
holds, up to a page. Every tensor made here has a storage of its own, so that saving one does not copy its neighbours.
"""

from __future__ import annotations

import mmap
import os
import sys

import torch

from hf_l2l import stream
from hf_l2l.layout import Layout, shaped_like
from hf_l2l.stacks import tensor_bytes


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


def rooms_in(pages: Pages, layout: Layout) -> dict[torch.Tensor, Room]:
    """One room per tensor of the layout."""
    return {t: Room(pages, start, start + tensor_bytes([t])) for t, start in layout.offsets.items()}
