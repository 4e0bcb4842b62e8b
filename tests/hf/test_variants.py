"""Trainers and arguments of other libraries run layer to layer, by a function, a mixin or a callback."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path

import pytest
import torch
import transformers as hf

from hf_l2l import (
    L2LArgumentsMixin,
    L2LCallback,
    L2LConfig,
    L2LTrainer,
    L2LTrainerMixin,
    L2LTrainingArguments,
    detach_l2l,
    make_l2l_arguments,
    make_l2l_trainer,
)
from hf_l2l.hf.attach import attachment_of
from hf_l2l.model import precision
from models import batch_for, llama, t5
from rank_pool import RankPool
from training import CHECKPOINTING, arguments, assert_same_run, logs, rows, tiny_bert


class Preferring(hf.Trainer):
    """Takes its arguments in another order, as TRL's DPOTrainer does, and has a second model."""

    def __init__(self, model=None, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        """Of the library."""
        super().__init__(model=model, args=args, train_dataset=train_dataset)
        self.beta = beta
        self.ref_model = ref_model
        if ref_model is not None:
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        if self.ref_model is None:
            return loss
        with torch.no_grad():
            reference = self.ref_model(**inputs).loss
        return loss + self.beta * reference


@dataclass
class PreferringArguments(hf.TrainingArguments):
    """Of the library."""

    beta: float = 0.5
    max_grad_norm: float = 0.5


def test_a_trainer_is_made_once_and_takes_the_same_arguments():
    made = make_l2l_trainer(Preferring)
    assert make_l2l_trainer(Preferring) is made
    assert (made.__name__, made.__bases__) == ("L2LPreferring", (L2LTrainerMixin, Preferring))
    assert inspect.signature(made) == inspect.signature(Preferring)
    assert make_l2l_trainer(made) is made
    assert make_l2l_trainer(hf.Trainer) is make_l2l_trainer(L2LTrainer) is L2LTrainer


def test_arguments_are_made_once_with_all_fields():
    made = make_l2l_arguments(PreferringArguments)
    assert make_l2l_arguments(PreferringArguments) is make_l2l_arguments(made) is made
    assert made.__name__ == "L2LPreferringArguments"
    own = {f.name for f in fields(L2LArgumentsMixin)}
    assert {f.name for f in fields(made)} == {f.name for f in fields(PreferringArguments)} | own
    assert fields(made)[0].name == "output_dir"
    assert make_l2l_arguments(hf.TrainingArguments) is make_l2l_arguments(L2LTrainingArguments) is L2LTrainingArguments


def test_activation_checkpointing_is_off_by_default(tmp_path):
    own = [(CHECKPOINTING, bool, field(default=True)), ("other", bool, True)]
    library = make_dataclass("Checkpointing", own, bases=(hf.TrainingArguments,))
    assert getattr(library(str(tmp_path)), CHECKPOINTING)
    made = make_l2l_arguments(library)
    assert not getattr(made(str(tmp_path)), CHECKPOINTING) and made(str(tmp_path)).other
    assert getattr(made(str(tmp_path), **{CHECKPOINTING: True}), CHECKPOINTING)
    [args] = hf.HfArgumentParser(made).parse_args_into_dataclasses(["--output_dir", str(tmp_path)])
    assert not getattr(args, CHECKPOINTING)


def test_cmp_with_arguments_that_ask_for_autocast_by_default(tmp_path):
    """As TRL's: None stands for True."""

    @dataclass
    class Automatic(hf.TrainingArguments):
        bf16: bool | None = None

        def __post_init__(self):
            self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
            super().__post_init__()

    made = make_l2l_arguments(Automatic)
    assert made(str(tmp_path), use_cpu=True).bf16 is True
    assert made(str(tmp_path), use_cpu=True, cmp="bf16").bf16 is False
    with pytest.raises(ValueError, match="leave out bf16"):
        made(str(tmp_path), use_cpu=True, cmp="bf16", bf16=True)


def test_the_command_line_has_the_options_of_both(tmp_path):
    parser = hf.HfArgumentParser(make_l2l_arguments(PreferringArguments))
    words = ["--output_dir", str(tmp_path), "--beta", "0.25", "--ubatch_size", "4", "--stash", "host"]
    [args] = parser.parse_args_into_dataclasses(words)
    assert (args.beta, args.ubatch_size, args.stash, args.max_grad_norm) == (0.25, 4, "host", 0.5)
    with pytest.raises(ValueError, match="ubatch_size must be a whole number"):
        make_l2l_arguments(PreferringArguments)(str(tmp_path), ubatch_size=0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_classes_and_arguments_are_pickled(tmp_path, protocol):
    kind = make_l2l_arguments(PreferringArguments)
    args = kind(str(tmp_path), beta=0.3, ubatch_size=2)
    pickled = pickle.dumps((args, kind, make_l2l_trainer(Preferring)), protocol)
    loaded, again, trainer = pickle.loads(pickled)  # noqa: S301
    assert again is kind and trainer is make_l2l_trainer(Preferring)
    assert type(loaded) is kind and (loaded.beta, loaded.ubatch_size) == (0.3, 2)
    assert copy.deepcopy(args).to_dict() == args.to_dict()


class Further(make_l2l_arguments(PreferringArguments)):
    """Made by a class statement, so that it is pickled by its name."""


def test_a_subclass_of_a_made_class_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(Further)) is Further  # noqa: S301


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_arguments_are_loaded_in_a_process_that_has_not_made_the_class(apart, tmp_path):
    """As `training_args.bin` is; in a process that begins anew, or that was forked when transformers was there."""
    torch.save(make_l2l_arguments(hf.Seq2SeqTrainingArguments)(str(tmp_path), ubatch_size=2), tmp_path / "args.bin")
    code = (
        f"import torch; args = torch.load({str(tmp_path / 'args.bin')!r}, weights_only=False); "
        "assert (type(args).__name__, args.ubatch_size) == ('L2LSeq2SeqTrainingArguments', 2)"
    )
    if not apart:
        pool = RankPool(1)
        pool.run(exec, code)
        pool.close()
        return
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reference", [False, True])
def test_a_made_trainer_trains_as_its_base(tmp_path, reference):
    def trained(kind, args_kind, folder, **options):
        args = arguments(args_kind, tmp_path / folder, max_grad_norm=0.5, **options)
        second = tiny_bert(layers=2) if reference else None
        made = kind(tiny_bert(), second, args, rows(), beta=args.beta)
        made.train()
        return made

    expected = trained(Preferring, PreferringArguments, "plain", beta=0.3)
    kinds = make_l2l_trainer(Preferring), make_l2l_arguments(PreferringArguments)
    found = trained(*kinds, "l2l", beta=0.3, stash="host")
    assert_same_run(found, expected)
    if reference:
        attachment = attachment_of(found.ref_model)
        assert attachment is not None and attachment.config.stash == "host"
        detach_l2l(found.model)
        assert attachment_of(found.ref_model) is None


def test_a_reference_model_keeps_its_dtype_and_is_not_traced(tmp_path):
    kinds = make_l2l_trainer(Preferring), make_l2l_arguments(PreferringArguments)
    args = arguments(kinds[1], tmp_path, cmp="bf16", l2l_trace=str(tmp_path / "trace.json"), max_steps=1)
    reference = tiny_bert().to(torch.bfloat16)
    made = kinds[0](tiny_bert(), reference, args, rows())
    made.train()
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert attachment_of(reference).config.trace is None
    detach_l2l(made.model)


def test_a_reference_model_without_layers_is_left_to_the_trainer(tmp_path):
    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss_value = torch.nn.Parameter(torch.ones(()))

        def forward(self, **inputs):
            return hf.utils.ModelOutput(loss=self.loss_value)

    second = Constant()
    made = make_l2l_trainer(Preferring)(tiny_bert(), second, arguments(L2LTrainingArguments, tmp_path), rows())
    made.train()
    assert attachment_of(second) is None


def test_seq2seq(tmp_path):
    def trained(kind, args_kind, folder, **options):
        options["optim"] = "sgd"  # Adam would make much of rounding where a gradient is nearly 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = t5()
        batch = batch_for(model, rows=16)
        data = [{name: tensor[i] for name, tensor in batch.items()} for i in range(16)]
        args = arguments(args_kind, tmp_path / folder, predict_with_generate=True, generation_max_length=5, **options)
        made = kind(model, args, train_dataset=data, eval_dataset=data, data_collator=hf.default_data_collator)
        made.train()
        return made, made.predict(data)

    expected, theirs = trained(hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments, "plain", **{CHECKPOINTING: True})
    kinds = make_l2l_trainer(hf.Seq2SeqTrainer), make_l2l_arguments(hf.Seq2SeqTrainingArguments)
    found, ours = trained(*kinds, "l2l", ubatch_size=8)
    # Autograd sums the three uses of the embedding in another order.
    assert logs(found)[0] == pytest.approx(logs(expected)[0], rel=1e-6)
    weights = dict(expected.model.named_parameters())
    for name, p in found.model.named_parameters():
        torch.testing.assert_close(p, weights[name], rtol=1e-4, atol=1e-5)
    assert (ours.predictions == theirs.predictions).all()
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)


# ---- bad input


def test_a_mixin_after_the_trainer_is_refused():
    with pytest.raises(ValueError, match="L2LTrainerMixin must come before Preferring .* with Preferring, L2LTr"):
        type("Mine", (Preferring, L2LTrainerMixin), {})
    with pytest.raises(ValueError, match=r"write: class Mine\(L2LArgumentsMixin, PreferringArguments\)"):
        type("Mine", (PreferringArguments, L2LArgumentsMixin), {})


@pytest.mark.parametrize("given", [dict, hf.TrainingArguments("folder"), None, "SFTTrainer"])
def test_what_is_no_class_of_transformers_is_refused(given):
    with pytest.raises(ValueError, match="trainer must be transformers' Trainer or a subclass of it"):
        make_l2l_trainer(given)
    with pytest.raises(ValueError, match="arguments must be transformers' TrainingArguments or a subclass of it"):
        make_l2l_arguments(given)


def test_arguments_with_a_field_of_the_same_name_are_refused():
    @dataclass
    class Taken(hf.TrainingArguments):
        cmp: str | None = None

    with pytest.raises(ValueError, match="leave the names of the options of L2L free .*with cmp"):
        make_l2l_arguments(Taken)


# ---- the callback


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"ubatch_size": 8, "stash": "host"}])
def test_a_callback_attaches_the_model_of_any_trainer(tmp_path, options, caplog):
    def trained(folder, callbacks):
        args = arguments(hf.TrainingArguments, tmp_path / folder, save_strategy="steps", save_steps=2)
        made = hf.Trainer(tiny_bert(), args, train_dataset=rows(), callbacks=callbacks)
        made.train()
        return made

    with caplog.at_level("INFO", "hf_l2l"):
        expected, found = trained("plain", []), trained("l2l", [L2LCallback(L2LConfig(**options))])
    assert caplog.messages.count("no accelerator: trains on the CPU, as Trainer would") == 1
    assert attachment_of(found.model) is not None
    assert_same_run(found, expected)
    found.train(resume_from_checkpoint=str(tmp_path / "l2l" / "checkpoint-2"))
    assert_same_run(found, expected)


def test_a_callback_of_a_library_that_calls_it_with_its_own_model(tmp_path):
    """SetFit passes a model that is no module, and its own arguments; those of the Trainer have other names."""
    model, args = tiny_bert(), arguments(hf.TrainingArguments, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    callback = L2LCallback()
    given = {"args": object(), "state": None, "control": None, "model": object(), "st_model": model, "st_args": args}
    callback.on_init_end(**given)
    callback.on_train_begin(**given, optimizer=optimizer)
    assert attachment_of(model) is not None
    callback.on_train_end(**given)


def test_a_callback_refuses_what_l2l_cannot_honour_when_the_trainer_is_built(tmp_path):
    args = arguments(hf.TrainingArguments, tmp_path, torch_compile=True)
    with pytest.raises(ValueError, match="torch_compile cannot be used with L2L"):
        hf.Trainer(llama(), args, callbacks=[L2LCallback()])


def test_a_callback_for_a_model_without_layers(tmp_path):
    model = torch.nn.Linear(2, 2)
    made = hf.Trainer(
        model, arguments(hf.TrainingArguments, tmp_path), train_dataset=rows(), callbacks=[L2LCallback()]
    )
    with pytest.raises(ValueError, match="must have a stack of layers"):
        made.train()


@pytest.mark.parametrize("options", [{"cmp": "fp16"}, {"nonfinite": "skip"}])
def test_a_callback_refuses_options_that_skip_steps(options):
    with pytest.raises(ValueError, match="cannot tell the Trainer's scheduler that a step is skipped"):
        L2LCallback(L2LConfig(**options))


def test_a_callback_refuses_a_dtype_that_skips_steps_when_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "_computes_in_bf16", lambda device: False)
    callback = L2LCallback(L2LConfig(cmp="auto"))
    made = hf.Trainer(
        tiny_bert(), arguments(hf.TrainingArguments, tmp_path), train_dataset=rows(), callbacks=[callback]
    )
    with pytest.raises(ValueError, match=r"cmp='auto', which is fp16 on this device.*or L2LTrainer"):
        made.train()
    assert attachment_of(made.model) is None


def test_a_reference_model_of_another_family_is_attached_again_for_the_next_training(tmp_path):
    args = arguments(L2LTrainingArguments, tmp_path, l2l_layer_classes=["BertLayer"])
    made = L2LTrainer(tiny_bert(), args, train_dataset=rows())
    reference = made.accelerator.prepare_model(llama(), evaluation_mode=True)
    for _ in range(2):
        made.train()
        assert attachment_of(reference).stacks[0].class_names == ("LlamaDecoderLayer",)
        detach_l2l(made.model)
        assert attachment_of(reference) is None
