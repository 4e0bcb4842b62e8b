"""What travels to the device in the place of the masters: the masters themselves, or copies of them in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.host_memory import HostMemory, on_meta
from hf_l2l.pending import untouched
from hf_l2l.precision import Precision


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: int
    """Of the master, when it was made."""


class Copies:
    """The 16-bit copy of every master that has one, made once per update: `copy == master.to(dtype)` to the bit."""

    def __init__(self, precision: Precision, memory: HostMemory) -> None:
        self.precision = precision
        self._memory = memory
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def like(self, master: torch.Tensor) -> torch.Tensor:
        """Something with the dtype, shape and strides of what travels for `master`, which is not read."""
        dtype = self.precision.of(master)
        return master if dtype == master.dtype else on_meta(master, dtype)

    def of(self, master: torch.Tensor) -> torch.Tensor:
        """A host tensor with the values of `master`, in the dtype of the device; waits for an update of it.

        Only to be called where nothing that was sent before is still being read: a stale copy is written anew.
        """
        dtype = self.precision.of(master)
        if dtype == master.dtype:
            return master
        values = master.detach()  # waits
        copy: _Copy | None = self._copies.get(master)
        if copy is not None and copy.version == values._version and copy.tensor.shape == values.shape:
            return copy.tensor
        tensor = copy.tensor if copy is not None and copy.tensor.shape == values.shape else None
        if tensor is None:
            tensor = self._memory.copy_like(master, dtype)
        with torch.no_grad(), torch.inference_mode(False):
            tensor.copy_(values)
        self._copies[master] = _Copy(tensor, values._version)
        return tensor

    @torch.no_grad()
    def renew(self, masters: Iterable[torch.Tensor]) -> None:
        """Make the copies of `masters` anew, whose update has just been made by this thread."""
        with untouched():
            for master in masters:
                copy: _Copy | None = self._copies.get(master)
                if copy is not None and copy.tensor.shape == master.shape:
                    copy.tensor.copy_(master)
                    self._copies[master] = _Copy(copy.tensor, master._version)
