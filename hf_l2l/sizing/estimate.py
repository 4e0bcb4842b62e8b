"""`hf_l2l.estimate`: the memory report of a run before it, of whatever names a model and options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_l2l.config import L2LConfig
from hf_l2l.devices import check_device_name, execution_devices
from hf_l2l.log import logger
from hf_l2l.memory import memory_estimate
from hf_l2l.model_source import model_of, named_as_arguments
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.plan.estimate import Estimate, estimate_of, without_batch
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.runtime import stream
from hf_l2l.shapes.inputs import example_inputs
from hf_l2l.sizing.capacity import largest_models


def estimate(
    model: nn.Module | Any | str | os.PathLike[str],
    config: L2LConfig | Any | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    model_class: str | None = None,
    trust_remote_code: bool = False,
) -> Estimate:
    """Estimate the memory for training a model layer to layer, from shapes alone; nothing is allocated.

    Under autocast, if the Trainer's arguments say so (`bf16=True`), or in a region of `torch.autocast` for the device.

    Args:
        model: the model, which may be on the meta device, or what one is made of there: a config of transformers, a
            folder with a config.json, the path of one, or a name on the Hub (offline: one that its cache has).
        config: the options; None for the defaults. Or the Trainer's arguments, `L2LTrainingArguments` or plain
            `TrainingArguments`: they have `rows`, too (`per_device_train_batch_size`), and the optimizer, as far as
            these are not given, and say how many batches a step has, all of which are on the device if they run as
            one (`l2l_merge_accumulation`). What `device_memory_budget` would choose is not followed.
        optimizer: the optimizer that will update the model, or Accelerate's wrapper of it; it is not changed. None
            assumes two moments per trainable parameter.
        rows: rows of the device batch. Without rows, inputs and arguments, bytes that depend on the batch are left
            out.
        tokens: tokens per row, of models of texts (see `example_inputs`).
        inputs: the arguments of one call of the model, labels included, instead of rows and tokens; on any device.
            They are those of all batches that run as one.
        device: the device that will train it, which this machine need not have; None takes that of `config`, or, if it
            shares the host's memory and there are rows or inputs, a CUDA device. If `config` names several, all are of
            its type; each has a part of its own in the report. Arguments of the Trainer say with `l2l_devices` how
            many there are, and without `rows` each adds as many as the arguments have.
        device_memory: bytes of the device in all, by which "auto" of `stash` and `boundary` decides; None takes those
            of the execution device.
        host_memory: bytes of a host, of which the largest model that it holds is wanted, too (`Estimate.largest`): one
            with more layers like those of `model`, for each setting of `hf_l2l.sizing.capacity.settings_of`.
        model_class: for a model that is made of its config, the name of its class in transformers, such as
            "AutoModelForSequenceClassification"; None for the architecture that the config names.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: if there is no such model, no inputs can be made for it, or it has no stack of layers; if arguments
            contradict each other; if the Trainer's arguments have options that L2L cannot honour.
    """
    if device is not None:
        check_device_name(device)
    place = None if device is None else torch.device(device)
    is_config = config is None or isinstance(config, L2LConfig)
    _refuse_sizes(is_config, rows, tokens, inputs, host_memory)
    with named_as_arguments(), nullcontext() if is_config else options_of_the_trainer():
        made = model_of(model, model_class=model_class, trust_remote_code=trust_remote_code)
        size = {"rows": rows, "tokens": tokens, "inputs": inputs}
        found = _estimated(made, config, optimizer, place, device_memory, host_memory, **size)
    for note in found.notes:
        logger.warning("%s", note)
    return found


def _estimated(
    model: nn.Module,
    config: Any,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | None,
    device_memory: int | None,
    host_memory: int | None,
    *,
    rows: Any,
    tokens: Any,
    inputs: Any,
) -> Estimate:
    notes: tuple[str, ...] = ()
    of_step: dict[str, Any] = {"device_memory": device_memory}
    if config is not None and not isinstance(config, L2LConfig):
        # Programs without the Trainer do not wait for its import.
        from hf_l2l.sizing.arguments import asked_by

        asked = asked_by(config, model)
        config, notes, optimizer = asked.config, asked.notes, optimizer or asked.optimizer
        of_step |= {"accumulates": asked.accumulates, "autocast": asked.autocast, "devices": asked.devices}
        if inputs is None:
            of_step["batches"] = asked.batches
            rows = asked.batches * (rows or asked.rows * asked.devices)
    config = config or L2LConfig()
    of_step.setdefault("devices", _count_of_devices(config, device))
    _refuse_budget(config)
    if inputs is None and rows is None:
        found = without_batch(memory_estimate.estimate(model, config, optimizer, device))
    else:
        given = example_inputs(model, rows, tokens) if inputs is None else inputs
        run = RunShapes(model, config, given, optimizer=optimizer, device=device, **of_step)
        found = estimate_of(run, config)
        if host_memory is not None:
            found = replace(found, largest=largest_models(run, config, host_memory))
    return replace(found, notes=(*notes, *found.notes))


def _count_of_devices(config: L2LConfig, device: torch.device | None) -> int:
    """How many devices run the layers: those of `config`, of which this machine needs none if a `device` is given."""
    if device is None:
        return len(execution_devices(config.device))
    if isinstance(config.device, tuple) and not stream.shares_host_memory(device):
        return len(config.device)
    return 1


def _refuse_budget(config: L2LConfig) -> None:
    """Raise ValueError for a budget, for which options would be chosen."""
    if config.device_memory_budget is not None:
        raise ValueError(
            "an estimate is of the options as they are (got device_memory_budget="
            f"{config.device_memory_budget!r}, which chooses some); leave it out, or use hf-l2l estimate --budget"
        )


def _refuse_sizes(is_config: bool, rows: int | None, tokens: int | None, inputs: Any, host_memory: int | None) -> None:
    """Raise ValueError for sizes of a batch that would not be looked at."""
    if inputs is not None and (rows is not None or tokens is not None):
        raise ValueError(
            f"inputs have rows and tokens of their own (got inputs, with rows={rows} and tokens={tokens}); leave out "
            "rows and tokens, or inputs"
        )
    if tokens is not None and rows is None and is_config:
        raise ValueError(
            f"tokens are those of a row of a batch (got tokens={tokens} without rows); give rows, too, or leave both "
            "out for the bytes that do not depend on a batch"
        )
    if host_memory is not None and rows is None and inputs is None and is_config:
        raise ValueError(
            f"the largest model depends on a batch (got host_memory={host_memory} without rows and inputs); give rows"
        )
    if rows is not None and rows < 1:
        raise ValueError(f"rows of an estimate must be at least 1 (got {rows}); give those of a batch")
