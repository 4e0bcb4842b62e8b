"""Losses with parameters of their own are trained with the model; graphs of losses are as in plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, detach_l2l, make_l2l_trainer
from models import SMALL, Toy, bert, gradients, relative_error
from plain import is_attached
from runs import config_for
from tiers import cpu_suffices
from training import arguments, logs, rows


class Embedding(nn.Module):
    """A model with BERT inside, called once per sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert().bert
        self.bert.pooler = None

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.bert(**features).last_hidden_state.mean(1)


class Classifying(nn.Module):
    """The loss: a classifier over two embeddings and their difference."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.classifier = nn.Linear(3 * SMALL["hidden_size"], 2)

    def forward(self, features: list[dict[str, torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        one, two = (self.model(each) for each in features)
        return nn.functional.cross_entropy(self.classifier(torch.cat([one, two, (one - two).abs()], 1)), labels)


class _ClearAll(hf.TrainerCallback):
    """Clears the gradients that `model.zero_grad()` does not reach."""

    def on_step_end(self, *args: Any, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        optimizer.zero_grad()


class Embedder(hf.Trainer):
    """Computes the loss of pairs, and makes its optimizer over the parameters of the loss."""

    def __init__(self, *args: Any, loss: nn.Module | dict[str, nn.Module], **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[_ClearAll()], **kwargs)
        self.loss = self.prepare_loss(loss)

    def losses(self, of: Any = None) -> list[nn.Module]:
        of = self.loss if of is None else of
        return [*of.values()] if isinstance(of, dict) else [of]

    def prepare_loss(self, loss: Any) -> Any:
        for each in self.losses(loss):
            each.to(next(self.model.parameters()).device)
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            held = dict.fromkeys(p for loss in self.losses() for p in loss.parameters())
            self.optimizer = torch.optim.AdamW(held, lr=self.args.learning_rate)
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        other = {name: tensor.flip(0) for name, tensor in inputs.items()}
        return sum(loss([inputs, other], labels) for loss in self.losses())


def embedded(
    kind: type[hf.Trainer], args: type[hf.TrainingArguments], folder: Path, several: bool = False, **more: Any
) -> hf.Trainer:
    """A trained trainer, of a model and a loss (or two) that are the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Embedding()
        losses = {name: Classifying(model) for name in ("one", "two")}
    given = arguments(args, folder, remove_unused_columns=False, **more)
    made = kind(model, given, train_dataset=rows(), loss=losses if several else losses["one"])
    made.train()
    return made


KINDS = make_l2l_trainer(Embedder), L2LTrainingArguments
CASES = [(False, {}), (False, {"max_grad_norm": 0.01, "l2l_resident": "shell"}), (True, {"eps_update": "deferred"})]


@cpu_suffices
@pytest.mark.parametrize(("several", "options"), CASES, ids=str)
def test_the_parameters_of_a_loss_are_trained(tmp_path, device, several, options):
    """The norm that is clipped is that of the model alone, as transformers has it."""
    clips = {"max_grad_norm": options.get("max_grad_norm", 0.0)}
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", several, **clips)
    found = embedded(*KINDS, tmp_path / "l2l", several, **clips | options)
    # Two losses call the model four times in a step: their gradients are summed in another order.
    close = {"rtol": 1e-3, "atol": 1e-4} if several else {"rtol": 1e-4, "atol": 2e-5}
    if device == "cpu" and not several and not options:
        close = {"rtol": 0, "atol": 0}
    for one, other in zip(found.losses(), expected.losses(), strict=True):
        weights = other.state_dict()
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor.cpu(), weights[name].cpu(), **close)
    for ours, theirs in zip(logs(found), logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if several else 1e-4)
    detach_l2l(found.model)
    for module in (found.model, *found.losses()):
        assert not any(map(is_attached, module.modules()))
        assert {p.device.type for p in module.parameters()} == {"cpu"}


@cpu_suffices
def test_a_loss_is_attached_as_a_model_in_any_loop():
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


class TwoHeads(Toy):
    """A second head on features that it does not train."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.probe = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean(), self.probe(x.detach()).tanh().square().mean()


def test_another_part_of_the_graph_may_run_backward_later():
    """What the first backward frees is what it has used up."""
    plain = TwoHeads()
    model = copy.deepcopy(plain)
    attach_l2l(model, config_for(model, ubatch_size=2))
    for each in (plain, model):
        main, of_probe = each(torch.arange(24).view(4, 6))
        main.backward()
        of_probe.backward()
    assert relative_error(gradients(model), gradients(plain)) < 1e-5
