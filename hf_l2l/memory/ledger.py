"""The ledger: every byte that training layer to layer holds, on the device and the host, by name."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_l2l.memory.device_memory import OPTIMIZER, DevicesMemory
from hf_l2l.memory.host_limits import process_bytes
from hf_l2l.memory.memory_report import PAGE_LOCKED, Bytes, MemoryReport
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import size_text

MASTERS, GRADIENTS, MOMENTS, COPIES = "masters", "gradients", "moments", "copies"
HOST_STASH, NORMS, TRANSIENTS = "stash", "norm rooms", "optimizer transients"
BEING_SAVED, STATE_WINDOW = "layers being saved", "window of state on disk"
SIMULATED, OTHER = "simulated device", "Python, libraries and other"

HOST_NAMES = (
    MASTERS,
    GRADIENTS,
    MOMENTS,
    COPIES,
    HOST_STASH,
    NORMS,
    TRANSIENTS,
    BEING_SAVED,
    STATE_WINDOW,
    SIMULATED,
    OTHER,
)
"""The names of all host memory, in the order in which they are shown."""


class Transients:
    """Bytes that exist only as long as an update runs; updates run on several threads."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._lock = threading.Lock()

    @contextmanager
    def of_update(self) -> Iterator[Callable[[int], None]]:
        """Count what the update in the block allocates: yields a function that is told its bytes."""
        total = 0

        def allocated(num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            self._add(num_bytes)

        try:
            yield allocated
        finally:
            self._add(-total)

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)


class Ledger:
    """What one engine holds. Its parts register functions that return bytes, which are called for a report."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.device = devices[0]
        self.on_device = DevicesMemory(devices)
        self.transients = Transients()
        self._host_peaks = dict.fromkeys((*HOST_NAMES, PAGE_LOCKED), 0)
        self._host: dict[str, list[weakref.WeakMethod[Callable[[], int]]]] = {name: [] for name in self._host_peaks}
        self._has_stepped = False
        self._last: MemoryReport | None = None
        """The report of the end, once what it counted is released."""

    def counts(self, name: str, count: Callable[[], int]) -> None:
        """The bound method `count` returns bytes of host memory with this name, as long as its object lives. Parts of
        it may be pageable or not present yet."""
        self._host[name].append(weakref.WeakMethod(count))

    def saw(self, name: str, num_bytes: int) -> None:
        """So many bytes of host memory had this name at once."""
        self._host_peaks[name] = max(self._host_peaks[name], num_bytes)

    def look(self) -> None:
        """Take in peaks of the host, if the present call is looked at."""
        if self.on_device.is_looking:
            self._look_at_host()

    def enter_step(self) -> None:
        """`optimizer.step()` begins. All gradients that it will use are there: after it, those that autograd has put
        into `p.grad` on the host are gone. The first step is always looked at, however many calls it has had."""
        self.on_device.enter(OPTIMIZER)
        if self.on_device.is_looking or not self._has_stepped:
            self._look_at_host()
        self._has_stepped = True

    def _look_at_host(self) -> dict[str, int]:
        """Bytes of the host by name now, without what has none."""
        now = {name: sum(count() for each in of if (count := each()) is not None) for name, of in self._host.items()}
        now[TRANSIENTS] = self.transients.now
        now[SIMULATED], self._host_peaks[SIMULATED] = stream.simulated_bytes(self.device)
        self._host_peaks[TRANSIENTS] = self.transients.peak
        for name, size in now.items():
            self._host_peaks[name] = max(self._host_peaks[name], size)
        return now

    def report(self, title: str) -> MemoryReport:
        """The bytes of all names, now and at the peak; after `release`, those of that time."""
        if self._last is not None:
            return self._last
        self.on_device.look()
        devices: dict[str, dict[str, Bytes]] = {}
        for memory in self.on_device.each:
            known = memory.now()
            if known is not None:
                tier = str(memory.device) if devices else "device"
                devices[tier] = {name: {"now": size, "peak": memory.peak[name]} for name, size in known.items()}
        now, peaks = self._look_at_host(), dict(self._host_peaks)
        page_locked: Bytes = {"now": now.pop(PAGE_LOCKED), "peak": peaks.pop(PAGE_LOCKED)}
        for sizes, process in zip((now, peaks), process_bytes(), strict=True):
            sizes[OTHER] = max(0, process - sum(size for name, size in sizes.items() if name != OTHER))
        host: dict[str, Bytes] = {name: {"now": now[name], "peak": peaks[name]} for name in HOST_NAMES}
        before = self.on_device.held_more_before
        note = (
            f"The device held {size_text(before)} before; call torch.accelerator.reset_peak_memory_stats() before "
            "training, so that peaks inside a phase are seen."
        )
        return MemoryReport(title, devices, host, page_locked, note if before else "")

    def release(self, last: MemoryReport) -> None:
        """Keep this report for good: what it counted is about to be released."""
        self._last = last
