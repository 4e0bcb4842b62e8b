"""What a manifest notices."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    check_files,
    read_manifest,
    write_manifest,
)
from tiers import times

CONTENT = {
    "model.safetensors": b"weights" * 50,
    "optimizer.pt": b"moments" * 30,
    "part/config.json": b"{}",
    "empty": b"",
}


def made(folder: Path, step: int = 3) -> Path:
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, step, "a", {"stash": "host"})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "checkpoint-3")


def checked(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert found is not None
    check_files(folder, found)
    return found


def damage(folder: Path) -> DamagedCheckpointError:
    """What is told of a folder that is not as it was."""
    with pytest.raises(DamagedCheckpointError) as told:
        checked(folder)
    return told.value


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of the manifest, with the SHA-256 that it has then: not every change is an accident."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    content |= changes
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": digest}))


@settings(deadline=None, max_examples=times(6, 400))
@given(st.sampled_from([*CONTENT, MANIFEST]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(tmp_path_factory, name, at, bit):
    folder = made(tmp_path_factory.mktemp("flipped") / "checkpoint-3")
    content = bytearray((folder / name).read_bytes())
    if not content:
        return
    content[int(at * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)
    if name != MANIFEST:
        assert damage(folder).file == name
        return
    try:
        assert checked(folder).configuration == {"stash": "host"}  # white space at the end, say
    except DamagedCheckpointError as error:
        assert error.file == MANIFEST


def test_a_file_that_is_missing_cut_or_of_another_save_is_named(folder, tmp_path):
    for name, content in CONTENT.items():
        (folder / name).unlink()
        assert (damage(folder).file, damage(folder).reason) == (name, "is missing")
        (folder / name).write_bytes(content[:-1] if content else b"x")
        assert damage(folder).file == name and "bytes" in damage(folder).reason
        (folder / name).write_bytes(content)
    shutil.copytree(folder, tmp_path / "other", ignore=shutil.ignore_patterns(MANIFEST))
    (tmp_path / "other" / "optimizer.pt").write_bytes(CONTENT["optimizer.pt"][::-1])
    write_manifest(tmp_path / "other", 4, "a", {})
    shutil.copy(tmp_path / "other" / "optimizer.pt", folder)
    error = damage(folder)
    assert error.file == "optimizer.pt" and "SHA-256" in error.reason
    again = copy.copy(error)  # as pickle does it
    assert str(again) == str(error) and again.file == error.file, "it passes between processes"


def test_a_file_that_would_be_loaded_must_be_listed(folder):
    """Adapters, wherever they are, are for a model that has some."""
    adapters = ["adapter_model.safetensors", "more/adapter_model.safetensors", "more/adapter_config.json"]
    for name in ["notes.txt", *adapters]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of a callback")
    checked(folder)
    (folder / "scheduler.pt").write_bytes(b"")
    assert damage(folder).file == "scheduler.pt"
    for name in ["scheduler.pt", MANIFEST, *adapters]:
        (folder / name).unlink()
    (folder / "adapter_config.json").write_bytes(b"{}")
    write_manifest(folder, 3, "a", {})
    for name in adapters:
        (folder / name).write_text("something else")
        assert damage(folder).file == name
        (folder / name).unlink()


def test_links_are_neither_followed_nor_saved(folder, tmp_path):
    for name, reason in (("model.safetensors", "is no file"), ("part", "is in no folder"), (MANIFEST, "is a link")):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        assert damage(folder).reason.startswith(reason)
        (folder / name).unlink()
        (tmp_path / "elsewhere").rename(folder / name)
    (folder / MANIFEST).unlink()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="files and folders only"):
        write_manifest(folder, 3, "a", {})


NAMES = ["../model.safetensors", "/etc/passwd", "part/../../x", "", ".", "./x", "a//b", "a\\b", "a\0b", MANIFEST]
ENTRIES = [[-1, "0" * 64], ["1", "0" * 64], [True, "0" * 64], [1, "0" * 63], [1], None, [1, 2]]
NUMBERS = [float("inf"), float("nan"), None, []]


def test_what_is_no_manifest_is_refused(folder):
    """Such fields, though the SHA-256 is that of the text; and other texts."""
    before = (folder / MANIFEST).read_bytes()
    changes = [{"files": {name: [1, "0" * 64]}} for name in NAMES]
    changes += [{"files": {"model.safetensors": entry}} for entry in ENTRIES]
    changes += [{field: value} for field in ("step", "format", "saved_at") for value in NUMBERS]
    for change in changes:
        rewrite(folder, **change)
        assert damage(folder).file == MANIFEST, change
        (folder / MANIFEST).write_bytes(before)
    for text in ("", "{", "[]", "null", "[" * 100_000, "\xff\xfe", '{"sha256": 1}'):
        (folder / MANIFEST).write_text(text, encoding="latin-1")
        assert damage(folder).file == MANIFEST
    os.truncate(folder / MANIFEST, 2**25)
    assert "size" in damage(folder).reason, "one that is large is not read"
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    assert damage(folder).file == MANIFEST


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
FILES = st.dictionaries(st.text(), JSON | st.tuples(st.integers(), st.just("0" * 64)), max_size=3)


@settings(deadline=None, max_examples=times(6, 400))
@given(st.data())
def test_any_manifest_is_read_or_refused(tmp_path_factory, data):
    """Any bytes, and any values with the SHA-256 that they have."""
    folder = made(tmp_path_factory.mktemp("any") / "checkpoint-3")
    fields = sorted(json.loads((folder / MANIFEST).read_text()).keys() - {"sha256"})
    name = data.draw(st.sampled_from([*fields, None]))
    if name is None:
        (folder / MANIFEST).write_bytes(data.draw(st.binary(max_size=300) | st.text(max_size=100).map(str.encode)))
    else:
        rewrite(folder, **{name: data.draw(FILES if name == "files" else JSON)})
    try:
        checked(folder)
    except ValueError as error:  # of which DamagedCheckpointError is one
        assert "a checkpoint must be" in str(error)
