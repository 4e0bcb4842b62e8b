"""The program itself: help, exit statuses, and one sentence for what it does not understand; `inspect` and `env`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_l2l
from cli_models import LLAMA, T5, ran, refused, written
from documented_commands import check
from hf_l2l import surroundings
from hf_l2l.cli.main import COMMANDS
from hf_l2l.cli.printed.model_facts import facts_of
from hf_l2l.model_source import load_config, load_shapes
from hf_l2l.probe import rates
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.rates import Sizes
from tiers import nightly

ROOT = Path(hf_l2l.__file__).parents[1]


def test_help_names_every_command_with_an_example(capsys):
    found = ran(capsys, "--help")
    assert found.status == 0
    assert ran(capsys, "--version").out == f"hf_l2l {hf_l2l.__version__}\n"
    for name in COMMANDS:
        example = import_module(f"hf_l2l.cli.{name}").COMMAND.example
        assert f"\n    {name}" in found.out and f"\n  hf-l2l {name} " in found.out
        of_command = ran(capsys, name, "--help")
        assert of_command.status == 0 and "--json" in of_command.out
        assert f"example:\n  hf-l2l {example}\n" in of_command.out
        check(["hf-l2l", *example.split()])


@nightly
def test_env_is_there_whatever_library_is_broken_and_others_say_so_in_one_sentence(tmp_path, monkeypatch, capsys):
    """In a process of its own, where these packages cannot be imported."""
    for package in ("transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is broken')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    call = [sys.executable, "-m", "hf_l2l", "env"]
    found = subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, "") and "\n  transformers: " in found.stdout

    def broken(*_: object) -> None:
        raise ImportError("this is broken")

    command = import_module("hf_l2l.cli.inspect").COMMAND
    monkeypatch.setattr("hf_l2l.cli.inspect.COMMAND", dataclasses.replace(command, run=broken))
    assert refused(capsys, "inspect", written(tmp_path / "model", LLAMA)) == "hf-l2l inspect: this is broken\n"


TELLS = """
import dataclasses, sys
from hf_l2l.cli import inspect, main
inspect.COMMAND = dataclasses.replace(inspect.COMMAND, run=lambda options: print("told") or 0)
sys.exit(main.main())
"""


def test_the_reader_of_the_output_may_leave(tmp_path):
    """As `head` does."""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    call = [sys.executable, "-c", TELLS, "inspect", written(tmp_path, LLAMA)]
    with os.fdopen(write, "w") as nobody:
        found = subprocess.run(call, env=env, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_what_is_not_understood_is_one_sentence(capsys):
    for arguments, said in (
        ((), "arguments are required: COMMAND; see hf-l2l --help"),
        (("inspekt", "x"), "(got 'inspekt'); did you mean inspect?"),
        (("inspect",), "arguments are required: MODEL; see hf-l2l inspect --help"),
        (("inspect", "x", "--jsn"), "unrecognized arguments: --jsn; did you mean --json? see hf-l2l inspect --help"),
        (("inspect", "x", "--js"), "unrecognized arguments: --js"),
    ):
        assert said in refused(capsys, *arguments)


# ---- `hf-l2l inspect`: stacks, what is outside them, ties and bytes, and what would be refused


def test_a_decoder_with_tied_embeddings_and_two_stacks_with_layers_of_two_kinds(tmp_path, capsys):
    """The first layers of T5 have a table of relative positions besides."""
    source = written(tmp_path, LLAMA)
    found = ran(capsys, "inspect", source, "--json").json
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    each = sum(p.numel() for p in model.model.layers[0].parameters())
    [stack] = found["stacks"]
    assert (stack["path"], stack["is_guessed"], stack["num_layers"]) == ("model.layers", False, 3)
    of_layer = {"parameters": each, "bytes": 4 * each}
    assert stack["kinds"] == [{"count": 3, "class_name": "LlamaDecoderLayer", "each": of_layer}]
    assert stack["total"] == found["layers_total"] == {"parameters": 3 * each, "bytes": 12 * each}
    assert [(m["path"], m["own"]["parameters"], m["tied_to"]) for m in found["non_layer_modules"]] == [
        ("model.embed_tokens", 50 * 16, []),
        ("model.norm", 16, []),
        ("lm_head", 0, ["model.embed_tokens.weight"]),
    ]
    assert found["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert found["total"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["buffers"]["bytes"] == sum(b.numel() * b.element_size() for b in model.buffers())
    assert (found["refused"], found["notes"]) == ([], [])
    text = ran(capsys, "inspect", source).out
    assert "\n  3 x LlamaDecoderLayer, 2.3 k parameters, 9.1 KiB each\n" in text
    assert "tied to model.embed_tokens.weight\n" in text and "refused" not in text and "note" not in text
    stacks = ran(capsys, "inspect", written(tmp_path / "t5", T5), "--json").json["stacks"]
    assert [stack["path"] for stack in stacks] == ["encoder.block", "decoder.block"]
    assert [[kind["count"] for kind in stack["kinds"]] for stack in stacks] == [[1, 1], [1, 2]]


def test_another_class_and_other_layers(tmp_path, capsys):
    source = written(tmp_path, LLAMA)
    found = ran(capsys, "inspect", source, "--class", "AutoModelForSequenceClassification", "--json").json
    assert found["class_name"] == "LlamaForSequenceClassification" and found["ties"] == []
    assert "LlamaForSequenceClassification of the same config" in found["notes"][0]
    names = {"LlamaMLP", "LlamaAttention"}
    found = ran(capsys, "inspect", source, "--layer-classes", *sorted(names), "--json").json
    assert {kind["class_name"] for stack in found["stacks"] for kind in stack["kinds"]} == names
    assert "did you mean 'LlamaMLP'?" in refused(capsys, "inspect", source, "--layer-classes", "LlamaMLPs")


class Own(nn.Linear):
    """A layer with a backward of its own."""

    def backward_pass(self) -> None: ...


def test_a_model_without_layers_or_with_a_backward_of_its_own_is_refused():
    facts = facts_of(nn.Linear(2, 3))
    assert (facts.stacks, facts.largest_layer) == ((), None) and facts.total.parameters == 9
    [said] = facts.refused
    assert "must have a stack of layers" in said and said.endswith("with --layer-classes")
    facts = facts_of(nn.Sequential(nn.ModuleList([Own(4, 4), Own(4, 4)])))
    assert "must leave its backward to torch (a Own has a backward_pass" in facts.refused[0]
    assert "found by their parameters alone; name others with --layer-classes" in facts.notes[0]
    assert facts.stacks[0].is_guessed and facts.max_position_embeddings is None


def test_checkpoints_that_are_quantized(tmp_path, capsys):
    for given, is_refused in (
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, False),
    ):
        found = ran(capsys, "inspect", written(tmp_path, LLAMA, quantization_config=given), "--json").json
        assert bool(found["refused"]) == is_refused, given
        assert given["quant_method"] in found["notes"][0]


# ---- `hf-l2l env`: a report of the machine that names what fails, and tells no secrets


def test_the_report(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setattr(surroundings, "PACKAGES", ("torch", "hf_l2l", "surely-not-installed"))
    told = ran(capsys, "env", "--json")
    found = told.json
    assert found["versions"]["torch"] == version("torch") and found["versions"]["hf_l2l"] == hf_l2l.__version__
    assert found["versions"]["surely-not-installed"] is None
    assert found["unsupported"] is None and found["probe"] is None
    assert 0 < found["host"]["available_bytes"] <= found["host"]["total_bytes"]
    text = ran(capsys, "env").out
    assert f"\n  torch: {version('torch')}\n" in text and "\n  surely-not-installed: -\n" in text
    assert "devices:\n  none: layers run on the CPU\n" in text and "probe:" not in text
    assert "hf_very_secret" not in text + told.out


def test_what_is_not_supported_or_fails_does_not_end_the_report(monkeypatch, capsys):
    """Other commands refuse such versions."""

    def broken():
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(hf_l2l, "TESTED", {"torch": ("98", "99")})
    monkeypatch.setattr(surroundings, "devices", broken)
    found = ran(capsys, "env", "--json")
    assert "needs torch 98 or newer" in found.json["unsupported"]
    assert found.status == 0 and found.json["devices"] == "failed: RuntimeError: the driver is gone"


def test_variables_without_secrets():
    told = {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "folder", "OMP_NUM_THREADS": "4", "PYTORCH_CUDA_ALLOC_CONF": "x:y"}
    secret = {"HF_TOKEN": "hf_abc", "HF_API_KEY": "abc", "CUDA_SECRET": "s", "HF_password": "p", "PATH": "/bin"}
    given = {**told, **secret, "HF_ENDPOINT": "https://me:word@mirror/x"}
    assert surroundings.variables(given) == {**told, "HF_ENDPOINT": "https://***@mirror/x"}


def test_the_revision_of_a_checkout(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        call = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "hf_l2l"
    package.mkdir()
    (package / "a.py").write_text("1")
    monkeypatch.setattr(surroundings, "__file__", str(package / "surroundings.py"))
    assert surroundings.versions()["revision"] is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert surroundings.versions()["revision"] == head
    (package / "a.py").write_text("2")
    assert surroundings.versions()["revision"] == f"{head}+"


def test_the_probe(monkeypatch, capsys):
    """Its figures can be read again; a device that is not there is refused."""
    monkeypatch.setattr(rates, "Sizes", lambda: Sizes(2**16, 2**10, 64, 0.0))
    found = ran(capsys, "env", "--probe", "--json")
    figures = HardwareFigures.from_json(found.out)
    assert figures.link_up is None and figures.dram > 0
    assert json.loads(figures.to_json()) == found.json["probe"]
    text = ran(capsys, "env", "--probe", "--device", "cpu").out
    assert " FLOP/s" in text and " parameters/s" in text and "\n  link_up: -\n" in text
    assert "one this machine has (got cuda:7)" in refused(capsys, "env", "--probe", "--device", "cuda:7")


# ---- a model's config and shapes by its folder, file or name


def config_in(folder: Path, content: Any) -> str:
    """The folder, with this config."""
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def not_read(source: str, **options: Any) -> str:
    """The one sentence with which a source is refused."""
    with pytest.raises(ValueError) as error:
        load_shapes(source, **options)
    text = str(error.value)
    assert "\n" not in text and "; " in text
    return text


def test_the_class(tmp_path):
    for architectures, asked, kind in (
        (["Unknown"], None, "LlamaModel"),
        (["Unknown", "LlamaForCausalLM"], None, "LlamaForCausalLM"),
        (["LlamaForCausalLM"], "AutoModelForSequenceClassification", "LlamaForSequenceClassification"),
    ):
        source = written(tmp_path, LLAMA, architectures=architectures)
        for place in (source, tmp_path, tmp_path / "config.json"):
            model = load_shapes(place, model_class=asked)
            assert type(model).__name__ == kind and {p.device.type for p in model.parameters()} == {"meta"}


def test_another_dtype(tmp_path):
    """Of the parameters alone: the default of the process stays, even where no model is made."""
    source = written(tmp_path, LLAMA, dtype="bfloat16")
    assert next(load_shapes(source).parameters()).dtype == torch.float32
    assert next(load_shapes(source, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    text = not_read(source, model_class="BertModel", dtype=torch.bfloat16)
    assert "BertModel must be able to make a model of this config (got AttributeError" in text
    assert not_read(source, model_class="LlamaConfig").startswith("--class must be a class of models")
    assert torch.get_default_dtype() == torch.float32


def test_configs_that_are_refused_and_other_names_of_sizes_that_are_not(tmp_path):
    for content, said in (
        ("{", "must be a file of JSON"),
        ({"hidden_size": 16}, "must have the field model_type"),
        ({"model_type": "llama"}, "of model_type 'llama' without num_hidden_layers and hidden_size); add them"),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "without num_hidden_layers); add it"),
        ({**LLAMA, "model_type": "unknown"}, "has model type `unknown`"),
        ({**LLAMA, "hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({**LLAMA, "hidden_size": -4, "head_dim": 4}, "correct the fields that it names"),
        ({**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "pass --trust-remote-code"),
    ):
        assert said in not_read(config_in(tmp_path, content))
    for content in (
        {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        {"model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        {"model_type": "clip", "text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ):
        assert next(load_shapes(config_in(tmp_path, content)).parameters()).is_meta
    transformers.CLIPConfig().save_pretrained(tmp_path)
    assert type(load_config(tmp_path)) is transformers.CLIPConfig


def test_what_is_not_there_or_an_adapter_is_refused(tmp_path):
    """A broken file in GGUF, or one that cannot be read without the package gguf, too."""
    for source in ("./none", "a/b/c"):
        assert f"(got {source!r}, and there is no such file or folder)" in not_read(source)
    text = not_read("nobody/nothing")
    assert "HF_HUB_OFFLINE is set" in text and "hf download nobody/nothing config.json" in text
    assert "which has none" in not_read(str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert f"must be able to make a config of {str(file)!r} (got " in not_read(str(file))
    for content, remedy in (
        ('{"base_model_name_or_path": "some/base"}', "give that: some/base"),
        ("no JSON", "give it; adapter_config.json does not name it"),
    ):
        (tmp_path / "adapter_config.json").write_text(content)
        text = not_read(str(tmp_path))
        assert text.startswith("an adapter is a part of its base model (got ") and text.endswith(f"); {remedy}")
