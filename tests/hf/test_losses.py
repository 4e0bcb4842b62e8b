"""Losses with parameters of their own are trained with the model, as those of sentence-transformers."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, L2LTrainingArguments, attach_l2l, detach_l2l, make_l2l_trainer
from hf_l2l.hf.attach import attachment_of
from losses import Classifying, Embedder, Embedding, embedded, weights_with_loss
from training import arguments, logs, rows


@pytest.mark.one_in(2)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("mode", ["serial", "deferred"])
def test_the_parameters_of_a_loss_are_trained(tmp_path, several, mode):
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", several)
    found = embedded(
        make_l2l_trainer(Embedder), L2LTrainingArguments, tmp_path / "l2l", several, eps_update=mode, ubatch_size=8
    )
    weights = weights_with_loss(expected)
    if several:  # four calls of the model in a step: their gradients are summed in another order
        assert logs(found)[0] == pytest.approx(logs(expected)[0], rel=1e-5)
        for name, tensor in weights_with_loss(found).items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)
    else:
        assert logs(found) == logs(expected)
        for name, tensor in weights_with_loss(found).items():
            assert torch.equal(tensor, weights[name]), name
    detach_l2l(found.model)
    for module in (found.model, *(found.loss.values() if several else [found.loss])):
        assert attachment_of(module) is None
        assert not any(hasattr(m, "_hf_hook") for m in module.modules())


def test_ubatches_of_a_model_inside_a_loss(tmp_path):
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain")
    found = embedded(make_l2l_trainer(Embedder), L2LTrainingArguments, tmp_path / "l2l", ubatch_size=2)
    for entry, other in zip(found.state.log_history[:-1], expected.state.log_history[:-1], strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_a_loss_is_attached_as_a_model_in_any_loop():
    torch.manual_seed(0)
    loss = Classifying(Embedding())
    eps = attach_l2l(loss, L2LConfig(ubatch_size=2))
    optimizer = eps.wrap(torch.optim.AdamW(loss.parameters(), lr=0.01))
    ids = torch.randint(5, 60, (8, 6))
    features = [{"input_ids": ids}, {"input_ids": ids.flip(0)}]
    before = loss.classifier.weight.detach().clone()
    first = loss(features, ids[:, 0] % 2)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(loss.classifier.weight, before)
    assert loss(features, ids[:, 0] % 2) < first


def test_a_second_training_with_another_loss(tmp_path):
    """Its parameters are trained, too, and those of the first loss not any more."""
    kinds = make_l2l_trainer(Embedder), L2LTrainingArguments
    first = embedded(*kinds, tmp_path / "first")
    other = Classifying(first.model)
    before = other.classifier.weight.detach().clone()
    args = arguments(L2LTrainingArguments, tmp_path / "second", remove_unused_columns=False)
    made = kinds[0](first.model, args, train_dataset=rows(), loss=other)
    made.train()
    assert not torch.equal(other.classifier.weight, before)
    assert attachment_of(first.loss) is None
