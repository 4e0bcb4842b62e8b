"""Raises exceptions of a backward on "sim" in the thread that called it, as on other devices.

While a C++ exception leaves a node of autograd, torch sets the stream that was current before the node, and calls the
device's guard to get the device type. The guard of a device written in Python is a Python call. If the exception was
raised in Python and is still pending (from a tensor hook, or an operation on "sim", but not from a
`torch.autograd.Function`), that call fails because of it, in a destructor, which ends the process. So the guard takes
the pending exception away, and it is raised where the backward was called.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from typing import Any

import torch

from hf_l2l.testing.sim_race import CURRENT, OF_BACKWARD, Streams

_KEY = "hf_l2l.testing: exceptions taken"  # of what torch takes along from the thread that calls a backward

# A call through `pythonapi` raises the exception that is pending, whatever set it. This function does nothing else.
_raise_pending = ctypes.PYFUNCTYPE(None)(("PyErr_Occurred", ctypes.pythonapi))

_add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class DeviceGuard(torch._C._acc.DeviceGuard):
    """Returns the device type to torch, also while an exception is pending."""

    _type = torch._C._autograd.DeviceType.PrivateUse1

    def type_(self) -> Any:
        """Return the type of "sim"."""
        # Nothing can be called before `_raise_pending`, not even what a `with` enters.
        try:
            _raise_pending()
        finally:
            error = sys.exception()
            taken = None if error is None else _taken()
            if error is not None and taken is not None:
                taken.append(error)
            return self._type  # noqa: B012  # the backward that it ends raises it again


def _taken() -> list[BaseException] | None:
    """The exceptions taken in the innermost backward that this thread runs."""
    taken: list[BaseException] | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return taken


def _take_into(taken: list[BaseException] | None) -> None:
    stash(_KEY, taken)


def in_tls(key: str) -> Any:
    """What torch has stashed for this backward, in whichever of its threads; None if there is nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def stash(key: str, value: Any) -> None:
    """Let torch bring `value` to each thread of the backwards that begin from here on; None ends that."""
    known = torch._C._is_key_in_tls(key)
    if value is None and known and hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)
    elif value is not None or known:
        if not adds_reference():
            _add_reference(value)
        torch._C._stash_obj_in_tls(key, value)


@functools.cache
def adds_reference() -> bool:
    """Whether torch adds a reference to what it stashes. Version 2.11 adds none, and gives one back all the same when
    another value takes the place."""
    value = object()
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(f"{_KEY}, tried", value)
    if sys.getrefcount(value) > before:
        return True
    _add_reference(value)  # of this value, which stays stashed
    return False


def let_exceptions_through() -> None:
    """Make every backward raise the exceptions that `DeviceGuard` has taken; called once."""
    graph = importlib.import_module("torch.autograd.graph")
    original = graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outer, taken = _taken(), list[BaseException]()
        streams = in_tls(OF_BACKWARD)
        _take_into(taken)
        if streams is not None or any(CURRENT.streams):
            stash(OF_BACKWARD, Streams(CURRENT.lines, CURRENT.streams))
        try:
            return original(*args, **kwargs)
        except SystemError:  # what Python makes of a failure without an exception
            if not taken:
                raise
        finally:
            _take_into(outer)
            stash(OF_BACKWARD, streams)
        raise taken.pop()  # out here, so that its context stays what it was

    for module in (graph, torch.autograd):
        setattr(module, "_engine_run_backward", run_backward)  # noqa: B010  # torch does not export it
