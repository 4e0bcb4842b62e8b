"""The manifest of a checkpoint: its files, with their sizes and SHA-256, written when all of them are there.

A folder with a manifest that holds is the one that was saved. A manifest has a SHA-256 of itself, too, so that no byte
of a checkpoint changes without notice. Nothing of it is believed before it is checked: its size, its fields, and the
names of files, which must lie in the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import accelerate
import torch
import transformers

from hf_l2l.version import __version__

MANIFEST = "l2l_manifest.json"
FORMAT = 1
"""Of the manifests that this version writes, and the newest that it reads."""

LINK = "is a link, which is not followed (snapshot_download makes none with local_dir=...)"
"""What is wrong with a file."""

_MOST_BYTES = 2**24
"""Of a manifest that is read."""
_READ_AT_ONCE = 2**18
_DIGEST = re.compile("[0-9a-f]{64}")
_LOADED = re.compile(
    r"(.*\.index\.json|(pytorch_)?model.*\.(safetensors|bin)|(optimizer|scheduler|scaler)\.pt|rng_state.*\.pth|"
    r"trainer_state\.json|config\.json|l2l_.*\.json)"
)
"""Names of files that a trainer looks for: one that was added would be loaded with the others, or in their place."""
_ADAPTERS = re.compile(r"(.*/)?adapter_(config|model)\..*")
"""The same, of a model that has adapters: Trainer loads those in a folder instead of those beside it."""
_WEIGHTS = re.compile(r"(.*\.index\.json|(pytorch_)?model.*\.(safetensors|bin)|adapter_(config|model)\..*)")
"""Names of files of weights."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was saved. It names the file."""

    def __init__(self, folder: Path, file: str, reason: str) -> None:
        """`file` is its name in `folder`."""
        super().__init__(
            f"a checkpoint must be as it was saved (got {folder}, where {file} {reason}); resume from another one, or "
            f"copy the folder again from where it is whole (without {MANIFEST}, its files are not compared)"
        )
        self.folder, self.file, self.reason = folder, file, reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors that come from other processes are pickled."""
        return type(self), (self.folder, self.file, self.reason)


class FileDigest(NamedTuple):
    """The content of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has."""

    step: int
    """Optimizer steps that were done."""
    run: str
    """Names the training, from its start on; a training that resumes goes on with it."""
    saved_at: float
    """Seconds since 1970."""
    files: Mapping[str, FileDigest]
    """By name, with "/" between folders."""
    configuration: Mapping[str, Any]
    """What it was saved with, for people."""


def write_manifest(
    folder: Path, step: int, run: str, configuration: Mapping[str, Any], *, in_parallel: bool = True
) -> Manifest:
    """Write the manifest of all files in `folder`, and have all of it on the disk, the folders, too. Without
    `in_parallel`, this starts no thread, which is impossible when the program is about to end.

    Raises:
        OSError: if a file cannot be read or written.
    """
    names = list(files_in(folder))
    for name in names:
        if not is_file(folder / name):
            raise OSError(errno.EINVAL, "a checkpoint has files and folders only", str(folder / name))
    with ExitStack() as stack:
        each = stack.enter_context(ThreadPoolExecutor(_threads())).map if in_parallel else map
        digests = dict(zip(names, each(lambda name: _digest(folder / name, sync=True), names), strict=True))
    found = Manifest(step, run, time.time(), digests, dict(configuration))
    content = _content(found)
    whole = {**content, "sha256": _of_content(content)}
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(json.dumps(whole, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)
    return found


def saved_with(trainer: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest tells people of the training: the kind of its trainer, versions, and `options` of L2L."""
    plain = (bool, int, float, str)
    return {
        "trainer": trainer.__name__,
        "hf_l2l": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "options": {
            name: value if isinstance(value, plain) else str(value)
            for name, value in options.items()
            if value is not None
        },
    }


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None if there is none.

    Raises:
        DamagedCheckpointError: if it is not as it was written.
        ValueError: if a newer version of this package wrote it.
    """
    path = folder / MANIFEST
    try:
        found = path.lstat()
    except OSError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise DamagedCheckpointError(folder, MANIFEST, LINK)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise DamagedCheckpointError(folder, MANIFEST, "is no file of a manifest's size")
    try:
        content = json.loads(path.read_bytes())
        digest = content.pop("sha256")
        if digest != _of_content(content):  # first: a flipped bit may make the format a newer one
            raise ValueError("its SHA-256 is another one")
        version = int(content["format"])
        if version > FORMAT:
            raise _TooNewError(version)
        files = {str(name): _entry(name, *entry) for name, entry in dict(content["files"]).items()}
        configuration = dict(content["configuration"])
        saved_at = float(content["saved_at"])
        if not math.isfinite(saved_at):
            raise ValueError(f"saved_at={saved_at} is no time")
        return Manifest(int(content["step"]), str(content["run"]), saved_at, files, configuration)
    except _TooNewError as error:
        raise ValueError(
            f"a checkpoint must be of a format that this version of hf_l2l knows (got format {error.args[0]} in "
            f"{path}, and {FORMAT} is the newest one here); upgrade hf_l2l"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(folder, MANIFEST, f"is damaged: {error}") from None


def check_files(folder: Path, manifest: Manifest, of: Callable[[str], bool] = lambda name: True) -> None:
    """Raise unless all files of the manifest are in `folder`, as they were, and no other that a trainer would load.
    Further ones, which the program has added, may be there. Only those whose names are `of` a kind are looked at.

    Raises:
        DamagedCheckpointError: names the first file that is not.
    """
    expected = {name: digest for name, digest in manifest.files.items() if of(name)}
    for name, digest in expected.items():
        _check_place(folder, name)
        size = (folder / name).lstat().st_size
        if size != digest.num_bytes:
            raise DamagedCheckpointError(folder, name, f"has {size:,} bytes, and had {digest.num_bytes:,}")
    has_adapters = any(map(_ADAPTERS.fullmatch, manifest.files))
    for name in files_in(folder):
        if name not in manifest.files and of(name) and would_be_loaded(name, has_adapters=has_adapters):
            raise DamagedCheckpointError(folder, name, "was not saved with it, and would be loaded")
    with ThreadPoolExecutor(_threads()) as pool:
        found = pool.map(lambda name: _digest(folder / name).sha256, expected)
        for (name, digest), sha256 in zip(expected.items(), found, strict=True):
            if sha256 != digest.sha256:
                raise DamagedCheckpointError(folder, name, "has another content (SHA-256)")


def would_be_loaded(name: str, *, has_adapters: bool = True) -> bool:
    """Whether a trainer loads a file of this name, with "/" between folders, if it is in a checkpoint (of a model that
    `has_adapters`)."""
    return bool(_LOADED.fullmatch(name) or (has_adapters and _ADAPTERS.fullmatch(name)))


def is_file(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return stat.S_ISREG(path.lstat().st_mode)


def is_of_weights(name: str) -> bool:
    """Whether it is the name of a file of weights."""
    return _WEIGHTS.fullmatch(name) is not None


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk, where the system has a call for that (not on Windows)."""
    if os.name != "nt":
        sync(folder)


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk, whoever has written them.

    Raises:
        OSError: if the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _TooNewError(Exception):
    """A manifest of a newer format."""


def _content(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": manifest.step,
        "run": manifest.run,
        "saved_at": manifest.saved_at,
        "configuration": manifest.configuration,
        "files": {name: list(digest) for name, digest in manifest.files.items()},
    }


def _of_content(content: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its own."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _entry(name: Any, num_bytes: Any, sha256: Any) -> FileDigest:
    parts = PurePosixPath(name).parts
    plain = "\\" not in name and "\0" not in name and not any(part in ("", "..", "/") for part in parts)
    if not plain or str(PurePosixPath(*parts)) != name or parts[-1:] in ((), (MANIFEST,)):
        raise ValueError(f"{name!r} is no name of a file in the folder")
    if type(num_bytes) is not int or num_bytes < 0 or not _DIGEST.fullmatch(sha256):
        raise ValueError(f"{name!r} has no size and SHA-256")
    return FileDigest(num_bytes, sha256)


def _check_place(folder: Path, name: str) -> None:
    """Raise unless it is a file in `folder`, and no link leads to it."""
    path = folder
    for part in PurePosixPath(name).parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError:
            raise DamagedCheckpointError(folder, name, "is missing") from None
        is_last = path == folder / name
        if not (stat.S_ISREG(mode) if is_last else stat.S_ISDIR(mode)):
            raise DamagedCheckpointError(folder, name, "is no file" if is_last else "is in no folder")


def files_in(folder: Path) -> Iterator[str]:
    """Names of all that is in `folder`, without the manifest; links are named, and not followed."""
    for root, folders, files in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted([*files, *linked]):
            found = Path(root, name).relative_to(folder).as_posix()
            if found != MANIFEST:
                yield found


def _digest(path: Path, *, sync: bool = False) -> FileDigest:
    """The content of a file; with `sync`, it is on the disk then."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while chunk := file.read(_READ_AT_ONCE):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return FileDigest(size, digest.hexdigest())


def _threads() -> int:
    return min(4, os.cpu_count() or 1)
