"""On a device: second models are streamed, or stay there; a callback moves the model back to the host."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from hf_l2l import L2LCallback, L2LConfig, L2LTrainingArguments, attach_l2l, detach_l2l, make_l2l_trainer
from hf_l2l.hf.attach import attachment_of
from training import arguments, assert_same_run, check_average, rows, tiny_bert


class Preferring(hf.Trainer):
    """Has a reference model, as TRL's DPOTrainer does."""

    def __init__(self, model, ref_model, args, train_dataset):
        super().__init__(model, args, train_dataset=train_dataset)
        self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            reference = self.ref_model(**inputs).logits
        found = model(**inputs)
        return found.loss + (found.logits - reference).pow(2).mean()


def trained(kind, args_kind, folder, reference):
    made = kind(tiny_bert(), reference, arguments(args_kind, folder), rows())
    made.train()
    return made


def other_bert():
    model = tiny_bert()
    with torch.no_grad():
        model.classifier.bias.add_(0.5)
    return model


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_reference_model(tmp_path, where):
    expected = trained(Preferring, hf.TrainingArguments, tmp_path / "plain", other_bert())
    reference = other_bert()
    if where == "device":
        reference.to("sim")
    found = trained(make_l2l_trainer(Preferring), L2LTrainingArguments, tmp_path / "l2l", reference)
    assert {p.device.type for p in reference.parameters()} == {"cpu" if where == "host" else "sim"}
    assert (attachment_of(reference) is None) == (where == "device")
    for entry, other in zip(found.state.log_history[:4], expected.state.log_history[:4], strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
    detach_l2l(found.model)
    assert attachment_of(reference) is None


def test_the_callback_moves_the_model_back_to_the_host(tmp_path):
    def run(folder, callbacks):
        args = arguments(hf.TrainingArguments, tmp_path / folder)
        made = hf.Trainer(tiny_bert(dropout=0), args, train_dataset=rows(), callbacks=callbacks)
        made.train()
        return made

    expected, found = run("plain", []), run("l2l", [L2LCallback(L2LConfig(ubatch_size=8))])
    assert {p.device.type for p in expected.model.parameters()} == {"sim"}
    assert {p.device.type for p in found.model.parameters()} == {"cpu"}
    expected.model.to("cpu")
    for entry, other in zip(found.state.log_history[:4], expected.state.log_history[:4], strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
    detach_l2l(found.model)


def test_a_made_trainer_is_the_trainer(tmp_path):
    def run(kind, folder):
        made = kind(tiny_bert(), arguments(L2LTrainingArguments, tmp_path / folder, l2l_log_times=False), rows())
        made.train()
        return made

    class Own(hf.Trainer):
        def __init__(self, model, args, train_dataset):
            super().__init__(model, args, train_dataset=train_dataset)

    class Mine(make_l2l_trainer(hf.Trainer)):
        def __init__(self, model, args, train_dataset):
            super().__init__(model, args, train_dataset=train_dataset)

    assert_same_run(run(make_l2l_trainer(Own), "made"), run(Mine, "own"))


def test_layers_with_a_backward_of_their_own_are_refused():
    config = hf.ReformerConfig(
        attn_layers=["local", "local"],
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=24,
        vocab_size=60,
        axial_pos_embds=False,
        local_attn_chunk_length=4,
        max_position_embeddings=16,
        is_decoder=True,
    )
    model = hf.ReformerModelWithLMHead(config)
    with pytest.raises(ValueError, match="a ReformerLayer has a backward_pass of its own, which cannot run on sim"):
        attach_l2l(model)
    attach_l2l(model, L2LConfig(device="cpu"))


@pytest.mark.parametrize(
    ("eps_update", "data"), [("serial", "kept"), ("deferred", "read again"), ("deferred", "synchronized")]
)
def test_an_average_of_weights_is_that_of_trainer(tmp_path, eps_update, data):
    check_average(tmp_path, eps_update, data)
