"""Updates of the masters, at the time that `eps_update` sets.

- "serial" (L2L, arXiv:2002.05645, first text, figure 2b): all layers are updated in `optimizer.step()`.
- "deferred": `optimizer.step()` takes the gradients and returns; background threads update layer after layer in the
  order of the next forward, which waits for each layer's update. The norm is known by then, so clipping is exact.
- "eager" (L2L-p, figure 2c): each layer is updated during the backward, when the gradients of all its calls in this
  step have arrived. The norm of all gradients is not known yet, so there is no clipping.

In every mode the program calls the optimizer's own `step()`, with its hooks and its scheduler; gradients that were
taken for updates in the background are not in `p.grad` then. All modes give the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.compat import call_step_hook_last, has_later_step_hook, without_interception
from hf_l2l.config import L2LConfig, Mode, update_mode
from hf_l2l.eps.eager import EAGER_NEEDS_OPTIMIZER, EagerStep
from hf_l2l.eps.gradients import Gradients, Sums
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.eps.nonfinite import check_finite
from hf_l2l.eps.pending import Landed, Update, current_norm, downloaded, hold_all, let_go, secure, settle, taken
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.optim.layer_optimizers import Part, SplitStep, parameters_of
from hf_l2l.optim.layerwise_check import can_split, why_in_parts
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.optim.optimizer_entry import OptimizerEntry
from hf_l2l.optim.rounded_state import Rounding, keep_rounded, narrow_all, widen, widen_all, widen_gradient
from hf_l2l.option_names import option
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.backward_callbacks import RaisedIn
from hf_l2l.runtime.observer import aside
from hf_l2l.runtime.worker import Modes, OwnWork, Task, Worker


class Updates:
    """Updates the masters of one model with its wrapped optimizers."""

    def __init__(
        self,
        masters: Masters,
        gradients: Gradients,
        timeline: Timeline,
        copies: Copies,
        config: L2LConfig,
        *,
        is_accumulating: Callable[[], bool],
    ) -> None:
        """`is_accumulating` returns True in a backward if another one follows before the step."""
        self.moments = config.moment_dtype
        """How the state on the host is kept."""
        self.rounds = config.moment_dtype != "fp32"  # state on the host is kept in fewer bits
        self.in_parts = self.rounds or masters.precision.gradients == "16bit"
        """True if gradients or state are kept in 16 bits: each update converts its part to fp32, in every mode."""
        self.always_splits = False  # whether optimizers update layer by layer, if they can
        self.must_split = why_in_parts() if self.in_parts else None
        """Why they must be able to."""
        self.around = _as_it_is
        """Makes of an update, its optimizer and its masters what runs instead."""
        self.when_updated: Callable[[torch.optim.Optimizer, list[Master]], None] | None = None
        """Called by an update that has made values and state, before the program uses them; a forward may have used
        pieces of values before."""
        self.stepped_whole = False
        """Whether the last step was made for all layers at once."""
        self.steps = 0
        """Steps of the first optimizer so far, including skipped ones."""
        self.mode: Mode = update_mode(config.eps_update, gradients.device)
        self.worker = Worker(config.num_threads)
        self.masters = masters
        self._modes = Modes.current()
        self._gradients = gradients
        self._timeline = timeline
        self._copies = copies
        self._entries = WeakKeyDictionary[torch.optim.Optimizer, OptimizerEntry]()
        self._begun: list[Task] = []
        """Updates of the last step, and of earlier ones that had not finished when it began."""
        self.eager = EagerStep(self.worker, is_accumulating)
        gradients.backwards.call(at_failure=self.eager.fail_half_updated)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that update the masters."""
        return [optimizer for optimizer, entry in self._entries.items() if not entry.is_retired]

    def add(self, optimizer: torch.optim.Optimizer) -> OptimizerEntry | None:
        """Let `optimizer` update its masters, instead of earlier optimizers of the same masters.

        Returns:
            its record; None if it was added before.

        Raises:
            ValueError: if updates are eager, and it cannot update a layer by itself.
        """
        if optimizer in self._entries:
            self._retire_others(optimizer)
            return None
        one_pass = OnePass.of(optimizer, self.moments)
        if self.moments == "8bit" and (one_pass is None or not all(map(one_pass.covers, optimizer.param_groups))):
            raise ValueError(
                f"{option('moment_dtype')}='8bit' keeps moments of torch's Adam, AdamW and SGD and of hf_l2l.Lamb, "
                "without amsgrad, with numbers as learning rates and betas, of which the first is above 0.5 (got "
                f"{type(optimizer).__name__} with {optimizer.defaults}); use one of them, or "
                f"{option('moment_dtype')}='bf16'"
            )
        is_mixed, is_eager = self.masters.has_resident and self.masters.has_streamed, self.mode == "eager"
        is_later = self.mode == "deferred" and self.masters.has_streamed
        in_background = self.in_parts or self.always_splits or is_eager or is_later
        splits = (in_background or is_mixed) and can_split(
            optimizer, eager=is_eager, why=self.must_split, has_resident=is_mixed
        )
        splits = splits and in_background
        entry = self._entries[optimizer] = OptimizerEntry(
            optimizer, splits=splits, one_pass=one_pass if splits else None
        )
        if one_pass is not None and splits:
            self._prepare(optimizer, one_pass)
        entry.handles = [
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
        ]
        if self.rounds:
            entry.handles += keep_rounded(optimizer, self.moments)
        self._retire_others(optimizer)
        return entry

    def _prepare(self, optimizer: torch.optim.Optimizer, one_pass: OnePass) -> None:
        """Have the updates of the masters on the host compiled, before the first step."""
        for group in optimizer.param_groups:
            on_host = [m for m in self.masters.of_all(group["params"]) if not m.is_resident]
            kinds = {(m.gradient_like.dtype, self._copies.dtype_of(m)) for m in on_host if m.dtype == torch.float32}
            for gradient, copy in kinds:
                one_pass.prepare(group, gradient, copy)

    def add_handle(self, optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
        """Remove a hook on an optimizer when this is released."""
        self._entries[optimizer].handles.append(handle)

    def _retire_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Retire optimizers whose trainable masters all belong to `optimizer`, too, or that have none of the model.

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
        """Raise the exception of a failed update, or EngineFailedError if that has been raised before."""
        self.worker.check()

    def synchronize(self) -> None:
        """Wait until all updates have finished."""
        why = wait_reasons.ALL_UPDATES_FINISHED
        with self._timeline.waiting_for_eps(why):
            for task in list(self._begun):
                task.wait(why)
        self.check()

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self.synchronize()
        if self.mode == "eager":  # the first backward created the states from the last layer to the first
            for p in parameters_of(optimizer):
                if p in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(p)

    def start_forward(self) -> None:
        """Prepare a forward that a backward may follow.

        Raises:
            ValueError: if a parameter has changed its shape, or has a gradient hook.
        """
        self._refuse_changed()
        # A thread of torch submits eager updates, and its modes are not those of the program.
        self._modes = Modes.current()

    def _refuse_changed(self) -> None:
        """Raise ValueError if a parameter has changed its shape, or has a gradient hook, which would never run."""
        self.masters.refuse_gradient_hooks()
        for optimizer in self.optimizers:
            parameters, shapes = parameters_of(optimizer), self._entries[optimizer].shapes
            with without_interception():
                now = [p.shape for p in parameters]
            if now[: len(shapes)] == shapes:  # groups may have been added
                continue
            changed = [each for each in zip(parameters, shapes, now, strict=False) if each[1] != each[2]]
            for p, shape, _ in changed:
                raise ValueError(
                    f"a parameter must keep its shape while an optimizer has state for it (got "
                    f"{list(p.shape)} for {self.masters.of(p).name}, which was {list(shape)}); make a new "
                    "optimizer from model.parameters() and pass it to eps.wrap"
                )

    # ---- in optimizer.step()

    def refuse_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Raise RuntimeError or ValueError if `optimizer` cannot step now, before the step changes anything."""
        entry = self._entries[optimizer]
        if entry.is_retired:
            if self.mode == "eager":
                raise RuntimeError(
                    "eps_update='eager' updates during backward with the optimizer that was wrapped last (got a step "
                    f"of another {type(optimizer).__name__} of the same parameters); call eps.wrap(optimizer) before "
                    "backward"
                )
            self._retire_others(optimizer)
        self._refuse_changed()
        if has_closure and self.must_split is not None:
            raise ValueError(
                f"{self.must_split}, so optimizer.step() takes no closure (got one); call step() after backward()"
            )

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool, step: FrameType) -> None:
        """Begin the updates of a step of `optimizer` with the present gradients, or leave them to its own `step()`,
        which runs in the frame `step`."""
        entry, parameters = self._entries[optimizer], parameters_of(optimizer)
        masters = self.masters.of_all(parameters)
        # A hook registered after ours needs all gradients in p.grad, so this step updates in `step()` itself. After
        # the step, ours is moved behind it.
        has_later_hook = has_later_step_hook(optimizer, entry.step_hook)
        self.eager.end(optimizer, masters, has_later_hook=has_later_hook)
        with without_interception():
            sums = [(m, gradient) for m in masters if (gradient := m.parameter.grad) is not None]
        for master in masters:
            master.calls, master.arrivals, master.taken_norm = 0, 0, None
        self.stepped_whole = not entry.splits or has_closure or has_later_hook
        if self.stepped_whole:
            for tensor in (*(gradient for _, gradient in sums), *parameters):
                settle(tensor)  # makes it an ordinary tensor: some optimizers check the type
            self._timeline.start_update()
            if self.in_parts:
                widen_all(optimizer)
                entry.is_widened = True
            if not has_closure:  # which may raise before a weight changes
                self.worker.begin_own_work(OwnWork(f"step() of {type(optimizer).__name__}", step))
            return
        sums = [(master, gradient) for master, gradient in sums if master.can_be_held]
        self._wait_for([master for master, _ in sums])
        with self.worker.failing_with_errors():  # half a step must not pass for a whole one
            with without_interception():
                for master, _ in sums:
                    master.parameter.grad = None  # only the update refers to it; `step()` itself skips the parameter
            self._begin(optimizer, sums)
            self.begin_last(optimizer)
        if self.mode == "serial":
            self.synchronize()

    def begin_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin what else belongs to a step, after the updates of the layers."""

    @staticmethod
    def _wait_for(masters: Any) -> None:
        """Wait for earlier updates of `masters`: the second update of a master begins after the first has finished."""
        for update in filter(None, {master.update for master in masters}):
            update.wait()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients after the step of `optimizer`, and end its record of the step."""
        self.worker.end_own_work()
        entry = self._entries[optimizer]
        with without_interception():
            for p in parameters_of(optimizer):
                p.grad = None
        self.steps += optimizer is self.optimizers[0]
        if self.rounds:
            if entry.is_widened:
                narrow_all(optimizer, self.moments)
            Rounding.end_step(optimizer)
        entry.is_widened = False
        if has_later_step_hook(optimizer, entry.step_hook):
            call_step_hook_last(optimizer, entry.step_hook)

    # ---- in the background

    def _begin(
        self,
        optimizer: torch.optim.Optimizer,
        sums: Sums,
        *,
        landed: Sequence[Landed] = (),
        norms: Mapping[Master, torch.Tensor] | None = None,
        in_step: bool = False,
    ) -> None:
        """Submit updates of the masters in `sums` to the worker, one per layer. Each waits until these have `landed`,
        and checks that the `norms` of its gradients are finite. Resident masters are updated by the device, which gets
        the work here."""
        entry = self._entries[optimizer]
        gradients = dict(sums)
        resident = [master for master in gradients if master.is_resident]
        on_host = [master for master in gradients if not master.is_resident]
        with self.worker.failing_with_errors():
            self._begun = [task for task in self._begun if not task.done]
            with without_interception(), torch.no_grad():
                rounding = Rounding.of(optimizer, self.moments) if self.rounds else None
                step = SplitStep(entry.layers, {m.parameter: gradient for m, gradient in sums}, rounding)
                modes = self._modes if in_step else Modes.current()
                for what, masters in self.masters.parts(on_host):
                    unchecked = [norms[m] for m in masters if m in norms] if norms is not None else []
                    check = partial(check_finite, unchecked, self.steps + 1, f"the update of {what}")
                    update = self._new_update(what, masters, optimizer, in_step)
                    part = step.part([m.parameter for m in masters])
                    factors, late = taken([(m.parameter, gradients[m]) for m in masters])
                    for master in masters:
                        master.update, master.guards_grad = update, in_step
                    Master.are_changing(masters)
                    hold_all([(m.parameter, m) for m in masters])
                    if in_step:
                        self.eager.begin(optimizer, masters)
                    run = partial(carry_out, part, masters, factors, check, (*landed, *late), update, self._copies)
                    self.worker.submit(update.task, self.around(run, optimizer, masters), modes)
                    self._begun.append(update.task)
            if resident:
                self._update_on_device(step, {master: gradients[master] for master in resident})

    def _new_update(self, what: str, masters: list[Master], optimizer: torch.optim.Optimizer, in_step: bool) -> Update:
        """The record of an update that is about to begin."""
        pieces = masters[0].pieces if len(masters) == 1 else ()
        task = Task(f"the update of {what}", len(pieces))
        update = Update(task, self._timeline, in_step=in_step, pieces=pieces)
        if self.when_updated is not None:
            update.when_made = partial(self.when_updated, optimizer, masters)
        return update

    def _update_on_device(self, step: SplitStep, gradients: Mapping[Master, torch.Tensor]) -> None:
        """Update resident masters, on the current stream. Raises NonFiniteError with eager updates, for which nothing
        has checked these gradients."""
        if self.mode == "eager":
            with without_interception():
                norms = downloaded([current_norm(gradient, m.dtype) for m, gradient in gradients.items()])
            check_finite(norms, self.steps + 1, "the update of resident weights")
        # Large ones alone: an optimizer may need temporary memory for all that it updates at once.
        for what, masters in self.masters.parts(gradients):
            with without_interception():
                factors = taken((m.parameter, gradients[m]) for m in masters).factors
            with RaisedIn("the update of", what):
                step.part([m.parameter for m in masters]).run(factors)

    # ---- eager

    def expect(self, unit: MasterUnit, calls: int) -> None:
        """Count calls of `unit` in the graph, from which its masters may get gradients."""
        if self.mode == "eager":
            for master in unit.trained_masters:
                master.calls += calls

    def arrived(self, masters: list[Master]) -> None:
        """Count the received gradients of one call; update eagerly the masters that will get no more in this step."""
        if self.mode != "eager":
            return
        complete = [m for m in self.eager.complete(masters) if m.can_be_held and not m.is_resident]
        if complete and not self.optimizers:
            raise RuntimeError(EAGER_NEEDS_OPTIMIZER)
        self._wait_for(complete)
        for optimizer in self.optimizers:
            places = self._entries[optimizer].layers.places
            sums, norms, landed = self._gradients.take(m for m in complete if m.parameter in places)
            if sums:
                self._begin(optimizer, sums, landed=landed, norms=norms, in_step=True)

    def release(self) -> list[torch.optim.Optimizer]:
        """Finish all updates, and return the optimizers without their hooks: they step as they did before."""
        if self.worker.has_failed:
            text = "an update failed: some weights have made a step that others have not; load the last checkpoint"
            warnings.warn(text, stacklevel=4)
        else:
            self.synchronize()
        for handle in [handle for entry in self._entries.values() for handle in entry.handles]:
            handle.remove()
        for p in self.masters.model.parameters():
            let_go(p)
            if p.grad is not None:
                settle(p.grad)
            widen_gradient(p)
        if self.moments == "8bit":  # which no other code can read
            for state in [state for optimizer in self._entries for state in optimizer.state.values()]:
                widen(state)
        optimizers, self._entries = list(self._entries), WeakKeyDictionary()
        self.worker.close()
        return optimizers


def _as_it_is(run: Callable[[], None], optimizer: torch.optim.Optimizer, masters: list[Master]) -> Callable[[], None]:
    """The update itself."""
    return run


def _wait_until_landed(points: Iterable[stream.Point]) -> None:
    """Wait until gradients are on the host, beside the computation."""
    with aside():
        for point in points:
            stream.wait(point, wait_reasons.LAYER_GRADIENTS_DOWNLOADED, host=True)


class _Pieces:
    """The pieces of the only master of an update (see `one_pass.Pieces`)."""

    def __init__(self, update: Update, landed: Sequence[Landed]) -> None:
        self.ends = update.pieces
        self._update, self._landed = update, landed

    def before(self, number: int) -> None:
        """Wait until the gradient of this piece, and of those before it, is on the host."""
        _wait_until_landed(each.pieces[number] if each.pieces else each.point for each in self._landed)

    def after(self, number: int) -> None:
        """This piece has its new values."""
        self._update.task.end_piece(number)


def carry_out(
    part: Part,
    masters: list[Master],
    factors: Mapping[torch.Tensor, torch.Tensor],
    check: Callable[[], None],
    landed: Sequence[Landed],
    update: Update,
    copies: Copies,
) -> None:
    """Update `masters` and their 16-bit copies, on a thread of the worker.

    Args:
        part, masters: the update, and the masters that it updates.
        factors: parameter -> the number that its gradient is multiplied by first.
        check: raises if the gradients must not be used; called when they have been downloaded.
        landed: when the gradients are on the host; nothing if they are already.
        update, copies: the record of the update, and the 16-bit copies of masters.
    """
    pieces = _Pieces(update, landed) if update.pieces else None
    if pieces is None:
        _wait_until_landed(each.point for each in landed)
    else:
        pieces.before(0)  # the norm, which is checked first, has arrived before
    secure(masters)
    with update.timeline.host_works(update.task.what), update.timeline.ledger.transients.of_update() as allocated:
        check()
        written = part.run(factors, allocated, {m.parameter: m.copy for m in masters if m.copy is not None}, pieces)
        copies.renew(masters, written)
    update.when_made()
    if update.is_made():
        Master.end_update(masters)
