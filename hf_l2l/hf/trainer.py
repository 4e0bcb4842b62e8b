"""`L2LTrainer`: transformers' `Trainer` with a model that runs layer to layer.

Written for transformers 5.17 to 5.23. The training loop, evaluation, logging, clipping, schedulers, callbacks and
checkpoints are the Trainer's own: they see an ordinary model on the host, whose parameters are the master weights.
The overrides keep the model there, attach L2L before the model runs, and refuse options that cannot work; each
docstring gives the reason.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_l2l.accumulation.conditions import why_not_folded
from hf_l2l.accumulation.folding import Folding
from hf_l2l.accumulation.step import Step, step_of
from hf_l2l.budget.trainer_plan import Purpose, TrainerPlan
from hf_l2l.checkpoint.finding import checkpoint_to_resume, decided_by_rank_0
from hf_l2l.config import L2LConfig
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.hf.attach import Attachment, attach_with_losses, attachment_of, check_attachable, detach_l2l
from hf_l2l.hf.checkpoints import CheckpointsMixin
from hf_l2l.hf.placement import AsOneDeviceMixin, bind_companions, leave_models_where_they_are
from hf_l2l.hf.preparation import (
    changes_of,
    devices_of,
    losses_that_train,
    move_to_host,
    read_rates_of_state,
    refuse_config,
    refuse_unloaded,
    stacklevel_of_the_caller,
    turn_off_activation_checkpointing,
    warn_of_accumulation,
    warn_of_an_unused_accelerator,
    with_devices,
)
from hf_l2l.hf.training_args import (
    l2l_config,
    own_option,
    refuse_conflicts,
    refuse_for_layers,
    refuse_mixin_after,
)
from hf_l2l.log import details_are_shown, logger, tell
from hf_l2l.logits.heads import loss_alone
from hf_l2l.memory.host_remedies import check_training_fits
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.model.stacks import find_stacks
from hf_l2l.noise.trainer_part import NoiseScaleMixin
from hf_l2l.optim.lamb import Lamb
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.optim.optimizer_check import check_optimizer
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.realtime.trainer_part import RealtimeMixin
from hf_l2l.report.log_entries import TokenCount, log_entries, shown
from hf_l2l.report.pictures.trainer_part import PlotMixin
from hf_l2l.report.summary import first_line, summary
from hf_l2l.runtime import stream
from hf_l2l.shared_eps.server import ranks_text


class L2LTrainerMixin(PlotMixin, NoiseScaleMixin, RealtimeMixin, CheckpointsMixin, AsOneDeviceMixin):
    """Makes any subclass of transformers' `Trainer` run layer to layer: `class Mine(L2LTrainerMixin, DPOTrainer)`.

    It takes the arguments of that class; `make_l2l_trainer(DPOTrainer)` combines the two without a class statement.
    It comes first, so that its overrides hold. A model without a layer stack trains as with the other
    trainer, with one warning. Unlike with `Trainer`, `p.grad` is None from `optimizer.step()` on: callbacks find
    gradients in `on_pre_optimizer_step`, not in `on_optimizer_step`. With `eps_update="eager"`, reading `p.grad` there
    raises RuntimeError: updates use the gradients during the backward.

    Raises:
        ValueError: if the model cannot run layer to layer, or not with these arguments; and in the class statement,
            if the mixin comes after the trainer.
        MemoryError: at the start of training, if the host cannot hold masters, gradients and moments.
    """

    model: Any
    optimizer_cls_and_kwargs: Any
    _l2l_trains = False
    """Whether a training runs, and has attached the model."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_mixin_after(Trainer, L2LTrainerMixin, cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_config((*args, *kwargs.values()))
        # Passed on unchanged: combined with another trainer, the order of arguments is that of the other one.
        self._stackless_said = False
        self._tokens = TokenCount()
        self._folding = Folding()
        self._l2l_plan = TrainerPlan()
        self._companions: list[nn.Module] = []
        """Further models that run for inference only, such as a reference model; attached with the same options."""
        super().__init__(*args, **kwargs)
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        if given and own_option(self.args, "l2l_optimizer") is not None:
            raise ValueError(
                "one of them names the optimizer (got one passed to the Trainer, and "
                f"l2l_optimizer={self.args.l2l_optimizer!r}); leave out one of them"
            )
        # Losses of sentence-transformers, whose parameters it may hold, are not known yet; `wrap` checks it again.
        if self.optimizer is not None and self._streams() and not hasattr(self, "prepare_loss"):
            check_optimizer(self.model, unwrapped(self.optimizer))

    # ---- L2L

    def _asked_config(self) -> L2LConfig:
        devices = devices_of(self.args, own_option(self.args, "l2l_devices"))
        return replace(l2l_config(self.args), device=devices if len(devices) > 1 else devices[0])

    def _l2l_config(self) -> L2LConfig:
        return self._l2l_plan.config(self._asked_config())

    @options_of_the_trainer()
    def _streams(self, model: nn.Module | None = None) -> bool:
        """Whether the model has layers to stream; warns once if it has none."""
        model = self.model if model is None else model
        if find_stacks(model, l2l_config(self.args).layer_classes):
            return True
        if not self._stackless_said:
            self._stackless_said = True
            warnings.warn(
                f"no stack of layers was found in a {type(model).__name__}: it trains as with transformers' Trainer. "
                "Name the classes of its layers with l2l_layer_classes to have them streamed",
                stacklevel=stacklevel_of_the_caller(),
            )
        return False

    def _refuse_unfit(self, model: nn.Module) -> None:
        """Raise ValueError if a model with layers cannot run layer to layer, or not with these arguments."""
        if self._streams(model):
            refuse_for_layers(self.args)
            self._use_devices(own_option(self.args, "l2l_devices"))
            check_attachable(model)

    @options_of_the_trainer()
    def _attach(self) -> EagerParamServer | None:
        """Attach L2L to the current model: `model_init` and hyper-parameter search create new ones."""
        if not self._streams():
            return None
        attached = attachment_of(self.model)
        if attached is not None and attached.changed_stack() is not None:
            return self._attach_anew(attached)
        asked, config = self._asked_config(), self._l2l_config()
        if attached is not None and attached.is_of(asked):  # perhaps with the plan of another trainer
            config = attached.config
        elif attached is not None and not attached.is_of(config) and not self._l2l_trains and self._leave(attached):
            attached = None
        # sentence-transformers' losses may have parameters, as the classifier of SoftmaxLoss.
        losses = losses_that_train(getattr(self, "loss", None), self.model)
        eps = attach_with_losses(self.model, losses, config)
        bind_companions(self.model, self._companions, config)
        made = attachment_of(self.model)
        if made is not None and made is not attached:
            made.asked, made.trainer = asked, weakref.ref(self)
            if self._l2l_plan.plan is not None:
                made.watch(self._l2l_plan.plan, tell)
        return eps

    @options_of_the_trainer()
    def _choose_options(self, dataloader: Any, checkpoint: str | None) -> None:
        """Plan for `device_memory_budget`, before the model is attached."""
        if not self._streams():
            return
        asked, attached = self._asked_config(), attachment_of(self.model)
        purpose = Purpose.of(self, asked, dataloader)
        is_same = self._l2l_plan.is_for(purpose, checkpoint)
        planned = attached is not None and attached.is_of(self._l2l_config())
        # What a trainer has attached (an evaluation, an earlier training, another trainer) is attached again where its
        # options are not those of this training.
        if attached is not None and not (is_same and planned):
            self._leave(attached)
        if not is_same and attachment_of(self.model) is None:
            turn_off_activation_checkpointing(self.model)  # layers are planned, and run, without it
            self._l2l_plan.make(self, purpose, checkpoint)

    def _leave(self, attached: Attachment) -> bool:
        """Detach the model, unless the program has attached it; returns whether it is. With an equal budget, a
        model of the program is planned for other batches, too.

        Raises:
            ValueError: if another trainer trains it now.
        """
        trainer = None if attached.trainer is None else attached.trainer()
        has_budget = attached.asked is not None and attached.is_of(self._asked_config())
        if attached.trainer is None and not has_budget:
            return False
        if trainer is not None and trainer is not self and trainer._l2l_trains:
            before, now = with_devices(attached.asked or attached.config), with_devices(self._asked_config())
            raise ValueError(
                "while a trainer trains a model, others run it with the same options (got "
                f"{changes_of(now, before) or 'another plan for its memory'}); give them the arguments of that "
                "trainer, or call them after its training"
            )
        detach_l2l(self.model, with_companions=False)
        return True

    def _attach_anew(self, attached: Attachment) -> EagerParamServer | None:
        """Attach again a model whose layers a callback has added, dropped or replaced; optimizer state stays."""
        tell(f"layers at {attached.changed_stack()!r} have changed: the model is attached again")
        scale = attached.eps.loss_scale
        detach_l2l(self.model, with_companions=False)
        self._l2l_plan.make_again(self)
        eps = self._attach()
        if eps is not None and self.optimizer is not None:
            eps.wrap(self.optimizer)
            if scale is not None and eps.loss_scale is not None:
                eps.loss_scale.load_state_dict(scale.state_dict())
                self.accelerator.scaler = eps.scaler
            eps.timeline.watch()
        return eps

    def _say_what_runs(self, eps: EagerParamServer) -> None:
        """One line for each training, and the summary for those who have asked for details."""
        if not self.is_world_process_zero():
            return
        config, plan = self._l2l_config(), self._l2l_plan.plan
        need = estimate(self.model, config, unwrapped(self.optimizer))
        logger.info(first_line(self.model, config, need, None if plan is None else plan.peak_bytes))
        if details_are_shown():
            tell(summary(self.model, config, need, ranks_text(eps)))

    @property
    def eps(self) -> EagerParamServer | None:
        """The EPS of the model, which training and evaluation attach; None before that, and without layer stacks."""
        attached = attachment_of(self.model)
        return None if attached is None else attached.eps

    @property
    def _eps_of_model_alone(self) -> EagerParamServer | None:
        """The EPS, if it has the parameters of the model and no others; else None."""
        attached = attachment_of(self.model)
        return attached.eps if attached is not None and attached.root is self.model else None

    def l2l_summary(self) -> str:
        """A summary of what runs layer to layer, where and why: layers, shell, ties, device, micro-batches, memory."""
        if not self._streams():
            return f"{type(self.model).__name__} has no stack of layers and trains as with transformers' Trainer"
        config = self._l2l_config()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return summary(self.model, config, estimate(self.model, config, optimizer), ranks_text(self.eps))

    # ---- seams of transformers.Trainer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Overridden because the model must stay on the host; plain `TrainingArguments` request the move."""
        if attachment_of(model) is not None:
            return
        if self._streams(model):
            move_to_host(model)
        else:
            super()._move_model_to_device(model, device)

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Overridden because the model does not exist earlier, and is checked here. The one before it, to which
        the Trainer still refers, leaves the device."""
        before = getattr(self, "model", None)
        if before is not None:
            detach_l2l(before, with_companions=False)
        model: nn.Module = super().call_model_init(*args, **kwargs)
        self._refuse_unfit(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Overridden because `prepare` would move the model to the device, and the optimizer's state there and back.
        It still places batches: with `device_placement=False` for all, Accelerate reads streamed data sets
        differently, and gathers too many rows.

        Also overridden to check arguments and model, which are both known here before anything is allocated."""
        refuse_conflicts(self.args)
        refuse_unloaded(self.model)
        warn_of_an_unused_accelerator(self.args)
        if isinstance(self.model, nn.Module):  # None if `call_model_init` creates the model
            self._refuse_unfit(self.model)
        super().create_accelerator_and_postprocess()
        leave_models_where_they_are(self, self._l2l_config, self._companions)

    @options_of_the_trainer()
    def _prepare_for_training(self, steps: int, dataloader: Any, checkpoint: str | None, *args: Any, **kw: Any) -> Any:
        """Overridden to attach before the optimizer is created and the model is prepared."""
        self._choose_options(dataloader, checkpoint)
        eps = self._attach()
        self._l2l_trains = True
        attached = attachment_of(self.model)
        if attached is not None and attached.trainer is not None:
            attached.trainer = weakref.ref(self)
        if eps is not None and eps.scaler is not None:  # transformers reads skips from it, and saves it
            self.accelerator.scaler = eps.scaler
        prepared = super()._prepare_for_training(steps, dataloader, checkpoint, *args, **kw)
        if eps is not None:
            read_rates_of_state(self.lr_scheduler)
            eps.wrap(self.optimizer)  # again: a subclass may create its own in `create_optimizer`
            warn = partial(warn_of_accumulation, self.args, self._l2l_config())
            self._l2l_plan.start(self._folding, why_not_folded(self, self._asked_config()), warn)
            eps.timeline.watch()
            self._tokens.restart()  # drop those of an interrupted training
            self._say_what_runs(eps)
        return prepared

    def _lamb(self) -> tuple[Any, dict[str, Any]] | None:
        """The class of the papers' optimizer, which transformers does not have, and its arguments; None unless it is
        asked for. `get_optimizer_cls_and_kwargs` is no place for it: it is a static method, which programs call."""
        args = self.args
        if own_option(args, "l2l_optimizer") != "lamb":
            return None
        betas = args.adam_beta1, args.adam_beta2
        return Lamb, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    @options_of_the_trainer()
    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Overridden because the EPS must check the optimizer, and clears the gradients that it used."""
        self.optimizer_cls_and_kwargs = self._lamb() or self.optimizer_cls_and_kwargs
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        eps = self._attach()
        if eps is not None:
            eps.wrap(optimizer)
            inner = getattr(optimizer, "optimizer", optimizer)
            if not inner.state:  # before it allocates its moments
                check_training_fits(self.model, self._l2l_config(), inner, eps.team)
        return optimizer

    @functools.wraps(Trainer.train)
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Overridden to finish the last update, to stop recording stall times, and to resume from the newest whole
        checkpoint; see `checkpoint_to_resume` for its errors."""
        decide = partial(checkpoint_to_resume, resume_from_checkpoint, self.args, self._generations())
        resume_from_checkpoint = decided_by_rank_0(decide)
        self._l2l_has_begun = False
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            attached = attachment_of(self.model)
            if attached is not None:
                attached.eps.synchronize()
            return result
        except torch.OutOfMemoryError as error:
            attached = attachment_of(self.model)
            if attached is not None:
                attached.eps.timeline.at_no_memory(error)
            raise
        finally:
            self._l2l_trains = False
            self._finish_after_error()
            self._folding.stop()
            attached = attachment_of(self.model)
            if attached is not None:
                attached.eps.timeline.unwatch()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Overridden to train with the batches of a step that a callback has ended early, as transformers does."""
        super()._run_epoch(*args, **kwargs)
        attached = attachment_of(self.model)
        late = None if attached is None else self._folding.finish(self._l2l_step(attached, self.model_wrapped))
        if late is not None:
            self._tr_loss += late

    def _l2l_step(self, attached: Attachment, model: nn.Module) -> Step:
        train = partial(super().training_step, model)
        return self._measuring(attached, step_of(self, attached.eps, attached.cuts, train))

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Overridden to count tokens, and to run the batches of a step as one (`l2l_merge_accumulation`)."""
        self._finish_if_saved()
        attached = attachment_of(self.model)
        if attached is not None and attached.changed_stack() is not None:
            self._attach()
            attached = attachment_of(self.model)
        named = getattr(self.model, "main_input_name", "input_ids")
        self._tokens.add(inputs, named, None if attached is None else attached.eps.team)
        if attached is None:
            plain: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return plain
        attached.eps.updates.steps = self.state.global_step  # for the text of errors
        items = args[0] if args else kwargs.get("num_items_in_batch")
        count = getattr(self, "current_gradient_accumulation_steps", 1)
        loss = self._folding.step(inputs, items, count, self._l2l_step(attached, model))
        scale = attached.eps.loss_scale
        # The Trainer reads each loss anyway, so this adds no wait. In fp16 only the gradients decide.
        if not (scale is not None and scale.is_dynamic) and not bool(loss.isfinite()):
            attached.eps.vote.veto()
        return loss

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Overridden to log with each training loss what the steps since the last one took of the machine.

        Callbacks get that, and the file of the run, which has all that was measured. The state does not, since it is
        the same for equal runs."""
        attached = attachment_of(self.model)
        timeline = None
        if attached is not None and "loss" in logs:
            timeline = attached.eps.timeline
            attached.eps.end_copies()  # the spans of the last step end with those of its last gradients
        measured = {} if timeline is None else log_entries(timeline, self._tokens.count)
        entries: dict[str, Any] = {}
        if timeline is not None and measured:
            on_device = not stream.shares_host_memory(timeline.device)
            all_times = bool(own_option(self.args, "l2l_log_times"))
            logs.update(entries := shown(measured, on_device=on_device, all_times=all_times))
            self._tokens.restart()
            self._keep_row({"step": self.state.global_step, **measured})
        scale = attached.eps.loss_scale if attached is not None else None
        if "loss" in logs and scale is not None:
            if scale.is_dynamic:
                logs["loss_scale"] = scale.value
            logs["skipped_steps"] = scale.skipped
        before = len(self.state.log_history)
        try:
            super().log(logs, *args, **kwargs)
        finally:
            for entry in self.state.log_history[before:]:
                for name in entries:
                    entry.pop(name, None)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Overridden because the norms are already known, and scaling is part of the update in the background.

        Parameters of losses, which transformers does not clip, are in these norms: then it reads the gradients."""
        eps = self._eps_of_model_alone
        return super()._clip_grad_norm(model) if eps is None else eps.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Overridden because an eager update has already used the gradients."""
        eps = self._eps_of_model_alone if grad_norm is None else None
        return super()._get_grad_norm(model, grad_norm=grad_norm) if eps is None else eps.grad_norm()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Overridden to attach, since evaluation and prediction may run without training."""
        attached = attachment_of(self.model) if self._attach() else None
        with attached.evaluating(self.args.eval_batch_size) if attached else nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any) -> Any:
        """Overridden so that an evaluation that needs only the loss makes no logits of all tokens."""
        with loss_alone() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kw)


class L2LTrainer(L2LTrainerMixin, Trainer):  # type: ignore[misc]  # transformers ships no types
    """Takes the arguments of `Trainer`; `args` may be `L2LTrainingArguments` or plain `TrainingArguments`.
    `L2LTrainerMixin` describes all that it adds."""

    @functools.wraps(Trainer.__init__)  # type: ignore[misc]  # transformers ships no types
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
