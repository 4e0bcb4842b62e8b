"""Ranks of other hosts: heartbeats, and the last message of each, over a process group.

Like the thread of `watch`, these refer to no object of the program.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from hf_l2l.ranks.messages import FAILED, HEARTBEAT, LANDED, LEAVING
from hf_l2l.ranks.watch import HEADER, State, announce, shortened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LENGTH = 1024
"""Bytes of a message; shorter ones are filled with zeros."""
_HEARTBEATS = 5
"""In the time after which a rank without any counts as failed: half of the timeout."""

ASKED = struct.Struct("<Q")
"""What follows the header of LANDED: how often a rank has asked the others before."""

_Messages = queue.SimpleQueue[tuple[bytes, threading.Event]]


def watch_far_ranks(state: State, group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Send heartbeats to the counterparts of this rank, and hear theirs, until this rank leaves; `ranks` are their
    numbers in the order of `group`."""
    for place, rank in enumerate(ranks):
        if rank == state.rank:
            continue
        messages: _Messages = queue.SimpleQueue()
        for name, target, given in (("to", _send, (messages,)), ("from", _hear, (rank,))):
            thread = threading.Thread(
                target=target, args=(state, group, place, *given), name=f"hf_l2l {name} rank {rank}", daemon=True
            )
            thread.start()
            state.far_threads.append(thread)
        state.far.append(_Last(messages))


class _Last:
    """Sends the last message to a counterpart."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages

    def __call__(self, message: bytes, until: float) -> None:
        is_sent = threading.Event()
        self._messages.put((message, is_sent))
        is_sent.wait(max(0.0, until - time.monotonic()))


def _send(state: State, group: ProcessGroup, place: int, messages: _Messages) -> None:
    """Send messages to a counterpart, and heartbeats in between."""
    content = torch.zeros(_LENGTH, dtype=torch.uint8)
    while True:
        try:
            message, is_sent = messages.get(timeout=state.timeout_s / 2 / _HEARTBEATS)
        except queue.Empty:
            if state.is_closing:
                return
            message, is_sent = HEADER.pack(HEARTBEAT, 0), threading.Event()
        if message[0] == FAILED:
            message = message[: HEADER.size] + shortened(message[HEADER.size :].decode(), _LENGTH - HEADER.size)
        content.zero_()
        content[: len(message)].copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        try:
            group.send([content], place, 0).wait()
        except RuntimeError:  # it has ended, as the thread that hears it finds out
            return
        finally:
            is_sent.set()
        if message[0] == LEAVING:
            return


def _hear(state: State, group: ProcessGroup, place: int, rank: int) -> None:
    """Hear a counterpart until it leaves, or fails."""
    content = torch.zeros(_LENGTH, dtype=torch.uint8)
    silence = timedelta(seconds=state.timeout_s / 2)
    while not state.is_closing:
        since = time.monotonic()
        try:
            group.recv([content], place, 0).wait(silence)
        except RuntimeError:
            if not state.is_closing:
                is_late = time.monotonic() - since >= silence.total_seconds()  # gloo has no type for that
                ends = f"it has not answered for {state.timeout_s / 2:g} seconds"
                state.fail(rank, ends if is_late else "its process has ended, or cannot be reached")
                announce(state)
            return
        message = content.numpy().tobytes()
        kind, number = HEADER.unpack_from(message)
        if kind == LEAVING:
            with state.changed:
                state.left.add(rank)
                state.changed.notify_all()
            return
        if kind == LANDED:
            with state.changed:
                state.far_landed[rank] = number, *ASKED.unpack_from(message, HEADER.size)
                state.changed.notify_all()
        if kind == FAILED:
            state.fail(number, message[HEADER.size :].rstrip(b"\0").decode(errors="replace"))
            announce(state)
