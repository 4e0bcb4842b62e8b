"""Options as fields of `L2LConfig`, as arguments of the Trainer, and on the command line: what is taken, and what each
becomes. What is refused is in tests/sim/test_refusals.py, one value of each option. With any arguments, transformers'
and ours together, `L2LTrainer` trains as `Trainer` does, or raises a clear error."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import os
import pickle
import re
import tempfile
import traceback
import typing
import warnings
from dataclasses import fields
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
from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, Lamb, make_l2l_arguments
from hf_l2l.hf.training_args import OWN_OPTIONS, l2l_config
from hf_l2l.option_names import argument
from tiers import ALL, more, times
from training import CHECKPOINTING, arguments, logs, rows, tiny_bert, trainer

NAMES = [field.name for field in fields(L2LConfig)]


# ---- the config


def test_a_config_is_a_value():
    config = L2LConfig()
    assert L2LConfig(ubatch_size=2) == L2LConfig(ubatch_size=2) != L2LConfig(ubatch_size=3)
    assert hash(L2LConfig(layer_classes=("Block",))) == hash(L2LConfig(layer_classes=["Block"]))
    assert list(inspect.signature(L2LConfig).parameters) == NAMES
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ubatch_size = 3
    with pytest.raises(TypeError):
        L2LConfig(4)  # by name only
    with pytest.raises(ValueError, match=r"\(got 0\)"):
        dataclasses.replace(config, ubatch_size=0)


WORDS = sorted(set(re.findall(r"'(\w+)'", str([*typing.get_type_hints(L2LConfig).values()]))))
TEXTS = ["cpu", "cuda:1", "Block", "yes", "4", "8GiB", "a\0b", "\ud800", "x" * 300, "nonsense?/", *WORDS]
SCALARS = st.one_of(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([10**7, 10**400]),
    st.floats() | st.complex_numbers() | st.sampled_from(TEXTS) | st.binary(max_size=3),
    st.text(st.characters(exclude_characters="/"), max_size=5),  # and no path that another test looks at
)
ANYTHING = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2) | st.lists(SCALARS, max_size=2).map(tuple) | st.just([[]]),
    st.dictionaries(st.text(max_size=2), SCALARS, max_size=1),
    st.builds(torch.ones, st.integers(0, 2)) | st.builds(object),
)


@settings(max_examples=times(400, 12_000), deadline=None)
@given(name=st.sampled_from(NAMES), value=ANYTHING)
def test_any_value_makes_a_config_or_is_refused_by_the_name_that_was_typed(name, value):
    named = {"max_grad_norm": 0.0, "report_to": [], argument(name): value}
    try:
        config = L2LConfig(**{name: value})
    except ValueError as error:
        said = str(error)
        assert re.search(rf"\b{name}\b", said), said
        if name != "device":
            with pytest.raises(ValueError) as refused:
                L2LTrainingArguments("out", **named)
            assert re.sub(r"\bl2l_", "", str(refused.value)) == said
            assert str(refused.value).startswith(argument(name)) or f"(got {argument(name)}=" in str(refused.value)
    else:
        assert config == L2LConfig(**{name: value})
        assert isinstance(hash(config), int)
        if name != "device":
            assert getattr(l2l_config(L2LTrainingArguments("out", **named)), name) == getattr(config, name)


def test_an_option_that_does_not_exist_is_told_with_the_nearest():
    of_seq2seq = make_l2l_arguments(hf.Seq2SeqTrainingArguments)
    for kind, name, end in (
        (L2LConfig, "ubatchsize", "did you mean ubatch_size?"),
        (L2LConfig, "l2l_trace", "did you mean trace?"),
        (L2LTrainingArguments, "l2l_bounary", "did you mean l2l_boundary?"),
        (of_seq2seq, "l2l_stash", "did you mean stash?"),
    ):
        with pytest.raises(TypeError, match=rf"option of {kind.__name__} must.* \(got {name}\); {re.escape(end)}$"):
            kind(**{name: 1, "stash": "host"})

    class Own(L2LTrainingArguments):
        def __init__(self, folder, *, size):
            super().__init__(str(folder), ubatch_size=size, report_to=[])

    assert Own("out", size=3).ubatch_size == 3
    with pytest.raises(TypeError, match=r"option of Own must be one that it has \(got sise\); did you mean size\?"):
        Own("out", sise=3)


# ---- as arguments


OF_THE_TRAINER = {"device_memory_budget": "auto"}
"""Defaults that are others in `L2LConfig`."""
AS_PARSED: dict[str, Any] = {
    **dict.fromkeys(("trace", "spill_dir", "state_dir"), (str | os.PathLike[str] | None, str | None)),
    "layer_classes": (tuple[str, ...] | None, list[str] | None),
    "chunked_loss": (typing.Literal["auto", "off"] | int, str),
}
"""Types of `L2LConfig` that a parser cannot make of words, and those of the arguments."""


def test_arguments_have_the_options_of_the_config_with_their_types_defaults_and_descriptions():
    types, typed = typing.get_type_hints(L2LConfig), typing.get_type_hints(L2LTrainingArguments)
    assert list(OWN_OPTIONS)[: len(NAMES) - 1] == [argument(name) for name in NAMES if name != "device"]
    assert all(f"\n        {name}: " in L2LConfig.__doc__ for name in NAMES)
    for option in (each for each in fields(L2LConfig) if each.name != "device"):
        name = argument(option.name)
        here = OWN_OPTIONS[name]
        assert (types[option.name], typed[name]) == AS_PARSED.get(option.name, (types[option.name],) * 2)
        assert (here.default, here.metadata.keys()) == (OF_THE_TRAINER.get(name, option.default), {"help"})
        assert re.sub(r"`l2l_(\w+)(=[^`]*)?`", r"`\1\2`", here.metadata["help"]) == option.metadata["help"]
    ours = {field.name for field in fields(L2LTrainingArguments)}
    assert set(OWN_OPTIONS) == ours - {field.name for field in fields(hf.TrainingArguments)}
    assert all(f"\n        {name}: " in L2LTrainingArguments.__doc__ for name in OWN_OPTIONS)


def test_options_come_from_words_and_from_a_file(tmp_path):
    parser = hf.HfArgumentParser(L2LTrainingArguments)
    words = "--output_dir out --report_to none --ubatch_size 4 --stash host --l2l_layer_classes A B".split()
    (args,) = parser.parse_args_into_dataclasses(words)
    assert l2l_config(args) == L2LConfig(ubatch_size=4, stash="host", layer_classes=("A", "B"), **OF_THE_TRAINER)
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": "out", "report_to": [], "ubatch_size": 2, "stash": "host"}))
    (args,) = parser.parse_json_file(str(file))
    assert l2l_config(args) == L2LConfig(ubatch_size=2, stash="host", **OF_THE_TRAINER)
    for plain in (*parser.parse_args_into_dataclasses(words[:4]), arguments(hf.TrainingArguments, tmp_path)):
        assert l2l_config(plain) == L2LConfig(**OF_THE_TRAINER)


def test_arguments_can_be_written_copied_and_replaced(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, ubatch_size=3, stash="host", l2l_layer_classes=["A", "B"])
    written = json.loads(json.dumps(args.to_dict()))
    assert (written["ubatch_size"], written["stash"], written["l2l_layer_classes"]) == (3, "host", ["A", "B"])
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):  # noqa: S301  # our own bytes
        assert isinstance(other, L2LTrainingArguments)
        assert l2l_config(other) == l2l_config(args)
        assert other.to_dict() == args.to_dict()
    assert (dataclasses.replace(args, ubatch_size=5).ubatch_size, args.ubatch_size) == (5, 3)
    with pytest.raises(ValueError, match=r"\(got 0\)"):
        dataclasses.replace(args, ubatch_size=0)


# ---- what a trainer does with them


def made(args: hf.TrainingArguments) -> L2LTrainer:
    return L2LTrainer(tiny_bert(layers=2), args, train_dataset=rows())


def test_what_places_or_casts_the_model_is_refused_of_plain_arguments_too(tmp_path):
    """What is no conflict is taken."""
    kind, host = hf.TrainingArguments, {"use_cpu": True}
    placed = arguments(kind, tmp_path)
    placed.deepspeed = {"zero_optimization": {"stage": 3}}
    for name, args in (
        ("deepspeed", placed),
        ("fp16_full_eval", arguments(kind, tmp_path, **host, fp16_full_eval=True)),
        ("torch_compile", arguments(kind, tmp_path, **host, torch_compile_backend="inductor")),
    ):
        with pytest.raises(ValueError, match=f"^{name} cannot be used with L2L"):
            made(args)
    made(arguments(kind, tmp_path, bf16=True, **host))


def test_what_is_set_after_the_arguments_were_made_is_refused_too(tmp_path, monkeypatch):
    args = arguments(L2LTrainingArguments, tmp_path, eps_update="eager", max_grad_norm=0.0)
    args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="max_grad_norm=1.0"):
        made(args)
    args.max_grad_norm = 0.0
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # as `accelerate launch` sets it
    made(args)


def test_a_trainer_counts_the_devices_that_layers_run_on(tmp_path):
    """Here the CPU alone, whatever transformers has found; and a script for several devices runs there, too."""
    for kind in (L2LTrainingArguments, hf.TrainingArguments):
        args = arguments(kind, tmp_path)
        args._n_gpu = 2
        assert (made(args).args.train_batch_size, args.n_gpu) == (args.per_device_train_batch_size, 1)
    found = made(arguments(L2LTrainingArguments, tmp_path, l2l_devices="2", use_cpu=True))
    assert "cpu" in found.l2l_summary() and found.args.train_batch_size == 8


def test_lamb_is_made_of_the_trainers_options(tmp_path):
    options = {"learning_rate": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.2}
    args = arguments(L2LTrainingArguments, tmp_path, l2l_optimizer="lamb", **options)
    optimizer = made(args).create_optimizer()
    assert isinstance(optimizer, Lamb)
    decay, rest = optimizer.param_groups
    assert (decay["lr"], decay["betas"], decay["eps"]) == (0.5, (0.8, 0.95), 1e-5)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.2, 0.0)


# ---- any arguments
#
# A training under L2L ends as that of plain `Trainer`, with the same losses and weights; or, where that one does not
# take these arguments, with the same error; or with a ValueError of ours, which names an option that was given.

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
    "l2l_chunked_loss": (["auto", "off", 64, "64"], ["on", 0, 1.5]),
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
