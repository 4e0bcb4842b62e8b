"""The eager param-server (EPS): the host side of layer-to-layer training.

The model stays in host memory, and its own parameters are the masters. The EPS receives the gradient sums of the
layers and keeps them in `p.grad` until the optimizer uses them (`gradients`). The masters are updated in
`optimizer.step()`, or layer by layer in the background (`updates`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hf_l2l.compat import without_interception
from hf_l2l.config import L2LConfig
from hf_l2l.eps.gradients import Gradients, Sums
from hf_l2l.eps.host_memory import HostMemory, Progress, unseen
from hf_l2l.eps.masters import Master, Masters, MasterUnit
from hf_l2l.eps.nonfinite import Vote
from hf_l2l.eps.pending import Saving, clip, total_norm
from hf_l2l.eps.updates import Updates
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.memory.device_memory import RESIDENT, SHELL
from hf_l2l.memory.ledger import BEING_SAVED, COPIES, GRADIENTS, MASTERS, MOMENTS, NORMS
from hf_l2l.memory.memory_estimate import MOMENTS_ASSUMED
from hf_l2l.memory.memory_report import PAGE_LOCKED, HostTable, MemoryReport, ShownAsTable
from hf_l2l.model.precision import Precision
from hf_l2l.model.residency import LayerPlace, state_follows
from hf_l2l.optim.layer_optimizers import parameters_of, unwrapped
from hf_l2l.optim.loss_scale import LossScale
from hf_l2l.optim.optimizer_check import check_optimizer
from hf_l2l.optim.rounded_state import kept_bytes
from hf_l2l.ranks.team import Team, refuse_other_group
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.report.timeline import Timeline
from hf_l2l.runtime import stream
from hf_l2l.runtime.backward_callbacks import Backwards, RaisedIn
from hf_l2l.runtime.tensors import tensor_bytes

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
BatchT = TypeVar("BatchT")
LossT = TypeVar("LossT")


class EagerParamServer(ShownAsTable):
    """Owner of the master weights and gradient sums of one model, all of them host tensors but resident ones.

    The contract of `p.grad`: until `optimizer.step()` it holds the gradient sum, and None starts a new sum, so that
    gradients of a discarded batch (`zero_grad` without `step`) have no effect. When `backward()` returns, all its
    gradients are in `p.grad`; functions of torch wait for those that are still on their way (an extension that reads
    their memory itself needs `synchronize` first). A wrapped optimizer clears the gradients it has used. Reading a
    parameter waits until its update is done. (With `eps_update="eager"` masters are updated in backward, and `p.grad`
    stays None.)
    """

    team: Team | None = None  # the ranks that train the model together; None for one process

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        config: L2LConfig | None = None,
        *,
        layers: Sequence[nn.Module] = (),
        precision: Precision | None = None,
        places: Mapping[nn.Module, LayerPlace] | None = None,
        timeline: Timeline | None = None,
        loss_scale: LossScale | None = None,
        progress: Progress = unseen,
        is_accumulating: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_accumulating` returns True in a backward if another one follows before the step; `places` says what of
        each layer stays on the device.

        With a `loss_scale`, a step whose gradients are not all finite is skipped; without one it is an error.
        """
        config = config or L2LConfig()
        self.loss_scale = loss_scale
        self.model = model
        self.device = device
        self.masters = Masters(model, layers, precision, places)
        self.memory = self._make_memory(progress)
        self.timeline = timeline or Timeline(device, model)
        self.backwards = Backwards()
        self.backwards.call(at_end=self.timeline.end_backward, at_failure=self.timeline.end_backward)
        self.copies = Copies(self.masters, self.memory)
        others = [memory.device for memory in self.timeline.ledger.on_device.each[1:]]
        self.gradients = self._make_gradients(others)
        self.updates = self._make_updates(config, is_accumulating)
        self.vote = Vote(self.masters, loss_scale)
        self.saving: Saving | None = None  # a checkpoint, in the background
        self._run_together: weakref.WeakMethod[Callable[[Sequence[Callable[[], Any]]], list[Any]]] | None = None
        self.ledger = self.timeline.ledger
        self._register()
        if loss_scale is not None:
            loss_scale.may_step = self.may_step

    def _make_memory(self, progress: Progress) -> HostMemory:
        return HostMemory(self.device, self.masters, progress)

    def _make_gradients(self, others: Sequence[torch.device]) -> Gradients:
        return Gradients(self.device, self.masters, self.memory, self.backwards, others)

    def _make_updates(self, config: L2LConfig, is_accumulating: Callable[[], bool]) -> Updates:
        return Updates(
            self.masters, self.gradients, self.timeline, self.copies, config, is_accumulating=is_accumulating
        )

    def _register(self) -> None:
        """Tell the ledger what to count."""
        self.ledger.on_device.finds(SHELL, self._resident_shell)
        self.ledger.on_device.finds(RESIDENT, self._resident_layers)
        self.ledger.counts(MASTERS, self._master_bytes)
        self.ledger.counts(GRADIENTS, self._gradient_bytes)
        self.ledger.counts(MOMENTS, self._moment_bytes)
        self.ledger.counts(COPIES, self.copies.host_bytes)
        self.ledger.counts(NORMS, self.gradients.norm_memory.host_bytes)
        self.ledger.counts(BEING_SAVED, self._saved_bytes)
        self.ledger.counts(PAGE_LOCKED, self.memory.count_locked)

    def _saved_bytes(self) -> int:
        return 0 if self.saving is None else self.saving.copied_bytes

    def _master_bytes(self) -> int:
        return tensor_bytes(master.parameter for master in self.masters.on_host())

    def _gradient_bytes(self) -> int:
        """Bytes of gradients, and of the page-locked memory that waits for them."""
        found = 0
        with without_interception():
            for master in self.masters.on_host():
                room, grad = master.gradient_room, master.parameter.grad
                found += 0 if room is None else tensor_bytes([master.gradient_like])
                if grad is not None and grad.device == stream.HOST and (room is None or room.is_free):
                    found += tensor_bytes([grad])  # autograd or the program has made it
        return found

    def _states(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters, and tensors in the optimizers' state of them."""
        for optimizer in self.updates.optimizers:
            # Copied, since an update in the background may add entries.
            for p, state in list(optimizer.state.items()):
                yield from ((p, each) for each in list(state.values()) if isinstance(each, torch.Tensor))

    def _moment_bytes(self) -> int:
        return tensor_bytes(each for _, each in self._states() if each.device == stream.HOST)

    def _resident_shell(self) -> list[torch.Tensor]:
        return self._resident(in_layers=False)

    def _resident_layers(self) -> list[torch.Tensor]:
        return self._resident(in_layers=True)

    def _resident(self, *, in_layers: bool) -> list[torch.Tensor]:
        """Resident masters, their gradients and their state: those in layers, or those in none."""
        if not self.masters.has_resident:
            return []
        with without_interception():
            found = [m for m in self.masters.all() if m.is_resident and (m.layer_number > 0) == in_layers]
            masters = {master.parameter for master in found}
            sums = [each for m in found for each in (m.parameter.grad, m.arriving) if each is not None]
        return [*masters, *sums, *(each for p, each in self._states() if p in masters)]

    @property
    def lane(self) -> stream.Lane:
        """The lane that downloads gradients."""
        return self.gradients.lane

    def start_forward(self) -> None:
        """Prepare a forward that a backward may follow.

        Raises:
            ValueError: if a parameter has changed since its optimizer was made.
            Exception: an error of a hook of autograd since the last call, which could not be raised there.
            EngineFailedError: if an update has failed.
        """
        self.backwards.errors.raise_first()
        self.updates.check()
        self.masters.start_call()
        if torch.is_grad_enabled():
            self.refuse_group()
            self.updates.start_forward()
        self.timeline.start_forward()
        if self.lane.is_stream:
            self.end_copies()  # of memory that is freed here
            self.memory.adopt()
            if torch.is_grad_enabled():
                self.memory.take_gradients()

    def end_copies(self) -> None:
        """Wait for copies that a forward or a backward has not waited for."""
        self.copies.wait_for_reads()
        self.gradients.end_landing()

    def refuse_group(self) -> None:
        """Raise ValueError if there is a process group of several, which was made after the model was attached."""
        refuse_other_group(1)

    def output_factor(self) -> Callable[[], float] | None:
        """What the gradients of the model's outputs are multiplied by; None for 1."""
        scale = self.loss_scale
        return (lambda: scale.value) if scale is not None and scale.is_dynamic else None

    def _refuse_without_optimizer(self) -> None:
        if self.updates.optimizers:
            return
        if self.loss_scale is not None or self.updates.in_parts or self.masters.has_resident:
            raise RuntimeError(
                "cmp with fp16, nonfinite='skip', grad_dtype='16bit', moment_dtype='bf16' or '8bit', and resident "
                "weights need a wrapped optimizer, so that the EPS can skip its steps, convert its gradients and "
                "state, and move its state (none was given); call eps.wrap(optimizer) before backward"
            )

    def expect(self, unit: MasterUnit, calls: int = 1) -> None:
        """Announce that so many calls of `unit` are in the graph, from which its masters may get gradients by
        `receive`; -1 takes one back, whose gradients arrive with those of another one."""
        self.updates.expect(unit, calls)

    def receive_in_hook(self, master: Master, gradient: torch.Tensor) -> None:
        """`receive` one gradient in a hook of autograd; an exception is kept and raised later."""
        half_updated = self.updates.eager.failing() if self.updates.mode == "eager" else nullcontext()
        with self.backwards.errors, half_updated, RaisedIn("the download of", master.name):
            self.receive([(master, gradient)])

    @torch.no_grad()
    def receive(self, sums: Sums, unit: MasterUnit | None = None, flat: torch.Tensor | None = None) -> None:
        """Add gradient sums from the device to what `p.grad` holds, by the end of this backward.

        Only to be called inside a backward. The download is overlapped with computation.

        Args:
            sums: pairs of master and gradient sum, which has the shape of the parameter and may be overwritten. Its
                memory may be freed at once; to write to it, wait for `lane`.
            unit: the layer, if `sums` are all gradients of one call of it; None for others.
            flat: device memory (uint8, one dimension) that holds the sums, one of each trained parameter of the unit,
                in its gradient layout; None if they lie apart.

        Raises:
            RuntimeError: if a master has already been updated in this step, since these gradients were not announced;
                or if an optimizer that is not wrapped could not use the gradients.
        """
        self.backwards.errors.raise_first()
        self.updates.check()
        self._refuse_without_optimizer()
        self.vote.reset()
        if sums and self.loss_scale is not None and self.loss_scale.is_dynamic:
            # One kernel for all; exact for a power of two, as all but chosen scales are.
            torch._foreach_mul_([gradient for _, gradient in sums], 1 / self.loss_scale.value)
        self.updates.eager.refuse_second(master for master, _ in sums)
        self.gradients.receive(sums, unit, flat)
        self.updates.arrived([master for master, _ in sums] if unit is None else unit.trained_masters)

    def synchronize(self) -> None:
        """Wait until all updates have finished, and a checkpoint that is saved in the background has all values; renew
        all 16-bit copies of masters at their next use.

        Reading a parameter, saving, evaluating and the optimizer's `state_dict` wait by themselves. Call this before
        reading `optimizer.state`, or a view or NumPy array of a weight that was made before the step, and before
        writing through such a view. With `cmp`, also call it after writing, so that the 16-bit copies are renewed.

        Raises:
            Exception: the exception of an update that failed.
            EngineFailedError: if that exception has been raised before.
        """
        self.end_copies()
        self.updates.synchronize()
        if self.saving is not None:
            self.saving.wait_for_values()
        self.copies.forget()

    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, backwards add to the gradients, and another one follows before `optimizer.step()`.

        Needed around all but the last backward of a step with `eps_update="eager"`, in a loop without Accelerate.
        """
        return self.updates.eager.accumulate()

    def together(self, compute_loss: Callable[[BatchT], LossT], batches: Iterable[BatchT]) -> list[LossT]:
        """Losses of batches that are accumulated in one step. Each has a call of the model of its own, and all of them
        share each layer's upload: a layer that is on the device serves all batches before the next one is uploaded,
        forwards and in one backward of the sum of the losses.

            losses = eps.together(lambda batch: model(**batch).loss, batches)
            (sum(losses) / len(losses)).backward()

        Gradients have the bits of one backward after the other, if no batch uses a weight more than once, and
        dropout does not draw (random numbers are drawn in another order). What the batches keep outside of layers is
        on the device for all of them. Without gradients, with weights that stay on the device, with several devices,
        and without the package greenlet, the batches run one after the other.

        Args:
            compute_loss: called with each batch, the last one first; it may call the model in any way. While it runs,
                others have begun, and have not ended.
            batches: as many as fit the device at once.

        Returns:
            what `compute_loss` has returned, in the order of the batches.

        Raises:
            RuntimeError: inside a call of the model, or if the model is not attached.
            Exception: what `compute_loss` raises for one of the batches; the others end then, where they are.
        """
        run = None if self._run_together is None else self._run_together()
        if run is None:
            raise RuntimeError(
                "batches run together through an attached model (got the EPS of one that is not); call "
                "hf_l2l.attach_l2l(model), or give the model to an L2LTrainer"
            )
        return run([partial(compute_loss, batch) for batch in batches])

    def runs_together(self, run: Callable[[Sequence[Callable[[], Any]]], list[Any]]) -> None:
        """This bound method runs functions that call the model, as long as its object lives."""
        self._run_together = weakref.WeakMethod(run)

    # ---- optimizer.step()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Vote, then begin the updates; a hook that runs before `optimizer.step()`."""
        self.ledger.enter_step()
        self.backwards.errors.raise_first()
        self.updates.check()
        if self.saving is not None:
            self.saving.begin()
        # The first argument is the optimizer itself; accelerate passes None for a closure.
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        self.updates.refuse_step(optimizer, has_closure=has_closure)
        self.copies.wait_for_reads()
        if not self.may_step():
            for p in parameters_of(optimizer):
                p.grad = None  # so that the optimizer changes nothing
        self.updates.begin_step(optimizer, has_closure=has_closure, step=sys._getframe(1))

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the step; a hook that runs after `optimizer.step()`."""
        self.updates.end_step(optimizer)
        self.vote.after_step(optimizer, self.updates.optimizers)
        self.timeline.end_step()

    def may_step(self) -> bool:
        """Whether the gradients of this step may be used: if all of them are finite.

        A single non-finite gradient vetoes the step for all layers and optimizers, and changes the loss scale once.

        Raises:
            NonFiniteError: if a gradient is not finite, and there is no loss scale to skip the step.
        """
        # Eager updates have checked the gradients of each layer before using them.
        return self.updates.mode == "eager" or self._vote(self.grad_norm)

    def _vote(self, norm: Callable[[], torch.Tensor]) -> bool:
        return self.vote.result(norm, self.updates.steps + 1, self.updates.optimizers)

    @property
    def scaler(self) -> LossScale | None:
        """A `scaler` for an `Accelerator`, so that schedulers skip steps, too; None without a loss scale."""
        return self.loss_scale

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of this step as one vector: a 0-dim host tensor.

        On the CPU it has the bits of torch's result; on an accelerator, the norms of single gradients were computed
        there.
        """
        return total_norm(self.masters.all())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip like `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, with less stall time.

        The norms were computed on the device, and each gradient is scaled at its next use, mostly by the update.

        Returns:
            The norm before clipping, a 0-dim host tensor.

        Raises:
            ValueError: with `eps_update="eager"`, which has used the gradients by then.
        """
        if self.updates.mode == "eager":
            raise ValueError(
                f"eps_update='eager' updates before the norm of all gradients is known (got max_norm={max_norm}); do "
                "not clip, or use eps_update='deferred'"
            )
        norm = self.grad_norm()
        if self._vote(lambda: norm):
            self._clip(norm, float(max_norm))
        return norm

    def _clip(self, norm: torch.Tensor, max_norm: float) -> None:
        # Gradients kept in 16 bits are scaled when the update converts them to fp32.
        later = (self.updates.mode == "deferred" and self.masters.has_streamed) or self.updates.in_parts
        clip(self.masters.parameters, norm, max_norm, later=later)

    def wrap(self, optimizer: OptimizerT) -> OptimizerT:
        """Check that `optimizer` can update the masters, and make its `step()` update them as `eps_update` says.

        The same optimizer is returned: its groups, state, state dict and schedulers are unchanged. Wrapping it again
        has no effect. After its `step()`, and not only after `zero_grad()`, `p.grad` is None. An optimizer that has
        all trainable masters of an earlier optimizer replaces that, until the earlier one steps or is wrapped again.

        Raises:
            ValueError: if the optimizer needs a closure, or holds parameters that are not the model's, or a parameter
                has a gradient hook; with `eps_update="eager"`, if it cannot update one layer without the others.
        """
        inner = unwrapped(optimizer)
        check_optimizer(self.model, inner, wide=self.masters.precision.is_mixed)
        entry = self.updates.add(inner)
        if entry is not None:
            resident = {master.parameter for master in self.masters.all() if master.is_resident}
            state_follows(inner, resident, widens=self.updates.rounds)
            entry.step_hook = inner.register_step_pre_hook(self.before_step)
            entry.handles += [entry.step_hook, inner.register_step_post_hook(self.after_step)]
        return optimizer

    def memory_report(self) -> MemoryReport:
        """Every byte on the device and the host by name, now and at the peak: a dict that prints as a table.

        The names are explained in docs/memory.md. After `detach_l2l`, it is the report of that moment.
        """
        where = ", ".join(str(memory.device) for memory in self.ledger.on_device.each)
        return self.ledger.report(f"Memory of a {type(self.model).__name__}, layers run on {where}")

    def bytes_of_first_step(self) -> int:
        """Bytes of host memory that the first step will take: gradients without memory so far, and two moments per
        trained parameter; 0 once an optimizer has state."""
        if any(optimizer.state for optimizer in self.updates.optimizers):
            return 0
        trained = [m for m in self.masters.on_host() if m.parameter.requires_grad]
        moments = MOMENTS_ASSUMED * tensor_bytes(m.parameter for m in trained)
        gradients = tensor_bytes(m.gradient_like for m in trained if m.gradient_room is None)
        return gradients + kept_bytes(moments, self.updates.moments)

    def host_table(self) -> HostTable:
        """A small table, which a shell and a notebook show: the tensors in host memory now."""
        found = host_tensors(self.model, self.updates.optimizers, self.copies.kept)
        name = f"{type(self).__name__} of a {type(self.model).__name__}, layers run on {self.device}"
        return HostTable(name, found, self.memory.bytes_locked)

    def release(self) -> list[torch.optim.Optimizer]:
        """Finish all updates, unwrap the optimizers and return them, and move the masters to ordinary memory."""
        if not self.updates.worker.has_failed:
            self.synchronize()
        self.end_copies()  # of memory that is freed here
        self.ledger.release(self.memory_report())
        optimizers = self.updates.release()
        self.timeline.close()
        # After this no reference to a master is left, not even a weak one: torch refuses to swap such parameters.
        self.memory.release()
        self.masters.release()
        return optimizers
