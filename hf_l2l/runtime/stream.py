"""What kind of device is it? The only module that asks.

The host owns the master weights; the execution device sees copies. Where the two are the same memory (the CPU), an
upload is a view and a download is the tensor itself. Copies that travel while the device computes run on a `Lane`, a
stream beside the compute stream; every wait between the two goes through `wait`, which takes the reason. Device types
without streams run everything in the order of the program: their lanes and waits do nothing.

Somebody may watch a device (see `watching`): then points carry times, and each wait and each `span` of work is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hf_l2l.runtime.observer import HERE, watcher_of
from hf_l2l.runtime.stall_log import Whereabouts

HOST = torch.device("cpu")

_copies_forced = False
_releases_poisoned = False


@contextmanager
def forced_copies() -> Iterator[None]:
    """Make uploads and downloads real copies even where host and device are one memory.

    A switch for tests: what is right with views and with copies does not lean on either.
    """
    global _copies_forced
    before, _copies_forced = _copies_forced, True
    try:
        yield
    finally:
        _copies_forced = before


@contextmanager
def poisoned_releases() -> Iterator[None]:
    """Fill memory that is given back with NaN: a switch for tests, in which what is read too late then shows."""
    global _releases_poisoned
    before, _releases_poisoned = _releases_poisoned, True
    try:
        yield
    finally:
        _releases_poisoned = before


def released(memory: torch.Tensor) -> None:
    """Nobody reads these bytes (uint8) any more; see `poisoned_releases`."""
    if _releases_poisoned:
        memory.fill_(0xFF)  # all bits set is NaN in every floating-point dtype


def execution_device(device: torch.device | str | None) -> torch.device:
    """The device that layers run on: the one asked for, else the current accelerator, else the CPU.

    A device type without an index becomes the current device of that type.

    Raises:
        ValueError: if this machine has no such device, or its random generator cannot be put back.
    """
    if device is None:
        # check_available: a build of torch that knows an accelerator runs on machines that have none.
        device = torch.accelerator.current_accelerator(check_available=True) or HOST
    device = torch.device(device)
    if device.type == "cpu":
        return HOST
    try:
        module = torch.get_device_module(device)
    except RuntimeError as error:  # a type that is no accelerator, such as meta
        raise ValueError(f"the execution device must be able to run a layer (got {device}: {error})") from error
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise ValueError(
            f"the execution device must be one this machine has (got {device}); set device to None for the current "
            "accelerator, or to 'cpu'"
        )
    missing = [name for name in ("get_rng_state", "set_rng_state") if not hasattr(module, name)]
    if missing:
        raise ValueError(
            "the execution device must be one whose random generator can be read and set, since the backward draws "
            f"again what the forward drew (got {device}: {module.__name__} has no {missing[0]}); set device to 'cpu', "
            f"or add the function to {module.__name__}"
        )
    if device.index is not None:
        return device
    current = getattr(module, "current_device", None)  # Apple's module has none, and one device
    return torch.device(device.type, 0 if current is None else current())


def shares_host_memory(device: torch.device) -> bool:
    """Whether an upload to `device` is a view of the master instead of a copy."""
    return device.type == "cpu" and not _copies_forced


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A detached tensor on `device` with the values of `tensor`, a host tensor; a view where that is possible."""
    if shares_host_memory(device):
        return tensor.detach()
    return tensor.detach().to(device, copy=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor with the values of `tensor`: the tensor itself where it lies in host memory already."""
    if shares_host_memory(tensor.device):
        return tensor
    return tensor.to(HOST, copy=True)


def device_module(device: torch.device) -> ModuleType | None:
    """The torch module of a device type (`torch.cuda`, ...), None for the host."""
    if device.type == "cpu":
        return None
    module: ModuleType = torch.get_device_module(device)
    return module


def _streams(device: torch.device) -> ModuleType | None:
    """The torch module of a device type if it has streams, as `torch.cuda` has."""
    module = device_module(device)
    return module if all(hasattr(module, name) for name in ("Stream", "Event", "stream")) else None


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host goes on while the device works."""
    return _streams(device) is not None


class Point(NamedTuple):
    """A point in the work of a device's stream that something can wait for."""

    event: Any
    module: ModuleType
    device: torch.device
    row: str = "compute"
    """What the stream does: "compute", or what `Lane.entered` was told."""
    is_timed: bool = False


def span(device: torch.device, row: str, of: object) -> AbstractContextManager[None]:
    """Inside, the current stream is given copies ("upload", "download") or a "norm" of `of`, a module or a name."""
    watcher = watcher_of(device)
    if watcher is None or shares_host_memory(device):
        return nullcontext()
    return watcher.span(row, of, exposed=HERE.on_compute_stream)


def record(device: torch.device) -> Point | None:
    """The point that the current stream of `device` has been given work up to; None on a device without streams."""
    module = _streams(device)
    if module is None:
        return None
    timed = watcher_of(device) is not None
    event = module.Event(enable_timing=True) if timed else module.Event()
    event.record(module.current_stream(device))
    return Point(event, module, device, HERE.row, timed)


def is_reached(point: Point) -> bool:
    """Whether the device has come past `point`. Nothing waits; what went wrong on the device is raised."""
    return bool(point.event.query())


def wait(point: Point | None, why: str, *, host: bool = False) -> None:
    """Let what the current stream is given from now on come after `point`, for the reason `why`.

    With `host`, let the host itself wait. Nothing else in the package waits for the device.
    """
    assert why, "every wait has its reason"
    if point is None:
        return
    watcher = watcher_of(point.device)
    if watcher is not None and HERE.on_compute_stream and not HERE.is_aside:  # a lane that waits holds up nobody
        watcher.waits(point, why)
    if not host:
        point.event.wait(point.module.current_stream(point.device))
        return
    where = f"waiting for the device, {{seconds}} so far: {why}"
    with nullcontext() if is_reached(point) else Whereabouts().inside(where):
        point.event.synchronize()
    if watcher is not None:
        watcher.host_reached(point)


class Lane:
    """A stream beside the compute stream, for copies that travel while the device computes."""

    def __init__(self, device: torch.device, row: str, *, beside: bool = True) -> None:
        """Made for copies of the kind `row`. With `beside` False it is the compute stream itself, where everything
        has its turn."""
        self.device = device
        self.row = row
        self._module = _streams(device)
        self._stream = self._module.Stream(device=device) if beside and self._module is not None else None

    @property
    def is_stream(self) -> bool:
        """Whether anything can wait for it. If not, copies must not be asynchronous."""
        return self._module is not None

    @contextmanager
    def entered(self, row: str | None = None) -> Iterator[None]:
        """What is given to the device inside runs on this lane, and is of the kind `row` (None: the lane's own)."""
        before = HERE.row, HERE.on_compute_stream
        HERE.row, HERE.on_compute_stream = row or self.row, self._stream is None
        try:
            if self._module is None or self._stream is None:
                yield
            else:
                with self._module.stream(self._stream):
                    yield
        finally:
            HERE.row, HERE.on_compute_stream = before

    def record(self) -> Point | None:
        """The point that the lane has been given work up to."""
        with self.entered():
            return record(self.device)


def keep_until_done(tensor: torch.Tensor) -> None:
    """Let the memory of `tensor`, when it is freed, wait for what the current stream was given by then.

    For memory that another stream handed out: its allocator does not know of this one.
    """
    module = _streams(tensor.device)
    if module is not None:
        tensor.record_stream(module.current_stream(tensor.device))


def can_page_lock(device: torch.device) -> bool:
    """Whether host memory can be registered with the device, which then copies it without the host's help."""
    module = _streams(device)
    return module is not None and hasattr(module, "cudart")


def page_lock(address: int, num_bytes: int, device: torch.device) -> bool:
    """Register host memory with the device; False where that is refused."""
    module = device_module(device)
    assert module is not None and num_bytes > 0, "asked without can_page_lock"
    with module.device(device):  # else the current one would get a context, and lose memory to it
        if int(module.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
            return True
        # The refusal stays behind as this thread's last error, and the next kernel that is launched would report it.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
    return False


def page_unlock(address: int, device: torch.device) -> None:
    """Take back `page_lock`."""
    module = device_module(device)
    assert module is not None, "nothing is locked for the host"
    with module.device(device):
        module.cudart().cudaHostUnregister(address)


@dataclass(frozen=True)
class RngState:
    """The state of the generators that a layer can draw from: the host's, and the device's where it has its own."""

    host: torch.Tensor
    device: torch.Tensor | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState):
            return NotImplemented
        if not torch.equal(self.host, other.host):
            return False
        if self.device is None or other.device is None:
            return self.device is other.device
        return torch.equal(self.device, other.device)


def get_rng_state(device: torch.device) -> RngState:
    """The state of the generators now (two small host tensors)."""
    module = device_module(device)
    if module is None:
        return RngState(torch.get_rng_state(), None)
    # Apple's module has one device, and functions that take none.
    where = () if device.type == "mps" else (device,)
    return RngState(torch.get_rng_state(), module.get_rng_state(*where))


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Put the generators into `state`."""
    torch.set_rng_state(state.host)
    module = device_module(device)
    if module is not None and state.device is not None:
        module.set_rng_state(state.device, *(() if device.type == "mps" else (device,)))


@contextmanager
def rng_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were found, whatever is drawn inside."""
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)
