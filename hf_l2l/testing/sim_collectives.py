"""Collectives of torch.distributed on "sim": those of gloo, on the memory of the devices, in the order of streams."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_l2l.testing.sim_copies import in_order
from hf_l2l.testing.sim_devices import NAME
from hf_l2l.testing.sim_race import ORDER, Touch
from hf_l2l.testing.sim_tensor import host_view

BACKEND = "simccl"


class SimGroup(dist.ProcessGroup):
    """A process group whose tensors are on "sim". A call is a kernel of the current stream."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # what the stubs lack
        self._gloo = gloo

    def getBackendName(self) -> str:
        """Return the name under which torch knows it."""
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit later calls."""
        self._gloo.set_timeout(timeout)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any = None,
    ) -> Any:
        """Send a part of `given` to each process, and receive one of each in `output`."""
        touches = [Touch(given, True, False), Touch(output, False, True)]
        index = output.device.index
        with in_order("c10d::alltoall_base", touches, index) if ORDER.active else contextlib.nullcontext():
            work = self._gloo.alltoall_base(host_view(output), host_view(given), output_sizes, input_sizes, options)
            work.wait()
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        """Receive host tensors from a process."""
        return self._gloo.recv(tensors, source, tag)

    def abort(self) -> None:
        """Do nothing, as gloo does."""


def register() -> None:
    """Let torch.distributed use it for tensors on "sim"."""
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _made, devices=[NAME])


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> SimGroup:
    gloo: Any = dist
    return SimGroup(gloo.ProcessGroupGloo(store, rank, size, timeout), rank, size)
