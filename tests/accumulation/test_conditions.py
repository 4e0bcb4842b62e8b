"""What speaks against folding before the first step; that nothing is folded then is shown beside the reason."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

import accumulated
from accumulated import forwards, tiny_llama, train
from hf_l2l import L2LTrainer
from hf_l2l.hf import preparation
from training import logs


@pytest.fixture(autouse=True)
def _weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: where layers run on the CPU, nobody is warned."""
    monkeypatch.setattr(preparation, "weights_travel", lambda config: config.resident != "all")


class OwnLoss(L2LTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnStep(L2LTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


def with_batch_norm() -> nn.Module:
    model = tiny_llama()
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, WithNorm())
    return model


def mixtral(**config: object) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        known = {"num_key_value_heads": 1, "vocab_size": 60, "num_local_experts": 4, "pad_token_id": 0}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **known, **config))


def fixed_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.mean()


def with_longer_rows() -> nn.Module:
    """Says so in a part of its configuration, as models with positions per kind of layer do."""
    model = mixtral()
    model.config.rope_parameters = {"full_attention": {"rope_type": "longrope"}}
    return model


CASES = {
    "off": ({"l2l_merge_accumulation": "off"}, "l2l_merge_accumulation='off'"),
    "compute_loss": ({"kind": OwnLoss}, "OwnLoss has a compute_loss of its own"),
    "training_step": ({"kind": OwnStep}, "OwnStep has a training_step of its own"),
    "compute_loss_func": ({"of_trainer": {"compute_loss_func": fixed_loss}}, "compute_loss_func may compute"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor makes the Trainer compute the loss"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "the noise of neftune_noise_alpha depends on the longest row"),
    "routers": ({"model": lambda: mixtral(output_router_logits=True)}, r"auxiliary loss of its routers"),
    "graphs": ({"l2l_kept_graphs": 1}, "l2l_kept_graphs would keep the graphs of all batches at once"),
    "rotary positions": (
        {"model": with_longer_rows},
        "its rotary positions depend on the longest row of a batch",
    ),
    "batch norm": (
        {"model": with_batch_norm},
        "model.embed_tokens.1.norm normalizes over the rows of each batch",
    ),
}


@pytest.mark.parametrize(("options", "reason"), CASES.values(), ids=CASES.keys())
def test_batches_run_one_by_one_and_a_warning_says_why(tmp_path, options, reason):
    model = options.get("model", tiny_llama)
    made = accumulated.made(tmp_path, **{**options, "model": model(), "max_steps": 1})
    seen = forwards(made)
    [said] = train(made)
    assert said.startswith("batch 2 x accumulation 4 moves the weights 8 times per step: ") and reason in said
    assert ". per_device_train_batch_size=8, ubatch_size=2, gradient_accumulation_steps=1 moves them twice" in said
    assert seen == [2, 2, 2, 2]


def test_nothing_is_won_where_all_layers_are_resident(tmp_path):
    made = accumulated.made(tmp_path, model=tiny_llama(), l2l_resident="all", max_steps=1)
    seen = forwards(made)
    assert train(made) == [] and seen == [2, 2, 2, 2]


def test_a_method_that_is_replaced_on_the_trainer_counts(tmp_path):
    made = accumulated.made(tmp_path, max_steps=1)
    made.compute_loss = made.compute_loss
    [said] = train(made)
    assert "this trainer has a compute_loss of its own" in said


def test_a_loss_that_is_a_mean_over_each_batch(tmp_path):
    made = accumulated.made(tmp_path, max_steps=1)
    made.loss_is_scaled_for_ga = False
    [said] = train(made)
    assert "loss_is_scaled_for_ga=False says that the loss is a mean over each batch" in said
    made = accumulated.made(tmp_path, max_steps=1)
    made.model_accepts_loss_kwargs = False
    [said] = train(made)
    assert "the loss of a LlamaForCausalLM is a mean over each batch: it takes no num_items_in_batch" in said


def test_without_accumulation_nothing_is_said(tmp_path):
    made = accumulated.made(tmp_path, gradient_accumulation_steps=1, kind=OwnLoss)
    assert train(made) == []


@pytest.mark.parametrize("value", ["on", None, True])
def test_other_values_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"l2l_merge_accumulation must be 'auto' or 'off' \(got .*\); use 'off'"):
        accumulated.made(tmp_path, l2l_merge_accumulation=value)


def test_experts_are_folded_without_the_loss_of_their_routers(tmp_path):
    folded = accumulated.made(tmp_path, model=mixtral())
    seen = forwards(folded)
    assert train(folded) == []
    assert seen[-3:] == [8, 8, 8]
    apart = accumulated.made(tmp_path, model=mixtral(), l2l_merge_accumulation="off")
    train(apart)
    for found, expected in zip(logs(folded), logs(apart), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_experts_whose_routers_have_a_loss_train_as_with_the_trainer(tmp_path):
    model = {"model": mixtral(output_router_logits=True, router_aux_loss_coef=0.1)}
    made = accumulated.made(tmp_path, **model)
    train(made)
    model = {"model": mixtral(output_router_logits=True, router_aux_loss_coef=0.1)}
    plain = accumulated.made(tmp_path, kind=hf.Trainer, **model)
    train(plain)
    for found, expected in zip(logs(made), logs(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
