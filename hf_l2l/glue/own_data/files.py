"""Own files: whether those that are needed are there, and can be read."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from pathlib import Path

from transformers import TrainingArguments


def check_files(files: Mapping[str, str], training_args: TrainingArguments, wanted: Collection[str]) -> None:
    """Raise ValueError unless the files that are needed are named, are there, and are of one kind.

    Args:
        files: by option: train_file, validation_file, test_file.
        training_args: what they are for.
        wanted: columns that they should have.
    """
    if "train_file" not in files:
        raise ValueError(
            "own files need --train_file, whose labels say which classes there are (got none); add --train_file FILE"
        )
    if training_args.do_eval and "validation_file" not in files:
        raise ValueError("--do_eval needs --validation_file (got none); add --validation_file FILE")
    if training_args.do_predict and "test_file" not in files:
        raise ValueError("--do_predict needs --test_file (got none); add --test_file FILE")
    if "test_file" in files and not training_args.do_predict:
        raise ValueError(
            f"--test_file is for --do_predict (got --test_file {files['test_file']} without it); add --do_predict"
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
        check_separator(file, wanted)
    if len({Path(file).suffix.lower() for file in files.values()}) > 1:
        raise ValueError(
            f"{', '.join(f'--{name}' for name in files)} must have the same extension (got "
            f"{', '.join(files.values())}); convert those that differ"
        )


def check_separator(file: str, wanted: Collection[str]) -> None:
    """Raise ValueError for a csv file whose first line says that something else than commas is between its columns.

    That is so if one of the `wanted` columns is there only with another separator, or, where none is there with
    either, if there are more of it than commas.
    """
    if Path(file).suffix.lower() != ".csv":
        return
    with open(file, encoding="utf-8-sig", errors="replace") as opened:
        first = opened.readline(10_000).rstrip("\r\n")
    by_commas = _cells(first, ",")
    if any(name in wanted for name in by_commas):
        return
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        cells = _cells(first, separator)
        if len(cells) > 1 and (len(cells) > len(by_commas) or any(name in wanted for name in cells)):
            raise ValueError(
                f"columns of a csv file must be separated by commas (got {name} in {file}, whose first line is "
                f"{first[:60]!r}); save it with commas, as with pandas: read_csv({file!r}, sep={separator!r})"
                f".to_csv('{Path(file).stem}_commas.csv', index=False)"
            )


def _cells(line: str, separator: str) -> list[str]:
    """The names of columns in the first line of a csv file; what stands in quotes is one of them."""
    return [cell.strip() for row in csv.reader([line], delimiter=separator) for cell in row]
