"""`Segment`: memory over a file without a name, which the system writes to the disk and reads again."""

from __future__ import annotations

import mmap
import os
import tempfile

from hf_l2l.option_names import option
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.runtime.tensors import size_text

_READ_AT_ONCE = 512 * 1024
"""Bytes; Linux cuts a longer piece of advice to what one request to the disk may read."""


def can_map() -> bool:
    """Whether this system has what state on disk needs: space that is allocated ahead, and advice on pages (Linux)."""
    return all(hasattr(os, name) for name in ("posix_fallocate", "posix_fadvise", "fdatasync"))


class Segment:
    """A mapped file for what is read and written together: the masters of a layer, or the optimizer's state of them.

    The file has no name, so that nothing of it is left when the process has ended, however it ends. Its space is
    allocated before it is mapped, since a write to a mapped page for which the disk has no room ends the process
    (SIGBUS). Tensors in it keep the file as long as they live.
    """

    def __init__(self, folder: str, num_bytes: int, *, by_rows: bool = False) -> None:
        """`by_rows` says that single rows of it are read, as of an embedding: what is missing is read by pages then,
        unless all of it has been read ahead.

        Raises:
            OSError: if the disk has no room.
        """
        self.num_bytes = -(-max(num_bytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # Not the file object, which warns when it is freed as a part of a cycle, perhaps before this is.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._descriptor = os.dup(file.fileno())
        try:
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{option('state_dir')} must have room for masters and optimizer state (got {folder!r}, which has no "
                f"{size_text(self.num_bytes)} more: {error.strerror}); make space, or name another folder",
            ) from error
        self._pages = mmap.mmap(self._descriptor, self.num_bytes)
        if by_rows:
            self._pages.madvise(mmap.MADV_RANDOM)

    def room(self, start: int, stop: int) -> Room:
        """The memory of these bytes, for one tensor."""
        return Room(self._pages, start, stop)

    def read(self) -> None:
        """Have the system read all of it from the disk; what is not there when it is used is waited for then."""
        for start in range(0, self.num_bytes, _READ_AT_ONCE):
            os.posix_fadvise(self._descriptor, start, _READ_AT_ONCE, os.POSIX_FADV_WILLNEED)

    def leave(self, *, is_changed: bool) -> None:
        """Free its memory, after what `is_changed` has been written to the disk. The values stay readable.

        Raises:
            OSError: if the disk fails.
        """
        # First: pages that are in the table of the process are not freed, and only what has left it counts as changed.
        self._pages.madvise(mmap.MADV_DONTNEED)
        if is_changed:
            os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, self.num_bytes, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)
