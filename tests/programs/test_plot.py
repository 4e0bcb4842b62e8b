"""`hf-l2l plot` finds the newest state of a run, and draws it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli_models import ran, refused
from training import SAVING, l2l_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps, with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("run")
    l2l_trainer(folder, **SAVING, logging_steps=1).train()
    return folder


def state_of(folder: Path, step: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    log = [{"loss": 1.0, "step": step}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    return str(folder / "trainer_state.json")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()


def test_a_picture_is_drawn_here_unless_a_file_is_named(run, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    found = ran(capsys, "plot", str(run))
    assert found.status == 0 and (tmp_path / "hf_l2l_run.png").read_bytes().startswith(b"\x89PNG")
    assert found.out.startswith(f"{run}/checkpoint-4/trainer_state.json: 4 steps of BertForSequenceClassification, ")
    assert "device batch of 8 rows" in found.out and found.out.endswith("-> hf_l2l_run.png\n")
    assert "must be a file that can be written" in refused(capsys, "plot", str(run), "--out", "nowhere/run.png")
    without = state_of(tmp_path / "without times", 1)
    assert "  time: not in l2l_run.jsonl of" in ran(capsys, "plot", without, "--out", "other.svg").out
    assert "<svg" in (tmp_path / "other.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib, or give --json" in refused(capsys, "plot", str(run))


def test_the_figures_alone(run, tmp_path, capsys, monkeypatch):
    """The state of a checkpoint has no times: they are in the file in the folder above, which has no others."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = ran(capsys, "plot", str(run), "--json").json
    assert (found["steps"], found["picture"], found["missing"]) == (4, None, {})
    assert [each["step"] for each in found["times"]] == [1, 2, 3, 4] and found["memory"]["host"]["masters"]["peak"] > 0
    assert list(tmp_path.iterdir()) == []
    found = ran(capsys, "plot", str(run / "checkpoint-2"), "--json").json
    assert [each["step"] for each in found["times"]] == [1, 2]
    apart = tmp_path / "checkpoint-2"
    apart.mkdir()
    (apart / "trainer_state.json").write_bytes((run / "checkpoint-2" / "trainer_state.json").read_bytes())
    assert ran(capsys, "plot", str(apart), "--json").json["times"] == []
    (tmp_path / "l2l_run.jsonl").write_bytes((run / "l2l_run.jsonl").read_bytes())
    assert ran(capsys, "plot", str(apart), "--json").json["times"] == found["times"]


def test_the_state_after_the_training_comes_before_that_of_a_checkpoint(tmp_path, capsys):
    """What is no run is refused."""
    state_of(tmp_path / "run" / "checkpoint-2", 2)
    newest = state_of(tmp_path / "run" / "checkpoint-9", 9)
    for own, is_taken in ((9, True), (8, False)):
        state = state_of(tmp_path / "run", own)
        assert ran(capsys, "plot", str(tmp_path / "run"), "--json").json["file"] == (state if is_taken else newest)
    (tmp_path / "empty").mkdir()
    Path(state_of(tmp_path / "broken", 3)).write_text("{")
    state_of(tmp_path / "broken" / "checkpoint-1", 1)
    for name in ("nowhere", "empty", "broken"):
        said = refused(capsys, "plot", name, "--json")
        assert "RUN must be the output_dir of a training" in said and f"(got '{name}" in said
