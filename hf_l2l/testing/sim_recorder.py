"""Records the work of the streams, events and copies of "sim" for the virtual clock while it runs; see `sim_clock`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from hf_l2l.testing.sim_pages import is_page_locked
from hf_l2l.testing.sim_race import LOCK, ORDER, Line
from hf_l2l.testing.sim_schedule import START, Schedule


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Speeds of the machine that the virtual clock simulates; `math.inf` makes a kind of work free.

    Raises:
        ValueError: a rate is not positive.
    """

    link_bytes_per_s: float
    """Link between host and device, in each direction."""
    flop_per_s: float
    """Rate of kernels on the device."""
    host_bytes_per_s: float
    """Bandwidth of host memory, for reads and writes together."""
    peer_bytes_per_s: float = math.inf
    """What a device sends to others."""
    disk_bytes_per_s: float = math.inf
    """Rate of the disk for state, for reads and writes together."""
    launch_s: float = 0.0
    """Seconds for which the host is busy with each kernel and copy that it launches."""

    def __post_init__(self) -> None:
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"launch_s must be a number of seconds (got {self.launch_s}); 0 makes launches free")
        for field in fields(self):
            rate = getattr(self, field.name)
            if field.name != "launch_s" and not rate > 0:
                raise ValueError(
                    f"{field.name} must be positive (got {rate}); give the rate per second that the machine reaches, "
                    f"or math.inf for work that takes no time"
                )


@dataclass(frozen=True, eq=False)
class Moment:
    """A point in virtual time, to be passed from thread to thread like a future."""

    recorder: Recorder
    node: int

    @property
    def seconds(self) -> float:
        """Virtual seconds since the clock was started."""
        with LOCK:
            return self.recorder.schedule.end_of(self.node)


class HostTime:
    """The host's time: one for all threads, except those that were given their own."""

    def __init__(self, name: str, node: int) -> None:
        self.name = name
        self.node = node


class Recorder:
    """Adds issued work to a schedule: after earlier work of its stream, the waits of that stream, and the host."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.schedule = Schedule()
        self._tails: dict[int, int] = {}  # by stream, what its next operation comes after
        self._shared = HostTime("host", START)
        self._of_thread = threading.local()

    @property
    def host(self) -> HostTime:
        """The host's time for the calling thread."""
        own: HostTime | None = getattr(self._of_thread, "host", None)
        return self._shared if own is None else own

    @contextlib.contextmanager
    def own_time(self, name: str, since: Moment) -> Iterator[None]:
        """Give this thread a time of its own, from `since` on."""
        before = getattr(self._of_thread, "host", None)
        self._of_thread.host = HostTime(name, since.node)
        try:
            yield
        finally:
            self._of_thread.host = before

    def kernel(self, line: Line, name: str, flops: int) -> None:
        """Issue a kernel."""
        self._issue(line, "compute", name, flops / self.costs.flop_per_s)

    def copy(self, line: Line, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """Issue a copy between host and device; the host waits unless it is non-blocking, with page-locked memory. Or
        between two devices, for which it never waits."""
        # What travels has the target's type and is not a view that repeats elements, as with CUDA.
        num_bytes = target.numel() * target.element_size()
        if "cpu" not in (source.device.type, target.device.type):
            self._issue(line, "peer", "aten::copy_", num_bytes / self.costs.peer_bytes_per_s)
            return
        lane, host = ("upload", source) if source.device.type == "cpu" else ("download", target)
        self._issue(line, lane, "aten::copy_", num_bytes / self.costs.link_bytes_per_s)
        if not (non_blocking and is_page_locked(host)):
            self.host_waits_for(line)

    def mark(self, line: Line) -> Moment:
        """Return the end of all work issued to `line` so far, which is not before now."""
        with LOCK:
            node = self._tails[line.id] = self.schedule.join(self._tail(line), self.host.node)
            return Moment(self, node)

    def line_waits(self, line: Line, moment: Moment | None) -> None:
        """Order all that is issued to `line` from now on after `moment`; None, or one of another clock, has passed."""
        if moment is not None and moment.recorder is self:
            with LOCK:
                self._tails[line.id] = self.schedule.join(self._tail(line), moment.node)

    def host_waits(self, moment: Moment | None) -> None:
        """Make the host wait for `moment`; None, or one of another clock, has passed."""
        if moment is not None and moment.recorder is self:
            self._move_host(moment.node)

    def host_waits_for(self, line: Line) -> None:
        """Make the host wait for all work issued to `line` so far."""
        self._move_host(self._tail(line))

    def host_waits_for_device(self, index: int) -> None:
        """Make the host wait for all streams of a device."""
        for line, node in list(self._tails.items()):
            if ORDER.devices[line] == index:
                self._move_host(node)

    def host_work(self, name: str, seconds: float) -> None:
        """Keep the host busy."""
        with LOCK:
            host = self.host
            if seconds > 0:
                after, rank = (host.node, host.node), (0, host.name)
                host.node = self.schedule.add(
                    *after, seconds=seconds, lane="host", name=name, stream=host.name, rank=rank
                )

    def disk_work(self, name: str, num_bytes: int) -> Moment:
        """Keep the disk busy, from now on; returns the end, for which nobody waits yet."""
        with LOCK:
            node, seconds = self.host.node, num_bytes / self.costs.disk_bytes_per_s
            if seconds > 0:
                rank = (0, self.host.name)
                node = self.schedule.add(
                    *(node, node), seconds=seconds, lane="disk", name=name, stream=self.host.name, rank=rank
                )
            return Moment(self, node)

    def _issue(self, line: Line, lane: str, name: str, seconds: float) -> None:
        with LOCK:
            if self.costs.launch_s:
                host = self.host
                host.node = self.schedule.add(
                    *(host.node, host.node),
                    seconds=self.costs.launch_s,
                    lane="launch",
                    name=name,
                    stream=host.name,
                    rank=(0, host.name),
                )
            after = self._tail(line), self.host.node
            if seconds > 0:
                rank = (line.id, "")
                node = self.schedule.add(
                    *after,
                    seconds=seconds,
                    lane=lane,
                    name=name,
                    stream=line.name,
                    rank=rank,
                    device=line.device,
                )
            else:
                node = self.schedule.join(*after)
            self._tails[line.id] = node

    def _move_host(self, node: int) -> None:
        with LOCK:
            self.host.node = self.schedule.join(self.host.node, node)

    def _tail(self, line: Line) -> int:
        return self._tails.get(line.id, START)


class Running:
    """The recorder of the running clock; None if none runs, so that operations cost one check then."""

    recorder: Recorder | None = None
