"""Trainers and arguments that are made of those of other libraries: names, signatures, fields, pickles."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass, field, fields, make_dataclass

import torch
import transformers as hf

from hf_l2l import (
    L2LArgumentsMixin,
    L2LTrainer,
    L2LTrainerMixin,
    L2LTrainingArguments,
    make_l2l_arguments,
    make_l2l_trainer,
)
from rank_pool import RankPool
from training import CHECKPOINTING


class Preferring(hf.Trainer):
    """Takes its arguments in another order, as TRL's DPOTrainer does."""

    def __init__(self, model=None, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        """Of the library."""


@dataclass
class PreferringArguments(hf.TrainingArguments):
    """Of the library."""

    beta: float = 0.5
    max_grad_norm: float = 0.5


def test_classes_are_made_once_and_take_the_same_arguments(tmp_path):
    made = make_l2l_trainer(Preferring)
    assert make_l2l_trainer(Preferring) is make_l2l_trainer(made) is made
    assert (made.__name__, made.__bases__) == ("L2LPreferring", (L2LTrainerMixin, Preferring))
    assert inspect.signature(made) == inspect.signature(Preferring)
    assert make_l2l_trainer(hf.Trainer) is make_l2l_trainer(L2LTrainer) is L2LTrainer
    assert inspect.signature(L2LTrainer) == inspect.signature(hf.Trainer)
    kind = make_l2l_arguments(PreferringArguments)
    assert make_l2l_arguments(PreferringArguments) is make_l2l_arguments(kind) is kind
    names, own, theirs = ([f.name for f in fields(each)] for each in (kind, L2LArgumentsMixin, PreferringArguments))
    assert kind.__name__ == "L2LPreferringArguments" and names[0] == "output_dir" and {*names} == {*own, *theirs}
    assert make_l2l_arguments(hf.TrainingArguments) is make_l2l_arguments(L2LTrainingArguments) is L2LTrainingArguments
    words = ["--output_dir", str(tmp_path), "--beta", "0.25", "--ubatch_size", "4"]
    [args] = hf.HfArgumentParser(kind).parse_args_into_dataclasses(words)
    assert (args.beta, args.ubatch_size, args.max_grad_norm) == (0.25, 4, 0.5)


def test_attributes_are_what_they_are_of_trainer():
    """Programs call static methods of the class, and a property is no method."""
    for ours, theirs in ((L2LTrainer, hf.Trainer), (L2LTrainingArguments, hf.TrainingArguments)):
        kinds = {name: type(value) for base in reversed(theirs.__mro__[:-1]) for name, value in vars(base).items()}
        found = {name: type(inspect.getattr_static(ours, name)) for name in kinds}
        assert {name for name in kinds if found[name] is not kinds[name]} <= {"__doc__"}


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


class Further(make_l2l_arguments(PreferringArguments)):
    """Made by a class statement, so that it is pickled by its name."""


def test_classes_and_arguments_are_pickled(tmp_path):
    kind = make_l2l_arguments(PreferringArguments)
    args, trainer = kind(str(tmp_path), beta=0.3, ubatch_size=2), make_l2l_trainer(Preferring)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded, *again = pickle.loads(pickle.dumps((args, kind, trainer), protocol))  # noqa: S301
        assert again == [kind, trainer]
        assert type(loaded) is kind and (loaded.beta, loaded.ubatch_size) == (0.3, 2)
    assert copy.deepcopy(args).to_dict() == args.to_dict()
    assert pickle.loads(pickle.dumps(Further)) is Further  # noqa: S301


def test_arguments_are_loaded_in_a_process_that_has_not_made_the_class(tmp_path):
    """As `training_args.bin` is."""
    torch.save(make_l2l_arguments(hf.Seq2SeqTrainingArguments)(str(tmp_path), ubatch_size=2), tmp_path / "args.bin")
    code = (
        f"import torch; args = torch.load({str(tmp_path / 'args.bin')!r}, weights_only=False); "
        "assert (type(args).__name__, args.ubatch_size) == ('L2LSeq2SeqTrainingArguments', 2)"
    )
    pool = RankPool(1)  # whose process has made no class
    pool.run(exec, code)
    pool.close()
