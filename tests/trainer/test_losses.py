"""Losses with parameters of their own are trained with the model; graphs of losses are as in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, detach_l2l, make_l2l_trainer
from losses import Classifying, Embedder, Embedding, embedded, weights_with_loss
from models import batch_for, gradients, llama, relative_error
from plain import is_attached
from tiers import cpu_suffices
from training import arguments, logs, rows

KINDS = make_l2l_trainer(Embedder), L2LTrainingArguments
CASES = [
    (False, {}),
    (False, {"max_grad_norm": 0.01, "l2l_resident": "shell"}),
    (False, {"ubatch_size": 2, "stash": "host"}),
    (True, {"eps_update": "deferred"}),
]


@pytest.mark.parametrize(("several", "options"), CASES, ids=str)
def test_the_parameters_of_a_loss_are_trained(tmp_path, device, several, options):
    """The norm that is clipped is that of the model alone, as transformers has it."""
    clips = {"max_grad_norm": options.get("max_grad_norm", 0.0)}
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", several, **clips)
    found = embedded(*KINDS, tmp_path / "l2l", several, **clips | options)
    weights, same_order = weights_with_loss(expected), device == "cpu" and not several and not options
    rtol, atol = (1e-3, 1e-4) if several else (1e-4, 2e-5)
    for name, tensor in weights_with_loss(found).items():
        # Two losses call the model four times in a step: their gradients are summed in another order.
        close = {"rtol": 0, "atol": 0} if same_order else {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(tensor, weights[name], **close)
    for ours, theirs in zip(logs(found), logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if several else 1e-4)
    detach_l2l(found.model)
    for module in (found.model, *(found.loss.values() if several else [found.loss])):
        assert not any(map(is_attached, module.modules()))
        assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_a_loss_is_attached_as_a_model_in_any_loop():
    torch.manual_seed(0)
    loss = Classifying(Embedding())
    optimizer = attach_l2l(loss, L2LConfig(ubatch_size=2)).wrap(torch.optim.AdamW(loss.parameters(), lr=0.01))
    ids = torch.randint(5, 60, (8, 6))
    features = [{"input_ids": ids}, {"input_ids": ids.flip(0)}]
    before = loss.classifier.weight.detach().clone()
    labels = (ids[:, 0] % 2).to(loss(features, torch.zeros(8, dtype=torch.long)).device)
    first = loss(features, labels)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(loss.classifier.weight, before)
    assert loss(features, labels) < first


@cpu_suffices
def test_a_second_training_with_another_loss(tmp_path):
    """Its parameters are trained, too, and those of the first loss not any more."""
    first = embedded(*KINDS, tmp_path / "first", max_steps=1)
    other = Classifying(first.model)
    before, kept = (loss.classifier.weight.detach().clone() for loss in (other, first.loss))
    args = arguments(L2LTrainingArguments, tmp_path / "second", remove_unused_columns=False, max_steps=1)
    made = KINDS[0](first.model, args, train_dataset=rows(), loss=other)
    made.train()
    assert not torch.equal(other.classifier.weight, before)
    assert torch.equal(first.loss.classifier.weight, kept) and not is_attached(first.loss.classifier)


# ---- graphs


@pytest.mark.parametrize(
    "options", [{}, {"kept_graphs": 2}, {"stash": "host", "boundary": "host", "ubatch_size": 3}], ids=str
)
def test_a_graph_that_was_freed_is_told_as_torch_tells_it(options):
    """Also that of a layer that keeps its graph, and of an embedding by rows, for which torch has nothing to free."""
    model = llama().train()
    attach_l2l(model, L2LConfig(**options))
    loss = model(**batch_for(model)).loss
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="through the graph a second time"):
        loss.backward()


class TwoHeads(nn.Module):
    """A second head, of two layers, on features that it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.probe = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean(), self.probe(x.detach()).square().mean()


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 2}], ids=str)
def test_another_part_of_the_graph_may_run_backward_later(options):
    """What the first backward frees is what it has used up."""
    torch.manual_seed(0)
    plain = TwoHeads()
    model = copy.deepcopy(plain)
    attach_l2l(model, L2LConfig(**options))
    ids = torch.arange(24).view(4, 6) % 20
    for each in (plain, model):
        main, of_probe = each(ids)
        main.backward()
        of_probe.backward()
    assert relative_error(gradients(model), gradients(plain)) < 1e-5
