"""Host memory: what is still available, within the limits of control groups, and what this process and files hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil


def available_host_bytes() -> int:
    """Host memory that can still be allocated: available in the system, within the limits of the control groups."""
    available = [int(psutil.virtual_memory().available)]
    for folder, limit, usage in control_groups():
        left = _left_in_group(folder / limit, folder / usage)
        if left is not None:
            available.append(left)
    return min(available)


def control_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[Path, str, str]]:
    """Control groups that may limit this process, from its own up: folder, and file names of limit and usage."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = mounted, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield root / folder, limit, usage


def group_bytes() -> int | None:
    """The least limit of memory, in bytes, that the control groups of this process have; None without one."""
    found = (_number(folder / limit) for folder, limit, _ in control_groups())
    return min((number for number in found if number is not None), default=None)


def group_cores() -> float | None:
    """The least limit of processor time, in cores, that the control groups of this process have (of version 2; of
    version 1 none is found); None without one."""
    found = []
    for folder, _, _ in control_groups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():  # "max": no limit
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


_NO_LIMIT = 2**62
"""From here on, a limit of control groups of version 1 means that there is none."""


def _left_in_group(limit: Path, usage: Path) -> int | None:
    try:
        text, used = limit.read_text().strip(), int(usage.read_text())
    except (OSError, ValueError):
        return None
    if not text.isdigit():  # "max": no limit
        return None
    # Cached pages of files count as used, but are released when memory is needed.
    try:
        stat = dict(line.split() for line in (usage.parent / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        cached = 0
    return int(text) - used + cached


def own_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of memory that this process holds, without mapped files. Page-locked memory of this package is shared
    memory, and counts."""
    try:
        lines = [line.split() for line in status.read_text().splitlines()]
    except OSError:  # not Linux
        memory = psutil.Process().memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def process_bytes(status: Path = Path("/proc/self/status")) -> tuple[int, int]:
    """Bytes of memory that this process holds now, and the most that it has held, mapped files included."""
    now, peak = int(psutil.Process().memory_info().rss), peak_process_bytes(status)
    return now, max(now, 0 if peak is None else peak)


def peak_process_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The most bytes of memory that this process has held; None if the system does not report it."""
    if status.exists():  # Linux, where getrusage includes the parent process
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return int(peaks[0]) * 1024
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def is_in_memory(folder: str) -> bool:
    """Whether files in `folder` are in host memory (tmpfs, ramfs)."""
    mounted = os.path.realpath(folder)
    while not os.path.ismount(mounted):
        mounted = os.path.dirname(mounted)
    kinds = [each.fstype for each in psutil.disk_partitions(all=True) if each.mountpoint == mounted]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")  # what was mounted last hides what was there before
