"""`Held`: memory on a device that is known by a name, counted as long as it lives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_l2l.compat import without_interception
from hf_l2l.runtime.tensors import parts_of


class Held:
    """Weak references to the memory of tensors of one device; views of the same memory count once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[tuple[StorageWeakRef, int, int]] = []
        """Of each, its address and its bytes."""
        self._most = 64
        """So many references are kept before those to memory that is gone are dropped."""

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of those of `tensors` that are on the device, until it is freed."""
        for storage in _storages_of(tensors, self._device):
            self._storages.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        if len(self._storages) > self._most:
            self._storages = [each for each in self._storages if not each[0].expired()]
            self._most = 2 * len(self._storages) + 64

    def alive(self) -> dict[int, int]:
        """Address -> bytes of all memory that still lives."""
        return {address: size for storage, address, size in self._storages if not storage.expired()}


def memory_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Address -> bytes of the memory of those of `tensors` that are on the device."""
    return {storage.data_ptr(): storage.nbytes() for storage in _storages_of(tensors, device)}


def _storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    with without_interception():  # asking for the memory of a weight is no use of its values
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            if part.device == device and part.layout is torch.strided:
                storage = part.untyped_storage()
                if storage.nbytes() and _has_memory(storage):
                    yield storage


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # of a wrapper, such as rows in host memory that only say that they are on the device
        return False
