"""`hf-l2l estimate MODEL`: the memory of a training, and with figures of a machine its time, before the run."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import GOOD, Command, add_json, count_text, flag, print_json, quiet

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainingArguments

    from hf_l2l.plan.estimate import Estimate
    from hf_l2l.plan.planner import Plan
    from hf_l2l.plan.run_shapes import RunShapes
    from hf_l2l.plan.step_time import Rates, StepTime

ROWS = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
OF_TRAINER = (ROWS, STEPS, "optim")
NUMBERS = ("params", "layers", "hidden", "vocab")


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
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=_number, metavar="N", help=f"{name} of a decoder, such as 8e9 or 32")
    _add(parser, ROWS, type=int, default=8, metavar="ROWS", help="rows of the device batch (default: 8)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a row; without it, at most 512")
    parser.add_argument(
        "--device-type", metavar="TYPE", help="the type of the device that will train it, such as cuda"
    )
    parser.add_argument(
        "--budget",
        "--device_memory_budget",
        metavar="SIZE",
        help="find the fastest options for so much device memory, such as 24GiB",
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="find the largest model that so much host memory holds, such as 64GiB"
    )
    parser.add_argument("--probe", action="store_true", help="measure this machine for a few seconds, for the times")
    parser.add_argument(
        "--figures", metavar="FILE", help="the machine's figures, as `hf-l2l env --probe --json` prints"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the device memory by name, beside that of plain training")
    add_json(parser)
    _add(parser, "optim", metavar="NAME", help="the optimizer (default: that of the Trainer)")
    _add(parser, STEPS, type=int, default=1, metavar="N", help="batches of an optimizer step (default: 1)")
    group = parser.add_argument_group("options of the training, as the Trainer's arguments call them")
    for name, (where, text) in _options().items():
        _add(group, where, dest=f"config_{name}", metavar="VALUE", help=text, nargs="+" if name in _LISTS else None)


_LISTS = ("layer_classes",)


def _add(parser: Any, name: str, **more: Any) -> None:
    """A flag that may be written with underscores, as the Trainer's, or dashes."""
    names = dict.fromkeys((f"--{name}", flag(name)))
    parser.add_argument(*names, **more)


def _options() -> dict[str, tuple[str, str]]:
    """The options of `L2LConfig` by name: what the Trainer's arguments call them, and what they are."""
    from dataclasses import fields

    from hf_l2l.config import L2LConfig, argument

    texts = {each.name: each.metadata["help"] for each in fields(L2LConfig) if each.name not in _APART}
    return {name: (argument(name), text.split(". ")[0].replace("%", "%%") + ".") for name, text in texts.items()}


_APART = ("device", "trace", "device_memory_budget")
"""Options that no flag, or another one, is for."""


def _number(text: str) -> int:
    try:
        return int(float(text))
    except OverflowError as error:
        raise ValueError(f"a number must be finite (got {text!r})") from error


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
    from hf_l2l.config import argument
    from hf_l2l.hf.training_args import L2LTrainingArguments

    given: dict[str, Any] = {
        argument(name.removeprefix("config_")): [*value] if isinstance(value, list) else _value(value)
        for name, value in vars(options).items()
        if name.startswith("config_") and value is not None
    }
    for name in OF_TRAINER:
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    # What it clips changes no bytes, and with the default there could be no eager update.
    return L2LTrainingArguments(output_dir=os.devnull, max_grad_norm=0, report_to="none", **given)


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
        return _of_numbers(**numbers)
    from hf_l2l.model_source import load_shapes

    return load_shapes(options.model, model_class=options.model_class, trust_remote_code=options.trust_remote_code)


def _of_numbers(params: int, layers: int, hidden: int, vocab: int) -> nn.Module:
    """A decoder with gated layers, of so many parameters in all."""
    import torch
    import transformers

    if min(params, layers, hidden, vocab) < 1:
        raise ValueError(
            "--params, --layers, --hidden and --vocab must be at least 1 (got "
            f"{params}, {layers}, {hidden}, {vocab}); check the numbers"
        )
    inner = (params - 2 * vocab * hidden - 4 * layers * hidden**2) // (3 * layers * hidden)
    if inner < 1 or hidden % 64:
        raise ValueError(
            "--params must be more than embedding, head and attention take, and --hidden a multiple of 64 (got "
            f"--params {params} --layers {layers} --hidden {hidden} --vocab {vocab}); check the numbers"
        )
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=inner,
        vocab_size=vocab,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


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


def _rates(options: argparse.Namespace, run: RunShapes) -> Rates | None:
    from hf_l2l.plan.step_time import Rates
    from hf_l2l.probe.figures import HardwareFigures
    from hf_l2l.probe.rates import probe

    if options.figures and options.probe:
        raise ValueError("--figures and --probe both give the machine's figures (got both); leave out one of them")
    if options.figures:
        figures = HardwareFigures.from_json(Path(options.figures).read_text(encoding="utf-8"))
    elif options.probe:
        figures = probe()
    else:
        return None
    if figures.link_up is None:
        raise ValueError(
            f"times are of a machine whose device has memory of its own (got the figures of {figures.device_name}, "
            f"which shares that of the host, for {run.device.type}); give those of the machine that will train it"
        )
    return Rates.of(figures, run.dtype)


def _host_memory(text: str) -> int:
    from hf_l2l.plan.planner import parse_budget

    try:
        return parse_budget(text)
    except ValueError as error:
        raise ValueError(
            f"--host-memory must be a size with its unit, such as 64GiB (got {text!r}); give one, or leave it out"
        ) from error


def _run(options: argparse.Namespace) -> int:
    from hf_l2l.config import options_of_the_trainer
    from hf_l2l.plan.estimate import estimate_of
    from hf_l2l.plan.planner import make_plan, parse_budget, time_of
    from hf_l2l.plan.run_shapes import RunShapes
    from hf_l2l.shapes.inputs import example_inputs
    from hf_l2l.sizing.arguments import asked_by
    from hf_l2l.sizing.capacity import largest_models

    quiet()
    budget = None if options.budget is None else parse_budget(options.budget)
    host_memory = None if options.host_memory is None else _host_memory(options.host_memory)
    with options_of_the_trainer():
        for name in (ROWS, STEPS):
            if getattr(options, name) < 1:
                raise ValueError(
                    f"--{name} must be at least 1 (got {getattr(options, name)}); leave it out for the default"
                )
        model = _model(options)
        asked = asked_by(_arguments(options), model)
        config, rows = asked.config, asked.rows
        if options.tokens is not None and options.tokens < 1:
            raise ValueError(f"--tokens must be at least 1 (got {options.tokens}); leave it out for at most 512")
        run = RunShapes(
            model,
            config,
            example_inputs(model, rows, options.tokens),
            optimizer=asked.optimizer,
            device=_device(options.device_type),
            device_memory=budget,
            given={name.removeprefix("config_") for name, value in vars(options).items() if value is not None},
        )
        rates = _rates(options, run)
        if budget is not None and rates is None:
            raise ValueError(
                "--budget finds the fastest options, for which the machine's figures are needed (got neither --probe "
                "nor --figures); give one of them"
            )
        plan = None if budget is None or rates is None else make_plan(run, budget, rates)
        config = config if plan is None else plan.config
        found = estimate_of(run, config)
        found = replace(found, notes=(*asked.notes, *found.notes))
        if host_memory is not None:
            found = replace(found, largest=largest_models(run, config, host_memory))
        time = None if rates is None else time_of(run, config, rates)
        hidden = None if rates is None else run.tokens_that_hide(config, rates)
        _show(options, found, time, plan, hidden)
    return GOOD


def _show(
    options: argparse.Namespace,
    found: Estimate,
    time: StepTime | None,
    plan: Plan | None,
    hidden: dict[str, int] | None,
) -> None:
    from hf_l2l.runtime.tensors import size_text

    assert found.report is not None
    if options.plot:
        _plot(options.plot, found)
    if options.json:
        print_json(
            {
                "model": options.model,
                "rows": found.rows,
                "device": found.report["device"],
                "host": found.report["host"],
                "phase": found.phase,
                "notes": found.notes,
                "phases": {
                    who: {phase: size._asdict() for phase, size in phases.items()}
                    for who, phases in found.phases.items()
                },
                "plain": found.plain,
                "plain_checkpointing": found.plain_checkpointing,
                "chosen": None if plan is None else plan.chosen,
                "seconds_per_step": None if time is None else time.seconds,
                "bound": None if time is None else time.bound,
                "busy": None if time is None else time.busy,
                "tokens_that_hide": hidden,
                "largest": {name: vars(each) for name, each in found.largest.items()} or None,
            }
        )
        return
    print(found)
    print(
        f"Plain training in fp32 would need {size_text(found.plain)}, {size_text(found.plain_checkpointing)} with "
        "activation checkpointing, all on the device."
    )
    _print_phases(found)
    for name, each in found.largest.items():
        size = f"{count_text(each.parameters)} parameters in {each.layers} layers" if each.layers else "no layer fits"
        print(f"The largest such model with {name}: {size}.")
    if plan is not None:
        print(plan)
    elif time is not None:
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.busy.items())
        print(f"A step takes {time.seconds:.3g} s and is bound by {time.bound} (busy: {busy}).")
    if hidden is not None and any(hidden.values()):
        texts = ", ".join(f"{what} from {count:,} tokens" for what, count in hidden.items() if count)
        print(f"The layers compute as long as what runs beside them takes: {texts} per step.")


_WHO = {"l2l": "L2L", "plain": "plain", "plain_checkpointing": "plain, checkpointing"}


def _print_phases(found: Estimate) -> None:
    """A table of what is held in each phase, and of whom."""
    from hf_l2l.runtime.tensors import size_text

    print(f"{'The most in each phase':<32}{''.join(f'{phase:>12}' for phase in found.phases['l2l'])}")
    for who, phases in found.phases.items():
        for where in ("host", "device"):
            sizes = "".join(f"{size_text(getattr(size, where)):>12}" for size in phases.values())
            print(f"{_WHO[who] + ', ' + where:<32}{sizes}")
    mapped = max(size.files for size in found.phases["l2l"].values())
    print(f"Besides, up to {size_text(mapped)} of the checkpoint's files are mapped, which the system can take back.")


def _plot(file: str, found: Estimate) -> None:
    """A bar of the device memory by name, and those of plain training."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"--plot needs the package matplotlib (got {file!r}, and it is not installed); install it with: pip "
            "install matplotlib, or leave --plot out"
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert found.report is not None
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    below = 0.0
    for name, size in found.report["device"].items():
        if name != "total" and size["peak"]:
            axes.bar("L2L", size["peak"] / 2**30, bottom=below, label=name)
            below += size["peak"] / 2**30
    axes.bar("plain, checkpointing", found.plain_checkpointing / 2**30, color="lightgray")
    axes.bar("plain", found.plain / 2**30, color="gray")
    axes.set_ylabel("device memory at the peak (GiB)")
    axes.legend(fontsize="small")
    figure.savefig(file)
    pyplot.close(figure)


COMMAND = Command(
    "estimate",
    "the memory of a training before the run, and with figures of a machine its time and the best options",
    "estimate meta-llama/Llama-3.1-8B --per_device_train_batch_size 8 --tokens 4096 --cmp bf16",
    _add_flags,
    _run,
)
