"""The checkpoint to resume from, among whole, damaged and unfinished ones of one or two trainings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_l2l.checkpoint import manifest as manifests
from hf_l2l.checkpoint.finding import PassedOver, checkpoints_in, newest_whole, rotate
from hf_l2l.checkpoint.manifest import MANIFEST, check_files, read_manifest, write_manifest


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is a second after the one before."""
    seconds = iter(range(1, 100))
    monkeypatch.setattr(manifests.time, "time", lambda: float(next(seconds)))


def save(run: Path, step: int, of: str | None = "a") -> Path:
    """A checkpoint of the training `of`; None: of transformers' Trainer."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of step {step}")
    (folder / "trainer_state.json").write_text("{}")
    if of is not None:
        write_manifest(folder, step, of, {})
    return folder


def newest(run: Path) -> tuple[Path | None, list[PassedOver]]:
    """Without a look at the form of the files, which are none of a trainer."""

    def check(checkpoint: Path) -> None:
        manifest = read_manifest(checkpoint)
        if manifest is not None:
            check_files(checkpoint, manifest)

    return newest_whole(run, check)


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    for step in (500, 1000, 20):
        save(tmp_path, step)
    found, passed_over = newest(tmp_path)
    assert found == tmp_path / "checkpoint-1000" and passed_over == []
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-20", "checkpoint-500", "checkpoint-1000"]


def test_a_damaged_one_is_passed_over(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    for step, name in ((3, "model.safetensors"), (4, MANIFEST)):
        (save(tmp_path, step) / name).write_text("other")
    found, passed_over = newest(tmp_path)
    assert found == tmp_path / "checkpoint-2"
    assert {each.folder.name: each.reason for each in passed_over} == {
        "checkpoint-4": f"{MANIFEST} is damaged: Expecting value: line 1 column 1 (char 0)",
        "checkpoint-3": "model.safetensors has 5 bytes, and had 17",
    }


def test_one_of_a_trainer_that_was_interrupted_is_passed_over(tmp_path):
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2, of=None) / "trainer_state.json").write_text('{"epoch": 1.')
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-1" and passed_over.is_interrupted


def test_a_training_that_went_on_with_the_other_trainer_is_one(tmp_path):
    save(tmp_path, 1, of=None)
    save(tmp_path, 2)
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-2"
    save(tmp_path, 3, of=None)
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-3"


def test_of_two_trainings_the_later_one_counts(tmp_path):
    save(tmp_path, 500, of="a")
    save(tmp_path, 10, of="b")
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "model.safetensors").unlink()
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-500" and passed_over.reason == "model.safetensors is missing"


def test_one_of_the_other_trainer_that_is_older_than_the_last_training_is_not_of_it(tmp_path):
    theirs = save(tmp_path, 6, of=None)
    save(tmp_path, 2)
    os.utime(theirs / "trainer_state.json", (0.5, 0.5))  # ours is saved at second 1
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert newest(tmp_path)[0] == theirs


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    (tmp_path / "checkpoint-4").symlink_to(save(tmp_path / "elsewhere", 4))
    link = PassedOver(tmp_path / "checkpoint-4", "it is a link", is_interrupted=False)
    assert newest(tmp_path) == (None, [link]) and newest(tmp_path / "no") == (None, [])


def test_what_is_older_than_the_newest_whole_one_is_not_told_of(tmp_path):
    """A link to one, and one whose manifest is damaged."""
    (save(tmp_path, 2) / MANIFEST).write_text("other")
    (tmp_path / "checkpoint-3").symlink_to(save(tmp_path / "elsewhere", 3))
    for name in ("checkpoint-2/trainer_state.json", "checkpoint-3"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    os.utime(tmp_path / "elsewhere" / "checkpoint-3" / "trainer_state.json", (0, 0))
    found, passed_over = newest(tmp_path)
    assert found is None and [each.folder.name for each in passed_over] == ["checkpoint-3", "checkpoint-2"]
    save(tmp_path, 1)
    assert newest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_a_newer_version_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "FORMAT", 2)
    save(tmp_path, 1)
    monkeypatch.setattr(manifests, "FORMAT", 1)
    with pytest.raises(ValueError, match="upgrade hf_l2l"):
        newest(tmp_path)


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [1, 4]), (2, [1, 4])]
)
def test_old_ones_are_deleted_but_the_best(tmp_path, limit, kept):
    best = None
    for step in (1, 2, 3, 4):
        best = save(tmp_path, step) if step == 1 else best
        if step > 1:
            save(tmp_path, step)
    rotate(tmp_path, limit, best if limit in (1, 2) else None)
    assert [int(path.name.removeprefix("checkpoint-")) for path in checkpoints_in(tmp_path)] == kept


def test_only_whole_ones_of_ours_are_deleted(tmp_path):
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2) / MANIFEST).write_text("damaged")
    outside = save(tmp_path / "elsewhere", 5)
    (tmp_path / "checkpoint-5").symlink_to(outside)
    for step in (3, 4, 6):
        save(tmp_path, step)
    rotate(tmp_path, 1, None)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 5, 6)]
    assert (outside / "model.safetensors").exists()
