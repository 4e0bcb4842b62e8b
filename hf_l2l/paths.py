"""Paths that are given as options: what is said of one that cannot be used, before anything is written there."""

from __future__ import annotations

import os
from typing import Any


def _is_path(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and bool(os.fspath(path))


def check_trace_path(path: Any, name: str = "trace") -> None:
    """Raise ValueError, which calls the option `name`, unless a file can be written at `path`; nothing is written."""
    if not _is_path(path):
        raise ValueError(
            f"{name} must be the path of a file to write, or None for no trace (got {path!r}); write 'trace.json'"
        )
    got, folder = f"{name}={path!r}", os.path.dirname(os.path.abspath(path))
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, or of characters that no file system takes
        raise ValueError(cannot_be_written(got, error)) from error
    if not os.path.isdir(folder):
        raise ValueError(cannot_be_written(got, f"there is no folder {folder}"))
    if os.path.isdir(path):
        raise ValueError(cannot_be_written(got, "it is a folder"))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(cannot_be_written(got, "permission denied"))


def cannot_be_written(got: str, reason: object) -> str:
    """What is said of a trace that cannot be written: what was `got`, and the reason."""
    return f"the trace must go where a file can be written (got {got}: {reason}); give a file in an existing folder"


def check_folder_path(path: Any, name: str) -> None:
    """Raise ValueError, which calls the option `name`, unless `path` can name a folder; it is not looked at."""
    if not _is_path(path):
        raise ValueError(
            f"{name} must be the path of a folder, or None for the system's folder for temporary files (got "
            f"{path!r}); write '/mnt/nvme'"
        )
