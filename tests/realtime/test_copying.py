"""`hf-l2l checkpoint`: the newest whole checkpoint, copied whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_models import ran
from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.realtime import copying
from hf_l2l.realtime.copying import copy_newest
from training import SAVING, assert_same_run, l2l_trainer, plain_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    l2l_trainer(folder, **{**SAVING, "save_total_limit": None}).train()
    return folder


def test_the_newest_is_copied_and_plain_trainer_resumes_from_it(run, tmp_path, capsys):
    whole = l2l_trainer(tmp_path / "whole", **{**SAVING, "save_strategy": "no"})
    whole.train()
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    (damaged / "checkpoint-4" / "optimizer.pt").write_bytes(b"other")
    found = ran(capsys, "checkpoint", str(damaged), str(tmp_path / "kept"))
    assert found.status == 0
    assert "step 2, all bytes as they were saved" in found.out
    resumed = plain_trainer(tmp_path / "plain", **{**SAVING, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(tmp_path / "kept"))
    assert_same_run(resumed, whole)


def test_a_checkpoint_may_be_named(run, tmp_path):
    source, manifest = copy_newest(run / "checkpoint-2", tmp_path / "new" / "kept")
    assert source == run / "checkpoint-2" and manifest is not None and manifest.step == 2
    assert check_whole(tmp_path / "new" / "kept") is not None


def test_one_that_is_replaced_meanwhile_is_not_copied(run, tmp_path, monkeypatch):
    """The next one is, and nothing is left of the other."""
    live = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(live / "checkpoint-4")
    opened = copying._opened

    def replaced(source: Path, stack: Any) -> Any:
        if source.name == "checkpoint-2":
            shutil.copytree(run / "checkpoint-4", live / "checkpoint-4")
            shutil.rmtree(live / "checkpoint-2")
        return opened(source, stack)

    monkeypatch.setattr(copying, "_opened", replaced)
    source, manifest = copy_newest(live, tmp_path / "kept")
    assert source.name == "checkpoint-4" and manifest is not None and manifest.step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run"]


def test_one_that_is_deleted_while_it_is_copied_is_copied(run, tmp_path, monkeypatch):
    """A training with l2l_realtime_every="auto" deletes a generation about as soon as it can be read."""
    live = Path(shutil.copytree(run, tmp_path / "run"))
    copy = copying.shutil.copyfileobj

    def deleted(*given: Any) -> None:
        shutil.rmtree(live / "checkpoint-4", ignore_errors=True)
        copy(*given)

    monkeypatch.setattr(copying.shutil, "copyfileobj", deleted)
    source, manifest = copy_newest(live, tmp_path / "kept")
    assert source.name == "checkpoint-4" and manifest is not None and check_whole(tmp_path / "kept") is not None


def test_a_target_within_the_checkpoint_is_refused(run, tmp_path):
    live = Path(shutil.copytree(run, tmp_path / "run"))
    with pytest.raises(ValueError, match="TARGET must not be in the checkpoint itself"):
        copy_newest(live / "checkpoint-2", live / "checkpoint-2" / "part" / "kept")


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*_: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying.shutil, "copyfileobj", full)
    found = ran(capsys, "checkpoint", str(run), str(tmp_path / "kept"))
    assert found.status == 2 and "No space left on device" in found.err
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_sentence(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for given, text in (
        ((str(tmp_path / "none"), "kept"), "FOLDER must be a folder with checkpoints"),
        ((str(tmp_path / "empty"), str(tmp_path / "kept")), "FOLDER must have a whole checkpoint"),
        ((str(run), str(tmp_path)), "TARGET must not exist yet"),
    ):
        found = ran(capsys, "checkpoint", *given)
        assert found.status == 2 and text in found.err and found.err.count("\n") == 1


def test_links_are_not_followed(run, tmp_path):
    live = Path(shutil.copytree(run, tmp_path / "run"))
    for each in live.glob("checkpoint-*"):
        (each / "model.safetensors").unlink()
        (each / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="must have a whole checkpoint"):
        copy_newest(live, tmp_path / "kept")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        copy_newest(live / "checkpoint-2", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
