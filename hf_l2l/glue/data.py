"""The rows: a GLUE task, another data set of the Hub, or own files; checked, and tokenized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainingArguments

from hf_l2l.glue.messages import first_line, listed, logger
from hf_l2l.glue.own_data.columns import LABEL, check_texts, own_name, text_columns_of, with_label
from hf_l2l.glue.own_data.labels import check_known_labels, check_labels, find_classes, label_key
from hf_l2l.glue.scores import glue

if TYPE_CHECKING:
    from datasets import Dataset


class DataOptions(Protocol):
    """The options that say where the rows are, and what is in them: exactly one of the three sources is named."""

    task_name: str | None
    dataset_name: str | None
    dataset_config_name: str | None
    text_columns: list[str] | None
    label_column: str | None
    is_regression: bool | None

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
        data = load_hub_dataset(where.dataset_name, where, hub, training_args)
    else:
        splits = {name.removesuffix("_file"): file for name, file in where.files.items()}
        data = assembled({split: read_rows(file, hub.cache_dir) for split, file in splits.items()}, splits, where)
    kind = "regression" if data.names is None else f"{len(data.names)} classes: {listed(data.names)}"
    logger.info("text from %s; %s", " and ".join(map(own_name, data.text_columns)), kind)
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


def load_hub_dataset(name: str, where: DataOptions, hub: HubOptions, training_args: TrainingArguments) -> Data:
    """Another data set of the Hub."""
    found = load_from_hub(name, where.dataset_config_name, hub)
    needed = {"train": True, "validation": training_args.do_eval, "test": training_args.do_predict}
    missing = [split for split, wanted in needed.items() if wanted and split not in found]
    if missing:
        raise ValueError(
            f"{name} must have the split {missing[0]} (it has {listed(list(found))}); download it and give its parts "
            "as --train_file, --validation_file and --test_file"
        )
    wanted = {split: found[split] for split, is_wanted in needed.items() if is_wanted}
    return assembled(wanted, dict.fromkeys(needed, name), where)


def load_from_hub(name: str, config: str | None, hub: HubOptions) -> Any:
    """All splits of a data set of the Hub, from the cache where it was downloaded before."""
    glue()  # says what is missing
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


def assembled(rows: dict[str, Dataset], sources: dict[str, str], where: DataOptions) -> Data:
    """Rows that are no task of GLUE: what their texts and classes are is found out, and checked.

    Args:
        rows: by split: "train", and of "validation" and "test" those that are needed.
        sources: by split, the file or the data set, for messages.
        where: the options, which may name columns, and say whether it is a regression.
    """
    rows = {
        split: with_label(part, where.label_column, sources[split], split != "test") for split, part in rows.items()
    }
    train = rows["train"]
    text_columns = text_columns_of(train.column_names, where.text_columns, where.label_column, sources["train"])
    for split, part in rows.items():
        if split != "test":
            check_labels(part, sources[split])
        check_texts(part, text_columns, sources[split], where.label_column)
    # A data set of the Hub may name its classes.
    names: list[str] | None = None if where.is_regression else getattr(train.features[LABEL], "names", None)
    if names is None:
        classes = find_classes(train, sources["train"], where.is_regression)
    else:
        classes = list(range(len(names)))
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


Encode = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


def encoder(data: Data, ids: dict[str, int], tokenizer: Any, max_length: int, pad: bool) -> Encode:
    """What makes token ids of texts and, where there are labels, the model's ids of them.

    Args:
        data: names the columns with the text, and says whether labels are numbers.
        ids: the model's ids of the labels, by `label_key`.
        tokenizer: the model's.
        max_length: tokens; longer texts are cut.
        pad: whether every text is padded to this length.

    Raises:
        ValueError: if so many tokens have no room for one of each text, beside those that the tokenizer adds.
    """
    added, texts = tokenizer.num_special_tokens_to_add(len(data.text_columns) == 2), len(data.text_columns)
    if max_length < added + texts:
        raise ValueError(
            f"--max_seq_length must be at least {added + texts}: {added} tokens that the tokenizer adds, and one of "
            f"{'the text' if texts == 1 else 'each text'} (got {max_length}); give more, or leave it out for 128"
        )
    length = min(max_length, tokenizer.model_max_length)
    if length < max_length:
        logger.warning("--max_seq_length %d is more than the tokenizer allows; using %d", max_length, length)
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
