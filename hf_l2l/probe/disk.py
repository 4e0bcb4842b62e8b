"""How fast a disk takes what a checkpoint has, and state that host memory does not hold, and gives it back."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

_BYTES = 64 * 2**20
_AT_ONCE = 2**22


class DiskRates(NamedTuple):
    """Bytes per second, alone and while the disk does both."""

    read: float
    written: float
    read_beside: float
    written_beside: float

    def seconds(self, read: float, written: float, *, alone: float = 0.0) -> float:
        """The time for so many bytes, `alone` of those read while nothing is written, and the others beside that."""
        beside = read - alone
        first = min(beside / self.read_beside, written / self.written_beside)
        left = (beside - first * self.read_beside) / self.read + (written - first * self.written_beside) / self.written
        return alone / self.read + first + left


def write_rate(folder: Path, num_bytes: int = _BYTES) -> float:
    """Bytes per second that are on the disk of `folder` when this returns, measured with a file that is removed.

    Raises:
        OSError: if nothing can be written there.
    """
    with _new_file(folder) as file:
        return _written(file, num_bytes)


def disk_rates(folder: Path, num_bytes: int = 4 * _BYTES) -> DiskRates:
    """Those of the disk of `folder`, measured with two files that are removed. What is read has been dropped from
    memory before, where the system takes that advice (Linux); elsewhere the rate may be that of memory.

    Raises:
        OSError: if nothing can be written there.
    """
    with _new_file(folder) as file, _new_file(folder) as beside, ThreadPoolExecutor(1) as pool:
        written, (read, seconds) = _written(file, num_bytes), _read(file)
        alone = read / seconds
        writing, count, time_read = pool.submit(_written, beside, num_bytes), 0, 0.0
        while count == 0 or not writing.done():
            read, seconds = _read(file, until=writing.done)
            count, time_read = count + read, time_read + seconds
        return DiskRates(alone, written, count / time_read, writing.result())


def _new_file(folder: Path) -> FileIO:
    return tempfile.TemporaryFile(dir=folder, prefix="_l2l-rate-", buffering=0)


def _read(file: FileIO, until: Callable[[], bool] = lambda: False) -> tuple[int, float]:
    """Read a file from the disk, unless `until` comes first; returns bytes and seconds."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    memory, start, count = bytearray(_AT_ONCE), time.perf_counter(), 0
    while (size := file.readinto(memory)) and not until():
        count += size
    return max(count, size), max(time.perf_counter() - start, 1e-9)


def _written(file: FileIO, num_bytes: int) -> float:
    piece = os.urandom(min(_AT_ONCE, num_bytes))  # a disk may compress what is alike
    start, written = time.perf_counter(), 0
    while written < num_bytes:
        written += file.write(piece)
    os.fsync(file.fileno())
    return written / max(time.perf_counter() - start, 1e-9)
