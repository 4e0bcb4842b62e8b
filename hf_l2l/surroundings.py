"""What `hf-l2l env` finds of this machine and this process. Each part stands alone, so that what is broken or missing
is a line of the report and does not end it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_l2l.memory import host_limits
from hf_l2l.probe.rates import device_name
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages
from hf_l2l.runtime.worker import usable_cores
from hf_l2l.version import __version__

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "peft",
    "trl",
    "sentence-transformers",
    "bitsandbytes",
    "torchao",
    "numpy",
    "psutil",
)
"""Packages whose versions a bug report needs; None of one that is not installed."""

_VARIABLES = re.compile(
    "(HF|CUDA|OMP|PYTORCH|TORCH|HF_L2L|MKL|NCCL|ACCELERATE|TRANSFORMERS)_|(LD_PRELOAD|MALLOC_ARENA_MAX)$"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_PASSWORD_IN_ADDRESS = re.compile("(?<=://)[^/@]*@")

PAGE_LOCK_TRIED = 2**20
"""Bytes that are page-locked to see whether the device grants it."""


def versions() -> dict[str, str | None]:
    """Of the package, Python and what is used, by name."""
    root = Path(__file__).resolve().parents[1]
    found: dict[str, str | None] = {"hf_l2l": __version__, "revision": _revision(root)}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _revision(root: Path) -> str | None:
    """The git revision if the package is a checkout, with "+" if files of it have changed; None if it is none."""
    if not (root / ".git").exists():
        return None
    try:
        asked = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno", "--", "hf_l2l"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    head, changed = (each.stdout.strip() for each in asked)
    return head + ("+" if changed else "")


def system() -> dict[str, Any]:
    """The operating system and the build of torch."""
    return {
        "os": platform.platform(),
        "python": sys.executable,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_threads": torch.get_num_threads(),
    }


def devices() -> list[dict[str, Any]]:
    """The accelerators, by number; empty without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [_device(torch.device(kind.type, number)) for number in range(torch.accelerator.device_count())]


def _device(device: torch.device) -> dict[str, Any]:
    module: Any = stream.device_module(device)
    memory = stream.memory_info(device) or (None, None)
    capability = module.get_device_capability(device) if hasattr(module, "get_device_capability") else None
    return {
        "device": str(device),
        "name": device_name(device),
        "total_bytes": memory[1],
        "free_bytes": memory[0],
        "capability": ".".join(map(str, capability)) if isinstance(capability, tuple) else None,
        "bf16": bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else None,
    }


def page_locking() -> dict[str, Any]:
    """Whether the current accelerator grants page-locked host memory, and the limit of the process for locked memory,
    in bytes, None without one."""
    from hf_l2l.devices import execution_device

    device = execution_device(None)
    if not stream.can_page_lock(device):
        result = "not used: no accelerator" if device == stream.HOST else f"not used: {device} has no page-locking"
        return {"works": None, "result": result, "limit_bytes": _locked_limit()}
    pages = Pages(PAGE_LOCK_TRIED)
    works = pages.lock(device)
    pages.unlock()
    result = f"{PAGE_LOCK_TRIED} bytes locked" if works else f"refused with code {stream.last_refusal(device)}"
    if not works:
        stream.forget_refusal(device)
    return {"works": works, "result": result, "limit_bytes": _locked_limit()}


def _locked_limit() -> int | None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def host() -> dict[str, Any]:
    """Cores and memory of the host, within the limits of this process."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "processor": device_name(stream.HOST),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "group_cores": host_limits.group_cores(),
        "total_bytes": int(memory.total),
        "available_bytes": host_limits.available_host_bytes(),
        "group_bytes": host_limits.group_bytes(),
        "swap_bytes": int(swap.total),
        "swap_free_bytes": int(swap.free),
    }


def variables(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of the environment that matter, without those that may be secret; passwords in addresses are left
    out, too."""
    given = os.environ if given is None else given
    return {
        name: _PASSWORD_IN_ADDRESS.sub("***@", value)
        for name, value in sorted(given.items())
        if _VARIABLES.match(name) and not _SECRET.search(name)
    }
