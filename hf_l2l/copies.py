"""What travels to the device in the place of the masters: the masters themselves, or copies of them in 16 bits.

The copies are kept and renewed by every update (2 bytes per parameter of host memory), or made whenever a layer
travels, which the thread that drives the device then waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l import stream
from hf_l2l.host_memory import HostMemory, on_meta
from hf_l2l.layout import Layout
from hf_l2l.pending import untouched
from hf_l2l.precision import Precision


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: int
    """Of the master, when it was made."""


class Stage:
    """Host memory in which the copies of one layer are made and from which they leave."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self.left: stream.Point | None = None
        """After which it may be written again."""

    def memory(self, host: HostMemory, num_bytes: int) -> torch.Tensor:
        """`num_bytes` bytes (uint8) from which nothing is on its way any more."""
        stream.wait(self.left, "copies are made where others were when those have left", host=True)
        if self._memory is None or self._memory.numel() < num_bytes:
            size = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            self._memory = host.new_rooms(1, num_bytes, "copies of weights")[0].tensor_like(size)
        return self._memory


class Copies:
    """The 16-bit copies of masters: `copy == master.to(dtype)` to the bit, made once per update if they are kept."""

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
        if not self.precision.keeps_copies:
            return values.to(dtype)
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

    def of_layer(self, masters: Iterable[torch.Tensor], stage: Stage) -> dict[torch.Tensor, torch.Tensor]:
        """What `of` gives for each of `masters`, which travel together; by way of `stage` where no copy is kept."""
        if self.precision.keeps_copies or not self.precision.is_mixed:
            return {master: self.of(master) for master in masters}
        likes = {master: self.like(master) for master in masters}
        layout = Layout(like for master, like in likes.items() if like is not master)
        memory = stage.memory(self._memory, layout.num_bytes)
        with torch.no_grad(), torch.inference_mode(False):
            return {
                master: master if like is master else layout.view(memory, like).copy_(master)
                for master, like in likes.items()
            }

    @property
    def kept(self) -> list[torch.Tensor]:
        """Those that host memory holds now."""
        return [copy.tensor for copy in list(self._copies.values())]

    @torch.no_grad()
    def renew(self, masters: Iterable[torch.Tensor]) -> None:
        """Make the copies of `masters` anew, whose update has just been made by this thread."""
        with untouched():
            for master in masters:
                copy: _Copy | None = self._copies.get(master)
                if copy is not None and copy.tensor.shape == master.shape:
                    copy.tensor.copy_(master)
                    self._copies[master] = _Copy(copy.tensor, master._version)
