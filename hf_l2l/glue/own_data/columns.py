"""The columns with the texts and with the label: chosen by the user, or found by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_l2l.glue.messages import listed

if TYPE_CHECKING:
    from datasets import Dataset

LABEL = "label"

ASIDE = "label (not that of the labels)"
"""What a column that is called `LABEL` becomes while another one has the labels: it may be a text."""

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
    """The rows with their labels in the column `LABEL`, where a `column` was chosen for them; another one that is
    called so becomes `ASIDE`.

    Raises:
        ValueError: if it is `needed`, and not there.
    """
    if column is None or column == LABEL:
        return rows
    if needed and column not in rows.column_names:
        raise ValueError(
            f"--label_column must be a column of each file with labels (got {column!r} for {source}, whose "
            f"columns are {listed(rows.column_names)}); name one of them"
        )
    names = {LABEL: ASIDE, column: LABEL}
    return rows.rename_columns({name: new for name, new in names.items() if name in rows.column_names})


def own_name(column: str, label: str | None = None) -> str:
    """What a column is called in the file, in which that of the labels is called `label`; None for `LABEL`."""
    return LABEL if column == ASIDE else label or LABEL if column == LABEL else column


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
    own = [own_name(name, label) for name in columns]
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
    return tuple(ASIDE if name == LABEL else name for name in asked)


def find_text_columns(columns: list[str], file: str) -> tuple[str, ...]:
    """The columns with the text: those with a usual name, else the first one or two beside the label."""
    for names in (*TEXT_PAIRS, *((name,) for name in TEXTS)):
        if all(name in columns for name in names):
            return names
    others = tuple(name for name in columns if name not in (LABEL, ASIDE))
    if not others:
        raise ValueError(f"{file} must have a column of text (got only {LABEL!r}); add one called 'sentence'")
    return others[:2]


def check_texts(rows: Dataset, text_columns: tuple[str, ...], file: str, label: str | None = None) -> None:
    """Raise ValueError unless each text column is there and has text in every row; `label` is as in `own_name`."""
    for column in text_columns:
        name = own_name(column)
        if column not in rows.column_names:
            raise ValueError(
                f"{file} must have the text column {name!r} of the training file (its columns are "
                f"{listed([own_name(each, label) for each in rows.column_names])}); rename the one it stands in"
            )
        for row, text in enumerate(rows[column][:], start=1):
            if text is None:
                raise ValueError(
                    f"column {name!r} must have text in every row (got none in row {row} of {file}; in csv, words "
                    "like NA and null count as none); fill it in, or drop the row"
                )
            if not isinstance(text, str):
                others = [each for each in rows.column_names if each != LABEL and isinstance(rows[0][each], str)]
                remedy = "name the columns with the text with --text_columns"
                if others:
                    remedy = f"give --text_columns {','.join(own_name(each, label) for each in others[:2])}"
                raise ValueError(
                    f"column {name!r} must hold text (got {text!r} in row {row} of {file}); {remedy}, or call them "
                    "'sentence', or 'sentence1' and 'sentence2'"
                )
