"""How fast a disk takes what a generation has."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_BYTES = 64 * 2**20
_AT_ONCE = 2**22


def write_rate(folder: Path, num_bytes: int = _BYTES) -> float:
    """Bytes per second that are on the disk of `folder` when this returns, measured with a file that is removed.

    Raises:
        OSError: if nothing can be written there.
    """
    piece = os.urandom(min(_AT_ONCE, num_bytes))  # a disk may compress what is alike
    with tempfile.TemporaryFile(dir=folder, prefix="_l2l-rate-", buffering=0) as file:
        start, written = time.perf_counter(), 0
        while written < num_bytes:
            written += file.write(piece)
        os.fsync(file.fileno())
        return written / max(time.perf_counter() - start, 1e-9)
