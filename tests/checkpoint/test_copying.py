"""`hf-l2l checkpoint`: the newest whole checkpoint, copied whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_models import ran
from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.realtime import copying
from hf_l2l.realtime.copying import copy_newest
from saving import Synced, no_space, trained
from training import assert_same_run, plain_trainer


@pytest.fixture
def live(whole: Any, tmp_path: Path) -> Path:
    """The checkpoints of steps 2 and 4, to be changed."""
    for step in (2, 4):
        name = f"checkpoint-{step}"
        shutil.copytree(Path(whole.args.output_dir) / name, tmp_path / "run" / name)
    return tmp_path / "run"


def test_the_newest_is_copied_and_plain_trainer_resumes_from_it(whole, live, tmp_path, capsys, monkeypatch):
    """All files that it names are on the disk before it has its name."""
    (live / "checkpoint-4" / "optimizer.pt").write_bytes(b"other")
    with monkeypatch.context() as patch:
        synced = Synced(patch)
        found = ran(capsys, "checkpoint", str(live), str(tmp_path / "kept"))
    (missing,) = synced.missing
    assert missing <= {MANIFEST} and synced.names == [tmp_path.name]
    assert found.status == 0 and "step 2" in found.out
    assert_same_run(trained(tmp_path / "plain", plain_trainer, resumes=tmp_path / "kept"), whole)
    source, manifest = copy_newest(live / "checkpoint-2", tmp_path / "new" / "kept")  # named
    assert source == live / "checkpoint-2" and manifest == check_whole(tmp_path / "new" / "kept")


def test_what_is_replaced_or_deleted_meanwhile(whole, live, tmp_path, monkeypatch):
    """A training with l2l_realtime_every="auto" deletes a generation about as soon as it can be read: of one that is
    gone before it was opened, the next one is copied."""
    shutil.rmtree(live / "checkpoint-4")
    named, copy = copying.files_in, copying.shutil.copyfileobj

    def replaced(source: Path) -> Any:
        if source.name == "checkpoint-2":
            shutil.copytree(Path(whole.args.output_dir) / "checkpoint-4", live / "checkpoint-4")
            shutil.rmtree(live / "checkpoint-2")
        return named(source)

    def deleted(*given: Any) -> None:
        shutil.rmtree(live / "checkpoint-4", ignore_errors=True)
        copy(*given)

    monkeypatch.setattr(copying, "files_in", replaced)
    monkeypatch.setattr(copying.shutil, "copyfileobj", deleted)
    source, manifest = copy_newest(live, tmp_path / "kept")
    assert source.name == "checkpoint-4" and manifest is not None and manifest == check_whole(tmp_path / "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run"]
    with pytest.raises((FileNotFoundError, ValueError)):
        copy_newest(live, tmp_path / "again")


def test_bad_input_and_a_full_disk_are_one_sentence_and_leave_nothing(live, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    kept = str(tmp_path / "kept")
    for given, says in (
        ((str(tmp_path / "none"), kept), "FOLDER must be"),
        ((str(tmp_path / "empty"), kept), "FOLDER must have"),
        ((str(live), str(tmp_path)), "TARGET must not exist"),
        ((str(live / "checkpoint-2"), str(live / "checkpoint-2" / "part" / "kept")), "TARGET must not be in"),
        ((str(live), kept), "No space left"),
    ):
        monkeypatch.setattr(copying.shutil, "copyfileobj", no_space)
        found = ran(capsys, "checkpoint", *given)
        assert found.status == 2 and says in found.err and found.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_one_that_somebody_has_made_up_is_not_copied(live, tmp_path, name):
    """With a link in the place of a file, or of one that would be loaded and is not of the checkpoint."""
    shutil.rmtree(live / "checkpoint-4")
    (live / "checkpoint-2" / name).unlink(missing_ok=True)
    (live / "checkpoint-2" / name).symlink_to("/etc/passwd")
    for folder in (live, live / "checkpoint-2"):
        with pytest.raises(ValueError, match="got"):
            copy_newest(folder, tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
