"""The other ranks of this host: messages to and from them, and whether they are alive.

Each pair of ranks has a UNIX socket. What a rank has written to shared memory before it sends a message is there for
whoever has received it: the system orders both, on every kind of processor. A rank that ends closes its sockets, which
the others notice at once. One that is stopped sends no more heartbeats.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import NoReturn

from torch import distributed

from hf_l2l.ranks.messages import NOT_BEFORE
from hf_l2l.ranks.watch import AGAIN_S, HEADER, LARGEST, Received, State, leave, start, tell
from hf_l2l.runtime.stall_log import StallLog

_POLL_S = 0.5  # a wait looks for signals of the system in between


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

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        timeout_s: float,
        others: Iterable[socket.socket] = (),
    ) -> None:
        """`sockets` has one of type SOCK_SEQPACKET for each other rank; `others` are closed with them. Within
        `timeout_s` seconds after a rank has failed, this process raises RankFailedError, or has ended."""
        self.rank = rank
        self.ranks = sorted([rank, *sockets])
        """The numbers of all ranks of the host."""
        self.timeout_s = timeout_s
        self._state = State(rank, dict(sockets), timeout_s, others)
        self._sending = threading.Lock()
        self._end = weakref.finalize(self, leave, self._state)
        self._thread = start(self._state)

    @property
    def state(self) -> State:
        """What the thread that receives messages knows."""
        return self._state

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed."""
        return self._state.failure is not None

    def on(self, kind: int, received: Received) -> None:
        """Call `received` with each message of this kind, in a thread of its own; also with earlier ones."""
        state = self._state
        with state.changed:  # until the earlier ones are taken: those that come meanwhile are later ones
            state.handlers[kind] = received
            for rank in self.ranks:
                for number, content in state.waiting.pop((kind, rank), ()):
                    received(rank, number, content)

    def send(self, kind: int, number: int = 0, content: bytes = b"") -> None:
        """Send a message to all other ranks.

        Raises:
            RankFailedError: if one of them has failed.
        """
        message = HEADER.pack(kind, number) + content
        assert len(message) <= LARGEST, "what is large passes through shared memory"
        with self._sending:
            for to in self._state.sockets.values():
                while not self._sent(to, message):
                    self.check()
                    time.sleep(AGAIN_S)

    @staticmethod
    def _sent(to: socket.socket, message: bytes) -> bool:
        """Whether a rank has taken the message, or takes none any more: the thread that receives will find out whether
        that one has ended in order, as its last message says."""
        try:
            to.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM, errno.EINTR):
                return False  # the system has no memory for it now
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF):
                raise
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
        late: list[int] = []

        def have_come() -> bool:
            late[:] = [rank for rank in others if not waiting[kind, rank]]
            for rank in late:
                if any(waiting[other, rank] for other in not_before):
                    self.refuse(f"rank {rank} has gone on while rank {self.rank} waited: {why}")
            return not late

        self.wait(have_come, why, late)
        found = {self.rank: content}
        for rank in others:
            theirs, found[rank] = waiting[kind, rank].popleft()
            if theirs != number:
                self.refuse(f"rank {self.rank} is at number {number} and rank {rank} at {theirs}: {why}")
        return found

    def refuse(self, found: str) -> NoReturn:
        """Raise OtherCallsError, and have the others raise it, too."""
        self.check()  # after a failure, ranks are not where they would be
        error = OtherCallsError(found)
        self.tell_failure(str(error))
        raise error

    def wait(self, until: Callable[[], bool], why: str, of: Collection[int] | None = None) -> None:
        """Wait until `until` returns True, which is asked after each message; `why` says what for, and `of` for which
        ranks (None: for all); it may change.

        Raises:
            RankFailedError: if a rank has failed.
        """
        state, is_logged = self._state, False
        with state.changed, ExitStack() as stack:
            while not until():
                self.check(why, of)
                if not state.changed.wait(_POLL_S) and not is_logged:
                    is_logged = True
                    stack.enter_context(StallLog().inside(f"waiting until {why}, {{seconds}} so far"))

    def check(self, why: str = "", of: Collection[int] | None = None) -> None:
        """Raise RankFailedError if a rank has failed, if one of those that this one waits for (`why`, `of`: None is
        all) has left, or if this one has."""
        state = self._state
        if state.is_closing:
            raise RankFailedError(f"rank {self.rank} has left the others: its model is detached", self.rank)
        if state.failure is None and why:
            gone = state.left if of is None else state.left.intersection(of)
            if gone:
                state.fail(min(gone), "it has ended its training, or detached its model")
        if state.failure is not None:
            self.error_is_raised()
            rank, text = state.failure
            where = f", while rank {self.rank} waited: {why}" if why else ""
            raise RankFailedError(f"rank {rank} has failed: {text}{where}", rank)

    def cannot_reach(self, error: BaseException, why: str, of: Collection[int]) -> NoReturn:
        """Raise RankFailedError after a call of torch.distributed to ranks (`of`) has failed: it names the cause, of
        which this rank may hear a little later.

        Raises:
            Exception: `error` itself, at once, if a rank that is gone does not make torch raise one of its type: out
                of memory, for example.
        """
        # gloo raises plain ones. What has a type of its own, as `torch.OutOfMemoryError` has, is of something else.
        if type(error) is not RuntimeError and not isinstance(error, distributed.DistError):
            raise error
        state, until = self._state, time.monotonic() + self.timeout_s
        with state.changed:
            while not self._knows_end(of) and time.monotonic() < until:
                state.changed.wait(_POLL_S)
        self.check(why, of)
        text = (str(error).splitlines() or [type(error).__name__])[0]
        state.fail(self.rank, f"it cannot reach other ranks: {text}")
        self.check(why)
        raise AssertionError("a rank has failed") from error

    def _knows_end(self, of: Collection[int]) -> bool:
        state = self._state
        return state.is_closing or state.failure is not None or not state.left.isdisjoint(of)

    def error_is_kept(self) -> None:
        """An error that was raised in this thread is kept for later, so that the program has not got it yet: if it
        waits for something else when a rank has failed, the process is still to be ended."""
        self._state.told.discard(threading.get_ident())

    def error_is_raised(self) -> None:
        """The program gets an error now, after which it is not ended for the failure of a rank."""
        self._state.told.add(threading.get_ident())

    def tell_failure(self, text: str) -> None:
        """Tell the others that this rank cannot continue, of which its program gets an error: they raise one, too. If
        that is because another rank has failed, they are told of that one."""
        self.error_is_raised()
        tell(self._state, text)

    def close(self) -> None:
        """Leave the others, which do not take that for a failure unless they wait for this rank."""
        self._state.detaches = True
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)
