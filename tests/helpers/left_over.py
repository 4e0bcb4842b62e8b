"""What a process has: threads, files, children, memory and tensors; for tests that nothing of it is left over."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

HAS_PROC = Path("/proc/self/fd").is_dir()
STALL_LOG = "hf_l2l stall log"
"""A thread that comes with a long wait, and ends some seconds after it."""


def threads() -> int:
    """Threads of the process, but for the stall log's; without /proc, those that Python knows."""
    found = len(os.listdir("/proc/self/task")) if HAS_PROC else threading.active_count()
    return found - len([thread for thread in threading.enumerate() if thread.name == STALL_LOG])


def own_threads() -> set[threading.Thread]:
    """Those of the package, but for the stall log's."""
    return {t for t in threading.enumerate() if t.name.startswith("hf_l2l") and t.name != STALL_LOG}


def files() -> int:
    """Open file descriptors, sockets and pipes among them; 0 without /proc."""
    return len(os.listdir("/proc/self/fd")) if HAS_PROC else 0


def children() -> int:
    """Child processes; those that have ended and were not waited for are among them."""
    found = 0
    for task in Path("/proc/self/task").iterdir() if HAS_PROC else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += len((task / "children").read_text().split())
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm that this user owns, but for those that other programs have mapped, and for semaphores of
    `multiprocessing`: these are mapped under other names, and the package makes none."""
    folder = Path("/dev/shm")
    names = {e.name for e in os.scandir(folder) if e.stat().st_uid == os.getuid()} if folder.is_dir() else set()
    names = {name for name in names if not name.startswith("sem.mp-")}
    return names - _mapped_by_others() if names else names


def _mapped_by_others() -> set[str]:
    """Names in /dev/shm that processes have mapped which are neither this one nor its children."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if os.getpid() not in (int(process.name), parent):
                found.update(re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text()))
        except OSError:  # it has ended, or is of another user
            continue
    return found


def live_tensors() -> int:
    """Tensors that Python's collector knows."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def live_storages() -> int:
    """Storages of tensors that Python's collector knows, as those that something keeps by themselves."""
    return sum(type(each) is torch.UntypedStorage for each in gc.get_objects())


def resident_bytes() -> int:
    """The process's memory in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def counts() -> dict[str, Any]:
    """All that must not grow."""
    tensors = live_tensors()  # first: it collects garbage
    processes = {"threads": threads(), "files": files(), "children": children()}
    return {**processes, "tensors": tensors, "storages": live_storages()}


def assert_flat(found: list[dict[str, Any]]) -> None:
    """Later counts are not above earlier ones. One may be off by what a thread of torch is about to let go of."""
    half = len(found) // 2
    for name in found[0]:
        earlier, later = ([each[name] for each in part] for part in (found[:half], found[half:]))
        assert min(later) <= max(earlier), (name, earlier, later)


def gone(is_over: Callable[[], bool]) -> bool:
    """Whether what nobody refers to any more is gone, once it has been collected: graphs of autograd hide what they
    refer to until they are gone themselves, and its thread for a device lets go a moment later."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        gc.collect()
        if is_over():
            return True
        time.sleep(0.01)
    return False
