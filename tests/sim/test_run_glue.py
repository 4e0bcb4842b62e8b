"""run_glue_l2l.py on the simulated accelerator, in the process of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import run_glue_l2l
from glue_script import ROWS, command, needs_datasets, write
from hf_l2l.testing import enable_simulated_accelerator
from training import settled_memory


@pytest.fixture(autouse=True)
def _without_a_limit_afterwards() -> Iterator[None]:
    settled_memory()
    yield
    enable_simulated_accelerator()


@needs_datasets
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(
    ("budget", "begin", "end"),
    [
        (
            "auto",
            "the device must hold what a step needs, whatever is chosen (got a budget of 1.8 KiB",
            r": --device_memory_budget \d+KiB",
        ),
        ("off", "the simulated accelerator is out of memory.", r"; try a smaller --ubatch_size, or --stash host"),
    ],
)
def test_too_small_a_device_is_said_in_one_line(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str, begin: str, end: str
) -> None:
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(
            command(tiny_model, tmp_path, **files, simulate="2KiB", use_cpu=None, device_memory_budget=budget)
        )
    assert stopped.value.code == 3
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith(f"run_glue_l2l.py: out of memory: {begin}")
    assert re.search(f"{end}$", last)
    assert "Traceback" not in said
