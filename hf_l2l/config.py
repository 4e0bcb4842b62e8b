"""The options of layer-to-layer execution, checked once, where they are made.

Every other module of the package takes a finished `L2LConfig`; `L2LTrainingArguments` carries the same fields on the
command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from textwrap import fill
from typing import Any, Literal, get_args

import torch

from hf_l2l.combinations import EAGER_FP16 as EAGER_FP16
from hf_l2l.combinations import check_together
from hf_l2l.counts import (
    OptionNames,
    check_budget,
    check_gradient_slots,
    check_layer_classes,
    check_layer_count,
    check_num_threads,
    check_prefetch,
    check_seconds,
    check_state_window,
    check_ubatch_size,
    is_whole_number,
    parsed_chunk,
)
from hf_l2l.devices import named_devices
from hf_l2l.option_names import option
from hf_l2l.paths import check_folder_path, check_trace_path
from hf_l2l.runtime import stream

StashPlace = Literal["device", "host", "disk", "auto"]
EpsUpdate = Literal["auto", "serial", "deferred", "eager"]
Cmp = Literal["auto", "bf16", "fp16"]
GradDtype = Literal["fp32", "16bit"]
MomentDtype = Literal["fp32", "bf16", "8bit"]
HostCopies = Literal["kept", "per_sweep"]
Nonfinite = Literal["raise", "skip"]
CheckRecompute = Literal["raise", "warn", "off"]
Resident = Literal["none", "shell", "all"]
ResidentUpdate = Literal["device", "host"]
HeadDevice = Literal["auto", "first"]
BoundaryPlace = Literal["auto", "device", "host"]
Reduce = Literal["auto", "host", "device"]
StateTier = Literal["host", "disk"]


def _described(default: Any, help: str) -> Any:
    """A field with the one text about it: the command line, `help()` and the README show it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class L2LConfig(OptionNames):
    """How a model is run layer to layer (arXiv:2002.05645).

    Raises:
        ValueError: for a value outside the rule of its field.
    """

    ubatch_size: int | None = _described(
        None,
        "Rows of the device batch that run through a layer at once (the inner loop; arXiv:2002.05645, section 2.2). "
        "An uneven last micro-batch is fine. None: one micro-batch of the whole device batch, or, on n devices, 2 n "
        "micro-batches.",
    )
    stash: StashPlace = _described(
        "device",
        'Where layer inputs wait for the backward sweep: "device"; "host", which keeps device memory constant in '
        'depth (arXiv:2002.05645, first version, equation 4); "disk", a file in `spill_dir`, for layer inputs that '
        'host memory does not hold; or "auto", the first of these that they fit. Where layers run on the CPU, "host" '
        'moves nothing, and "disk" moves layer inputs to the file.',
    )
    spill_dir: str | os.PathLike[str] | None = _described(
        None,
        'With `stash="disk"` or "auto", the folder of the file that layer inputs are written to, best on a fast disk '
        "of this machine. The file has mode 0600. It is removed with the engine (`detach_l2l`, the end of the "
        "program), or, after a crash, when the next training with this folder starts. None takes the system's folder "
        "for temporary files, which is in host memory on some systems (tmpfs).",
    )
    boundary: BoundaryPlace = _described(
        "auto",
        "With a stash that is not on the device, where the output of a layer waits for the next layer, and the "
        'gradient for the layer before: on the "device", or on the "host" (with `stash="disk"`, in its file), from '
        "which they come one micro-batch at a time, so that layers "
        "need device memory for one micro-batch, whatever the device batch. So does then what the model computes "
        "before and after them: embedding, positions, dropout, final norm, pooler, and a head in chunks of tokens. "
        '"auto" keeps them on the device if a backward needs at most an eighth of its memory for them.',
    )
    cmp: Cmp | None = _described(
        None,
        "Cross mixed precision (arXiv:2002.05645, section 2.3): weights travel and layers compute in "
        '"bf16" or "fp16"; masters, sums of gradients and moments are fp32 in host memory. "auto" takes bf16 where '
        "the device computes in it, fp16 elsewhere. None computes as the masters are, or as autocast says.",
    )
    loss_scale_init: float = _described(
        2.0**16,
        "With fp16, the first loss scale: the factor by which gradients are multiplied on the device. The options of "
        "the loss scale are those of `torch.amp.GradScaler`.",
    )
    loss_scale_growth: float = _described(
        2.0,
        "The factor by which the loss scale grows after `loss_scale_interval` steps in a row without an overflow.",
    )
    loss_scale_backoff: float = _described(
        0.5,
        "The factor by which the loss scale is multiplied when a step is skipped because a gradient is not finite.",
    )
    loss_scale_interval: int = _described(
        2000, "The number of steps in a row without an overflow after which the loss scale grows."
    )
    grad_dtype: GradDtype = _described(
        "fp32",
        'The dtype in which sums of gradients leave the device and wait in host memory: "fp32", or "16bit" (bfloat16, '
        '2 bytes per parameter instead of 4). With "16bit" each fp32 sum of a backward is rounded once, and made fp32 '
        "again, layer by layer, for the update.",
    )
    moment_dtype: MomentDtype = _described(
        "fp32",
        'How the optimizer\'s state is kept between steps: "fp32", "bf16", or "8bit" (blocks of 256 elements that '
        "share an exponent, with torch's Adam, AdamW and SGD, and `Lamb`). The last two are rounded stochastically "
        "after the arithmetic of a step, which is fp32, with a seed that checkpoints keep.",
    )
    host_copies: HostCopies = _described(
        "kept",
        'With `cmp`, the 16-bit copies that travel: "kept" on the host (2 bytes per parameter) and made once per '
        'update, or made whenever a layer travels ("per_sweep"), which holds up the thread that drives the device.',
    )
    state_tier: StateTier = _described(
        "host",
        'Where masters and optimizer state are between their uses: in "host" memory, or on "disk", for models whose '
        "state host memory does not hold. They are in files without names in `state_dir`, and pass through host "
        "memory layer by layer, in the order of sweeps and updates. The bits are the same.",
    )
    state_dir: str | os.PathLike[str] | None = _described(
        None,
        'With `state_tier="disk"`, the folder of the files, on a fast disk of this machine. Nothing is left in it '
        "when the process has ended, however it ends. None takes the system's folder for temporary files.",
    )
    state_window: int = _described(
        4,
        'With `state_tier="disk"`, the host memory that masters and state may take, as a number of layers, at least '
        "3: those of the largest layer, so many times. A large embedding or head takes its own bytes, and those of "
        "one layer, if that is more.",
    )
    nonfinite: Nonfinite = _described(
        "raise",
        'What becomes of a step whose gradients are not all finite, in fp32 and bf16: "raise" a `NonFiniteError` that '
        'names step and layer, or "skip" and count the step (`skipped_steps` in the logs; the scheduler waits). fp16 '
        "always skips.",
    )
    check_recompute: CheckRecompute = _described(
        "raise",
        "What becomes of a layer whose recompute gives other outputs than its forward, and so gradients of another "
        'computation: "raise" an error that names the layer, or "warn". The first call of each kind and one in a '
        'hundred later ones are compared, by sums of their outputs. "off" compares nothing, for benchmarks.',
    )
    resident: Resident = _described(
        "none",
        'Weights that stay on the device with their gradients and optimizer state, and are updated there: "none", '
        '"shell", those in no layer (embeddings, heads), whose update would hold up the start of every step, or '
        '"all", those of all layers, too. With AdamW they take 16 bytes per parameter of device memory. The optimizer '
        "must be wrapped, and must update parameters one by one unless all are resident. Where layers run on the CPU, "
        "nothing moves.",
    )
    resident_layers: int = _described(
        0,
        "So many layers, the first ones of the model, stay on the device, too, with their gradients and optimizer "
        "state, and are updated there: nothing of them travels in a step, and they compute while the others are "
        "updated and uploaded.",
    )
    resident_update: ResidentUpdate = _described(
        "device",
        'Where resident weights are updated: on the "device", or on the "host", with the bits of streamed ones. Then '
        "masters, gradients and optimizer state are on the host, and what stays on the device is the copy that layers "
        "compute with: it is uploaded once per update, and not in each forward and backward.",
    )
    kept_weights: int = _described(
        0,
        "The weights of so many layers, the last ones that are not resident, stay on the device from their forward to "
        "their backward, each in memory of its own: they are uploaded once in a step. Of the layers before them, the "
        "last two stay anyway. Where layers run on the CPU, nothing travels.",
    )
    kept_graphs: int = _described(
        0,
        "The last so many layers keep the graph of each micro-batch from their forward to their backward, and are not "
        "recomputed, which saves a quarter of their computation. Their weights stay, too, and nothing of them is "
        "stashed.",
    )
    device_stash: int = _described(
        0,
        "With a stash that is not on the device, the inputs of the last so many layers stay there all the same: the "
        "backward needs them first. They do not pass through the host, whatever the boundary. Where layers run on the "
        "CPU, it changes nothing.",
    )
    chunked_loss: Literal["auto", "off"] | int = _described(
        "auto",
        "Whether logits of a vocabulary are made for a chunk of tokens at a time, on a device with memory of its own: "
        'a number, the tokens of a chunk (16 bytes per token and entry of the vocabulary); "auto", as many as fit a '
        "sixteenth of the budget of device memory, or else of the device's memory, which is decided once; or "
        '"off", which makes those of all tokens (12 bytes each). Few tokens are one chunk, with the bits of plain '
        "torch. What needs all logits gets them, and the log says so.",
    )
    head_device: HeadDevice = _described(
        "auto",
        'Which of several devices compute logits in chunks (`chunked_loss`): "auto", all in turn where they can read '
        "each other's memory, which adds the gradients of the head in another order than one device does; or "
        '"first", which keeps the bits of one device.',
    )
    device_memory_budget: str | None = _described(
        None,
        'Device memory that training may take, such as "8GiB", or "auto" for nine tenths of the device: before the '
        "model is attached, the fastest of the options that keep more on the device are chosen for the longest batch "
        "(`ubatch_size`, `stash`, `boundary`, `gradient_slots`, `resident`, `resident_layers`, `kept_weights`, "
        "`kept_graphs`, `device_stash`), from one layer at a time to the whole model, and the tokens of a chunk of "
        'logits (`chunked_loss`). Options that are set stay as they are. None, or "off", chooses nothing. Where '
        "layers run on the CPU, it changes nothing.",
    )
    device: torch.device | str | None | Sequence[torch.device | str] = _described(
        None,
        "The execution device, of any torch device type. None takes the current accelerator, or the CPU without one. "
        "Of several, each executes the layers in turn, with all micro-batches of a layer (modular pipeline; "
        "arXiv:2106.02679, section 4), and the first one what is not in a layer.",
    )
    prefetch: bool = _described(
        True,
        "Whether the next layer's weights travel while this one computes (arXiv:2002.05645, first version, figure "
        "2c). False is for measuring what that is worth.",
    )
    gradient_slots: int = _described(
        2,
        "The number of layers whose weight gradients the device holds at once: 2, so that one layer sums while the "
        "sums of another leave, or 1, which saves the memory of one layer and waits where a transfer outlasts the "
        "recompute of one micro-batch.",
    )
    eps_update: EpsUpdate = _described(
        "auto",
        'When the masters are updated: "serial", all in `optimizer.step()`; "deferred", layer by layer in the '
        'background after it, as the next forward needs them; "eager", layer by layer in the background during '
        "backward, without clipping (`max_grad_norm=0`). The bits are the same. "
        '"auto" is deferred on a device that computes beside the host, and serial on the CPU.',
    )
    num_threads: int | None = _described(
        None,
        "Threads of the updates in the background, at most the cores of the machine. They share out the "
        "work of each layer. None takes as many as the program has, at most all cores but one, which is left to the "
        "thread that drives the device; under torchrun, which sets one thread, the share of this process of the "
        "cores, but one. A serial update has the threads of the program.",
    )
    rank_timeout: float = _described(
        10.0,
        "Seconds within which all ranks of a launcher (torchrun, `accelerate launch`) have ended after one of them "
        "has ended, or does not answer. One process alone has no other ranks.",
    )
    reduce: Reduce = _described(
        "auto",
        "Where the ranks of a host add their gradients, layer by layer, in the order of the ranks: in "
        '"host" memory, to which each downloads all of its own; or on the "device", where each adds its share of '
        "those that the others send it (over NVLink or the like), and downloads the sum. The bits are the same. "
        '"auto" measures both at the first step, if each rank has a device of its own, and takes the faster one. One '
        "process alone has nothing to add.",
    )
    trace: str | os.PathLike[str] | None = _described(
        None,
        "File to which steps are written as they run, for ui.perfetto.dev or chrome://tracing: what every layer "
        "computes, what travels, what is waited for. An existing file is replaced. None writes nothing. Of several "
        "ranks, rank 0 writes this file, and the others write beside it: `trace.rank1.json` for `trace.json`.",
    )
    layer_classes: tuple[str, ...] | None = _described(
        None, "Class names of the modules to stream as layers. None finds the layer stacks of the model."
    )

    def __post_init__(self) -> None:
        check_ubatch_size(self.ubatch_size)
        for name, (known, remedy) in _CHOICES.items():
            value = getattr(self, name)
            is_none = name == "cmp" and value is None
            if not is_none and not (isinstance(value, str) and value in get_args(known)):
                none = "None or " if name == "cmp" else ""
                raise ValueError(
                    f"{option(name)} must be {none}one of {', '.join(map(repr, get_args(known)))} (got {value!r}); "
                    f"{remedy}"
                )
        object.__setattr__(self, "chunked_loss", parsed_chunk(self.chunked_loss, option("chunked_loss")))
        for name in LAYER_COUNTS:
            check_layer_count(getattr(self, name), option(name))
        self._check_loss_scale()
        check_state_window(self.state_window, option("state_window"))
        check_together(self)
        check_prefetch(self.prefetch, option("prefetch"))
        check_gradient_slots(self.gradient_slots, option("gradient_slots"))
        if self.trace is not None:
            check_trace_path(self.trace, option("trace"))
            object.__setattr__(self, "trace", os.fspath(self.trace))  # so that equal ones are equal
        if self.spill_dir is not None:
            check_folder_path(self.spill_dir, option("spill_dir"))
            object.__setattr__(self, "spill_dir", os.fspath(self.spill_dir))
        if self.state_dir is not None:
            check_folder_path(self.state_dir, option("state_dir"))
            object.__setattr__(self, "state_dir", os.fspath(self.state_dir))
        check_num_threads(self.num_threads, option("num_threads"))
        check_seconds(self.rank_timeout, option("rank_timeout"))
        check_budget(self.device_memory_budget, option("device_memory_budget"))
        if self.device_memory_budget == "off":
            object.__setattr__(self, "device_memory_budget", None)
        object.__setattr__(self, "device", named_devices(self.device))
        if self.layer_classes is not None:
            check_layer_classes(self.layer_classes, option("layer_classes"))
            object.__setattr__(self, "layer_classes", tuple(self.layer_classes))

    def _check_loss_scale(self) -> None:
        for name, (low, high, rule) in _LOSS_SCALE.items():
            value, usual = getattr(self, name), getattr(L2LConfig, name)  # the class attribute is the default
            whole = name == "loss_scale_interval"
            if not (is_whole_number(value) or (isinstance(value, float) and not whole)):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{option(name)} must be {kind} (got {value!r}); leave it out for torch's value")
            if not low < value < high:
                raise ValueError(f"{option(name)} must be {rule} (got {value!r}); torch's value is {usual:g}")
            if value != usual and self.cmp not in ("fp16", "auto"):
                raise ValueError(
                    f"{option(name)} is of the loss scale, which fp16 alone has (got {value!r} with "
                    f"cmp={self.cmp!r}); leave it out, or use cmp='fp16'"
                )


LAYER_COUNTS = ("resident_layers", "kept_weights", "kept_graphs", "device_stash")
"""Options that are a number of layers of the model, which has at least as many."""

_CHOICES: dict[str, tuple[Any, str]] = {
    "stash": (StashPlace, "use 'auto' when the layer inputs do not fit the device"),
    "boundary": (BoundaryPlace, "use 'host' when the outputs of layers do not fit the device"),
    "cmp": (Cmp, "use 'auto' for what the device is good at"),
    "grad_dtype": (GradDtype, "use '16bit' where host memory is short"),
    "moment_dtype": (MomentDtype, "use 'bf16' or '8bit' where host memory is short"),
    "host_copies": (HostCopies, "use 'per_sweep' where host memory is short"),
    "resident": (Resident, "use 'shell' where the device has room for the state of embeddings and heads"),
    "resident_update": (ResidentUpdate, "use 'host' for the bits of a run in which nothing is resident"),
    "nonfinite": (Nonfinite, "use 'skip' to go on without the step"),
    "check_recompute": (CheckRecompute, "use 'warn' to go on with gradients of another computation"),
    "head_device": (HeadDevice, "use 'first' for the bits of one device"),
    "state_tier": (StateTier, "use 'disk' for a model whose state host memory does not hold"),
    "reduce": (Reduce, "leave it at 'auto', which measures"),
    "eps_update": (EpsUpdate, "leave it at 'auto', or use 'serial' to have all updates made in optimizer.step()"),
}
"""Option -> its values, and what to do."""

_LOSS_SCALE: dict[str, tuple[float, float, str]] = {
    "loss_scale_init": (0.0, sys.float_info.max, "above 0 and finite"),
    "loss_scale_growth": (1.0, sys.float_info.max, "above 1 and finite"),
    "loss_scale_backoff": (0.0, 1.0, "between 0 and 1"),
    "loss_scale_interval": (0.0, sys.float_info.max, "at least 1"),
}
"""Option -> what it lies between, and the rule in words. The defaults are torch's values."""


def help_text(options: Iterable[Field[Any]]) -> str:
    """Names, defaults and descriptions of fields, as the part "Args" of a docstring."""
    texts = (f"{f.name}: {f.metadata['help']} Default: {f.default!r}." for f in options)
    return "\n".join(["    Args:", *(fill(t, 119, initial_indent=" " * 8, subsequent_indent=" " * 12) for t in texts)])


L2LConfig.__doc__ = f"{L2LConfig.__doc__}\n{help_text(fields(L2LConfig))}\n"


Mode = Literal["serial", "deferred", "eager"]


def update_mode(asked: EpsUpdate, device: torch.device) -> Mode:
    """When weights are updated: as `asked`; and if that is "auto", deferred where that runs beside the device."""
    if asked == "auto":
        return "deferred" if stream.is_asynchronous(device) else "serial"
    return asked
