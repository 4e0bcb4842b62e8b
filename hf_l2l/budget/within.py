"""`plan_within`: the plan for a budget of device memory, made before the model is attached."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_l2l.budget.agreed import figures_of_rank_0
from hf_l2l.compat import with_gradient_hooks
from hf_l2l.config import L2LConfig
from hf_l2l.counts import parse_size
from hf_l2l.devices import execution_devices
from hf_l2l.log import logger
from hf_l2l.model.residency import LayerPlace, parameters_to_move
from hf_l2l.model.stacks import find_stacks
from hf_l2l.optim.layer_optimizers import unwrapped
from hf_l2l.optim.layerwise_check import why_not_layer_local
from hf_l2l.option_names import option
from hf_l2l.own_command import with_options
from hf_l2l.plan.planner import (
    WORTH,
    BudgetError,
    Plan,
    make_plan,
    needed,
    plan_as,
    refuse_small,
    run_within,
    time_of,
)
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.plan.step_time import Rates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.known import known_figures
from hf_l2l.ranks.team import process_group_size, processes_of_this_host
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import size_text
from hf_l2l.shapes.losses import told_failures

AUTO_SHARE = 0.9
"""The share of the device's memory that "auto" is; the rest is for the context, fragments and other programs."""


def budget_bytes(config: L2LConfig, device: torch.device) -> int | None:
    """Bytes of the budget; None without one, or if the device has no memory of its own, or tells no limit."""
    asked = config.device_memory_budget
    if asked is None or stream.shares_host_memory(device):
        return None
    if asked != "auto":
        return parse_size(asked)
    total = stream.memory_of(device)
    # A simulated device without a limit says that all addresses are its memory.
    return None if total is None or total >= sys.maxsize else int(AUTO_SHARE * total)


def check_free(budget: int, config: L2LConfig, device: torch.device) -> None:
    """Raise BudgetError if less than the budget is free: a plan for what happens to be free would differ each time."""
    free = stream.memory_free(device)
    if free is not None and free < budget:
        gc.collect()  # models and trainers that are gone are in reference cycles, and hold memory until then
        free = stream.memory_free(device)
    if free is None or free >= budget:
        return
    name, asked = option("device_memory_budget"), config.device_memory_budget
    what = f"{name}={asked!r} is {size_text(budget)}" if asked == "auto" else f"{name}={asked!r}"
    held, _ = stream.memory_in_use(device) or (0, 0)
    smaller = {"device_memory_budget": f"{max(1, int(0.95 * free) // 2**20)}MiB"}
    raise BudgetError(
        f"the device must have the memory of its budget free ({what}, and {size_text(free)} are free on {device}, "
        f"where this program itself holds {size_text(held)}); end other programs that use it, let go of what this one "
        "has there (an attached model moves to the host with hf_l2l.detach_l2l), or give a smaller budget: "
        f"{with_options(smaller)}"
    )


def plan_within(
    model: nn.Module,
    config: L2LConfig,
    inputs: Mapping[str, torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    batches: int = 1,
    chosen: Mapping[str, Any] | None = None,
    is_running: bool = False,
    autocast: torch.dtype | None = None,
) -> Plan | None:
    """The fastest options within `config.device_memory_budget`; None without a budget. Nothing of the model changes.

    All ranks of a process group call this; rank 0 measures the machine.

    Args:
        model: not attached.
        config: the options; those that are set bind the plan.
        inputs: the arguments of one call of the model with the longest rows, labels included; on any device.
        optimizer: what will update the model; None assumes AdamW.
        batches: how many such calls a step has. They are planned as one, if that fits and is faster.
        chosen: options that were chosen before, and "batches", as in the training that is resumed; they are chosen
            again, if they fit.
        is_running: in the middle of a training, when the memory was found free at its start.
        autocast: the dtype of the autocast under which the model is called; None takes that of the region that is
            entered now for the device.

    Raises:
        Untraceable: if the model cannot be run without values, or computes no loss of `inputs`.
        ValueError: if the device has less memory free, or would need more than the budget whatever is chosen.
    """
    devices = execution_devices(config.device)
    # One plan for all: of devices of different sizes, "auto" is the share of the smallest.
    budget = min((size for each in devices if (size := budget_bytes(config, each)) is not None), default=None)
    if budget is None:
        return None
    # What follows may fail in one rank alone, for which the others must not wait.
    figures = figures_of_rank_0(devices[0]) if process_group_size() > 1 else None
    if not is_running:
        for each in devices:
            check_free(budget, config, each)
    with _in_training_mode(model):
        bare = unwrapped(optimizer) if optimizer else None
        return _plan_within(model, config, inputs, bare, batches, chosen, budget, autocast, figures)


@contextmanager
def _in_training_mode(model: nn.Module) -> Iterator[None]:
    """In the block, dropout keeps what it does in training; from_pretrained returns a model in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _plan_within(
    model: nn.Module,
    config: L2LConfig,
    inputs: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    batches: int,
    chosen: Mapping[str, Any] | None,
    budget: int,
    autocast: torch.dtype | None,
    figures: HardwareFigures | None,
) -> Plan:
    """Without `figures`, those of the machine are looked up, or measured, once the budget is known to be enough."""
    devices = execution_devices(config.device)
    device = devices[0]
    bound, apart = _bound(model, config, optimizer)

    def run_of(at_once: int, chunk_memory: int, chunk_rows: int | None = None) -> RunShapes:
        with told_failures(model):
            return RunShapes(
                model,
                config,
                _times(inputs, at_once),
                optimizer=optimizer,
                device=device,
                chunk_memory=chunk_memory,
                chunk_rows=chunk_rows,
                given=(*bound, "kept_graphs") if at_once > 1 else bound,
                batches=at_once,
                accumulates=batches > at_once,
                autocast=autocast,
                devices=len(devices),
                ranks_add=process_group_size() if _may_add_on_devices(config, devices) else 0,
            )

    # A budget that is too small is refused before a machine is measured.
    if chosen is not None:
        # The plan of an earlier version had as few rows in a chunk of logits as fit any memory.
        before = chosen.get("chunked_loss")
        run = run_of(1, 0, before)
        try:
            refuse_small(run, budget)
        except BudgetError:
            what = "it needs" if before is None else f"its chunks of logits, of {before} tokens, need"
            _warn_not_again(f"{what} more than the budget")
            chosen = None
    if chosen is None:
        run = run_within(partial(run_of, 1), budget)
    alike = partial(run_of, chunk_memory=0, chunk_rows=run.chunk_rows)
    rates = Rates.of(figures or known_figures(device), run.multiplies_in, config)

    def of_step(plan: Plan) -> Plan:
        """With the time of all batches of a step."""
        if plan.batches == batches:
            return plan
        return replace(plan, time=time_of(run, plan.config, rates, batches=batches))

    if chosen is not None:
        again, reason = _again(alike, budget, rates, dict(chosen), batches, bound)
        if again is not None:
            return of_step(again)
        _warn_not_again(reason)
    plan = of_step(make_plan(run, budget, rates, apart=apart))
    if batches == 1:
        return plan
    at_once = _at_once(alike(batches), run, budget, rates, apart=apart)
    if at_once is None or at_once.time.seconds > (1 - WORTH) * plan.time.seconds:
        return plan
    return at_once


def _warn_not_again(reason: str) -> None:
    logger.warning("the plan of the checkpoint is not used again, and another one is made: %s", reason)


def _again(
    run_of: Callable[[int], RunShapes],
    budget: int,
    rates: Rates,
    chosen: dict[str, Any],
    batches: int,
    bound: Collection[str],
) -> tuple[Plan | None, str]:
    """The plan with what was `chosen` before; or None, and why it cannot be had any more."""
    at_once = chosen.pop("batches")
    if at_once not in (1, batches):
        return None, f"a step had {at_once} batches at once, and has {batches} now"
    refused = [option(name) for name in bound if name in chosen]
    if refused:
        return None, f"{', '.join(refused)} cannot be chosen for this model and optimizer any more"
    try:
        plan = plan_as(run_of(at_once), budget, rates, chosen)
    except ValueError as error:  # the model has fewer layers
        return None, str(error)
    return plan, f"it needs more than {size_text(budget)}"


def _at_once(merged: RunShapes, single: RunShapes, budget: int, rates: Rates, *, apart: bool) -> Plan | None:
    """The plan for all batches of a step as one; None if they do not fit, as one or, if the first step shows that they
    cannot run so, one after the other."""
    try:
        plan = make_plan(merged, budget, rates, apart=apart)
        over = needed(single, plan.config) - budget
        plan = plan if over <= 0 else make_plan(merged, budget - over, rates, apart=apart)
    except BudgetError:
        return None
    return replace(plan, budget=budget) if needed(single, plan.config) <= budget else None


def _times(inputs: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The shapes of `inputs` with so many times the rows."""
    rows = max((t.shape[0] for t in inputs.values() if t.dim()), default=0)
    return {
        name: torch.empty((count * rows, *t.shape[1:]), dtype=t.dtype, device="meta")
        if t.dim() and t.shape[0] == rows
        else t
        for name, t in inputs.items()
    }


def _may_add_on_devices(config: L2LConfig, devices: Sequence[torch.device]) -> bool:
    """Whether ranks will add gradients on their devices, or may find that to be faster: those of one host do."""
    ranks = process_group_size()
    return config.reduce != "host" and 1 < ranks == processes_of_this_host(ranks) and len(devices) == 1


_RESIDENT = ("resident", "resident_layers")


def _bound(
    model: nn.Module, config: L2LConfig, optimizer: torch.optim.Optimizer | None
) -> tuple[tuple[str, ...], bool]:
    """Options that the engine would refuse to be chosen; and whether some weights may be resident without others."""
    if process_group_size() > 1:  # their masters are shared by all ranks, on the host
        return _RESIDENT, True
    layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
    moving = parameters_to_move(model, dict.fromkeys(layers, LayerPlace(is_resident=True)), shell=True)
    movable = set(moving.names) if not (moving.refused or moving.staying) else set()
    if (
        movable != set(model.parameters())
        or with_gradient_hooks(movable)
        or any(map(weakref.getweakrefcount, movable))
    ):
        return _RESIDENT, True
    of_layers = [set(layer.parameters()) for layer in dict.fromkeys(layers)]
    shared = sum(map(len, of_layers)) > len(set().union(*of_layers))
    return (), not shared and (optimizer is None or why_not_layer_local(optimizer) is None)
