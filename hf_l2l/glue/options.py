"""The options of `run_glue_l2l.py`, from the command line or a file, checked before anything is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_l2l.checkpoint.finding import is_finished, newest_whole
from hf_l2l.glue.compare import NAMES
from hf_l2l.glue.data import DataOptions
from hf_l2l.glue.messages import logger
from hf_l2l.glue.retired import RetiredArguments, modernized
from hf_l2l.glue.scores import glue
from hf_l2l.hf.training_args import OWN_OPTIONS, L2LTrainingArguments, refuse_for_layers


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


M = TypeVar("M")
D = TypeVar("D", bound=DataOptions)


@dataclass
class Options(Generic[M, D]):
    """All options, checked."""

    script: ScriptArguments
    model: M
    data: D
    training: L2LTrainingArguments
    given: dict[str, Any]
    """Those that were given, by name, with what became of retired ones: another process can be started from them."""


@dataclass(frozen=True)
class Parser(Generic[M, D]):
    """Parses a command line, which may begin with a json file of options; flags after it take precedence.

    Args:
        model: the dataclass of the options of the model.
        data: the dataclass of the options of the data.
        simulate: makes a simulated accelerator the device of this process; takes its memory, or None for no limit.
    """

    model: type[M]
    data: type[D]
    simulate: Callable[[str | None], object]

    def parse(self, argv: list[str]) -> Options[M, D]:
        """The options of a command line.

        Raises:
            ValueError: for options that are unknown, wrong, or contradict each other.
            ImportError: where a package is missing that they need.
        """
        if not (argv and argv[0].endswith(".json")):
            return self._checked(self._given(argv))
        file, *flags = argv
        try:
            written = json.loads(Path(file).read_text(encoding="utf-8"))
            if not isinstance(written, dict):
                raise ValueError(
                    f"it must hold one object, with options as names (got a {type(written).__name__}); write "
                    '{"name": value}'
                )
            # As flags, so that both ways take the same values; lists as they are, and null for the default.
            words = [f"--{name}={value}" for name, value in written.items() if isinstance(value, (str, int, float))]
            structured = {name: value for name, value in written.items() if isinstance(value, (list, dict))}
            return self._checked({**structured, **self._given([*words, *flags])})
        except (OSError, TypeError, ValueError) as error:  # not there, an option missing, or one that is wrong
            raise ValueError(f"the options in {file} could not be used: {error}") from error

    def _given(self, words: list[str]) -> dict[str, Any]:
        """The options that are given on a command line, by name; not those that have their defaults."""
        parser = _Flags((ScriptArguments, self.model, self.data, L2LTrainingArguments, RetiredArguments))
        names = [option.name for kind in parser.dataclass_types for option in fields(kind)]
        absent = object()  # in the place of defaults: only what was given counts as given
        found, unknown = parser.parse_known_args(words, argparse.Namespace(**dict.fromkeys(names, absent)))
        if unknown:
            word = unknown[0].split("=")[0]
            near = get_close_matches(word, [f"--{name}" for name in names], n=1, cutoff=0.75)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"every flag must be that of an option (got {word}); {meant}--help lists all options")
        return {name: value for name, value in vars(found).items() if value is not absent}

    def _checked(self, given: dict[str, Any]) -> Options[M, D]:
        """The options with their defaults, after every check that needs no data."""
        given = modernized(given)
        check_script_options(given)
        parser = HfArgumentParser((ScriptArguments, self.model, self.data, L2LTrainingArguments))
        if "simulate" in given and not given.get("compare"):
            self._simulate(given["simulate"])  # before TrainingArguments looks for a device
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

    def _simulate(self, capacity: str) -> None:
        try:
            self.simulate(None if capacity == "unlimited" else capacity)
        except RuntimeError as error:
            raise ValueError(
                f"--simulate needs a process without another accelerator ({error}); leave it out"
            ) from error


class _Flags(HfArgumentParser):  # type: ignore[misc]  # transformers ships no types
    """Says what is wrong in one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all options")


def check_data_options(data_args: DataOptions, training_args: TrainingArguments) -> None:
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


def check_files(data_args: DataOptions, training_args: TrainingArguments) -> None:
    """Raise ValueError unless the files that are needed are named, are there, and are of one kind."""
    files = data_args.files
    if "train_file" not in files:
        raise ValueError(
            "own files need a train_file, whose labels say which classes there are (got none); add --train_file FILE"
        )
    if training_args.do_eval and "validation_file" not in files:
        raise ValueError("--do_eval needs a validation_file (got none); add --validation_file FILE")
    if training_args.do_predict and "test_file" not in files:
        raise ValueError("--do_predict needs a test_file (got none); add --test_file FILE")
    if "test_file" in files and not training_args.do_predict:
        raise ValueError(
            f"a test_file is for --do_predict (got --test_file {files['test_file']} without it); add --do_predict"
        )
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
    if not isinstance(trainer, str) or trainer not in NAMES:
        raise ValueError(f"--trainer must be one of {', '.join(NAMES)} (got {trainer}); leave it out for l2l")
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
        without_effect = [name for name in OWN_OPTIONS if name in given]
        if without_effect:
            logger.warning("without effect under --trainer hf: --%s", ", --".join(without_effect))


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """The folder of the checkpoint that training resumes from; "True" asks for the last one of output_dir."""
    asked = args.resume_from_checkpoint
    last, passed_over = newest_whole(Path(args.output_dir))
    if asked is None or str(asked).lower() == "false":
        if args.do_train and last is not None:
            logger.warning("training starts anew, over %s; --resume_from_checkpoint True resumes from it", last)
        return None
    if str(asked).lower() == "true":
        if last is None and passed_over:
            reasons = "; ".join(f"{each.folder.name}: {each.reason}" for each in passed_over)
            raise ValueError(
                "--resume_from_checkpoint True needs a whole checkpoint in output_dir (got "
                f"{args.output_dir}, with {reasons}); leave the option out"
            )
        if last is None:
            raise ValueError(
                f"--resume_from_checkpoint True needs a checkpoint in output_dir (got {args.output_dir}, with none); "
                "name its folder, or leave the option out"
            )
        for each in passed_over:
            if not each.is_interrupted:  # those are told of when training begins
                logger.warning("%s is not resumed from, but %s is: %s", each.folder, last, each.reason)
        return str(last)
    if not is_finished(Path(asked)):
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


def wants_default(argv: list[str]) -> bool:
    """Whether neither a model nor data nor training options are named: then the embedded default is run."""
    flags = tuple(f"--{option.name}" for option in fields(ScriptArguments))
    named = [word for word in argv if word.startswith("-")]
    return all(word.startswith(flags) for word in named) and not (argv and argv[-1].endswith(".json"))
