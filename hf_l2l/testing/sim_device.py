"""The module that torch finds as `torch.sim`: the functions that `torch.cuda` has, for the simulated accelerator.

Libraries look up a device's module by name and call these functions; see `torch._register_device_module`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from hf_l2l.testing.sim_host import kept_bytes
from hf_l2l.testing.sim_memory import ACCOUNT
from hf_l2l.testing.sim_pages import CudaRuntime
from hf_l2l.testing.sim_random import GENERATOR
from hf_l2l.testing.sim_stream import Event as Event
from hf_l2l.testing.sim_stream import Stream as Stream
from hf_l2l.testing.sim_stream import current_stream as current_stream
from hf_l2l.testing.sim_stream import default_stream as default_stream
from hf_l2l.testing.sim_stream import device_checked as _check
from hf_l2l.testing.sim_stream import set_stream as set_stream
from hf_l2l.testing.sim_stream import stream as stream
from hf_l2l.testing.sim_stream import synchronize_all

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
    """Return 1."""
    return 1


def current_device() -> int:
    """Return 0."""
    return 0


def set_device(device: _Device) -> None:
    """Accept the only device."""
    _check(device)


def get_device_name(device: _Device = None) -> str:
    """Return a name for reports."""
    _check(device)
    return "simulated accelerator"


@contextlib.contextmanager
def device(index: _Device) -> Iterator[None]:
    """Make `index` the current device; there is only one."""
    _check(index)
    yield


def synchronize(device: _Device = None) -> None:
    """Make the host wait for every stream."""
    _check(device)
    synchronize_all()


def cudart() -> type[CudaRuntime]:
    """Return the object that registers host memory as page-locked, as `torch.cuda.cudart()` does."""
    return CudaRuntime


def empty_cache() -> None:
    """Do nothing: freed memory is not kept."""


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes that live storages hold."""
    _check(device)
    return ACCOUNT.live()


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes held at once since `reset_peak_memory_stats`."""
    _check(device)
    return ACCOUNT.peak()


# Nothing is kept between allocations, so what is reserved is what is allocated.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Reset the peak to the bytes held now."""
    _check(device)
    ACCOUNT.reset_peak()


def memory_stats(device: _Device = None) -> dict[str, int]:
    """Return live and peak bytes under the names that CUDA uses."""
    _check(device)
    live, peak = ACCOUNT.live(), ACCOUNT.peak()
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")
    return {f"{k}.all.{when}": n for k in kinds for when, n in (("current", live), ("peak", peak))}


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return free and total bytes; without a capacity both are the number of bytes that can be addressed."""
    _check(device)
    total = sys.maxsize if ACCOUNT.capacity is None else ACCOUNT.capacity
    return total - ACCOUNT.live(), total


def simulated_bytes() -> tuple[int, int]:
    """Return the bytes of host memory that the simulation takes, now and at most.

    They are the device's memory, and the values of downloads that the host may not see yet: a real device would have
    written them where they go.
    """
    now, most = kept_bytes()
    return ACCOUNT.live() + now, ACCOUNT.peak() + most


def manual_seed(seed: int) -> None:
    """Seed the device's random generator."""
    GENERATOR.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    """Seed the device's random generator from the system's randomness."""
    GENERATOR.seed()


seed_all = seed


def initial_seed() -> int:
    """Return the seed given last."""
    return GENERATOR.initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Return the state of the device's random generator, on the host."""
    _check(device)
    return GENERATOR.get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Set the state of the device's random generator."""
    _check(device)
    GENERATOR.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices; there is one device."""
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of the generators of all devices; there is one device."""
    for state in new_states:
        set_rng_state(state)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: the host computes in bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast("sim", dtype=...)` may cast to."""
    return [torch.bfloat16, torch.float16]
