"""Layout: where several tensors lie in one piece of memory, on the host or on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ALIGNMENT = 256  # bytes, of a tensor's own memory on every device: kernels round by how memory is aligned


class Layout:
    """The places of some tensors in a piece of memory, each tensor once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.offsets: dict[torch.Tensor, int] = {}
        """Tensor -> its first byte."""
        self.num_bytes = 0
        for tensor in tensors:
            if tensor not in self.offsets:
                self.offsets[tensor] = self.num_bytes
                self.num_bytes += -(-_num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT

    def view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The part of `memory` (uint8, one dimension) that is like `tensor`."""
        start = self.offsets[tensor]
        return shaped_like(memory[start : start + _num_bytes(tensor)], tensor)


def shaped_like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes of `memory` (uint8, one dimension) with the dtype, the shape and the strides of `tensor`.

    A tensor with gaps between its elements gets contiguous strides.
    """
    flat = memory[: _num_bytes(tensor)].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else flat.view(tensor.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without a gap, in whatever order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory, one dimension, a view."""
    assert is_dense(tensor), "a tensor with gaps has no such view"
    return tensor.as_strided((tensor.numel(),), (1,))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
