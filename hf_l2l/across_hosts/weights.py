"""All-gather of new weights over hosts: the owner sends those that it has updated, and its counterparts write them to
the memory of their hosts, while the ranks compute."""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch.distributed import Work

from hf_l2l.across_hosts.calls import failing_with_ranks
from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.ranks.counterparts import Counterparts, bytes_of
from hf_l2l.ranks.peers import Peers, RankFailedError

_TAGS = 2**30
_POLL_S = 0.5
_Job = Callable[[], None]


class FarWeights:
    """Sends the masters that this rank has updated to its counterparts, and receives theirs.

    All counterparts make the same updates, so that each knows the tensors of the others by their numbers.
    """

    def __init__(self, counterparts: Counterparts, peers: Peers) -> None:
        self._counterparts, self._peers = counterparts, peers
        self._has_failed = False
        self._numbers = [0] * counterparts.count
        """How many tensors of each host have been sent, or are expected."""
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        for name, jobs in zip(("sent", "received"), self._queues, strict=True):
            # The thread refers to this object while it works: what is given up can be freed.
            counterparts.run(partial(_run, jobs, weakref.ref(self)), f"hf_l2l weights {name}")
            weakref.finalize(self, jobs.put, None)

    def expect(self, host: int, masters: Sequence[Master], then: Callable[[], None]) -> None:
        """The ranks of this host need the old values of `masters` no more: receive those that their owner, on `host`,
        makes now. Calls `then` in a thread when they are there."""
        group, tag = self._counterparts.weights, self.reserve(masters, host)
        with without_interception():
            works = [group.recv([bytes_of(part)], host, (tag + n) % _TAGS) for n, part in enumerate(_parts(masters))]

        def receive() -> None:
            self._wait(works)
            then()

        self._queues[1].put(receive)

    def reserve(self, masters: Sequence[Master], host: int | None = None) -> int:
        """The number of the first tensor of an update of `masters` by `host`, or by this one, that begins next."""
        host = self._counterparts.host if host is None else host
        number = self._numbers[host]
        self._numbers[host] += len(_parts(masters))
        return number

    def send(self, masters: Sequence[Master], number: int) -> None:
        """Send the values of `masters`, which have been updated, as the tensors from this number on."""
        group, others = self._counterparts.weights, range(self._counterparts.count)

        def give() -> None:
            with without_interception():
                works = [
                    group.send([bytes_of(part)], host, (number + n) % _TAGS)
                    for n, part in enumerate(_parts(masters))
                    for host in others
                    if host != self._counterparts.host
                ]
            self._wait(works)

        self._queues[0].put(give)

    def wait_until_sent(self) -> None:
        """Wait until the others have all that this rank has sent.

        Raises:
            RankFailedError: if a rank has failed.
        """
        is_sent = threading.Event()
        self._queues[0].put(is_sent.set)
        while not is_sent.wait(_POLL_S):
            others = self._counterparts.others if self._has_failed else ()
            self._peers.check("the other hosts receive new weights", others)

    def _wait(self, works: Sequence[Work]) -> None:
        with failing_with_ranks(self._counterparts.others, self._peers, "the hosts exchange new weights"):
            for work in works:
                work.wait()

    def work(self, job: _Job) -> None:
        """Do one of the jobs."""
        with ExitStack() as stack:
            stack.push(self._keep_failure)
            if not self._has_failed:
                job()

    def _keep_failure(self, kind: object, error: BaseException | None, frames: object) -> bool:
        """Each wait for these weights raises RankFailedError then, in all ranks: nothing else would tell them."""
        if error is not None:
            self._has_failed = True
            if not isinstance(error, RankFailedError):
                text = traceback.format_exception_only(error)[0].strip()
                self._peers.state.fail(self._peers.rank, f"it cannot exchange new weights with other hosts: {text}")
            self._peers.error_is_kept()
        return True

    def close(self) -> None:
        """End the threads."""
        for jobs in self._queues:
            jobs.put(None)


def _run(jobs: queue.SimpleQueue[_Job | None], of: weakref.ref[FarWeights]) -> None:
    while (job := jobs.get()) is not None:
        weights = of()
        if weights is not None:
            weights.work(job)
        del weights, job


def _parts(masters: Sequence[Master]) -> list[torch.Tensor]:
    """The tensors of masters that have values."""
    return [part for master in masters for part in master.parts if part.numel()]
