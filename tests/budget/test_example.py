"""The batch that a plan is made for."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from hf_l2l.budget.example import NoExample, longest_batch


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def stacked(name: str) -> torch.Tensor:
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([[*row[name], *[0] * (longest - len(row[name]))] for row in rows])

    return {name: stacked(name) for name in rows[0]}


def loader_of(dataset: Any, collate: Any = padded, rows: int = 2) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=rows, collate_fn=collate)


def texts(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(length)), "labels": [1]} for length in lengths]


def test_the_longest_rows():
    assert longest_batch(loader_of(texts(3, 9, 4, 7)), "input_ids")["input_ids"].shape == (2, 9)
    ids = longest_batch(loader_of(texts(3, 9, 4, 7), rows=3), "input_ids")["input_ids"]
    assert sorted((ids != 0).sum(dim=1).tolist()) == [3, 6, 8]


def test_few_rows_are_taken_again():
    assert longest_batch(loader_of(texts(3, 9), rows=5), "input_ids")["input_ids"].shape == (5, 9)


def test_the_longest_labels_are_in_the_batch_too():
    data = [*texts(9, 9, 9), {"input_ids": [1], "labels": [1, 2, 3, 4]}]
    batch = longest_batch(loader_of(data), "input_ids")
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 9), (2, 4))


class Counted:
    """A data set that counts how many rows are read."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        return self.rows[number]


def test_of_a_large_data_set_a_sample_is_read():
    data = Counted(texts(*[5] * 1999, 6, *[5] * 2000))
    longest_batch(loader_of(data), "input_ids")
    assert data.read == 32 + 2  # one size
    data = Counted(texts(*range(1, 4001)))
    batch = longest_batch(loader_of(data), "input_ids")
    assert 1000 < data.read < 1100
    assert batch["input_ids"].shape[1] > 3990


def test_no_generator_moves():
    class Noisy(Counted):
        def __getitem__(self, number: int) -> Any:
            draws = random.random(), numpy.random.rand(), torch.rand(1)
            assert draws
            return super().__getitem__(number)

    def noisy(rows: Any) -> Any:
        torch.rand(3)
        return padded(rows)

    before = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    longest_batch(loader_of(Noisy(texts(1, 2, 3)), noisy), "input_ids")
    assert random.getstate() == before[0]
    assert (numpy.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


class Masking:
    """A collator that makes a generator in its first call, as that of masked language modelling does with a seed."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __call__(self, rows: Any) -> Any:
        if self.generator is None:
            self.generator = torch.Generator()
        torch.rand(1, generator=self.generator)
        return padded(rows)


class Inside:
    def __init__(self, data_collator: Any) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: Any) -> Any:
        return self.data_collator(rows)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_collator_is_as_before(wrapped):
    for own in (None, torch.Generator().manual_seed(3)):
        made = Masking(own)
        longest_batch(loader_of(texts(1, 2), Inside(made) if wrapped else made), "input_ids")
        assert made.generator is own
        assert own is None or torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_the_rows_of_a_batch_are_those_of_the_data_loader():
    loader = loader_of(texts(3, 9), rows=5)
    assert longest_batch(loader, "input_ids")["input_ids"].shape[0] == 5
    loader = torch.utils.data.DataLoader(texts(3, 9), batch_sampler=[[0], [0, 1]], collate_fn=padded)  # type: ignore[arg-type]
    with pytest.raises(NoExample, match="a list does not tell how many rows a batch has"):
        longest_batch(loader, "input_ids")


def test_a_loader_of_the_program_without_a_data_set():
    with pytest.raises(NoExample, match="streamed"):
        longest_batch(texts(3, 9), "input_ids")


class ByName:
    column_names = ("input_ids",)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: Any) -> Any:
        return {"a": texts(1)[0], "b": texts(1)[0]}[number]


def test_rows_that_are_asked_for_otherwise():
    with pytest.raises(NoExample, match=r"no batch of the longest rows can be made \(KeyError: 0\)"):
        longest_batch(loader_of(ByName()), "input_ids")


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(texts(1, 2))


@pytest.mark.parametrize(
    ("dataset", "collate", "said"),
    [
        (Streamed(), padded, "streamed"),
        ([], padded, "streamed"),
        (["a text"], padded, "no input_ids"),
        ([{"pixels": [1]}], padded, "no input_ids"),
        (texts(1), lambda rows: rows, "no dict of tensors with input_ids"),
        (texts(1), lambda rows: {"input_ids": ["a"]}, "no dict of tensors"),
    ],
)
def test_what_gives_no_batch(dataset, collate, said):
    loader = torch.utils.data.DataLoader(Streamed(), collate_fn=collate)
    vars(loader)["dataset"] = dataset
    with pytest.raises(NoExample, match=said):
        longest_batch(loader, "input_ids")


def test_tables_tell_their_lengths_without_values():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([*texts(3, 9, 4, 7), {"input_ids": [1], "labels": [1, 2, 3]}])
    batch = longest_batch(loader_of(data), "input_ids")
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 9), (2, 3))
    shuffled = data.select([3, 0, 2])
    assert longest_batch(loader_of(shuffled), "input_ids")["input_ids"].shape == (2, 7)
    numbers = datasets.Dataset.from_list([{"input_ids": [1] * n, "labels": n} for n in (1, 5)])
    collate = lambda rows: {"input_ids": padded([{"i": r["input_ids"]} for r in rows])["i"]}  # noqa: E731
    assert longest_batch(loader_of(numbers, collate, rows=1), "input_ids")["input_ids"].shape == (1, 5)


def test_tables_that_are_transformed_are_read_row_by_row():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}])
    data.set_transform(
        lambda rows: {"input_ids": [[*row, 0, 0] for row in rows["input_ids"]], "labels": rows["labels"]}
    )
    assert longest_batch(loader_of(data, rows=1), "input_ids")["input_ids"].shape == (1, 4)
