"""The columns with the texts and with the label: chosen by the user, or found by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_l2l.glue.messages import listed

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


def parsed_columns(words: Sequence[str] | str | None) -> list[str] | None:
    """The names in "a,b", or in several words.

    Raises:
        ValueError: unless they are one name, or two that differ.
    """
    if words is None:
        return None
    names = [name.strip() for word in ([words] if isinstance(words, str) else words) for name in word.split(",")]
    if not 1 <= len(names) <= 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"--text_columns must be the name of one column, or the different names of two (got {','.join(names)!r}); "
            "write --text_columns question,answer"
        )
    return names


def with_label(rows: Dataset, column: str | None, source: str, needed: bool) -> Dataset:
    """The rows with their labels in the column `LABEL`, where a `column` was chosen for them.

    Raises:
        ValueError: if it is `needed`, and not there.
    """
    if column is None or column == LABEL:
        return rows
    if column not in rows.column_names:
        if needed:
            raise ValueError(
                f"--label_column must be a column of each file with labels (got {column!r} for {source}, whose "
                f"columns are {listed(rows.column_names)}); name one of them"
            )
        return rows
    if LABEL in rows.column_names:  # another column, which was not chosen
        rows = rows.remove_columns(LABEL)
    return rows.rename_column(column, LABEL)


def text_columns_of(
    columns: list[str], asked: Sequence[str] | None, label: str | None, source: str
) -> tuple[str, ...]:
    """The columns with the text: those that were asked for, or else found by their names.

    Args:
        columns: those of the training rows, in which the label's is `LABEL`.
        asked: the names that were given, if any.
        label: what the label's column is called in the file; None for `LABEL`.
        source: the file, or the data set.
    """
    if asked is None:
        return find_text_columns(columns, source)
    own = [label or LABEL if name == LABEL else name for name in columns]
    missing = [name for name in asked if name not in own]
    if missing:
        raise ValueError(
            f"--text_columns must be columns of {source} (got {missing[0]!r}, and its columns are {listed(own)}); "
            "name one or two of them"
        )
    if (label or LABEL) in asked:
        raise ValueError(
            f"--text_columns must be other columns than that of the labels (got {label or LABEL!r}); name the one of "
            "the labels with --label_column"
        )
    return tuple(asked)


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
                    f"column {column!r} must hold text (got {text!r} in row {row} of {file}); name the columns with "
                    "the text with --text_columns, or call them 'sentence', or 'sentence1' and 'sentence2'"
                )
