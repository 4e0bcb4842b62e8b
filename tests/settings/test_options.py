"""Options as fields of `L2LConfig`, as arguments of the Trainer, and on the command line: what is taken, and what each
becomes. What is refused is in tests/sim/test_refusals.py, one value of each option."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import typing
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l import L2LConfig, L2LTrainer, L2LTrainingArguments, Lamb, make_l2l_arguments
from hf_l2l.hf.training_args import OWN_OPTIONS, l2l_config
from hf_l2l.option_names import argument
from tiers import times
from training import arguments, rows, tiny_bert

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
        trainer = made(args)
        assert (args.n_gpu, trainer.args.train_batch_size) == (1, args.per_device_train_batch_size)
    trainer = made(arguments(L2LTrainingArguments, tmp_path, l2l_devices="2", use_cpu=True))
    assert "cpu" in trainer.l2l_summary() and trainer.args.train_batch_size == 8


def test_lamb_is_made_of_the_trainers_options(tmp_path):
    options = {"learning_rate": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.2}
    args = arguments(L2LTrainingArguments, tmp_path, l2l_optimizer="lamb", **options)
    optimizer = made(args).create_optimizer()
    assert isinstance(optimizer, Lamb)
    decay, rest = optimizer.param_groups
    assert (decay["lr"], decay["betas"], decay["eps"]) == (0.5, (0.8, 0.95), 1e-5)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.2, 0.0)
