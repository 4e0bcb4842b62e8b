"""Attaches layer-to-layer execution to a model, and detaches it.

An Accelerate hook on every module (`hooks`) replaces the module's original forward, which `add_hook_to_module` stores,
by that of the engine. Everything else about the model stays unchanged.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from accelerate.state import GradientState
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_l2l.budget.watch import PlanWatch
from hf_l2l.budget.within import budget_bytes, plan_within
from hf_l2l.config import EAGER_FP16, L2LConfig
from hf_l2l.device.layer_device import head_places
from hf_l2l.devices import execution_device, execution_devices
from hf_l2l.engine.by_rows import ByRows
from hf_l2l.engine.relay import Relay
from hf_l2l.engine.shell import Shell
from hf_l2l.eps.server import EagerParamServer
from hf_l2l.hf.hooks import REPLACED, CallWatch, L2LHook, Runner
from hf_l2l.hf.preparation import (
    changes_of,
    config_of,
    make_masters_fp32,
    move_to_host,
    refuse_own_backwards,
    refuse_placed,
    refuse_wrapped,
    turn_off_activation_checkpointing,
    turn_on_activation_checkpointing,
    warn_of_short_masters,
    with_devices,
    with_progress_bar,
)
from hf_l2l.log import logger, tell
from hf_l2l.logits.heads import OutputEmbeddings, chunk_rows, output_embeddings
from hf_l2l.model.batch_dims import RowCuts
from hf_l2l.model.kept_state import ATTACHMENT
from hf_l2l.model.precision import Precision, computing_dtype, let_heads_return_fp32
from hf_l2l.model.quantized import refuse_untrainable
from hf_l2l.model.residency import LayerPlace, make_resident, move_back, moves_shell, places_of, state_follows
from hf_l2l.model.stacks import CONTAINERS, LayerStack, find_stacks, has_weights, shell_modules
from hf_l2l.optim.loss_scale import LossScale
from hf_l2l.option_names import option
from hf_l2l.plan.planner import Plan
from hf_l2l.ranks.team import refuse_launcher_without_group, trace_of_rank
from hf_l2l.report.timeline import Timeline
from hf_l2l.rows.row_modules import input_embeddings, run_by_rows
from hf_l2l.runtime import stream
from hf_l2l.stash.tiers import Tiers, spill_file
from hf_l2l.state_tier.server import check_state_tier, eps_of

_ATTRIBUTE = ATTACHMENT


@dataclass
class Attachment:
    """State that `attach_l2l` adds to a model. Copies of the model do not have it."""

    root: nn.Module
    """What is attached: the model, or a container with the model and modules that are trained with it."""
    config: L2LConfig
    device: torch.device
    stacks: list[LayerStack]
    eps: EagerParamServer
    relay: Relay
    cuts: RowCuts
    """Where the batch is cut into micro-batches."""
    hooked: list[nn.Module]
    handles: list[RemovableHandle]
    companions: list[nn.Module] = field(default_factory=list)
    """Models attached for inference, which are detached together with this one."""
    members: dict[str, set[nn.Module]] = field(default_factory=dict)
    """What is in the container of each stack, by its path."""
    asked: L2LConfig | None = None
    """The config that was given with `device_memory_budget`, or by a trainer: a plan may have changed it."""
    trainer: weakref.ref[Any] | None = None
    """The trainer that has attached it, or trained it since; None if the program has attached it."""
    plan: Plan | None = None
    watched: PlanWatch | None = None

    @property
    def tiers(self) -> Tiers:
        """The memory of the stash."""
        return self.relay.stash.tiers

    def is_of(self, config: L2LConfig) -> bool:
        """Whether it was attached with `config`."""
        known = (self.config, self.asked or self.config)
        return with_devices(config) in [with_devices(each) for each in known]

    def watch(self, plan: Plan, tell: Callable[[str], None] = tell) -> None:
        """Tell what was planned, and later what was measured of it."""
        watch = self.watched = PlanWatch(plan, self.eps.memory_report, tell)
        self.plan = plan
        self.eps.timeline.at_step_end, self.eps.timeline.at_no_memory = watch.step_ended, watch.explain
        tell(str(plan))

    def evaluating(self, rows: int) -> AbstractContextManager[None]:
        """Inside, an evaluation has batches of so many rows; one that takes more than a budget is told of."""
        return nullcontext() if self.watched is None else self.watched.evaluates(logger.warning, rows)

    def changed_stack(self) -> str | None:
        """The path of a stack with other layers than before, in whatever order; None if there is none."""
        return next((path for path, before in self.members.items() if _members(self.root, path) != before), None)

    def refuse_changed_layers(self) -> None:
        """Raise ValueError if layers have been added or replaced. Some may be left out: their order is only a hint."""
        path = next((path for path, before in self.members.items() if _members(self.root, path) - before), None)
        if path is not None:
            raise ValueError(
                "a model under L2L must have the layers that it was attached with (some were added or "
                f"replaced at {path!r}); call hf_l2l.detach_l2l(model) before that, then attach_l2l, and wrap the "
                "optimizer again: it keeps the state of the parameters that stay"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _members(root: nn.Module, path: str) -> set[nn.Module]:
    try:
        container = root.get_submodule(path)
    except AttributeError:  # it is gone
        return set()
    return set(container.children()) if isinstance(container, CONTAINERS) else set()


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of `model`; None if it is not attached."""
    return getattr(model, _ATTRIBUTE, None)


def attach_l2l(
    model: nn.Module,
    config: L2LConfig | None = None,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> EagerParamServer:
    """Make `model` run layer to layer; it stays the same object, with its parameters in host memory, or, if they are
    resident (`config.resident`), on the device.

    A forward runs one layer at a time on the execution device, a backward stores gradients in `p.grad` on the host,
    and any optimizer over `model.parameters()` updates the masters there. Gradients and state of resident parameters
    are on the device; their optimizer must be wrapped (`eps.wrap`), so that its state follows them. Attaching again
    with an equal config returns the same EPS.

    Args:
        model: a model with at least one layer stack, on the host.
        config: the options; None for the defaults.
        inputs: with `config.device_memory_budget`, the arguments of one call of the model, labels included, with as
            many rows as the device batches will have, and the longest rows. Only their shapes and dtypes are read, so
            they may be on any device, meta included. If the model will be called under autocast, attach it inside a
            region of `torch.autocast` for the device, too: its memory is planned.
        optimizer: with `config.device_memory_budget`, what will update the model, for the size of its state; None
            assumes AdamW.

    Raises:
        ValueError: if `config` is no `L2LConfig`; if the model is attached with another one, has no layer stack, is on
            the meta device, is placed by a device_map or other hooks, is sharded, or is wrapped for data parallelism
            or by torch.compile; if it has quantized weights that cannot travel or be trained through, or, on an
            accelerator, layers that compute their backward themselves; if processes of a launcher have no process
            group; if no file can be written, locked or mapped in the folder for a stash on disk; or if a budget of
            device memory cannot be met, is not free, or comes without `inputs`.
    """
    config = config_of(config)
    attached = attachment_of(model)
    if attached is not None:
        if not attached.is_of(config):
            before, now = with_devices(attached.asked or attached.config), with_devices(config)
            raise ValueError(
                f"a model is attached with one config at a time (got {changes_of(now, before)}); call "
                "hf_l2l.detach_l2l(model) first"
            )
        turn_off_activation_checkpointing(model)
        return attached.eps
    plan = _plan(model, config, inputs, optimizer)
    if plan is None:
        return attach_new(model, config)
    eps = attach_new(model, plan.config)
    attached = attachment_of(model)
    assert attached is not None
    attached.asked = config
    attached.watch(plan)
    return eps


def _plan(
    model: nn.Module,
    config: L2LConfig,
    inputs: Mapping[str, torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Plan | None:
    """The plan for the budget; None without one."""
    if budget_bytes(config, execution_device(config.device)) is None:
        return None
    check_attachable(model)
    if inputs is None:
        raise ValueError(
            f"{option('device_memory_budget')} is planned for the batches of the training (got "
            f"{config.device_memory_budget!r} without inputs); give one with the longest rows: attach_l2l(model, "
            "config, inputs=batch)"
        )
    turn_off_activation_checkpointing(model)  # layers are planned, and run, without it
    return plan_within(model, config, inputs, optimizer=optimizer)


def attach_with_losses(model: nn.Module, losses: Sequence[nn.Module], config: L2LConfig) -> EagerParamServer:
    """Attach `model` together with modules that call it and have parameters of their own, such as losses.

    These parameters are trained as those of the model outside its layers: the masters are on the host, and an
    optimizer over both updates them. To attach only one such module, give it to `attach_l2l` as the model.

    Raises:
        ValueError: as `attach_l2l`.
    """
    attached = attachment_of(model)
    if attached is not None and {*losses} - {*attached.root.children()}:  # another loss than in an earlier training
        detach_l2l(model, with_companions=False)
    elif not losses or attached is not None:
        return attach_l2l(model, config)
    root = nn.ModuleDict({"model": model, **{f"loss{n or ''}": loss for n, loss in enumerate(losses)}})
    eps = attach_l2l(root, config)
    for each in (model, *losses):
        setattr(each, _ATTRIBUTE, attachment_of(root))
    return eps


def attach_new(model: nn.Module, config: L2LConfig, *, trains: bool = True) -> EagerParamServer:
    """Attach a model that is not attached, with these options as they are; see `attach_l2l`."""
    check_attachable(model)
    refuse_launcher_without_group()
    stacks = find_stacks(model, config.layer_classes)
    if not stacks:
        raise ValueError(
            f"a model must have a stack of layers to be run layer to layer (none was found in a "
            f"{type(model).__name__}); name the classes of its layers: L2LConfig(layer_classes=('MyBlock',))"
        )
    if any(stack.is_guessed for stack in stacks):
        kinds = ", ".join(f"{s.path} ({len(s.layers)} x {', '.join(s.class_names)})" for s in stacks)
        logger.warning(
            "the layers of a %s were found by their parameters alone: %s; name others with %s",
            type(model).__name__,
            kinds,
            option("layer_classes"),
        )
    devices = execution_devices(config.device)
    device = devices[0]
    layers = [layer for stack in stacks for layer in stack.layers]
    refuse_own_backwards(layers, device)
    places = places_of(layers, config, device)
    # Before the model changes, since these raise for a dtype that the device, or the kind of update, does not support.
    dtype = computing_dtype(config.cmp, device)
    loss_scale = _loss_scale(config, dtype) if trains else None
    if trains:
        refuse_untrainable(model, device, dtype)
        spilled = spill_file(config, device, len(layers))
        if spilled is not None:
            spilled.check()
    check_state_tier(model, config)
    move_to_host(model)
    turn_off_activation_checkpointing(model)
    if trains and dtype is None:
        warn_of_short_masters(model)
    elif trains:
        make_masters_fp32(model)
    if trains and config.cmp == "auto":
        logger.warning("cmp='auto' computes in %s on %s", dtype, device)
    shell = moves_shell(config, device)
    if not (shell or any(place.is_resident for place in places.values())):
        return _attach(model, config, devices, stacks, places, dtype, loss_scale)
    # Before anything of the engine refers to parameters weakly.
    make_resident(model, places, devices, shell=shell)
    with ExitStack() as exits:
        exits.push(partial(_make_ordinary_after_errors, model))
        return _attach(model, config, devices, stacks, places, dtype, loss_scale)


def _make_ordinary_after_errors(
    model: nn.Module, kind: object, error: BaseException | None, frames: TracebackType | None
) -> None:
    if error is not None:
        traceback.clear_frames(frames)  # what they refer to refers to parameters weakly
        move_back(model)


def _attach(
    model: nn.Module,
    config: L2LConfig,
    devices: list[torch.device],
    stacks: list[LayerStack],
    places: dict[nn.Module, LayerPlace],
    dtype: torch.dtype | None,
    loss_scale: LossScale | None,
) -> EagerParamServer:
    layers, device = list(places), devices[0]
    timeline = Timeline(device, model, layers, trace_of_rank(config.trace), devices[1:])
    precision = Precision(model, dtype, gradients=config.grad_dtype, keeps_copies=config.host_copies == "kept")
    eps = eps_of(config)(
        model,
        device,
        config,
        layers=layers,
        precision=precision,
        places=places,
        timeline=timeline,
        loss_scale=loss_scale,
        progress=with_progress_bar,
        # Set by `accelerator.accumulate`, and by transformers' Trainer; False in a loop without Accelerate.
        is_accumulating=lambda: not GradientState().sync_gradients,
    )
    eps.memory.adopt()
    cuts = RowCuts(config.ubatch_size, parts=RowCuts.parts_for(len(devices)))
    shell = Shell(device, eps, overlap=config.prefetch, cuts=cuts)
    shell.keeps_copies = config.resident != "none" and config.resident_update == "host"
    relay = Relay(config, devices, eps, shell)
    # What has no weights needs no hook. Models may share it: a module that is a default argument is one for all.
    outside = [m for m in shell_modules(model, layers) if m is model or has_weights(m)]
    outside = [m for m in outside if not isinstance(m, nn.ModuleList | nn.ModuleDict)]
    heads = output_embeddings(outside)
    by_rows = ByRows(relay, input_embeddings(outside, layers).difference(heads))
    runners: dict[nn.Module, Runner] = dict.fromkeys(run_by_rows(outside, {*heads, *layers}), by_rows)
    rows = chunk_rows(config.chunked_loss, heads, stream.least_memory(devices))
    if rows is not None and not stream.shares_host_memory(device):
        runners |= dict.fromkeys(heads, OutputEmbeddings(shell, rows, head_places(relay.devices, config)))
    for module in outside:
        add_hook_to_module(module, L2LHook(runners.get(module, shell), device))
    for layer in layers:
        add_hook_to_module(layer, L2LHook(relay, device))
    members = {stack.path: _members(model, stack.path) for stack in stacks}
    hooked = [*outside, *layers]
    attached = Attachment(model, config, device, stacks, eps, relay, relay.cuts, hooked, [], members=members)
    watch = CallWatch(shell, attached.refuse_changed_layers)
    # A container with losses is not called itself.
    for module in model.children() if isinstance(model, nn.ModuleDict) else (model,):
        attached.handles += watch.handles(module)
    attached.handles += let_heads_return_fp32(model, layers) if precision.is_mixed else ()
    setattr(model, _ATTRIBUTE, attached)
    return eps


def _loss_scale(config: L2LConfig, dtype: torch.dtype | None) -> LossScale | None:
    if dtype is not torch.float16:
        return LossScale(1.0, growth=1.0, backoff=1.0) if config.nonfinite == "skip" else None
    if config.eps_update == "eager":  # and cmp is "auto"
        raise ValueError(EAGER_FP16)
    return LossScale(
        config.loss_scale_init, config.loss_scale_growth, config.loss_scale_backoff, config.loss_scale_interval
    )


def detach_l2l(model: nn.Module, *, with_companions: bool = True) -> nn.Module:
    """Make `model` an ordinary model on the host again, and return it; a model that is not attached is not changed.

    Models that `L2LTrainer` attached beside it, for inference only, are detached, too (`with_companions`).
    """
    attached = attachment_of(model)
    if attached is None:
        return model
    root = attached.root
    for companion in attached.companions if with_companions else ():
        detach_l2l(companion)
    # A call or backward that has failed leaves work, whose memory is freed with the engine.
    attached.relay.finish()
    optimizers = attached.eps.release()
    attached.tiers.release()
    for handle in attached.handles:
        handle.remove()
    later = [m for m in root.modules() if isinstance(getattr(m, "_hf_hook", None), L2LHook)]  # resized embeddings
    for module in dict.fromkeys([*attached.hooked, *later]):
        remove_hook_from_module(module)
        # Restored attributes that equal the methods of the class are removed.
        for name in ("forward", *REPLACED):
            if name in module.__dict__ and module.__dict__[name] == getattr(type(module), name).__get__(module):
                del module.__dict__[name]
        if "forward" not in module.__dict__:
            module.__dict__.pop("_original_forward", None)  # left by accelerate's autocast wrapper
    for each in (root, *root.children()):
        if attachment_of(each) is attached:
            delattr(each, _ATTRIBUTE)
    moved = set(move_back(root))
    for optimizer in optimizers:
        state_follows(optimizer, moved)
    turn_on_activation_checkpointing(root)
    return model


def check_attachable(model: nn.Module) -> None:
    """Raise ValueError if `model` cannot be attached, because it is wrapped or placed; an attached model passes."""
    if attachment_of(model) is None:
        refuse_wrapped(model)
        refuse_placed(model)
