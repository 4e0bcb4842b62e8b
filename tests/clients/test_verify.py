"""The compatibility check with peft: the column of LoRA, which `make test` cannot fill."""

from __future__ import annotations

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
