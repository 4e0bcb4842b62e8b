"""Rehearse a training script on a machine without an accelerator.

`enable_simulated_accelerator("8GiB")` gives torch a second device, "sim", whose memory is host memory that is counted
and limited. Tensors move to it with `.to("sim")`, an operation that mixes it with the host is refused, it draws from a
random generator of its own, backward runs in a thread of its own, and an allocation past its capacity raises
`torch.OutOfMemoryError`. It has streams and events, on which asynchronous copies are as late as the program's waits
allow, and two operations on the same memory that no wait orders raise an error. What a script does wrong with one GPU,
it does wrong here. It says nothing about its own speed; `virtual_clock(Costs(...))` works out how long something takes
on a machine of the speed given. `page_lock_limit` lets page-locking of host memory, by `torch.sim.cudart()`, fail, and
`page_locked_bytes` counts it. `copies_under_way` counts the asynchronous copies that have not landed.

Importing this package registers nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_l2l.testing.sim_clock import Costs, Moment, Task, VirtualClock, virtual_clock
from hf_l2l.testing.sim_copies import copies_under_way
from hf_l2l.testing.sim_pages import page_lock_limit, page_locked_bytes
from hf_l2l.testing.sim_worker import engine_on_clock

if TYPE_CHECKING:
    import torch

__all__ = [
    "Costs",
    "Moment",
    "Task",
    "VirtualClock",
    "copies_under_way",
    "enable_simulated_accelerator",
    "engine_on_clock",
    "page_lock_limit",
    "page_locked_bytes",
    "virtual_clock",
]


def enable_simulated_accelerator(
    capacity: int | str | None = None, *, devices: int = 1, peer_access: bool = True
) -> torch.device:
    """Make "sim" the accelerator of this process, and return its first device.

    Call it before the first backward of the process (torch then fixes which devices have an autograd thread) and
    before `TrainingArguments` or `Accelerator` are made; both pick "sim" from then on, until the process ends.
    Calling it again only changes the capacity, and how many devices the program sees.

    Args:
        capacity: bytes each device holds, as an integer or as "8GiB" or "500MB"; None for no limit.
        devices: how many there are, "sim:0" and so on; at most 8. Each has memory, streams, links and a generator.
        peer_access: whether they say that one can read memory of another.

    Raises:
        ValueError: the capacity is not a positive number of bytes, or so many devices cannot be.
        RuntimeError: another accelerator is in use, or a backward has run already.
    """
    from hf_l2l.testing.sim_devices import Visible
    from hf_l2l.testing.sim_memory import ACCOUNTS, parse_bytes
    from hf_l2l.testing.sim_setup import set_up_once

    limit = None if capacity is None else parse_bytes(capacity)
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= len(ACCOUNTS):
        raise ValueError(f"devices must be a whole number from 1 to {len(ACCOUNTS)} (got {devices!r}); use 1")
    device = set_up_once()
    if devices > 1 and not Visible.counted:
        raise RuntimeError(
            f"devices={devices} needs the headers of torch, which this installation does not have; leave it out"
        )
    Visible.count, Visible.have_peer_access = devices, peer_access
    for account in ACCOUNTS:
        account.capacity = limit
    return device
