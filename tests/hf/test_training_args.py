"""The options on the command line, and the refusal of options that L2L cannot honour."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import sys
import typing
from dataclasses import fields

import pytest
import torch
import transformers as hf
from accelerate import ParallelismConfig
from transformers.training_args import OptimizerNames

from hf_l2l import L2LCallback, L2LConfig, L2LTrainer, L2LTrainingArguments, Lamb, attach_l2l, make_l2l_arguments
from hf_l2l.hf.training_args import OWN_OPTIONS, l2l_config, refuse_conflicts, refuse_for_layers
from training import arguments, rows, tiny_bert

OF_THE_TRAINER = {"device_memory_budget": "auto"}
"""Defaults that are others in `L2LConfig`."""

DEFAULTS = ["--output_dir", "out", "--report_to", "none"]


def parsed(*words: str) -> L2LTrainingArguments:
    (args,) = hf.HfArgumentParser(L2LTrainingArguments).parse_args_into_dataclasses([*DEFAULTS, *words])
    return args


# ---- parsing


def test_options_from_the_command_line():
    args = parsed("--ubatch_size", "4", "--stash", "host", "--l2l_layer_classes", "A", "B")
    assert (args.ubatch_size, args.stash, args.l2l_layer_classes) == (4, "host", ["A", "B"])
    assert l2l_config(args) == L2LConfig(ubatch_size=4, stash="host", layer_classes=("A", "B"), **OF_THE_TRAINER)


def test_defaults_from_the_command_line():
    args = parsed()
    assert (args.ubatch_size, args.stash, args.l2l_layer_classes) == (None, "device", None)
    assert l2l_config(args) == L2LConfig(**OF_THE_TRAINER)


def test_options_from_a_file(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": "out", "report_to": [], "ubatch_size": 2, "stash": "host"}))
    (args,) = hf.HfArgumentParser(L2LTrainingArguments).parse_json_file(str(file))
    assert l2l_config(args) == L2LConfig(ubatch_size=2, stash="host", **OF_THE_TRAINER)


@pytest.mark.parametrize("words", [("--ubatch_size", "four"), ("--stash", "ssd")], ids=lambda words: words[0])
def test_the_parser_refuses(words, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stash": "ssd"}, "stash must be one of 'device', 'host', 'disk', 'auto' (got 'ssd')"),
        ({"ubatch_size": 0}, "ubatch_size must be a whole number of at least 1"),
        ({"l2l_optimizer": ["lamb"]}, "l2l_optimizer must be 'lamb' or None (got ['lamb'])"),
        ({"l2l_log_times": "no"}, "l2l_log_times must be True or False (got 'no')"),
        ({"l2l_save_dtype": 16}, "l2l_save_dtype must be one of 'fp32', 'bf16', 'fp16' (got 16)"),
        ({"l2l_save_dtype": []}, "l2l_save_dtype must be one of 'fp32', 'bf16', 'fp16' (got [])"),
    ],
    ids=str,
)
def test_bad_values_are_refused_where_they_are_given(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(L2LTrainingArguments, tmp_path, **options)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("boundary", "l2l_boundary"),
        ("l2l_bounary", "l2l_boundary"),
        ("l2l_stash", "stash"),
        ("evaluation_strategy", "eval_strategy"),
    ],
)
@pytest.mark.parametrize("kind", [L2LTrainingArguments, make_l2l_arguments(hf.Seq2SeqTrainingArguments)])
def test_an_option_that_does_not_exist_is_told_with_the_nearest(kind, name, near, tmp_path):
    with pytest.raises(TypeError) as error:
        arguments(kind, tmp_path, **{name: "host"})
    said = f"an option of {kind.__name__} must be one that it has (got {name}); did you mean {near}?"
    assert str(error.value) == said


def test_a_subclass_may_take_other_arguments(tmp_path):
    class Own(L2LTrainingArguments):
        def __init__(self, folder, *, size):
            super().__init__(str(folder), ubatch_size=size, report_to=[])

    class Passing(L2LTrainingArguments):
        def __init__(self, **options):
            super().__init__(str(tmp_path), ubatch_size=options.pop("size"), report_to=[])

    assert Own(tmp_path, size=3).ubatch_size == Passing(size=3).ubatch_size == 3
    with pytest.raises(TypeError, match=r"option of Own must be one that it has \(got sise\); did you mean size\?"):
        Own(tmp_path, sise=3)


def test_the_signature_has_the_options():
    assert {f.name for f in fields(L2LTrainingArguments)} == set(inspect.signature(L2LTrainingArguments).parameters)


def test_every_option_explains_itself():
    ours = {f.name: f for f in dataclasses.fields(L2LTrainingArguments)}
    for name in ours.keys() - {f.name for f in dataclasses.fields(hf.TrainingArguments)}:
        assert len(ours[name].metadata["help"]) > 30, name
        assert f"\n        {name}: " in L2LTrainingArguments.__doc__


AS_PARSED = {
    "trace": (str | os.PathLike[str] | None, str | None),
    "spill_dir": (str | os.PathLike[str] | None, str | None),
    "state_dir": (str | os.PathLike[str] | None, str | None),
    "layer_classes": (tuple[str, ...] | None, list[str] | None),
}
"""Types of `L2LConfig` that a parser cannot make of words, and those of the arguments."""


def test_options_have_the_types_defaults_and_descriptions_of_the_config():
    types, typed = typing.get_type_hints(L2LConfig), typing.get_type_hints(L2LTrainingArguments)
    for option in dataclasses.fields(L2LConfig):
        if option.name == "device":
            continue
        name = argument_of(option.name)
        here = OWN_OPTIONS[name]
        assert (types[option.name], typed[name]) == AS_PARSED.get(option.name, (types[option.name],) * 2)
        assert (here.default, here.metadata.keys()) == (OF_THE_TRAINER.get(name, option.default), {"help"})
        said = re.sub(r"`l2l_(\w+)(=[^`]*)?`", r"`\1\2`", here.metadata["help"])
        assert said == option.metadata["help"]
        assert f"\n        {option.name}: " in L2LConfig.__doc__


def test_own_options_are_those_that_plain_arguments_lack():
    names = (
        *("devices", "optimizer", "save_dtype", "async_save"),
        *("realtime_checkpoint", "realtime_every", "realtime_errors", "merge_accumulation"),
        *("noise_scale", "noise_scale_every", "log_times"),
    )
    trainer_only = [f"l2l_{name}" for name in names]
    assert list(OWN_OPTIONS) == [*map(argument_of, OPTIONS), *trainer_only]
    assert set(OWN_OPTIONS) == {f.name for f in fields(L2LTrainingArguments)} - {
        f.name for f in fields(hf.TrainingArguments)
    }


def test_the_command_line_shows_every_default_and_description():
    parser = hf.HfArgumentParser(L2LTrainingArguments)
    for name, option in OWN_OPTIONS.items():
        [action] = [action for action in parser._actions if f"--{name}" in action.option_strings]
        assert (action.default, action.help) == (option.default, option.metadata["help"])
    shown = " ".join(parser.format_help().split())
    assert "after `l2l_loss_scale_interval` steps in a row without an overflow. (default: 2.0)" in shown


def test_plain_training_arguments_ask_for_the_defaults(tmp_path):
    assert l2l_config(arguments(hf.TrainingArguments, tmp_path)) == L2LConfig(**OF_THE_TRAINER)


# ---- as an object


def test_arguments_can_be_written_and_copied(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, ubatch_size=3, stash="host", l2l_layer_classes=["A", "B"])
    written = json.loads(json.dumps(args.to_dict()))
    assert (written["ubatch_size"], written["stash"], written["l2l_layer_classes"]) == (3, "host", ["A", "B"])
    assert json.loads(args.to_json_string())["ubatch_size"] == 3
    assert args.to_sanitized_dict()["stash"] == "host"
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):  # noqa: S301  # our own bytes
        assert isinstance(other, L2LTrainingArguments)
        assert l2l_config(other) == l2l_config(args)
        assert other.to_dict() == args.to_dict()


def test_a_field_can_be_replaced(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, ubatch_size=3, stash="host")
    other = dataclasses.replace(args, ubatch_size=5)
    assert l2l_config(other) == L2LConfig(ubatch_size=5, stash="host", **OF_THE_TRAINER)
    assert args.ubatch_size == 3
    with pytest.raises(ValueError, match=r"\(got 0\)"):
        dataclasses.replace(args, ubatch_size=0)


# ---- names

BARE = ("ubatch_size", "stash", "cmp", "eps_update", "device_memory_budget")
"""Options that are called on the command line what they are called in `L2LConfig`."""


def argument_of(field: str) -> str:
    return field if field in BARE else f"l2l_{field}"


OPTIONS = [f.name for f in dataclasses.fields(L2LConfig) if f.name != "device"]


@pytest.mark.parametrize("value", [5.5, "nonsense?/", [[]], b"", {}, 10**7, -1], ids=repr)
@pytest.mark.parametrize("option", OPTIONS)
def test_errors_name_what_was_typed(option, value, tmp_path):
    try:
        L2LConfig(**{option: value})
    except ValueError as error:
        expected = str(error)
    else:
        assert l2l_config(arguments(L2LTrainingArguments, tmp_path, **{argument_of(option): value}))
        return
    with pytest.raises(ValueError) as refused:
        arguments(L2LTrainingArguments, tmp_path, **{argument_of(option): value})
    message = str(refused.value)
    assert re.sub(r"\bl2l_", "", message) == expected
    assert message.startswith(argument_of(option)) or f"(got {argument_of(option)}=" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l2l_loss_scale_init": 2.0}, "l2l_loss_scale_init is of the loss scale, which fp16 alone has"),
        ({"l2l_host_copies": "per_sweep"}, "(got l2l_host_copies='per_sweep' with cmp=None"),
        (
            {"l2l_nonfinite": "skip", "eps_update": "eager", "max_grad_norm": 0.0},
            "(got l2l_nonfinite='skip'); use eps_update='deferred', or l2l_nonfinite='raise'",
        ),
    ],
    ids=str,
)
def test_errors_about_two_options_name_what_was_typed(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(L2LTrainingArguments, tmp_path, **options)


class Noisy(torch.optim.SGD):
    """Cannot be taken apart: its step draws random numbers."""

    def step(self, closure=None):
        torch.rand(())
        return super().step(closure)


def test_errors_of_later_on_name_what_was_typed(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, l2l_layer_classes=["Nowhere"])
    with pytest.raises(ValueError, match="every name in l2l_layer_classes must be"):
        L2LTrainer(tiny_bert(), args, train_dataset=rows()).l2l_summary()
    args = arguments(L2LTrainingArguments, tmp_path, l2l_grad_dtype="16bit")
    with pytest.raises(ValueError, match=r"l2l_grad_dtype='16bit' and l2l_moment_dtype='bf16' are made fp32"):
        L2LTrainer(
            tiny_bert(), args, train_dataset=rows(), optimizer_cls_and_kwargs=(Noisy, {"lr": 0.1})
        ).create_optimizer()
    with pytest.raises(ValueError, match="every name in layer_classes must be"):
        attach_l2l(tiny_bert(), L2LConfig(device="cpu", layer_classes=("Nowhere",)))


# ---- conflicts

CONFLICTS = {
    "deepspeed": ({"zero_optimization": {"stage": 3}}, "both place the parameters; drop one of them"),
    "fsdp": ("full_shard", "both place the parameters; drop one of them"),
    "parallelism_config": (ParallelismConfig(), "L2L divides no layer among processes; leave it out"),
    "torch_compile": (True, "a compiled model cannot be run layer by layer; set torch_compile=False"),
    "fp16": (True, "its loss scaler would have to see gradients on the device; use cmp='fp16'"),
    "fp16_full_eval": (True, "it would cast the master weights; set bf16=True, or evaluate in fp32"),
    "bf16_full_eval": (True, "it would cast the master weights; set bf16=True, or evaluate in fp32"),
}


def message_of(name: str) -> str:
    value, remedy = CONFLICTS[name]
    shown = " ".join(repr(value).split())
    return f"^{re.escape(f'{name} cannot be used with L2L (got {name}={shown}): {remedy}')}$"


def having(kind: type[hf.TrainingArguments], name: str, folder) -> hf.TrainingArguments:
    """Arguments with an option, set afterwards where this machine lacks what it needs."""
    value = CONFLICTS[name][0]
    if name not in ("deepspeed", "fsdp"):
        return arguments(kind, folder, use_cpu=True, **{name: value})
    args = arguments(kind, folder)
    setattr(args, name, value)
    return args


@pytest.mark.parametrize("kind", [L2LTrainingArguments, hf.TrainingArguments])
@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_are_refused_for_a_model_with_layers(name, kind, tmp_path):
    args = having(kind, name, tmp_path)
    with pytest.raises(ValueError, match=message_of(name)):
        L2LTrainer(tiny_bert(), args, train_dataset=rows())
    with pytest.raises(ValueError, match=message_of(name)):
        L2LTrainer(model_init=lambda: tiny_bert(), args=args, train_dataset=rows())


def test_bf16_and_the_defaults_are_no_conflict(tmp_path):
    for args in (
        arguments(L2LTrainingArguments, tmp_path, bf16=True, use_cpu=True),
        arguments(hf.TrainingArguments, tmp_path),
    ):
        refuse_conflicts(args)
        refuse_for_layers(args)


# ---- one device, one process


@pytest.mark.parametrize("kind", [L2LTrainingArguments, hf.TrainingArguments])
def test_a_trainer_counts_the_devices_that_layers_run_on(kind, tmp_path):
    """Here the CPU alone, whatever transformers has found."""
    args = arguments(kind, tmp_path)
    args._n_gpu = 2
    made = L2LTrainer(tiny_bert(), args, train_dataset=rows())
    assert args.n_gpu == 1 and made._train_batch_size == args.per_device_train_batch_size


@pytest.mark.parametrize("asked", ["2", "0,1", "1,0", "auto"])
def test_on_the_cpu_the_option_of_devices_changes_nothing(asked, tmp_path):
    """A script for several devices runs there, too."""
    made = L2LTrainer(tiny_bert(), arguments(L2LTrainingArguments, tmp_path, l2l_devices=asked, use_cpu=True))
    assert made._asked_config().device == torch.device("cpu") and made.args.train_batch_size == 8


def test_a_trainer_of_another_library_is_refused_several_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/finetune.py", "--stash", "host"])
    args = arguments(hf.TrainingArguments, tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError) as error:
        hf.Trainer(tiny_bert(), args, train_dataset=rows(), callbacks=[L2LCallback()])
    assert str(error.value) == (
        "a model under L2L runs in no DataParallel, in which this Trainer would put it (got 2 visible devices); use "
        "L2LTrainer, which runs layers on them in turn, or one: CUDA_VISIBLE_DEVICES=0 python finetune.py"
    )


def test_a_launcher_is_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr(hf.TrainingArguments, "world_size", property(lambda self: 4))
    with pytest.raises(ValueError) as error:
        hf.Trainer(
            tiny_bert(), arguments(hf.TrainingArguments, tmp_path), train_dataset=rows(), callbacks=[L2LCallback()]
        )
    assert str(error.value) == (
        "a model under L2L runs in no DistributedDataParallel, in which this Trainer would put it (got a launcher "
        "with 4 processes); use L2LTrainer, or one process, which uses all visible devices: python your_script.py"
    )


def test_a_string_of_layer_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be a tuple or list of class names \(got the string 'Block'\)"):
        arguments(L2LTrainingArguments, tmp_path, l2l_layer_classes="Block")


def test_a_launcher_that_compiles_is_refused(tmp_path, monkeypatch):
    args = arguments(L2LTrainingArguments, tmp_path)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # as `accelerate launch` sets it
    L2LTrainer(tiny_bert(), args, train_dataset=rows())
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(
        ValueError, match=r"\(got dynamo_backend='EAGER' from Accelerate\); launch with --dynamo_backend no"
    ):
        L2LTrainer(tiny_bert(), args, train_dataset=rows())


def test_a_backend_that_implies_compiling_is_refused(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, torch_compile_backend="inductor")
    with pytest.raises(ValueError, match="torch_compile cannot be used with L2L"):
        L2LTrainer(tiny_bert(), args, train_dataset=rows())


# ---- updates and the optimizer


def test_eager_updates_are_refused_with_clipping(tmp_path):
    message = r"it cannot clip \(got max_grad_norm=1.0\); set max_grad_norm=0, or use eps_update='deferred'"
    with pytest.raises(ValueError, match=message):
        arguments(L2LTrainingArguments, tmp_path, eps_update="eager")
    args = arguments(L2LTrainingArguments, tmp_path, eps_update="eager", max_grad_norm=0.0)
    args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=message):
        L2LTrainer(tiny_bert(), args, train_dataset=rows())


def test_lamb_is_made_of_the_trainers_options(tmp_path):
    options = {"learning_rate": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.2}
    args = arguments(L2LTrainingArguments, tmp_path, l2l_optimizer="lamb", **options)
    optimizer = L2LTrainer(tiny_bert(), args, train_dataset=rows()).create_optimizer()
    assert isinstance(optimizer, Lamb)
    decay, rest = optimizer.param_groups
    assert (decay["lr"], decay["betas"], decay["eps"]) == (0.5, (0.8, 0.95), 1e-5)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.2, 0.0)
    assert parsed("--l2l_optimizer", "lamb").l2l_optimizer == "lamb"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l2l_optimizer": "lion"}, "l2l_optimizer must be 'lamb' or None (got 'lion')"),
        ({"l2l_optimizer": "lamb", "optim": "sgd"}, "(got l2l_optimizer='lamb' and optim='sgd')"),
        ({"l2l_optimizer": "lamb", "optim_args": "x=1"}, "(got l2l_optimizer='lamb' and optim_args='x=1')"),
    ],
    ids=str,
)
def test_one_option_names_the_optimizer(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(L2LTrainingArguments, tmp_path, **options)


IN_BACKWARD = {
    each.value: each.value.removesuffix("_layerwise") for each in OptimizerNames if "layerwise" in each.value
}
IN_BACKWARD |= {"lomo": "sgd", "adalomo": "adafactor"}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_optimizers_that_update_in_backward_are_refused(name, tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, optim=name, optim_target_modules=["attention"])
    remedy = IN_BACKWARD[name]
    assert remedy in list(OptimizerNames)
    with pytest.raises(ValueError) as error:
        L2LTrainer(tiny_bert(), args, train_dataset=rows())
    assert str(error.value) == (
        f"optim cannot be used with L2L (got optim={name!r}): it updates parameters in hooks of their backward, which "
        f"runs on copies; use optim={remedy!r}"
    )


def test_all_layerwise_optimizers_are_known():
    assert {"galore_adamw_layerwise", "apollo_adamw_layerwise"} <= set(IN_BACKWARD)


@pytest.mark.parametrize("by", ["optimizers", "optimizer_cls_and_kwargs"])
def test_an_optimizer_that_is_passed_is_not_named_too(by, tmp_path):
    model, args = tiny_bert(), arguments(L2LTrainingArguments, tmp_path, l2l_optimizer="lamb")
    sgd = torch.optim.SGD
    passed = {"optimizers": (sgd(model.parameters()), None), "optimizer_cls_and_kwargs": (sgd, {"lr": 0.1})}
    with pytest.raises(ValueError, match="got one passed to the Trainer, and l2l_optimizer='lamb'"):
        L2LTrainer(model, args, train_dataset=rows(), **{by: passed[by]})
