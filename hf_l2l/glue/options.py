"""The options of `run_glue_l2l.py`, from the command line or a file, checked before anything is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_l2l.checkpoint.finding import is_finished, newest_whole
from hf_l2l.glue.compare import NAMES
from hf_l2l.glue.data import DataOptions
from hf_l2l.glue.messages import logger
from hf_l2l.glue.own_data.columns import LABEL
from hf_l2l.glue.own_data.files import check_files
from hf_l2l.glue.retired import RetiredArguments, modernized
from hf_l2l.glue.said.help import help_text
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
        description: what the script does, with examples, for `--help`.
    """

    model: type[M]
    data: type[D]
    simulate: Callable[[str | None], object]
    description: str

    @property
    def names(self) -> set[str]:
        """The names of all options, but for those that are gone."""
        kinds: tuple[Any, ...] = (ScriptArguments, self.model, self.data, L2LTrainingArguments)
        return {option.name for kind in kinds for option in fields(kind)}

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
        kinds = (ScriptArguments, self.model, self.data, L2LTrainingArguments, RetiredArguments)
        parser = _Flags(kinds, description=self.description)
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
        given = with_logs(modernized(given))
        check_script_options(given)
        parser = HfArgumentParser((ScriptArguments, self.model, self.data, L2LTrainingArguments))
        if "simulate" in given and not given.get("compare"):
            self._simulate(given["simulate"])  # before TrainingArguments looks for a device
        if not torch.accelerator.is_available() or "simulate" in given:
            given = {"dataloader_pin_memory": False, **given}  # there is nothing to copy to from pinned memory
        layered = given.get("trainer") != "hf"
        if layered:  # before packages are asked for that L2L does not use
            refuse_for_layers(argparse.Namespace(**given))
        check_numbers(given)  # before transformers says some of it in its own words
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
    """Says what is wrong in one sentence instead of a page of usage; its help begins with examples."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all options")

    def format_help(self) -> str:
        """Examples, and the options in groups: L2L's own, the script's, transformers'."""
        self.set_defaults(logging_steps=LOGGED_SHARE)
        by_name: dict[str, list[argparse.Action]] = {}
        for action in self._actions:
            by_name.setdefault(action.dest, []).append(action)
        script, model, data, training, retired = (
            [option.name for option in fields(kind)] for kind in self.dataclass_types
        )
        named = {
            "Options of layer-to-layer execution (L2L)": list(OWN_OPTIONS),
            "Options of this script": [*script, "help"],
            "The model": model,
            "The data": data,
            "Options of transformers' TrainingArguments": [name for name in training if name not in OWN_OPTIONS],
            "Options of earlier versions of transformers": retired,
        }
        groups = {title: [each for name in names for each in by_name[name]] for title, names in named.items()}
        return help_text(self.description, groups)


class _Range(NamedTuple):
    """From where to where a number may be, and the remedy; `below` is not one that it may be."""

    least: float
    below: float
    rule: str
    remedy: str


_AT_LEAST_0 = "a finite number, at least 0"
_SHARE = "at least 0 and below 1"
_RANGES = {
    "learning_rate": _Range(0, math.inf, _AT_LEAST_0, "use one such as 2e-5"),
    "num_train_epochs": _Range(0, math.inf, _AT_LEAST_0, "use one such as 3"),
    "weight_decay": _Range(0, math.inf, _AT_LEAST_0, "use one such as 0.01, or leave it out for none"),
    "warmup_steps": _Range(0, math.inf, _AT_LEAST_0, "give a number of steps, or a share of them below 1"),
    "adam_beta1": _Range(0, 1, _SHARE, "leave it out for 0.9"),
    "adam_beta2": _Range(0, 1, _SHARE, "leave it out for 0.999"),
    "adam_epsilon": _Range(0, math.inf, _AT_LEAST_0, "leave it out for 1e-8"),
    "label_smoothing_factor": _Range(0, 1, _SHARE, "leave it out for none"),
    "per_device_train_batch_size": _Range(1, math.inf, "at least 1", "leave it out for 8"),
    "per_device_eval_batch_size": _Range(1, math.inf, "at least 1", "leave it out for 8"),
    "gradient_accumulation_steps": _Range(1, math.inf, "at least 1", "leave it out for 1"),
    "eval_accumulation_steps": _Range(1, math.inf, "at least 1", "leave it out to gather all at the end"),
    "eval_delay": _Range(0, math.inf, _AT_LEAST_0, "leave it out for no delay"),
    "save_total_limit": _Range(1, math.inf, "at least 1", "leave it out to keep all, or use --save_strategy no"),
    "seed": _Range(0, 2**32, "from 0 to 4294967295", "leave it out for 42"),
    "dataloader_num_workers": _Range(0, math.inf, "at least 0", "leave it out to load in the main process"),
}
"""Numbers that transformers takes as they are, and that training fails with, or is none with."""


LOGGED_SHARE = 0.02
"""`logging_steps`, where neither it nor `logging_strategy` is given: a share of the steps."""


def with_logs(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, with fifty logs of a run where nothing is said of them: short ones have a curve.

    Evaluations, which transformers makes as often as logs, stay as often as they would have been.
    """
    if "logging_steps" in given or "logging_strategy" in given:
        return given
    evaluated = {"eval_steps": TrainingArguments.logging_steps} if given.get("eval_strategy") == "steps" else {}
    return {**evaluated, **given, "logging_steps": LOGGED_SHARE}


def check_numbers(given: dict[str, Any]) -> None:
    """Raise ValueError for a number among the options that were given that no training can have."""
    for name, (least, below, rule, remedy) in _RANGES.items():
        if name in given and not least <= given[name] < below:
            raise ValueError(f"--{name} must be {rule} (got {given[name]:g}); {remedy}")
    max_steps = given.get("max_steps", -1)
    if not (max_steps == -1 or max_steps >= 1):
        raise ValueError(f"--max_steps must be at least 1, or -1 for none (got {max_steps}); leave it out for none")
    norm = given.get("max_grad_norm", 1.0)
    if not norm >= 0:  # which may be infinite: the norm is logged, and nothing is clipped
        raise ValueError(f"--max_grad_norm must be at least 0 (got {norm:g}); use 0 to clip nothing")
    for what, default in (("logging", "steps"), ("eval", "no"), ("save", "steps")):
        steps, strategy = given.get(f"{what}_steps", 1), given.get(f"{what}_strategy", default)
        if strategy == "steps" and not 0 < steps < math.inf:
            raise ValueError(
                f"--{what}_steps must be above 0 (got {steps:g}); give a number of steps, a share of them below 1, or "
                f"--{what}_strategy no"
            )


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
        for name in ("text_columns", "label_column", "is_regression"):
            if getattr(data_args, name) is not None:
                raise ValueError(
                    f"--{name} is for own data (got --task_name {data_args.task_name}, of which it is known); drop it"
                )
    elif data_args.dataset_name is None:
        wanted = [data_args.label_column or LABEL, *(data_args.text_columns or ())]
        check_files(data_args.files, training_args, wanted)


def check_task(name: str) -> None:
    """Raise ValueError unless `name` is a task of GLUE."""
    tasks = glue().TASKS
    if name not in tasks:
        near = get_close_matches(name, tasks, n=1)
        raise ValueError(
            f"--task_name must be a task of GLUE, one of {', '.join(tasks)} (got {name}); "
            f"{f'did you mean {near[0]}?' if near else 'own data goes into --train_file'}"
        )


def check_script_options(given: dict[str, Any]) -> None:
    """Raise ValueError for options that cannot be honoured together; warn of those without effect."""
    if not str(given.get("output_dir", "out")).strip():
        raise ValueError(
            f"--output_dir must be a folder (got {given['output_dir']!r}); name one, such as --output_dir output"
        )
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
                "--resume_from_checkpoint True needs a whole checkpoint in --output_dir (got "
                f"{args.output_dir}, with {reasons}); leave the option out"
            )
        if last is None:
            raise ValueError(
                f"--resume_from_checkpoint True needs a checkpoint in --output_dir (got {args.output_dir}, with none)"
                "; name its folder, or leave the option out"
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
    """Raise ValueError unless files can be written into `folder`; it is not made before training needs it."""
    try:
        there = next(each for each in (Path(folder), *Path(folder).absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"--output_dir must be a folder that can be written to (got {folder}: {error.strerror}); choose another"
            " one"
        ) from error


def wants_default(argv: list[str]) -> bool:
    """Whether neither a model nor data nor training options are named: then the embedded default is run."""
    flags = tuple(f"--{option.name}" for option in fields(ScriptArguments))
    named = [word for word in argv if word.startswith("-")]
    return all(word.startswith(flags) for word in named) and not (argv and argv[-1].endswith(".json"))
