"""`TrainingArguments` with the options of layer-to-layer execution."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import TrainingArguments

from hf_l2l.config import (
    Cmp,
    EpsUpdate,
    GradDtype,
    HostCopies,
    L2LConfig,
    MomentDtype,
    Nonfinite,
    StashPlace,
    option,
    options_of_the_trainer,
)


@dataclass
class L2LTrainingArguments(TrainingArguments):  # type: ignore[misc]  # transformers ships no types
    """transformers' `TrainingArguments` and the fields of `L2LConfig`.

    `per_device_train_batch_size` is the device batch; `ubatch_size` cuts it into the micro-batches of the inner loop.

    Raises:
        ValueError: for a bad value, or options that contradict each other. What L2L cannot honour is refused by
            `L2LTrainer`, which knows whether the model has layers.
    """

    ubatch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows of the device batch that run through a layer at once (L2L's inner loop). "
            "Default: the whole device batch."
        },
    )
    stash: StashPlace = field(
        default="device",
        metadata={
            "help": "Where layer inputs wait for the backward sweep: 'device', or 'host' (constant device memory)."
        },
    )
    cmp: Cmp | None = field(
        default=None,
        metadata={
            "help": "Cross mixed precision: weights travel and layers compute in 'bf16' or 'fp16' ('auto': what the "
            "device is good at), while master weights, sums of gradients and moments are fp32 on the host."
        },
    )
    l2l_loss_scale_init: float = field(
        default=2.0**16, metadata={"help": "With cmp='fp16': what gradients are multiplied by at first."}
    )
    l2l_loss_scale_growth: float = field(
        default=2.0, metadata={"help": "What the loss scale is multiplied by after l2l_loss_scale_interval steps."}
    )
    l2l_loss_scale_backoff: float = field(
        default=0.5, metadata={"help": "What the loss scale is multiplied by when a gradient overflows."}
    )
    l2l_loss_scale_interval: int = field(
        default=2000, metadata={"help": "Steps without an overflow after which the loss scale grows."}
    )
    l2l_grad_dtype: GradDtype = field(
        default="fp32",
        metadata={
            "help": "In what sums of gradients travel and wait in host memory: 'fp32', or '16bit' (bfloat16, half of "
            "the memory; rounded once, updates compute in fp32)."
        },
    )
    l2l_moment_dtype: MomentDtype = field(
        default="fp32",
        metadata={
            "help": "In what the optimizer's state is kept: 'fp32', or 'bf16' (half of the memory; computed in fp32 "
            "and rounded stochastically)."
        },
    )
    l2l_host_copies: HostCopies = field(
        default="kept",
        metadata={
            "help": "With cmp: whether the host keeps the 16-bit copies that travel ('kept'), or makes them whenever "
            "a layer travels ('per_sweep': less memory, more time)."
        },
    )
    l2l_nonfinite: Nonfinite = field(
        default="raise",
        metadata={
            "help": "A step whose gradients are not all finite, in fp32 and bf16: 'raise' an error that names step "
            "and layer, or 'skip' and count it."
        },
    )
    l2l_save_dtype: Literal["fp32", "bf16", "fp16"] = field(
        default="fp32",
        metadata={
            "help": "In what trainer.save_model() writes the weights. Checkpoints always have the fp32 masters."
        },
    )
    eps_update: EpsUpdate = field(
        default="auto",
        metadata={
            "help": "When the weights are updated: 'serial' (in optimizer.step()), 'deferred' (in the background, "
            "under the next forward), 'eager' (there, under the backward; needs max_grad_norm=0), or 'auto'."
        },
    )
    l2l_prefetch: bool = field(
        default=True,
        metadata={"help": "Let the next layer's weights travel while this one computes."},
    )
    l2l_gradient_slots: int = field(
        default=2,
        metadata={"help": "Layers whose weight gradients the device holds at once: 2, or 1 to save memory."},
    )
    l2l_trace: str | None = field(
        default=None,
        metadata={
            "help": "File to which steps are written as they run, to be opened in ui.perfetto.dev. Default: none."
        },
    )
    l2l_num_threads: int | None = field(
        default=None,
        metadata={
            "help": "Threads of updates in the background. Default: those torch uses, at most all cores but one."
        },
    )
    l2l_optimizer: Literal["lamb"] | None = field(
        default=None,
        metadata={
            "help": "'lamb', the optimizer of the L2L papers, in the place of the one that `optim` names. It takes "
            "learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay."
        },
    )
    l2l_log_times: bool = field(
        default=True,
        metadata={
            "help": "Log what steps wait for, and tokens per second (l2l_wait_*_s, l2l_bound, l2l_tokens_per_s). "
            "Without them, equal runs have equal checkpoints, trainer_state.json included but for transformers' own "
            "times of evaluations."
        },
    )
    l2l_layer_classes: list[str] | None = field(
        default=None,
        metadata={
            "help": "Class names of the modules to stream as layers. Default: the model's layer stacks are found."
        },
    )

    def __post_init__(self) -> None:
        refuse_conflicts(self)  # before the base class acts on them
        l2l_config(self)
        super().__post_init__()
        refuse_conflicts(self)  # the base class derives some of them from others


def l2l_config(args: TrainingArguments) -> L2LConfig:
    """The `L2LConfig` that training arguments ask for; the defaults for plain `TrainingArguments`.

    The device is left open: it is known once the arguments have been set up. Errors name options as they are called
    there.
    """
    with options_of_the_trainer():
        given = {f.name: option(f.name) for f in fields(L2LConfig) if f.name != "device"}
        return L2LConfig(**{name: getattr(args, typed) for name, typed in given.items() if hasattr(args, typed)})


def refuse_conflicts(args: TrainingArguments) -> None:
    """Raise ValueError for options that contradict each other, whatever the model."""
    _refuse_two_optimizers(args)
    _refuse_two_precisions(args)
    log_times = getattr(args, "l2l_log_times", True)
    if not isinstance(log_times, bool):
        raise ValueError(
            f"l2l_log_times must be True or False (got {log_times!r}); False leaves times out of the logs, so that "
            "those of equal runs are equal but for transformers' own times of evaluations"
        )
    if getattr(args, "eps_update", None) == "eager" and args.max_grad_norm and args.max_grad_norm > 0:
        raise ValueError(
            "eps_update='eager' updates layers before the norm of all gradients is known, so it cannot clip (got "
            f"max_grad_norm={args.max_grad_norm}); set max_grad_norm=0, or use eps_update='deferred', which clips and "
            "gives the same bits as 'serial'"
        )


_UPDATE_IN_BACKWARD = {"lomo": "sgd", "adalomo": "adafactor"}
"""Optimizers that do so without a name that says it, and what is nearest to them."""


def refuse_for_layers(args: Any) -> None:
    """Raise ValueError for options of the Trainer that cannot be honoured with a model that is run layer to layer.

    Args:
        args: an object whose attributes are options. An option that it has no attribute for was not given.
    """
    for name, remedy in (
        ("deepspeed", "both place the parameters; drop one of them"),
        ("fsdp", "both place the parameters; drop one of them"),
        ("torch_compile", "a compiled model cannot be run layer by layer; set torch_compile=False"),
        ("fp16", "its loss scaler would have to see gradients on the device; use cmp='fp16'"),
        ("fp16_full_eval", "it would cast the master weights; set bf16=True, or evaluate in fp32"),
        ("bf16_full_eval", "it would cast the master weights; set bf16=True, or evaluate in fp32"),
    ):
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"{name} cannot be used with L2L (got {name}={value!r}): {remedy}")
    optim = str(getattr(args.optim, "value", args.optim)) if hasattr(args, "optim") else ""
    if optim.endswith("_layerwise") or optim in _UPDATE_IN_BACKWARD:
        raise ValueError(
            f"optim cannot be used with L2L (got optim={optim!r}): it updates parameters in hooks of their backward, "
            f"which runs on copies; use optim={_UPDATE_IN_BACKWARD.get(optim, optim.removesuffix('_layerwise'))!r}"
        )
    if getattr(args, "mixed_precision", None) == "fp16":
        raise ValueError(_two_precisions(args))


def _refuse_two_optimizers(args: TrainingArguments) -> None:
    asked = getattr(args, "l2l_optimizer", None)
    if asked not in (None, "lamb"):
        raise ValueError(
            f"l2l_optimizer must be 'lamb' or None (got {asked!r}); leave it out for the optimizer that optim names"
        )
    default = TrainingArguments.__dataclass_fields__["optim"].default
    for name, value in (("optim", args.optim), ("optim_args", args.optim_args)):
        if asked is not None and value not in (None, default):
            raise ValueError(
                f"one option names the optimizer (got l2l_optimizer={asked!r} and {name}={str(value)!r}); leave out "
                "one of them"
            )


def _refuse_two_precisions(args: TrainingArguments) -> None:
    cmp, save = getattr(args, "cmp", None), getattr(args, "l2l_save_dtype", "fp32")
    launched = getattr(args, "mixed_precision", None)
    if cmp is not None and launched not in ("no", None) and not (args.bf16 or args.fp16):
        raise ValueError(_two_precisions(args))
    for name in ("bf16", "fp16"):
        if cmp is not None and getattr(args, name):
            raise ValueError(
                f"one option says in what layers compute (got cmp={cmp!r} and {name}=True, which is autocast); leave "
                f"out {name}"
            )
    if save not in ("fp32", "bf16", "fp16"):
        raise ValueError(
            f"l2l_save_dtype must be one of 'fp32', 'bf16', 'fp16' (got {save!r}); leave it out for the fp32 masters"
        )


def _two_precisions(args: TrainingArguments) -> str:
    """What is wrong with ACCELERATE_MIXED_PRECISION, which `accelerate launch` sets."""
    return (
        f"one option says in what layers compute (got cmp={getattr(args, 'cmp', None)!r}, and "
        f"mixed_precision={args.mixed_precision!r} from Accelerate); launch with --mixed_precision no, and use cmp"
    )
