"""Memory accounts of the simulated accelerators: blocks, bytes in use, and capacity.

Each storage on "sim" has one `Block` of the same lifetime, so views are counted once, and bytes are freed with the
last tensor over them.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from hf_l2l.testing.sim_race import DEFAULT_LINES, MOST_DEVICES

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Return `size` in bytes; "8GiB" is 8 * 2**30 and "8GB" is 8 * 10**9."""
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match and match[2].upper() in _UNITS:
            count = int(float(match[1]) * _UNITS[match[2].upper()])
    if count <= 0:
        raise ValueError(
            f"capacity must be a positive number of bytes, as an integer or as text such as '8GiB' or '500MB' "
            f"(got {size!r}); leave it out for a device without a limit"
        )
    return count


class MemoryAccount:
    """Live and peak bytes of the device, and the capacity that they must not exceed.

    Storages are freed whenever the garbage collector runs, also inside `take` on the same thread; a free therefore
    takes no lock and only queues its bytes, which are subtracted before the account is read or changed.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.capacity: int | None = None
        self._lock = threading.Lock()
        self._freed: collections.deque[int] = collections.deque()
        self._live = 0
        self._peak = 0

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as live, or raise `torch.OutOfMemoryError` and count nothing."""
        with self._lock:
            self._refuse_past_capacity(nbytes)
            self._live += nbytes
            self._peak = max(self._peak, self._live)

    def refuse_past_capacity(self, nbytes: int) -> None:
        """Raise what `take` would raise, before the host is asked for the memory."""
        with self._lock:
            self._refuse_past_capacity(nbytes)

    def give_back(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        self._freed.append(nbytes)

    def live(self) -> int:
        """Return the bytes held now."""
        with self._lock:
            self._settle()
            return self._live

    def peak(self) -> int:
        """Return the most bytes held at once since `reset_peak`."""
        with self._lock:
            return self._peak

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        with self._lock:
            self._settle()
            self._peak = self._live

    def _refuse_past_capacity(self, nbytes: int) -> None:
        self._settle()
        if self.capacity is not None and self._live + nbytes > self.capacity:
            raise torch.OutOfMemoryError(
                f"the simulated accelerator is out of memory. {nbytes} bytes asked, {self._live} bytes live on "
                f"sim:{self.device}, capacity {self.capacity} bytes; use a smaller batch or model, or enable it with "
                "a larger capacity"
            )

    def _settle(self) -> None:
        while self._freed:
            self._live -= self._freed.popleft()


ACCOUNTS = tuple(MemoryAccount(device) for device in range(MOST_DEVICES))


def storage_at(pointer: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage on `device` over memory that it does not own."""
    return cast(torch.UntypedStorage, torch._C._construct_storage_from_data_pointer(pointer, device, nbytes))


def _give_back_at_once(block: Block) -> None:
    block.account.give_back(block.nbytes)


class Block:
    """The host memory behind one storage on "sim"; its bytes are freed together with that storage.

    `owner` keeps the memory alive; `host` is the same memory as a storage that no operation can resize, so that the
    pointer in the device's storage stays valid.
    """

    __slots__ = ("account", "copies", "device", "history", "host", "nbytes", "on_free", "owner", "recorded", "stream")

    def __init__(self, owner: torch.UntypedStorage, device: int = 0) -> None:
        self.device = device
        self.nbytes = 0  # nothing to give back if `take` refuses
        # Held by the instance, as module globals may go before the last storage does, when the interpreter ends.
        self.on_free: Callable[[Block], None] = _give_back_at_once
        self.account = ACCOUNTS[device]
        self.owner = owner
        self.account.take(owner.nbytes())
        self.nbytes = owner.nbytes()
        self.host: torch.UntypedStorage = self.storage_on(torch.device("cpu"))
        # What streams need to know, see `sim_race` and `sim_copies`.
        self.stream = DEFAULT_LINES[device].id  # the one it was handed out on
        self.history: Any = None
        self.copies: list[Any] = []
        self.recorded: frozenset[int] = frozenset()

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """Return a storage over this memory whose device is `device`."""
        return storage_at(self.owner.data_ptr(), self.nbytes, device)

    def __del__(self) -> None:
        self.on_free(self)
