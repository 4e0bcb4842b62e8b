"""Device abstraction: streams, events, copies and page-locking. No other module asks for the kind of a device.

The host owns the master weights; the execution device gets copies. Where the two share memory (the CPU), an upload is
a view and a download is the tensor itself. Copies that are overlapped with computation run on a `Lane`, a stream of
their own; every wait between a lane and the compute stream goes through `wait`, which takes the reason. Device types
without streams run everything in program order: their lanes and waits do nothing.

If a device has an observer (see `observer`), points carry times, and each wait and each `span` of work is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hf_l2l.runtime.observer import HERE, OBSERVERS
from hf_l2l.runtime.stall_log import StallLog

HOST = torch.device("cpu")


def released(memory: torch.Tensor) -> None:
    """Called when `memory` (uint8) is free to be written again. It does nothing: tests replace it, to overwrite what
    is no longer to be read."""


def device_count(device: torch.device) -> int:
    """How many devices of the type of `device` the program sees."""
    module = device_module(device)
    return 1 if module is None else int(module.device_count())


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the device's memory that no program has, and those that it has in all; None if neither its torch module
    nor torch's interface for any accelerator says."""
    module = device_module(device)
    if module is None:
        return None
    ask = getattr(module, "mem_get_info", None)
    if ask is not None:
        free, total = ask(device)
        return int(free), int(total)
    ask = getattr(torch.accelerator, "get_memory_info", None)  # from torch 2.13 on
    if ask is None:
        return None
    with suppress(RuntimeError, ValueError):  # a device that torch cannot ask
        free, total = ask(device)
        return int(free), int(total)
    return None


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all; None if torch does not know."""
    info = memory_info(device)
    return None if info is None else info[1]


def least_memory(devices: Sequence[torch.device]) -> int | None:
    """`memory_of` the smallest of `devices`, which are of one type."""
    return min((size for each in devices if (size := memory_of(each)) is not None), default=None)


def memory_free(device: torch.device) -> int | None:
    """Bytes of the device's memory that no program uses, and those that the allocator of this one keeps for later use;
    None if torch does not know."""
    info = memory_info(device)
    if info is None:
        return None
    try:
        stats = torch.accelerator.memory_stats(device)
    except (RuntimeError, ValueError):  # an allocator that torch cannot ask
        return None
    reserved, used = (int(stats.get(f"{kind}_bytes.all.current", 0)) for kind in ("reserved", "allocated"))
    return info[0] + max(0, reserved - used)


def empty_cache(device: torch.device) -> None:
    """Give back to the device what its allocator keeps for later use; nothing if it shares the memory of the host, or
    if neither its module nor `torch.accelerator` can."""
    module: Any = device_module(device)
    empty = getattr(module, "empty_cache", None) or getattr(torch.accelerator, "empty_cache", None)
    if module is not None and empty is not None:
        empty()


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """Bytes that the allocator of the device holds now, and the most that it has held since that number was last
    reset; None if the device shares the memory of the host, or its allocator does not count."""
    if device_module(device) is None:
        return None
    try:
        stats = torch.accelerator.memory_stats(device)
    except (RuntimeError, ValueError):  # an allocator that torch cannot ask, or not of its accelerator
        return None
    return int(stats.get("allocated_bytes.all.current", 0)), int(stats.get("allocated_bytes.all.peak", 0))


def simulated_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of host memory that stand for memory and copies of the device, now and at most: those of a simulated one.
    A real device has none."""
    ask = getattr(device_module(device), "simulated_bytes", None)
    return (0, 0) if ask is None else ask()


def runs_host_kernels(device: torch.device) -> bool:
    """Whether kernels of the host compute on `device`, which is the host or a simulated device: the same operations on
    the same values differ in their last bit at most, where their memory is aligned otherwise."""
    return device.type == "cpu" or hasattr(device_module(device), "simulated_bytes")


def shares_host_memory(device: torch.device) -> bool:
    """Whether an upload to `device` is a view of the master instead of a copy."""
    return device.type == "cpu"


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A detached tensor on `device` with the values of the host tensor `tensor`; a view where memory is shared."""
    if shares_host_memory(device):
        return tensor.detach()
    return tensor.detach().to(device, copy=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor with the values of `tensor`; the tensor itself where memory is shared."""
    if shares_host_memory(tensor.device):
        return tensor
    return tensor.to(HOST, copy=True)


@cache
def device_module(device: torch.device) -> ModuleType | None:
    """The torch module of a device type (`torch.cuda`, ...), None for the host."""
    if device.type == "cpu":
        return None
    module: ModuleType = torch.get_device_module(device)
    return module


def _streams(device: torch.device) -> Any:
    """What has the streams of a device: its torch module, as `torch.cuda`, or torch's interface for any accelerator.
    None for a device without streams."""
    return None if device.type == "cpu" else _with_streams(device_module(device), device)


@cache
def _with_streams(module: ModuleType | None, device: torch.device) -> Any:
    if all(hasattr(module, name) for name in ("Stream", "Event", "stream")):
        return module
    found = _AnyAccelerator(device.type)
    return found if found.has_streams(device) else None


class _AnyAccelerator:
    """Streams and events by torch's interface for any accelerator, with the names that the modules of devices have."""

    def __init__(self, kind: str) -> None:
        """`kind` is the type of the devices."""
        self._kind = kind

    def Stream(self, *, device: torch.device, priority: int = 0) -> torch.Stream:
        """A new stream; a lower number is a higher priority."""
        return torch.Stream(device=device, priority=priority)

    def Event(self, *, enable_timing: bool = False) -> torch.Event:
        """A new event."""
        return torch.Event(self._kind, enable_timing=enable_timing)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The current stream of the device."""
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Make `stream` the current one in the block."""
        return stream

    def has_streams(self, device: torch.device) -> bool:
        """Whether the device has streams and events. Where its backend says nothing of them, torch returns one stream,
        however many are asked for, and events raise."""
        with suppress(RuntimeError, NotImplementedError):
            made, event = self.Stream(device=device), self.Event()
            if made == self.current_stream(device):
                return False
            with self.stream(made):
                event.record(self.current_stream(device))
            event.synchronize()
            return event.query()
        return False


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host continues while the device works."""
    return _streams(device) is not None


class Point(NamedTuple):
    """A point in the work of a stream that another stream or the host can wait for."""

    event: Any
    module: Any
    """What has the streams of the device."""
    device: torch.device
    row: str = "compute"
    """Kind of the stream's work: "compute", or what `Lane.entered` was given."""
    is_timed: bool = False


def span(device: torch.device, row: str, of: object) -> AbstractContextManager[None]:
    """In the block, the current stream gets copies ("upload", "download") or a "norm" of `of`: a module, `Rows` of the
    stash, or a name."""
    observer = OBSERVERS.get(device)
    if observer is None or shares_host_memory(device):
        return nullcontext()
    return observer.span(row, of, exposed=HERE.on_compute_stream)


def record(device: torch.device) -> Point | None:
    """The end of the work that the current stream of `device` has been given; None on a device without streams."""
    module = _streams(device)
    if module is None:
        return None
    timed = OBSERVERS.get(device) is not None
    # Threads of the host that wait for CUDA events sleep: by default they would spin, each on a core.
    options = {"blocking": True} if device.type == "cuda" else {}
    event = module.Event(enable_timing=True, **options) if timed else module.Event(**options)
    event.record(module.current_stream(device))
    return Point(event, module, device, HERE.row, timed)


def current(device: torch.device) -> Any:
    """The current stream of `device`; None on a device without streams."""
    module = _streams(device)
    return None if module is None else module.current_stream(device)


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one in the block, with the stream that the program has there."""
    return entered(device, current(device))


def entered(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Make `stream`, a result of `current`, the current stream in the block."""
    module = _streams(device)
    return nullcontext() if module is None else module.stream(stream)


def is_reached(point: Point) -> bool:
    """Whether the device has passed `point`. This does not wait; it raises errors of the device."""
    return bool(point.event.query())


def wait(point: Point | None, why: str, *, host: bool = False, on: torch.device | None = None) -> None:
    """Make later work of the current stream of `on` (None: the device of `point`) wait for `point`; `why` is one of
    the `wait_reasons`.

    With `host`, the host itself waits. Nothing else in the package waits for the device.
    """
    assert why, "every wait has a reason"
    if point is None:
        return
    observer = OBSERVERS.get(on or point.device)
    if observer is not None and HERE.on_compute_stream and not HERE.is_aside:  # a lane that waits delays nothing
        observer.waits(point, why)
    if not host:
        point.event.wait(point.module.current_stream(on or point.device))
        return
    where = f"waiting for the device, {{seconds}} so far: {why}"
    with nullcontext() if is_reached(point) else StallLog().inside(where):
        point.event.synchronize()
    if observer is not None:
        observer.host_reached(point)


COMPUTE = "compute"
"""The kind of work of a compute stream."""


class Lane:
    """A stream beside the program's: for copies that are overlapped with computation, or, of the kind "compute", for
    what one of several devices computes."""

    def __init__(self, device: torch.device, row: str, *, beside: bool = True, runs_kernels: bool = False) -> None:
        """For copies of the kind `row`. With `beside` False, the lane is the compute stream itself, in which nothing
        overlaps. With `runs_kernels`, its kernels, which are short, go before those of the compute stream: behind
        them, they and the copies after them would queue."""
        self.device = device
        self.row = row
        self._module = _streams(device)
        self._stream = None
        if beside and self._module is not None:
            self._stream = self._module.Stream(device=device, priority=-1 if runs_kernels else 0)
        self.is_stream = self._module is not None
        """Whether anything can wait for it. If not, copies must not be asynchronous."""

    @contextmanager
    def entered(self, row: str | None = None) -> Iterator[None]:
        """Work submitted in the block runs on this lane, and is of the kind `row` (None: the lane's own)."""
        before = HERE.row, HERE.on_compute_stream
        HERE.row = row or self.row
        HERE.on_compute_stream = self._stream is None or self.row == COMPUTE
        try:
            if self._module is None or self._stream is None:
                yield
            else:
                with self._module.stream(self._stream):
                    yield
        finally:
            HERE.row, HERE.on_compute_stream = before

    def record(self) -> Point | None:
        """The end of the work that the lane has been given."""
        with self.entered():
            return record(self.device)


class PeerLane:
    """Streams of two devices, beside those that compute, for copies from the first device to the second."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self._lanes = Lane(source, PEER), Lane(target, PEER)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Copies from `source` to `target` that are submitted in the block run on this lane.

        torch copies on the current stream of the source, after what the current stream of the target has been given,
        and makes that wait for the copy. So `record(target)` is a point after the copy.
        """
        with self._lanes[0].entered(), self._lanes[1].entered():
            yield


PEER = "peer"
"""The kind of work of a `PeerLane`."""


def copies_directly(source: torch.device, target: torch.device) -> bool:
    """Whether memory of `source` can be copied to `target` without passing through the host, as the devices say."""
    ask = getattr(device_module(source), "can_device_access_peer", None)
    return ask is not None and bool(ask(target.index, source.index))


def arrives_as_sent(source: torch.device, target: torch.device) -> bool:
    """Whether a copy from `source` has arrived at `target` as it was. On some machines an IOMMU lets devices copy
    directly, and other bytes arrive."""
    with torch.inference_mode(False):
        sent = torch.arange(1024, dtype=torch.int32, device=source)
        return torch.equal(sent.to(target).to(HOST), sent.to(HOST))


def keep_until_done(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Delay the reuse of the memory of `tensors`, once freed, until the current stream has done its work of that time.

    For memory that was allocated in another stream: the allocator does not know of its use in this one.
    """
    module = _streams(device)
    if module is not None:
        current = module.current_stream(device)
        for tensor in tensors:
            if tensor.layout is torch.strided:  # the others are copied synchronously
                tensor.record_stream(current)


def can_page_lock(device: torch.device) -> bool:
    """Whether host memory can be page-locked (pinned) for the device, which then copies it asynchronously."""
    return _streams(device) is not None and hasattr(device_module(device), "cudart")


_REFUSALS: dict[torch.device, int] = {}


def last_refusal(device: torch.device) -> int | None:
    """The error code with which the device last refused to page-lock memory; None if it never did."""
    return _REFUSALS.get(device)


def forget_refusal(device: torch.device) -> None:
    """Forget that the device has refused: memory has been unlocked since, or the limit was raised."""
    _REFUSALS.pop(device, None)


_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices of the process, several of which may copy the same memory."""


def page_lock(address: int, num_bytes: int, device: torch.device) -> bool:
    """Page-lock host memory for the device; False if the device refuses."""
    module = device_module(device)
    assert module is not None and num_bytes > 0, "can_page_lock must be true"
    with module.device(device):  # else a context would be created, and take memory, on the current device
        code = int(module.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if code != 0:
            _REFUSALS[device] = code
            _clear_last_error(device)
    return code == 0


def page_unlock(address: int, device: torch.device) -> None:
    """Undo `page_lock`."""
    module = device_module(device)
    assert module is not None, "the host itself page-locks nothing"
    with module.device(device):
        if int(module.cudart().cudaHostUnregister(address)) != 0:
            _clear_last_error(device)


def _clear_last_error(device: torch.device) -> None:
    """Clear the error of a call that has failed: it stays this thread's last error, which the next kernel launch would
    report. So this launches one; `device` must be the current device."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
