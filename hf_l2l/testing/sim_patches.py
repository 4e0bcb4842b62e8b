"""Patches that make torch, accelerate and transformers treat "sim" like the accelerators they know by name.

No patch changes a call that does not involve "sim".
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from hf_l2l.testing import sim_device
from hf_l2l.testing.sim_devices import NAME, index_of
from hf_l2l.testing.sim_memory import ACCOUNTS
from hf_l2l.testing.sim_pages import is_page_locked, made_pinned
from hf_l2l.testing.sim_tensor import sim_storage

# accelerate, and through it transformers, knows no device called "sim" but takes the one named here.
DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def apply(library: torch.library.Library) -> None:
    """Apply all patches; called once."""
    library.impl("is_pinned", _is_pinned, "CPU")
    library.impl("_pin_memory", _pin_memory, "CPU")
    _make_storages_by_size()
    _keep_parameters_when_a_module_moves()
    _answer_for_torch_accelerator()
    _let_transformers_train_in_bf16()
    _let_accelerate_use_the_host()


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return is_page_locked(tensor)


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy whose `is_pinned` is True; pinning has no other effect here.

    torch would request pinned memory from the accelerator and fail, for example in `DataLoader(pin_memory=True)`,
    which is the default of `TrainingArguments`.
    """
    return made_pinned(torch.empty_like(tensor, device="cpu").copy_(tensor))


def _make_storages_by_size() -> None:
    """Make `UntypedStorage(size, device="sim")` work, which deep copies and `torch.load` call.

    torch would request the device's allocator; devices written in Python have none, and the process would crash.
    """
    original = torch.UntypedStorage.__new__

    @functools.wraps(original)
    def new(cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is None or torch.device(device).type != NAME:
            if device is not None:
                kwargs["device"] = device
            return original(cls, *args, **kwargs)
        if kwargs or not all(isinstance(a, int) for a in args):
            raise RuntimeError(f"a storage on {NAME} is made from a number of bytes only; copy into it afterwards")
        index = index_of(device)
        ACCOUNTS[index].refuse_past_capacity(sum(args))
        return sim_storage(torch.UntypedStorage(*args), index)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign,assignment]  # the patch


def _keep_parameters_when_a_module_moves() -> None:
    """Make `Module.to("sim")` move parameters in place, as it does for CUDA.

    For CUDA torch moves the data below a parameter; between the host and "sim" it refuses and makes new parameters,
    which would untie tied weights and leave an optimizer with the old ones. Swapping the tensors keeps them.
    """
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def moving_in_place(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps or _crosses(self, fn, recurse))
        try:
            return original(self, fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    torch.nn.Module._apply = moving_in_place  # type: ignore[method-assign]  # the patch


def _crosses(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> bool:
    """Return whether `fn` moves the parameters of `module` to "sim" or away from it."""
    devices = {p.device for p in module.parameters(recurse)}
    with torch.no_grad():
        return any((d.type == NAME) != (fn(torch.empty(0, device=d)).device.type == NAME) for d in devices)


def _answer_for_torch_accelerator() -> None:
    """Make `torch.accelerator` report memory; torch reads the counters of allocators written in C++ only."""
    for name in (
        "empty_cache",
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
    ):
        for module in (torch.accelerator, torch.accelerator.memory):
            setattr(module, name, getattr(sim_device, name))
    for module in (torch.accelerator, torch.accelerator.memory):
        setattr(module, "get_memory_info", sim_device.mem_get_info)  # noqa: B010  # absent from older torch
        setattr(module, "synchronize", sim_device.synchronize)  # noqa: B010
    # torch would count the devices that there may be, and knows no current one.
    torch.accelerator.device_count = sim_device.device_count
    torch.accelerator.current_device_index = sim_device.current_device
    torch.accelerator.set_device_index = sim_device.set_device


def _let_transformers_train_in_bf16() -> None:
    """Make `TrainingArguments(bf16=True)` valid; transformers checks only the devices it knows by name."""
    if importlib.util.find_spec("transformers") is None:
        return
    importlib.import_module("transformers.utils.import_utils")
    for name in ("transformers.utils.import_utils", "transformers.utils", "transformers.training_args"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_torch_bf16_gpu_available"):
            module.is_torch_bf16_gpu_available = sim_device.is_bf16_supported  # type: ignore[attr-defined]


def _let_accelerate_use_the_host() -> None:
    """Make `TrainingArguments(use_cpu=True)` and `Accelerator(cpu=True)` still choose the host.

    accelerate takes "sim" from an environment variable, which it obeys even if the program chooses the host.
    """
    if importlib.util.find_spec("accelerate") is None:
        return
    state = importlib.import_module("accelerate.state").PartialState
    original = state.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        device = os.environ.pop(DEVICE_VARIABLE, None) if cpu else None
        try:
            original(self, cpu, **kwargs)
        finally:
            if device is not None:
                os.environ[DEVICE_VARIABLE] = device

    state.__init__ = init
