"""`SpillFile`: rooms in a mapped file, for a stash that host memory does not hold.

Pages of the file that were written leave memory when the system needs it for something else, and come back when they
are read. The space is allocated before it is mapped, since a write to a mapped page for which the disk has no room
ends the process (SIGBUS).

A file belongs to one engine of one process, which holds a lock on it as long as it lives. A file whose lock is free
was left behind by a process that has ended without removing it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import tempfile
import warnings
import weakref
from contextlib import suppress
from typing import NamedTuple

import torch

from hf_l2l.memory.host_limits import is_in_memory
from hf_l2l.option_names import option
from hf_l2l.runtime.flat_memory import Room
from hf_l2l.runtime.tensors import size_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = "hf_l2l-spill-"
_ATTEMPTS = 10
"""To make a file while other processes that start may take it for one that was left behind."""
_READ_AT_ONCE = 512 * 1024
"""Bytes; Linux cuts a longer piece of advice to what one request to the disk may read."""


def can_spill() -> bool:
    """Whether this system has what a spill file needs: locks on files, and space that is allocated ahead (Linux)."""
    return fcntl is not None and hasattr(os, "posix_fallocate")


class _Segment(NamedTuple):
    """A part of the file that is mapped."""

    start: int
    stop: int
    address: int
    pages: weakref.ref[mmap.mmap]
    """Room and tensors keep it; when it is gone, this part of the file is free."""


class SpillFile:
    """A file in one folder, which grows by rooms for the stash. It exists while there are rooms."""

    def __init__(self, folder: str | os.PathLike[str] | None, layers: int) -> None:
        """Nothing is written yet. `folder` None is the system's folder for temporary files; errors say that the file
        is for the inputs of so many `layers`."""
        self.folder = os.path.abspath(tempfile.gettempdir() if folder is None else folder)
        self._option = option("spill_dir")
        self._layers = layers
        self._file: int | None = None
        self._size = 0
        self._segments: dict[int, _Segment] = {}
        """By address, in the order of the file."""
        self._remove: weakref.finalize[[str, int, int], SpillFile] | None = None

    def check(self) -> None:
        """Make, lock, map and remove a small file, and remove those that were left behind.

        Warns (UserWarning) if the folder is in host memory.

        Raises:
            ValueError: if that is impossible, with the reason.
        """
        if not can_spill():
            raise ValueError(
                "stash='disk' needs locks on files and space that is allocated ahead (os.posix_fallocate), which this "
                f"system does not have (got {self._option}={self.folder!r}); use stash='host'"
            )
        try:
            self._mapped(1, 1)
        except OSError as error:
            raise ValueError(
                f"{self._option} must be a folder in which a file can be written, locked and mapped, with space for "
                f"the inputs of {self._layers} layers (got {self.folder!r}: {_reason(error)}); give a folder on a "
                "disk of this machine"
            ) from error
        finally:
            self.release()
        if is_in_memory(self.folder):
            warnings.warn(
                f"{self._option} is in host memory ({self.folder!r} is a tmpfs), so that a stash there takes as much "
                "of it as stash='host'; give a folder on a disk",
                stacklevel=2,
            )

    def new_rooms(self, count: int, num_bytes: int) -> list[Room]:
        """Rooms for `count` tensors of up to `num_bytes` bytes each.

        Raises:
            OSError: if the disk has no space for them, or the file cannot be written, with the reason's `errno`.
        """
        try:
            return self._mapped(count, num_bytes)
        except OSError as error:
            free = ""
            with suppress(OSError):  # the folder is gone
                free = f", where {size_text(shutil.disk_usage(self.folder).free)} are free"
            raise OSError(
                error.errno,
                f"the stash on disk needs {size_text(count * num_bytes)} more in {self.folder} for {count} layer "
                f"inputs{free} ({_reason(error)}); make space, name another folder as {self._option}, or use fewer "
                "rows or tokens",
            ) from error

    def read_ahead(self, rows: torch.Tensor) -> None:
        """Ask the system to begin to read `rows`, contiguous ones; nothing happens if they are not in the file."""
        address = rows.untyped_storage().data_ptr()
        segment = self._segments.get(address)
        if self._file is None or segment is None or segment.pages() is None:
            return
        first = segment.start + rows.data_ptr() - address
        for start in range(first, first + rows.nbytes, _READ_AT_ONCE):
            os.posix_fadvise(self._file, start, _READ_AT_ONCE, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Remove the file. Tensors in it stay as they are; its space is free when they are gone."""
        if self._remove is not None:
            self._remove()
        self._file, self._remove, self._size = None, None, 0
        self._segments = {}

    def _mapped(self, count: int, num_bytes: int) -> list[Room]:
        file = self._opened()
        size = -(-max(num_bytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._segments = {address: each for address, each in self._segments.items() if each.pages() is not None}
        starts = _free_starts(list(self._segments.values()), count, size)
        self._grow(file, starts[-1] + size)
        rooms, made = [], []
        for start in starts:
            pages = mmap.mmap(file, size, offset=start)
            address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
            made.append(_Segment(start, start + size, address, weakref.ref(pages)))
            rooms.append(Room(pages, 0, num_bytes))
        in_order = sorted([*self._segments.values(), *made], key=lambda each: each.start)
        self._segments = {each.address: each for each in in_order}
        return rooms

    def _grow(self, file: int, size: int) -> None:
        if size <= self._size:
            return
        try:
            os.posix_fallocate(file, self._size, size - self._size)
        except OSError:
            with suppress(OSError):  # give back what was allocated before the disk was full
                os.ftruncate(file, self._size)
            raise
        self._size = size

    def _opened(self) -> int:
        if self._file is None:
            _remove_left_behind(self.folder)
            path, self._file = _new_file(self.folder)
            # Also at the end of the program.
            self._remove = weakref.finalize(self, _removed, path, self._file, os.getpid())
        return self._file


def _free_starts(segments: list[_Segment], count: int, size: int) -> list[int]:
    """Where `count` parts of `size` bytes fit beside `segments`, in gaps first; `segments` are in the file's order."""
    starts: list[int] = []
    end = 0
    for segment in segments:
        fitting = min((segment.start - end) // size, count - len(starts))
        starts += [end + number * size for number in range(fitting)]
        end = segment.stop
    return starts + [end + number * size for number in range(count - len(starts))]


def _new_file(folder: str) -> tuple[str, int]:
    """A new locked file: its path and descriptor."""
    for _ in range(_ATTEMPTS):
        path = os.path.join(folder, f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        locked = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before it was locked, another process may have taken it for one that was left behind.
            locked = os.fstat(file).st_nlink > 0
        except BlockingIOError:  # as now
            pass
        finally:
            if not locked:
                _removed(path, file, os.getpid())
        if locked:
            return path, file
    raise OSError(errno.EWOULDBLOCK, "a new file there is always locked by something else")


def _remove_left_behind(folder: str) -> None:
    """Remove the files of this user that nobody has locked."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):  # it is locked, or just removed by another process
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.getuid() or not entry.is_file(follow_symlinks=False):
                continue
            file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(file)


def _removed(path: str, file: int, process: int) -> None:
    with suppress(OSError):
        if os.getpid() == process:  # a forked process ends without it
            os.unlink(path)
    with suppress(OSError):
        os.close(file)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
