"""Updates that other ranks make: the records with which this rank waits for them, and the messages about them."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.eps.pending import Update, hold_all, secure, taken
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.optim.layerwise_check import can_step_rows
from hf_l2l.optim.optimizer_entry import OptimizerEntry
from hf_l2l.optim.rows_step import RowsStep
from hf_l2l.ranks.messages import UPDATED
from hf_l2l.ranks.owners import shares_of_rows
from hf_l2l.ranks.peers import RankFailedError
from hf_l2l.ranks.team import Team
from hf_l2l.ranks.watch import LARGEST
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime.stall_log import StallLog
from hf_l2l.runtime.worker import Modes, Task, Worker
from hf_l2l.shared_eps.state import SharedState

_POLL_S = 0.5
ROWS = b"rows"
"""What a rank tells of rows that it has updated, where each rank updates some."""
_PART = LARGEST // 2
"""Bytes of a message at once."""
_DIVIDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of matrices whose rows are divided."""
_GOES_ON, _ENDS = b"+", b"."
"""What a part of a message begins with."""


class RemoteTask(Task):
    """An update that other ranks make, or of which each rank makes a part."""

    def __init__(self, what: str, team: Team, worker: Worker, ranks: Collection[int]) -> None:
        """`ranks` make it."""
        super().__init__(what)
        self._team, self._missing = team, set(ranks)
        self._lock = threading.Lock()
        self._worker = worker

    def wait(self, why: str) -> None:
        """Wait until those ranks have made the update. One that has made its part may leave.

        Raises:
            RankFailedError: if a rank has failed.
            EngineFailedError: if an update of this rank has failed.
        """
        assert why, "a wait has a reason"
        where = f"waiting for {self.what} by another rank, {{seconds}} so far"
        with nullcontext() if self.done else StallLog().inside(where):
            while not self._over.wait(_POLL_S):
                self.check()  # first: a failure of this rank is the cause of what the others are told
                self._team.peers.check(f"{self.what} by another rank", self._missing)
        self.check()

    def check(self) -> None:
        """Raise the failure of an update of this rank."""
        assert self._worker is not None, "given when it is made"
        self._worker.check()

    def has_made(self, rank: int) -> bool:
        """A rank has made its part; returns whether it was the last one."""
        with self._lock:
            self._missing.discard(rank)
            return not self._missing

    def end(self) -> None:
        """The update has been made."""
        self._over.set()


class RemoteUpdate:
    """An update that other ranks make, or of which each rank makes a part, as a step of this one knows it."""

    def __init__(
        self,
        update: Update,
        task: RemoteTask,
        masters: list[Master],
        taken: Callable[[bytes], None] | None = None,
    ) -> None:
        """`taken` is called with what a message says of the optimizer's state; None of an update of rows."""
        self.update, self.task, self.masters, self.taken = update, task, masters, taken

    def end(self, rank: int, message: bytes) -> None:
        """A rank has made its part. With the last one, the values of the masters are those after the update, in the
        memory that all ranks share.

        Raises:
            RuntimeError: if another rank has made another update: a program has changed the optimizer's state in some.
        """
        if (self.taken is None) != (message == ROWS):
            raise RuntimeError(
                "all ranks must have the same optimizer state (got some of a parameter in one rank alone)"
            )
        if self.taken is not None:
            self.taken(message)
        if not self.task.has_made(rank):
            return
        with without_interception():
            for master in self.masters:
                torch.autograd.graph.increment_version(master.parameter)
                if master.copy is not None:  # the owner has renewed it
                    master.copy_version, master.copy_is_right = master.parameter._version, True
        if self.update.is_made():
            Master.end_update(self.masters)
        self.task.end()  # after it: whoever waits for this may begin the next update of these masters


class Remote:
    """The updates of other ranks that this one expects, and the messages that they are made.

    All ranks make the same steps, so that each knows the updates of the others by their number.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], bytes] = {}
        """Rank and number of updates that were made before this rank came to their step -> the message."""
        self._expected: dict[tuple[int, int], RemoteUpdate] = {}
        self._numbers = dict.fromkeys(team.peers.ranks, 0)
        self._begun: defaultdict[tuple[int, int], bytes] = defaultdict(bytes)
        """Rank and number -> the parts of a long message that have come so far."""
        received = weakref.WeakMethod(self._received)

        def take(rank: int, number: int, message: bytes) -> None:
            found = received()  # the thread that calls this keeps nothing that is given up
            if found is not None:
                found(rank, number, message)

        team.peers.on(UPDATED, take)

    def next_number(self, rank: int) -> int:
        """The number of the next update of a rank."""
        self._numbers[rank] += 1
        return self._numbers[rank]

    def expect(self, rank: int, update: RemoteUpdate) -> int:
        """The next update of `rank` is this one; returns its number. One that another host makes is the update of the
        rank that receives it."""
        number = self.next_number(rank)
        with self._lock:
            message = self._made.pop((rank, number), None)
            if message is None:
                self._expected[rank, number] = update
        if message is not None:
            update.end(rank, message)
        return number

    def end(self, number: int) -> None:
        """An update that this rank receives from another host is there."""
        self._end(self.team.rank, number, b"")

    def _received(self, rank: int, number: int, part: bytes) -> None:
        self._begun[rank, number] += part[1:]
        if part[:1] == _GOES_ON:
            return
        self._end(rank, number, self._begun.pop((rank, number)))

    def _end(self, rank: int, number: int, message: bytes) -> None:
        with self._lock:
            update = self._expected.pop((rank, number), None)
            if update is None:
                self._made[rank, number] = message
        if update is not None:
            update.end(rank, message)

    def tell(self, number: int, message: bytes) -> None:
        """Tell the others that this rank has made its update of this number.

        That a rank has failed is no failure of this update, and is raised by the next call of the program.
        """
        try:
            for start in range(0, max(1, len(message)), _PART):
                mark = _GOES_ON if start + _PART < len(message) else _ENDS
                self.team.peers.send(UPDATED, number, mark + message[start : start + _PART])
        except RankFailedError:
            self.team.peers.error_is_kept()


class RowUpdates:
    """Updates of large matrices in no layer (an embedding, a head), of which each rank makes its rows."""

    def __init__(self, team: Team, remote: Remote, worker: Worker, copies: Copies, timeline: Timeline) -> None:
        self._team, self._remote, self._worker, self._copies, self._timeline = team, remote, worker, copies, timeline
        self._divided: WeakSet[Master] = WeakSet()
        """Masters whose rows an optimizer can step: the same in all ranks."""
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, set[Master]] = WeakKeyDictionary()
        """Optimizer -> the masters of whose state this rank has numbers of its own."""

    def add(self, optimizer: torch.optim.Optimizer, masters: Sequence[Master]) -> None:
        """Try whether an optimizer can step rows of those of its masters that are large matrices in no layer."""
        matrices = sorted((m for m in masters if self._shares(m) is not None), key=attrgetter("place"))
        if matrices and can_step_rows(optimizer, [m.parameter for m in matrices]):
            self._divided.update(matrices)
            self._numbers[optimizer] = set()
        else:
            self._divided.difference_update(matrices)  # an optimizer before this one could

    def of(self, master: Master) -> list[slice] | None:
        """The rows of a master that each rank updates, by place; None if one rank updates all of them."""
        return self._shares(master) if master in self._divided else None

    def _shares(self, master: Master) -> list[slice] | None:
        like = master.gradient_like
        if master.dtype not in _DIVIDED:
            return None
        if master.layer_number or not master.is_large or like.dim() != 2 or not like.is_contiguous():
            return None
        return shares_of_rows(like.shape[0], like.shape[1], self._team.size)

    def forget_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        """The state of an optimizer has been loaded: all ranks have the numbers of the owners."""
        if optimizer in self._numbers:
            self._numbers[optimizer] = set()

    def divided(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], shared: SharedState
    ) -> dict[Master, torch.Tensor]:
        """Those of `masters`, which have gradients, of which each rank updates rows in this step, with the gradients:
        the same in all ranks, in the order of the model. Their earlier updates are done, and their state is `shared`.
        """
        own = self._numbers.get(optimizer)
        if own is None:
            return {}
        found = sorted((m for m in masters if self.of(m) is not None), key=attrgetter("place"))
        whole = {m for m in found if not _is_shared(optimizer.state.get(m.parameter), m.parameter, shared)}
        own -= whole  # a program may have dropped or replaced their state: the owner counts again
        return {m: m.parameter.grad for m in found if m not in whole and m.parameter.grad is not None}

    def begin(
        self, optimizer: torch.optim.Optimizer, entry: OptimizerEntry, gradients: Mapping[Master, torch.Tensor]
    ) -> list[Task]:
        """Begin updates of which this rank makes its rows, and expect those of the others; returns their tasks."""
        begun: list[Task] = []
        for master, gradient in gradients.items():
            with without_interception():
                self._take_numbers(optimizer, master)
                layers = entry.layers
                rows = (self.of(master) or [])[self._team.place]
                step = RowsStep(optimizer, master.parameter, gradient, layers.places, rows, layers.one_pass)
                factor = taken([(master.parameter, gradient)]).factors.get(master.parameter)
                task = RemoteTask(f"the update of {master.name}", self._team, self._worker, self._team.near)
                update = Update(task, self._timeline, in_step=False)
                made = RemoteUpdate(update, task, [master])
                master.update, master.guards_grad = update, False
                master.is_changing()
                hold_all([(master.parameter, master)])
                number = self._remote.next_number(self._team.rank)
                for rank in self._team.near:
                    if rank != self._team.rank:
                        self._remote.expect(rank, made)
                own = Task(f"the update of rows of {master.name}")
                run = partial(self._make, own.what, step, master, rows, factor, number, made)
                self._worker.submit(own, run, Modes.current())
                begun += [own, task]
        return begun

    def _take_numbers(self, optimizer: torch.optim.Optimizer, master: Master) -> None:
        """Give this rank its own numbers in the state of a master, as that of its steps: until now, its owner counted
        for all."""
        own, p = self._numbers[optimizer], master.parameter
        if master in own:
            return
        own.add(master)
        state = optimizer.state[p]
        numbers = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape != p.shape}
        state.update({key: value.clone() for key, value in numbers.items()})

    def _make(
        self,
        what: str,
        step: RowsStep,
        master: Master,
        rows: slice,
        factor: torch.Tensor | None,
        number: int,
        made: RemoteUpdate,
    ) -> None:
        """Update the rows of this rank, on a thread of the worker, and tell the others."""
        secure([master], rows=True)
        with self._timeline.host_works(what):
            step.run(factor)
            self._copies.renew_rows(master, rows)
        self._remote.tell(number, ROWS)
        made.end(self._team.rank, ROWS)


def _is_shared(state: Mapping[str, Any] | None, parameter: torch.Tensor, shared: SharedState) -> bool:
    """Whether there is state of a parameter, and what has its shape is in the memory of all ranks, in rows."""
    values = (state or {}).values()
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.shape == parameter.shape]
    return bool(values) and all(shared.has(each) and each.is_contiguous() for each in tensors)
