"""How fast a disk takes what a checkpoint has, and state that host memory does not hold, and gives it back."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

_BYTES = 64 * 2**20
_AT_ONCE = 2**22


class DiskRates(NamedTuple):
    """Bytes per second."""

    read: float
    written: float


def write_rate(folder: Path, num_bytes: int = _BYTES) -> float:
    """Bytes per second that are on the disk of `folder` when this returns, measured with a file that is removed.

    Raises:
        OSError: if nothing can be written there.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="_l2l-rate-", buffering=0) as file:
        return _written(file, num_bytes)


def disk_rates(folder: Path, num_bytes: int = 4 * _BYTES) -> DiskRates:
    """Those of the disk of `folder`, measured with a file that is removed. What is read has been dropped from memory
    before, where the system takes that advice (Linux); elsewhere the rate may be that of memory.

    Raises:
        OSError: if nothing can be written there.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="_l2l-rate-", buffering=0) as file:
        written = _written(file, num_bytes)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, num_bytes, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        memory, start, count = bytearray(_AT_ONCE), time.perf_counter(), 0
        while size := file.readinto(memory):
            count += size
        return DiskRates(count / max(time.perf_counter() - start, 1e-9), written)


def _written(file: IO[bytes], num_bytes: int) -> float:
    piece = os.urandom(min(_AT_ONCE, num_bytes))  # a disk may compress what is alike
    start, written = time.perf_counter(), 0
    while written < num_bytes:
        written += file.write(piece)
    os.fsync(file.fileno())
    return written / max(time.perf_counter() - start, 1e-9)
