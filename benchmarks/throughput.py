"""Tokens per second and peak memory of a training: `Trainer` with the model on the device, `L2LTrainer`, and FSDP2.

Models are made from a configuration with random weights, data are random tokens in memory: nothing is downloaded. An
optimizer step is one device batch for L2L, cut into micro-batches; plain `Trainer` accumulates over batches of that
size. What each mode is, `MODES` says.

The first steps are not counted, nor is the last one, in which clocks are read and a trace is written. At the end of
each step the device is waited for, on both sides, and an update in the background is not: it belongs to the time of
the next step, as in training. Peak memory of the device is its own counter; that of the host is what the process has
held at most, page-locked memory included.

    python benchmarks/throughput.py --model llama-1b [--modes trainer cmp fsdp2] [--tokens 8192 32768 65536]
        [--steps 10] [--warmup 3] [--ubatch-size N] [--stash host] [--out FILE] [--rows FILE] [--traces FILE]
    python benchmarks/throughput.py --tiny    # seconds, on any machine

A document with a markdown table, with --out into that file, too, after every row. With --rows, every row is also a
line of JSON in that file. `gpu.py` measures cases of this script where a GPU is there for minutes.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from torch import nn

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment, gpu_rows
from benchmarks.gpu_report import NO_TIME, case_line, case_table
from benchmarks.throughput_fsdp import run_fsdp
from benchmarks.throughput_models import (
    MODELS,
    UBATCH_TOKENS,
    RandomTokens,
    flop_per_step,
    is_decoder,
    on_meta,
    peak_flop_per_s,
    quickly_made,
    row_of,
    ubatch_of,
)
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.budget.trainer_plan import autocast_of
from hf_l2l.devices import execution_device
from hf_l2l.hf.training_args import l2l_config
from hf_l2l.memory.host_limits import available_host_bytes, peak_process_bytes, process_bytes
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.plan.estimate import estimate_of, report_of
from hf_l2l.plan.phases import phases_of_l2l
from hf_l2l.plan.planner import time_of
from hf_l2l.plan.run_shapes import RunShapes
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.report.timeline import ROWS, Timeline
from hf_l2l.report.trace_file import TraceFile
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import size_text
from hf_l2l.sizing.machine import rates_of

TRACE_BYTES = 15 * 2**20
"""Of the zip file with traces, so that it is easy to send."""
FAILURES = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError),
    *(AssertionError, ArithmeticError, ImportError, OSError),
)
"""Errors of a case after which the others are still of use; a MemoryError has words of its own."""


class Mode(NamedTuple):
    """What trains."""

    title: str
    l2l: dict[str, Any] | None = None
    """The options of an `L2LTrainer`; None for another trainer."""
    checkpoints: bool = True
    """Whether another trainer recomputes activations."""
    bf16_weights: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether it is cross mixed precision."""
        return self.l2l is not None and "cmp" in self.l2l


CMP: dict[str, Any] = {"eps_update": "deferred", "cmp": "bf16"}
MODES = {
    "trainer": Mode("`Trainer`, activation checkpointing, bf16 autocast of fp32 weights"),
    "whole": Mode("`Trainer` without checkpointing, bf16 autocast of fp32 weights", checkpoints=False),
    "bf16-weights": Mode("`Trainer`, activation checkpointing, bf16 weights and moments", bf16_weights=True),
    "serial": Mode("`L2LTrainer`, serial update", {"eps_update": "serial"}),
    "deferred": Mode("`L2LTrainer`, deferred update", {"eps_update": "deferred"}),
    "eager": Mode("`L2LTrainer`, eager update, which cannot clip", {"eps_update": "eager"}),
    "cmp": Mode("`L2LTrainer`, cmp", CMP),
    "shell": Mode("`L2LTrainer`, cmp, resident shell", {**CMP, "l2l_resident": "shell"}),
    "planned": Mode("`L2LTrainer`, cmp, planned for the device", {**CMP, "device_memory_budget": "auto"}),
    "fsdp2": Mode("FSDP2 on one rank, `CPUOffloadPolicy`, activation checkpointing"),
}
"""By name. Without CUDA, nothing is autocast."""

HOST_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"grad_dtype": "16bit"},
    {"grad_dtype": "16bit", "host_copies": "per_sweep"},
    {"grad_dtype": "16bit", "moment_dtype": "bf16"},
    {"grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"},
)
"""For cross mixed precision: 18, 16, 14, 12 and 10 bytes per parameter. The first one that fits the host is taken."""
HOST_RESERVE = 0.08
"""The share of the available host memory that is left to Python, the driver and the rest."""

# transformers 5.23 renamed it.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def clipping_of(mode: str) -> float:
    """Its max_grad_norm."""
    return 0.0 if mode == "eager" else 1.0


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """When each step of a training ended, on the device and on the host; what steps waited for; what memory was in
    use; and the trace of the last one."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.trace: Path | None = None
        self.averages: Averages | None = None
        """Of the measured steps, of an `L2LTrainer`."""
        self.asked: subprocess.Popen[str] | None = None
        """For the clocks, in the step after those that are measured."""
        self.least_available = 0
        """Bytes that the host had left, as seen at the ends of steps."""
        self.ends: list[float] = []
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Peaks are those of this training."""
        self.ends, self.least_available = [], psutil.virtual_memory().available
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        environment.forget_host_peak()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the device, and look at the clock."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        self.least_available = min(self.least_available, psutil.virtual_memory().available)
        eps = getattr(self.trainer, "eps", None)
        if len(self.ends) == self.options.warmup and eps is not None:
            eps.timeline.averages()  # forgets those before
        elif len(self.ends) == self.options.warmup + self.options.steps:
            self.asked = environment.asked_for_clocks()
            self.averages = None if eps is None else eps.timeline.averages()
            if self.trace is not None and eps is not None:
                trace_from_now(eps.timeline, self.trace)

    def figures(self) -> dict[str, Any]:
        """What was measured of the training that has ended."""
        ends = self.ends[self.options.warmup - 1 : self.options.warmup + self.options.steps]
        seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        waits = ("upload_s", "download_s", "eps_s", "bound")
        return {
            **{"mean_s": sum(seconds) / len(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)},
            **{name: None if self.averages is None else getattr(self.averages, name) for name in waits},
            "device_bytes": torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else None,
            **{"host_bytes": peak_process_bytes(), "least_available_host_bytes": self.least_available},
            "clocks": environment.clocks(self.asked),
        }


def trace_from_now(timeline: Timeline, file: Path) -> None:
    """Write to `file` what `timeline` records from now on, until the model is detached.

    `l2l_trace` would write all steps, and the time of writing would be measured with them.
    """
    timeline.collect()
    timeline._trace = TraceFile(file, f"hf_l2l on {timeline.device}", ROWS)


def add_to_zip(traces: Path, file: Path, name: str) -> None:
    """Add the trace `file` to the zip file `traces` as `name`, unless that would become too large."""
    before = traces.stat().st_size if traces.exists() else 0
    if file.exists() and before + file.stat().st_size // 8 <= TRACE_BYTES:  # a trace shrinks to less than an eighth
        with zipfile.ZipFile(traces, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            packed.write(file, name)


def trainer_for(
    model: nn.Module,
    name: str,
    mode: str,
    tokens: Sequence[int],
    options: Namespace,
    folder: str,
    steps: int,
    setting: dict[str, Any],
) -> transformers.Trainer:
    """The trainer of a case, for steps of the first number of `tokens`; `setting` is one of `HOST_SETTINGS`."""
    kind, rows, ubatch = MODES[mode], tokens[0] // row_of(name, options), ubatch_of(name, options)
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "max_grad_norm": clipping_of(mode),
        "optim": "adamw_torch_fused",
        "bf16": torch.cuda.is_available() and not (kind.is_mixed or kind.bf16_weights),
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    data = RandomTokens(model, max(tokens) // row_of(name, options) * steps, row_of(name, options))
    if kind.l2l is None:
        batch = {"per_device_train_batch_size": ubatch, "gradient_accumulation_steps": rows // ubatch}
        args = transformers.TrainingArguments(**common, **batch, **{CHECKPOINTING: kind.checkpoints})
    else:
        l2l = {f"l2l_{key}": value for key, value in setting.items()}
        l2l |= {"per_device_train_batch_size": rows, "device_memory_budget": "off"}
        if mode != "planned":  # what is set would bind the plan
            l2l |= {"ubatch_size": ubatch, "stash": options.stash}
        args = L2LTrainingArguments(**{**common, **l2l, **kind.l2l})
    made = L2LTrainer if kind.l2l is not None else transformers.Trainer
    trainer = made(model=model.bfloat16() if kind.bf16_weights else model, args=args, train_dataset=data)
    if not data.is_decoder:
        # The classifier takes num_items_in_batch and does not divide by it, so that Trainer would add the losses of
        # the batches that it accumulates. May go with https://github.com/huggingface/transformers/issues/47688.
        trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def config_of(mode: str, options: Namespace, setting: dict[str, Any]) -> L2LConfig:
    """The options of an `L2LTrainer`, as far as they decide what the host holds."""
    names = {name.removeprefix("l2l_"): value for name, value in (MODES[mode].l2l or {}).items()}
    return L2LConfig(**{**names, "stash": options.stash, **setting})


def host_setting(
    model: nn.Module, mode: str, options: Namespace, device: torch.device | None = None
) -> tuple[dict[str, Any] | None, int]:
    """How the host keeps what it keeps, and the bytes that it needs; no setting if none fits. `device` is that of
    another machine, if it is not of this one."""
    usable = (1 - HOST_RESERVE) * available_host_bytes()
    kind, count = MODES[mode], sum(p.numel() for p in model.parameters())
    if kind.l2l is None:
        need = count * (16 if mode == "fsdp2" else 4)
        return ({} if need <= usable else None), need
    need = 0
    for setting in HOST_SETTINGS if kind.is_mixed else HOST_SETTINGS[:1]:
        found = estimate(model, config_of(mode, options, setting), device=device)
        need = found.host_bytes + found.widened
        if need <= usable:
            return setting, need
    return None, need


def seconds_needed(model: nn.Module, mode: str, tokens: int, options: Namespace, setting: dict[str, Any]) -> float:
    """About what a case takes: making and moving the weights, the steps at 300 TFLOP/s, the updates on the host.

    An update with bf16 moments rounds them stochastically, which takes about 31 ns of a core per parameter.
    """
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    update_s = 0.0 if MODES[mode].l2l is None and mode != "fsdp2" else 2.1 if "moment_dtype" in setting else 0.8
    return 4 + 6 * billions + (options.warmup + options.steps + 1) * billions * (update_s + tokens * 8e9 / 300e12)


def refusal(
    model: nn.Module, mode: str, tokens: int, options: Namespace, left_s: float
) -> tuple[str | None, dict[str, Any]]:
    """Why a case is not measured, if so, and its `host_setting`."""
    setting, need = host_setting(model, mode, options)
    if setting is None:
        return f"needs {size_text(need)} of host memory, {size_text(available_host_bytes())} is available", {}
    need_s = seconds_needed(model, mode, tokens, options, setting)
    return (f"{NO_TIME} (it needs about {need_s:.0f} s)" if need_s > left_s else None), setting


def expected(
    model: nn.Module,
    row: dict[str, Any],
    config: L2LConfig,
    autocast: torch.dtype | None,
    options: Namespace,
    figures: HardwareFigures | None,
    before: int,
) -> dict[str, Any]:
    """What the package expects of the case of a row with these options: the peaks, and with figures of the machine the
    time of a step. `model` is on the meta device; the process had so many bytes `before` there was a true one."""
    device, mode = execution_device(None), MODES[row["mode"]]
    if stream.shares_host_memory(device):
        return {}
    length, ubatch = row_of(row["model"], options), ubatch_of(row["model"], options)
    rows = row["tokens"] // length if mode.l2l is not None else ubatch
    ids = torch.empty((rows, length), dtype=torch.int64, device="meta")
    labels = ids if is_decoder(model) else torch.empty(rows, dtype=torch.int64, device="meta")
    run = RunShapes(model, config, {"input_ids": ids, "labels": labels}, device=device, autocast=autocast)
    if mode.l2l is None:
        plain = estimate_of(run, config)
        # The estimate is that of one micro-batch. The second one finds the gradients of the first.
        kept = plain.gradients if row["tokens"] > rows * length else 0
        return {"device_bytes": kept + (plain.plain_checkpointing if mode.checkpoints else plain.plain)}
    state, report, _ = report_of(run, config)
    found: dict[str, Any] = {"device_bytes": run.most(config)}
    found["host_bytes"] = phases_of_l2l(run, config, state, report)["train"].host + before
    if figures is not None:
        found["step_s"] = time_of(run, config, rates_of(figures, run, config, measures=False)).seconds
    return found


def attention_kernel(model: Any) -> str:
    """What torch chooses for attention in layers of this model, in bf16: where the answers with and without gradients
    differ, the recompute runs another kernel than the forward."""
    config, device = model.config, execution_device(None)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return chosen_attention(device, config.num_attention_heads, width, is_decoder(model))


def chosen_attention(device: torch.device, heads: int, width: int, is_causal: bool) -> str:
    """The kernel, or "A without gradients, B with them"."""
    found = []
    for needs in (False, True):
        try:
            given = [
                torch.randn(2, heads, 128, width, device=device).bfloat16().requires_grad_(needs) for _ in range(3)
            ]
            with torch.set_grad_enabled(needs):
                number = torch._fused_sdp_choice(*given, is_causal=is_causal)
            found.append(str(torch.nn.attention.SDPBackend(number).name) if number >= 0 else "-")
        except (RuntimeError, NotImplementedError):
            found.append("-")
    return found[0] if found[0] == found[1] else f"{found[0]} without gradients, {found[1]} with them"


def measured(
    name: str,
    mode: str,
    tokens: Sequence[int],
    options: Namespace,
    left_s: float = float("inf"),
    figures: HardwareFigures | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens, as soon as it is there, by one trainer; its `failure` says why it has no
    figures.

    The model and its trainer, and what they hold, live as long as this generator.
    """
    remaining, before = list(tokens), process_bytes()[0]
    common: dict[str, Any] = {"model": name, "mode": mode, "title": MODES[mode].title, "steps": options.steps}
    common |= {"host_setting": {}, "attention": "-", "failure": None}
    start = time.perf_counter()
    try:
        like = on_meta(name, options.tiny)
        failure, common["host_setting"] = refusal(like, mode, max(tokens), options, left_s)
        common["attention"] = attention_kernel(like)
        start = time.perf_counter()
        if failure is None:
            model = quickly_made(name, options.tiny)
            run = run_fsdp if mode == "fsdp2" else run_trainer
            for found in run(model, name, mode, tokens, options, common["host_setting"]):
                row = {**common, "tokens": remaining[0], **found, "case_s": time.perf_counter() - start}
                row["tokens_per_s"] = row["tokens"] / row["mean_s"]
                peak = peak_flop_per_s(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
                row["flop_per_s"] = flop_per_step(like, row["tokens"], row_of(name, options)) / row["mean_s"]
                row["mfu"] = None if peak is None else row["flop_per_s"] / peak
                config, autocast = row.pop("config", None), row.pop("autocast", None)
                if config is not None:
                    try:
                        row["expected"] = expected(like, row, config, autocast, options, figures, before)
                    except FAILURES as error:  # what was measured is of use without it
                        row["expected"] = {"failure": str(error)}
                remaining.pop(0)
                yield row
                start = time.perf_counter()
    except torch.OutOfMemoryError:
        failure = "out of memory"
    except FAILURES as error:
        traceback.print_exc()
        failure = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    except MemoryError as error:
        failure = f"out of host memory{f': {error}' if str(error) else ''}"
    for each in remaining:
        yield {**common, "tokens": each, "failure": failure, "case_s": time.perf_counter() - start}


def run_trainer(
    model: Any, name: str, mode: str, tokens: Sequence[int], options: Namespace, setting: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Train with `Trainer` or `L2LTrainer`, once for each number of tokens; yields figures of each row.

    The model is attached once: to page-lock the memory of a large one takes longer than to train a few steps.
    """
    kind, steps = MODES[mode], Steps(options)
    with tempfile.TemporaryDirectory() as folder:
        is_traced = options.traces is not None and kind.l2l is not None and len(tokens) == 1
        trace = Path(folder, "trace.json") if is_traced else None
        count = options.warmup + options.steps + 1
        try:
            trainer = trainer_for(model, name, mode, tokens, options, folder, count, setting)
            trainer.add_callback(steps)
            steps.trainer, steps.trace = trainer, trace
            attach_s = None
            if kind.l2l is not None and mode != "planned":
                start = time.perf_counter()
                attach_l2l(model, replace(l2l_config(trainer.args), device=trainer.args.device))
                attach_s = time.perf_counter() - start
            for each in tokens:
                rows = each // row_of(name, options)
                if kind.l2l is None:
                    trainer.args.gradient_accumulation_steps = rows // ubatch_of(name, options)
                else:
                    trainer.args.per_device_train_batch_size = trainer._train_batch_size = rows
                trainer.train()
                plan = trainer._l2l_plan.plan if mode == "planned" else None
                config = plan.config if plan is not None else None
                if config is None and not kind.bf16_weights:  # for which there is no estimate
                    config = L2LConfig() if kind.l2l is None else l2l_config(trainer.args)
                yield {
                    **steps.figures(),
                    "attach_s": attach_s,
                    "plan": None if plan is None else str(plan),
                    "config": config and replace(config, device_memory_budget=None, device=None),
                    "autocast": autocast_of(trainer.args),
                }
        finally:
            if kind.l2l is not None:
                detach_l2l(model)
        if trace is not None:
            add_to_zip(options.traces, trace, f"{name}_{mode}_{tokens[0]}.json")


def forget() -> None:
    """Let go of what a run has left on the device and in page-locked memory, also one that failed half-way."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        if torch.cuda.is_available():
            torch._C._host_emptyCache()
        left = torch.accelerator.memory_allocated()
        if left > 2**20:
            print(f"{size_text(left)} are still on the device before the next run", file=sys.stderr)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["bert-large", "llama-1b"])
    parser.add_argument("--modes", choices=MODES, nargs="+", default=["trainer", "serial", "deferred", "eager", "cmp"])
    parser.add_argument("--tokens", type=int, nargs="+", help="per optimizer step")
    parser.add_argument("--ubatch-size", type=int, help=f"rows of a micro-batch (default: {UBATCH_TOKENS} tokens)")
    parser.add_argument("--stash", choices=("device", "host"), default="device")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--warmup", type=int, help="steps before those")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens: shows that it runs")
    parser.add_argument("--out", type=Path, help="markdown file for the result")
    parser.add_argument("--rows", type=Path, help="file to which each row is added as a line of JSON")
    parser.add_argument("--traces", type=Path, help="zip file to which a trace of one step of each case is added")
    options = parser.parse_args(arguments)
    small = options.tiny
    options.tokens = options.tokens or ([64] if small else [8192, 32768, 65536])
    options.steps = options.steps if options.steps is not None else (1 if small else 10)
    options.warmup = options.warmup if options.warmup is not None else (1 if small else 3)
    for name in ("steps", "warmup", "ubatch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
    # Plain Trainer first: as soon as another row is there, so is what it is compared with.
    options.modes = [mode for mode in MODES if mode in options.modes]
    for name in options.model:
        unit = row_of(name, options) * ubatch_of(name, options)
        for tokens in options.tokens:
            if tokens < unit or tokens % unit:
                parser.error(
                    f"--tokens must be a multiple of {unit} for {name}, {ubatch_of(name, options)} rows of "
                    f"{row_of(name, options)} (got {tokens})"
                )
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists (got {options.out})")
    return options


def document(rows: list[dict[str, Any]], where: dict[str, Any], options: Namespace) -> str:
    """The table, with what one needs to know about it."""
    return "\n".join(
        (
            f"# Throughput on {where['device']}{', tiny models' if options.tiny else ''}",
            "",
            environment.description(where),
            "",
            f"Random weights and tokens; micro-batches of {UBATCH_TOKENS:,} tokens, except those of a plan; stash "
            f"on the {options.stash}; {options.steps} measured steps after {options.warmup}.",
            "",
            case_table(rows),
            "",
            "```bash",
            where["command"],
            "```",
            "",
        )
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure and print; returns the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    where = environment.environment("throughput.py", arguments)
    rows: list[dict[str, Any]] = []
    gpu_rows.append(options.rows, "environment", **where)
    for name in options.model:
        for mode in options.modes:
            for row in measured(name, mode, options.tokens, options):
                rows.append(row)
                gpu_rows.append(options.rows, "case", **row)
                print(case_line(row, rows), file=sys.stderr, flush=True)
                if options.out is not None:
                    options.out.write_text(document(rows, where, options), encoding="utf-8")
            forget()
    print(document(rows, where, options), end="")
    return rows


if __name__ == "__main__":
    main()
