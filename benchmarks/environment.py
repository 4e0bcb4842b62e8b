"""Where a benchmark ran: what its document and its JSON say about the machine, the versions and the command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import hf_l2l
from hf_l2l.devices import execution_device
from hf_l2l.memory.host_limits import available_host_bytes
from hf_l2l.runtime.stream import is_asynchronous
from hf_l2l.runtime.tensors import size_text
from hf_l2l.runtime.worker import default_num_threads

LINK_BYTES = 2**28
"""Of the copy that measures the link."""
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
"""What nvidia-smi calls them."""


def environment(script: str, arguments: Sequence[str], *, with_link: bool = True) -> dict[str, Any]:
    """All of it, as of now, the link only if asked for; None for what this machine does not have or does not tell."""
    device, is_cuda = execution_device(None), torch.cuda.is_available()
    variables = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "huge_pages": huge_pages(),
        "clocks": clocks(asked_for_clocks()),
        "threads": torch.get_num_threads(),
        "update_threads": default_num_threads(),
        "host_bytes": int(psutil.virtual_memory().total),
        "available_host_bytes": available_host_bytes(),
        "device": torch.cuda.get_device_name(device) if is_cuda else str(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "driver": driver_version() if is_cuda else None,
        "link_bytes_per_s": link(device) if with_link else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in ("transformers", "accelerate")},
            "hf_l2l": hf_l2l.__version__,
        },
        "command": " ".join((*variables, shlex.join(("python", f"benchmarks/{script}", *arguments)))),
    }


def forget_host_peak() -> None:
    """Let the system count the peak of this process from now on, where it can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed: the peak is that of the process since it began
        pass


def cpu_model(file: Path = Path("/proc/cpuinfo")) -> str:
    """What the system calls the processor."""
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """Of NVIDIA's driver, which torch does not tell."""
    return told_by_the_driver(asked_of_the_driver("driver_version"))


def asked_for_clocks() -> subprocess.Popen[str] | None:
    """A question for `clocks`, which the driver answers while the device goes on; None where there is no driver."""
    return asked_of_the_driver(",".join(CLOCKS))


def clocks(asked: subprocess.Popen[str] | None) -> dict[str, str] | None:
    """Of the first GPU, in MHz, when that was asked, with its temperature and power; None where no driver tells."""
    told = told_by_the_driver(asked)
    return None if told is None else dict(zip(CLOCKS, (value.strip() for value in told.split(",")), strict=False))


def asked_of_the_driver(names: str) -> subprocess.Popen[str] | None:
    """nvidia-smi, which is asked about the GPUs; None where it is not there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def told_by_the_driver(asked: subprocess.Popen[str] | None) -> str | None:
    """What nvidia-smi says of the first GPU; None where it is not there, or fails."""
    if asked is None:
        return None
    try:
        told = asked.communicate(timeout=10)[0].strip()
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: the driver may hold it
        return None
    return told.splitlines()[0] if asked.returncode == 0 and told else None


def huge_pages(folder: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> dict[str, str]:
    """When the system gives huge pages, to private and to shared memory; empty where it does not tell."""
    found = {}
    for name in ("enabled", "shmem_enabled"):
        file = folder / name
        if file.exists():  # "always [madvise] never": the one in brackets holds
            found[name] = file.read_text().partition("[")[2].partition("]")[0]
    return found


def link(device: torch.device, size: int = LINK_BYTES) -> dict[str, float] | None:
    """Bytes per second of one copy each way between page-locked host memory and a device that has streams."""
    if not is_asynchronous(device):
        return None
    here = torch.zeros(size, dtype=torch.uint8).pin_memory()
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    found = {}
    for name, target, source in (("to_device", there, here), ("to_host", here, there)):
        for _ in range(2):  # the first is not counted
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)
            found[name] = size / (time.perf_counter() - start)
    return found


def description(found: dict[str, Any]) -> str:
    """The environment for people; the command is not in it."""
    parts = [
        found["date"],
        f"{found['cpu']}; cores: {found['cores']}; threads: {found['threads']} for operations, "
        f"{found['update_threads']} for the update",
        f"{size_text(found['host_bytes'])} of host memory ({size_text(found['available_host_bytes'])} available)",
        f"device {found['device']}",
    ]
    if found["device_bytes"] is not None:
        parts[-1] += f" with {size_text(found['device_bytes'])}"
    if found["cuda"] is not None:
        parts.append(f"CUDA {found['cuda']}, driver {found['driver'] or 'not known'}")
    if found["link_bytes_per_s"] is not None:
        to_device, to_host = (found["link_bytes_per_s"][way] / 1e9 for way in ("to_device", "to_host"))
        parts.append(f"link {to_device:.1f} GB/s to the device, {to_host:.1f} GB/s back, page-locked")
    parts.append(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    return "; ".join(parts) + "."
