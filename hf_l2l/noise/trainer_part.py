"""The part of `L2LTrainerMixin` that measures the noise scale of the gradient (`l2l_noise_scale`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_l2l.accumulation.conditions import own_method
from hf_l2l.accumulation.step import Step
from hf_l2l.budget.within import budget_bytes
from hf_l2l.compat import mixes_rows
from hf_l2l.device.ubatch_norms import UbatchNorms
from hf_l2l.devices import execution_devices
from hf_l2l.eps.masters import MasterUnit
from hf_l2l.eps.pending import total_norm
from hf_l2l.log import logger
from hf_l2l.noise.across_rows import is_sum_over_rows
from hf_l2l.noise.estimate import Measured, NoiseScale, together
from hf_l2l.noise.growth import LOOKS_EVERY, L2LBatchGrowth
from hf_l2l.noise.items import items_of_rows, measured, rows_of
from hf_l2l.noise.options import ENOUGH_TOKENS, every_of
from hf_l2l.ranks.team import of_rank_0

if TYPE_CHECKING:
    from transformers import Trainer as _NextTrainer
else:
    _NextTrainer = object  # the trainer that the mixin is combined with comes after it


_MOST_PENDING = 64
"""Steps whose norms wait on the device until they are read: what a rank tells of so many fits into one message."""


class L2LNoiseScale(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers ships no types
    """Keeps the moving averages in the state of the Trainer, so that checkpoints have them."""

    def __init__(self) -> None:
        self.found = NoiseScale()
        self.every: int | None = None
        """Steps from one measurement to the next, if nobody says so; None before the first batch, which decides it."""

    @property
    def averages(self) -> dict[str, float]:
        """What a checkpoint has of them."""
        return self.found.state()

    @averages.setter
    def averages(self, state: Mapping[str, float]) -> None:
        self.found = NoiseScale.of_state(state)

    def state(self) -> dict[str, Any]:
        """See `ExportableState`."""
        return {"args": {}, "attributes": {"averages": self.averages, "every": self.every}}


class _MeasuredStep:
    """What the backwards of an optimizer step have measured so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches: list[tuple[UbatchNorms, Measured, float]] = []
        """Of each backward: its norms, the weights of its micro-batches, and what its loss was multiplied by."""
        self.norm: float | None = None
        """Of the sum of the gradients of the step; None before its last backward."""

    def of_this_rank(self, *, weight_1: bool) -> Measured:
        """The step of this rank; its norms are read now, for which the host waits."""
        found = together(
            replace(weights, squares=norms.sum_of_squares() / scale**2) for norms, weights, scale in self.batches
        )
        return found.of_weight_1() if weight_1 else found


class NoiseScaleMixin(_NextTrainer):  # type: ignore[misc]  # transformers ships no types
    """Measures backwards, reads what they have measured when it is logged or saved, and resumes it."""

    _l2l_config: Callable[[], Any]
    _streams: Callable[[], bool]
    _asked_config: Callable[[], Any]
    _l2l_position: Any
    _l2l_measured: list[_MeasuredStep]
    """Steps whose norms have not been read yet."""
    _l2l_measures = False
    """Whether the training that runs measures."""
    _l2l_is_sum: bool | None = None
    """Whether the loss is a sum over rows, or a mean; None before a batch has told it."""
    _l2l_is_told = False
    """Whether it has been told that nothing is measured."""

    def _init_training_state(
        self, max_steps: int, steps_of_epoch: int, epochs: int, checkpoint: str | None, trial: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Overridden because checkpoints keep the moving averages, and a training begins without any.

        Raises:
            ValueError: if the noise scale cannot be measured.
        """
        self._l2l_measured, self._l2l_is_sum, self._l2l_is_told = [], None, False
        self._l2l_measures = bool(getattr(self.args, "l2l_noise_scale", False)) and self._can_measure()
        self.remove_callback(L2LNoiseScale)
        if self._l2l_measures:
            self.add_callback(L2LNoiseScale())
        found: tuple[int, int] = super()._init_training_state(
            max_steps, steps_of_epoch, epochs, checkpoint, trial, **kwargs
        )
        growth, position = self._l2l_growth, self._l2l_position
        if growth is None:
            return found
        # What another callback saves after a step has what this one knows of the step.
        callbacks = self.callback_handler.callbacks
        callbacks.sort(key=lambda each: each is not growth)
        if checkpoint is None:
            return found
        if not growth.first:
            growth.epochs, growth.batches = (position.epoch, position.batches) if position is not None else found
            if position is not None and position.is_over:
                growth.epochs, growth.batches = position.epoch + 1, 0
            return found
        if not growth.steps_left(max_steps):
            logger.warning(f"the training is finished, and no further step is made: {checkpoint} is its end")
            return epochs, 0
        if self.args.ignore_data_skip:
            growth.batches = 0
        # transformers takes all steps before for steps with the batch of now.
        return found if position is not None else (growth.epochs, growth.batches)

    @property
    def _l2l_growth(self) -> L2LBatchGrowth | None:
        growths = [each for each in self.callback_handler.callbacks if isinstance(each, L2LBatchGrowth)]
        if len(growths) > 1:
            raise ValueError(f"one L2LBatchGrowth doubles the batches of a training (got {len(growths)}); pass one")
        return growths[0] if growths else None

    @property
    def _l2l_most_accumulated(self) -> int:
        """The most batches that a step may have, for which memory is planned."""
        growth, args = self._l2l_growth, self.args
        given: int = args.gradient_accumulation_steps
        return given if growth is None else growth.most_accumulated(args, self._train_batch_size)

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Overridden because a callback changes an argument, which is to be what it was, whatever happens: also where
        `auto_find_batch_size` begins again."""
        growth, given = self._l2l_growth, self.args.gradient_accumulation_steps
        if growth is not None:
            growth.reset()
        try:
            found = super()._inner_training_loop(batch_size, *args, **kwargs)
            self._read_noise()
            return found
        finally:
            if growth is not None:
                self.args.gradient_accumulation_steps = given

    def _load_callback_state(self) -> None:
        """Overridden because what these callbacks know is a part of the training, whatever
        `restore_callback_states_from_checkpoint` says of others."""
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, L2LNoiseScale | L2LBatchGrowth):
                # transformers fails to save the state of a callback that the checkpoint does not have.
                kept = self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
                for name, value in kept["attributes"].items():
                    setattr(callback, name, value)
                if isinstance(callback, L2LBatchGrowth):
                    callback.resume(self.args)

    def _can_measure(self) -> bool:
        """Whether there are layers whose gradients can be measured.

        Raises:
            ValueError: if it is certain that these do not tell the noise scale.
        """
        args = self.args
        if not self._streams():
            logger.warning("l2l_noise_scale=True is for layers that are streamed: none is")
            return False
        method = own_method(self, ("training_step",))
        if method is not None:
            raise ValueError(
                "l2l_noise_scale=True measures the backward of each batch as transformers runs it (got a trainer of "
                f"which {method}); leave it out"
            )
        norm = next((name for name, module in self.model.named_modules() if mixes_rows(module)), None)
        if norm is not None:
            raise ValueError(
                f"l2l_noise_scale=True needs rows that do not depend on each other (got {norm}, which normalizes over "
                "the rows of a batch); leave it out"
            )
        config, rows = self._asked_config(), self._train_batch_size
        ubatch = config.ubatch_size or rows
        device, *others = execution_devices(config.device)
        is_known = not others and budget_bytes(config, device) is None  # else the batch may be cut anyway
        if is_known and -(-rows // ubatch) * args.gradient_accumulation_steps * args.world_size < 2:
            raise ValueError(
                "l2l_noise_scale=True needs at least two micro-batches in a step (got one of "
                f"{rows} row{'s' if rows > 1 else ''}); give ubatch_size, or gradient_accumulation_steps"
            )
        return True

    @property
    def _l2l_noise(self) -> L2LNoiseScale:
        # transformers may have put another one in the place of the one that was added.
        callbacks = self.callback_handler.callbacks
        return next(each for each in callbacks if isinstance(each, L2LNoiseScale))

    def _measuring(self, attached: Any, step: Step) -> Step:
        """A step whose `train` measures, if this one is to be measured."""
        if not self._l2l_measures:
            return step
        self._look_at_noise()  # a checkpoint may have been saved in a callback, before the look after that step

        def train(batch: Any, items: Any) -> torch.Tensor:
            noise, every = self._l2l_noise, every_of(getattr(self.args, "l2l_noise_scale_every", "auto"))
            if every is None and noise.every is None:  # batches of other ranks have other lengths
                noise.every = int(of_rank_0(str(self._every_of(batch, rows_of(batch)))))
            if self.state.global_step % (every or noise.every or 1):
                return step.train(batch, items)
            return self._train_measured(attached, step, batch, items)

        return replace(step, train=train)

    def _every_of(self, batch: Mapping[str, Any], rows: int) -> int:
        tokens = batch.get(getattr(self.model, "main_input_name", "input_ids"))
        if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point():
            return 1  # of pixels or sounds, nobody knows how many tokens they become
        ubatch = min(self._l2l_config().ubatch_size or rows, rows)
        return max(1, -(-ENOUGH_TOKENS * rows // (tokens.numel() * ubatch)))

    def _train_measured(self, attached: Any, step: Step, batch: Any, items: Any) -> torch.Tensor:
        of_rows = items_of_rows(batch, shifts=bool(getattr(self, "_loss_shifts_labels", False)))
        eps = attached.eps
        if self._l2l_is_sum is None:  # in all ranks or none
            _refuse_if(_shared(eps.masters.layer_units))
            answers = self._of_ranks(is_sum_over_rows(step, batch, items, of_rows), "ranks look at the loss")
            self._l2l_is_sum = next((each for each in answers if each is not None), None)
        norms = UbatchNorms()
        slots, shell = [at.gradient_slots for at in attached.relay.devices], attached.relay.shell
        runs_plainly, shell.runs_plainly = shell.runs_plainly, False  # as without L2L, where nobody sees micro-batches
        scale = eps.loss_scale.value if eps.loss_scale is not None and eps.loss_scale.is_dynamic else 1.0
        try:
            for each in slots:
                each.norms = norms
            loss = step.train(batch, items)
        finally:
            shell.runs_plainly = runs_plainly
            for each in slots:
                each.norms = None
        _refuse_if(norms.problem)
        last = norms.ubatches[-1] if norms.ubatches else None
        if last is not None and last[1] != len(of_rows):
            _refuse_if(f"{last[1]} rows in a layer for a batch of {len(of_rows)}")
        now = self.state.global_step
        if not self._l2l_measured or self._l2l_measured[-1].number != now:
            self._l2l_measured.append(_MeasuredStep(now))
        of_step = self._l2l_measured[-1]
        of_step.batches.append((norms, measured(of_rows, norms.ubatches, is_sum=self._l2l_is_sum is not False), scale))
        if self.accelerator.sync_gradients:  # before clipping changes it
            of_step.norm = float(total_norm(m for unit in eps.masters.layer_units for m in unit.trained_masters))
        return loss

    def _read_noise(self) -> None:
        """Take what the steps so far have measured into the averages; all ranks call this at the same step. A step
        that is not over, or that a callback has given up, may get further backwards."""
        now = self.state.global_step
        steps = [each for each in self._l2l_measured if each.number < now and each.norm is not None]
        self._l2l_measured = [each for each in self._l2l_measured if each.number >= now]
        if not steps:
            return
        averaged = bool(getattr(self.args, "average_tokens_across_devices", False))
        own = [each.of_this_rank(weight_1=self.args.world_size > 1 and not averaged) for each in steps]
        of_ranks = self._of_ranks([each.values() for each in own], "ranks add up what they have measured")
        noise = self._l2l_noise.found
        for step, *parts in zip(steps, *of_ranks, strict=True):
            assert step.norm is not None, "left out above"
            noise.observe(together(Measured(*values) for values in parts), step.norm)
        if not noise.steps and not self._l2l_is_told:
            self._l2l_is_told = True
            logger.warning(
                "l2l_noise_scale=True measures nothing so far: no step has had several micro-batches whose gradients "
                "are finite"
            )

    def _of_ranks(self, found: Any, why: str) -> list[Any]:
        """What each rank has found, as JSON passes it; all of them call this. `why` says what they wait for."""
        team = None if self.eps is None else self.eps.team
        return [found] if team is None else [json.loads(text) for text in team.tell(json.dumps(found), why)]

    def _look_at_noise(self) -> None:
        """Tell the `L2LBatchGrowth` what has been measured, once in `LOOKS_EVERY` steps."""
        growth, now = self._l2l_growth, self.state.global_step
        if growth is None or not self._l2l_measures or now % LOOKS_EVERY or now <= growth.looked_at:
            return
        self._read_noise()
        found = self._l2l_noise.found
        growth.look(self.args, self.state, found.critical_batch, found.steps)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Overridden to read what was measured, where all ranks are: before a log, and from time to time."""
        if self.control.should_log or len(self._l2l_measured) >= _MOST_PENDING:
            self._read_noise()
        self._look_at_noise()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Overridden because a checkpoint has the averages of all steps so far."""
        self._read_noise()
        super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Overridden to log the noise scale with each training loss."""
        if "loss" in logs and self._l2l_measures:
            found, growth = self._l2l_noise.found, self._l2l_growth
            for name, value in (("l2l_noise_scale", found.scale), ("l2l_critical_batch", found.critical_batch)):
                if value is not None:
                    logs[name] = value
            if growth is not None:
                logs["l2l_step_rows"] = growth.rows_of_step(self.args, self.state)
        super().log(logs, *args, **kwargs)


def _refuse_if(problem: str | None) -> None:
    """Raise ValueError for what keeps the gradient of each micro-batch from being measured."""
    if problem is not None:
        raise ValueError(f"l2l_noise_scale=True needs the gradient of each micro-batch (got {problem}); leave it out")


def _shared(units: list[MasterUnit]) -> str | None:
    """A weight that several layers have; None if there is none."""
    seen: set[Any] = set()
    for unit in units:
        for master in unit.trained_masters:
            if master in seen:
                return f"{master.name}, a weight of several layers"
        seen.update(unit.trained_masters)
    return None
