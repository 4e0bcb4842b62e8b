"""Upload sources: the fp32 masters themselves, or their 16-bit copies (CMP).

The copies are kept and renewed by every update (2 bytes per parameter of host memory), or made at each upload of a
layer, for which the thread that drives the device then waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.eps.masters import Master, Masters, MasterUnit, Reads
from hf_l2l.eps.pending import Update, can_hold, hold, hold_all
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import Layout
from hf_l2l.runtime.tensors import tensor_bytes


class Stage:
    """Host memory for the copies of one layer, which are made there and uploaded from there."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self.left: stream.Point | None = None
        """The point after which the memory may be written again."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it has now."""
        return 0 if self._memory is None else self._memory.numel()

    def memory(self, host: HostMemory, num_bytes: int) -> torch.Tensor:
        """`num_bytes` bytes (uint8, one dimension); waits until uploads from them have finished."""
        stream.wait(self.left, wait_reasons.COPIES_READ, host=True)
        if self._memory is None or self._memory.numel() < num_bytes:
            size = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            self._memory = host.new_rooms(1, num_bytes, "copies of weights")[0].tensor_like(size)
        return self._memory[:num_bytes]


class Sources(NamedTuple):
    """What is uploaded of one unit."""

    tensors: list[torch.Tensor]
    """Per part of the unit's parameters, a host tensor with its values in the dtype of the device."""
    flat: torch.Tensor | None
    """All of them in one host tensor (uint8, one dimension), in the unit's layout; None if they lie apart."""


class Uses(Protocol):
    """Brings masters to host memory."""

    def use_unit(self, unit: MasterUnit) -> None:
        """All of `unit` are about to be read."""

    def use_one(self, master: Master) -> None:
        """One in no layer is about to be read."""


class Copies:
    """The 16-bit copies of masters, with the bits of `master.to(dtype)`; if kept, they are made once per update."""

    def __init__(self, masters: Masters, memory: HostMemory) -> None:
        self.precision = masters.precision
        self._masters = masters
        self._memory = memory
        self.uses: Uses | None = None
        """Told of masters that are about to be read: they may be on disk."""
        self._reads = Reads()
        # Their memory may be freed with this object; at the end of the process, or of a forked one, nobody waits.
        weakref.finalize(self, self._reads.wait).atexit = False

    def of_unit(self, unit: MasterUnit, stage: Stage | None = None) -> Sources:
        """What is uploaded of `unit`; waits for updates.

        Args:
            unit: the layer, or non-layer modules, to be uploaded.
            stage: the memory for copies if none are kept; without it they are new tensors.
        """
        unit.wait()
        uses = self._uses()
        # With copies, too, what has the device's dtype already, as a frozen base in 16 bits, is read itself.
        if self.uses is not None and (uses is not None or any(map(_travels_itself, unit.parts, unit.dtypes))):
            self.uses.use_unit(unit)
        # What is on disk cannot be page-locked: it travels through memory that is.
        if not self.precision.is_mixed and (stage is None or uses is None):
            with without_interception():
                return self._together(unit, list(unit.parts))
        # no_grad last: leaving inference mode turns gradients on, and a copy with a graph would keep its master alive.
        with without_interception(), torch.inference_mode(False), torch.no_grad():
            if uses is not None or not self.precision.keeps_copies:
                return self._made(unit, stage, self._memory, whole=uses is not None)
            sources: list[torch.Tensor] = []
            for part, owner, dtype in zip(unit.parts, unit.owners, unit.dtypes, strict=True):
                sources.append(part if dtype == part.dtype else self._current(unit.masters[owner], dtype))
            return self._together(unit, sources)

    def of_one(self, unit: MasterUnit, number: int) -> torch.Tensor:
        """One part of `unit` where it is, in the dtype of the device; waits for the update of its parameter."""
        master, part, dtype = unit.masters[unit.owners[number]], unit.parts[number], unit.dtypes[number]
        master.wait()
        uses = self._uses() or (self.uses if dtype == part.dtype else None)
        if uses is not None:
            uses.use_one(master)
        if dtype == part.dtype:
            return part
        with without_interception(), torch.inference_mode(False), torch.no_grad():
            return self._current(master, dtype) if self.precision.keeps_copies else part.to(dtype)

    def being_updated(self, unit: MasterUnit, number: int) -> tuple[torch.Tensor, Update] | None:
        """A part of `unit` that is a whole master, where it is in the dtype of the device, and its update, which makes
        it piece by piece; None if it has to be taken as a whole (`of_one`)."""
        master, dtype = unit.masters[unit.owners[number]], unit.dtypes[number]
        update = master.update
        if update is None or not update.pieces or update.task.done or self.uses is not None:
            return None
        source = master.parameter if dtype == master.dtype else master.copy
        if source is None or source.dtype != dtype or source.shape != master.parameter.shape:
            return None
        return source, update

    def _uses(self) -> Uses | None:
        """What is told of masters that are read; none if their copies are read instead."""
        return None if self.precision.is_mixed and self.precision.keeps_copies else self.uses

    def _current(self, master: Master, dtype: torch.dtype) -> torch.Tensor:
        """The kept copy of a master for which no update is under way; it is renewed if that is needed.

        Of a resident master it is made by the device, each time.
        """
        if master.is_resident:
            return master.parameter.to(dtype)
        copy = master.copy
        if copy is None or not master.copy_is_right or master.copy_version != master.parameter._version:
            copy = self._renewed(master, dtype)
        return copy

    @staticmethod
    def _together(unit: MasterUnit, sources: list[torch.Tensor]) -> Sources:
        block = unit.upload_block
        # A program may have given a parameter other memory.
        if block is None or [source.data_ptr() for source in sources] != block.addresses:
            return Sources(sources, None)
        return Sources(sources, block.flat)

    @staticmethod
    def _made(unit: MasterUnit, stage: Stage | None, host: HostMemory, *, whole: bool) -> Sources:
        if stage is None:
            return Sources([part.to(dtype) for part, dtype in zip(unit.parts, unit.dtypes, strict=True)], None)
        short = [number for number, part in enumerate(unit.parts) if whole or unit.dtypes[number] != part.dtype]
        is_whole = len(short) == len(unit.parts)
        layout = unit.layout if is_whole else Layout(unit.likes[number] for number in short)
        flat, sources = stage.memory(host, layout.num_bytes), list(unit.parts)
        for number, view in zip(short, layout.views(flat), strict=True):
            sources[number] = view.copy_(sources[number])
        return Sources(sources, flat if is_whole else None)

    def _renewed(self, master: Master, dtype: torch.dtype) -> torch.Tensor:
        """Renew the copy of a master for which no update is under way; the master is held for it."""
        p = master.parameter
        master.wait_until_read()
        if master.copy is None or master.copy.shape != p.shape:  # such as resized embeddings
            master.copy = self._memory.copy_like(master, dtype)
        master.copy.copy_(p)
        master.copy_version, master.copy_is_right = p._version, can_hold(p)
        if master.copy_is_right:
            hold(p, master)
        return master.copy

    def leave_reading(
        self, masters: Sequence[Master], end: stream.Point | None, sources: Sequence[torch.Tensor]
    ) -> None:
        """A forward is over; uploads of `masters`, which read `sources`, go on until `end`. Only those who write to
        these masters must wait for it: by `wait_for_reads`; if it is the program, by its use of a held master."""
        if end is None or stream.is_reached(end):
            return
        there = [master for master in masters if not master.is_resident]
        if not all([master.can_be_held for master in there]):
            stream.wait(end, wait_reasons.MASTERS_READ, host=True)
            return
        with without_interception():
            self._reads.ends.append((end, [source.untyped_storage() for source in sources]))
        for master in there:
            master.wait()  # an update that has made its pieces lets go of the master at its end
            master.reads = self._reads
        hold_all([(master.parameter, master) for master in there])

    def wait_for_reads(self) -> None:
        """Wait for the uploads that forwards have not waited for."""
        self._reads.wait()

    @staticmethod
    def stay(masters: Iterable[Master]) -> None:
        """The values of `masters` are being uploaded to memory that keeps them: hold the masters until they are used,
        which may be a write. One that cannot be held is uploaded in every forward."""
        there = [master for master in masters if master.can_be_held]
        for master in there:
            master.is_there = True
        hold_all([(master.parameter, master) for master in there])

    def keep_on_device(self, master: Master, leaf: torch.Tensor) -> None:
        """The values of a master in no layer are being uploaded to `leaf`, which stays (see `on_device`)."""
        self.stay([master])
        with without_interception(), torch.no_grad():
            master.device_copy = leaf.detach(), master.uses, master.parameter._version

    def on_device(self, unit: MasterUnit, number: int, *, kept: bool) -> torch.Tensor | None:
        """One part of `unit`, if it need not be uploaded: of a resident master, or, if copies are `kept`, one that is
        there with the current values."""
        master = unit.masters[unit.owners[number]]
        if master.is_resident:
            return self.of_one(unit, number)  # a view, or made in 16 bits by the device
        copy = master.device_copy
        with without_interception():
            if kept and copy is not None and master.is_there and copy[1:] == (master.uses, master.parameter._version):
                return copy[0]
        master.device_copy = None  # so that the device does not hold two
        return None

    def host_bytes(self) -> int:
        """Bytes of the copies that are kept."""
        return tensor_bytes(self.kept)

    @property
    def kept(self) -> list[torch.Tensor]:
        """The copies in host memory now."""
        return [master.copy for master in self._masters.all() if master.copy is not None]

    def forget(self) -> None:
        """Renew all copies at their next use: masters may have been written in a way that was not detected."""
        for master in self._masters.all():
            master.copy_is_right = False
            master.is_changing()

    @staticmethod
    @torch.no_grad()
    def renew_rows(master: Master, rows: slice) -> None:
        """Renew rows of the copy of a master, which is right when all have been."""
        with without_interception():
            if master.copy is not None:
                master.copy[rows].copy_(master.parameter[rows])

    def dtype_of(self, master: Master) -> torch.dtype | None:
        """The dtype of the copy that is kept of a master; None if none is."""
        dtype = self.precision.of(master.parameter)
        return dtype if self.precision.keeps_copies and dtype != master.dtype else None

    @torch.no_grad()
    def renew(self, masters: Iterable[Master], written: Container[torch.Tensor] = ()) -> None:
        """Renew the copies of `masters`, which are held for the update that this thread has just made; those of the
        parameters in `written` have the new values."""
        with without_interception():
            for master in masters:
                p, copy = master.parameter, master.copy
                if copy is not None and copy.shape == p.shape:
                    if p not in written:
                        copy.copy_(p)
                    master.copy_version, master.copy_is_right = p._version, True


def _travels_itself(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a part of a master has the dtype in which it travels, so that no copy is made of it."""
    return part.dtype == dtype
