"""The thread that hears of the other ranks: it receives messages, sends heartbeats, and finds out who has failed.

It refers to no object of the program, so that what is given up can be freed and closes its connections.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import TracebackType

from hf_l2l.ranks.messages import FAILED, HEARTBEAT, LEAVING

HEADER = struct.Struct("<BQ")
"""Of a message: its kind, and a number that its kind gives a meaning."""
LARGEST = 2**16
"""Bytes of a message."""
AGAIN_S = 0.001
"""Until a message is sent again to a rank that has not read the earlier ones."""
_HEARTBEATS = 5
"""In the time after which a rank without any counts as failed: half of the timeout."""
_ENDS_AFTER = 0.4
"""Of the timeout, from a failure until the process is ended: with the half in which a silent rank is noticed, and two
of the steps in which this thread looks, it is the whole."""
_LEAVES_WITHIN = 0.1
"""Of the timeout: for a rank that does not read, so that the message that this one leaves cannot be sent."""

_OWN_KINDS = (HEARTBEAT, LEAVING, FAILED)

Received = Callable[[int, int, bytes], None]
"""What is called with a message: the rank that has sent it, its number, and its content."""


class State:
    """What the thread shares with `Peers`, to which it does not refer."""

    def __init__(
        self, rank: int, sockets: dict[int, socket.socket], timeout_s: float, others: Iterable[socket.socket]
    ) -> None:
        self.rank = rank
        self.sockets = sockets
        """Those for messages, by rank."""
        self.timeout_s = timeout_s
        self.wakes, self.woken = socket.socketpair()
        """The thread looks at once when something is sent to the second one."""
        self.others = [*others, self.wakes, self.woken]
        """Further sockets, which are closed with them."""
        self.changed = threading.Condition(threading.RLock())
        """Notified after each message, and after a failure."""
        self.waiting: defaultdict[tuple[int, int], deque[tuple[int, bytes]]] = defaultdict(deque)
        """Kind and rank -> number and content of messages that nothing has taken yet."""
        self.handlers: dict[int, Received] = {}
        self.left: set[int] = set()
        """Ranks that have ended their part in order."""
        self.failure: tuple[int, str] | None = None
        """The first rank that has failed, and how."""
        self.failed_at = 0.0
        self.is_announced = False
        """Whether the others are told of it, by a thread that holds the lock until they have been."""
        self.announcing = threading.RLock()
        self.told: set[int] = set()
        """Threads in which the error was raised and has not been kept for later: the program has got it."""
        self.far: list[Callable[[bytes, float], None]] = []
        """What sends a last message to each counterpart on another host, until a time of the monotonic clock."""
        self.far_calls: list[Callable[[], None]] = []
        """What ends waits of other threads, as for calls of torch.distributed, once this rank leaves."""
        self.far_threads: list[threading.Thread] = []
        """Threads that make such calls."""
        self.far_landed: dict[int, tuple[int, int]] = {}
        """Counterpart -> the number of the first gradients of its last backward, and how often it had asked before."""
        self.is_closing = False
        self.detaches = False
        """Whether the program ends its part; else it is given up, or at its end."""

    def fail(self, rank: int, text: str) -> None:
        """Keep the first failure."""
        with self.changed:
            if self.failure is None:
                self.failure, self.failed_at = (rank, text), time.monotonic()
                self.changed.notify_all()

    def forget(self, thread: threading.Thread | None, end: Callable[[], None]) -> None:
        """A thread has ended, and `end` is not to be called any more."""
        if thread in self.far_threads:
            self.far_threads.remove(thread)
        if end in self.far_calls:
            self.far_calls.remove(end)

    def close(self) -> None:
        """Close all sockets."""
        for each in (*self.sockets.values(), *self.others):
            each.close()


_open: weakref.WeakSet[State] = weakref.WeakSet()


def start(state: State) -> threading.Thread:
    """Start the thread."""
    _open.add(state)
    thread = threading.Thread(target=_watch, args=(state,), name="hf_l2l ranks", daemon=True)
    thread.start()
    return thread


def _close_in_child() -> None:
    """A forked process, as the workers of data loaders are, does not hold the connections of its parent: else the
    others would not notice the end of that."""
    for state in list(_open):
        state.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def leave(state: State) -> None:
    """Tell the others how this rank has ended its part, and end the thread."""
    error = getattr(sys, "last_value", None)  # set by Python when it has printed an error that nothing has caught
    if error is not None and not state.detaches:
        state.fail(state.rank, f"its program has raised {type(error).__name__}")
    if state.failure is None:
        send_to_all(state, HEADER.pack(LEAVING, 0))
    else:
        announce(state)
    state.is_closing = True
    for to in state.sockets.values():
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        state.wakes.send(b"w")
    with state.changed:
        state.changed.notify_all()
    for end in [*state.far_calls]:
        end()
    # A thread that comes back from torch while Python ends would end the process with an error.
    until = time.monotonic() + _LEAVES_WITHIN * state.timeout_s
    for thread in [*state.far_threads]:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def tell(state: State, text: str) -> None:
    """Tell the others that this rank has failed, or of the rank that has failed before."""
    if state.failure is None:
        send_to_all(state, _failed(state.rank, text))
    else:
        announce(state)


def announce(state: State) -> None:
    """Tell the others which rank has failed: whoever hears of the end of this one first shall not take it for the
    cause."""
    # While another thread tells them, this one waits: it may be about to close the sockets. It does so for a time, for
    # it may be collecting garbage in the midst of what the other one waits for.
    has_lock = state.announcing.acquire(timeout=_LEAVES_WITHIN * state.timeout_s)
    try:
        with state.changed:
            if state.failure is None or state.is_announced:
                return
            state.is_announced = True
            rank, text = state.failure
        send_to_all(state, _failed(rank, text))
    finally:
        if has_lock:
            state.announcing.release()


def _failed(rank: int, text: str) -> bytes:
    return HEADER.pack(FAILED, rank) + shortened(text, LARGEST // 2)


def shortened(text: str, num_bytes: int) -> bytes:
    """The text in at most so many bytes; its end says so if something is left out."""
    whole, end = text.encode(), b" [...]"
    return whole if len(whole) <= num_bytes else whole[: num_bytes - len(end)].decode(errors="ignore").encode() + end


def send_to_all(state: State, message: bytes) -> None:
    """Send the last message of this rank, for which others have to make room soon."""
    until = time.monotonic() + _LEAVES_WITHIN * state.timeout_s
    for rank, to in state.sockets.items():
        if rank in state.left:
            continue
        with suppress(OSError):  # it has ended
            while not _is_sent(to, message) and time.monotonic() < until:
                time.sleep(AGAIN_S)
    for send in state.far:
        send(message, until)


def _is_sent(to: socket.socket, message: bytes) -> bool:
    """Whether there was room for a message."""
    try:
        to.send(message, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


# ---- the thread


def _watch(state: State) -> None:
    """Receive messages and send heartbeats until this rank leaves."""
    with ExitStack() as stack:
        stack.callback(state.close)
        watch = _Watch(state)
        while not state.is_closing:
            with _Failing(state):
                watch.look()
            if state.failure is None:
                continue
            announce(state)
            ends = time.monotonic() - state.failed_at > _ENDS_AFTER * state.timeout_s
            if ends and not state.told and not state.is_closing:
                _end_process(state)


class _Failing:
    """An error of this thread, or of what is called with a message, is a failure of this rank; the thread goes on, to
    see to it that the process ends."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> bool:
        if error is not None and not self.state.is_closing:  # whose sockets may be closed already
            text = traceback.format_exception_only(error)[0].strip()
            self.state.fail(self.state.rank, f"it cannot take a message: {text}")
            time.sleep(AGAIN_S)
        return True


class _Watch:
    """When each rank was heard of, and when this one has sent its last heartbeat."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.interval = state.timeout_s / 2 / _HEARTBEATS
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(state.sockets, self._looked)
        self._beat = 0.0

    def look(self) -> None:
        """Wait for messages, at most half of an interval, and see who is late."""
        state, ready = self.state, self._ready()
        now = time.monotonic()
        if now - self._looked > 2 * self.interval:  # this process itself has been stopped: nobody is late
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        for rank in ready:
            self._heard[rank] = now
            receive(state, rank)
        if now - self._beat >= self.interval:
            self._beat = now
            for rank, to in state.sockets.items():
                with suppress(OSError):  # full: it has messages to read, and is asked again
                    if rank not in state.left:
                        to.send(HEADER.pack(HEARTBEAT, 0), socket.MSG_DONTWAIT)
        for rank, since in self._heard.items():
            if now - since > _HEARTBEATS * self.interval and rank not in state.left:
                state.fail(rank, f"it has not answered for {state.timeout_s / 2:g} seconds")

    def _ready(self) -> list[int]:
        """The ranks with messages, after a wait for them. (Not `select`, which refuses descriptors from 1024 on.)"""
        poll = select.poll()
        listening = {s.fileno(): rank for rank, s in self.state.sockets.items() if rank not in self.state.left}
        for descriptor in listening:
            poll.register(descriptor, select.POLLIN)
        poll.register(self.state.woken, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(500 * self.interval)]
        return [listening[descriptor] for descriptor in ready if descriptor in listening]


def receive(state: State, rank: int) -> None:
    """Take the next message of a rank."""
    message = _next(state.sockets[rank])
    with state.changed:
        if not message:
            if not state.is_closing and rank not in state.left:
                state.fail(rank, "its process has ended")
            state.left.add(rank)
            state.changed.notify_all()
            return
        kind, number = HEADER.unpack_from(message)
        content = message[HEADER.size :]
        if kind == LEAVING:
            state.left.add(rank)
        elif kind == FAILED:
            state.fail(number, content.decode(errors="replace"))
        handler = state.handlers.get(kind)
        if handler is None and kind not in _OWN_KINDS:
            state.waiting[kind, rank].append((number, content))
        if kind != HEARTBEAT:  # else a wait would never be a long one, which is logged
            state.changed.notify_all()
    if handler is not None:
        handler(rank, number, content)
        with state.changed:
            state.changed.notify_all()


def _next(of: socket.socket) -> bytes:
    """The next message; empty if there will be none any more."""
    # Where a rank has closed its socket before it read all of ours, Linux first tells that, once; what it had sent
    # before, as the reason, comes after it.
    for _ in range(2):
        try:
            return of.recv(LARGEST)
        except ConnectionResetError:
            continue
        except OSError:
            break
    return b""


def _end_process(state: State) -> None:
    """End this process: a rank has failed, and the program waits where no error can be raised."""
    assert state.failure is not None
    rank, text = state.failure
    written = f"hf_l2l: rank {rank} has failed: {text}; rank {state.rank} waits for something else, and is ended\n"
    with suppress(OSError):  # not `sys.stderr`: a thread that is stopped may hold its lock
        os.set_blocking(2, False)
        os.write(2, written.encode())
    os._exit(1)
