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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_l2l.config import Mode, MomentDtype
from hf_l2l.eps.eager import Arrivals, EagerStep
from hf_l2l.eps.gradients import Gradients, taken_factor
from hf_l2l.eps.nonfinite import check_finite
from hf_l2l.eps.pending import can_hold, hold, let_go, pending_of, settle
from hf_l2l.eps.update_task import Update, carry_out
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.model.masters import Masters
from hf_l2l.optim.bf16_state import Rounding, keep_loaded_dtypes, narrow_all, widen_all, widen_gradient
from hf_l2l.optim.layerwise_check import CLOSURE, can_split
from hf_l2l.optim.layerwise_step import Places, SplitStep, parameters_of, places_of
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.runtime.tensors import untouched
from hf_l2l.runtime.worker import Modes, Task, Worker


class Updates:
    """Updates the masters of one model with the optimizers that were given to it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        gradients: Gradients,
        timeline: Timeline,
        copies: Copies,
        *,
        mode: Mode,
        num_threads: int | None,
        goes_on: Callable[[], bool],
        may_step: Callable[[], bool],
        stepped: Callable[[torch.optim.Optimizer], None],
        moment_dtype: MomentDtype,
    ) -> None:
        """With what says in a backward whether it `goes_on` with another one before the step, and in a step whether it
        `may_step`, and with what is told that an optimizer has `stepped`."""
        self._may_step = may_step
        self._stepped = stepped
        self._rounds = moment_dtype == "bf16"
        self.in_parts = self._rounds or copies.precision.gradients == "16bit"
        """Whether what is kept in 16 bits is made fp32 to update, layer by layer in every mode."""
        self.steps = 0
        """Made or skipped so far, by the first optimizer."""
        self.model = model
        self.mode = mode
        self.worker = Worker(num_threads)
        self._modes = Modes.current()
        self._gradients = gradients
        self._timeline = timeline
        self._copies = copies
        self.masters = Masters(model, layers)
        self._places: WeakKeyDictionary[torch.optim.Optimizer, Places] = WeakKeyDictionary()
        self.arrivals = Arrivals(goes_on)
        self._widened: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Those whose state is fp32 for a step of all layers at once."""
        self._begun: list[Task] = []
        """Those of the last step, and what was not over by then."""
        self._hooks: WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
        self._split: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._retired: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Those in whose place others update the masters, until they step again."""
        self.eager = EagerStep(self.masters, self.worker, copies)
        gradients.backwards.call(at_failure=self.eager.fail_half_updated)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that update the masters."""
        return [optimizer for optimizer in self._hooks if optimizer not in self._retired]

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` update the masters, in its `step()` or around it, in place of those whose masters it has.

        Raises:
            ValueError: if it is to be eager and cannot update a layer by itself.
        """
        if optimizer in self._hooks:
            self._retire_others(optimizer)
            return
        self._split[optimizer] = (self.mode != "serial" or self.in_parts) and can_split(
            optimizer, eager=self.mode == "eager", in_parts=self.in_parts
        )
        self._hooks[optimizer] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
        ]
        if self._rounds:
            self._hooks[optimizer] += keep_loaded_dtypes(optimizer)
        self.masters.know(optimizer)
        self._retire_others(optimizer)

    def _retire_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Retire the optimizers whose trainable masters `optimizer` has, too, and those with no master of the model.

        A program that makes a new optimizer may keep the old one alive; a step must not wait for that one.
        """
        own, of_model = set(parameters_of(optimizer)), set(self.model.parameters())
        for other in self.optimizers:
            theirs = set(parameters_of(other)) & of_model
            shared = theirs & own
            if other is not optimizer and (shared or not theirs) and not any(p.requires_grad for p in theirs - shared):
                self._retired.add(other)
        self._retired.discard(optimizer)

    def check(self) -> None:
        """Raise what went wrong in the background, or EngineFailedError if that has been raised before."""
        self.worker.check()

    def is_under_way(self, masters: Iterable[torch.Tensor]) -> bool:
        """Whether anybody who used one of `masters` now would have to wait."""
        found = (pending_of(master) for master in masters)
        return any(isinstance(pending, Update) and not pending.task.done for pending in found)

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
        self.masters.check(self.optimizers)
        # Eager updates are given to the worker by a thread of torch's, which has other modes.
        self._modes = Modes.current()

    # ---- in optimizer.step()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._gradients.backwards.errors.raise_first()
        self.check()
        if optimizer in self._retired:
            if self.mode == "eager":
                raise RuntimeError(
                    "eps_update='eager' updates during backward with the optimizer that eps.wrap got last (got a step "
                    f"of another {type(optimizer).__name__} of the same parameters); call eps.wrap(optimizer) before "
                    "backward"
                )
            self._retire_others(optimizer)
        self.masters.check(self.optimizers)
        parameters = parameters_of(optimizer)
        if not self._may_step():
            for p in parameters:
                p.grad = None  # and the optimizer finds nothing to do
        self.eager.end(optimizer, parameters, later_hooks=self._later_hooks(optimizer))
        self.arrivals.forget(parameters)
        self._gradients.forget(parameters)
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        # The first argument is the optimizer itself; accelerate passes None for a closure.
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        if has_closure and self.in_parts:
            raise ValueError(CLOSURE)
        # A hook that comes later than ours finds every gradient in its place, this time; from now on it comes before.
        if not self._split[optimizer] or has_closure or self._later_hooks(optimizer):
            for tensor in (*gradients.values(), *parameters):
                settle(tensor)  # an ordinary one again: some optimizers look at the type
            self._timeline.start_update()
            if self.in_parts:
                widen_all(optimizer)
                self._widened.add(optimizer)
            return
        taken = {p: gradient for p, gradient in gradients.items() if can_hold(p)}
        for p in taken:
            settle(p)  # of two updates of a master, the second begins when the first is over
        with self.worker.failing_with_errors():  # half a step must not be taken for one
            for p in taken:
                p.grad = None  # nobody but the update has it now, and the optimizer finds nothing to do
            self._begin(optimizer, taken)
        if self.mode == "serial":
            self.synchronize()

    def _later_hooks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether other hooks of the step run after ours, which takes the gradients.

        One that is marked `only_looks`, as that of the virtual clock, does not count: it is to see what is left.
        """
        hooks = list(optimizer._optimizer_step_pre_hooks)
        later = hooks[hooks.index(self._hooks[optimizer][0].id) + 1 :]
        return any(not getattr(optimizer._optimizer_step_pre_hooks[hook], "only_looks", False) for hook in later)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with untouched():
            for p in parameters_of(optimizer):
                p.grad = None
        self.steps += optimizer is self.optimizers[0]
        self._stepped(optimizer)
        if self._rounds:
            if optimizer in self._widened:
                narrow_all(optimizer)
            Rounding.end_step(optimizer)
        self._widened.discard(optimizer)
        self.masters.end_step()
        self._places.pop(optimizer, None)
        if self._later_hooks(optimizer):
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(self._hooks[optimizer][0].id)
        self._timeline.end_step()

    # ---- in the background

    def _begin(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: dict[torch.Tensor, torch.Tensor],
        *,
        landed: stream.Point | None = None,
        norms: Mapping[torch.Tensor, torch.Tensor] | None = None,
        in_step: bool = False,
    ) -> None:
        """Let the worker update the masters that `gradients` belong to, layer by layer, once they have `landed`, with
        the `norms` that nobody has looked at yet."""
        with self.worker.failing_with_errors():
            self._begun = [task for task in self._begun if not task.done]
            with untouched():
                rounding = Rounding.of(optimizer) if self._rounds else None
                step = SplitStep(optimizer, gradients, self._places_of(optimizer), rounding)
            for what, masters in self.masters.parts(gradients):
                factors = {m: f for m in masters if (f := taken_factor(gradients[m])) is not None}
                unseen = [norms[m] for m in masters if m in norms] if norms is not None else []
                check = partial(check_finite, unseen, self.steps + 1, f"the update of {what}")
                update = Update(Task(f"the update of {what}"), self._timeline, in_step=in_step)
                with untouched(), torch.no_grad():
                    part = step.part(masters)
                for master in masters:
                    hold(master, update)
                if in_step:
                    self.eager.begin(optimizer, masters, update)
                run = partial(carry_out, part, masters, factors, check, landed, update, self._copies)
                self.worker.submit(update.task, run, self._modes if in_step else Modes.current())
                self._begun.append(update.task)

    def _places_of(self, optimizer: torch.optim.Optimizer) -> Places:
        """Found once per step: an eager one takes a part of it for every layer."""
        if optimizer not in self._places:
            self._places[optimizer] = places_of(optimizer)
        return self._places[optimizer]

    # ---- eager

    def expect(self, masters: Iterable[torch.Tensor]) -> None:
        """A call that `masters` may get gradients from is in the graph."""
        if self.mode == "eager":
            self.arrivals.expect(masters)

    def arrived(self, masters: Sequence[torch.Tensor]) -> None:
        """The gradients of one call have been received; update the masters for which there will be no more."""
        if self.mode != "eager":
            return
        complete = [m for m in self.arrivals.count(masters) if can_hold(m)]
        if complete and not self.optimizers:
            raise RuntimeError(
                "eps_update='eager' updates during backward and needs the optimizer before (none was given); call "
                "eps.wrap(optimizer) first"
            )
        for master in complete:
            settle(master)  # of two updates of a master, the second begins when the first is over
        for optimizer in self.optimizers:
            places = self._places_of(optimizer)
            gradients, norms, landed = self._gradients.take(p for p in complete if p in places)
            if gradients:
                self._begin(optimizer, gradients, landed=landed, norms=norms, in_step=True)

    def release(self) -> None:
        """Finish what was begun, and let the optimizers step as they did before."""
        if self.worker.has_failed:
            found = (pending_of(p) for p in self.model.parameters())
            unfinished = sum(isinstance(pending, Update) and not pending.made for pending in found)
            warnings.warn(
                f"an update failed: {unfinished} parameters are not what the last step would have made them; load "
                "the last checkpoint",
                stacklevel=4,
            )
        else:
            self.synchronize()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        for p in self.model.parameters():
            let_go(p)
            if p.grad is not None:
                settle(p.grad)
            widen_gradient(p)
        self._hooks.clear()
        self.worker.close()
