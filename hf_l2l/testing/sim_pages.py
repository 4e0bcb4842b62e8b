"""Page-locked host memory of the simulated accelerator: registered as by `torch.cuda.cudart()`, with CUDA's refusals.

Registering locks no memory here. Registrations are recorded, so that tests find missing unregistrations; the virtual
clock treats copies as asynchronous only from and to registered memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hf_l2l.testing.sim_race import range_of

PAGE = 4096  # bytes; the operating system locks whole pages

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713

_PINNED = "_pinned_for_sim"  # attribute of a host storage that torch itself made in page-locked memory


class Pages:
    """The registered ranges of host memory, and the limit on their total bytes."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._lock = threading.RLock()  # a finalizer may unregister inside, where Python makes an object
        self._sizes: dict[int, int] = {}  # by first address, bytes

    def register(self, pointer: int, num_bytes: int) -> int:
        """Record a range of addresses, or return the code of the refusal."""
        if pointer <= 0 or num_bytes <= 0:
            return INVALID_VALUE
        with self._lock:
            if any(_share_a_page(pointer, num_bytes, *known) for known in self._sizes.copy().items()):
                return ALREADY_REGISTERED
            if self.limit is not None and sum(list(self._sizes.values())) + num_bytes > self.limit:
                return OUT_OF_MEMORY
            self._sizes[pointer] = num_bytes
        return SUCCESS

    def unregister(self, pointer: int) -> int:
        """Remove the range that begins at `pointer`, or return the code of the refusal."""
        with self._lock:
            return NOT_REGISTERED if self._sizes.pop(pointer, None) is None else SUCCESS

    def total(self) -> int:
        """Return the bytes registered now."""
        with self._lock:
            return sum(list(self._sizes.values()))

    def hold(self, low: int, high: int) -> bool:
        """Return whether the addresses from `low` up to, but not including, `high` are within one range."""
        with self._lock:
            return any(first <= low and high <= first + size for first, size in self._sizes.copy().items())


def _share_a_page(first: int, size: int, other: int, other_size: int) -> bool:
    return first // PAGE <= (other + other_size - 1) // PAGE and other // PAGE <= (first + size - 1) // PAGE


PAGES = Pages()


class CudaRuntime:
    """The functions of `torch.cuda.cudart()` that page-lock host memory; they return CUDA's error codes."""

    @staticmethod
    def cudaHostRegister(pointer: int, num_bytes: int, flags: int) -> int:
        """Register `num_bytes` from address `pointer` on as page-locked; for all devices, whatever the `flags`.

        Returns:
            0, or 712 if a page of it is in a range registered already, 2 if that is more than `page_lock_limit`
            allows, 1 if there is no memory to register.
        """
        return PAGES.register(pointer, num_bytes)

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        """Undo the registration that began at address `pointer`; return 0, or 713 if there is none."""
        return PAGES.unregister(pointer)


def page_locked_bytes() -> int:
    """Return the bytes of host memory registered now by `torch.sim.cudart().cudaHostRegister`."""
    return PAGES.total()


@contextlib.contextmanager
def page_lock_limit(num_bytes: int) -> Iterator[None]:
    """Inside, refuse registrations that would make the registered host memory exceed `num_bytes`; 0 refuses all.

    Raises:
        ValueError: the number is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"num_bytes must be 0 or more (got {num_bytes}); 0 refuses every registration")
    before, PAGES.limit = PAGES.limit, num_bytes
    try:
        yield
    finally:
        PAGES.limit = before


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Return whether the host tensor `tensor` was made pinned, or is within one registered range."""
    return hasattr(tensor.untyped_storage(), _PINNED) or PAGES.hold(*range_of(tensor))


def made_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host tensor `tensor`, marked as memory of torch's pinned allocator."""
    setattr(tensor.untyped_storage(), _PINNED, True)
    return tensor
