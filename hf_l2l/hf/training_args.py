"""`TrainingArguments` with the options of layer-to-layer execution."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainingArguments

from hf_l2l.checkpoint import reserved
from hf_l2l.config import (
    BoundaryPlace,
    CheckRecompute,
    Cmp,
    EpsUpdate,
    GradDtype,
    HeadDevice,
    HostCopies,
    L2LConfig,
    MomentDtype,
    Nonfinite,
    Reduce,
    Resident,
    ResidentUpdate,
    StashPlace,
    StateTier,
    help_text,
)
from hf_l2l.counts import OptionNames, parsed_devices
from hf_l2l.noise.options import check_noise_scale, noise_scale_every_field, noise_scale_field
from hf_l2l.option_names import argument, options_of_the_trainer
from hf_l2l.ranks.team import launched_processes
from hf_l2l.realtime.options import check_realtime

_CONFIG = {f.name: f for f in fields(L2LConfig)}


def _as_configured(name: str, *default: Any) -> Any:
    """A field with the description of the option `name` of `L2LConfig`, and, unless it has another one, its default.

    Options that the description names are called there what they are called here.
    """
    text = _CONFIG[name].metadata["help"]
    for other in _CONFIG:
        for end in "`=":
            text = text.replace(f"`{other}{end}", f"`{argument(other)}{end}")
    return field(default=default[0] if default else _CONFIG[name].default, metadata={"help": text})


def refuse_mixin_after(base: type, mixin: type, made: type) -> None:
    """Raise ValueError if `mixin` comes after `base` in the order of the class `made`, where it overrides nothing."""
    order = made.__mro__
    if base in order and order.index(base) < order.index(mixin):
        other = next(b for b in made.__bases__ if issubclass(b, base))
        raise ValueError(
            f"{mixin.__name__} must come before {other.__name__} among the bases of a class, or it overrides nothing "
            f"(got {made.__name__} with {', '.join(b.__name__ for b in made.__bases__)}); write: "
            f"class {made.__name__}({mixin.__name__}, {other.__name__})"
        )


if TYPE_CHECKING:
    from transformers import TrainingArguments as _NextArguments
else:
    _NextArguments = object  # the arguments that the mixin is combined with come after it


@dataclass
class L2LArgumentsMixin(OptionNames, _NextArguments):  # type: ignore[misc]  # transformers ships no types
    """Adds the fields of `L2LConfig` to any dataclass of training arguments; `make_l2l_arguments` combines the two.

    A class statement needs the decorator, too: `@dataclass class Mine(L2LArgumentsMixin, SFTConfig)`.

    `per_device_train_batch_size` is the device batch; `ubatch_size` cuts it into the micro-batches of the inner loop.

    Raises:
        ValueError: for a bad value, or options that contradict each other. What L2L cannot honour is refused by
            `L2LTrainer`, which knows whether the model has layers. In the class statement, if the mixin comes after
            the arguments.
    """

    # Types are those of `L2LConfig`, as far as an argument parser can make them of words.
    ubatch_size: int | None = _as_configured("ubatch_size")
    stash: StashPlace = _as_configured("stash")
    l2l_spill_dir: str | None = _as_configured("spill_dir")
    l2l_boundary: BoundaryPlace = _as_configured("boundary")
    cmp: Cmp | None = _as_configured("cmp")
    l2l_loss_scale_init: float = _as_configured("loss_scale_init")
    l2l_loss_scale_growth: float = _as_configured("loss_scale_growth")
    l2l_loss_scale_backoff: float = _as_configured("loss_scale_backoff")
    l2l_loss_scale_interval: int = _as_configured("loss_scale_interval")
    l2l_grad_dtype: GradDtype = _as_configured("grad_dtype")
    l2l_moment_dtype: MomentDtype = _as_configured("moment_dtype")
    l2l_host_copies: HostCopies = _as_configured("host_copies")
    l2l_state_tier: StateTier = _as_configured("state_tier")
    l2l_state_dir: str | None = _as_configured("state_dir")
    l2l_state_window: int = _as_configured("state_window")
    l2l_nonfinite: Nonfinite = _as_configured("nonfinite")
    l2l_check_recompute: CheckRecompute = _as_configured("check_recompute")
    l2l_resident: Resident = _as_configured("resident")
    l2l_resident_layers: int = _as_configured("resident_layers")
    l2l_resident_update: ResidentUpdate = _as_configured("resident_update")
    l2l_kept_weights: int = _as_configured("kept_weights")
    l2l_kept_graphs: int = _as_configured("kept_graphs")
    l2l_device_stash: int = _as_configured("device_stash")
    l2l_chunked_loss: str = _as_configured("chunked_loss")
    l2l_head_device: HeadDevice = _as_configured("head_device")
    device_memory_budget: str | None = _as_configured("device_memory_budget", "auto")
    l2l_prefetch: bool = _as_configured("prefetch")
    l2l_gradient_slots: int = _as_configured("gradient_slots")
    eps_update: EpsUpdate = _as_configured("eps_update")
    l2l_num_threads: int | None = _as_configured("num_threads")
    l2l_rank_timeout: float = _as_configured("rank_timeout")
    l2l_reduce: Reduce = _as_configured("reduce")
    l2l_trace: str | None = _as_configured("trace")
    l2l_layer_classes: list[str] | None = _as_configured("layer_classes")
    l2l_devices: str = field(
        default="auto",
        metadata={
            "help": 'The devices that execute the layers in turn: "auto", all that are visible; a number, the first '
            'so many; or their indexes, such as "0,2". As with any Trainer in one process, a batch has '
            "`per_device_train_batch_size` rows for each, in one device batch with one loss; without `ubatch_size`, "
            "it is cut into two micro-batches for each, since with one they would take turns. On the CPU, it changes "
            "nothing. Of several ranks (torchrun, `accelerate launch`), each has its share of the visible devices, "
            "beginning with its own: of n, rank r has those with the indexes r, r + n, r + 2 n and so on; a number "
            "takes the first so many of these, and a batch has `per_device_train_batch_size` rows for each rank."
        },
    )
    l2l_optimizer: Literal["lamb"] | None = field(
        default=None,
        metadata={
            "help": '"lamb", the optimizer of the L2L papers, instead of the one that `optim` names. It takes '
            "`learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`. In other loops: "
            "`hf_l2l.Lamb`."
        },
    )
    l2l_save_dtype: Literal["fp32", "bf16", "fp16"] = field(
        default="fp32",
        metadata={
            "help": 'The dtype in which `trainer.save_model()` writes the weights: "fp32", "bf16" or "fp16". '
            "Checkpoints always have the fp32 masters."
        },
    )
    l2l_async_save: bool = field(
        default=False,
        metadata={
            "help": "Write checkpoints in the background, while training goes on. They are those of the step at which "
            "the saving began: an update waits until the weights and the optimizer state of its layer are written, or "
            "copied, of two layers at most. Old checkpoints are deleted, and callbacks called (`on_save`), when the "
            "new one is in its place. If it cannot be written, the next step or the end of the training raises. Of "
            "several ranks (torchrun, `accelerate launch`), each writes what it updates."
        },
    )
    l2l_realtime_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "A folder on a disk for real-time checkpoints: one after another is written in the background, as "
            "with `l2l_async_save`, and the last whole one is kept, so that a crash loses the steps since then. "
            "`resume_from_checkpoint=True` goes on from it if it is newer than those of `output_dir`. It has the form "
            "of any checkpoint (`checkpoint-N`); `on_save` is not called. It is for one training: what another "
            "one has written there is refused."
        },
    )
    l2l_realtime_every: str = field(
        default="auto",
        metadata={
            "help": 'After how many steps the next real-time checkpoint begins: a number, or "auto", which is the '
            "first step after the one before is on the disk. What that writes in a day, and how many steps a crash "
            "loses at most, is logged before the first one is there. If the disk needs longer than so many steps, "
            "they wait for it."
        },
    )
    l2l_realtime_errors: Literal["stop", "warn"] = field(
        default="stop",
        metadata={
            "help": 'What happens when a real-time checkpoint cannot be written, as on a full disk: "stop" ends the '
            'training with one sentence, "warn" goes on and tries again later. The last whole one is kept either way.'
        },
    )
    l2l_merge_accumulation: Literal["auto", "off"] = field(
        default="auto",
        metadata={
            "help": "Whether the batches of `gradient_accumulation_steps` run as one, cut between them, so that the "
            'weights travel twice a step, however many they are: "auto", which does so where it is the same step, or '
            '"off". It is the same where the model computes its loss itself as a sum divided by '
            "`num_items_in_batch`, without an auxiliary loss or batch norm, and the first step has the same loss and "
            "gradients either way, which takes about the time of two more steps. Otherwise a warning says why not. "
            "The loss of a step is returned with its last batch. The order of random numbers (dropout) is that of one "
            "large batch, and so is the device memory that grows with the batch (stash and boundary)."
        },
    )
    l2l_noise_scale: bool = noise_scale_field()
    l2l_noise_scale_every: str = noise_scale_every_field()
    l2l_log_times: bool = field(
        default=False,
        metadata={
            "help": "Log what a step takes and waits for (`l2l_step_s`, `l2l_wait_*_s`, `l2l_bound`). Without it, "
            "logs have tokens per second, the peak of the device, and the share of a step in which the device waited "
            "for the link, the host or a disk (`l2l_tokens_per_s`, `l2l_device_peak_gib`, `l2l_exposed`). All of it "
            "is in `l2l_run.jsonl` in `output_dir`, with what the run was, and its memory by name. Of several ranks, "
            "the tokens are those of all of them, and the rest is that of rank 0. Nothing of that is in "
            "`trainer_state.json`."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_mixin_after(TrainingArguments, L2LArgumentsMixin, cls)

    def __post_init__(self) -> None:
        refuse_conflicts(self)  # before the base class acts on them
        l2l_config(self)
        if own_option(self, "cmp") is not None and getattr(self, "bf16", None) is None:
            self.bf16 = False  # TRL's arguments take None for True
        super().__post_init__()
        refuse_conflicts(self)  # the base class derives some of them from others


OWN_OPTIONS = {f.name: f for f in fields(L2LArgumentsMixin)}
"""The fields that plain `TrainingArguments` does not have, by name."""


@dataclass
class L2LTrainingArguments(L2LArgumentsMixin, TrainingArguments):  # type: ignore[misc]  # transformers ships no types
    """transformers' `TrainingArguments` and the fields of `L2LConfig`.

    `per_device_train_batch_size` is the device batch; `ubatch_size` cuts it into the micro-batches of the inner loop.

    Raises:
        ValueError: for a bad value, or options that contradict each other. What L2L cannot honour is refused by
            `L2LTrainer`, which knows whether the model has layers.
    """


L2LTrainingArguments.__doc__ = f"{L2LTrainingArguments.__doc__}\n{help_text(OWN_OPTIONS.values())}\n"


def own_option(args: TrainingArguments, name: str) -> Any:
    """The value of one of `OWN_OPTIONS`; its default for plain `TrainingArguments`."""
    return getattr(args, name, OWN_OPTIONS[name].default)


def l2l_config(args: TrainingArguments) -> L2LConfig:
    """The `L2LConfig` that training arguments ask for; the defaults for plain `TrainingArguments`.

    The device is left open: it is known once the arguments have been set up. Errors name options as they are called
    there.
    """
    with options_of_the_trainer():
        return L2LConfig(**{name: own_option(args, argument(name)) for name in _CONFIG if name != "device"})


def refuse_conflicts(args: TrainingArguments) -> None:
    """Raise ValueError for options that contradict each other, whatever the model."""
    _refuse_two_optimizers(args)
    _refuse_two_precisions(args)
    parsed_devices(own_option(args, "l2l_devices"), "l2l_devices")
    merge = own_option(args, "l2l_merge_accumulation")
    if merge not in ("auto", "off"):
        raise ValueError(
            f"l2l_merge_accumulation must be 'auto' or 'off' (got {merge!r}); use 'off' to have accumulated batches "
            "run one by one"
        )
    async_save = own_option(args, "l2l_async_save")
    if not isinstance(async_save, bool):
        raise ValueError(
            f"l2l_async_save must be True or False (got {async_save!r}); True writes checkpoints in the background"
        )
    if getattr(args, "enable_jit_checkpoint", False) and own_option(args, "eps_update") == "eager":
        raise ValueError(
            "enable_jit_checkpoint=True saves between backward and optimizer.step(), so it does not go with "
            "eps_update='eager', which updates layers there (got both); use eps_update='deferred'"
        )
    if async_save and not reserved.can_write_places():
        raise ValueError(
            "l2l_async_save=True needs a system that writes to places in a file (got one without os.pwrite); leave it "
            "out"
        )
    check_realtime(args)
    check_noise_scale(args)
    log_times = own_option(args, "l2l_log_times")
    if not isinstance(log_times, bool):
        raise ValueError(
            f"l2l_log_times must be True or False (got {log_times!r}); True has what steps wait for in the logs, too"
        )
    if own_option(args, "eps_update") == "eager" and args.max_grad_norm and args.max_grad_norm > 0:
        raise ValueError(
            "eps_update='eager' updates layers before the norm of all gradients is known, so it cannot clip (got "
            f"max_grad_norm={args.max_grad_norm}); set max_grad_norm=0, or use eps_update='deferred', which clips and "
            "gives the same bits as 'serial'"
        )


def optim_of(args: Any) -> str:
    """The name of the optimizer, as it is typed; "" if none was given."""
    optim = getattr(args, "optim", "")
    return str(getattr(optim, "value", optim))


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
        ("parallelism_config", "L2L divides no layer among processes; leave it out"),
        ("torch_compile", "a compiled model cannot be run layer by layer; set torch_compile=False"),
        ("fp16", "its loss scaler would have to see gradients on the device; use cmp='fp16'"),
        ("fp16_full_eval", "it would cast the master weights; set bf16=True, or evaluate in fp32"),
        ("bf16_full_eval", "it would cast the master weights; set bf16=True, or evaluate in fp32"),
    ):
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"{name} cannot be used with L2L (got {name}={' '.join(repr(value).split())}): {remedy}")
    _refuse_of_ranks(args)
    optim = optim_of(args)
    if optim.endswith("_layerwise") or optim in _UPDATE_IN_BACKWARD:
        raise ValueError(
            f"optim cannot be used with L2L (got optim={optim!r}): it updates parameters in hooks of their backward, "
            f"which runs on copies; use optim={_UPDATE_IN_BACKWARD.get(optim, optim.removesuffix('_layerwise'))!r}"
        )
    if getattr(args, "mixed_precision", None) == "fp16":
        raise ValueError(_two_precisions(args))
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")  # `accelerate launch` sets it, and no argument has it
    if compiler.lower() != "no":
        raise ValueError(
            f"a compiled model cannot be run layer by layer (got dynamo_backend={compiler!r} from Accelerate); launch "
            "with --dynamo_backend no"
        )


def _refuse_of_ranks(args: Any) -> None:
    """Raise ValueError for what one rank of several would do by itself, and for ranks that would all train alone."""
    count, launched = getattr(args, "world_size", None) or 1, launched_processes()
    if count == 1 and launched > 1 and hasattr(args, "world_size"):
        raise ValueError(
            f"ranks of a launcher train together (got {launched} processes of torchrun or another launcher, in which "
            "each Trainer would train alone, as on a host without accelerators); give use_cpu=True (--use_cpu), with "
            "which they train on the CPU together"
        )
    for name, remedy in (
        ("l2l_state_dir", "the state on disk is that of one process; leave it out"),
        ("auto_find_batch_size", "a rank alone would try again, for which the others wait; set the batch size"),
        ("enable_jit_checkpoint", "a signal comes to ranks at different steps; set save_steps"),
        ("save_on_each_node", "ranks write one checkpoint, to a file system that all hosts share; leave it out"),
    ):
        if count > 1 and getattr(args, name, False):
            value = getattr(args, name)
            raise ValueError(f"several ranks train without {name} (got {name}={value}, and {count} ranks): {remedy}")


def _refuse_two_optimizers(args: TrainingArguments) -> None:
    asked = own_option(args, "l2l_optimizer")
    if asked not in (None, "lamb"):
        raise ValueError(
            f"l2l_optimizer must be 'lamb' or None (got {asked!r}); leave it out for the optimizer that optim names"
        )
    default = TrainingArguments.__dataclass_fields__["optim"].default
    for name, value in (("optim", optim_of(args)), ("optim_args", args.optim_args)):
        if asked is not None and value not in (None, default):
            raise ValueError(
                f"one option names the optimizer (got l2l_optimizer={asked!r} and {name}={str(value)!r}); leave out "
                "one of them"
            )


def _refuse_two_precisions(args: TrainingArguments) -> None:
    cmp, save = own_option(args, "cmp"), own_option(args, "l2l_save_dtype")
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
