"""Updates of several ranks: each makes those of its share of the parameters, in the memory that all of them have.

The others wait for an update as they wait for their own, at the next use of the weights.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import torch

from hf_l2l.across_hosts.state import FarState
from hf_l2l.across_hosts.weights import FarWeights
from hf_l2l.compat import has_later_step_hook, without_interception
from hf_l2l.config import L2LConfig
from hf_l2l.eps.eager import EAGER_NEEDS_OPTIMIZER
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import Update, hold_all, secure
from hf_l2l.eps.updates import Updates
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.optim.layer_optimizers import parameters_of
from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.optim.optimizer_entry import OptimizerEntry
from hf_l2l.optim.rounded_state import Rounding
from hf_l2l.ranks.owners import dealt, mask_of, share_of_cores
from hf_l2l.ranks.peers import OtherCallsError, Peers, RankFailedError
from hf_l2l.ranks.team import Team
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime.worker import Worker, cores_of_process
from hf_l2l.shared_eps.gradients import SharedGradients
from hf_l2l.shared_eps.host_memory import refuse_changed_sum
from hf_l2l.shared_eps.remote import Remote, RemoteTask, RemoteUpdate, RowUpdates
from hf_l2l.shared_eps.state import SharedState

_KINDS = {"-": "is in no such optimizer", "0": "has no gradient", "1": "has a gradient"}
"""What a rank tells of a parameter, and what an error says of it."""


class SharedUpdates(Updates):
    """Updates this rank's share of the masters, and knows the updates of the others."""

    def __init__(
        self,
        masters: Masters,
        gradients: SharedGradients,
        timeline: Timeline,
        copies: Copies,
        config: L2LConfig,
        *,
        is_accumulating: Callable[[], bool],
        team: Team,
    ) -> None:
        super().__init__(masters, gradients, timeline, copies, config, is_accumulating=is_accumulating)
        self.always_splits = True
        self.team = team
        self.gradients = gradients
        gradients.call_at_sums(self.update_added)
        told = team.tell(str(mask_of(cores_of_process())), "which cores each rank may use")
        # Launchers such as torchrun set one thread per process.
        cores = share_of_cores([int(told[rank]) for rank in team.near], team.place)
        gradients.threads = max(1, cores - 1) if config.num_threads is None else config.num_threads
        self.worker = self.eager.worker = Worker(gradients.threads, finishes=True)
        self.worker.call_at_failure(partial(_tell_failure, team.peers), raised=team.peers.error_is_raised)
        masters.in_order_of_model = True
        self._remote = Remote(team)
        self._far = None if team.counterparts is None else FarWeights(team.counterparts, team.peers)
        self._state: SharedState | None = None
        self._far_state: FarState | None = None
        self._is_gathered = False
        """Whether the first host has all state now, for which rank 0 alone asks."""
        self._dealt_at = 0
        """`masters.changes` when the parameters were dealt to the ranks."""
        self._owned: dict[Master, int] = {}
        self._rows = RowUpdates(team, self._remote, self.worker, copies, timeline)
        self._last_rows: dict[Master, torch.Tensor] = {}
        """Masters whose rows are updated after the layers in this step, and their gradients."""

    def deal(self) -> None:
        """Give each parameter an owner, if that has not been done: the same in all ranks."""
        if self._dealt_at == self.masters.changes:
            return
        self._dealt_at = self.masters.changes
        here = self.masters.on_host()
        self._owned = {m: self._owned[m] for m in here if m in self._owned}
        # Frozen ones, too, and for good: an owner on another host would not have the state of earlier steps, or of a
        # checkpoint, when they are trained again. They are no work for those that are trained now.
        trained = [m for m in here if m.parameter.requires_grad]
        self._deal_among(trained, trained)
        self._deal_among([m for m in here if not m.parameter.requires_grad], here)

    def _deal_among(self, masters: Sequence[Master], work: Sequence[Master]) -> None:
        """Give those of `masters` that have none an owner, so that the ranks share all of the `work`."""
        loads = [0] * self.team.size
        for master in (m for m in work if m in self._owned and self._rows.of(m) is None):
            loads[self._owned[master]] += master.gradient_like.numel()
        new = [m for _, part in self.masters.parts(masters) for m in part if m not in self._owned]
        divided = [place for place, m in enumerate(new) if self._rows.of(m) is not None]
        owners = dealt([m.gradient_like.numel() for m in new], loads, divided)
        for master, owner in zip(new, owners, strict=True):
            self._owned[master] = master.owner = owner

    def add(self, optimizer: torch.optim.Optimizer) -> OptimizerEntry | None:
        """See `Updates.add`.

        Raises:
            ValueError: if `optimizer` cannot update a parameter without the others, which other ranks update.
        """
        reason = why_not_layer_local(optimizer)
        if reason is not None:
            raise ValueError(
                f"each rank updates its share of the parameters, but {type(optimizer).__name__} cannot update one "
                f"without the others ({reason}); use torch.optim.AdamW, or train in one process"
            )
        entry = super().add(optimizer)
        if entry is not None and self._far is None and not self.rounds and self.mode != "eager":
            self._rows.add(optimizer, self.masters.of_all(parameters_of(optimizer)))
        self.deal()
        if self._state is None:
            self._state = SharedState(self.team, self.masters.on_host())
            if self.team.counterparts is not None:
                self._far_state = FarState(self.team, self.masters.all())
        if entry is not None:
            entry.handles.append(optimizer.register_load_state_dict_post_hook(self._share_loaded))
            if optimizer.state:
                self._share_loaded(optimizer)
        return entry

    def _share_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Share a state that every rank has loaded: each keeps that of its own share.

        Raises:
            OtherCallsError: if other ranks do something else, or have loaded the state of other parameters, or with
                parameters in another order, by which a checkpoint numbers them.
        """
        masters = [m for m in self.masters.of_all(parameters_of(optimizer)) if m.parameter in optimizer.state]
        digest = hashlib.sha256(repr([m.name for m in masters]).encode()).hexdigest()
        told = self.team.tell(digest, "all ranks load the optimizer's state")
        other = next((rank for rank, each in enumerate(told) if each != digest), None)
        if other is not None:
            self.team.peers.refuse(
                f"rank {self.team.rank} and rank {other} have loaded state of other parameters, or in another order"
            )
        if self._far_state is not None:
            new = next((m.name for m in masters if m not in self._owned), None)
            if new is not None:
                raise ValueError(
                    "with several hosts, state is loaded for parameters whose owner is known (got some of a parameter "
                    f"that no forward has used yet, {new}); run a forward, and load the state then"
                )
            self._far_state.drop(optimizer)
        self._rows.forget_numbers(optimizer)
        secure(masters)  # the state that they have had is written over
        for master in masters:
            if master.owner != self.team.rank:
                optimizer.state[master.parameter] = {}
        others = [m for m in masters if m.owner != self.team.rank and m.owner in self.team.near]
        self._expect(optimizer, others, in_step=False)
        for _, part in self.masters.parts(m for m in masters if m.owner == self.team.rank):
            self._tell(optimizer, part, self._remote.next_number(self.team.rank), anew=True)
        self.synchronize()

    def digest_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Equal in ranks whose optimizers have the same parameters, of which the same have a gradient."""
        with without_interception():
            masters = self.masters.of_all(parameters_of(optimizer))
            return zlib.crc32(repr(sorted((m.place, m.parameter.grad is None) for m in masters)).encode())

    def refuse_other_gradients(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        """Raise OtherCallsError that names the first parameter of which not all ranks have a gradient, or which not
        all of their optimizers have. All ranks call this when their digests differ."""
        own, masters = set(self.masters.of_all(parameters_of(optimizer))), self.masters.all()
        with without_interception():
            kinds = ["-" if m not in own else str(int(m.parameter.grad is not None)) for m in masters]
        told = self.team.tell("".join(kinds), "ranks compare their gradients")
        for master, found in zip(masters, zip(*told, strict=True), strict=False):
            other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
            if other is not None:
                texts = [f"{_KINDS[found[rank]]} on rank {rank}" for rank in (0, other)]
                self.team.peers.refuse(f"{master.name} {' and '.join(texts)}")
        self.team.peers.refuse("not all have gradients of the same parameters")

    def start_forward(self) -> None:
        """See `Updates.start_forward`."""
        super().start_forward()
        if self._state is not None:
            self._state.return_freed_memory()

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool, step: FrameType) -> None:
        """Begin the updates of this rank's share, and expect those of the others.

        Raises:
            ValueError: for a closure, or a hook of the step that was registered after `eps.wrap`.
        """
        if has_closure:
            raise ValueError(
                "several ranks step without a closure (got one); call optimizer.step() after backward, or train in "
                "one process"
            )
        if has_later_step_hook(optimizer, self._entries[optimizer].step_hook):
            raise ValueError(
                "with several ranks, updates begin before hooks of optimizer.step() that were registered after "
                "eps.wrap (got one); register it before, or train in one process"
            )
        if self._far_state is not None:
            self._far_state.drop(optimizer)
        masters = self.masters.of_all(parameters_of(optimizer))
        with without_interception():
            for master in masters:
                refuse_changed_sum(master)
            given = [m for m in masters if m.parameter.grad is not None]
            self._wait_for(m for m in given if m.owner != self.team.rank or self._rows.of(m) is not None)
            assert self._state is not None, "made with the first optimizer"
            divided = self._rows.divided(optimizer, given, self._state)
            others = [m for m in given if m.owner != self.team.rank and m not in divided]
        first = {m: gradient for m, gradient in divided.items() if not m.layers_before}
        self._last_rows = {m: gradient for m, gradient in divided.items() if m.layers_before}
        with self.worker.failing_with_errors():  # half a step must not pass for a whole one
            with without_interception():
                for master in (*others, *divided):
                    master.parameter.grad = None  # its owner uses it, or all do
            self._begun += self._rows.begin(optimizer, self._entries[optimizer], first)
            self._expect(optimizer, others, in_step=False)
        super().begin_step(optimizer, has_closure=has_closure, step=step)

    def begin_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the updates of rows that the next forward needs after the layers."""
        last, self._last_rows = self._last_rows, {}
        self._begun += self._rows.begin(optimizer, self._entries[optimizer], last)

    def arrived(self, masters: list[Master]) -> None:
        """With eager updates, begin those of the layers whose sums over ranks are complete."""
        if self.mode == "eager":
            self.update_added()

    def update_added(self) -> None:
        """Begin eager updates of the masters whose sums are complete, if no further backward follows in this step."""
        if self.mode != "eager" or self.eager.is_accumulating:
            return
        if not self.optimizers:
            raise RuntimeError(EAGER_NEEDS_OPTIMIZER)
        for masters, sums in self.gradients.take_added():
            self._wait_for(masters)
            for optimizer in self.optimizers:
                entry = self._entries[optimizer]
                places = entry.layers.places
                given = [m for m in masters if m.parameter in places]
                others = [m for m in given if m.owner != self.team.rank]
                self._expect(optimizer, others, in_step=True)
                mine = [(m, sums[m]) for m in given if m.owner == self.team.rank]
                if mine:
                    norms = {m: self.gradients.norm_of(m) for m, _ in mine}
                    self._begin(optimizer, mine, norms=norms, in_step=True)

    def _expect(self, optimizer: torch.optim.Optimizer, others: Sequence[Master], *, in_step: bool) -> None:
        """Hold masters that their owners update now."""
        assert self._state is not None, "made with the first optimizer"
        if self.rounds:  # its seed is in the groups, which eager updates must find as they were
            Rounding.of(optimizer)
        team = self.team
        far = [
            (ranks[place], near)
            for ranks in team.hosts
            if ranks is not team.near
            for place, near in enumerate(team.near)
        ]
        for owner, rank in [*far, *((rank, rank) for rank in team.near)]:
            for what, masters in self.masters.parts(m for m in others if m.owner == owner):
                task = RemoteTask(f"the update of {what}", team, self.worker, [rank])
                update = Update(task, self._timeline, in_step=in_step)
                for master in masters:
                    master.update, master.guards_grad = update, in_step
                    master.is_changing()
                hold_all([(m.parameter, m) for m in masters])
                if in_step:
                    self.eager.begin(optimizer, masters)
                self._begun.append(task)
                taken = partial(self._state.taken, rank, optimizer, masters)
                number = self._remote.expect(rank, RemoteUpdate(update, task, masters, taken))
                if rank == team.rank:
                    assert self._far is not None, "a rank makes its updates itself on one host"
                    self._far.expect(team.host_of[owner], masters, partial(self._received, masters, number))

    @property
    def own_elements(self) -> int:
        """Elements of parameters that this rank updates."""
        trained = [m for m in self.masters.on_host() if m.parameter.requires_grad]
        own = [m for m in trained if m.owner == self.team.rank and self._rows.of(m) is None]
        rows = [(m, each[self.team.place]) for m in trained if (each := self._rows.of(m)) is not None]
        divided: int = sum((each.stop - each.start) * m.gradient_like.shape[1] for m, each in rows)
        return divided + sum(m.gradient_like.numel() for m in own)

    def _received(self, masters: list[Master], number: int) -> None:
        """The owner of masters, on another host, has updated them, and they are in the memory of this one."""
        self._copies.renew(masters)
        self._remote.tell(number, b"")
        self._remote.end(number)

    def _new_update(self, what: str, masters: list[Master], optimizer: torch.optim.Optimizer, in_step: bool) -> Update:
        update = super()._new_update(what, masters, optimizer, in_step)
        number = self._remote.next_number(self.team.rank)
        first = 0 if self._far is None else self._far.reserve(masters)
        update.when_made = partial(self._give, optimizer, masters, number, first)
        return update

    def _give(self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], number: int, first: int) -> None:
        """`_tell`, and send the values to other hosts as the tensors from number `first` on."""
        self._tell(optimizer, masters, number)
        if self._far is not None:
            self._far.send(masters, first)

    def _tell(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], number: int, *, anew: bool = False
    ) -> None:
        """Tell the others that `masters` have been updated; their state is shared."""
        assert self._state is not None, "made with the first optimizer"
        self._remote.tell(number, self._state.shared(optimizer, masters, anew=anew))

    def synchronize(self) -> None:
        """Wait until all updates have finished, and the other hosts have those of this rank."""
        super().synchronize()
        if self._far is not None:
            self._far.wait_until_sent()

    def rows_of(self, master: Master) -> list[slice] | None:
        """The rows of a master that each rank of this host updates, by place; None if one rank updates all of them."""
        return self._rows.of(master)

    @contextmanager
    def state_gathered(self, *, values: bool = True) -> Iterator[None]:
        """Inside, the first host has the optimizers' state of all hosts, which rank 0 saves; without `values`, it has
        tensors with the right shapes. All ranks call this."""
        self.synchronize()
        far_state = self._far_state
        if far_state is None:
            yield
            return
        for optimizer in self.optimizers:
            far_state.gather(optimizer, only=0, values=values)
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False
            for optimizer in self.optimizers:
                far_state.drop(optimizer)

    def release(self) -> list[torch.optim.Optimizer]:
        """See `Updates.release`: state and gradients are then of this rank alone."""
        if self._far_state is not None and not self.worker.has_failed and not self.team.peers.has_failed:
            self.synchronize()
            self._take_all_state(self._far_state)
        with without_interception():  # of sums that another host has
            for p in self.masters.parameters:
                if p.grad is not None and self.masters.of(p).owner not in self.team.near:
                    p.grad = None
        optimizers = super().release()
        if self._far is not None:
            self._far.close()
        if self._state is not None:
            self._state.release(optimizers)
        with without_interception():
            for p in self.masters.parameters:
                if p.grad is not None:
                    p.grad = p.grad.clone()
        return optimizers

    def _take_all_state(self, far_state: FarState) -> None:
        try:
            far_state.release(self.optimizers)
        except (RankFailedError, OtherCallsError) as error:
            warnings.warn(
                "the optimizer has only the state of the parameters that this host updates "
                f"({error}); call detach_l2l in all ranks, or load a checkpoint",
                stacklevel=5,
            )

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        super()._before_state_dict(optimizer)
        if self._far_state is not None and not self._is_gathered:
            self._far_state.gather(optimizer)
        for p in parameters_of(optimizer):  # as one process has them, whoever was first
            if p in optimizer.state:
                optimizer.state[p] = optimizer.state.pop(p)


def _tell_failure(peers: Peers, error: BaseException) -> None:
    """An update of this rank has failed, for which the others wait. Its program gets the error at its next call."""
    if not isinstance(error, RankFailedError):
        peers.tell_failure(f"an update of it has raised {type(error).__name__}: {error}")
    peers.error_is_kept()
