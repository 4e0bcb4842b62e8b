"""Registers "sim" with torch, once per process."""

from __future__ import annotations

import os
import threading

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hf_l2l.runtime.observer import HOST_LISTENERS
from hf_l2l.testing import sim_autocast, sim_backward, sim_collectives, sim_device, sim_kernels, sim_patches
from hf_l2l.testing.sim_copies import refuse_races
from hf_l2l.testing.sim_devices import NAME, count_several

_once = threading.Lock()
_started = threading.Event()  # not set where the first backward came too early: every further call then says so too
_libraries: list[torch.library.Library] = []  # what they register lasts only as long as they do


def set_up_once() -> torch.device:
    """Register the device, unless it is registered already, and return it."""
    with _once:
        if not _libraries:
            _refuse_other_accelerator()
            guard = sim_backward.DeviceGuard()
            _setup_privateuseone_for_python_backend(NAME, backend_module=sim_device, device_guard=guard)
            count_several()
            sim_backward.let_exceptions_through()
            library, anything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
            _libraries.extend((library, anything))
            sim_kernels.register(library, anything)
            sim_autocast.register(library, anything)
            sim_patches.apply(library)
            sim_collectives.register()
            sim_device.manual_seed_all(torch.initial_seed())
            HOST_LISTENERS.append(refuse_races)
        if not _started.is_set():
            _refuse_late_start()
            _started.set()
        os.environ[sim_patches.DEVICE_VARIABLE] = f"{NAME}:0"
    return torch.device(NAME, 0)


def _refuse_other_accelerator() -> None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    taken = torch._C._get_privateuse1_backend_name()
    if found is not None or taken != "privateuseone":
        raise RuntimeError(
            f"the simulated accelerator must be the only one of the process (found {found or taken}); hide the other "
            f"one, for CUDA with CUDA_VISIBLE_DEVICES='' in the environment"
        )


def _refuse_late_start() -> None:
    """Run one backward on the device, which also fixes its autograd thread for the process."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones((), device=torch.device(NAME, 0), requires_grad=True)
            (x * 2).backward()
    except RuntimeError as error:
        raise RuntimeError(
            "enable_simulated_accelerator must be called before the first backward of the process: torch fixes then "
            "which devices have an autograd thread; call it at the start of the script, or restart the kernel"
        ) from error
