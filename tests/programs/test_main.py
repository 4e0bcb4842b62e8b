"""The program itself: help, exit statuses, and one sentence for what it does not understand."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import transformers
from torch import nn

import hf_l2l
from cli_models import LLAMA, T5, ran, refused, written
from documented_commands import check
from hf_l2l.cli.main import COMMANDS
from hf_l2l.cli.printed.model_facts import facts_of
from tiers import nightly

ROOT = Path(hf_l2l.__file__).parents[1]


def test_help_names_every_command_with_an_example(capsys):
    found = ran(capsys, "--help")
    assert found.status == 0
    assert ran(capsys, "--version").out == f"hf_l2l {hf_l2l.__version__}\n"
    for name in COMMANDS:
        assert f"\n    {name}" in found.out and f"\n  hf-l2l {name} " in found.out
        of_command = ran(capsys, name, "--help")
        example = import_module(f"hf_l2l.cli.{name}").COMMAND.example
        assert of_command.status == 0 and "--json" in of_command.out
        assert f"example:\n  hf-l2l {example}\n" in of_command.out
        check(["hf-l2l", *example.split()])


@nightly
def test_env_is_there_whatever_library_is_broken_and_others_say_so_in_one_sentence(tmp_path, monkeypatch, capsys):
    """In a process of its own, where these packages cannot be imported."""
    for package in ("transformers", "accelerate"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is broken')")
    found = subprocess.run(
        [sys.executable, "-m", "hf_l2l", "env"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
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
    with os.fdopen(write, "w") as nobody:
        found = subprocess.run(
            [sys.executable, "-c", TELLS, "inspect", written(tmp_path, LLAMA)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
        )
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
    assert stack["kinds"] == [
        {"count": 3, "class_name": "LlamaDecoderLayer", "each": {"parameters": each, "bytes": 4 * each}}
    ]
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


class Own(nn.Module):
    """A layer with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def backward_pass(self) -> None: ...


def test_a_model_without_layers_or_with_a_backward_of_its_own_is_refused():
    facts = facts_of(nn.Linear(2, 3))
    assert (facts.stacks, facts.largest_layer) == ((), None) and facts.total.parameters == 9
    [said] = facts.refused
    assert "must have a stack of layers" in said and said.endswith("with --layer-classes")
    facts = facts_of(nn.Sequential(nn.ModuleList([Own(), Own()])))
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
