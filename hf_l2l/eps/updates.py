"""When the masters are updated: `eps_update`.

- "serial" (L2L, arXiv:2002.05645, first text, figure 2b): in `optimizer.step()`, all layers.
- "deferred": `optimizer.step()` takes the gradients and returns; background threads update layer after layer in the
  order of the next forward, which waits for each layer as it comes to it. The norm is known by then, so clipping is
  exact; the gradients are scaled there, too.
- "eager" (L2L-p, figure 2c): during the backward, each layer as soon as the gradients of all its calls in this step
  have arrived. There is no norm of all gradients yet, so there is no clipping.

Whatever the mode, `optimizer.step()` is the optimizer's own, with its hooks and its scheduler: it does not find the
gradients that the background has taken. All modes give the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.compat import call_step_hook_last, has_later_step_hook, without_interception
from hf_l2l.config import Mode, MomentDtype
from hf_l2l.eps.eager import EagerStep
from hf_l2l.eps.gradients import Gradients, Sum, Sums
from hf_l2l.eps.masters import Master, Masters, MasterUnit, Update
from hf_l2l.eps.nonfinite import check_finite
from hf_l2l.eps.pending import Pending, hold_all, let_go, let_go_all, settle
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.optim.bf16_state import Rounding, keep_loaded_dtypes, narrow_all, widen_all, widen_gradient
from hf_l2l.optim.layerwise_check import CLOSURE, can_split
from hf_l2l.optim.layerwise_step import Part, Places, SplitStep, parameters_of, places_of
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.observer import aside
from hf_l2l.runtime.worker import Modes, Task, Worker


class OptimizerEntry:
    """What the EPS knows of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, splits: bool) -> None:
        self.splits = splits
        """Whether it updates layer by layer, and not all layers at once."""
        self.is_retired = False
        """Whether another one updates the masters in its place, until it steps again."""
        self.shapes = [p.shape for p in parameters_of(optimizer)]
        """Of its parameters, when its state was made."""
        self.changes_seen: int | None = None
        """`Masters.changes` when the shapes were compared last."""
        self.places: Places | None = None
        """Where its parameters stand; found once per step, since an eager one takes a part of it for every layer."""
        self.is_widened = False
        """Whether its state is fp32 now, for a step of all layers at once."""
        self.step_hook: RemovableHandle
        """That of `EagerParamServer.before_step`."""
        self.handles: list[RemovableHandle] = []
        """All that were registered on it."""


class Updates:
    """Updates the masters of one model with the optimizers that were given to it."""

    def __init__(
        self,
        masters: Masters,
        gradients: Gradients,
        timeline: Timeline,
        copies: Copies,
        *,
        mode: Mode,
        num_threads: int | None,
        is_accumulating: Callable[[], bool],
        moment_dtype: MomentDtype,
    ) -> None:
        """With `is_accumulating`: True in a backward if another one follows before the step."""
        self._rounds = moment_dtype == "bf16"
        self.in_parts = self._rounds or masters.precision.gradients == "16bit"
        """Whether what is kept in 16 bits is made fp32 to update, layer by layer in every mode."""
        self.steps = 0
        """Made or skipped so far, by the first optimizer."""
        self.mode = mode
        self.worker = Worker(num_threads)
        self.masters = masters
        self._modes = Modes.current()
        self._gradients = gradients
        self._timeline = timeline
        self._copies = copies
        self._entries: WeakKeyDictionary[torch.optim.Optimizer, OptimizerEntry] = WeakKeyDictionary()
        self._begun: list[Task] = []
        """Those of the last step, and what was not over by then."""
        self.eager = EagerStep(self.worker, is_accumulating)
        gradients.backwards.call(at_failure=self.eager.fail_half_updated)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that update the masters."""
        return [optimizer for optimizer, entry in self._entries.items() if not entry.is_retired]

    def add(self, optimizer: torch.optim.Optimizer) -> OptimizerEntry | None:
        """Let `optimizer` update the masters, in its `step()` or around it, in place of those whose masters it has.

        Returns:
            What is kept of it; None if it was added before.

        Raises:
            ValueError: if it is to be eager and cannot update a layer by itself.
        """
        if optimizer in self._entries:
            self._retire_others(optimizer)
            return None
        splits = (self.mode != "serial" or self.in_parts) and can_split(
            optimizer, eager=self.mode == "eager", in_parts=self.in_parts
        )
        entry = self._entries[optimizer] = OptimizerEntry(optimizer, splits=splits)
        entry.handles = [
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
        ]
        if self._rounds:
            entry.handles += keep_loaded_dtypes(optimizer)
        self._retire_others(optimizer)
        return entry

    def _retire_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Retire the optimizers whose trainable masters `optimizer` has, too, and those with no master of the model.

        A program that makes a new optimizer may keep the old one alive; a step must not wait for that one.
        """
        own, of_model = set(parameters_of(optimizer)), set(self.masters.model.parameters())
        for other in self.optimizers:
            theirs = set(parameters_of(other)) & of_model
            shared = theirs & own
            if other is not optimizer and (shared or not theirs) and not any(p.requires_grad for p in theirs - shared):
                self._entries[other].is_retired = True
        self._entries[optimizer].is_retired = False

    def check(self) -> None:
        """Raise what went wrong in the background, or EngineFailedError if that has been raised before."""
        self.worker.check()

    def synchronize(self) -> None:
        """Wait until every update that was begun is finished."""
        why = wait_reasons.ALL_UPDATES_FINISHED
        with self._timeline.waiting_for_eps(why):
            for task in list(self._begun):
                task.wait(why)
        self.check()

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self.synchronize()
        if self.mode == "eager":  # the first backward made the states from the last layer to the first
            for p in parameters_of(optimizer):
                if p in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(p)

    def start_forward(self) -> None:
        """A forward begins that a backward may follow.

        Raises:
            ValueError: if a parameter is not what its optimizer knows any more.
        """
        self._refuse_changed()
        # Eager updates are given to the worker by a thread of torch's, which has other modes.
        self._modes = Modes.current()

    def _refuse_changed(self) -> None:
        """Raise ValueError if a parameter is not what its optimizer knows any more, or has a hook that never runs."""
        self.masters.refuse_gradient_hooks()
        for optimizer in self.optimizers:
            entry = self._entries[optimizer]
            if entry.changes_seen == self.masters.changes:
                continue
            for p, shape in zip(parameters_of(optimizer), entry.shapes, strict=False):  # groups may have been added
                if p.shape != shape:
                    raise ValueError(
                        f"a parameter keeps its shape as long as an optimizer has a state for it (got "
                        f"{list(p.shape)} for {self.masters.of(p).name}, which was {list(shape)}); make a new "
                        "optimizer from model.parameters() and pass it to eps.wrap"
                    )
            entry.changes_seen = self.masters.changes

    # ---- in optimizer.step()

    def refuse_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Raise what is wrong with a step of `optimizer`, before anything is done for it."""
        entry = self._entries[optimizer]
        if entry.is_retired:
            if self.mode == "eager":
                raise RuntimeError(
                    "eps_update='eager' updates during backward with the optimizer that eps.wrap got last (got a step "
                    f"of another {type(optimizer).__name__} of the same parameters); call eps.wrap(optimizer) before "
                    "backward"
                )
            self._retire_others(optimizer)
        self._refuse_changed()
        if has_closure and self.in_parts:
            raise ValueError(CLOSURE)

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """`optimizer` steps with the gradients that are there: begin its updates, or leave them to its own step."""
        entry = self._entries[optimizer]
        parameters = parameters_of(optimizer)
        masters = self.masters.of_all(parameters)
        # A hook that comes later than ours finds every gradient in its place, this time; from now on it comes before.
        has_later_hook = has_later_step_hook(optimizer, entry.step_hook)
        self.eager.end(optimizer, masters, has_later_hook=has_later_hook)
        with without_interception():
            sums = [(m, gradient) for m in masters if (gradient := m.parameter.grad) is not None]
        for master in masters:
            master.calls = master.arrivals = 0
            master.taken_norm = None
        if not entry.splits or has_closure or has_later_hook:
            for tensor in (*(gradient for _, gradient in sums), *parameters):
                settle(tensor)  # an ordinary one again: some optimizers look at the type
            self._timeline.start_update()
            if self.in_parts:
                widen_all(optimizer)
                entry.is_widened = True
            return
        sums = [(master, gradient) for master, gradient in sums if master.can_be_held]
        self._wait_for([master for master, _ in sums])
        with self.worker.failing_with_errors():  # half a step must not be taken for one
            with without_interception():
                for master, _ in sums:
                    master.parameter.grad = None  # only the update has it now, and the optimizer finds nothing to do
            self._begin(optimizer, sums)
        if self.mode == "serial":
            self.synchronize()

    @staticmethod
    def _wait_for(masters: Any) -> None:
        """Of two updates of a master, the second begins when the first is over."""
        for update in {master.update for master in masters}:
            if update is not None:
                update.wait()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of `optimizer` is over: there are no gradients any more."""
        entry = self._entries[optimizer]
        with without_interception():
            for p in parameters_of(optimizer):
                p.grad = None
        self.steps += optimizer is self.optimizers[0]
        if self._rounds:
            if entry.is_widened:
                narrow_all(optimizer)
            Rounding.end_step(optimizer)
        entry.is_widened, entry.places = False, None
        if has_later_step_hook(optimizer, entry.step_hook):
            call_step_hook_last(optimizer, entry.step_hook)

    # ---- in the background

    def _begin(
        self,
        optimizer: torch.optim.Optimizer,
        sums: Sums,
        *,
        landed: stream.Point | None = None,
        norms: Mapping[Master, torch.Tensor] | None = None,
        in_step: bool = False,
    ) -> None:
        """Let the worker update the masters in `sums`, layer by layer, once their sums have `landed`, with the `norms`
        that have not been looked at yet."""
        entry = self._entries[optimizer]
        gradients = dict(sums)
        with self.worker.failing_with_errors():
            self._begun = [task for task in self._begun if not task.done]
            with without_interception(), torch.no_grad():
                rounding = Rounding.of(optimizer) if self._rounds else None
                entry.places = places = entry.places or places_of(optimizer)
                step = SplitStep(optimizer, {m.parameter: gradient for m, gradient in sums}, places, rounding)
                factors = _taken_factors(sums)
                modes = self._modes if in_step else Modes.current()
                for what, masters in self.masters.parts(gradients):
                    unseen = [norms[m] for m in masters if m in norms] if norms is not None else []
                    check = partial(check_finite, unseen, self.steps + 1, f"the update of {what}")
                    update = Update(Task(f"the update of {what}"), self._timeline, in_step=in_step)
                    part = step.part([m.parameter for m in masters])
                    for master in masters:
                        master.update, master.guards_grad = update, in_step
                    hold_all([(m.parameter, m) for m in masters])
                    if in_step:
                        self.eager.begin(optimizer, masters)
                    run = partial(carry_out, part, masters, factors, check, landed, update, self._copies)
                    self.worker.submit(update.task, run, modes)
                    self._begun.append(update.task)

    # ---- eager

    def expect(self, unit: MasterUnit) -> None:
        """A call of `unit` that its masters may get gradients from is in the graph."""
        if self.mode == "eager":
            for master in unit.trained_masters:
                master.calls += 1

    def arrived(self, masters: list[Master]) -> None:
        """The gradients of one call have been received; update the masters for which there will be no more."""
        if self.mode != "eager":
            return
        complete = [m for m in self.eager.complete(masters) if m.can_be_held]
        if complete and not self.optimizers:
            raise RuntimeError(
                "eps_update='eager' updates during backward and needs the optimizer before (none was given); call "
                "eps.wrap(optimizer) first"
            )
        self._wait_for(complete)
        for optimizer in self.optimizers:
            entry = self._entries[optimizer]
            entry.places = places = entry.places or places_of(optimizer)
            sums, norms, landed = self._gradients.take(m for m in complete if m.parameter in places)
            if sums:
                self._begin(optimizer, sums, landed=landed, norms=norms, in_step=True)

    def release(self) -> None:
        """Finish what was begun, and let the optimizers step as they did before."""
        masters = self.masters.all()
        if self.worker.has_failed:
            unfinished = sum(m.update is not None and not m.update.made for m in masters)
            warnings.warn(
                f"an update failed: {unfinished} parameters are not what the last step would have made them; load "
                "the last checkpoint",
                stacklevel=4,
            )
        else:
            self.synchronize()
        for entry in self._entries.values():
            for handle in entry.handles:
                handle.remove()
        for p in self.masters.model.parameters():
            let_go(p)
            if p.grad is not None:
                settle(p.grad)
            widen_gradient(p)
        self._entries.clear()
        self.worker.close()


def _taken_factors(sums: Sums) -> dict[torch.Tensor, torch.Tensor]:
    """Parameter -> the number that its gradient is still to be multiplied by, which the caller sees to from now on."""
    factors: dict[torch.Tensor, torch.Tensor] = {}
    held: list[tuple[torch.Tensor, Pending]] = []
    for master, gradient in sums:
        pending = gradient.__dict__.get("_l2l_pending")
        if pending is not None:
            held.append((gradient, pending))
        if isinstance(pending, Sum) and pending.factor is not None:
            factors[master.parameter] = pending.factor
    let_go_all(held)
    return factors


def carry_out(
    part: Part,
    masters: list[Master],
    factors: Mapping[torch.Tensor, torch.Tensor],
    check: Callable[[], None],
    landed: stream.Point | None,
    update: Update,
    copies: Copies,
) -> None:
    """Update `masters` and what travels in their place, on a thread of the worker.

    Args:
        part: the update.
        masters: those that it updates.
        factors: parameter -> what its gradient is multiplied by first.
        check: raises if the gradients, which are there by then, must not be used.
        landed: after which they are there.
        update: its record.
        copies: what travels.
    """
    if landed is not None:
        with aside():
            stream.wait(landed, wait_reasons.LAYER_GRADIENTS_DOWNLOADED, host=True)
    with update.timeline.host_works(update.task.what):
        check()
        part.run(factors)
        copies.renew(masters)
    update.made = True
    if not update.in_step:
        Master.end_update(masters)
