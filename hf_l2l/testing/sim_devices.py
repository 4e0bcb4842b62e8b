"""How many simulated accelerators there are, and what torch must know of those after the first one.

A backend that is written in Python has one device: torch asks it for no number, and makes tensors of index 0. So the
function of torch that counts devices is replaced before the first backward, in the table of virtual functions of the
object that torch has registered; where it stands in the table is read from the header that comes with torch. The first
tensor of each further device comes through DLPack, which takes an index, and all others are made like it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from hf_l2l.testing.sim_race import CURRENT, MOST_DEVICES

NAME = "sim"
GENERATORS = tuple(torch.Generator("cpu") for _ in range(MOST_DEVICES))
"""The random generator of each device.

They are separate from the host's, like those of GPUs: code that saves and restores only the host's generator around a
recomputation draws other dropout masks here, as on a GPU. With equal seeds, all generators draw the same numbers.
Every random operation with a host kernel takes a generator, except dropout, which `sim_kernels` implements.
"""

_HOST_KERNELS = DispatchKeySet(DispatchKey.CPU)
_EXT_DEV = 12
"""DLPack's number of what torch calls PrivateUse1."""
_HEADER = "include/c10/core/impl/DeviceGuardImplInterface.h"


def _keep(*objects: Any) -> None:
    """Never free these: torch refers to their memory, also when the interpreter has ended."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class Visible:
    """The devices that the program sees."""

    count = 1
    have_peer_access = True
    """Whether one reads memory of another."""
    counted = False
    """Whether torch has been told that there may be several."""


def index_of(device: Any) -> int:
    """Return the index of a device that is given as torch does: by index, name or device; None is the current one.

    Raises:
        ValueError: it is not one of the simulated ones.
    """
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    known = index in (None, -1) or (isinstance(index, int) and 0 <= index < Visible.count)
    if not known or (isinstance(device, torch.device) and device.type != NAME):
        others = "0 or None, the only one" if Visible.count == 1 else f"an index below {Visible.count}, or None"
        raise ValueError(f"device must be 'sim', 'sim:0', {others} (got {device})")
    return CURRENT.device if index in (None, -1) else int(index)


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make `index` the current device of the thread inside."""
    before = CURRENT.device
    CURRENT.device = index
    try:
        yield
    finally:
        CURRENT.device = before


def count_several() -> None:
    """Let torch count as many devices as there can be, if its header tells where the function is; before the first
    backward of the process, in which torch makes a thread for each."""
    root = Path(torch.__file__).parent
    library, header = root / "lib" / "libc10.so", root / _HEADER
    if not (library.is_file() and header.is_file()):
        return
    names = re.findall(r"^  virtual [^;{]*?(\w+)\(", header.read_text(), re.M)
    if "deviceCount" not in names:
        return
    registry = (ctypes.c_void_p * 32).in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    guard = ctypes.cast(registry[torch._C._autograd.DeviceType.PrivateUse1.value], ctypes.POINTER(ctypes.c_void_p))
    before, size = guard[0], len(names) + 4
    assert before is not None, "the guard has been registered"
    # Two entries before the functions tell of the type; a destructor has two of its own.
    words = [each or 0 for each in (ctypes.c_void_p * size).from_address(before - 2 * ctypes.sizeof(ctypes.c_void_p))]
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda guard: MOST_DEVICES)
    words[2 + names.index("deviceCount")] = ctypes.cast(count, ctypes.c_void_p).value or 0
    table = (ctypes.c_void_p * size)(*words)
    guard[0] = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)
    _keep(table, count)
    Visible.counted = True


def empty_on(index: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of shape (0,) on a device, to be given memory."""
    if index == 0:
        return torch._C._acc.create_empty_tensor((0,), dtype)
    first = _first_of(index, dtype, torch.is_inference_mode_enabled())
    found: torch.Tensor = torch.ops.aten.detach.default.redispatch(_HOST_KERNELS, first)
    return found


@functools.cache
def _first_of(index: int, dtype: torch.dtype, in_inference_mode: bool) -> torch.Tensor:
    """The tensor that others are made like; in inference mode, which the caller is in or not, another one: what is
    made like an inference tensor is one, too, and else not."""
    if dtype != torch.float32:
        as_dtype: torch.Tensor = torch.ops.aten.view.dtype.redispatch(
            _HOST_KERNELS, _first_of(index, torch.float32, in_inference_mode), dtype
        )
        return as_dtype
    shape, strides, memory = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1), (ctypes.c_char * 64)()
    whole = _Tensor(ctypes.addressof(memory), _EXT_DEV, index, 1, 2, 32, 1, shape, strides, 0)
    managed = _Managed(whole, None, _Managed.Deleter())  # nothing is called when torch is done with it
    _keep(shape, strides, memory, managed)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    found: torch.Tensor = torch._C._from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
    return found


class _Tensor(ctypes.Structure):
    """DLPack's `DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLPack's `DLManagedTensor`."""

    Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter))
