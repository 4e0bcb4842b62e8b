"""The devices that layers run on: what a user gives, checked against what the machine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_l2l.runtime.stream import HOST

Devices = torch.device | str | None | Sequence[torch.device | str]
"""What a user gives as execution devices."""

_NEEDED = ("is_available", "device_count", "get_rng_state", "set_rng_state")
"""Functions of a device's torch module without which no layer runs there. Streams, events and sizes of memory may also
come from torch's interface for any accelerator; without streams, copies are made in program order, and without
`cudart`, memory is pageable."""


def check_device_name(device: Any) -> None:
    """Raise ValueError unless `device` names a torch device, one of this machine or not."""
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is no device")
        torch.device(device)
    except (RuntimeError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"device must name a torch device (got {device!r}: {error}); write 'cuda', or leave it out for the "
            "current accelerator"
        ) from error


def named_devices(devices: Devices) -> Devices:
    """`devices` as they were given, several as a tuple, so that equal ones are equal.

    Raises:
        ValueError: if one of them names no torch device, or there is none.
    """
    if not isinstance(devices, list | tuple):
        if devices is not None:
            check_device_name(devices)
        return devices
    if not devices:
        raise ValueError("device must name at least one device (got none); leave it out for the current accelerator")
    for each in devices:
        check_device_name(each)
    return tuple(devices)


def execution_devices(device: Devices) -> list[torch.device]:
    """The devices that layers run on, each with an index: one, or several of one type; see `execution_device`.

    Raises:
        ValueError: also if they are of different types, or one is given twice.
    """
    given = [device] if device is None or isinstance(device, str | torch.device) else list(device)
    found = [_execution_device(each) for each in given]
    if len({each.type for each in found}) > 1:
        raise ValueError(
            f"several execution devices must be of one type (got {', '.join(map(str, found))}); give those of one"
        )
    twice = next((each for number, each in enumerate(found) if each in found[:number]), None)
    if twice is not None:
        raise ValueError(
            f"each execution device is given once (got {', '.join(map(str, given))}, where {twice} is there twice); "
            "leave it out the second time"
        )
    return found


def execution_device(device: Devices) -> torch.device:
    """The first device that layers run on, where the modules outside the layers run, too."""
    return execution_devices(device)[0]


def _execution_device(device: torch.device | str | None) -> torch.device:
    """The device that layers run on: `device` if given, else the current accelerator, else the CPU.

    A device type without an index becomes the current device of that type.

    Raises:
        ValueError: if torch knows no such device, this machine has none, or its torch module lacks a function that is
            needed.
    """
    if device is None:
        # check_available: a build of torch for an accelerator also runs on machines that have none.
        device = torch.accelerator.current_accelerator(check_available=True) or HOST
    check_device_name(device)
    device = torch.device(device)
    if device.type == "cpu":
        return HOST
    try:
        module = torch.get_device_module(device)
    except RuntimeError as error:  # a type that is no accelerator, such as meta
        raise ValueError(
            f"the execution device must be able to run a layer (got {device}: {error}); set device to None for the "
            "current accelerator, or to 'cpu'"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"the torch module of the execution device must have {', '.join(_NEEDED)}: layers run on a device that is "
            "there, and their recompute repeats the random draws of the forward (got "
            f"{device}: {module.__name__} has no {', '.join(missing)}); set device to 'cpu', or add "
            f"{'the function' if len(missing) == 1 else 'the functions'} to {module.__name__}"
        )
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise ValueError(
            f"the execution device must be one this machine has (got {device}); set device to None for the current "
            "accelerator, or to 'cpu'"
        )
    if device.index is not None:
        return device
    current = getattr(module, "current_device", None)  # torch.mps lacks it, and has one device
    return torch.device(device.type, 0 if current is None else current())
