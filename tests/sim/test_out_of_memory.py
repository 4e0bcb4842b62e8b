"""A device that has too little memory: what was taken is given back, and a smaller batch trains as if nothing was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.testing import enable_simulated_accelerator
from memory_switches import poisoned_releases
from models import Toy, batch_for
from runs import assert_same_run, assert_same_tensors, attach, run_of, run_of_trainer, seed_all
from tiers import ALL, more
from training import l2l_trainer, settled_memory, tiny_bert


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What is read after it was given back is NaN, in every test here; afterwards there is no limit."""
    with poisoned_releases():
        yield
    enable_simulated_accelerator()


@pytest.mark.parametrize(("stash", "mode"), [("host", "deferred"), *more(("host", "serial"), ("device", "eager"))])
def test_a_step_that_has_no_memory_can_be_made_again(stash, mode):
    """Wherever in the step it is missing: memory is given back at once, and the step is that of a training without any
    error."""
    model, eps, optimizer, _ = attach(Toy(width=32), stash=stash, eps_update=mode)
    batch = batch_for(model, masked=False, rows=24)

    def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
        seed_all()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    eps.synchronize()
    before = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    step()
    eps.synchronize()
    peak, saved = torch.accelerator.max_memory_allocated(), copy.deepcopy(run_of(model, optimizer, []))
    places: set[str] = set()
    for part in range(0, 12, 1 if ALL else 3):
        enable_simulated_accelerator(before + part * (peak - before) // 12 + 1)
        with pytest.raises(torch.OutOfMemoryError) as told:
            step()
        places |= {frame.name for frame in told.traceback}
        del told
        optimizer.zero_grad()
        assert settled_memory() == before, part
    assert {"forward_sweep", "backward"} <= places, places
    enable_simulated_accelerator()
    eps.synchronize()
    assert_same_tensors(run_of(model, optimizer, []).weights, saved.weights)
    step()
    eps.synchronize()
    other, other_eps, expected, _ = attach(Toy(width=32), stash=stash, eps_update=mode)
    for _ in range(4):
        step(other, expected)
    other_eps.synchronize()
    assert_same_run(run_of(model, optimizer, []), run_of(other, expected, []))


def of_batch(folder: Any, rows: int, **options: Any) -> Any:
    given = {"max_steps": 2, "per_device_train_batch_size": rows, "stash": "host", **options}
    return l2l_trainer(folder, model=tiny_bert(layers=2, dropout=0.0), **given)


def test_a_smaller_batch_trains_as_if_it_had_been_given(tmp_path):
    """One that is found, and one that the user gives, whom the error has told the layer."""
    given = of_batch(tmp_path, 2)
    before = settled_memory()
    torch.accelerator.reset_peak_memory_stats()
    given.train()
    capacity, expected = int(1.02 * (torch.accelerator.max_memory_allocated() - before)), run_of_trainer(given)
    del given
    enable_simulated_accelerator(settled_memory() + capacity)
    made = of_batch(tmp_path, 8)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as told:
        made.train()
    assert "layer" in " ".join(told.value.__notes__)
    del told, made
    for rows, options in ((8, {"auto_find_batch_size": True}), (2, {})):
        settled_memory()
        found = of_batch(tmp_path, rows, **options)
        found.train()
        assert found._train_batch_size == 2
        assert_same_run(found, expected)
        del found
    enable_simulated_accelerator("1KiB")
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        of_batch(tmp_path, 8, auto_find_batch_size=True).train()
