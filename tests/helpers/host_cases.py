"""Ranks that take themselves for those of several hosts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import distributed

from hf_l2l.ranks import meeting


def on_hosts(hosts: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` in a rank; the ranks are dealt to so many hosts, the first ones to the first host."""
    near = math.ceil(distributed.get_world_size() / hosts)
    original = meeting.host_of_this_process
    meeting.host_of_this_process = lambda: f"host {distributed.get_rank() // near}"
    try:
        return function(*args)
    finally:
        meeting.host_of_this_process = original
