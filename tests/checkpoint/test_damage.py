"""A checkpoint of which anything is damaged, by accident or by somebody who means harm, is not resumed from, and
nothing has changed when that is told."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_l2l.checkpoint.finding import check_whole, checkpoint_to_resume
from hf_l2l.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    check_files,
    read_manifest,
    write_manifest,
)
from runs import assert_same_run, assert_same_tensors
from saving import BEST, At, saving, trained
from tiers import more, times
from training import SAVING, plain_trainer

STATE = {"optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
READ_OF_ANY = {"model.safetensors", "config.json", *STATE}
"""Files that are read when a training is resumed, which transformers' Trainer writes, too."""


@pytest.fixture
def run(whole: Any, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    names = {path.name for path in (Path(whole.args.output_dir) / "checkpoint-4").iterdir()}
    assert names == {*READ_OF_ANY, "rng_state_data.pth", "training_args.bin", MANIFEST}
    return Path(shutil.copytree(whole.args.output_dir, tmp_path / "run"))


def damaged(path: Path, how: str = "flipped") -> None:
    """Change one file of a checkpoint of step 4."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "of another step":
        shutil.copyfile(path.parent.parent / "checkpoint-2" / path.name, path)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        at = random.Random(path.name).randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.safetensors", "flipped"),
        ("scheduler.pt", "of another step"),
        *more((MANIFEST, "flipped"), ("rng_state_data.pth", "missing"), ("trainer_state.json", "cut")),
    ],
)
def test_nothing_has_changed_when_a_damaged_one_is_refused(run, caplog, name, how):
    """By its folder, it is refused; as the last one, the one before it is taken, with one warning."""
    damaged(run / "checkpoint-4" / name, how)
    trainer = saving(run)
    generators = (lambda: torch.get_rng_state().tolist(), random.getstate, lambda: np.random.get_state()[1].tolist())
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    drawn = [state() for state in generators]
    with pytest.raises(DamagedCheckpointError) as caught:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert caught.value.file == name
    assert_same_tensors(trainer.model.state_dict(), before)
    assert trainer.optimizer is None and trainer.state.global_step == 0
    assert [state() for state in generators] == drawn
    with caplog.at_level("WARNING", "hf_l2l"):
        assert checkpoint_to_resume(True, trainer.args) == str(run / "checkpoint-3")
    (said,) = caplog.messages
    assert said.startswith(f"{run / 'checkpoint-4'} is not resumed from")


def test_the_older_one_is_resumed_from_and_the_damaged_one_is_replaced(run, whole):
    damaged(run / "checkpoint-4" / "optimizer.pt")
    assert_same_run(trained(run, resumes=True), whole)
    assert check_whole(run / "checkpoint-4") is not None


def test_one_of_transformers_trainer_is_checked_as_far_as_can_be(tmp_path):
    """It has no manifest: what is cut off is noticed, and what nothing can be loaded without."""
    trained(tmp_path, plain_trainer, **SAVING)
    checkpoint = tmp_path / "checkpoint-4"
    assert check_whole(checkpoint) is None
    for name in sorted(READ_OF_ANY):
        content = (checkpoint / name).read_bytes()
        for length in {0, 1, 8, len(content) // 2, len(content) - 2}:
            (checkpoint / name).write_bytes(content[:length])
            with pytest.raises(DamagedCheckpointError) as caught:
                check_whole(checkpoint)
            assert caught.value.file == name
        args = SimpleNamespace(output_dir=str(tmp_path), should_save=False)
        assert checkpoint_to_resume(True, args) == str(tmp_path / "checkpoint-2")
        (checkpoint / name).unlink()
        if name in ("model.safetensors", "trainer_state.json"):
            with pytest.raises(DamagedCheckpointError, match="is missing"):
                check_whole(checkpoint)
        (checkpoint / name).write_bytes(content)


def test_the_best_checkpoint_is_checked_before_it_is_loaded(tmp_path):
    at_the_end: dict[str, torch.Tensor] = {}

    def damage_it() -> None:
        at_the_end.update({key: value.clone() for key, value in made.model.state_dict().items()})
        damaged(tmp_path / "checkpoint-1" / "model.safetensors")

    scores = itertools.count(4, -1)
    options = {**BEST, "max_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    options |= {"compute_metrics": lambda predictions: {"score": next(scores)}}
    made = saving(tmp_path, **options, callbacks=[At("on_save", 2, damage_it)])
    with pytest.raises(DamagedCheckpointError) as caught:
        made.train()
    assert caught.value.file == "model.safetensors" and caught.value.folder == tmp_path / "checkpoint-1"
    assert_same_tensors(made.model.state_dict(), at_the_end)


# ---- what a manifest notices


CONTENT = {"model.safetensors": b"weights" * 50, "optimizer.pt": b"moments" * 9, "part/config.json": b"{}", "no": b""}


def made(folder: Path) -> Path:
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, 3, "a", {"stash": "host"})
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
@given(
    st.sampled_from([*filter(CONTENT.get, CONTENT), MANIFEST]), st.floats(0, 1, exclude_max=True), st.integers(0, 7)
)
def test_any_flipped_bit_is_noticed(tmp_path_factory, name, at, bit):
    folder = made(tmp_path_factory.mktemp("flipped") / "checkpoint-3")
    content = bytearray((folder / name).read_bytes())
    content[int(at * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)
    try:
        assert checked(folder).configuration == {"stash": "host"} and name == MANIFEST  # white space at the end, say
    except DamagedCheckpointError as error:
        assert error.file == name


def test_a_file_that_is_missing_cut_or_of_another_save_is_named(folder):
    for name, content in CONTENT.items():
        (folder / name).unlink()
        assert (damage(folder).file, damage(folder).reason) == (name, "is missing")
        (folder / name).write_bytes(content[:-1] if content else b"x")
        assert damage(folder).file == name and "bytes" in damage(folder).reason
        (folder / name).write_bytes(content)
    (folder / "optimizer.pt").write_bytes(CONTENT["optimizer.pt"][::-1])
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


def test_what_is_no_manifest_is_refused(folder):
    """Such fields, though the SHA-256 is that of the text; and other texts."""
    before = (folder / MANIFEST).read_bytes()
    names = ["../model.safetensors", "/etc/passwd", "part/../../x", "", ".", "./x", "a//b", "a\\b", "a\0b", MANIFEST]
    entries = [[-1, "0" * 64], ["1", "0" * 64], [True, "0" * 64], [1, "0" * 63], [1], None, [1, 2]]
    numbers = [float("inf"), float("nan"), None, []]
    changes = [{"files": {name: [1, "0" * 64]}} for name in names]
    changes += [{"files": {"model.safetensors": entry}} for entry in entries]
    changes += [{field: value} for field in ("step", "format", "saved_at") for value in numbers]
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


# ---- by somebody who means harm: nothing is run, and nothing elsewhere read, written or deleted


PICKLED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin", "rng_state_sim.pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TWO = {"max_steps": 2, "save_steps": 2}

has_run: list[str] = []


class Canary:
    """An object that says so if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sing, ()


def sing() -> None:
    has_run.append("a canary")


@pytest.fixture
def checkpoint(whole: Any, tmp_path: Path) -> Iterator[Path]:
    """A copy, to be changed."""
    has_run.clear()
    name = "checkpoint-2"
    yield Path(shutil.copytree(Path(whole.args.output_dir) / name, tmp_path / "run" / name))
    assert has_run == []


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Where somebody else has a file."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("a file")
    return tmp_path / "outside"


WATCHED = ("open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link")
allowed: list[tuple[str, ...]] = []
outside_of_it: list[str] = []


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    for path in arguments[: 2 if event == "os.rename" else 1] if allowed and event in WATCHED else ():
        if isinstance(path, str | bytes | os.PathLike) and os.path.isabs(os.fsdecode(path)):
            found = os.path.realpath(os.fsdecode(path))
            if not found.startswith(allowed[0]):
                outside_of_it.append(f"{event} {found}")


sys.addaudithook(_heard)  # it stays until the process ends


@contextmanager
def inside(run: Path) -> Iterator[None]:
    """Every path that this process opens or changes is in the run, or one of Python and its packages."""
    outside_of_it.clear()
    allowed.append((str(run.resolve()), sys.prefix, sys.base_prefix, "/proc/"))
    try:
        yield
    finally:
        allowed.clear()
    assert outside_of_it == []


def seal(checkpoint: Path, with_manifest: bool) -> None:
    """Give a checkpoint a manifest that holds, as anybody can, or take it away."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    if with_manifest:
        write_manifest(checkpoint, 2, "a", {})


def refused(checkpoint: Path, name: str, *, at_links: bool = False) -> None:
    """With a manifest or without one, this file is named as the one that is not read."""
    for with_manifest in (False, True):
        if not at_links:  # of which no manifest is made
            seal(checkpoint, with_manifest)
        with inside(checkpoint.parent), pytest.raises(DamagedCheckpointError) as caught:
            check_whole(checkpoint)
        assert caught.value.file == name


def test_what_a_pickle_asks_for_is_not_run(checkpoint):
    weights, away = checkpoint / "model.safetensors", checkpoint.parent / "weights"
    for name, archive in itertools.product(PICKLED, (True, False)):
        path = checkpoint / name
        before = path.read_bytes() if path.exists() else None
        torch.save({"state": Canary(), "weight": torch.ones(3)}, path, _use_new_zipfile_serialization=archive)
        if name == "pytorch_model.bin":
            weights.rename(away)
        refused(checkpoint, name)
        made = saving(checkpoint.parent, **TWO)
        with inside(checkpoint.parent), pytest.raises(DamagedCheckpointError):
            made.train(resume_from_checkpoint=str(checkpoint))
        assert made.optimizer is None
        if name == "pytorch_model.bin":
            away.rename(weights)
        path.write_bytes(before) if before else path.unlink()


def test_what_nobody_reads_is_not_opened(checkpoint):
    """transformers saves its arguments as a pickle that may do anything. Who loads that file runs it."""
    torch.save(Canary(), checkpoint / "training_args.bin")
    seal(checkpoint, True)
    assert trained(checkpoint.parent, max_steps=3, save_steps=3, resumes=checkpoint).state.global_step == 3
    assert has_run == []
    torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert has_run.pop() == "a canary"


def sharded(checkpoint: Path, index: str) -> Path:
    """Its weights in two files, with an index; the path of the second file."""
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names, stem = sorted(weights), index.partition(".")[0]
    end = ".safetensors" if "safetensors" in index else ".bin"
    files = {f"{stem}-0000{n}-of-00002{end}": names[n - 1 :: 2] for n in (1, 2)}
    for file, keys in files.items():
        part = {key: weights[key] for key in keys}
        save_file(part, checkpoint / file) if end == ".safetensors" else torch.save(part, checkpoint / file)
    placed = {key: file for file, keys in files.items() for key in keys}
    (checkpoint / index).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return checkpoint / max(files)


ELSEWHERE = ["../../outside/x.safetensors", "", ".", "..", "a/../../../outside/x", "x\0", "x" * 5000, "no", 7, ["x"]]


@pytest.mark.parametrize("index", [INDEXES[0], *more(INDEXES[1])])
def test_an_index_names_files_beside_it_only(checkpoint, outside, index):
    expected = load_file(checkpoint / "model.safetensors")
    second = sharded(checkpoint, index)
    seal(checkpoint, True)
    made = trained(checkpoint.parent, **TWO, resumes=checkpoint)
    assert all(torch.equal(value, expected[key]) for key, value in made.model.state_dict().items()), "in parts"
    shutil.move(second, outside / "x.safetensors")
    content = json.loads((checkpoint / index).read_text())
    for part in (*ELSEWHERE, str(outside / "x.safetensors")):
        places = {k: part if v == second.name else v for k, v in content["weight_map"].items()}
        (checkpoint / index).write_text(json.dumps({**content, "weight_map": places}))
        refused(checkpoint, index)


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_links_and_pipes_are_refused(checkpoint, outside, name):
    """Wherever they are: the trainer loads adapters from folders of any name."""
    path = checkpoint / name
    path.unlink(missing_ok=True)
    for with_manifest in (False, True):
        seal(checkpoint, with_manifest)
        for to in (outside / "file", outside / "no", outside):
            path.symlink_to(to)
            refused(checkpoint, name, at_links=True)
            path.unlink()
        os.mkfifo(path)  # who opened it would wait for ever
        refused(checkpoint, name, at_links=True)
        path.unlink()
    assert [each.read_text() for each in outside.iterdir()] == ["a file"]


def header(text: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


TENSOR = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
HEADERS = (
    header(b"{}", 2**33),
    header(b"{}", 2**64 - 1),
    header(json.dumps({"weight": TENSOR}).encode()),
    header(json.dumps({"weight": {**TENSOR, "shape": [2**40, 2**40]}}).encode()),
    header(b'{"a":' * 100_000),
    b"",
)
"""Of more bytes than there are, of tensors of terabytes, of a shape that overflows; one that is nested, or empty."""
NESTED = b"[" * 50_000
TEXTS = (b'{"weight_map": ' + NESTED, b'{"a": ' + NESTED + b"]" * 50_000 + b"}", b"[]", b"\xff\xfe")


def test_headers_and_json_are_not_believed(checkpoint):
    """Of the state, a step that is no number, too."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    steps = [json.dumps({**state, "global_step": step}).encode() for step in (None, "4", 4.5, [4])]
    contents = {"model.safetensors": HEADERS, "trainer_state.json": [*TEXTS, *steps], INDEXES[0]: TEXTS}
    for name, all_of_it in contents.items():
        before = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else b""
        for content in all_of_it:
            (checkpoint / name).write_bytes(content)
            refused(checkpoint, name)
        (checkpoint / name).write_bytes(before)


ANY = ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", INDEXES[0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=times(15, 500))
@given(name=st.sampled_from(ANY), seed=st.integers(0, 2**32), start=st.integers(0, 400))
def test_a_file_of_any_bytes_is_read_or_refused(checkpoint, name, seed, start):
    """A file with some bytes changed, those of its header above all."""
    if not (checkpoint / INDEXES[0]).exists():
        (checkpoint / INDEXES[0]).write_text('{"weight_map": {"a": "model.safetensors"}}')
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    whole, draw = (checkpoint / name).read_bytes(), random.Random(seed)
    changed = bytearray(whole)
    for _ in range(draw.randrange(1, 5)):
        changed[draw.randrange(min(start, len(whole) - 1), len(whole))] = draw.randrange(256)
    (checkpoint / name).write_bytes(changed[: draw.choice([len(whole), draw.randrange(len(whole))])])
    try:
        check_whole(checkpoint)
    except DamagedCheckpointError as error:
        assert error.file == name
    finally:
        (checkpoint / name).write_bytes(whole)
