"""Any arguments, transformers' and ours together: `L2LTrainer` trains as `Trainer` does, or raises a clear error.

A training under L2L ends as that of plain `Trainer` does, with the same losses and weights; or, where plain `Trainer`
raises for these arguments, with the same error; or with a ValueError of ours, which names an option that was given.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import traceback
import typing
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.training_args import OptimizerNames

import hf_l2l
from hf_l2l import L2LTrainer, L2LTrainingArguments
from hf_l2l.hf.training_args import OWN_OPTIONS
from tiers import ALL, more, times
from training import CHECKPOINTING, logs, tiny_bert, trainer

OPTIMIZERS = [each.value for each in OptimizerNames]
SCHEDULERS = [each.value for each in hf.SchedulerType]

OF_SCHEDULER: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 1},
}
"""What these need besides their name."""

KNOWN = set(L2LTrainingArguments.__dataclass_fields__)
ROWS = 4
EVERY = ["no", "steps", "epoch"]

SWITCHES = """
bf16 auto_find_batch_size logging_first_step eval_on_start prediction_loss_only
save_only_model load_best_model_at_end dataloader_drop_last use_cache ignore_data_skip
""".split()
REFUSED = "fp16 bf16_full_eval fp16_full_eval torch_compile dataloader_persistent_workers".split()
THEIRS: dict[str, tuple[list[Any], list[Any]]] = {
    "optim": (OPTIMIZERS, ["adam"]),
    "lr_scheduler_type": (SCHEDULERS, ["steep"]),
    "warmup_steps": ([1, 0.5], [-1]),
    "max_grad_norm": ([0.0, 0.1, 1.0], [None, -1.0]),
    "weight_decay": ([0.1], []),
    "gradient_accumulation_steps": ([2, 3], [0]),
    "train_sampling_strategy": (["sequential", "group_by_length"], ["sorted"]),
    "label_smoothing_factor": ([0.1], [-0.5]),
    "neftune_noise_alpha": ([5.0], []),
    "logging_strategy": ([*EVERY], ["never"]),
    "logging_steps": ([1, 2, 0.5], [0]),
    "logging_nan_inf_filter": ([False], []),
    "include_num_input_tokens_seen": (["all", "non_padding", True], []),
    "eval_strategy": ([*EVERY], ["best"]),
    "eval_steps": ([1, 2, 0.5], [0]),
    "eval_delay": ([1], []),
    "eval_accumulation_steps": ([1], []),
    "eval_do_concat_batches": ([False], []),
    "save_strategy": ([*EVERY], []),
    "save_steps": ([1, 2], [0]),
    "save_total_limit": ([1, 2], [0]),
    "metric_for_best_model": (["loss"], ["speed"]),
    "seed": ([1], []),
    "data_seed": ([2], []),
    "dataloader_prefetch_factor": ([], [2]),
    "remove_unused_columns": ([False], []),
    "torch_empty_cache_steps": ([1], [0]),
    "max_steps": ([1, 2, -1], []),
    "num_train_epochs": ([0.5, 1.0], []),
    "learning_rate": ([0.0, 0.01], []),
    "per_device_eval_batch_size": ([3, 16], []),
    "deepspeed": ([], [{"zero_optimization": {"stage": 3}}]),
    "fsdp": ([], ["full_shard"]),
    CHECKPOINTING: ([True, False], []),
    **dict.fromkeys(SWITCHES, ([True], [])),
    **dict.fromkeys(REFUSED, ([], [True])),
}
"""Options of transformers: values that are good by themselves, and those that L2L or transformers refuses.

Without `skip_memory_metrics`, whose thread transformers does not end if the training raises.
"""

NUMBERED: dict[str, tuple[list[Any], list[Any]]] = {
    "ubatch_size": ([1, 2, 3, 100], [0, "2", True]),
    "l2l_loss_scale_init": ([1024.0], [-1.0]),
    "l2l_loss_scale_interval": ([1], [0]),
    "l2l_state_window": ([], [2, "4"]),
    "l2l_resident_layers": ([1, 3], [-1, 1.5]),
    "l2l_kept_weights": ([1], [9, -1]),
    "l2l_kept_graphs": ([1, 2], [9, "1"]),
    "l2l_device_stash": ([1, 2], [9]),
    "device_memory_budget": (["auto", "off", "8GiB"], ["-1", 8]),
    "l2l_gradient_slots": ([1, 2], [3]),
    "l2l_num_threads": ([1], [0, 1000000]),
    "l2l_rank_timeout": ([1, 60.5], [0, "long", float("nan")]),
    "l2l_layer_classes": ([["BertLayer"]], [["NoLayer"], [], "BertLayer"]),
    "l2l_devices": (["1", "auto"], ["all", 0]),
    "l2l_realtime_every": ([], [0, "often"]),
    "l2l_noise_scale_every": ([], [0, "often"]),
}
NO_GOOD = {"l2l_realtime_errors"}
"""Words that need another option, in any case."""


def choices() -> dict[str, tuple[list[Any], list[Any]]]:
    """Options of ours that are one of some words, or switches."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for name, kind in typing.get_type_hints(L2LTrainingArguments).items():
        words = re.findall(r"'(\w+)'", str(kind)) if "Literal" in str(kind) else [True, False] * (kind is bool)
        if name in OWN_OPTIONS and words:
            found[name] = ([] if name in NO_GOOD else words, ["nonsense"])
    return found


OURS = NUMBERED | choices()
"""Our options, likewise."""


GOOD, BAD = (
    {name: values[number] for name, values in {**THEIRS, **OURS}.items() if name in KNOWN and values[number]}
    for number in (0, 1)
)
NO_DRAWS = {"l2l_spill_dir", "l2l_state_dir", "l2l_trace", "l2l_realtime_checkpoint"}
NO_DRAWS |= {"l2l_loss_scale_growth", "l2l_loss_scale_backoff"}


def test_every_option_of_ours_is_drawn():
    assert set(OURS) | NO_DRAWS == set(OWN_OPTIONS)


NO_DRAWS |= {"l2l_loss_scale_growth", "l2l_loss_scale_backoff"}


@st.composite
def drawn_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of transformers, and ours; one of them is bad by itself in one of three draws."""
    names = draw(st.lists(st.sampled_from([name for name in GOOD if name in THEIRS]), max_size=7, unique=True))
    names += draw(st.lists(st.sampled_from([name for name in GOOD if name in OURS]), max_size=4, unique=True))
    given = {name: draw(st.sampled_from(GOOD[name])) for name in names}
    if draw(st.integers(0, 2)) == 2:
        name = draw(st.sampled_from([*BAD]))
        given[name] = draw(st.sampled_from(BAD[name]))
    scheduler = given.get("lr_scheduler_type")
    if scheduler in OF_SCHEDULER and draw(st.integers(0, 4)):
        given["lr_scheduler_kwargs"] = OF_SCHEDULER[scheduler]
    return given


class Outcome(NamedTuple):
    """What has become of a training."""

    losses: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    error: Exception | None


def outcome(kind: type[hf.Trainer], folder: Path, options: dict[str, Any]) -> Outcome:
    """Two steps of a BERT without dropout."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    before = torch.get_rng_state()
    defaults = {"max_steps": 2, "per_device_train_batch_size": ROWS, "device_memory_budget": "auto", "use_cpu": True}
    if not issubclass(kind, L2LTrainer):
        defaults.pop("device_memory_budget")
    model = tiny_bert(dropout=0.0, layers=2)
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            made = trainer(kind, folder, model=model, **{**defaults, **options})
            made.train()
        return Outcome(logs(made), {n: p.clone() for n, p in made.model.state_dict().items()}, None)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is compared
        return Outcome([], {}, error)
    finally:
        torch.set_rng_state(before)


def is_ours(error: Exception | None, options: dict[str, Any]) -> bool:
    """Whether it is a ValueError raised by the package, with the name of an option as it was given, and its value."""
    if not isinstance(error, ValueError):
        return False
    file, text = traceback.extract_tb(error.__traceback__)[-1].filename, str(error)
    # A list is told by its first wrong name.
    values = {name: value[0] if isinstance(value, list) and value else value for name, value in options.items()}
    named = any(name in text and ("(got " in text or repr(value) in text) for name, value in values.items())
    return named and Path(hf_l2l.__file__).parent in Path(file).parents


def check(folder: Path, options: dict[str, Any]) -> None:
    """A training with these arguments ends as that of plain `Trainer`, or with an error of ours."""
    ours = {name: value for name, value in options.items() if name in OURS}
    theirs = {name: value for name, value in options.items() if name not in OURS}
    found = outcome(L2LTrainer, folder / "l2l", options)
    if is_ours(found.error, options):
        return
    expected = outcome(hf.Trainer, folder / "plain", {CHECKPOINTING: True, **theirs})
    if expected.error is not None or found.error is not None:
        said = [f"{type(each.error).__name__}: {each.error}" for each in (found, expected)]
        if said[0].replace(str(folder / "l2l"), str(folder / "plain")) != said[1]:
            raise AssertionError(f"{said[0]} under L2L, {said[1]} in plain Trainer") from found.error
        return
    tolerance = allowed(theirs, ours)
    if tolerance is None:
        return
    assert len(found.losses) == len(expected.losses)
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert abs(one[key] - value) <= tolerance * max(1.0, abs(value)), (key, one[key], value)
    for name, value in expected.weights.items():
        if tolerance == 0:
            assert torch.equal(found.weights[name], value), name


def allowed(theirs: dict[str, Any], ours: dict[str, Any]) -> float | None:
    """How far losses and norms may be from those of plain `Trainer`; with 0, weights are equal to the bit, too.

    None if the training is another one by its arguments.
    """
    accumulates = theirs.get("gradient_accumulation_steps", 1) > 1 and ours.get("l2l_merge_accumulation") != "off"
    if ours.get("l2l_optimizer") is not None or (accumulates and "neftune_noise_alpha" in theirs):
        return None  # LAMB; and noise in the order of one large batch
    if {"cmp", "l2l_grad_dtype", "l2l_moment_dtype"} & set(ours):
        return 0.1
    splits = accumulates or (ours.get("ubatch_size") or ROWS) < ROWS or ours.get("l2l_boundary") == "host"
    return 0.0 if not splits else 0.05 if "bf16" in theirs else 1e-4


@settings(max_examples=times(15, 250), deadline=None, derandomize=not ALL, print_blob=True)
@given(options=drawn_arguments())
def test_drawn_arguments(options):
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), options)


UPDATES = itertools.cycle(["serial", "deferred", "eager"])
NAMED = [("optim", "adafactor", "deferred"), ("optim", "galore_adamw", "serial")]
NAMED += more(*(("optim", name, update) for name, update in zip(OPTIMIZERS, UPDATES, strict=False)))
NAMED += more(*(("lr_scheduler_type", name, "deferred") for name in SCHEDULERS))


@pytest.mark.parametrize(("option", "name", "update"), NAMED)
def test_every_optimizer_and_scheduler_by_name(tmp_path, option, name, update):
    options: dict[str, Any] = {option: name, "max_grad_norm": 0.0, "eps_update": update}
    if name.startswith(("galore", "apollo")):
        options["optim_target_modules"] = ["attention"]
    if option == "lr_scheduler_type":
        options |= {"warmup_steps": 1, "max_steps": 4, "lr_scheduler_kwargs": OF_SCHEDULER.get(name)}
    if name in ("reduce_lr_on_plateau", "greedy"):  # they read the metric of an evaluation
        options |= {"eval_strategy": "steps", "eval_steps": 1}
    check(tmp_path, options)
    assert option == "optim" or outcome(L2LTrainer, tmp_path / "again", options).error is None
