"""The labels: whether they are classes or numbers, which classes there are, and what is wrong with them."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from hf_l2l.glue.messages import listed, logger
from hf_l2l.glue.own_data.columns import LABEL

if TYPE_CHECKING:
    from datasets import Dataset

MOST_WHOLE_CLASSES = 20
"""Decimal numbers that are all whole, such as 0.0 and 1.0, are taken as classes if there are at most so many."""

FEW_ROWS = 10
"""A class with fewer rows is warned of, if that is less than a twentieth of an even share."""


def check_labels(rows: Dataset, file: str) -> None:
    """Raise ValueError unless each row has a label that can be one."""
    if LABEL not in rows.column_names:
        raise ValueError(
            f"{file} must have a column {LABEL!r} (its columns are {listed(rows.column_names)}); name the one with "
            "the labels with --label_column"
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


def find_classes(train: Dataset, file: str, is_regression: bool | None) -> list[Any] | None:
    """The labels of the training rows, sorted; None for a regression.

    Unless `is_regression` says which, decimal numbers ask for a regression, but for a few whole ones. That is logged.
    """
    found = train[LABEL][:]
    if is_regression:
        check_numbers(found, file)
        return None
    if all(isinstance(label, float) for label in found):
        if is_regression is None and not _are_classes(found, file):
            return None
        found = [int(label) if label.is_integer() else label for label in found]
    counts = Counter(found)
    if len({isinstance(label, str) for label in counts}) > 1:
        raise ValueError(
            f"labels must be all numbers or all words (got {listed(sorted(counts, key=str))} in {file}); "
            "write them alike"
        )
    labels = sorted(counts)
    if not isinstance(labels[0], str) and labels[0] < 0:
        new = ", ".join(f"{label} as {number}" for number, label in enumerate(labels[:3]))
        raise ValueError(
            f"labels of classes must not be negative, which stands for a row without one (got {listed(labels)} in "
            f"{file}); drop the rows without one, or renumber the classes from 0 ({new}{', ...' * (len(labels) > 3)})"
            + ("" if is_regression is False else ", or add --is_regression true if they are numbers to come near to")
        )
    if len(labels) < 2:
        raise ValueError(
            f"there must be at least two classes (got only {labels[0]!r} in {file}); add rows of another one"
        )
    check_alike(found, counts, file)
    warn_of_few(counts, file)
    return labels


def check_numbers(labels: list[Any], file: str) -> None:
    """Raise ValueError unless a regression can be of these labels."""
    for row, label in enumerate(labels, start=1):
        if isinstance(label, bool) or not isinstance(label, (int, float)):
            raise ValueError(
                f"--is_regression true needs labels that are numbers (got {label!r} in row {row} of {file}); leave it "
                "out to have classes"
            )


def _are_classes(labels: list[float], file: str) -> bool:
    """Whether decimal numbers are taken as classes, which is said, but for classes that are refused."""
    different = sorted(set(labels))
    if len(different) > MOST_WHOLE_CLASSES or not all(label.is_integer() for label in different):
        logger.info(
            "the labels of %s are decimal numbers: it is a regression; --is_regression false takes them as classes",
            file,
        )
        return False
    if different[0] < 0:
        return True  # which is refused, as it is for -1 and 1
    logger.info(
        "the labels of %s are whole numbers, %s: taken as classes; --is_regression true makes it a regression",
        *(file, listed(different)),
    )
    return True


def check_alike(labels: list[Any], counts: Counter[Any], file: str) -> None:
    """Raise ValueError if two classes differ in case and white space only: one of them is a slip."""
    first: dict[str, str] = {}
    for label in sorted((label for label in counts if isinstance(label, str)), key=lambda label: -counts[label]):
        other = first.setdefault(_plain(label), label)
        if other != label:
            rows = counts[label]
            row = labels.index(label) + 1
            where = f"row {row}" if rows == 1 else f"{rows} rows, the first row {row},"
            raise ValueError(
                f"classes must differ in more than case and white space (got {label!r} in {where} of {file}, and "
                f"{other!r} in {counts[other]} rows); write them alike, or rename one of them"
            )


def _plain(label: str) -> str:
    """A label without case, and without white space that is easily overlooked."""
    return " ".join(label.split()).casefold()


def warn_of_few(counts: Counter[Any], file: str) -> None:
    """Warn of classes with very few rows, which may be slips."""
    total = sum(counts.values())
    for label, rows in sorted(counts.items(), key=lambda each: str(each[0])):
        if rows < FEW_ROWS and rows * len(counts) * 20 < total:
            logger.warning(
                "class %r has %d of the %d rows of %s: correct or drop them if it is none", label, rows, total, file
            )


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
            meant = [each for each in classes if _plain(label_key(each)) == _plain(label_key(label))]
            correct = f"correct it to {meant[0]!r}" if meant else "correct it"
            raise ValueError(
                f"labels must be among the classes, which are {listed(classes)} (got {label!r} in {source}); drop the "
                f"row or {correct}, or add training rows of that class"
            )
