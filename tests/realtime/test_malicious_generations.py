"""Generations that somebody has made up: nothing of them is resumed from, and nothing outside their folder changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_models import ran
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError, _of_content
from training import SAVING, l2l_trainer

OPTIONS: dict[str, Any] = {**SAVING, "save_strategy": "no", "l2l_realtime_every": 1}


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training, with the generation of step 2."""
    folder = tmp_path_factory.mktemp("generations") / "now"
    options = {**OPTIONS, "max_steps": 2, "l2l_realtime_checkpoint": str(folder)}
    l2l_trainer(folder.parent / "run", **options).train()
    return folder


@pytest.fixture
def folder(generation: Path, tmp_path: Path) -> Path:
    """A copy of it, and beside it what somebody else has."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("of somebody else")
    return Path(shutil.copytree(generation, tmp_path / "now"))


def signed(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with the SHA-256 that it has then."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content["sha256"]
    change(content)
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "sha256": _of_content(content)}))


def linked(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(target)


HARM: dict[str, Callable[[Path], object]] = {
    "a name that leads out": lambda c: signed(c, lambda m: m["files"].update({"../../theirs/file": [16, "0" * 64]})),
    "an absolute name": lambda c: signed(c, lambda m: m["files"].update({"/etc/hostname": [1, "0" * 64]})),
    "a size that is not so": lambda c: signed(c, lambda m: m["files"]["optimizer.pt"].__setitem__(0, 2**60)),
    "a negative size": lambda c: signed(c, lambda m: m["files"]["optimizer.pt"].__setitem__(0, -1)),
    "no files": lambda c: signed(c, lambda m: m["files"].clear()),
    "a step that is none": lambda c: signed(c, lambda m: m.update(step=float("inf"))),
    "a newer format": lambda c: signed(c, lambda m: m.update(format=99)),
    "a huge manifest": lambda c: (c / MANIFEST).write_text(" " * 2**25),
    "a link to a file": lambda c: linked(c / "optimizer.pt", c.parent.parent / "theirs" / "file"),
    "a link for the manifest": lambda c: linked(c / MANIFEST, c.parent.parent / "theirs" / "file"),
    "a file that would be loaded": lambda c: (c / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n."),
    "weights of another size": lambda c: (c / "model.safetensors").write_bytes(b"\xff" * 64),
}


@pytest.mark.parametrize("how", HARM)
def test_it_is_refused_and_not_copied(folder, tmp_path, capsys, how):
    HARM[how](folder / "checkpoint-2")
    made = l2l_trainer(tmp_path / "run", **OPTIONS, l2l_realtime_checkpoint=str(folder))
    with pytest.raises((DamagedCheckpointError, ValueError)) as error:
        made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert "(got" in str(error.value) and made.state.global_step == 0
    assert ran(capsys, "checkpoint", str(folder), str(tmp_path / "kept")).status == 2
    assert not (tmp_path / "kept").exists()
    assert (tmp_path / "theirs" / "file").read_text() == "of somebody else"


def test_a_link_to_a_generation_is_none(folder, tmp_path):
    (folder / "checkpoint-2").rename(tmp_path / "elsewhere")
    (folder / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    made = l2l_trainer(tmp_path / "run", **OPTIONS, l2l_realtime_checkpoint=str(folder))
    with pytest.raises(ValueError, match="No valid checkpoint found|no whole checkpoint|none"):
        made.train(resume_from_checkpoint=str(folder))


JOURNALS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda journal, theirs: journal.symlink_to(theirs),
    "a link to what was there before": lambda journal, theirs: (
        journal.mkdir(),
        (journal / "before").symlink_to(theirs),
    ),
    "a file": lambda journal, theirs: journal.write_text("no folder"),
    "a link within": lambda journal, theirs: (journal.mkdir(), (journal / "checkpoint-9").symlink_to(theirs)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", JOURNALS)
@pytest.mark.parametrize("name", ["_l2l-saving-checkpoint-9-abcdefgh", "_l2l-removing-checkpoint-9-0123abcd"])
def test_what_an_interrupted_save_has_left_leads_nowhere(folder, tmp_path, how, name):
    """What is not followed stays where it is; the training goes on from the whole generation."""
    JOURNALS[how](folder / name, tmp_path / "theirs")
    made = l2l_trainer(tmp_path / "run", **OPTIONS, l2l_realtime_checkpoint=str(folder))
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 4 and (folder / "checkpoint-4").is_dir()
    assert not (folder / "checkpoint-9").exists()
    assert (tmp_path / "theirs" / "file").read_text() == "of somebody else"


def test_the_lock_is_no_link(folder, tmp_path, caplog):
    """Nothing is made where a link leads; the training goes on without the lock, and says so."""
    (folder / "l2l_realtime.lock").symlink_to(tmp_path / "theirs" / "new")
    made = l2l_trainer(tmp_path / "run", **OPTIONS, l2l_realtime_checkpoint=str(folder))
    with caplog.at_level("WARNING", "hf_l2l"):
        made.train(resume_from_checkpoint=True)
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["file"]
    assert "no other training is kept from" in caplog.text
