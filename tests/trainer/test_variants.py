"""Trainers of other libraries train layer to layer, by a function, a mixin or a callback, with second models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_l2l import (
    L2LCallback,
    L2LConfig,
    L2LTrainer,
    L2LTrainingArguments,
    attach_l2l,
    detach_l2l,
    make_l2l_arguments,
    make_l2l_trainer,
)
from hf_l2l.runtime import stream
from models import batch_for, llama, t5
from plain import assert_as_plain, assert_close_run, is_attached, small_bert
from tiers import cpu_suffices
from training import CHECKPOINTING, arguments, rows


class Preferring(hf.Trainer):
    """Takes its arguments in another order, as TRL's DPOTrainer does, and has a second model."""

    def __init__(self, model=None, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        super().__init__(model=model, args=args, train_dataset=train_dataset)
        self.beta = beta
        self.ref_model = ref_model
        if ref_model is not None:
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = model(**inputs)
        if self.ref_model is None:
            return found.loss
        with torch.no_grad():
            reference = self.ref_model(**inputs)
        if not hasattr(reference, "logits"):
            return found.loss + self.beta * reference.loss
        return found.loss + self.beta * (found.logits - reference.logits).pow(2).mean()


@dataclass
class PreferringArguments(hf.TrainingArguments):
    """Of the library."""

    beta: float = 0.5
    max_grad_norm: float = 0.5


class Loading(hf.Trainer):
    """Loads the model itself, as TRL's SFTTrainer does."""

    def __init__(self, model, args=None, **kwargs):
        if isinstance(model, str):
            model = hf.AutoModelForSequenceClassification.from_pretrained(model)
        super().__init__(model, args, **kwargs)


class Collecting(hf.Trainer):
    """Makes a batch of a list of rows, as TRL's GRPOTrainer does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, data_collator=list, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(inputs, list)
        return super().training_step(model, hf.default_data_collator(inputs), num_items_in_batch)


def mixed(kind: type[hf.Trainer], *, first: bool) -> type[hf.Trainer]:
    return type("Mixed", (L2LTrainer, kind) if first else (kind, L2LTrainer), {})


@cpu_suffices
@pytest.mark.parametrize(("first", "positional"), [(True, False), (False, True)])
def test_a_mixin_with_a_trainer_of_another_order(tmp_path, first, positional):
    def trained(kind, folder):
        model, args = small_bert(), arguments(hf.TrainingArguments, tmp_path / folder, max_steps=2)
        if positional:
            made = kind(model, None, args, rows(), beta=0.5)
        else:
            made = kind(model, args=args, beta=0.5, train_dataset=rows())
        made.train()
        assert (made.args, made.ref_model, made.beta) == (args, None, 0.5)
        return made

    expected, found = trained(Preferring, "plain"), trained(mixed(Preferring, first=first), "l2l")
    assert found.eps is not None
    assert_as_plain(found, expected)


@cpu_suffices
def test_a_mixin_with_a_trainer_that_loads_the_model(tmp_path):
    small_bert().save_pretrained(tmp_path / "model")
    args = arguments(hf.TrainingArguments, tmp_path)
    made = mixed(Loading, first=False)(str(tmp_path / "model"), args, train_dataset=rows())
    assert made.eps is None  # reading it attaches nothing
    made.create_optimizer()
    assert made.eps is not None
    with pytest.raises(ValueError, match="fp16_full_eval"):
        args = arguments(hf.TrainingArguments, tmp_path, fp16_full_eval=True)
        mixed(Loading, first=False)(str(tmp_path / "model"), args)


@cpu_suffices
def test_a_mixin_with_a_trainer_whose_batches_are_lists(tmp_path):
    def trained(kind, folder):
        args = arguments(hf.TrainingArguments, tmp_path / folder, max_steps=2)
        made = kind(small_bert(), args, train_dataset=rows())
        made.train()
        return made

    assert_as_plain(trained(mixed(Collecting, first=True), "l2l"), trained(Collecting, "plain"))


# ---- second models


def other_bert() -> nn.Module:
    model = small_bert(layers=1)
    with torch.no_grad():
        model.classifier.bias.add_(0.5)
    return model


class Constant(nn.Module):
    """Has no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_value = nn.Parameter(torch.ones(()))

    def forward(self, **inputs: Any) -> hf.utils.ModelOutput:
        return hf.utils.ModelOutput(loss=self.loss_value)


REFERENCES = {"none": lambda: None, "on the host": other_bert, "without layers": Constant}


@cpu_suffices
@pytest.mark.parametrize("make", REFERENCES.values(), ids=REFERENCES)
def test_a_made_trainer_trains_as_its_base(tmp_path, device, make):
    def trained(kind, args_kind, folder, **options):
        args = arguments(args_kind, tmp_path / folder, beta=0.3, max_steps=3, **options)
        made = kind(small_bert(), make(), args, rows(), beta=args.beta)
        made.train()
        return made

    expected = trained(Preferring, PreferringArguments, "plain")
    kinds = make_l2l_trainer(Preferring), make_l2l_arguments(PreferringArguments)
    found = trained(*kinds, "l2l", stash="host")
    assert_as_plain(found, expected)
    if make is not other_bert:
        assert not is_attached(found.ref_model)
        return
    attach_l2l(found.ref_model, L2LConfig(stash="host", device=device))  # as it is attached already
    assert {p.device.type for p in found.ref_model.parameters()} == {"cpu"}
    detach_l2l(found.model)
    assert not is_attached(found.ref_model)


def test_a_reference_model_that_the_program_has_put_on_the_device_stays_there(tmp_path, device):
    reference = other_bert().to(device)
    args = arguments(L2LTrainingArguments, tmp_path, max_steps=1)
    made = make_l2l_trainer(Preferring)(small_bert(), reference, args, rows())
    made.train()
    assert {p.device.type for p in reference.parameters()} == {device}
    assert is_attached(reference) == (device == "cpu")


def test_a_reference_model_keeps_its_dtype_and_is_not_traced(tmp_path):
    options = {"cmp": "bf16", "l2l_trace": str(tmp_path / "trace.json"), "max_steps": 1}
    args = arguments(L2LTrainingArguments, tmp_path, **options)
    reference = small_bert(layers=1).to(torch.bfloat16)
    made = make_l2l_trainer(Preferring)(small_bert(), reference, args, rows())
    made.train()
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"trace='.*', where it has None"):
        attach_l2l(reference, L2LConfig(trace=str(tmp_path / "trace.json")))
    detach_l2l(made.model)


def test_a_reference_model_of_another_family_is_attached_again_for_the_next_training(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, l2l_layer_classes=["BertLayer"], max_steps=1)
    made = L2LTrainer(small_bert(), args, train_dataset=rows())
    reference = made.accelerator.prepare_model(llama(), evaluation_mode=True)
    for _ in range(2):
        made.train()
        assert all(map(is_attached, reference.model.layers))
        detach_l2l(made.model)
        assert not is_attached(reference)


@cpu_suffices
def test_seq2seq(tmp_path):
    def trained(kind, args_kind, folder, **options):
        options["optim"] = "sgd"  # Adam would make much of rounding where a gradient is nearly 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = t5()
        batch = batch_for(model, rows=16)
        data = [{name: tensor[i] for name, tensor in batch.items()} for i in range(16)]
        options |= {"predict_with_generate": True, "generation_max_length": 5}
        args = arguments(args_kind, tmp_path / folder, **options)
        made = kind(model, args, train_dataset=data, eval_dataset=data, data_collator=hf.default_data_collator)
        made.train()
        return made, made.predict(data)

    expected, theirs = trained(hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments, "plain", **{CHECKPOINTING: True})
    kinds = make_l2l_trainer(hf.Seq2SeqTrainer), make_l2l_arguments(hf.Seq2SeqTrainingArguments)
    found, ours = trained(*kinds, "l2l", ubatch_size=8)
    # Autograd sums the three uses of the embedding in another order.
    assert_close_run(found, expected, rel=1e-4, weights=1e-4)
    assert (ours.predictions == theirs.predictions).all()
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)


# ---- the callback


def with_callback(model: Any, args: hf.TrainingArguments, config: L2LConfig | None = None) -> hf.Trainer:
    return hf.Trainer(model, args, train_dataset=rows(), callbacks=[L2LCallback(config)])


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 8, "stash": "host"}], ids=str)
def test_a_callback_attaches_the_model_of_any_trainer(tmp_path, device, options, caplog):
    """And moves it back to the host, where the Trainer has put it on the device, also of a training that goes on."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    expected = hf.Trainer(small_bert(), arguments(hf.TrainingArguments, tmp_path / "plain"), train_dataset=rows())
    expected.train()
    args = arguments(hf.TrainingArguments, tmp_path / "l2l", **saving)
    found = with_callback(small_bert(), args, L2LConfig(**options))
    with caplog.at_level("INFO", "hf_l2l"):
        found.train()
    assert any("no accelerator" in m if device == "cpu" else "layers streamed" in m for m in caplog.messages)
    assert is_attached(found.model) and {p.device.type for p in found.model.parameters()} == {"cpu"}
    assert_as_plain(found, expected)
    resumed = with_callback(small_bert(), args, L2LConfig(**options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "l2l" / "checkpoint-2"))
    assert_as_plain(resumed, expected)


def test_a_callback_of_a_library_that_calls_it_with_its_own_model(tmp_path):
    """SetFit passes a model that is no module, and its own arguments; those of the Trainer have other names."""
    model, args = small_bert(), arguments(hf.TrainingArguments, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    callback = L2LCallback()
    given = {"args": object(), "state": None, "control": None, "model": object(), "st_model": model, "st_args": args}
    callback.on_init_end(**given)
    callback.on_train_begin(**given, optimizer=optimizer)
    assert is_attached(model)
    callback.on_train_end(**given)


def without_bf16(patch: pytest.MonkeyPatch) -> None:
    """The device does not compute in bf16."""
    of = stream.device_module

    class Module:
        is_bf16_supported = staticmethod(lambda: False)

        def __init__(self, device: torch.device) -> None:
            self.of = of(device)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.of, name)

    patch.setattr(stream, "device_module", Module)


def test_a_callback_refuses_what_l2l_cannot_honour(tmp_path, monkeypatch):
    """Arguments when the trainer is built, layers and dtypes when the training begins."""
    with pytest.raises(ValueError, match="torch_compile"):
        with_callback(llama(), arguments(hf.TrainingArguments, tmp_path, torch_compile=True))
    args = arguments(hf.TrainingArguments, tmp_path)
    with pytest.raises(ValueError, match="a stack of layers"):
        with_callback(nn.Linear(2, 2), args).train()
    without_bf16(monkeypatch)
    made = with_callback(small_bert(), args, L2LConfig(cmp="auto"))
    with pytest.raises(ValueError, match="cmp='auto', which is fp16"):
        made.train()
    assert not is_attached(made.model)
