"""The counterparts of a rank: those with its place on the other hosts, which it reaches over torch.distributed.

Each place has process groups of its own, so that all ranks of a host use its network together.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_l2l.ranks.far_ranks import ASKED, watch_far_ranks
from hf_l2l.ranks.messages import LANDED
from hf_l2l.ranks.peers import Peers
from hf_l2l.ranks.watch import HEADER

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NEVER_SENT = 2**31 - 1
"""A tag that no message has."""
NO_LIMIT = timedelta(days=365)
"""For calls that wait until other hosts come to them: whether those are alive is found out by their heartbeats."""


class Call:
    """What the thread of the counterparts is to do."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.is_over = False
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Whatever the error is, the thread that waits for the call raises it, and not this one."""
        self.error = error
        return True


class Counterparts:
    """The ranks with the same place on each host, seen from one of them."""

    def __init__(self, ranks: Sequence[int], peers: Peers, group_of: Callable[[str], ProcessGroup]) -> None:
        """
        Args:
            ranks: their numbers, by host; that of this rank is among them.
            peers: the ranks of this host.
            group_of: makes a process group of these ranks by a name.
        """
        self.ranks = list(ranks)
        self.host = self.ranks.index(peers.rank)
        """The number of this host."""
        self.count = len(self.ranks)
        self.others = [rank for rank in self.ranks if rank != peers.rank]
        self._peers = peers
        self.asked = 0
        self.landing = 0
        """The number of the last gradients that this rank has given, or is about to give."""

        def group(name: str) -> ProcessGroup:
            made = group_of(name)
            made.set_timeout(NO_LIMIT)
            peers.state.far_calls.append(partial(wake, made))
            return made

        # One for each thread, since a group takes the calls of all its ranks in the same order.
        self._asks, self.weights = group("asks"), group("weights")
        self.sums, self.sums_back = group("sums"), group("sums back")
        """Sums pass from earlier hosts to later ones over the first, and back over the second."""
        watch_far_ranks(peers.state, group("alive"), self.ranks)
        self._calls = calls = queue.SimpleQueue[Call | None]()
        changed = peers.state.changed
        self.run(lambda: run_calls(calls, changed), "hf_l2l hosts")
        weakref.finalize(self, calls.put, None)

    def run(self, function: Callable[[], None], name: str) -> None:
        """Run a function that makes calls to the others in a thread; it ends when a call raises."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._peers.state.far_threads.append(thread)

    def exchange(self, content: bytes, why: str) -> list[bytes]:
        """What each counterpart gives here, by host; all of them call this. `why` says what they wait for.

        Raises:
            RankFailedError: if a rank has failed.
        """
        found: list[bytes] = []
        self._ask(lambda: found.extend(exchanged(self._asks, content)), why)
        return found

    def broadcast(self, tensors: Sequence[torch.Tensor], host: int, why: str) -> None:
        """Give dense host tensors the values that they have on a host; all counterparts call this."""

        def give() -> None:
            for each in tensors:
                self._asks.broadcast(bytes_of(each), host).wait()

        self._ask(give, why)

    def send(self, tensors: Sequence[torch.Tensor], host: int, why: str) -> None:
        """Give dense host tensors to the counterpart on a host, which calls `receive`."""

        def give() -> None:
            for each in tensors:
                self._asks.send([bytes_of(each)], host, 0).wait()

        self._ask(give, why)

    def receive(self, tensors_of: Mapping[int, Sequence[torch.Tensor]], why: str) -> None:
        """Give dense host tensors the values that the counterparts on some hosts send: host -> tensors."""

        def take() -> None:
            for host, tensors in tensors_of.items():
                for each in tensors:
                    self._asks.recv([bytes_of(each)], host, 0).wait()

        self._ask(take, why)  # at once: all counterparts count as many calls

    def begin(self, number: int) -> None:
        """Tell the others that this rank begins to add the gradients of a backward, the first of which have this
        number: those that wait for something else will not get it."""
        for send in self._peers.state.far:
            send(HEADER.pack(LANDED, number) + ASKED.pack(self.asked), 0.0)

    def _ask(self, function: Callable[[], object], why: str) -> None:
        """Run a call to the others in a thread, which nothing can wake, while this one finds out who has failed."""
        call = Call(function)
        self.asked += 1
        self._calls.put(call)

        def is_over() -> bool:
            for rank, (number, asked) in self._peers.state.far_landed.items():
                if not call.is_over and number > self.landing and asked < self.asked:
                    self._peers.refuse(f"rank {rank} is in a backward while rank {self._peers.rank} waited: {why}")
            return call.is_over

        # One that leaves has given all that it was asked for, or the call fails.
        self._peers.wait(is_over, why, ())
        if call.error is not None:
            self._peers.cannot_reach(call.error, why, self.others)

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)


def exchanged(group: ProcessGroup, content: bytes) -> list[bytes]:
    """What each member of a group gives, in their order."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(content)])]).wait()
    longest = max(1, *(int(size) for size in sizes))
    given = torch.zeros(longest, dtype=torch.uint8)
    if content:
        given[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    found = [torch.empty_like(given) for _ in sizes]
    group.allgather([found], [given]).wait()
    return [each[: int(size)].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]


def wake(group: ProcessGroup) -> None:
    """Have all calls to a group raise RuntimeError, whichever thread waits for them: gloo closes the connections of a
    group of which a call has come to its timeout."""
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.zeros(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of its memory (uint8, one dimension)."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def run_calls(calls: queue.SimpleQueue[Call | None], changed: threading.Condition) -> None:
    """Make the calls one after the other, and notify of the end of each, until one is None."""
    while (call := calls.get()) is not None:
        with call:
            call.function()
        with changed:
            call.is_over = True
            changed.notify_all()
        del call  # which refers to what may be given up
