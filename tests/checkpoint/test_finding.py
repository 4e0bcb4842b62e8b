"""The checkpoint to resume from, among whole, damaged and unfinished ones of one or two trainings."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from hf_l2l.checkpoint import manifest as manifests
from hf_l2l.checkpoint.finding import PassedOver, newest_whole, rotate
from hf_l2l.checkpoint.manifest import MANIFEST, check_files, read_manifest, write_manifest
from saving import steps_in


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is a second after the one before."""
    seconds = itertools.count(1)
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


def test_damaged_ones_are_passed_over_with_their_reasons(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert newest(tmp_path / "no") == (None, [])
    for step, name in ((3, "model.safetensors"), (4, MANIFEST)):
        (save(tmp_path, step) / name).write_text("other")
    found, passed_over = newest(tmp_path)
    assert found == tmp_path / "checkpoint-2"
    assert {each.folder.name: each.reason.partition(" ")[0] for each in passed_over} == {
        "checkpoint-4": MANIFEST,
        "checkpoint-3": "model.safetensors",
    }


def test_those_of_the_other_trainer_count_by_their_time(tmp_path):
    """A training may go on with the other one; what it has not finished is passed over."""
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2, of=None) / "trainer_state.json").write_text('{"epoch": 1.')
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-1" and passed_over.is_interrupted
    save(tmp_path, 3)
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-3"
    theirs = save(tmp_path, 6, of=None)
    assert newest(tmp_path)[0] == theirs
    for step, at in ((1, 0.1), (2, 0.2), (6, 0.5)):  # ours is saved at second 1
        os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (at, at))
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-3"
    (tmp_path / "checkpoint-3" / "model.safetensors").unlink()
    assert newest(tmp_path)[0] == theirs


def test_of_two_trainings_the_later_one_counts(tmp_path):
    save(tmp_path, 500, of="a")
    save(tmp_path, 10, of="b")
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "model.safetensors").unlink()
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-500" and passed_over.reason == "model.safetensors is missing"


def test_links_are_none_and_only_what_is_newer_is_told_of(tmp_path):
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    (save(tmp_path, 2) / MANIFEST).write_text("other")
    (tmp_path / "checkpoint-4").symlink_to(save(tmp_path / "elsewhere", 4))
    for name in ("checkpoint-2/trainer_state.json", "checkpoint-4", "elsewhere/checkpoint-4/trainer_state.json"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    found, passed_over = newest(tmp_path)
    assert found is None and [each.folder.name for each in passed_over] == ["checkpoint-4", "checkpoint-2"]
    assert passed_over[0].reason == "it is a link"
    save(tmp_path, 1)
    assert newest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_a_newer_version_is_told(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", 2)
        save(tmp_path, 1)
    with pytest.raises(ValueError, match="upgrade hf_l2l"):
        newest(tmp_path)


def test_old_ones_are_deleted_but_the_best(tmp_path):
    for limit, kept in ((0, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [1, 4]), (2, [1, 4])):
        run = tmp_path / str(limit)
        best, *_ = [save(run, step) for step in (1, 2, 3, 4)]
        rotate(run, limit, best if limit in (1, 2) else None)
        assert steps_in(run) == kept


def test_only_whole_ones_of_ours_are_deleted_and_nothing_that_they_link_to(tmp_path):
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2) / MANIFEST).write_text("damaged")
    outside = save(tmp_path / "elsewhere", 5)
    (tmp_path / "checkpoint-5").symlink_to(outside)
    for step in (3, 4, 6):
        (save(tmp_path, step) / "linked").symlink_to(outside)
        (tmp_path / f"checkpoint-{step}" / "file").symlink_to(outside / "model.safetensors")
    before = sorted(outside.rglob("*"))
    rotate(tmp_path, 1, None)
    assert steps_in(tmp_path) == [1, 2, 5, 6] and sorted(outside.rglob("*")) == before
    assert not list(tmp_path.glob("_l2l-removing-*"))
