"""Records of parameters: in which order they are updated, and when other threads may use them."""

from __future__ import annotations

import torch
from torch import nn

from hf_l2l.eps import masters as masters_module
from hf_l2l.eps.masters import Master, Masters
from hf_l2l.eps.pending import hold, pending_of
from hf_l2l.model.precision import Precision
from models import train_once
from runs import attach


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


def test_copies_of_weights_have_no_graph():
    model, eps, _, batch = attach(cmp="bf16")
    train_once(model, batch)
    assert eps.copies.kept and not any(copied.requires_grad for copied in eps.copies.kept)
