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


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class FolderLock:
    """Held until `release`, or until this process ends. Processes that it forks do not hold it: the workers of data
    loaders may live a little longer."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: if another process holds it.
            OSError: if nothing can be written in the folder.
        """
        assert fcntl is not None, "has been checked"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME
        while True:
            self._file = open(self._path, "a", opener=_opened)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                self._file.close()
                if error.errno in _TAKEN:
                    raise ValueError(
                        "l2l_realtime_checkpoint must be a folder of one training at a time (got "
                        f"{folder}, to which another process writes); end that one, or name another folder"
                    ) from error
                raise
            self._file.close()  # who held it has removed it between the two calls

    def release(self) -> None:
        """Let others write there. A second call does nothing."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)  # first: nobody else can hold it yet
            self._file.close()
