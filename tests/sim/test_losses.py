"""Parameters of losses on a device: their masters stay on the host, like all others outside the layers."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from hf_l2l import L2LTrainingArguments, detach_l2l, make_l2l_trainer
from losses import Embedder, embedded, weights_with_loss


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{}, {"l2l_resident": "shell"}, {"ubatch_size": 2, "stash": "host"}])
def test_the_parameters_of_a_loss_are_trained(tmp_path, options):
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", max_grad_norm=0.0)
    found = embedded(make_l2l_trainer(Embedder), L2LTrainingArguments, tmp_path / "l2l", max_grad_norm=0.0, **options)
    detach_l2l(found.model)
    assert {p.device.type for p in found.loss.parameters()} == {"cpu"}
    weights = weights_with_loss(expected)
    for name, tensor in weights_with_loss(found).items():
        torch.testing.assert_close(
            tensor, weights[name], rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text
        )
    for entry, other in zip(found.state.log_history[:-1], expected.state.log_history[:-1], strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_norm_that_is_clipped_is_that_of_the_model_alone(tmp_path):
    """As transformers does."""
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", max_grad_norm=0.01)
    found = embedded(make_l2l_trainer(Embedder), L2LTrainingArguments, tmp_path / "l2l", max_grad_norm=0.01)
    for entry, other in zip(found.state.log_history[:-1], expected.state.log_history[:-1], strict=True):
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    detach_l2l(found.model)
    torch.sim.synchronize()
