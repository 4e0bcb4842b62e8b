"""The other ranks of this host: messages to and from them, and whether they are alive.

Each pair of ranks has a UNIX socket. What a rank has written to shared memory before it sends a message is there for
whoever has received it: the system orders both, on every kind of processor. A rank that ends closes its sockets, which
the others notice at once. One that is stopped sends no more heartbeats.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from hf_l2l.ranks.messages import FAILED, HEARTBEAT, LEAVING, NOT_BEFORE
from hf_l2l.runtime.stall_log import StallLog

_HEADER = struct.Struct("<BQ")
"""Of a message: its kind, and a number that its kind gives a meaning."""
_LARGEST = 2**16
"""Bytes of a message."""
_HEARTBEATS = 5
"""In the time after which a rank without any counts as failed."""
_AGAIN_S = 0.001  # until a message is sent again to a rank that has not read the earlier ones
_POLL_S = 0.5  # a wait looks for signals of the system in between

_OWN_KINDS = (HEARTBEAT, LEAVING, FAILED)

Received = Callable[[int, int, bytes], None]
"""What is called with a message: the rank that has sent it, its number, and its content."""


class OtherCallsError(RuntimeError):
    """The ranks do not run the same forwards, backwards and steps."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"all ranks must run the same forwards, backwards and steps (got others: {found}); give each rank as many "
            "batches, and let no rank leave out a step"
        )


class RankFailedError(RuntimeError):
    """Another rank has ended, or does not answer: the training cannot continue in this one."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank
        """The number of that rank."""

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class Peers:
    """Messages among the ranks of one host.

    A thread receives them; it also finds out which ranks have failed. Every wait for a rank ends with an error when
    one has failed. If the program does not notice that, since it waits for something else, the process is ended.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`sockets` has one of type SOCK_SEQPACKET for each other rank. Within `timeout_s` seconds after a rank has
        failed, this process raises RankFailedError, or has ended."""
        self.rank = rank
        self.ranks = sorted([rank, *sockets])
        """The numbers of all ranks of the host."""
        self.timeout_s = timeout_s
        self._state = _State(rank, dict(sockets), timeout_s)
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=_watch, args=(self._state,), name="hf_l2l ranks", daemon=True)
        self._end = weakref.finalize(self, _leave, self._state)
        _open.add(self._state)
        self._thread.start()

    def on(self, kind: int, received: Received) -> None:
        """Call `received` with each message of this kind, in a thread of its own; also with earlier ones."""
        state = self._state
        with state.changed:
            state.handlers[kind] = received
            early = [(rank, *message) for rank in self.ranks for message in state.waiting.pop((kind, rank), ())]
        for rank, number, content in early:
            received(rank, number, content)

    def send(self, kind: int, number: int = 0, content: bytes = b"") -> None:
        """Send a message to all other ranks.

        Raises:
            RankFailedError: if one of them has failed.
        """
        message = _HEADER.pack(kind, number) + content
        assert len(message) <= _LARGEST, "what is large passes through shared memory"
        with self._sending:
            for rank, to in self._state.sockets.items():
                while not self._sent(rank, to, message):
                    self.check()
                    time.sleep(_AGAIN_S)

    def _sent(self, rank: int, to: socket.socket, message: bytes) -> bool:
        """Whether a rank has taken the message; what one that has left does not take is dropped."""
        try:
            to.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            with self._state.changed:
                if rank not in self._state.left:
                    self._state.fail(rank, f"it has closed its connection ({error.strerror})")
        return True

    def gather(self, kind: int, number: int, content: bytes, why: str) -> dict[int, bytes]:
        """Send `content` to all ranks, and return what each rank has sent: rank -> content.

        All ranks call this with the same kinds and numbers, in the same order for each kind. Returns when all have.

        Raises:
            RankFailedError: if a rank has failed.
            RuntimeError: if a rank is at another number: it has made other calls.
        """
        self.send(kind, number, content)
        waiting = self._state.waiting
        others = [rank for rank in self.ranks if rank != self.rank]
        not_before = NOT_BEFORE.get(kind, ())

        def have_come() -> bool:
            late = [rank for rank in others if not waiting[kind, rank]]
            for rank in late:
                if any(waiting[other, rank] for other in not_before):
                    self._refuse(f"rank {rank} has gone on while rank {self.rank} waited: {why}")
            return not late

        self.wait(have_come, why)
        found = {self.rank: content}
        for rank in others:
            theirs, found[rank] = waiting[kind, rank].popleft()
            if theirs != number:
                self._refuse(f"rank {self.rank} is at number {number} and rank {rank} at {theirs}: {why}")
        return found

    def _refuse(self, found: str) -> None:
        error = OtherCallsError(found)
        self.tell_failure(str(error))
        raise error

    def wait(self, until: Callable[[], bool], why: str) -> None:
        """Wait until `until` returns True, which is asked after each message; `why` says what for.

        Raises:
            RankFailedError: if a rank has failed.
        """
        state, is_logged = self._state, False
        with state.changed, ExitStack() as stack:
            while not until():
                self.check(why)
                if not state.changed.wait(_POLL_S) and not is_logged:
                    is_logged = True
                    stack.enter_context(StallLog().inside(f"waiting until {why}, {{seconds}} so far"))

    def wake(self) -> None:
        """Have the waits of other threads look again."""
        with self._state.changed:
            self._state.changed.notify_all()

    def check(self, why: str = "") -> None:
        """Raise RankFailedError if a rank has failed, or has left while this one waits (`why`) for it."""
        state = self._state
        if state.failure is None and why and state.left:
            rank = min(state.left)
            with state.changed:
                state.fail(rank, "it has ended its training, or detached its model")
        if state.failure is not None:
            state.is_told = True
            rank, text = state.failure
            where = f", while rank {self.rank} waited: {why}" if why else ""
            raise RankFailedError(f"rank {rank} has failed: {text}{where}", rank)

    def tell_failure(self, text: str) -> None:
        """Tell the others that this rank cannot continue: they raise an error, too."""
        with suppress(RankFailedError):
            self.send(FAILED, 0, text.encode()[: _LARGEST // 2])

    def close(self) -> None:
        """Leave the others, which do not take that for a failure unless they wait for this rank."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)


class _State:
    """What the thread that receives messages shares with `Peers`, to which it does not refer."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.sockets = sockets
        self.timeout_s = timeout_s
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
        self.is_told = False
        """Whether the program has got the error."""
        self.is_closing = False

    def fail(self, rank: int, text: str) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure, self.failed_at = (rank, text), time.monotonic()
            self.changed.notify_all()


_open: weakref.WeakSet[_State] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, as the workers of data loaders are, does not hold the connections of its parent: else the
    others would not notice the end of that."""
    for state in list(_open):
        for each in state.sockets.values():
            each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _leave(state: _State) -> None:
    """Tell the others that this rank has ended its part, and end the thread."""
    state.is_closing = True
    for to in state.sockets.values():
        with suppress(OSError):
            to.send(_HEADER.pack(LEAVING, 0), socket.MSG_DONTWAIT)
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)


def _watch(state: _State) -> None:
    """Receive messages and send heartbeats until this rank leaves."""
    interval = state.timeout_s / 2 / _HEARTBEATS
    heard = dict.fromkeys(state.sockets, time.monotonic())
    beat = 0.0
    with ExitStack() as stack:
        stack.callback(partial(_close, state))
        before = time.monotonic()
        while not state.is_closing:
            listening = {each: rank for rank, each in state.sockets.items() if rank not in state.left}
            ready: list[socket.socket] = []
            if listening:
                ready = select.select(list(listening), [], [], interval)[0]
            else:
                time.sleep(interval)
            now = time.monotonic()
            if now - before > 2 * interval:  # this process itself has been stopped: nobody is late
                heard = dict.fromkeys(heard, now)
            before = now
            for each in ready:
                heard[listening[each]] = now
                _receive(state, listening[each], each)
            if now - beat >= interval:
                beat = now
                _send_heartbeat(state)
            with state.changed:
                for rank, since in heard.items():
                    if now - since > _HEARTBEATS * interval and rank not in state.left:
                        state.fail(rank, f"it has not answered for {state.timeout_s / 2:g} seconds")
            if state.failure is not None and not state.is_told and now - state.failed_at > state.timeout_s / 2:
                _end_process(state)


def _receive(state: _State, rank: int, each: socket.socket) -> None:
    """Take the next message of a rank."""
    try:
        message = each.recv(_LARGEST)
    except OSError:
        message = b""
    with state.changed:
        if not message:
            if not state.is_closing and rank not in state.left:
                state.fail(rank, "its process has ended")
            state.left.add(rank)
            state.changed.notify_all()
            return
        kind, number = _HEADER.unpack_from(message)
        content = message[_HEADER.size :]
        if kind == LEAVING:
            state.left.add(rank)
        elif kind == FAILED:
            state.fail(rank, content.decode(errors="replace"))
        handler = state.handlers.get(kind)
        if handler is None and kind not in _OWN_KINDS:
            state.waiting[kind, rank].append((number, content))
        state.changed.notify_all()
    if handler is not None:
        handler(rank, number, content)
        with state.changed:
            state.changed.notify_all()


def _send_heartbeat(state: _State) -> None:
    for rank, to in state.sockets.items():
        if rank not in state.left:
            with suppress(OSError):  # full: it has messages to read, and is asked again
                to.send(_HEADER.pack(HEARTBEAT, 0), socket.MSG_DONTWAIT)


def _end_process(state: _State) -> None:
    """End this process: a rank has failed, and the program waits where no error can be raised."""
    assert state.failure is not None
    rank, text = state.failure
    sys.stderr.write(
        f"hf_l2l: rank {rank} has failed: {text}; rank {state.rank} waits for something else, and is ended\n"
    )
    sys.stderr.flush()
    os._exit(1)


def _close(state: _State) -> None:
    for each in state.sockets.values():
        each.close()
