"""The options of layer-to-layer execution, checked once, where they are made.

Every other module of the package takes a finished `L2LConfig`; `L2LTrainingArguments` carries the same fields on the
command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from hf_l2l.runtime import stream

StashPlace = Literal["device", "host"]
EpsUpdate = Literal["auto", "serial", "deferred", "eager"]
Cmp = Literal["auto", "bf16", "fp16"]
GradDtype = Literal["fp32", "16bit"]
MomentDtype = Literal["fp32", "bf16"]
HostCopies = Literal["kept", "per_sweep"]
Nonfinite = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class L2LConfig:
    """How a model is run layer to layer (arXiv:2002.05645).

    Raises:
        ValueError: for a value outside the rule of its field.
    """

    ubatch_size: int | None = None
    """Rows of the device batch that run through a layer at once (the inner loop, section 2.2). An uneven last ubatch
    is fine; None runs the whole device batch as one ubatch."""

    stash: StashPlace = "device"
    """Where layer inputs wait for the backward sweep: on the device, or in host memory (constant device memory in
    depth, arXiv:2002.05645 first text, equation 4)."""

    cmp: Cmp | None = None
    """Cross mixed precision (section 2.3): weights travel and layers compute in "bf16" or "fp16", and masters, sums of
    gradients and moments are fp32 in host memory. "auto" takes bf16 where the device computes in it, fp16 elsewhere;
    None computes as the masters are, or as autocast says."""

    loss_scale_init: float = 2.0**16
    """With fp16, what gradients are multiplied by on the device at first; as in `torch.amp.GradScaler`."""

    loss_scale_growth: float = 2.0
    """What the loss scale is multiplied by after `loss_scale_interval` steps that were made in a row."""

    loss_scale_backoff: float = 0.5
    """What it is multiplied by when a step is skipped because a gradient is not finite."""

    loss_scale_interval: int = 2000
    """Steps."""

    grad_dtype: GradDtype = "fp32"
    """In what sums of gradients leave the device and wait in host memory (4 or 2 bytes per parameter). "16bit" is
    bfloat16: each fp32 sum of a backward is rounded once, and is made fp32 again, layer by layer, to update."""

    moment_dtype: MomentDtype = "fp32"
    """In what the optimizer's state is kept between steps: with "bf16" it is made fp32 for the arithmetic of a step,
    layer by layer, and rounded stochastically after it, with a seed that checkpoints keep."""

    host_copies: HostCopies = "kept"
    """With `cmp`, whether the host keeps the 16-bit copies that travel (2 bytes per parameter), made once per update,
    or makes them whenever a layer travels ("per_sweep"), which holds up the thread that drives the device."""

    nonfinite: Nonfinite = "raise"
    """What becomes of a step whose gradients are not all finite, in fp32 and bf16: "raise" a `NonFiniteError` that
    names step and layer, or "skip" and count the step, with the scheduler waiting. (fp16 skips: `loss_scale_*`.)"""

    device: torch.device | str | None = None
    """The execution device, of any torch device type. None takes the current accelerator, or the CPU without one."""

    prefetch: bool = True
    """Whether the next layer's weights travel while this one computes (arXiv:2002.05645, first text, figure 2c). False
    is for measuring what that is worth."""

    gradient_slots: int = 2
    """Layers whose weight gradients the device holds at once: 2, so that one layer sums while the sums of another
    leave, or 1, which saves the memory of one layer and waits where a transfer outlasts one ubatch's recompute."""

    eps_update: EpsUpdate = "auto"
    """When the masters are updated: "serial", all in `optimizer.step()`; "deferred", layer by layer in the background
    after it, as the next forward needs them; "eager", layer by layer in the background during backward, without
    clipping (L2L-p, first text, figure 2c). The bits are the same. "auto" is deferred on a
    device that computes beside the host, and serial on the CPU."""

    num_threads: int | None = None
    """Threads of the updates in the background: two updates run at once, each with half of them (one, with one). None
    takes as many as the program has, at most all cores but one, which is left to the thread that drives the device. No
    more than the machine has cores. A serial update has the threads of the program."""

    trace: str | os.PathLike[str] | None = None
    """File to which steps are written as they run, for ui.perfetto.dev or chrome://tracing: what every layer computes,
    what travels, what is waited for. What the file held before is gone; None writes nothing."""

    layer_classes: tuple[str, ...] | None = None
    """Class names of the modules to stream as layers. None finds the layer stacks of the model by itself."""

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
        self._check_loss_scale()
        self._check_together()
        if not isinstance(self.prefetch, bool):
            raise ValueError(
                f"{option('prefetch')} must be True or False (got {self.prefetch!r}); False is for measuring what it "
                "is worth"
            )
        if not (_is_whole_number(self.gradient_slots) and self.gradient_slots in (1, 2)):
            raise ValueError(
                f"{option('gradient_slots')} must be 1 or 2 (got {self.gradient_slots!r}); use 1 where device memory "
                "is short"
            )
        if self.trace is not None:
            check_trace_path(self.trace, option("trace"))
            object.__setattr__(self, "trace", os.fspath(self.trace))  # so that equal ones are equal
        _check_num_threads(self.num_threads)
        if self.device is not None:
            _check_device(self.device)
        if self.layer_classes is not None:
            _check_layer_classes(self.layer_classes)
            object.__setattr__(self, "layer_classes", tuple(self.layer_classes))

    def _check_loss_scale(self) -> None:
        for name, (low, high, rule, usual) in _LOSS_SCALE.items():
            value = getattr(self, name)
            whole = name == "loss_scale_interval"
            if not (_is_whole_number(value) or (isinstance(value, float) and not whole)):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{option(name)} must be {kind} (got {value!r}); leave it out for torch's value")
            if not low < value < high:
                raise ValueError(f"{option(name)} must be {rule} (got {value!r}); torch's value is {usual}")
            given = value != type(self).__dataclass_fields__[name].default
            if given and self.cmp not in ("fp16", "auto"):
                raise ValueError(
                    f"{option(name)} is of the loss scale, which fp16 alone has (got {value!r} with "
                    f"cmp={self.cmp!r}); leave it out, or use cmp='fp16'"
                )

    def _check_together(self) -> None:
        if self.cmp == "fp16" and self.eps_update == "eager":
            raise ValueError(EAGER_FP16)
        if self.nonfinite == "skip" and self.eps_update == "eager":
            raise ValueError(
                "eps_update='eager' updates layers before it is known whether the gradients of others are finite, so "
                f"no step can be skipped (got {option('nonfinite')}='skip'); use eps_update='deferred', or "
                f"{option('nonfinite')}='raise'"
            )
        if self.host_copies == "per_sweep" and self.cmp is None:
            raise ValueError(
                f"{option('host_copies')} is about the 16-bit copies of cmp (got {option('host_copies')}='per_sweep' "
                "with cmp=None, where the masters themselves travel); leave it out, or set cmp"
            )


_CHOICES: dict[str, tuple[Any, str]] = {
    "stash": (StashPlace, "use 'host' when the layer inputs do not fit the device"),
    "cmp": (Cmp, "use 'auto' for what the device is good at"),
    "grad_dtype": (GradDtype, "use '16bit' where host memory is short"),
    "moment_dtype": (MomentDtype, "use 'bf16' where host memory is short"),
    "host_copies": (HostCopies, "use 'per_sweep' where host memory is short"),
    "nonfinite": (Nonfinite, "use 'skip' to go on without the step"),
    "eps_update": (
        EpsUpdate,
        "leave it at 'auto', or use 'serial' to have all updates made in optimizer.step()",
    ),
}
"""Option -> its values, and what to do."""

_LOSS_SCALE: dict[str, tuple[float, float, str, str]] = {
    "loss_scale_init": (0.0, sys.float_info.max, "above 0 and finite", "65536.0"),
    "loss_scale_growth": (1.0, sys.float_info.max, "above 1 and finite", "2.0"),
    "loss_scale_backoff": (0.0, 1.0, "between 0 and 1", "0.5"),
    "loss_scale_interval": (0.0, sys.float_info.max, "at least 1", "2000"),
}
"""Option -> what it lies between, the rule in words, and torch's value."""

EAGER_FP16 = (
    "eps_update='eager' updates layers before it is known whether a gradient of another one overflows in fp16 (got "
    "cmp with fp16); use eps_update='deferred', which knows and gives the same bits as 'serial', or cmp='bf16'"
)


SHORT_NAMES = ("ubatch_size", "stash", "cmp", "eps_update")
"""Options that the Trainer's arguments call what `L2LConfig` calls them; the others begin with "l2l_" there."""

_of_the_trainer: ContextVar[bool] = ContextVar("_of_the_trainer", default=False)


@contextmanager
def options_of_the_trainer() -> Iterator[None]:
    """Inside, errors name options as the Trainer's arguments do."""
    before = _of_the_trainer.set(True)
    try:
        yield
    finally:
        _of_the_trainer.reset(before)


def option(name: str) -> str:
    """What the user called the option `name` of `L2LConfig`; every error about one says it so."""
    return f"l2l_{name}" if _of_the_trainer.get() and name not in SHORT_NAMES else name


def check_ubatch_size(ubatch_size: int | None) -> None:
    """Raise ValueError unless `ubatch_size` is None or a whole number of at least 1."""
    if ubatch_size is None:
        return
    if not _is_whole_number(ubatch_size) or ubatch_size < 1:
        raise ValueError(
            f"ubatch_size must be a whole number of at least 1, or None for the whole device batch (got "
            f"{ubatch_size!r}); set it to the rows that fit through one layer at once"
        )


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_num_threads(threads: int | None) -> None:
    if threads is None:
        return
    name, cores = option("num_threads"), os.cpu_count() or 1
    if not _is_whole_number(threads) or threads < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, or None for all cores but one (got {threads!r}); it counts "
            "the threads of an update in the background"
        )
    if threads > cores:  # torch itself does not survive very many
        raise ValueError(
            f"{name} must be at most the {cores} cores of this machine (got {threads}); leave it out for all cores "
            "but one"
        )


def _check_device(device: torch.device | str) -> None:
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is no device")
        torch.device(device)
    except (RuntimeError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"device must name a torch device (got {device!r}: {error}); write 'cuda', or None for the current "
            "accelerator"
        ) from error


def _check_layer_classes(classes: object) -> None:
    name = option("layer_classes")
    if isinstance(classes, str):
        raise ValueError(
            f"{name} must be a tuple or list of class names (got the string {classes!r}); write ({classes!r},)"
        )
    if not isinstance(classes, tuple | list) or not classes or not all(isinstance(c, str) for c in classes):
        raise ValueError(
            f"{name} must be a tuple or list of class names (got {classes!r}); write ('MyBlock',), or leave it out to "
            "have the stacks found"
        )


def check_trace_path(path: object, name: str = "trace") -> None:
    """Raise ValueError, which calls the option `name`, unless a file can be written at `path`; nothing is written."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or not isinstance(os.fspath(path), str):
        raise ValueError(
            f"{name} must be the path of a file to write, or None for no trace (got {path!r}); write 'trace.json'"
        )
    got, folder = f"{name}={path!r}", os.path.dirname(os.path.abspath(path))
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, or of characters that no file system takes
        raise ValueError(cannot_be_written(got, error)) from error
    if not os.path.isdir(folder):
        raise ValueError(cannot_be_written(got, f"there is no folder {folder}"))
    if os.path.isdir(path):
        raise ValueError(cannot_be_written(got, "it is a folder"))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(cannot_be_written(got, "permission denied"))


def cannot_be_written(got: str, reason: object) -> str:
    """What is said of a trace that cannot be written: what was `got`, and the reason."""
    return f"the trace must go where a file can be written (got {got}: {reason}); give a file in an existing folder"


Mode = Literal["serial", "deferred", "eager"]


def update_mode(asked: EpsUpdate, device: torch.device) -> Mode:
    """When weights are updated: as `asked`; and if that is "auto", deferred where that runs beside the device."""
    if asked == "auto":
        return "deferred" if stream.is_asynchronous(device) else "serial"
    return asked
