"""`Tiers`: where the stash keeps what it is given, and the memory for it in the host and on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hf_l2l.config import L2LConfig
from hf_l2l.eps.host_memory import HostMemory
from hf_l2l.log import tell
from hf_l2l.memory.host_limits import available_host_bytes
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.runtime.tensors import size_text, tensor_bytes
from hf_l2l.stash.rooms import RoomPool
from hf_l2l.stash.spill import SpillFile, can_spill

Tier = Literal["device", "host", "disk"]

SHARE = 8
"""With "auto", the stash, or what passes between layers, may take one part in so many of the device's memory."""
_OF_HOST = 3 / 4
"""With "auto", the part of the host memory that is left over, which the stash may take."""


def spill_file(config: L2LConfig, device: torch.device, layers: int) -> SpillFile | None:
    """The file for a stash of so many layers, which is not written yet; None if such a stash never goes to disk."""
    may = config.stash == "auto" and can_spill() and not stream.shares_host_memory(device)
    return SpillFile(config.spill_dir, layers) if may or config.stash == "disk" else None


class Tiers:
    """The kinds of memory that a stash may be in: the device, host memory, a file on disk.

    With `stash="auto"` each forward takes the first one that its layer inputs fit, judged by the first of them.
    """

    def __init__(
        self,
        config: L2LConfig,
        devices: Sequence[torch.device],
        memory: HostMemory,
        *,
        layers: int,
        bytes_to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        """For a model of so many layers, which run on `devices` in turn; `bytes_to_come` tells how much host memory
        the next step will still take."""
        device = devices[0]
        self._place = config.stash
        self._may_be_device = config.boundary != "host"
        self._device, self._devices = device, devices
        self._memory = memory
        self._layers = layers
        self._bytes_to_come = bytes_to_come
        self.leave_device = config.stash != "device"
        """Whether anything is kept elsewhere than on the device."""
        self.file = spill_file(config, device, layers)
        self._host = RoomPool(self._new_host_rooms, layers)
        self._disk = None if self.file is None else RoomPool(self.file.new_rooms, layers)
        self._chosen: Tier | None = None
        """With "auto", the tier of this forward."""
        self._logged: Tier | None = None

    def _new_host_rooms(self, count: int, num_bytes: int) -> list[Room]:
        rooms = self._memory.new_rooms(count, num_bytes)
        self._memory.warn_once()
        return rooms

    def _pools(self) -> list[RoomPool]:
        return [self._host] if self._disk is None else [self._host, self._disk]

    def host_bytes(self) -> int:
        """Bytes of the rooms in host memory, in use or free; what passes between layers there is among them."""
        return self._host.bytes_for(0)

    def start_forward(self) -> None:
        """Begin to choose anew, and free the smallest of the surplus rooms."""
        self._chosen = None
        for pool in self._pools():
            pool.drop_surplus()

    def settle(self) -> None:
        """Note how many rooms are in use."""
        for pool in self._pools():
            pool.settle()

    def release(self) -> None:
        """Remove the file. Tensors in it stay as they are."""
        if self.file is not None:
            self.file.release()

    @property
    def is_on_disk(self) -> bool:
        """Whether this forward keeps its layer inputs on disk, as far as that is known."""
        return self._place == "disk" or self._chosen == "disk"

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Where layer inputs like `tensor`, one with all rows, are kept; the first call in a forward chooses."""
        if self._place == "disk":
            return "disk"
        if stream.shares_host_memory(self._device):
            return "device"  # which is the host
        if self._place != "auto":
            return self._place
        if self._chosen is None:
            self._chosen = self._choice(tensor_bytes([tensor]))
        return self._chosen

    def _choice(self, num_bytes: int) -> Tier:
        """The tier for a layer input of so many bytes per layer."""
        needed, count = self._layers * num_bytes, len(self._devices)
        of_one = -(-self._layers // count) * num_bytes  # a device keeps the inputs of its own layers
        of_device = stream.least_memory(self._devices)
        chosen: Tier
        if self._may_be_device and of_device is not None and of_one * SHARE <= of_device:
            chosen = "device"
            whose = f"of {self._device}" if count == 1 else f"of each of {count} devices for those of its own layers"
            why = f"at most one part in {SHARE} of the {size_text(of_device)} {whose}"
        else:
            left = available_host_bytes() + self._host.bytes_for(num_bytes) - self._bytes_to_come()
            may_take = max(0, int(left * _OF_HOST))
            fits = needed <= may_take
            chosen = "host" if fits or self.file is None else "disk"
            why = f"{'at most' if fits else 'more than'} the {size_text(may_take)} of host memory that it may take"
        if chosen != self._logged:
            self._logged = chosen
            tell(
                "stash='auto': the inputs of %d layers take %s, %s; they are kept %s",
                self._layers,
                size_text(needed),
                why,
                {"device": "on the device", "host": "in host memory", "disk": "on disk"}[chosen],
            )
        return chosen

    def tensor_like(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor in host memory, or in the file, with the dtype, shape and strides of `like`."""
        on_disk = self.tier_of(like) == "disk"
        pool = self._disk if on_disk and self._disk is not None else self._host
        if pool is self._host and not stream.is_asynchronous(self._device):
            return torch.empty_like(like, device=stream.HOST)
        return pool.take(tensor_bytes([like])).tensor_like(like)

    def read_ahead(self, kept: Callable[[], list[torch.Tensor]]) -> None:
        """Ask the system to begin to read those tensors of `kept()` that are on disk."""
        if self.file is not None:
            for rows in kept():
                self.file.read_ahead(rows)
