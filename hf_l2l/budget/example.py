"""The batch that a plan is made for: that of the longest rows of a data set, as the data collator makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch

from hf_l2l.runtime import compute_state, stream

_FIRST, _LOOKED_AT = 32, 1024
"""Rows that are looked at; if the first ones have one size, as images have, no more."""
_OF_A_TABLE = 100_000
"""Rows that are looked at of a data set of Arrow tables, which tell lengths without values."""

Lengths = dict[int, tuple[int, ...]]
"""Number of a row -> the length of each of its entries that are asked for."""


class NoExample(ValueError):
    """No batch can be made without taking it from the training."""


_FAILS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What data sets and collators raise that can only be used in another order, or with other rows."""


def longest_batch(dataloader: Any, main_input: str) -> dict[str, torch.Tensor]:
    """A batch of the longest rows of the data set of `dataloader`, as its collator makes it. No generator of random
    numbers has moved after it.

    Of a large data set, evenly spread rows are looked at.

    Args:
        dataloader: one of torch, with a data set that has a length and an entry for each row.
        main_input: the name of the entry whose size is the length of a row, such as "input_ids". Rows with the longest
            "labels" are in the batch, too.

    Raises:
        NoExample: if the data set is streamed, its rows or batches are of another form, or not all batches have the
            same number of rows.
    """
    # That of the training arguments may be another one, where a program makes its own data loader.
    rows = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
    dataset: Any = getattr(dataloader, "dataset", None)
    if isinstance(dataset, torch.utils.data.IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        raise NoExample("the rows of a streamed data set are not known before they come")
    if not isinstance(rows, int):
        raise NoExample(f"a {type(dataloader.batch_sampler).__name__} does not tell how many rows a batch has")
    rows_of: Any = dataset
    collate = dataloader.collate_fn
    try:
        with compute_state.all_rng_states_kept(stream.HOST), _attributes_kept(collate):
            lengths = _lengths(dataset, (main_input, "labels"))
            batch = collate([rows_of[number] for number in _longest(lengths, rows)])
    except NoExample:
        raise
    except _FAILS as error:
        raise NoExample(f"no batch of the longest rows can be made ({type(error).__name__}: {error})") from error
    found = dict(batch) if isinstance(batch, Mapping) else {}
    if main_input not in found or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise NoExample(f"the data collator makes no dict of tensors with {main_input} (got a {type(batch).__name__})")
    return found


@contextmanager
def _attributes_kept(collate: Any) -> Iterator[None]:
    """After the block, a collator, and one inside it, have the attributes that they had: some make a generator of
    random numbers in their first call, which each worker process of the data loader must make for itself."""
    inside = (collate, getattr(collate, "data_collator", None))
    before = [(vars(each), dict(vars(each))) for each in inside if hasattr(each, "__dict__")]
    generators = [value for _, values in before for value in values.values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for now, values in before:
            now.clear()
            now.update(values)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _longest(lengths: Lengths, rows: int) -> list[int]:
    """Numbers of rows: the longest by each entry, and then the longest by the first one; of few rows, again."""
    order = sorted(lengths, key=lambda number: lengths[number], reverse=True)
    longest = [max(order, key=lambda number: lengths[number][entry]) for entry in range(len(lengths[order[0]]))]
    order = list(dict.fromkeys([*longest, *order]))
    return [order[number % len(order)] for number in range(rows)]


def _lengths(dataset: Any, entries: tuple[str, ...]) -> Lengths:
    kind = getattr(dataset, "format", None)  # that of a data set of the library datasets
    if isinstance(kind, Mapping) and entries[0] in dataset.column_names and kind["type"] != "custom":
        return _lengths_of_table(dataset, [name for name in entries if name in dataset.column_names])
    found = {number: _sizes(dataset[number], entries) for number in _spread(len(dataset), _FIRST)}
    if len(set(found.values())) > 1:
        more = (number for number in _spread(len(dataset), _LOOKED_AT) if number not in found)
        found |= {number: _sizes(dataset[number], entries) for number in more}
    return found


def _lengths_of_table(dataset: Any, columns: list[str]) -> Lengths:
    """Those of a data set of the library datasets."""
    numbers = _spread(len(dataset), _OF_A_TABLE)
    rows = dataset.select_columns(columns).with_format("arrow").select(numbers)
    found: list[list[int]] = [[] for _ in columns]
    for table in rows.iter(batch_size=10_000):
        for lengths, name in zip(found, columns, strict=True):
            lengths += _of_column(table.column(name))
    return dict(zip(numbers, zip(*found, strict=True), strict=True))


def _of_column(column: Any) -> Iterator[int]:
    for part in column.chunks:
        if hasattr(part, "offsets"):
            offsets = part.offsets.to_numpy()
            yield from (offsets[1:] - offsets[:-1]).tolist()
        else:  # numbers
            yield from [0] * len(part)


def _spread(count: int, most: int) -> list[int]:
    """At most so many numbers below `count`, evenly spread."""
    most = min(most, count)
    return [i * count // most for i in range(most)]


def _sizes(row: Any, entries: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(row, Mapping) or entries[0] not in row:
        raise NoExample(f"the rows of the data set have no {entries[0]} (got a {type(row).__name__})")
    return tuple(_size(row.get(name)) for name in entries)


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else len(value) if isinstance(value, Sized) else 0
