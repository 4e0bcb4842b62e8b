"""The EPS of several ranks that train one model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hf_l2l.across_devices.choice import Reduction
from hf_l2l.compat import is_without_sync, without_interception
from hf_l2l.config import L2LConfig
from hf_l2l.eps.host_memory import HostMemory, Progress
from hf_l2l.eps.masters import Masters, MasterUnit
from hf_l2l.eps.pending import clip, total_norm
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.ranks.messages import OPTIONS, VOTE
from hf_l2l.ranks.peers import Peers, RankFailedError
from hf_l2l.ranks.team import Team, refuse_other_group
from hf_l2l.runtime.backward_callbacks import HookErrors
from hf_l2l.shared_eps.gradients import SharedGradients
from hf_l2l.shared_eps.host_memory import SharedMemory
from hf_l2l.shared_eps.updates import SharedUpdates

_SAME = (
    "cmp",
    "grad_dtype",
    "moment_dtype",
    "host_copies",
    "nonfinite",
    "loss_scale_init",
    "loss_scale_growth",
    "loss_scale_backoff",
    "loss_scale_interval",
    "resident_update",
    "eps_update",
    "layer_classes",
    "rank_timeout",
    "reduce",
)
"""Options that say which gradients and updates there are, and when. Others are a matter of each device."""


class SharedEagerParamServer(EagerParamServer):
    """One of the ranks' views of the EPS that they have together (arXiv:2002.05645, section 3.3).

    Gradients are means over the ranks, as with DistributedDataParallel. All ranks make the same calls: attach, forward
    and backward, clip, step.
    """

    gradients: SharedGradients
    updates: SharedUpdates
    memory: SharedMemory
    team: Team

    def __init__(self, *args: Any, team: Team, **kwargs: Any) -> None:
        self.team = team
        self._votes = 0
        self._is_without_sync = False
        """Whether the last forward with gradients was inside `no_sync()`."""
        with ExitStack() as at_errors:
            at_errors.callback(team.give_up)
            super().__init__(*args, **kwargs)
            self._begin_traces()
            at_errors.pop_all()
        self.backwards.errors = _Errors(team.peers)

    def _begin_traces(self) -> None:
        """Traces of the ranks of a host have one time; all ranks call this, whether they write one or not."""
        told = self.team.tell(repr(self.timeline.clock.now()), "ranks agree on what is 0 in their traces")
        self.timeline.begin_trace(min(float(told[rank]) for rank in self.team.near))

    def _make_memory(self, progress: Progress) -> HostMemory:
        return SharedMemory(self.device, self.masters, progress, team=self.team)

    def _make_gradients(self, others: Sequence[torch.device]) -> SharedGradients:
        self._devices = [self.device, *others]
        return SharedGradients(
            self.device, self.masters, self.memory, self.backwards, others, team=self.team, timeline=self.timeline
        )

    def _make_updates(self, config: L2LConfig, is_accumulating: Callable[[], bool]) -> SharedUpdates:
        _refuse_other_options(self.team, config, self.masters)
        self.gradients.reduction = Reduction(config.reduce, self.team, self._devices)
        return SharedUpdates(
            self.masters,
            self.gradients,
            self.timeline,
            self.copies,
            config,
            is_accumulating=is_accumulating,
            team=self.team,
        )

    def refuse_group(self) -> None:
        """Raise ValueError if the process group has changed since the model was attached."""
        refuse_other_group(self.team.size)

    def start_forward(self) -> None:
        """See `EagerParamServer.start_forward`; the first ones allocate memory, together with the other ranks."""
        self.backwards.errors.raise_first()  # this rank's own error is the cause of a failure that it has told
        self.updates.check()
        self.team.peers.check()
        super().start_forward()
        self.memory.adopt()
        if torch.is_grad_enabled():
            self._is_without_sync = is_without_sync()
            self.updates.deal()
            self.memory.take_gradients()
            self.gradients.start_call()

    def expect(self, unit: MasterUnit, calls: int = 1) -> None:
        """See `EagerParamServer.expect`."""
        super().expect(unit, calls)
        self.gradients.expect(unit, calls)

    def output_factor(self) -> Callable[[], float] | None:
        """Gradients are means over the ranks: each rank takes its share of the gradients of the outputs."""
        scale, size = super().output_factor(), self.team.size
        return (lambda: 1 / size) if scale is None else (lambda: scale() / size)

    def _vote(self, norm: Callable[[], torch.Tensor]) -> bool:
        """A rank whose loss is not finite is against the step, and then all are."""
        self.backwards.errors.raise_first()  # such as that a rank has failed in the backward
        if not self.vote.is_decided:
            self._votes += 1
            against = self.team.gather(VOTE, self._votes, bytes([self.vote.is_vetoed]), "all ranks vote")
            if any(each[0] for each in against.values()):
                self.vote.veto()
        return super()._vote(norm)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        """See `EagerParamServer.before_step`.

        Raises:
            ValueError: for a step with gradients that `no_sync()` is to keep from the other ranks.
        """
        self.backwards.errors.raise_first()  # before the others are waited for, which have been told of it
        if self._is_without_sync:
            raise ValueError(
                "ranks under L2L have one set of weights, which they update together (got optimizer.step() after a "
                "backward inside no_sync(), where each rank would update weights of its own, as Accelerate's LocalSGD "
                "does); leave out LocalSGD, or make the last backward of each step outside no_sync()"
            )
        self.updates.check()
        self.team.peers.check()
        # No rank writes to weights that the program of another one may still read before its step.
        if not self.team.come_to_step("all ranks come to optimizer.step()", self.updates.digest_of(optimizer)):
            self.updates.refuse_other_gradients(optimizer)
        super().before_step(optimizer, args, kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """See `EagerParamServer.after_step`."""
        super().after_step(optimizer)
        self.gradients.end_step()

    def _clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Each owner scales its share, when it uses it."""
        clip(self.masters.parameters, norm, max_norm, later=True)

    @torch.no_grad()
    def clip_norm_of(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the gradients of some parameters alone, by their norm, which is returned (0-dim, on the host)."""
        masters = self.masters.of_all(parameters)
        norm = total_norm(masters)
        if max_norm != math.inf and self._vote(self.grad_norm):
            clip([m.parameter for m in masters], norm, float(max_norm), later=True)
        return norm

    def _drop_errors(self) -> None:
        """Forget an error that the program has not asked for: its traceback refers to a graph, and that to the shared
        memory, which Python's collector does not see."""
        self.backwards.errors = HookErrors()

    def release(self) -> list[torch.optim.Optimizer]:
        """See `EagerParamServer.release`: each rank then has an ordinary model of its own."""
        peers = self.team.peers
        with ExitStack() as stack:
            stack.callback(self._drop_errors)
            stack.callback(self._close_reduction)
            stack.callback(self.gradients.release)
            for module in (self.model, *self.model.children()):  # else accelerate would leave them unwrapped later
                vars(module).pop("_is_accelerate_prepared", None)
            stack.callback(self.team.close)  # first, so that no thread waits for the others any more
            try:
                peers.check()
            except RankFailedError as error:
                self.updates.worker.fail(error)  # what it has left half-done is not waited for
            return super().release()

    def _close_reduction(self) -> None:
        if self.gradients.reduction is not None:
            self.gradients.reduction.close()


def _refuse_other_options(team: Team, config: L2LConfig, masters: Masters) -> None:
    """Raise ValueError in all ranks unless they have the same options and parameters; all of them call this."""
    mine = {name: repr(getattr(config, name)) for name in _SAME} | {"parameters": _described(masters)}
    found = team.gather(OPTIONS, 1, json.dumps(mine).encode(), "all ranks attach the model")
    for name, value in mine.items():
        for rank, message in found.items():
            theirs = json.loads(message)[name]
            if theirs != value:
                raise ValueError(
                    f"all ranks must attach the same model with the same options (got {name}: {value} on rank "
                    f"{team.rank}, and {theirs} on rank {rank}); start all of them with the same arguments"
                )


def _described(masters: Masters) -> str:
    """The parameters in short: equal for equal names, shapes, dtypes and layers."""
    with without_interception():
        named = [
            (m.name, list(m.parameter.shape), str(m.parameter.dtype), m.parameter.requires_grad, m.layer_number)
            for m in masters.all()
        ]
        elements = sum(m.parameter.numel() for m in masters.all())
    digest = hashlib.sha256(repr(named).encode()).hexdigest()[:8]
    return f"{len(named)} with {elements} elements and sum {digest}"


class _Errors(HookErrors):
    """Those of hooks, of which `peers` know whether the program has got them."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self._peers.error_is_kept()
        return super().__exit__(kind, error, traceback)

    def raise_first(self) -> None:
        if self._first is not None:
            self._peers.error_is_raised()
        super().raise_first()


def ranks_text(eps: EagerParamServer | None) -> str | None:
    """How many ranks train the model, which this is, and how much it updates; None for one process."""
    if eps is None or eps.team is None:
        return None
    with without_interception():
        trained = [m for m in eps.masters.on_host() if m.parameter.requires_grad]
        count = sum(m.parameter.numel() for m in trained)
        own = eps.updates.own_elements if isinstance(eps.updates, SharedUpdates) else count
    share = f"updates {own:,} of" if eps.updates.optimizers else "will update its share of"
    return f"{eps.team.size}, of which this is rank {eps.team.rank}; it {share} {count:,} trained parameters"


def eps_type(team: Team | None) -> Callable[..., EagerParamServer]:
    """What makes the EPS of a model that one process trains, or the ranks of a team."""
    return EagerParamServer if team is None else partial(SharedEagerParamServer, team=team)
