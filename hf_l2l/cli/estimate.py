"""`hf-l2l estimate MODEL`: the memory of a training, and with figures of a machine its time, before the run."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import GOOD, Command, add_json, flag, quiet
from hf_l2l.cli.printed.estimate import Told, show

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainingArguments

    from hf_l2l.plan.run_shapes import RunShapes
    from hf_l2l.probe.figures import HardwareFigures
    from hf_l2l.sizing.arguments import Asked
    from hf_l2l.sizing.ranks import Launch

ROWS = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
OF_TRAINER = (ROWS, STEPS, "optim", "bf16")
NUMBERS = {"params": "8e9", "layers": "32", "hidden": "4096", "vocab": "128256"}
"""Flags that describe a decoder without a configuration, each with an example."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder with a config.json, the path of one, or a name on the Hub; or none, with --params, --layers, "
        "--hidden and --vocab",
    )
    parser.add_argument("--class", dest="model_class", metavar="CLASS", help="the class of the model in transformers")
    parser.add_argument("--trust-remote-code", action="store_true", help="let code that comes with the model run")
    for name, example in NUMBERS.items():
        parser.add_argument(f"--{name}", type=_number, metavar="N", help=f"{name} of a decoder, such as {example}")
    _add(parser, ROWS, type=int, default=8, metavar="ROWS", help="rows of the device batch (default: 8)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a row; without it, at most 512")
    parser.add_argument(
        "--device-type", metavar="TYPE", help="the type of the device that will train it, such as cuda"
    )
    parser.add_argument(
        *("--budget", "--device_memory_budget", "--device-memory-budget"),
        metavar="SIZE",
        help="find the fastest options for so much device memory, such as 24GiB",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="whether the model fits so much host memory, such as 64GiB, and the largest one that does",
    )
    parser.add_argument(
        "--probe", action="store_true", help="measure this machine, and a layer of the model, for the times"
    )
    parser.add_argument(
        "--figures", metavar="FILE", help="the machine's figures, as `hf-l2l env --probe --json` prints"
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help="assumed figures of a card and its host: t4, v100, a100, h100, h200, rtx3090, rtx4090, rtx5090; without "
        "--budget, nine tenths of its memory",
    )
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="devices that run the layers in turn (default: 1)"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes that a launcher starts on each host (default: 1)"
    )
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts that train together (default: 1)")
    parser.add_argument(
        "--network", type=float, metavar="N", help="Gbit/s that each of several hosts sends, and receives meanwhile"
    )
    parser.add_argument(
        "--disk", metavar="FOLDER", help="measure the disk of this folder, for state or real-time checkpoints there"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the device memory by name, beside that of plain training")
    add_json(parser)
    _add(parser, "optim", metavar="NAME", help="the optimizer (default: that of the Trainer)")
    _add(parser, "bf16", nargs="?", const=True, type=_truth, help="the model is called under autocast in bfloat16")
    _add(parser, STEPS, type=int, default=1, metavar="N", help="batches of an optimizer step (default: 1)")
    group = parser.add_argument_group("options of the training, as the Trainer's arguments call them")
    for name, (where, text) in _options().items():
        _add(group, where, dest=f"config_{name}", metavar="VALUE", help=text, nargs="+" if name in _LISTS else None)


_LISTS = ("layer_classes",)
_OWN = ("device", "trace", "device_memory_budget")
"""Options that have no flag here, or one of its own."""


def _add(parser: Any, name: str, **more: Any) -> None:
    """A flag that may be written with underscores, as the Trainer's, or dashes."""
    names = dict.fromkeys((f"--{name}", flag(name)))
    parser.add_argument(*names, **more)


def _options() -> dict[str, tuple[str, str]]:
    """The options of `L2LConfig` by name: what the Trainer's arguments call them, and what they are."""
    from dataclasses import fields

    from hf_l2l.config import L2LConfig
    from hf_l2l.option_names import argument

    texts = {each.name: each.metadata["help"] for each in fields(L2LConfig) if each.name not in _OWN}
    return {name: (argument(name), text.split(". ")[0].replace("%", "%%") + ".") for name, text in texts.items()}


def _number(text: str) -> int:
    try:
        return int(float(text))
    except (OverflowError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"must be a finite number, such as 8e9 or 32 (got {text!r})") from error


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be True or False (got {text!r}), or be given alone for True")
    return text.lower() == "true"


def _value(text: str) -> Any:
    """The value of an option: a word, a number, True, False or None."""
    known = {"none": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()] if text != "none" else text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _arguments(options: argparse.Namespace) -> TrainingArguments:
    """The Trainer's arguments that the flags stand for."""
    import torch
    from transformers.training_args import OptimizerNames

    from hf_l2l.hf.training_args import L2LTrainingArguments
    from hf_l2l.option_names import argument

    given: dict[str, Any] = {
        argument(name.removeprefix("config_")): [*value] if isinstance(value, list) else _value(value)
        for name, value in vars(options).items()
        if name.startswith("config_") and value is not None
    }
    for name in OF_TRAINER:
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    known = [str(each.value) for each in OptimizerNames]
    if given.get("optim", known[0]) not in known:
        near = [name for name in known if name.startswith(given["optim"])][:3]
        near = near or get_close_matches(given["optim"], known) or ["adamw_torch", "sgd"]
        raise ValueError(
            f"--optim must be the name of an optimizer of the Trainer (got {given['optim']!r}); use "
            f"{' or '.join(near)}"
        )
    if given.get("bf16") and not torch.accelerator.is_available():
        given["use_cpu"] = True  # transformers refuses bf16 where no accelerator is there; another one will train it
    # What it clips changes no bytes, and with the default there could be no eager update. The budget is asked for
    # apart.
    fixed: dict[str, Any] = {"max_grad_norm": 0, "report_to": "none", "device_memory_budget": "off"}
    return L2LTrainingArguments(output_dir=os.devnull, **fixed, **given)


def _model(options: argparse.Namespace) -> nn.Module:
    numbers = {name: getattr(options, name) for name in NUMBERS}
    given = [name for name, value in numbers.items() if value is not None]
    if (options.model is None) != (len(given) == len(NUMBERS)) or (options.model is not None and given):
        missing = ", ".join(f"--{name}" for name in NUMBERS if name not in given)
        got = options.model or (", ".join(f"--{name}" for name in given) or "neither")
        raise ValueError(
            f"a model is given by MODEL, or by --params, --layers, --hidden and --vocab together (got {got}"
            f"{f', without {missing}' if options.model is None and given else ''}); give one of them"
        )
    if options.model is None:
        from hf_l2l.sizing.decoder import decoder_of

        return decoder_of(**numbers)
    from hf_l2l.model_source import load_shapes

    return load_shapes(options.model, model_class=options.model_class, trust_remote_code=options.trust_remote_code)


def _device(kind: str | None) -> torch.device | None:
    import torch

    from hf_l2l.runtime import stream

    try:
        device = None if kind is None else torch.device(kind)
    except RuntimeError as error:
        raise ValueError(f"--device-type must be a type of device that torch has (got {kind!r}); use cuda") from error
    if device is not None and stream.shares_host_memory(device):
        raise ValueError(
            f"--device-type must be a device with memory of its own (got {kind!r}, where all memory is the host's); "
            "use cuda"
        )
    return device


def _figures(options: argparse.Namespace) -> HardwareFigures | None:
    """The machine's figures, if they were asked for."""
    from hf_l2l.probe.cards import card_named
    from hf_l2l.probe.figures import HardwareFigures
    from hf_l2l.probe.rates import probe

    given = [name for name in ("card", "figures", "probe") if getattr(options, name)]
    if len(given) > 1:
        raise ValueError(
            f"--card, --figures and --probe each give the machine's figures (got {' and '.join(map(flag, given))}); "
            "leave out all but one"
        )
    if options.card:
        return card_named(options.card)
    if options.figures:
        try:
            text = Path(options.figures).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--figures must be a file that can be read (got {options.figures!r}: {error.strerror}); write one "
                "with: hf-l2l env --probe --json > FILE"
            ) from error
        return HardwareFigures.from_json(text)
    return probe() if options.probe else None


def _budget(options: argparse.Namespace, figures: HardwareFigures | None) -> int | None:
    """Bytes of the device for which options are chosen: those that were given, or of a card what the Trainer takes."""
    from hf_l2l.plan.planner import parse_budget

    if options.budget is None:
        memory = figures.device_memory_bytes if options.card and figures is not None else None
        return None if memory is None else memory * 9 // 10
    budget = parse_budget(options.budget, "--budget")
    if figures is None:
        raise ValueError(
            "--budget finds the fastest options, for which the machine's figures are needed (got none of --card, "
            "--figures and --probe); give one of them"
        )
    return budget


def _device_memory(device: torch.device | None, figures: HardwareFigures | None) -> int | None:
    """Bytes of the device of the figures, where this machine has none whose memory is known."""
    from hf_l2l.config import L2LConfig
    from hf_l2l.plan.run_shapes import device_to_train_on, known_memory

    here = known_memory([device or device_to_train_on(L2LConfig())])
    return here if here is not None or figures is None else figures.device_memory_bytes


def _launch(options: argparse.Namespace) -> Launch:
    """The processes that will train the model."""
    from hf_l2l.sizing.ranks import Launch

    for name in (ROWS, STEPS, "devices", "ranks", "hosts"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name} must be at least 1 (got {getattr(options, name)}); leave it out for the default"
            )
    network = options.network
    if network is None:
        return Launch(options.ranks, options.hosts, options.devices)
    if not 0 < network < math.inf:
        raise ValueError(f"--network must be Gbit/s above 0 (got {network:g}); give what one host sends, such as 100")
    if options.hosts == 1 or not (options.card or options.figures or options.probe):
        got = "--hosts 1" if options.hosts == 1 else "none of --card, --figures and --probe"
        raise ValueError(
            "--network is for the time of a step of several hosts, for which the machine's figures are needed (got "
            f"{got}); give --hosts and --figures, or leave it out"
        )
    return Launch(options.ranks, options.hosts, options.devices, 1e9 / 8 * network)


def _shapes(
    options: argparse.Namespace,
    launch: Launch,
    asked: Asked,
    model: nn.Module,
    memory: int | None,
    device: Any,
    chunk_memory: int | None = None,
) -> RunShapes:
    """What is known of the model and the batch of one process, on a device with so much `memory`; `chunk_memory` is
    that for chunks of logits, if it is another."""
    from hf_l2l.plan.run_shapes import RunShapes
    from hf_l2l.shapes.inputs import example_inputs

    given = {name.removeprefix("config_") for name, value in vars(options).items() if value is not None}
    several = launch.count > 1
    if several:  # ranks never merge batches, have one batch for all of their devices, and keep no masters there
        given |= {"resident", "resident_layers"}
    rows = asked.rows if several else asked.rows * asked.batches * launch.devices
    return RunShapes(
        model,
        asked.config,
        example_inputs(model, rows, options.tokens),
        optimizer=asked.optimizer,
        device=device,
        device_memory=memory,
        chunk_memory=chunk_memory,
        batches=1 if several else asked.batches,
        accumulates=getattr(options, STEPS) > 1 if several else asked.accumulates,
        autocast=asked.autocast,
        devices=launch.devices,
        ranks_add=launch.ranks if launch.may_add_on_devices(asked.config) else 0,
        given=given,
    )


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.option_names import options_of_the_trainer
    from hf_l2l.plan.estimate import estimate_of
    from hf_l2l.plan.planner import make_plan, parse_budget, run_within, time_of
    from hf_l2l.probe.cards import ASSUMED_DISK, assumed_sentence
    from hf_l2l.sizing.arguments import asked_by
    from hf_l2l.sizing.capacity import largest_models
    from hf_l2l.sizing.disk import disk_sentences, measured_rates
    from hf_l2l.sizing.fit import fits
    from hf_l2l.sizing.machine import rates_of
    from hf_l2l.sizing.ranks import sentences, together
    from hf_l2l.sizing.several import several_devices

    quiet()
    host_memory = None if options.host_memory is None else parse_budget(options.host_memory, "--host-memory")
    with options_of_the_trainer():
        launch, model = _launch(options), _model(options)
        asked = asked_by(_arguments(options), model)
        launch.refuse(asked.config)
        if options.tokens is not None and options.tokens < 1:
            raise ValueError(f"--tokens must be at least 1 (got {options.tokens}); leave it out for at most 512")
        figures, device = _figures(options), _device(options.device_type)
        budget = _budget(options, figures)
        memory = budget or _device_memory(device, figures)
        run_of = partial(_shapes, options, launch, asked, model, memory, device)
        run = run_of() if budget is None else run_within(run_of, budget)
        disk = None if options.disk is None else measured_rates(options.disk)
        rates = None if figures is None else rates_of(figures, run, asked.config, measures=options.probe)
        plan = None if budget is None or rates is None else make_plan(run, budget, rates)
        config = asked.config if plan is None else plan.config
        found = estimate_of(run, config)
        notes, fit = [*asked.notes, *found.notes], None
        if host_memory is not None:
            found = replace(found, largest=largest_models(run, config, host_memory))
            if launch.count == 1:
                of_disk = disk or (ASSUMED_DISK if options.card else None)
                fit = fits(run, asked.config, host_memory, budget, figures, disk=of_disk, plan=plan)
        batches = getattr(options, STEPS) if run.accumulates else 1
        time = None if rates is None else time_of(run, config, rates, batches=batches)
        plan = plan if plan is None or time is None else replace(plan, time=time)
        hidden = None if rates is None else run.tokens_that_hide(config, rates)
        ranks = None
        if launch.count > 1:
            assert found.report is not None
            dram = None if figures is None else figures.dram
            ranks = together(run, config, launch, rates, dram, batches, found.report["host"])
            notes += sentences(ranks, launch)
        notes += disk_sentences(found, disk, None if time is None else time.seconds)
        if launch.count == 1 and options.devices > 1 and rates is not None:
            notes += several_devices(run, config, rates)
        if options.card and figures is not None:
            notes.append(assumed_sentence(figures))
        show(options, Told(replace(found, notes=tuple(notes)), time, plan, hidden, ranks, fit))
    return GOOD


COMMAND = Command(
    "estimate",
    "the memory of a training before the run, and with figures of a machine its time and the best options",
    "estimate Qwen/Qwen2.5-7B --tokens 2048 --cmp bf16 --card rtx4090 --host-memory 64GiB",
    _add_flags,
    _run,
)
