"""The module that torch finds as `torch.sim`: the functions that `torch.cuda` has, for the simulated accelerator.

Libraries look up a device's module by name and call these functions; see `torch._register_device_module`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from hf_l2l.testing.sim_devices import GENERATORS, Visible, index_of
from hf_l2l.testing.sim_devices import current_device as _made_current
from hf_l2l.testing.sim_host import kept_bytes
from hf_l2l.testing.sim_memory import ACCOUNTS
from hf_l2l.testing.sim_pages import CudaRuntime
from hf_l2l.testing.sim_race import CURRENT
from hf_l2l.testing.sim_stream import Event as Event
from hf_l2l.testing.sim_stream import Stream as Stream
from hf_l2l.testing.sim_stream import current_stream as current_stream
from hf_l2l.testing.sim_stream import default_stream as default_stream
from hf_l2l.testing.sim_stream import set_stream as set_stream
from hf_l2l.testing.sim_stream import stream as stream
from hf_l2l.testing.sim_stream import synchronize_device

_Device = torch.device | str | int | None

# transformers restores a checkpoint's state by `torch.<device>.random.set_rng_state`.
random = sys.modules[__name__]


def is_available() -> bool:
    """Return True: the module exists only if the device does."""
    return True


def is_initialized() -> bool:
    """Return True: there is nothing to start."""
    return True


def init() -> None:
    """Do nothing: there is nothing to start."""


def _lazy_init() -> None:
    """Do nothing: there is nothing to start."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Return the number of devices that the program sees."""
    return Visible.count


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return CURRENT.device


def can_device_access_peer(device: _Device, peer_device: _Device) -> bool:
    """Return whether a device reads memory of another one directly."""
    return index_of(device) != index_of(peer_device) and Visible.have_peer_access


def set_device(device: _Device) -> None:
    """Make a device the current one of this thread."""
    CURRENT.device = index_of(device)


def get_device_name(device: _Device = None) -> str:
    """Return a name for reports."""
    index_of(device)
    return "simulated accelerator"


@contextlib.contextmanager
def device(index: _Device) -> Iterator[None]:
    """Make `index` the current device inside; None changes nothing."""
    with _made_current(index_of(index)):
        yield


def synchronize(device: _Device = None) -> None:
    """Make the host wait for every stream of a device."""
    synchronize_device(index_of(device))


def cudart() -> type[CudaRuntime]:
    """Return the object that registers host memory as page-locked, as `torch.cuda.cudart()` does."""
    return CudaRuntime


def empty_cache() -> None:
    """Do nothing: freed memory is not kept."""


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes that live storages hold."""
    return ACCOUNTS[index_of(device)].live()


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes held at once since `reset_peak_memory_stats`."""
    return ACCOUNTS[index_of(device)].peak()


# Nothing is kept between allocations, so what is reserved is what is allocated.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Reset the peak to the bytes held now."""
    ACCOUNTS[index_of(device)].reset_peak()


def memory_stats(device: _Device = None) -> dict[str, int]:
    """Return live and peak bytes under the names that CUDA uses."""
    account = ACCOUNTS[index_of(device)]
    live, peak = account.live(), account.peak()
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")
    return {f"{k}.all.{when}": n for k in kinds for when, n in (("current", live), ("peak", peak))}


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return free and total bytes; without a capacity both are the number of bytes that can be addressed."""
    account = ACCOUNTS[index_of(device)]
    total = sys.maxsize if account.capacity is None else account.capacity
    return total - account.live(), total


def simulated_bytes() -> tuple[int, int]:
    """Return the bytes of host memory that the simulation takes, now and at most.

    They are the devices' memory, and the values of downloads that the host may not see yet: a real device would have
    written them where they go.
    """
    now, most = kept_bytes()
    return sum(a.live() for a in ACCOUNTS) + now, sum(a.peak() for a in ACCOUNTS) + most


def manual_seed(seed: int) -> None:
    """Seed the random generator of the current device."""
    GENERATORS[CURRENT.device].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the random generators of all devices alike."""
    for generator in GENERATORS:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the random generator of the current device from the system's randomness."""
    GENERATORS[CURRENT.device].seed()


def seed_all() -> None:
    """Seed the random generators of all devices alike, from the system's randomness."""
    manual_seed_all(GENERATORS[0].seed())


def initial_seed() -> int:
    """Return the seed given last to the current device."""
    return GENERATORS[CURRENT.device].initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Return the state of the device's random generator, on the host."""
    return GENERATORS[index_of(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Set the state of the device's random generator."""
    GENERATORS[index_of(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices."""
    return [get_rng_state(index) for index in range(Visible.count)]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of the generators of all devices."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the host computes in bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast("sim", dtype=...)` may cast to."""
    return [torch.bfloat16, torch.float16]
