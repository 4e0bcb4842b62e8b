"""What a manifest notices."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

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

CONTENT = {
    "model.safetensors": b"weights" * 50,
    "optimizer.pt": b"moments" * 30,
    "part/config.json": b"{}",
    "empty": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "checkpoint-3"
    for name, content in CONTENT.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(content)
    write_manifest(found, 3, "a", {"stash": "host"})
    return found


def checked(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert found is not None
    check_files(folder, found)
    return found


def test_what_was_written_is_read(folder):
    found = checked(folder)
    assert (found.step, found.run, found.configuration) == (3, "a", {"stash": "host"})
    assert {name: digest.num_bytes for name, digest in found.files.items()} == {
        name: len(content) for name, content in CONTENT.items()
    }


def test_a_folder_without_one(tmp_path):
    assert read_manifest(tmp_path) is None and read_manifest(tmp_path / "no") is None


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "model.safetensors" else pytest.mark.slow) for n in CONTENT] + [MANIFEST]
)
@settings(deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(name, at, bit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped") / "checkpoint-3"
    folder.mkdir()
    for each, content in CONTENT.items():
        (folder / each).parent.mkdir(exist_ok=True)
        (folder / each).write_bytes(content)
    write_manifest(folder, 3, "a", {"stash": "host"})
    content = bytearray((folder / name).read_bytes())
    if not content:
        return
    content[int(at * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)
    try:
        found = read_manifest(folder)
    except DamagedCheckpointError as error:
        assert error.file == MANIFEST == name
        return
    assert found is not None
    if name == MANIFEST:  # white space at the end, say
        check_files(folder, found)
        assert found.step == 3 and found.configuration == {"stash": "host"}
        return
    with pytest.raises(DamagedCheckpointError) as caught:
        check_files(folder, found)
    assert caught.value.file == name


@pytest.mark.parametrize("name", list(CONTENT))
def test_missing_and_cut_files_are_named(folder, name):
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
        checked(folder)
    path.write_bytes(content[:-1] if content else b"x")
    with pytest.raises(DamagedCheckpointError, match=f"{name} has [0-9]+ bytes, and had"):
        checked(folder)


def test_a_file_of_another_save_is_noticed(folder, tmp_path):
    other = tmp_path / "checkpoint-4"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns(MANIFEST))
    (other / "optimizer.pt").write_bytes(CONTENT["optimizer.pt"][::-1])
    write_manifest(other, 4, "a", {})
    shutil.copy(other / "optimizer.pt", folder / "optimizer.pt")
    with pytest.raises(DamagedCheckpointError, match="optimizer.pt has another content"):
        checked(folder)


def test_a_file_that_may_be_loaded_must_be_listed(folder):
    (folder / "notes.txt").write_text("of a callback")
    checked(folder)
    (folder / "scheduler.pt").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="scheduler.pt was not saved with it"):
        checked(folder)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_are_not_followed(folder, tmp_path, kind):
    name = "part/config.json" if kind == "folder" else "model.safetensors"
    moved = folder / Path(name).parts[0]
    target = tmp_path / "elsewhere"
    moved.rename(target)
    moved.symlink_to(target)
    with pytest.raises(DamagedCheckpointError, match="is no file|is in no folder"):
        checked(folder)


def test_a_link_is_not_saved(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="has files and folders only"):
        write_manifest(tmp_path / "checkpoint-1", 1, "a", {})


BAD_NAMES = ["../model.safetensors", "/etc/passwd", "part/../../x", "", ".", "./x", "a//b", "a\\b", "a\0b", MANIFEST]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere_are_refused(folder, name):
    rewrite(folder, files={name: [1, "0" * 64]})
    with pytest.raises(DamagedCheckpointError, match="is no name of a file in the folder"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "entry", [[-1, "0" * 64], ["1", "0" * 64], [True, "0" * 64], [1, "0" * 63], [1], None, [1, 2]]
)
def test_other_entries_are_refused(folder, entry):
    rewrite(folder, files={"model.safetensors": entry})
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(folder)


def rewrite(folder: Path, **changes: object) -> None:
    """Change fields of the manifest, with the SHA-256 that it has then: not every change is an accident."""
    from hf_l2l.checkpoint.manifest import _of_content

    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    content |= changes
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": _of_content(content)}))


@pytest.mark.parametrize("field", ["step", "format", "saved_at"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), None, []])
def test_numbers_that_are_none_are_refused(folder, field, value):
    rewrite(folder, **{field: value})
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\xff\xfe", '{"sha256": 1}'])
def test_other_texts_are_refused(folder, text):
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is damaged"):
        read_manifest(folder)


def test_a_large_manifest_is_not_read(folder):
    with (folder / MANIFEST).open("ab") as file:
        os.truncate(file.fileno(), 2**25)
    with pytest.raises(DamagedCheckpointError, match="no file of a manifest's size"):
        read_manifest(folder)


def test_a_newer_format_is_told_from_damage(folder):
    rewrite(folder, format=2)
    with pytest.raises(
        ValueError, match=r"format that this version .* knows \(got format 2 .*upgrade hf_l2l"
    ) as found:
        read_manifest(folder)
    assert not isinstance(found.value, DamagedCheckpointError)


def test_errors_pass_between_processes(folder):
    error = DamagedCheckpointError(folder, "optimizer.pt", "is missing")
    found = copy.copy(error)  # as pickle does it
    assert str(found) == str(error) and found.file == "optimizer.pt"


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "more/adapter_model.safetensors", "more/adapter_config.json"]
)
@pytest.mark.parametrize("has_adapters", [True, False])
def test_adapters_that_were_added_count_for_a_model_that_has_some(folder, name, has_adapters):
    """Trainer loads those in a folder instead of those beside it, and nobody else looks for them."""
    if has_adapters:
        (folder / "adapter_config.json").write_bytes(b"{}")
        (folder / MANIFEST).unlink()
        write_manifest(folder, 3, "a", {})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"something else")
    if has_adapters:
        with pytest.raises(DamagedCheckpointError, match=f"{name} was not saved with it, and would be loaded"):
            checked(folder)
    else:
        checked(folder)
