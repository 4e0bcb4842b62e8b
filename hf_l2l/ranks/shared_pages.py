"""Host memory that several processes map: anonymous, without a name in any file system, gone with the last of them.

It is a memfd of Linux, sealed so that no process can change its size, readable and writable by its owner alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

import torch

from hf_l2l.runtime.flat_memory import Pages

if sys.platform == "linux":
    import fcntl

IS_AVAILABLE = sys.platform == "linux"


def new_file(num_bytes: int) -> int:
    """A descriptor of new shared memory, all zero. Memory is taken when it is written first, a page at a time."""
    assert sys.platform == "linux", "checked when the ranks meet"
    descriptor = os.memfd_create("hf_l2l", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def check_file(descriptor: int, num_bytes: int) -> None:
    """Raise ValueError unless a descriptor that another rank has sent is sealed memory of this size: reading memory
    that was made smaller would end the process."""
    assert sys.platform == "linux", "checked when the ranks meet"
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if os.fstat(descriptor).st_size != num_bytes or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & needed != needed:
        raise ValueError("shared memory must be sealed and have the size that was agreed on (another rank sent other)")


class SharedPages(Pages):
    """Pages of such memory, mapped in this process."""

    def __new__(cls, descriptor: int, num_bytes: int) -> SharedPages:
        made: SharedPages = mmap.mmap.__new__(cls, descriptor, num_bytes)
        return made

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(num_bytes)

    def bytes_at(self, start: int, num_bytes: int) -> torch.Tensor:
        """A view of these bytes (uint8, one dimension)."""
        with torch.inference_mode(False):
            if num_bytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(self, dtype=torch.uint8, count=num_bytes, offset=start)


def return_freed_memory() -> None:
    """Have the C library return what this process has freed: parameters and state that have moved to shared memory
    lie between what stays, and would else be kept for later allocations, once per rank."""
    with suppress(AttributeError):  # other C libraries than glibc return it by themselves
        ctypes.CDLL(None).malloc_trim(0)


def whole_pages(num_bytes: int) -> int:
    """So many bytes, rounded up to whole pages; at least one."""
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
