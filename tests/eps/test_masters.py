"""The records of a model are right whatever a program does to the model, and between which parts of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import changing_cases as cases
from hf_l2l.eps import masters as masters_module
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import hold, pending_of
from hf_l2l.model.precision import Precision

DEVICE = "cpu"
CMP = [{}, {"cmp": "bf16"}]


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("options", CMP, ids=str)
def test_an_evaluation_with_other_weights_changes_nothing_of_the_step(kind, options):
    cases.an_evaluation_with_other_weights_changes_nothing_of_the_step(DEVICE, kind, **options)


def test_an_evaluation_with_other_weights_hides_no_gradient_that_is_not_finite():
    cases.an_evaluation_with_other_weights_hides_no_gradient_that_is_not_finite(DEVICE)


@pytest.mark.parametrize("options", CMP, ids=str)
def test_weights_of_an_evaluation_are_freed(options):
    cases.weights_of_an_evaluation_are_freed(DEVICE, **options)


@pytest.mark.parametrize("options", CMP, ids=str)
def test_a_replaced_parameter_is_freed(options):
    cases.a_replaced_parameter_is_freed(DEVICE, **options)


@pytest.mark.parametrize("options", CMP, ids=str)
def test_what_is_frozen_after_the_forward_is_not_trained(options):
    cases.what_is_frozen_after_the_forward_is_not_trained(DEVICE, **options)


def test_a_layer_may_add_a_module_without_parameters():
    cases.a_layer_may_add_a_module_without_parameters(DEVICE)


def test_a_parameter_that_grew_after_the_backward_is_refused():
    cases.a_parameter_that_grew_after_the_backward_is_refused(DEVICE)


@pytest.mark.parametrize("options", CMP, ids=str)
def test_an_optimizer_may_copy_its_parameters(options):
    cases.an_optimizer_may_copy_its_parameters(DEVICE, **options)


def test_a_refused_call_in_an_eager_step_leaves_the_step_as_it_is():
    cases.a_refused_call_in_an_eager_step_leaves_the_step_as_it_is(DEVICE)


@pytest.mark.parametrize("options", [{"cmp": "bf16"}, {"cmp": "fp16", "loss_scale_init": 8.0}], ids=str)
def test_two_forwards_in_the_first_step_have_the_gradients_of_both(options):
    cases.two_forwards_in_the_first_step_have_the_gradients_of_both(DEVICE, **options)


def test_other_threads_wait_for_an_update_until_its_parameters_are_ordinary(monkeypatch):
    parameter = nn.Parameter(torch.zeros(2))
    master = Master(parameter, Precision(nn.Linear(1, 1)))
    master.update, seen = object(), []
    hold(parameter, master)
    let_go_all = masters_module.let_go_all

    def watched(pairs):
        let_go_all(pairs)
        seen.append((master.update is not None, pending_of(parameter)))

    monkeypatch.setattr(masters_module, "let_go_all", watched)
    Master.end_update([master])
    assert seen == [(True, None)] and master.update is None and type(parameter) is nn.Parameter


def test_copies_of_weights_have_no_graph():
    model, eps, batch = cases.under(DEVICE, cmp="bf16")
    model(**batch)
    assert eps.copies.kept and not any(copied.requires_grad for copied in eps.copies.kept)


def test_updates_are_in_the_order_in_which_the_next_forward_needs_them():
    """Small parameters of non-layer modules first; a large one before the layer that follows its first use."""
    model = nn.Module()
    model.head = nn.Linear(1024, 1024, bias=False)
    model.bias, model.norm = nn.Parameter(torch.ones(2)), nn.LayerNorm(2)
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.embed = nn.Embedding(1024, 1024)
    masters = Masters(model, list(model.layers))
    masters.of(model.head.weight).first_use = 2
    assert [(name, [m.name for m in group]) for name, group in masters.parts(masters.all())] == [
        ("non-layer modules", ["bias", "norm.weight", "norm.bias"]),
        ("embed.weight", ["embed.weight"]),
        ("layers.0", ["layers.0.weight", "layers.0.bias"]),
        ("layers.1", ["layers.1.weight", "layers.1.bias"]),
        ("head.weight", ["head.weight"]),
        ("layers.2", ["layers.2.weight", "layers.2.bias"]),
    ]
