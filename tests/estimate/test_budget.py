"""The parts of a budget: the batch that a plan is made for, the plan in a checkpoint, what is told while it runs, and
what the user is told to type."""

from __future__ import annotations

import logging
import shlex
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_l2l import L2LConfig, own_command
from hf_l2l.budget.example import NoExample, longest_batch
from hf_l2l.budget.saved import PLAN_FILE, save_plan, saved_choice
from hf_l2l.budget.watch import PlanWatch
from hf_l2l.memory.memory_report import MemoryReport
from hf_l2l.option_names import options_of_the_trainer
from hf_l2l.own_command import python, with_options
from hf_l2l.plan.planner import Plan
from hf_l2l.plan.step_time import StepTime
from plain import Streamed
from tiers import nightly


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    return {n: torch.tensor([[*row[n], *[0] * (long - len(row[n]))] for row in rows]) for n, long in longest.items()}


def loader_of(dataset: Any, collate: Any = padded, rows: int = 2) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=rows, collate_fn=collate)


def texts(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(length)), "labels": [1]} for length in lengths]


def test_the_longest_rows_and_labels():
    assert longest_batch(loader_of(texts(3, 9, 4, 7)), "input_ids")["input_ids"].shape == (2, 9)
    ids = longest_batch(loader_of(texts(3, 9, 4, 7), rows=3), "input_ids")["input_ids"]
    assert sorted((ids != 0).sum(dim=1).tolist()) == [3, 6, 8]
    few = longest_batch(loader_of(texts(3, 9), rows=5), "input_ids")["input_ids"]
    assert few.shape == (5, 9), "few rows are taken again"
    batch = longest_batch(loader_of([*texts(9, 9, 9), {"input_ids": [1], "labels": [1, 2, 3, 4]}]), "input_ids")
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 9), (2, 4))


class Counted(list[Any]):
    """A data set that counts how many rows are read."""

    read = 0

    def __getitem__(self, number: Any) -> Any:
        self.read += 1
        return super().__getitem__(number)


@nightly
def test_of_a_large_data_set_a_sample_is_read():
    data = Counted(texts(*[5] * 1999, 6, *[5] * 2000))
    longest_batch(loader_of(data), "input_ids")
    assert data.read == 32 + 2  # one size
    data = Counted(texts(*range(1, 4001)))
    batch = longest_batch(loader_of(data), "input_ids")
    assert 1000 < data.read < 1100 and batch["input_ids"].shape[1] > 3990


class Masking:
    """A collator that makes a generator in its first call, as that of masked language modelling does with a seed; or
    one that has such a collator."""

    def __init__(self, generator: torch.Generator | None = None, data_collator: Masking | None = None) -> None:
        self.generator, self.data_collator = generator, data_collator

    def __call__(self, rows: Any) -> Any:
        if self.data_collator is not None:
            return self.data_collator(rows)
        self.generator = self.generator or torch.Generator()
        torch.rand(1, generator=self.generator)
        return padded(rows)


def test_a_collator_is_as_before():
    for own in (None, torch.Generator().manual_seed(3)):
        for is_inside in (False, True):
            made = Masking(own)
            longest_batch(loader_of(texts(1, 2), Masking(data_collator=made) if is_inside else made), "input_ids")
            assert made.generator is own
            assert own is None or torch.equal(own.get_state(), torch.Generator().manual_seed(3).get_state())


class ByName(list[Any]):
    """A data set whose rows are asked for otherwise."""

    def __getitem__(self, number: Any) -> Any:
        return {"a": 0}[number]


def test_what_gives_no_batch():
    listed: Any = torch.utils.data.DataLoader(texts(3, 9), batch_sampler=[[0], [0, 1]], collate_fn=padded)  # type: ignore[arg-type]
    for loader, said in (
        (loader_of(Streamed(texts(1, 2))), "streamed"),
        (loader_of(["a text"]), "no input_ids"),
        (loader_of(texts(1), lambda rows: rows), "no dict of tensors with input_ids"),
        (loader_of(texts(1), lambda rows: {"input_ids": ["a"]}), "no dict of tensors"),
        (loader_of(ByName(texts(1))), "KeyError: 0"),
        (listed, "a list does not tell"),
    ):
        with pytest.raises(NoExample, match=said):
            longest_batch(loader, "input_ids")


def test_tables_tell_their_lengths_without_values():
    """Those that are transformed are read row by row."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([*texts(3, 9, 4, 7), {"input_ids": [1], "labels": [1, 2, 3]}])
    batch = longest_batch(loader_of(data), "input_ids")
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 9), (2, 3))
    shuffled = data.select([3, 0, 2])
    assert longest_batch(loader_of(shuffled), "input_ids")["input_ids"].shape == (2, 7)
    numbers = datasets.Dataset.from_list([{"input_ids": [1] * n, "labels": n} for n in (1, 5)])
    ids_alone = loader_of(numbers, lambda rows: padded([{"input_ids": row["input_ids"]} for row in rows]), rows=1)
    assert longest_batch(ids_alone, "input_ids")["input_ids"].shape == (1, 5)
    data = datasets.Dataset.from_list(texts(1, 2))
    data.set_transform(lambda rows: {**rows, "input_ids": [[*row, 0, 0] for row in rows["input_ids"]]})
    assert longest_batch(loader_of(data, rows=1), "input_ids")["input_ids"].shape == (1, 4)


# ---- the plan in a checkpoint

ASKED = L2LConfig(device_memory_budget="auto", cmp="bf16", layer_classes=("Block",), trace=None)
CHOSEN = {"ubatch_size": 2, "stash": "host", "resident": "shell", "resident_layers": 3, "chunked_loss": 512}


def test_a_resumed_run_finds_what_was_chosen(tmp_path, caplog):
    """Also with other options that change nothing of a plan; with others, it is planned again."""
    assert saved_choice(None, ASKED) is None and saved_choice(tmp_path, ASKED) is None
    plan = Plan(ASKED, CHOSEN, 1000, "head", {}, StepTime(1.0, 0.5, 0.5, {"compute": 1.0}), batches=4)
    save_plan(tmp_path, plan, ASKED)
    options: dict[str, Any] = {"device_memory_budget": "auto", "cmp": "bf16", "layer_classes": ["Block"]}
    for asked in (ASKED, L2LConfig(**options, trace=str(tmp_path / "t.json"))):
        assert saved_choice(tmp_path, asked) == {**CHOSEN, "batches": 4}
    for change in ({"device_memory_budget": "8GiB"}, {"cmp": None}, {"stash": "host"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_l2l"):
            assert saved_choice(tmp_path, L2LConfig(**{**options, **change})) is None
        assert f"for other options ({next(iter(change))})" in caplog.text


def test_a_plan_that_is_damaged_or_of_another_version_is_refused(tmp_path):
    for text, said in (
        ("{", "whole"),
        ('{"asked": 1}', "whole"),
        ('{"asked": {}, "chosen": {"ubatch_size": -1}, "batches": 1}', "whole"),
        ('{"asked": {}, "chosen": {"later": 1}, "batches": 1}', "of this version of hf_l2l .*later"),
    ):
        (tmp_path / PLAN_FILE).write_text(text)
        with pytest.raises(ValueError, match=said):
            saved_choice(tmp_path, L2LConfig())


# ---- what is told of a plan while it runs

MIB = 2**20


def watch(planned: dict[str, int], told: list[str], **now: int) -> PlanWatch:
    """Of a plan with these MiB by name within 100, where there are others now. A step takes half a second; after the
    tenth, an evaluation takes 100."""
    held = {name: size * MIB for name, size in planned.items()}
    plan = Plan(L2LConfig(), {"stash": "host"}, 100 * MIB, "head", held, StepTime(2.0, 1.0, 1.0, {"upload": 2.0}))
    device = {name: {"now": size * MIB, "peak": 0} for name, size in now.items()}
    times = (step / 2 + 100 * (step >= 10) for step in count())
    report = MemoryReport("", {"device": device}, {}, {"now": 0, "peak": 0})
    return PlanWatch(plan, lambda: report, told.append, lambda: next(times))


def test_after_20_steps_the_measured_stands_beside_the_planned():
    told: list[str] = []
    watched = watch({"slots": 50, "stash": 30}, told, slots=50)
    for step in range(1, 60):
        watched.step_ended()
        assert len(told) == (step >= 20)
    assert "in 20 steps: 0.5 s per step" in told[0] and "planned: 2 s, 80.0 MiB" in told[0]


def test_an_error_names_once_what_was_larger():
    planned = {"slots": 50, "stash": 30}
    for now, said in (
        ({"slots": 50, "stash": 45}, "stash took 45.0 MiB (30.0 MiB planned)"),
        ({"slots": 50, "stash": 30, "mask": 9}, "mask took 9.0 MiB (0 bytes planned)"),
        (planned, "other programs"),
    ):
        watched, error = watch(planned, [], **now), torch.OutOfMemoryError("none left")
        for _ in range(2):
            watched.explain(error)
        [note] = error.__notes__
        assert said in note and "80.0 MiB within 100.0 MiB" in note


# ---- what the end of an error tells the user to type

SCRIPT = "python train.py --output_dir out"


def test_the_command_line_with_other_flags(monkeypatch):
    monkeypatch.setattr(own_command, "python", lambda: "python")
    larger: dict[str, Any] = {"device_memory_budget": "6GiB"}
    for typed, changes, expected in (
        (" --device_memory_budget 4GiB --seed 1", larger, " --seed 1 --device_memory_budget=6GiB"),
        (" --device_memory_budget=4GiB", larger, " --device_memory_budget=6GiB"),
        (" --stash device --l2l-kept-graphs 3 --bf16", {"stash": None, "kept_graphs": None}, " --bf16"),
        (" --l2l_layer_classes A B --seed 1", {"layer_classes": None}, " --seed 1"),
        (" --run_name 'a b'", {"ubatch_size": 2}, " --run_name 'a b' --ubatch_size=2"),
    ):
        monkeypatch.setattr(sys, "argv", shlex.split(SCRIPT + typed)[1:])
        with options_of_the_trainer():
            assert with_options(changes) == SCRIPT + expected


def test_the_interpreter_is_the_one_that_runs(tmp_path, monkeypatch):
    """`python` is another one, unless the shell finds it: that of a virtual environment that is not active."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for runs, typed in {"bin/python": "python", ".venv/bin/python": ".venv/bin/python", "/other/python": None}.items():
        monkeypatch.setattr(sys, "executable", str(Path(tmp_path, runs)))
        assert python() == (typed or runs)
