"""Adding up the gradients of all ranks, item by item, while the next layer computes.

Each rank has two slots of shared memory, in which its gradients land. A thread of each rank adds those that it owns,
always in the order of the ranks, so that the result does not depend on who was first. Or they land on the devices,
which add them (`across_devices`).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch

from hf_l2l.across_devices.sums import DeviceSums, Gradients
from hf_l2l.across_hosts.sums import HostSums, Part
from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.ranks.messages import LANDED, SUMMED
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import elements
from hf_l2l.runtime.observer import aside
from hf_l2l.runtime.worker import started_with_threads
from hf_l2l.shared_eps.landing import CONTINUES, MORE, PRESENT, SLOTS, DeviceLanding, Landed, Landing, aligned

_AT_ONCE = 2**18
"""Elements that are added for all ranks before the next ones, so that the sum stays in a cache."""
_POLL_S = 0.05


class Reducer:
    """Adds the items of this rank's share, in a thread of its own."""

    def __init__(
        self,
        team: Team,
        landing: Landing | DeviceLanding,
        total_of: Callable[[Master], torch.Tensor],
        numbers: Mapping[Master, int],
        norms: torch.Tensor,
        works: Callable[[str], AbstractContextManager[None]],
        devices: DeviceSums | None = None,
        *,
        threads: int = 1,
    ) -> None:
        """
        Args:
            team: the ranks.
            landing: their slots.
            total_of: returns the shared gradient sum of a master.
            numbers: those of the parameters in the model.
            norms: shared memory, float64, for the norm of the gradient of each parameter by its number in the model.
            works: a context for the work on an item, by its name.
            devices: what adds on the devices, where gradients land then; None adds on the host.
            threads: how many add on the host.
        """
        self.team, self.landing = team, landing
        self._total_of, self._norms, self._works = total_of, norms, works
        self._devices = devices
        self._hosts = None
        if team.counterparts is not None:
            self._hosts = HostSums(team.counterparts, team.peers, len(team.near) * (1 + len(numbers)))
        # Counterparts compare these with what they heard of the last backward, perhaps one of the reducer before.
        self._numbers = 0 if team.counterparts is None else team.counterparts.landing
        self._free = [threading.Semaphore(1) for _ in range(SLOTS)]
        self._jobs: queue.SimpleQueue[Landed | threading.Event | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._in_use: int | None = None
        """The slot that all ranks have read as soon as they have landed the next item."""
        self.has_sum: set[Master] = set()
        """Masters of which any rank had a gradient in this backward, or in one before it since the last step."""
        self._is_first = True
        """Whether what lands next is the first of a backward."""
        self.numbers = numbers
        self.added: deque[list[Master]] = deque()
        """Masters of items of which this rank has added its share, if no rank has graphs with more gradients."""
        # It refers to this object while it works: what is given up can be freed.
        run = partial(_run, self._jobs, weakref.ref(self))
        weakref.finalize(self, self._jobs.put, None)
        self._thread = started_with_threads(run, threads, "hf_l2l reduction")
        self._ends = partial(self._jobs.put, None)
        if team.counterparts is not None or devices is not None:
            team.peers.state.far_threads.append(self._thread)
            team.peers.state.far_calls.append(self._ends)  # it may wait for work, and not for a call

    # ---- for the thread that runs the backward

    def slot(self, why: str) -> tuple[int, torch.Tensor]:
        """The number and memory of this rank's next slot, once all ranks have read what was in it; `why` says what
        for."""
        self._numbers += 1
        if self.team.counterparts is not None:
            self.team.counterparts.landing = self._numbers
        free = self._free[self._numbers % SLOTS]
        while not free.acquire(timeout=_POLL_S):
            self.check()
            self.team.peers.check(why)
        return self._numbers, self.landing.slot(self.team.rank, self._numbers)

    def land(self, landed: Landed) -> None:
        """Give a part of an item to all ranks, to be added."""
        self._jobs.put(landed)

    def finish(self) -> None:
        """Wait until this rank has added all that has landed."""
        over = threading.Event()
        self._jobs.put(over)
        while not over.wait(_POLL_S):
            self.check()
            self.team.peers.check()  # of which the thread does not hear while it waits for another host
        self._is_first = True
        self.check()

    def check(self) -> None:
        """Raise the failure of the thread."""
        if self._failure is not None:
            raise self._failure
        assert self._thread.is_alive(), "the thread ends with the reducer"

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread and not self.team.peers.has_failed:
            self._thread.join(self.team.peers.timeout_s)
        if not self._thread.is_alive():
            self.team.peers.state.forget(self._thread, self._ends)
        self._failure = None  # whose traceback refers to graphs

    # ---- the thread

    def work(self, landed: Landed) -> None:
        """Add this rank's share of what has landed."""
        with ExitStack() as stack:
            stack.push(self._keep_failure)
            if self._failure is None:
                self._reduce(landed)

    def _keep_failure(self, kind: object, error: BaseException | None, frames: object) -> bool:
        if error is not None:
            self._failure = self._failure or error
            self.team.peers.error_is_kept()
        return True

    @torch.no_grad()
    def _reduce(self, landed: Landed) -> None:
        if self._devices is None:
            with aside():
                stream.wait(landed.at, wait_reasons.LAYER_GRADIENTS_DOWNLOADED, host=True)
        why = f"all ranks have the gradients of {landed.item.name}"
        found = self.team.peers.gather(LANDED, landed.number, bytes([landed.item.number % 256]) + landed.bits, why)
        if self._devices is None:
            if self._in_use is not None:  # whoever has landed this has read the one before
                self._free[self._in_use].release()
            self._in_use = landed.number % SLOTS
        if self._hosts is not None:
            if self._is_first and self.team.counterparts is not None:
                self._is_first = False
                self.team.counterparts.begin(landed.number)
            found = self._of_all_hosts(self._hosts, found, why)
        if any(
            len(theirs) != len(landed.bits) + 1 or theirs[0] != landed.item.number % 256 for theirs in found.values()
        ):
            raise RuntimeError("all ranks must train the same parameters (got other ones on another rank)")
        if self._devices is not None:
            self._add_on_devices(self._devices, landed, found, why)
        else:
            self._add_on_host(landed, found)
        more = any(bit & MORE for theirs in found.values() for bit in theirs[1:])
        if landed.stop >= landed.item.layout.pieces[-1].stop and not more:
            self.added.append([m for m in landed.item.masters if m in self.has_sum])

    def _add_on_host(self, landed: Landed, found: Mapping[int, bytes]) -> None:
        """Add those gradients that this rank owns, or its counterparts on other hosts."""
        parts: dict[Master, Part] = {}
        with self._works(f"the sum over ranks of {landed.item.name}"), without_interception():
            for place, master in enumerate(landed.item.masters):
                part = self._part(landed, place, master, *self._givers(found, place, master))
                if part is not None:
                    parts[master] = part
            if self._hosts is not None:
                self._hosts.add(list(parts.values()), f"the hosts add the gradients of {landed.item.name}")
            for master, part in parts.items():
                if self._hosts is None:
                    part.add_ranks(part.total)
                self._end_part(landed, master)

    def _add_on_devices(self, devices: DeviceSums, landed: Landed, found: Mapping[int, bytes], why: str) -> None:
        """Add this rank's share of all gradients on its device, and wait until the others have added theirs."""
        parts: dict[Master, Gradients] = {}
        with without_interception():
            for place, master in enumerate(landed.item.masters):
                ranks, there = self._givers(found, place, master)
                if ranks:
                    master.wait()  # the update of the last step may still read the sum
                    piece, (flat, offset) = landed.item.layout.pieces[place], self._range(landed, place, master)
                    parts[master] = Gradients(flat, offset, piece.dtype, ranks, there)
        if parts:
            given = landed.memory[: aligned(landed.stop - landed.start)]
            devices.add(given, landed.at, list(parts.values()), why)
        # The sums are in host memory, so that nothing reads the slot any more.
        self._free[landed.number % SLOTS].release()
        # An owner reads the whole sum, for its norm and its update, of which others have added their shares.
        self.team.peers.gather(SUMMED, landed.number, b"", why)
        with self._works(f"the norms of {landed.item.name}"), without_interception():
            for master in parts:
                self._end_part(landed, master)

    def _of_all_hosts(self, hosts: HostSums, near: dict[int, bytes], why: str) -> dict[int, bytes]:
        """What the ranks of all hosts tell of an item, of which those of this host are known."""
        told = hosts.exchange(b"".join(near[rank] for rank in self.team.near), why)
        found = {}
        for ranks, theirs in zip(self.team.hosts, told, strict=True):
            size = len(theirs) // len(ranks)
            found.update({rank: theirs[n * size : (n + 1) * size] for n, rank in enumerate(ranks)})
        return found

    def _givers(self, found: Mapping[int, bytes], place: int, master: Master) -> tuple[list[int], bool]:
        """The ranks that have a gradient of a master, as they tell, and whether it has a sum already."""
        bits = {rank: theirs[place + 1] for rank, theirs in found.items()}
        continues = {bool(each & CONTINUES) for each in bits.values()}
        if len(continues) > 1:
            raise RuntimeError(
                f"all ranks must drop gradients, or none (got {master.name}, whose p.grad some have set to None); "
                "call optimizer.zero_grad() on all of them"
            )
        ranks = sorted(rank for rank, each in bits.items() if each & PRESENT)
        if ranks or True in continues:
            self.has_sum.add(master)
        return ranks, True in continues

    def _range(self, landed: Landed, place: int, master: Master) -> tuple[torch.Tensor, int]:
        """The range of the sum of a master (one dimension) to which gradients have landed, and the byte of the slot
        at which these begin."""
        piece, size = landed.item.layout.pieces[place], master.parameter.element_size()
        first = max(0, landed.start - piece.start) // size
        count = (min(landed.stop, piece.stop) - max(landed.start, piece.start)) // size
        return elements(self._total_of(master))[first : first + count], max(0, piece.start - landed.start)

    def _part(self, landed: Landed, place: int, master: Master, ranks: Sequence[int], there: bool) -> Part | None:
        """What this rank adds of the gradient of a master that `ranks` have; None if another one does."""
        team, piece = self.team, landed.item.layout.pieces[place]
        if team.stand_in[master.owner] != team.rank or not ranks:
            return None
        if master.owner == team.rank:
            master.wait()  # the update of the last step may still read the sum
        flat, offset = self._range(landed, place, master)
        size = master.parameter.element_size()
        given = [
            self.landing.slot(rank, landed.number)[offset : offset + flat.numel() * size].view(piece.dtype)
            for rank in team.near
            if rank in ranks
        ]
        host, givers = team.host_of[master.owner], sorted({team.host_of[rank] for rank in ranks})
        goes_on = there and self._hosts is None
        return Part(flat, host, givers, there, partial(_add_in_order, given, goes_on))

    def _end_part(self, landed: Landed, master: Master) -> None:
        """A part of the sum of a master has been added."""
        piece = landed.item.layout.pieces[landed.item.masters.index(master)]
        if landed.stop >= piece.stop and master.owner == self.team.rank:
            total = self._total_of(master)
            dtype = None if total.dtype == master.dtype else master.dtype
            self._norms[self.numbers[master]] = torch.linalg.vector_norm(total, dtype=dtype)


def _run(jobs: queue.SimpleQueue[Landed | threading.Event | None], of: weakref.ref[Reducer]) -> None:
    while (job := jobs.get()) is not None:
        reducer = of()
        if isinstance(job, threading.Event):
            job.set()
        elif reducer is not None:
            reducer.work(job)
        del reducer, job


def _add_in_order(gradients: Sequence[torch.Tensor], goes_on: bool, into: torch.Tensor) -> None:
    """Write the sum of gradients (one dimension each), in their order, to `into`; with `goes_on`, add it to that."""
    for parts in zip(into.split(_AT_ONCE), *(each.split(_AT_ONCE) for each in gradients), strict=True):
        to, *others = parts
        for number, part in enumerate(others):
            if number == 0 and not goes_on:
                to.copy_(part)
            else:
                to.add_(part)  # in the wider dtype of the two, rounded once
