"""Blocks of Python in the documents that ask for the simulated accelerator run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from documents import PYTHON, README, is_simulated, run
from glue_script import needs_datasets, needs_demo_model
from hf_l2l.testing import enable_simulated_accelerator
from tiers import ALL

BLOCKS = [block for block in PYTHON if is_simulated(block) and (ALL or block.file == README)]


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    yield
    enable_simulated_accelerator()


@needs_datasets
@needs_demo_model
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_python_runs_on_the_simulated_accelerator(block, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = run(block, {})
    assert ("evaluate()" in block.code) == ("'eval_loss'" in capsys.readouterr().out)
    if block.file == README:  # there are three panels, and none is empty
        assert [len(panel.patches + panel.lines) > 0 for panel in names["trainer"].plot().axes] == [True] * 3
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
