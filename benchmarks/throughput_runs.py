"""One measured run of `throughput.py`: a model, a trainer, tokens per step."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.throughput_fsdp import run_fsdp
from benchmarks.throughput_models import MODELS, RandomTokens, flop_per_step, on_meta, peak_flop_per_s, quickly_made
from benchmarks.throughput_trace import add_to_zip, trace_from_now
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, attach_l2l, detach_l2l
from hf_l2l.hf.training_args import l2l_config
from hf_l2l.measure import MemoryCallback
from hf_l2l.memory.host_limits import available_host_bytes
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.report.wait_time import Averages
from hf_l2l.runtime.tensors import size_text

MODES = ("trainer", "serial", "deferred", "eager", "cmp", "resident", "fsdp2")
"""Plain `Trainer`, L2L with each `eps_update`, L2L by cross mixed precision (deferred), the same with resident
weights, and torch's FSDP2."""
MIXED = ("cmp", "resident")
UBATCH_TOKENS = 8192
"""Of a micro-batch, where the option does not say how many rows it has."""

HOST_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"grad_dtype": "16bit"},
    {"grad_dtype": "16bit", "moment_dtype": "bf16"},
    {"grad_dtype": "16bit", "moment_dtype": "bf16", "host_copies": "per_sweep"},
)
"""For cross mixed precision: 18, 16, 12 and 10 bytes per parameter. The first one that fits the host is taken."""
HOST_RESERVE = 0.05
"""The share of the available host memory that is left to Python, the driver and the rest."""

# transformers 5.23 renamed it.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def row_of(name: str, options: Namespace) -> int:
    """Tokens of a row."""
    return 16 if options.tiny else MODELS[name][2]


def ubatch_of(name: str, options: Namespace) -> int:
    """Rows of a micro-batch."""
    if options.ubatch_size is not None:
        return int(options.ubatch_size)
    return 2 if options.tiny else UBATCH_TOKENS // row_of(name, options)


def clipping_of(mode: str) -> float:
    """Its max_grad_norm."""
    return 0.0 if mode == "eager" else 1.0


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """When each step ended, on the device and on the host; what steps waited for; and the trace of the last one."""

    def __init__(self, options: Namespace, trace: Path | None) -> None:
        self.options, self.trace = options, trace
        self.ends: list[float] = []
        self.averages: Averages | None = None
        """Of the measured steps."""
        self.eps: Any = None
        """Of an `L2LTrainer`."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the device, and look at the clock."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        if self.eps is None:
            return
        if len(self.ends) == self.options.warmup:
            self.eps.timeline.averages()  # forgets those before
        elif len(self.ends) == self.options.warmup + self.options.steps:
            self.averages = self.eps.timeline.averages()
            if self.trace is not None:
                trace_from_now(self.eps.timeline, self.trace)

    def seconds(self) -> list[float]:
        """Of each measured step."""
        ends = self.ends[self.options.warmup - 1 : self.options.warmup + self.options.steps]
        return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def trainer_for(
    model: nn.Module,
    name: str,
    mode: str,
    tokens: int,
    options: Namespace,
    folder: str,
    callbacks: list[Any],
    steps: int | None = None,
    setting: dict[str, Any] | None = None,
) -> transformers.Trainer:
    """The trainer of one row of the table; `setting` is one of `HOST_SETTINGS`."""
    rows, ubatch = tokens // row_of(name, options), ubatch_of(name, options)
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps or options.warmup + options.steps,
        "max_grad_norm": clipping_of(mode),
        "optim": "adamw_torch_fused",
        "bf16": torch.cuda.is_available() and mode not in MIXED,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    data = RandomTokens(model, rows * common["max_steps"], row_of(name, options))
    if mode == "trainer":
        batch = {"per_device_train_batch_size": ubatch, "gradient_accumulation_steps": rows // ubatch}
        args = transformers.TrainingArguments(**common, **batch, **{CHECKPOINTING: True})
    else:
        l2l = {f"l2l_{key}": value for key, value in (setting or {}).items()}
        l2l |= {"per_device_train_batch_size": rows, "ubatch_size": ubatch, "stash": options.stash}
        l2l |= {"eps_update": "deferred", "cmp": options.cmp} if mode in MIXED else {"eps_update": mode}
        l2l |= {"l2l_resident": resident_of(mode), "device_memory_budget": "off"}
        args = L2LTrainingArguments(**{**common, **l2l})
    kind = transformers.Trainer if mode == "trainer" else L2LTrainer
    trainer = kind(model=model, args=args, train_dataset=data, callbacks=callbacks)
    if not data.is_decoder:
        # The classifier takes num_items_in_batch and does not divide by it, so that Trainer would add the losses of
        # the batches that it accumulates. May go with https://github.com/huggingface/transformers/issues/47688.
        trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def resident_of(mode: str) -> Any:
    """What stays on the device."""
    return "shell" if mode == "resident" else "none"


def host_setting(model: nn.Module, mode: str, options: Namespace) -> tuple[dict[str, Any] | None, int]:
    """How the host keeps what it keeps, and the bytes that it needs; no setting if none fits.

    An update makes of 16-bit gradients and moments, unit by unit, fp32 ones: 12 bytes per parameter of what is
    updated at once, which at most is everything outside the layers.
    """
    usable = (1 - HOST_RESERVE) * available_host_bytes()
    if mode in ("trainer", "fsdp2"):
        held = 4 if mode == "trainer" else 16
        need = held * sum(p.numel() for p in model.parameters())
        return ({} if need <= usable else None), need
    need = 0
    for setting in HOST_SETTINGS if mode in MIXED else HOST_SETTINGS[:1]:
        config = L2LConfig(cmp=options.cmp if mode in MIXED else None, resident=resident_of(mode), **setting)
        found = estimate(model, config)
        need = found.host_bytes + (12 * found.shell // 4 if setting and mode != "resident" else 0)
        if need <= usable:
            return setting, need
    return None, need


def seconds_needed(model: nn.Module, tokens: int, options: Namespace) -> float:
    """About what a case takes: making and moving the weights, the steps at 300 TFLOP/s, the updates."""
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    return 4 + 6 * billions + (options.warmup + options.steps + 1) * billions * (0.8 + tokens * 8e9 / 300e12)


def refusal(model: nn.Module, mode: str, tokens: int, options: Namespace, left_s: float) -> tuple[str | None, Any]:
    """Why a case is not measured, if so, and its `host_setting`."""
    need_s = seconds_needed(model, tokens, options)
    if need_s > left_s:
        return f"no time left (needs about {need_s:.0f} s)", None
    setting, need = host_setting(model, mode, options)
    if setting is None:
        return f"needs {size_text(need)} of host memory, {size_text(available_host_bytes())} is available", None
    return None, setting


def measured(name: str, mode: str, tokens: int, options: Namespace, left_s: float = float("inf")) -> dict[str, Any]:
    """One row of the table. `failure` says in words why there are no figures."""
    start, like = time.perf_counter(), on_meta(name, options.tiny)
    failure, setting = refusal(like, mode, tokens, options, left_s)
    row: dict[str, Any] = {"model": name, "mode": mode, "tokens": tokens, "max_grad_norm": clipping_of(mode)}
    row |= {"failure": failure, "card": options.card, "steps": options.steps, "host_setting": setting}
    row["cmp"] = options.cmp if mode in MIXED else None
    if failure is None:
        try:
            run = run_fsdp if mode == "fsdp2" else run_trainer
            row |= run(quickly_made(name, options.tiny), row, options)
        except torch.OutOfMemoryError:
            row["failure"] = "out of memory"
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # the other cases are still of use
            traceback.print_exc()
            row["failure"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        except MemoryError as error:
            row["failure"] = f"out of host memory{f': {error}' if str(error) else ''}"
    if row["failure"] is None:
        row["tokens_per_s"] = tokens / row["mean_s"]
        peak = peak_flop_per_s(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        flop_per_s = flop_per_step(like, tokens, row_of(name, options)) / row["mean_s"]
        row["flop_per_s"], row["mfu"] = flop_per_s, None if peak is None else flop_per_s / peak
    row["case_s"] = time.perf_counter() - start
    return row


def run_trainer(model: Any, row: dict[str, Any], options: Namespace) -> dict[str, Any]:
    """Train with `Trainer` or `L2LTrainer`; returns figures of the row."""
    name, mode, traces = row["model"], row["mode"], options.traces
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json") if traces is not None and mode != "trainer" else None
        steps, memory = Steps(options, trace), MemoryCallback()
        count = options.warmup + options.steps + (trace is not None)
        try:
            trainer = trainer_for(
                model, name, mode, row["tokens"], options, folder, [steps, memory], count, row["host_setting"]
            )
            found: dict[str, Any] = {"attach_s": None}
            if mode != "trainer":
                start = time.perf_counter()
                steps.eps = attach_l2l(model, replace(l2l_config(trainer.args), device=trainer.args.device))
                found["attach_s"] = time.perf_counter() - start
            trainer.train()
        finally:
            if mode != "trainer":
                detach_l2l(model)
        if trace is not None:
            add_to_zip(traces, trace, f"{name}_{mode}_{row['tokens']}.json")
    found |= times_of(steps.seconds()) | waits_of(steps.averages)
    config = L2LConfig(cmp=row["cmp"], resident=resident_of(mode), **row["host_setting"])
    bytes_found, need = memory.metrics(), estimate(model, config)
    found["is_measured"] = "train_device_bytes" in bytes_found
    # What gradients the host holds depends on when one looks, if they are used in the background: by shapes, then.
    found["host_bytes"] = bytes_found["train_host_bytes"] if mode == "trainer" else need.host_bytes
    found["estimated_device_bytes"] = None if mode == "trainer" else need.device_bytes
    accounted = found["host_bytes"] if mode == "trainer" else need.device_bytes
    found["device_bytes"] = bytes_found.get("train_device_bytes", accounted)
    return found


def times_of(seconds: list[float]) -> dict[str, float]:
    """Mean, least and most of the measured steps."""
    return {"mean_s": sum(seconds) / len(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}


def waits_of(averages: Averages | None) -> dict[str, Any]:
    """What a step waited for, in seconds, and what bounds it; None for a trainer that does not tell."""
    if averages is None:
        return dict.fromkeys(("upload_s", "download_s", "eps_s", "bound"))
    names = ("upload_s", "download_s", "eps_s", "bound")
    return {name: getattr(averages, name) for name in names}


def forget() -> None:
    """Let go of what a run has left on the device, also one that failed half-way."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        left = torch.accelerator.memory_allocated()
        if left > 2**20:
            print(f"{size_text(left)} are still on the device before the next run", file=sys.stderr)
