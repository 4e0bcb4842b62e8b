"""Trainers of other libraries train layer to layer, by a function, a mixin or a callback, with second models, and with
losses that have parameters of their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
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
from models import SMALL, Toy, batch_for, bert, gradients, llama, relative_error, t5
from plain import assert_as_plain, assert_close_run, is_attached, small_bert
from runs import config_for
from tiers import cpu_suffices
from training import CHECKPOINTING, arguments, logs, on, rows


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
        return found.loss + self.beta * (found.logits - reference.logits).pow(2).mean()


class Loading(hf.Trainer):
    """Loads the model itself, as SFTTrainer of TRL does, and makes a batch of a list of rows, as GRPOTrainer does."""

    def __init__(self, model, args=None, **kwargs):
        super().__init__(
            hf.AutoModelForSequenceClassification.from_pretrained(model), args, data_collator=list, **kwargs
        )

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(inputs, list)
        return super().training_step(model, hf.default_data_collator(inputs), num_items_in_batch)


def mixed(*kinds: type) -> type[hf.Trainer]:
    return type("Mixed", kinds, {})


@cpu_suffices
@pytest.mark.parametrize("kinds", [(Preferring, L2LTrainer), (L2LTrainer, Preferring)])
def test_a_mixin_with_a_trainer_of_another_order(tmp_path, kinds):
    def trained(kind, folder):
        model, args = small_bert(), arguments(hf.TrainingArguments, tmp_path / folder, max_steps=2)
        if kinds[0] is Preferring:
            made = kind(model, None, args, rows(), beta=0.5)
        else:
            made = kind(model, args=args, beta=0.5, train_dataset=rows())
        made.train()
        assert (made.args, made.ref_model, made.beta) == (args, None, 0.5)
        return made

    expected, found = trained(Preferring, "plain"), trained(mixed(*kinds), "l2l")
    assert found.eps is not None
    assert_as_plain(found, expected)


@cpu_suffices
@pytest.mark.parametrize("kinds", [(Loading, L2LTrainer), (L2LTrainer, Loading)])
def test_a_mixin_with_a_trainer_that_loads_the_model_and_whose_batches_are_lists(tmp_path, kinds):
    folder, args = str(tmp_path / "model"), arguments(hf.TrainingArguments, tmp_path, max_steps=2)
    small_bert().save_pretrained(folder)
    found = mixed(*kinds)(folder, args, train_dataset=rows())
    assert found.eps is None  # reading it attaches nothing
    found.train()
    assert found.eps is not None
    expected = Loading(folder, args, train_dataset=rows())
    expected.train()
    assert_as_plain(found, expected)
    with pytest.raises(ValueError, match="fp16_full_eval"):
        mixed(*kinds)(folder, arguments(hf.TrainingArguments, tmp_path, fp16_full_eval=True))


# ---- second models


def other_bert(layers: int = 1) -> nn.Module:
    model = small_bert(layers=layers)
    with torch.no_grad():
        model.classifier.bias.add_(0.5)
    return model


@dataclass
class PreferringArguments(hf.TrainingArguments):
    """Of the library."""

    beta: float = 0.5
    max_grad_norm: float = 0.5


@cpu_suffices
@pytest.mark.parametrize("layers", [None, 0, 1], ids=["no second model", "one without layers", "one with layers"])
def test_a_made_trainer_trains_as_its_base(tmp_path, device, layers):
    def trained(kind, args_kind, folder, **options):
        args = arguments(args_kind, tmp_path / folder, beta=0.3, max_steps=3, **options)
        reference = None if layers is None else other_bert(layers)
        made = kind(small_bert(), reference, args, rows(), beta=args.beta)
        made.train()
        return made

    expected = trained(Preferring, PreferringArguments, "plain")
    kinds = make_l2l_trainer(Preferring), make_l2l_arguments(PreferringArguments)
    found = trained(*kinds, "l2l", stash="host")
    assert_as_plain(found, expected)
    if layers:
        attach_l2l(found.ref_model, L2LConfig(stash="host", device=device))  # as it is attached already
        assert {p.device.type for p in found.ref_model.parameters()} == {"cpu"}
        detach_l2l(found.model)
    assert not is_attached(found.ref_model)


def preferred(folder: Path, reference: nn.Module, **options: Any) -> hf.Trainer:
    """A trainer with a second model, which has trained."""
    args = arguments(L2LTrainingArguments, folder, max_steps=1, **options)
    made = make_l2l_trainer(Preferring)(small_bert(), reference, args, rows())
    made.train()
    return made


def test_a_reference_model_that_the_program_has_put_on_the_device_stays_there(tmp_path, device):
    reference = preferred(tmp_path, other_bert().to(device)).ref_model
    assert {p.device.type for p in reference.parameters()} == {device}
    assert is_attached(reference) == (device == "cpu")


def test_a_reference_model_keeps_its_dtype_and_is_not_traced(tmp_path):
    trace = str(tmp_path / "trace.json")
    made = preferred(tmp_path, other_bert().to(torch.bfloat16), cmp="bf16", l2l_trace=trace)
    assert {p.dtype for p in made.ref_model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"trace='.*', where it has None"):
        attach_l2l(made.ref_model, L2LConfig(trace=trace))
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
    """With generation. SGD, since Adam would make much of rounding where a gradient is nearly 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = t5()
    batch = batch_for(model, rows=16)
    data = [{name: tensor[i] for name, tensor in batch.items()} for i in range(16)]
    same = {"optim": "sgd", "predict_with_generate": True, "generation_max_length": 5}

    def trained(kind, args_kind, folder, **options):
        args = arguments(args_kind, tmp_path / folder, **same, **options)
        both = {"train_dataset": data, "eval_dataset": data, "data_collator": hf.default_data_collator}
        made = kind(copy.deepcopy(model), args, **both)
        made.train()
        return made, made.predict(data)

    expected, theirs = trained(hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments, "plain", **{CHECKPOINTING: True})
    kinds = make_l2l_trainer(hf.Seq2SeqTrainer), make_l2l_arguments(hf.Seq2SeqTrainingArguments)
    found, ours = trained(*kinds, "l2l", ubatch_size=8)
    # Autograd sums the three uses of the embedding in another order.
    assert_close_run(found, expected, rel=1e-4, weights=1e-4)
    assert (ours.predictions == theirs.predictions).all()
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)


# ---- losses with parameters of their own


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


class Embedder(hf.Trainer):
    """Computes the loss of pairs, and makes its optimizer over the parameters of the loss."""

    def __init__(self, *args: Any, loss: nn.Module | dict[str, nn.Module], **kwargs: Any) -> None:
        # `model.zero_grad()` does not reach those of the loss.
        clear = on("on_step_end", lambda *_, optimizer, **__: optimizer.zero_grad())
        super().__init__(*args, callbacks=[clear], **kwargs)
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


EMBEDDERS = make_l2l_trainer(Embedder), L2LTrainingArguments
LOSSES = [(False, {}), (False, {"max_grad_norm": 0.01, "l2l_resident": "shell"}), (True, {"eps_update": "deferred"})]


@cpu_suffices
@pytest.mark.parametrize(("several", "options"), LOSSES, ids=str)
def test_the_parameters_of_a_loss_are_trained(tmp_path, device, several, options):
    """The norm that is clipped is that of the model alone, as transformers has it."""
    clips = {"max_grad_norm": options.get("max_grad_norm", 0.0)}
    expected = embedded(Embedder, hf.TrainingArguments, tmp_path / "plain", several, **clips)
    found = embedded(*EMBEDDERS, tmp_path / "l2l", several, **clips | options)
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
    first = embedded(*EMBEDDERS, tmp_path / "first", max_steps=1)
    other = Classifying(first.model)
    before, kept = (loss.classifier.weight.detach().clone() for loss in (other, first.loss))
    args = arguments(L2LTrainingArguments, tmp_path / "second", remove_unused_columns=False, max_steps=1)
    made = EMBEDDERS[0](first.model, args, train_dataset=rows(), loss=other)
    made.train()
    assert not torch.equal(other.classifier.weight, before)
    assert torch.equal(first.loss.classifier.weight, kept) and not is_attached(first.loss.classifier)


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


# ---- the callback


@pytest.mark.parametrize("options", [{}, {"ubatch_size": 8, "stash": "host"}], ids=str)
def test_a_callback_attaches_the_model_of_any_trainer(tmp_path, device, options, caplog):
    """And moves it back to the host, where the Trainer has put it on the device, also of a training that goes on."""

    def made(folder: str, *callbacks: hf.TrainerCallback) -> hf.Trainer:
        args = arguments(hf.TrainingArguments, tmp_path / folder, save_strategy="steps", save_steps=2)
        return hf.Trainer(small_bert(), args, train_dataset=rows(), callbacks=[*callbacks])

    expected = made("plain")
    expected.train()
    found = made("l2l", L2LCallback(L2LConfig(**options)))
    with caplog.at_level("INFO", "hf_l2l"):
        found.train()
    assert any("no accelerator" in m if device == "cpu" else "layers streamed" in m for m in caplog.messages)
    assert is_attached(found.model) and {p.device.type for p in found.model.parameters()} == {"cpu"}
    assert_as_plain(found, expected)
    resumed = made("l2l", L2LCallback(L2LConfig(**options)))
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


def test_a_callback_refuses_what_l2l_cannot_honour(tmp_path, monkeypatch):
    """Arguments when the trainer is built, layers and dtypes when the training begins."""

    def made(model: Any, config: L2LConfig | None = None, **options: Any) -> hf.Trainer:
        args = arguments(hf.TrainingArguments, tmp_path, **options)
        return hf.Trainer(model, args, train_dataset=rows(), callbacks=[L2LCallback(config)])

    with pytest.raises(ValueError, match="torch_compile"):
        made(llama(), torch_compile=True)
    with pytest.raises(ValueError, match="a stack of layers"):
        made(nn.Linear(2, 2)).train()

    device_module = stream.device_module

    class WithoutBf16:
        is_bf16_supported = staticmethod(lambda: False)

        def __init__(self, device: torch.device) -> None:
            self.of = device_module(device)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.of, name)

    monkeypatch.setattr(stream, "device_module", WithoutBf16)
    refused = made(small_bert(), L2LConfig(cmp="auto"))
    with pytest.raises(ValueError, match="cmp='auto', which is fp16"):
        refused.train()
    assert not is_attached(refused.model)
