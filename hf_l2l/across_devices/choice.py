"""Where the ranks of a host add their gradients: in host memory, or on their devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from hf_l2l.across_devices.sums import DeviceSums, Gradients, cuts
from hf_l2l.log import tell
from hf_l2l.option_names import option
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import ALIGNMENT
from hf_l2l.runtime.tensors import size_text

_MOST_TRIED = 64 * 2**20  # bytes of gradients of each rank; enough that what a call takes does not count
_TRIES = 3
"""The fastest counts: the first ones also make connections and allocate memory."""


class Reduction:
    """Where gradients are added, as asked for (`L2LConfig.reduce`)."""

    def __init__(self, asked: str, team: Team, devices: Sequence[torch.device]) -> None:
        """All ranks call this, with the devices of each.

        Raises:
            ValueError: if "device" is asked for, and the devices cannot add.
        """
        self._asked, self._team, self._device = asked, team, devices[0]
        self._sums: DeviceSums | None = None
        self._is_chosen = asked == "host"
        if asked == "host":
            return
        found = team.tell(f"{_why_not(team, devices) or ''}\n{_identity(devices[0], team.rank)}", "where to add")
        reasons, devices_of = zip(*(each.split("\n") for each in found), strict=True)
        why_not = next(filter(None, reasons), None)
        if why_not is None and len(set(devices_of)) < len(devices_of):
            why_not = "ranks that have the same device"
        if why_not is None:
            return
        if asked == "device":
            raise ValueError(
                f"{option('reduce')}='device' adds gradients on the devices of the ranks of one host, one device for "
                f"each rank, with a backend of torch.distributed for them (got {why_not}); use {option('reduce')}="
                "'host', or 'auto'"
            )
        self._is_chosen = True

    def sums(self, num_bytes: int) -> DeviceSums | None:
        """What adds up to so many bytes of gradients of each rank on the devices; None if they are added on the host.
        All ranks call this. The first call of "auto" measures both."""
        if not self._is_chosen:
            self._is_chosen = True
            self._sums = DeviceSums(self._team, self._device)
            if self._asked == "auto":
                self._choose(self._sums, max(ALIGNMENT, min(num_bytes, _MOST_TRIED) // ALIGNMENT * ALIGNMENT))
        return self._sums

    def _choose(self, sums: DeviceSums, num_bytes: int) -> None:
        on_device, on_host = tried(self._team, sums, num_bytes)
        if on_device >= on_host:
            sums.close()
            self._sums = None
        if self._team.rank == 0:
            tell(
                "Ranks add gradients %s: %s of each take %.3g ms on the devices and %.3g ms on the host (%s).",
                "on the host" if self._sums is None else "on the devices",
                size_text(num_bytes),
                1000 * on_device,
                1000 * on_host,
                option("reduce"),
            )

    def close(self) -> None:
        """Give back what the devices use for it."""
        if self._sums is not None:
            self._sums.close()


def _why_not(team: Team, devices: Sequence[torch.device]) -> str | None:
    """What keeps the devices of this rank from adding gradients; None if they can add them."""
    if len(team.hosts) > 1:
        return "ranks on several hosts"
    if len(devices) > 1:
        return f"{len(devices)} devices of a rank"
    try:
        backend = distributed.get_default_backend_for_device(devices[0])
    except ValueError:
        return f"{devices[0].type}, for which torch.distributed knows no backend"
    if not distributed.is_backend_available(backend):
        return f"a torch without {backend}"
    return "ranks that compute on the host" if stream.shares_host_memory(devices[0]) else None


def _identity(device: torch.device, rank: int) -> str:
    """What tells the device from those of other ranks, whichever of them a rank sees."""
    properties = getattr(stream.device_module(device), "get_device_properties", None)
    found = getattr(properties(device), "uuid", None) if properties is not None else None
    return f"rank {rank}" if found is None else str(found)


def tried(team: Team, sums: DeviceSums, num_bytes: int) -> tuple[float, float]:
    """Seconds of the slowest rank to add so many bytes of gradients of each: on the devices, and on the host. All
    ranks call this."""
    device, near = sums.device, team.near
    pages = team.share(num_bytes * (1 + len(near)), "a trial of sums")
    is_locked = stream.can_page_lock(device) and pages.lock(device)
    total = pages.bytes_at(0, num_bytes).view(torch.float32)
    slots = [pages.bytes_at(num_bytes * (1 + place), num_bytes) for place in range(len(near))]
    given = torch.ones(num_bytes // 4, dtype=torch.float32, device=device).view(torch.uint8)
    start, stop = (each // 4 for each in cuts(num_bytes, len(near))[team.place :][:2])

    def on_devices() -> None:
        sums.add(given, stream.record(device), [Gradients(total, 0, torch.float32, near, False)], "a trial")

    def on_host() -> None:
        slots[team.place].copy_(given, non_blocking=is_locked)
        stream.wait(stream.record(device), wait_reasons.PROBE_COPIED, host=True)
        team.barrier("a trial of sums")
        to, (first, *others) = total[start:stop], [slot.view(torch.float32)[start:stop] for slot in slots]
        to.copy_(first)
        for other in others:
            to.add_(other)

    try:
        return _slowest(team, on_devices), _slowest(team, on_host)
    finally:
        pages.unlock()


def _slowest(team: Team, function: Callable[[], None]) -> float:
    """Seconds that a function takes in the slowest rank, the fastest of a few times."""
    found = []
    for _ in range(_TRIES):
        team.barrier("a trial of sums")
        start = time.perf_counter()
        function()
        team.barrier("a trial of sums")
        found.append(time.perf_counter() - start)
    return max(map(float, team.tell(repr(min(found)), "how long a trial of sums takes")))
