"""Sums of the gradients of all ranks on their devices: an all-to-all gives each rank the same share of all gradients,
which it adds in the order of the ranks and downloads (arXiv:2002.05645, first version, section 3: parallel reduce).

Over the links between devices pass as many bytes as in a reduce-scatter, whose order of sums is the library's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import distributed

from hf_l2l.across_hosts.calls import failing_with_ranks
from hf_l2l.compat import without_interception
from hf_l2l.ranks.counterparts import NO_LIMIT, wake
from hf_l2l.ranks.meeting import MEETS_WITHIN_S
from hf_l2l.ranks.team import Team
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.flat_memory import ALIGNMENT
from hf_l2l.runtime.observer import aside


class Gradients(NamedTuple):
    """The gradients of one parameter, or of a range of it, in what each rank gives."""

    total: torch.Tensor
    """The range of their sum (one dimension, host), in memory that all ranks share."""
    start: int
    """The byte at which they begin, a multiple of `ALIGNMENT`."""
    dtype: torch.dtype
    ranks: Sequence[int]
    """Those that have one, ascending."""
    continues: bool
    """Whether `total` has a sum already, to which they are added."""


class DeviceSums:
    """Adds gradients on the devices of all ranks, which make the same calls."""

    def __init__(self, team: Team, device: torch.device) -> None:
        """Make a process group for the devices; all ranks call this."""
        self._team, self.device = team, device
        backend = distributed.get_default_backend_for_device(device)
        # Whether the others are alive is found out by their heartbeats; a call may wait for long computations.
        self._group = distributed.new_group(backend=backend, timeout=timedelta(seconds=MEETS_WITHIN_S))
        self._group.set_timeout(NO_LIMIT)
        self._others = [rank for rank in team.near if rank != team.rank]
        self._adding = stream.Lane(device, stream.PEER, runs_kernels=True)
        self._leaving = stream.Lane(device, "download")
        self._ends = partial(_end_calls, self._group)
        team.peers.state.far_calls.append(self._ends)

    @torch.no_grad()
    def add(self, given: torch.Tensor, at: stream.Point | None, parts: Sequence[Gradients], why: str) -> None:
        """Add this rank's share of the gradients, and wait until the sums are in host memory.

        Args:
            given: this rank's gradients (uint8, one dimension, on its device; a multiple of `ALIGNMENT`).
            at: when `given` is computed.
            parts: what is in it, the same on all ranks.
            why: what the ranks wait for.

        Raises:
            RankFailedError: if a rank has failed.
        """
        ends = cuts(given.numel(), self._team.size)
        sizes = [stop - start for start, stop in pairwise(ends)]
        own = sizes[self._team.rank]
        with self._adding.entered(), without_interception(), stream.span(self.device, stream.PEER, why):
            stream.wait(at, wait_reasons.GRADIENTS_COMPUTED, on=self.device)
            taken = torch.empty(own * len(sizes), dtype=torch.uint8, device=self.device)
            with failing_with_ranks(self._others, self._team.peers, why):
                distributed.all_to_all_single(taken, given, [own] * len(sizes), sizes, group=self._group)
            # A kernel of the collective reads it in this stream, and it was allocated in another one.
            stream.keep_until_done(self.device, [given])
            sums = list(self._sums(taken, own, ends[self._team.rank], parts))
            added = stream.record(self.device)
        with self._leaving.entered(), without_interception(), stream.span(self.device, "download", why):
            stream.wait(added, wait_reasons.GRADIENTS_ADDED)
            for to, total in sums:
                to.copy_(total, non_blocking=self._leaving.is_stream)
            done = stream.record(self.device)
        # Afterwards others may use the sums, and memory of both lanes is free. No computation waits for that.
        with aside():
            stream.wait(done, wait_reasons.LAYER_GRADIENTS_DOWNLOADED, host=True)

    def _sums(
        self, taken: torch.Tensor, own: int, first: int, parts: Sequence[Gradients]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of `parts` that are in this rank's share, which begins at byte `first`: where their sum goes, and
        the sum on the device."""
        for part in parts:
            size = part.dtype.itemsize
            start, stop = max(part.start, first), min(part.start + part.total.numel() * size, first + own)
            if start >= stop:
                continue
            to = part.total[(start - part.start) // size : (stop - part.start) // size]
            places = [rank * own + start - first for rank in part.ranks]
            gradients = [taken[place : place + stop - start].view(part.dtype) for place in places]
            total = torch.empty(to.numel(), dtype=to.dtype, device=self.device)
            if part.continues:
                total.copy_(to, non_blocking=self._adding.is_stream)
            else:
                total.copy_(gradients.pop(0))
            for gradient in gradients:
                total.add_(gradient)  # in the wider dtype of the two, rounded once
            yield to, total

    def close(self) -> None:
        """End the process group."""
        self._team.peers.state.forget(None, self._ends)
        with suppress(RuntimeError, ValueError, AssertionError):  # it has been ended, with all groups of the program
            distributed.destroy_process_group(self._group)


def bytes_of_sums(largest: int, count: int) -> int:
    """Bytes of device memory that sums over so many ranks take, whose largest gradients of a layer have `largest`
    bytes: what a rank gives, twice, since the next ones land meanwhile; what it is sent; and the sum of its share."""
    return 3 * largest + -(-largest // count)


def cuts(num_bytes: int, count: int) -> list[int]:
    """Where the shares of so many ranks begin, and the last one ends: each has as many bytes, a multiple of
    `ALIGNMENT`, but for the last ones."""
    share = -(-num_bytes // (count * ALIGNMENT)) * ALIGNMENT
    return [min(num_bytes, number * share) for number in range(count + 1)]


def _end_calls(group: distributed.ProcessGroup) -> None:
    """Have all calls to a group raise, whichever thread waits for them."""
    with suppress(RuntimeError):
        group.abort()
    wake(group)  # for gloo, whose `abort` does nothing
