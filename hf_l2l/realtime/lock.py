"""One training at a time writes to a folder of real-time checkpoints: two would delete what the other resumes from."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows, where there are no real-time checkpoints
    fcntl = None

_NAME = "l2l_realtime.lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: set[Path] = set()
"""Locks of this process, in which the system sees one holder."""


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class FolderLock:
    """Held until `release`, or until this process ends, or opens and closes the file by other means. Processes that it
    forks do not hold it: the workers of data loaders may live a little longer."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: if another process holds it, or this one does already.
            OSError: if nothing can be written in the folder.
        """
        assert fcntl is not None, "has been checked"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / _NAME
        if self._path in _held:
            raise _taken(folder, "this process")
        while True:
            self._file = open(self._path, "a", opener=_opened)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    _held.add(self._path)
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                self._file.close()
                if error.errno in _TAKEN:
                    raise _taken(folder, "another process") from error
                raise
            self._file.close()  # who held it has removed it between the two calls

    def release(self) -> None:
        """Let others write there. A second call does nothing."""
        if not self._file.closed:
            _held.discard(self._path)
            try:
                self._path.unlink(missing_ok=True)  # first: nobody else can hold it yet
            finally:
                self._file.close()


def _taken(folder: Path, who: str) -> ValueError:
    return ValueError(
        f"l2l_realtime_checkpoint must be a folder of one training at a time (got {folder}, to which {who} writes); "
        "end that training, or name another folder"
    )
