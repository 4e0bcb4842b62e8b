"""What travels to the device in the place of the masters: the masters themselves, or copies of them in 16 bits.

The copies are kept and renewed by every update (2 bytes per parameter of host memory), or made whenever a layer
travels, which the thread that drives the device then waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.pending import Pending, can_hold, hold, let_go, pending_of
from hf_l2l.model.precision import Precision
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import on_meta, untouched


class _Copy(NamedTuple):
    tensor: torch.Tensor
    since: Pending
    """What the master is held for as long as nobody has used its values since the copy was made."""
    version: int
    """Of the master then."""


class _Copied(Pending):
    """A master whose copy is right until somebody uses its values. He might write them, and not every write counts as
    a new version: those of fused optimizers do not, nor those through `.data`."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """Nothing: what is only looked at stays as it is."""

    def before_values(self, tensor: torch.Tensor) -> None:
        let_go(tensor, self)


class Stage:
    """Host memory in which the copies of one layer are made and from which they leave."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self.left: stream.Point | None = None
        """After which it may be written again."""

    def memory(self, host: HostMemory, num_bytes: int) -> torch.Tensor:
        """`num_bytes` bytes (uint8) from which nothing is on its way any more."""
        stream.wait(self.left, wait_reasons.COPIES_READ, host=True)
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
        pending = pending_of(master)
        if pending is not None:
            pending.before_look(master)
        copy: _Copy | None = self._copies.get(master)
        with untouched(), torch.no_grad(), torch.inference_mode(False):
            if not self.precision.keeps_copies:
                return master.to(dtype)
            if copy is not None and copy.tensor.shape != master.shape:
                copy = None  # embeddings are resized
            if copy is not None and copy.since is pending and copy.version == master._version:
                return copy.tensor
            tensor = self._memory.copy_like(master, dtype) if copy is None else copy.tensor
            tensor.copy_(master)
            since = _Copied()
            self._copies[master] = _Copy(tensor, since, master._version)
        if can_hold(master) and (pending is None or isinstance(pending, _Copied)):
            hold(master, since)
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

    def forget(self) -> None:
        """Let all copies be made anew when they are used next: somebody may have written to masters unseen."""
        for master, copy in list(self._copies.items()):
            self._copies[master] = copy._replace(since=Pending())

    def release(self) -> None:
        """Give up all copies."""
        self._copies.clear()

    @torch.no_grad()
    def renew(self, masters: Iterable[torch.Tensor], update: Pending) -> None:
        """Make the copies of `masters` anew, which are held for an `update` that this thread has just made."""
        with untouched():
            for master in masters:
                copy: _Copy | None = self._copies.get(master)
                if copy is not None and copy.tensor.shape == master.shape:
                    copy.tensor.copy_(master)
                    self._copies[master] = _Copy(copy.tensor, update, master._version)

    def let_go(self, master: torch.Tensor, update: Pending) -> None:
        """`update` is over: nothing is pending for `master` any more but that its copy is right."""
        copy: _Copy | None = self._copies.get(master)
        if copy is None or copy.since is not update:
            let_go(master, update)
