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
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Address -> the memory there, and its bytes."""
        self._most = 64
        """So many are kept before those that are gone are dropped."""

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of those of `tensors` that are on the device, until it is freed."""
        for storage in _storages_of(tensors, self._device):
            # Later memory at the same address replaces what is gone.
            self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        if len(self._storages) > self._most:
            self._storages = {k: each for k, each in self._storages.items() if not each[0].expired()}
            self._most = 2 * len(self._storages) + 64

    def alive(self) -> dict[int, int]:
        """Address -> bytes of all memory that still lives."""
        return {address: size for address, (storage, size) in self._storages.items() if not storage.expired()}


def memory_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Address -> bytes of the memory of those of `tensors` that are on the device."""
    return {storage.data_ptr(): storage.nbytes() for storage in _storages_of(tensors, device)}


def _storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    with without_interception():  # asking for the memory of a weight is no use of its values
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            storage = _storage(part) if part.device == device and part.layout is torch.strided else None
            if storage is not None and storage.nbytes():
                yield storage


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of `tensor`; None if it only says that it is on the device, such as a wrapper of rows elsewhere."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except RuntimeError:  # asking a wrapper for the address
        return None
