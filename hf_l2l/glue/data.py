"""The rows: a GLUE task, another data set of the Hub, or own files; checked, and tokenized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainingArguments

from hf_l2l.glue.messages import first_line, listed, logger
from hf_l2l.glue.scores import glue

if TYPE_CHECKING:
    from datasets import Dataset

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


class DataOptions(Protocol):
    """The options that say where the rows are: exactly one of the three sources is named."""

    task_name: str | None
    dataset_name: str | None
    dataset_config_name: str | None

    @property
    def files(self) -> dict[str, str]:
        """Own files by option: train_file, validation_file, test_file."""


class HubOptions(Protocol):
    """The options that say how the Hub is asked."""

    cache_dir: str | None
    token: str | None


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


def load_data(where: DataOptions, hub: HubOptions, training_args: TrainingArguments) -> Data:
    """Read and check the rows, before a model is loaded.

    Raises:
        ValueError: for rows that cannot be used, or a data set that cannot be had.
        ImportError: where the packages of the extra `glue` are missing.
    """
    if where.task_name is not None:
        data = load_task(where.task_name, hub)
    elif where.dataset_name is not None:
        data = load_hub_dataset(where.dataset_name, where.dataset_config_name, hub, training_args)
    else:
        data = load_files(where.files, hub.cache_dir)
    kind = "regression" if data.names is None else f"{len(data.names)} classes: {listed(data.names)}"
    logger.info("text from %s; %s", " and ".join(data.text_columns), kind)
    return data


def load_task(name: str, hub: HubOptions) -> Data:
    """A GLUE task from the Hub."""
    task = glue().TASKS[name]
    found = load_from_hub(glue().HUB_DATASET, name, hub)
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


def load_hub_dataset(name: str, config: str | None, hub: HubOptions, training_args: TrainingArguments) -> Data:
    """Another data set of the Hub."""
    found = load_from_hub(name, config, hub)
    needed = {"train": True, "validation": training_args.do_eval, "test": training_args.do_predict}
    missing = [split for split, wanted in needed.items() if wanted and split not in found]
    if missing:
        raise ValueError(
            f"{name} must have the split {missing[0]} (it has {listed(list(found))}); download it and give its parts "
            "as --train_file, --validation_file and --test_file"
        )
    return assembled({split: found[split] for split, wanted in needed.items() if wanted}, dict.fromkeys(needed, name))


def load_from_hub(name: str, config: str | None, hub: HubOptions) -> Any:
    """All splits of a data set of the Hub, from the cache where it was downloaded before."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(name, config, cache_dir=hub.cache_dir, token=hub.token)
    except (OSError, RuntimeError, DatasetsError) as error:  # no connection; a data set that is a script; no such one
        raise ValueError(
            f"the data set {name} could not be had from the Hub ({first_line(error)}); try again with a connection, "
            "or give files of your own with --train_file train.csv --validation_file validation.csv in the place of "
            "--task_name or --dataset_name"
        ) from error


def load_files(files: dict[str, str], cache_dir: str | None) -> Data:
    """Own csv or json files, by option."""
    splits = {name.removesuffix("_file"): file for name, file in files.items()}
    return assembled({split: read_rows(file, cache_dir) for split, file in splits.items()}, splits)


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


def encoder(data: Data, ids: dict[str, int], tokenizer: Any, max_length: int, pad: bool) -> Encode:
    """What makes token ids of texts and, where there are labels, the model's ids of them.

    Args:
        data: names the columns with the text, and says whether labels are numbers.
        ids: the model's ids of the labels, by `label_key`.
        tokenizer: the model's.
        max_length: tokens; longer texts are cut.
        pad: whether every text is padded to this length.
    """
    length = min(max_length, tokenizer.model_max_length)
    if length < max_length:
        logger.warning("max_seq_length=%d is more than the tokenizer allows; using %d", max_length, length)
    columns, regression, padding = data.text_columns, data.classes is None, "max_length" if pad else False

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = [batch[column] for column in columns]
        encoded = dict(tokenizer(*texts, padding=padding, max_length=length, truncation=True))
        if LABEL in batch:
            encoded["labels"] = [float(x) if regression else ids[label_key(x)] for x in batch[LABEL]]
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
