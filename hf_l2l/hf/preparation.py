"""Checks whether a model can run layer to layer, and prepares it: place, dtype, checkpointing; and a progress bar."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from accelerate.hooks import ModelHook
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from tqdm.auto import tqdm
from transformers.optimization import AdafactorSchedule

from hf_l2l.compat import is_compiled
from hf_l2l.config import L2LConfig
from hf_l2l.counts import parsed_devices
from hf_l2l.devices import execution_device, execution_devices
from hf_l2l.hf.hooks import L2LHook
from hf_l2l.loading import give_memory, is_without_values
from hf_l2l.model.quantized import refuse_quantized
from hf_l2l.option_names import argument, option
from hf_l2l.ranks.team import has_values_that_count, processes_of_this_host
from hf_l2l.runtime import stream

_BELOW_THE_CALLER = ("hf_l2l", "transformers", "accelerate", "torch", "contextlib", "functools")
"""Packages whose frames are skipped, so that warnings name a line of the user's code."""

_DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
"""Names a device that Accelerate does not know by itself."""


def stacklevel_of_the_caller() -> int:
    """The `stacklevel` with which a warning names the line that called transformers or this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BELOW_THE_CALLER:
        frame, level = frame.f_back, level + 1
    return level


def config_of(given: Any) -> L2LConfig:
    """The options that were given; the defaults for None.

    Raises:
        ValueError: for anything but an `L2LConfig`.
    """
    if given is not None and not isinstance(given, L2LConfig):
        raise ValueError(
            f"config must be an L2LConfig (got a {type(given).__name__}); write L2LConfig(name=value, ...), or give "
            "training arguments to L2LTrainer"
        )
    return given or L2LConfig()


def refuse_config(arguments: Iterable[Any]) -> None:
    """Raise ValueError if there is an `L2LConfig` among the arguments of a Trainer."""
    if any(isinstance(each, L2LConfig) for each in arguments):
        raise ValueError(
            "a Trainer takes options of L2L as training arguments (got an L2LConfig); write "
            "args=L2LTrainingArguments(name=value, ...), in which most of their names begin with l2l_"
        )


def refuse_unloaded(model: Any) -> None:
    """Raise ValueError if what a Trainer got as its model is none."""
    if model is None or isinstance(model, nn.Module):  # None if `model_init` makes it
        return
    got, remedy = f"a {type(model).__name__}", "make the model, and pass that"
    if isinstance(model, str | os.PathLike):
        got = repr(os.fspath(model))
        remedy = f"load it with the class of your task: AutoModelForSequenceClassification.from_pretrained({got})"
    raise ValueError(f"the model of a Trainer must be a torch.nn.Module (got {got}); {remedy}")


def warn_of_an_unused_accelerator(args: Any) -> None:
    """Warn if a Trainer is on the CPU, without having been told so, and torch has an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_asked = args.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or os.environ.get(_DEVICE_VARIABLE)
    if accelerator is None or args.device.type != "cpu" or is_asked:
        return
    warnings.warn(
        f"the Trainer trains on the CPU (args.device is {args.device}), though torch has an accelerator, "
        f"{accelerator.type}, which Accelerate has not chosen. Set {_DEVICE_VARIABLE}={accelerator.type} in the "
        "environment to train there, or use_cpu=True",
        stacklevel=stacklevel_of_the_caller(),
    )


def changes_of(config: L2LConfig, before: L2LConfig) -> str:
    """The options of `config` that are not those of another one, `before`."""
    pairs = ((each.name, getattr(config, each.name), getattr(before, each.name)) for each in fields(config))
    return ", and ".join(f"{option(name)}={now!r}, where it has {then!r}" for name, now, then in pairs if now != then)


def with_devices(config: L2LConfig) -> L2LConfig:
    """`config` with the devices by their names."""
    devices = execution_devices(config.device)
    return replace(config, device=tuple(devices) if len(devices) > 1 else devices[0])


def refuse_placed(model: nn.Module) -> None:
    """Raise ValueError for parameters under a device_map, on meta, in shards, or with other Accelerate hooks, and for
    quantized ones that cannot travel."""
    device_map = getattr(model, "hf_device_map", None) or {}
    if any(str(place) != "cpu" for place in device_map.values()):
        name = getattr(model, "name_or_path", "")
        remedy = f"load it as {type(model).__name__}.from_pretrained({name!r}, dtype=torch.float32)"
        raise ValueError(
            f"a model under L2L must be on the host, without a device_map (got {device_map}); "
            f"{remedy if name else 'make or load it without device_map'}"
        )
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None and not is_without_values(model):
        raise ValueError(
            f"the parameters of a model under L2L must hold values (got {meta} on the meta device); load the model "
            "with from_pretrained, or make it outside torch.device('meta')"
        )
    sharded = next((name for name, p in model.named_parameters() if type(p).__name__ == "DTensor"), None)
    if sharded is not None:
        raise ValueError(
            f"the parameters of a model under L2L must be whole, in one process (got {sharded}, a DTensor); load or "
            "make the model without tensor parallelism (tp_plan) and fully_shard"
        )
    refuse_quantized(model)
    hooked = next(((n, m._hf_hook) for n, m in model.named_modules() if hasattr(m, "_hf_hook")), None)
    if hooked is not None and isinstance(hooked[1], L2LHook):
        raise ValueError(
            "a model under L2L must not share modules with another one that is attached (got "
            f"{hooked[0] or 'itself'!r}, which another model has, too); give it a copy.deepcopy() of them, or call "
            "hf_l2l.detach_l2l(the other model) first"
        )
    if hooked is not None and type(hooked[1]) is not ModelHook:  # copies of a model carry a bare ModelHook
        raise ValueError(
            f"a model under L2L must carry no other Accelerate hooks (got a {type(hooked[1]).__name__} on "
            f"{hooked[0] or 'the model'!r}); call accelerate.hooks.remove_hook_from_submodules(model) first"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if `model`, or a module in it, is compiled, wrapped for data parallelism, or runs the model
    within a call of it."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        # A submodule compiled in place (`module.compile()`) is called as before; for the model itself it is refused.
        if kind == "OptimizedModule" or (module is model and is_compiled(model)):
            name, remedy = "compiled model", "leave out torch.compile"
        elif kind == "_FabricModule":
            name, remedy = "model wrapped by Fabric", "attach the model first, then call fabric.setup"
        elif isinstance(module, DistributedDataParallel):
            name, remedy = kind, "attach the model before accelerator.prepare, or leave it out of that"
        elif kind == "XLoraModel":  # whose hooks give all layers tensors of one graph, made by a call of the model
            name, remedy = "PEFT model with X-LoRA", "train it without L2L, or with LoRA adapters alone"
        elif isinstance(module, DataParallel) or kind == "FullyShardedDataParallel":
            name, remedy = kind, "give it the model inside, in one process"
        else:
            continue
        where = f" at {path!r}" if path else ""
        raise ValueError(f"L2L runs the layers of the model itself, without a wrapper (got a {name}{where}); {remedy}")


def refuse_own_backwards(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Raise ValueError for layers that compute their backward themselves, on a device that is not the host.

    Reformer's reversible layers run their parts in a backward of their own, where no device copies are in place.
    """
    own = next((layer for layer in layers if callable(getattr(layer, "backward_pass", None))), None)
    if own is not None and not stream.shares_host_memory(device):
        raise ValueError(
            f"a layer under L2L must leave its backward to torch (a {type(own).__name__} has a backward_pass of its "
            f"own, which cannot run on {device}); train this model without L2L, or on the CPU"
        )


def is_placed(model: nn.Module, device: torch.device) -> bool:
    """Whether the program itself has put all of `model` on an accelerator, `device`."""
    return device != stream.HOST and all(p.device == device for p in model.parameters())


def losses_that_train(loss: Any, model: nn.Module) -> list[nn.Module]:
    """The modules in `loss`, one or a dict of them, that have parameters besides those of `model`."""
    found = loss.values() if isinstance(loss, dict) else [loss]
    own = set(model.parameters())
    return [m for m in found if isinstance(m, nn.Module) and not own.issuperset(m.parameters())]


def move_to_host(model: nn.Module) -> None:
    """Move a model that is on an accelerator to the host, with one warning."""
    give_memory(model)
    where = next((t.device for t in [*model.parameters(), *model.buffers()] if t.device != stream.HOST), None)
    if where is None:
        return
    warnings.warn(
        f"the model was on {where}; it moves to the host, where L2L keeps the master weights. Leave out the move to "
        "the device: layers go there by themselves",
        stacklevel=stacklevel_of_the_caller(),
    )
    model.to(stream.HOST)


_checkpointed: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Modules whose activation checkpointing was turned off -> whether it is to be turned on again."""


def turn_off_activation_checkpointing(model: nn.Module) -> None:
    """Turn off the model's own activation checkpointing until it is detached, with one warning if it was on."""
    active = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    is_told = all(module in _checkpointed for module in active)
    for module in active:
        module.gradient_checkpointing = False  # type: ignore[assignment]
        _checkpointed[module] = True
    if not is_told:
        warnings.warn(
            "activation checkpointing is part of L2L: layers are recomputed in the backward sweep anyway. It was "
            "asked for as well, and is turned off until the model is detached",
            stacklevel=stacklevel_of_the_caller(),
        )


def turn_on_activation_checkpointing(model: nn.Module) -> None:
    """Turn it on again where it was turned off."""
    for module in model.modules():
        if _checkpointed.get(module):
            module.gradient_checkpointing = True  # type: ignore[assignment]
            _checkpointed[module] = False


def warn_of_short_masters(model: nn.Module) -> None:
    """Warn if trainable parameters are in 16 bits."""
    short = {p.dtype for p in _short_masters(model)}
    if short:
        warnings.warn(
            f"the master weights are {', '.join(sorted(map(str, short)))}: small updates are rounded away. Load the "
            "model with dtype=torch.float32, or use cmp, which makes the masters float32; to compute in 16 bits over "
            "float32 masters, use cmp, bf16=True or autocast",
            stacklevel=stacklevel_of_the_caller(),
        )


def make_masters_fp32(model: nn.Module) -> None:
    """Convert trainable 16-bit parameters to float32; they stay the same objects, tied or not.

    They are converted one after the other, so that the host holds at most one of them twice. In ranks after the first,
    they have no values: those of rank 0 come when the model is attached.

    Raises:
        ValueError: if there are weak references to a parameter, with which it cannot be converted.
    """
    short = _short_masters(model)
    held = next((p for p in short if weakref.getweakrefcount(p)), None)
    if held is not None:
        raise ValueError(
            f"cmp needs master weights in float32, and these cannot be made so, since something refers to them weakly "
            f"(got {held.dtype}, of shape {list(held.shape)}); load the model with dtype=torch.float32, or attach it "
            "with cmp before anything else does"
        )
    counts = has_values_that_count()
    for p in short:
        wide = nn.Parameter(p.detach().float() if counts else torch.empty_like(p, dtype=torch.float32))
        if p.grad is not None:
            wide.grad = p.grad.float()
        vars(wide).update(vars(p))  # some optimizers read tags on the parameters
        torch.utils.swap_tensors(p, wide)


def _short_masters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.itemsize < 4]


def _command() -> str:
    return f"python {os.path.basename(sys.argv[0]) or 'your_script.py'}"


def refuse_several_devices(args: Any) -> None:
    """Raise ValueError if a trainer that is not ours would use several devices, each with the whole model."""
    refuse_launcher(args)
    if args.n_gpu > 1:
        raise ValueError(
            f"a model under L2L runs in no DataParallel, in which this Trainer would put it (got {args.n_gpu} visible "
            f"devices); use L2LTrainer, which runs layers on them in turn, or one: CUDA_VISIBLE_DEVICES=0 {_command()}"
        )


def refuse_launcher(args: Any) -> None:
    """Raise ValueError if a launcher has started several processes, and the trainer is not ours."""
    if args.world_size > 1:
        raise ValueError(
            "a model under L2L runs in no DistributedDataParallel, in which this Trainer would put it (got a launcher "
            f"with {args.world_size} processes); use L2LTrainer, or one process, which uses all visible devices: "
            f"{_command()}"
        )


def devices_of(args: Any, asked: Any) -> list[torch.device]:
    """The devices on which the layers of a trainer's model run in turn: those that are `asked` for, by default all
    that are visible; on the CPU, that one alone.

    Raises:
        ValueError: if this machine has fewer, or the first is not the Trainer's.
    """
    first: torch.device = args.device
    found, name = parsed_devices(asked, argument("devices")), argument("devices")
    if first.type == "cpu":  # the option changes nothing there
        return [first]
    count = stream.device_count(first)
    # Of several ranks of a host, each has every so-manyth device, from its own on.
    share = range(count)
    if args.world_size > 1:
        share = range(first.index or 0, count, processes_of_this_host(args.world_size))
    if isinstance(found, int) and args.world_size > 1 and found > len(share):
        raise ValueError(
            f"{name} must be at most what a rank has (got {asked!r}, and {first} is of a rank with {len(share)} of "
            f"{count} visible ones); leave it out for all of its share"
        )
    if isinstance(found, int):
        indexes = list(share[:found] if args.world_size > 1 else range(found))
    else:
        indexes = list(share) if found is None else found
    if max(indexes) >= count:
        raise ValueError(
            f"{name} must name devices that this machine has (got {asked!r}, and {count} of type {first.type} "
            f"{'is' if count == 1 else 'are'} visible); leave it out for all of them"
        )
    if indexes[0] != (first.index or 0):
        raise ValueError(
            f"{name} must begin with the device of the Trainer, to which batches go (got {asked!r}, and it is "
            f"{first}); choose others with CUDA_VISIBLE_DEVICES"
        )
    return execution_devices([torch.device(first.type, index) for index in indexes])


def weights_travel(config: L2LConfig) -> bool:
    """Whether layers compute on a device that their weights have to be copied to."""
    return config.resident != "all" and not stream.shares_host_memory(execution_device(config.device))


def warn_of_accumulation(args: Any, config: L2LConfig, reason: str) -> None:
    """Warn if training arguments accumulate gradients over several batches, which run one by one for this reason, and
    weights travel for each of them."""
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if steps == 1 or not weights_travel(config):
        return
    warnings.warn(
        f"batch {batch} x accumulation {steps} moves the weights {2 * steps} times per step: {reason}. "
        f"per_device_train_batch_size={batch * steps}, ubatch_size={config.ubatch_size or batch}, "
        "gradient_accumulation_steps=1 moves them twice, and trains with the loss of all rows at once",
        stacklevel=stacklevel_of_the_caller(),
    )


T = TypeVar("T")
_SHOW_AFTER_S = 5


class _Bar(tqdm):  # type: ignore[misc]  # tqdm ships no types
    """tqdm without the thread that redraws bars which have not moved for long."""

    monitor_interval = 0


def with_progress_bar(units: Sequence[T], what: str) -> Iterator[T]:
    """Go through units of work, with a bar called `what` once it has taken more than 5 seconds."""
    yield from _Bar(units, desc=what, delay=_SHOW_AFTER_S, leave=False)


def read_rates_of_state(scheduler: Any) -> None:
    """Make a scheduler of Adafactor's own rates find updated groups by their state.

    transformers finds them by their gradients, which are gone after a step here.
    """
    if type(scheduler) is AdafactorSchedule:
        scheduler.__class__ = _RatesOfState


class _RatesOfState(AdafactorSchedule):  # type: ignore[misc]  # transformers ships no types
    """Adafactor's own rates of groups that have been updated."""

    def get_lr(self) -> list[Any]:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        for group in groups:
            group["params"][0].detach()  # waits for its update, which writes its state
        updated = [(group, optimizer.state.get(group["params"][0])) for group in groups]
        return [optimizer._get_lr(group, state) for group, state in updated if state] or list(self.base_lrs)
