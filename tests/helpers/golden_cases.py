"""The runs of a golden recording, and the one table in which their options are spelled.

A case speaks of options by terms of its own, so that it means the same before and after an option gets another name:
only its line in `OPTIONS` changes then, and recordings of earlier commits stay comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hf_l2l.option_names import argument

OPTIONS: dict[str, tuple[str | None, str | None]] = {
    "micro-batch": ("ubatch_size", "ubatch_size"),
    "stash": ("stash", "stash"),
    "stash folder": ("spill_dir", "l2l_spill_dir"),
    "boundary": ("boundary", "l2l_boundary"),
    "precision": ("cmp", "cmp"),
    "first loss scale": ("loss_scale_init", "l2l_loss_scale_init"),
    "loss scale interval": ("loss_scale_interval", "l2l_loss_scale_interval"),
    "gradients": ("grad_dtype", "l2l_grad_dtype"),
    "moments": ("moment_dtype", "l2l_moment_dtype"),
    "copies": ("host_copies", "l2l_host_copies"),
    "state": ("state_tier", "l2l_state_tier"),
    "state folder": ("state_dir", "l2l_state_dir"),
    "state window": ("state_window", "l2l_state_window"),
    "non-finite": ("nonfinite", "l2l_nonfinite"),
    "resident": ("resident", "l2l_resident"),
    "resident layers": ("resident_layers", "l2l_resident_layers"),
    "resident update": ("resident_update", "l2l_resident_update"),
    "kept weights": ("kept_weights", "l2l_kept_weights"),
    "kept graphs": ("kept_graphs", "l2l_kept_graphs"),
    "device stash": ("device_stash", "l2l_device_stash"),
    "chunked loss": ("chunked_loss", "l2l_chunked_loss"),
    "head": ("head_device", "l2l_head_device"),
    "budget": ("device_memory_budget", "device_memory_budget"),
    "prefetch": ("prefetch", "l2l_prefetch"),
    "gradient slots": ("gradient_slots", "l2l_gradient_slots"),
    "update": ("eps_update", "eps_update"),
    "reduce": ("reduce", "l2l_reduce"),
    "devices": ("device", "l2l_devices"),
    "optimizer": (None, "l2l_optimizer"),
    "weights saved": (None, "l2l_save_dtype"),
    "background saving": (None, "l2l_async_save"),
    "real-time folder": (None, "l2l_realtime_checkpoint"),
    "real-time every": (None, "l2l_realtime_every"),
    "merging": (None, "l2l_merge_accumulation"),
    "noise": (None, "l2l_noise_scale"),
    "noise every": (None, "l2l_noise_scale_every"),
}
"""Term -> what `L2LConfig` and the Trainer's arguments call the option; None where it is none of theirs."""

_NOT_RECORDED = {
    "num_threads": "bits do not depend on it, and a recording has one thread",
    "check_recompute": "it compares, and changes no bits",
    "rank_timeout": "no rank fails here",
    "trace": "a file of times",
    "loss_scale_growth": "a factor like that of the backoff, which overflows show",
    "loss_scale_backoff": "its default is used in each case that overflows",
    "layer_classes": "it names layers that these models are found to have",
}
NOT_RECORDED = {name: why for of, why in _NOT_RECORDED.items() for name in (of, argument(of))} | {
    "l2l_realtime_errors": "no disk fails here",
    "l2l_log_times": "times are not recorded",
}
"""Options that no case sets, each with the reason."""

FIELDS: dict[str, dict[str, str]] = {
    "trainer_state.json": {
        "steps": "global_step",
        "epochs": "epoch",
        "logs": "log_history",
        "best metric": "best_metric",
        "step of the best": "best_global_step",
        "rows of a batch": "train_batch_size",
        "tokens": "num_input_tokens_seen",
        "operations": "total_flos",
    },
    "l2l_manifest.json": {"step": "step", "files": "files", "options": "configuration.options"},
    "l2l_plan.json": {"asked": "asked", "options": "chosen", "batches": "batches", "budget": "budget_bytes"},
    "training_args.bin": {
        "rows": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "steps": "max_steps",
        "rate": "learning_rate",
        "clipping": "max_grad_norm",
        "optimizer of transformers": "optim",
        "seed": "seed",
        "options": "",
    },
}
"""File of a checkpoint that names times, runs, folders or classes -> what of it must stay -> where that stands today.
"options" are compared by their terms."""

LOGS = {
    "loss": "loss",
    "norm": "grad_norm",
    "rate": "learning_rate",
    "epoch": "epoch",
    "step": "step",
    "mean loss": "train_loss",
    "loss of evaluation": "eval_loss",
    "loss scale": "loss_scale",
    "skipped steps": "skipped_steps",
    "noise scale": "l2l_noise_scale",
    "critical batch": "l2l_critical_batch",
    "accuracy": "eval_accuracy",
    "tokens of evaluation": "eval_tokens",
}
"""What is recorded of the logs -> its name there. All else is measured, and differs from run to run."""


def options_of(terms: Mapping[str, Any], *, of_trainer: bool = False) -> dict[str, Any]:
    """The keyword arguments of `L2LConfig`, or of the Trainer's arguments, that `terms` mean today."""
    names = {term: OPTIONS[term][of_trainer] for term in terms}
    assert None not in names.values(), f"not all options of {'the Trainer' if of_trainer else 'L2LConfig'}: {names}"
    return {str(names[term]): value for term, value in terms.items()}


def terms_of(options: Any, *, of_trainer: bool) -> dict[str, Any]:
    """Term -> value of what `options`, a dict or an object, say of the options that the table has."""
    has = options if isinstance(options, Mapping) else vars(options)
    found = {term: has.get(names[of_trainer]) for term, names in OPTIONS.items()}
    return {term: value for term, value in found.items() if value is not None}


@dataclass(frozen=True)
class Case:
    """A run, what it is to keep, and where it runs."""

    where: str
    """ "cpu", "sim" (the simulated accelerator), or "cpu ranks", "sim ranks": two ranks of torchrun."""
    kind: str
    """What it shows; `--quick` runs the first case of each kind."""
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Term -> value; see `OPTIONS`."""
    run: str = "loop"
    """The function of `golden_runs` that runs it: "loop", "trainer", "script"."""
    optimizer: str = "AdamW"
    groups: bool = False
    """Whether vectors have another learning rate than matrices, and no weight decay."""
    clips: bool = True
    micro_steps: int = 2
    steps: int = 4
    tokens: int = 6
    uses: str = ""
    """What else happens: "evaluation" or "generation" between steps, "inf" (a loss that is not finite), "autocast"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of transformers' `TrainingArguments`."""
    trainer: str = "Trainer"

    @property
    def name(self) -> str:
        """Unique, and the same as long as the case means the same."""
        words = [self.kind, self.model, *(f"{term} {value}" for term, value in self.options.items())]
        words += [self.optimizer] if self.optimizer != "AdamW" else []
        words += ["without clipping"] if not self.clips else []
        words += [self.uses] if self.uses else []
        words += [f"{name} {value}" for name, value in self.arguments.items()]
        return f"{self.where}: {', '.join(words)}"


def cases() -> list[Case]:
    """All runs. Those of one kind stand together, the plainest first."""
    found = [
        *(case for where in ("cpu", "sim") for case in _everywhere(where)),
        *_on_a_device(),
        *_on_devices(),
        *(case for where in ("cpu", "sim") for case in _trainers(where)),
        *_scripts(),
        *_ranks(),
    ]
    assert len({case.name for case in found}) == len(found)
    return found


SHOWN_ON_A_DEVICE = ("update modes", "precision", "stash", "state on disk", "adapters")
"""Kinds that run on both, which `--quick` runs on the simulated accelerator, where waits and copies show."""


def quick(of: list[Case]) -> list[Case]:
    """The first case of each kind; on the simulated accelerator, which is slower, where that shows more."""
    firsts: dict[str, Case] = {}
    for case in sorted(of, key=lambda case: (case.kind in SHOWN_ON_A_DEVICE) == case.where.startswith("cpu")):
        firsts.setdefault(case.kind, case)
    return [case for case in of if firsts[case.kind] is case]


def _everywhere(where: str) -> Iterator[Case]:
    for model, update, rows in product(("llama", "bert", "t5"), ("deferred", "serial", "eager"), (3, None)):
        yield Case(where, "update modes", model, {"update": update, "micro-batch": rows}, clips=update != "eager")

    yield Case(where, "precision", "llama", {"precision": "bf16", "update": "deferred", "micro-batch": 4})
    yield Case(where, "precision", "llama", {"precision": "bf16", "update": "eager"}, clips=False)
    for update, precision, stash in product(("deferred", "serial"), ("bf16", "fp16"), ("host", "device")):
        options = {"update": update, "precision": precision, "stash": stash, "micro-batch": 4}
        yield Case(where, "precision", "bert", options)

    small = {"gradients": "16bit", "moments": "bf16"}
    per_sweep = {"copies": "per_sweep"}
    for state in ({"gradients": "16bit"}, {"moments": "bf16"}, small, per_sweep, {**small, **per_sweep}):
        yield Case(where, "host state", "bert", {"precision": "bf16", "update": "deferred", **state})
    yield Case(where, "host state", "bert", {**small, "update": "serial"})

    overflowing = {"precision": "fp16", "first loss scale": 2.0**26, "loss scale interval": 1}
    for update in ("deferred", "serial"):
        options = {**overflowing, "update": update}
        yield Case(where, "loss scale that overflows", "bert", options, steps=12)
        yield Case(where, "not finite", "bert", {"non-finite": "skip", "update": update}, uses="inf")

    for optimizer in ("fused AdamW", "Adam", "fused Adam", "SGD", "LAMB", "Adafactor"):
        yield Case(where, "optimizers", "llama", {"update": "deferred"}, optimizer=optimizer, groups=True)
    yield Case(where, "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True, clips=False)
    yield Case(where, "optimizers", "llama", {"update": "serial"}, optimizer="LAMB", groups=True, clips=False)
    for state, clips in product(({}, {"gradients": "16bit"}, small), (True, False)):
        options = {"precision": "bf16", "update": "deferred", **state}
        for optimizer in ("fused AdamW",) if state else ("fused AdamW", "SGD"):
            yield Case(where, "16-bit optimizers", "bert", options, optimizer=optimizer, groups=True, clips=clips)
    fused_overflow = {**overflowing, "update": "deferred"}
    yield Case(where, "16-bit optimizers", "bert", fused_overflow, optimizer="fused AdamW", steps=12)

    for stash in ("disk", "host", "auto"):
        yield Case(where, "stash", "llama", {"stash": stash, "micro-batch": 4, "update": "deferred"})
        yield Case(where, "stash", "bert", {"stash": stash, "micro-batch": 2, "update": "deferred"})
    for update, precision in product(("deferred", "serial"), (None, "bf16")):
        options = {"state": "disk", "state window": 3, "update": update, "precision": precision}
        yield Case(where, "state on disk", "deep", options, optimizer="fused AdamW")
    yield Case(where, "state on disk", "deep", {"state": "disk", "update": "eager"}, clips=False)

    yield Case(where, "adapters", "adapted", {"update": "deferred", "micro-batch": 4})
    yield Case(where, "adapters", "adapted 16-bit base", {"update": "deferred", "precision": "bf16"})
    yield Case(where, "adapters", "adapted 16-bit base", {"update": "serial"}, uses="autocast")
    yield Case(where, "shared layers", "albert", {"update": "deferred", "micro-batch": 4})
    yield Case(where, "shared layers", "albert", {"update": "eager"}, clips=False)
    yield Case(where, "other uses", "bert", {"update": "deferred", "micro-batch": 4}, uses="evaluation")
    yield Case(where, "other uses", "llama", {"update": "deferred", "precision": "bf16"}, uses="generation")
    yield Case(where, "other uses", "bert", {"update": "deferred", "micro-batch": 4}, uses="autocast")


def _on_a_device() -> Iterator[Case]:
    """Cases whose options have an effect only on a device with memory of its own."""
    for options in (
        {"resident": "shell"},
        {"resident layers": 1},
        {"resident": "shell", "resident layers": 2, "resident update": "host"},
        {"resident": "all"},
        {"resident": "shell", "resident layers": 1, "precision": "bf16"},
        {"resident": "all", "precision": "fp16"},
    ):
        for optimizer in ("fused AdamW", "LAMB") if options == {"resident": "shell"} else ("fused AdamW",):
            yield Case("sim", "resident", "llama", {"update": "deferred", **options}, optimizer=optimizer)
    yield Case("sim", "resident", "bert", {"resident": "shell", "update": "eager", "micro-batch": 3}, clips=False)

    for options in (
        {"kept weights": 2, "kept graphs": 1},
        {"kept weights": 2},
        {"kept graphs": 2, "micro-batch": 4},
        {"device stash": 1, "stash": "host", "micro-batch": 4},
        {"gradient slots": 1, "prefetch": False, "stash": "host", "micro-batch": 2},
        {"gradient slots": 1},
    ):
        yield Case("sim", "kept on the device", "bert", {"update": "deferred", **options})

    for stash, model in product(("host", "disk"), ("llama", "bert", "t5")):
        options = {"boundary": "host", "stash": stash, "micro-batch": 3, "update": "deferred"}
        yield Case("sim", "boundary on the host", model, options)

    several = ({}, {"precision": "bf16"}, {"chunked loss": "off"})
    for model, more in product(("llama", "untied llama"), several):  # 320 tokens: three chunks
        options = {"update": "deferred", "stash": "host", "micro-batch": 4, **more}
        yield Case("sim", "chunked loss", model, options, tokens=40, steps=2)


def _on_devices() -> Iterator[Case]:
    both = ({"micro-batch": 4}, {"precision": "bf16", "stash": "host", "micro-batch": 2})
    for model, count, options in product(("llama", "bert"), (2, 3), both):
        yield Case("sim", "several devices", model, {"devices": count, "update": "deferred", **options})
    for head in ("first", "auto"):
        settings = {"devices": 2, "micro-batch": 4, "update": "deferred", "head": head}
        yield Case("sim", "several devices", "untied llama", settings, tokens=40, steps=2)
    residents = {"devices": 2, "resident": "shell", "resident layers": 1, "micro-batch": 4}
    yield Case("sim", "several devices", "llama", residents, optimizer="fused AdamW")


def _trainers(where: str) -> Iterator[Case]:
    def trained(
        kind: str, model: str, options: dict[str, Any], arguments: dict[str, Any] | None = None, **more: Any
    ) -> Case:
        return Case(where, kind, model, options, run="trainer", arguments=arguments or {}, **more)

    yield trained("Trainer", "bert", {"update": "deferred", "micro-batch": 4}, {"eval_steps": 2})
    accumulated = {"gradient_accumulation_steps": 2}
    for merging in ("auto", "off"):
        yield trained("Trainer", "llama", {"merging": merging, "update": "deferred"}, accumulated)
    precise = {"precision": "bf16", "gradients": "16bit", "moments": "bf16", "micro-batch": 4}
    yield trained("Trainer", "bert", {**precise, "background saving": True}, accumulated)
    yield trained("Trainer", "bert", {"precision": "fp16", "update": "serial", "first loss scale": 2.0**20})
    yield trained("Trainer", "bert", {"update": "eager"}, {"max_grad_norm": 0.0, "optim": "adamw_torch"})
    yield trained("Trainer", "bert", {"optimizer": "lamb", "weights saved": "bf16"}, accumulated)
    yield trained("Trainer", "bert", {"update": "deferred"}, {"optim": "adafactor", "lr_scheduler_type": "cosine"})
    yield trained("Trainer", "bert", {"update": "deferred"}, {"optim": "sgd", "bf16": True})
    best = {"eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    yield trained("Trainer", "bert", {"stash": "host"}, best)
    yield trained("Trainer", "adapted", {"update": "deferred"})
    yield trained("Trainer", "llama", {"noise": True, "noise every": 1, "micro-batch": 2})
    yield trained("Trainer", "t5", {"update": "deferred"}, {"eval_steps": 2}, trainer="Seq2SeqTrainer")
    on_disk = {"state": "disk", "state window": 3, "update": "deferred"}
    yield trained("checkpoints", "deep", on_disk)
    yield trained("checkpoints", "bert", {"real-time folder": "now", "real-time every": "1", "update": "deferred"})
    if where == "sim":
        yield trained("checkpoints", "llama", {"resident": "shell", "resident layers": 1})
        yield trained("budget", "llama", {"budget": "200KiB", "precision": "bf16"})
        yield trained("budget", "bert", {"budget": "8MiB"}, accumulated)
        yield trained("Trainer on devices", "llama", {"devices": "2", "micro-batch": 4})


def _scripts() -> Iterator[Case]:
    yield Case("cpu", "run_glue_l2l.py", "glue", {"update": "deferred", "micro-batch": 2}, run="script")
    options = {"precision": "bf16", "stash": "host", "micro-batch": 2}
    yield Case("sim", "run_glue_l2l.py", "glue", options, run="script")


def _ranks() -> Iterator[Case]:
    for where in ("cpu ranks", "sim ranks"):
        for model, options in (
            ("bert", {"update": "deferred", "micro-batch": 4}),
            ("bert", {"update": "serial"}),
            ("llama", {"update": "deferred", "precision": "bf16", "gradients": "16bit", "moments": "bf16"}),
            ("llama", {"update": "deferred", "stash": "host", "micro-batch": 2}),
            ("adapted", {"update": "deferred"}),
        ):
            yield Case(where, "ranks", model, options, optimizer="fused AdamW")
        yield Case(where, "ranks", "bert", {"precision": "fp16", "first loss scale": 2.0**26}, steps=8)
        yield Case(where, "ranks", "bert", {"update": "eager"}, clips=False)
    yield Case("sim ranks", "ranks", "bert", {"reduce": "device", "update": "deferred"})
    residents = {"resident": "shell", "resident layers": 1, "resident update": "host"}
    yield Case("sim ranks", "ranks", "llama", residents, optimizer="fused AdamW")
    yield Case("cpu ranks", "Trainer in ranks", "bert", {"update": "deferred"}, run="trainer")
    background = {"update": "deferred", "background saving": True, "precision": "bf16"}
    yield Case("cpu ranks", "Trainer in ranks", "llama", background, run="trainer")
