"""Checkpoints by somebody who means harm: nothing of them is run, and nothing elsewhere read, written or deleted."""

from __future__ import annotations

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
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError, write_manifest
from saving import saving, trained
from tiers import more, times

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


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained")
    trained(run, **TWO)
    return run / "checkpoint-2"


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy, to be changed."""
    has_run.clear()
    yield Path(shutil.copytree(original, tmp_path / "run" / original.name))
    assert has_run == []


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Where somebody else has a file."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("a file")
    return tmp_path / "outside"


class Paths:
    """What this process opens or changes outside of a folder, while it is asked to look."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None or event not in ("open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"):
            return
        for path in arguments[: 2 if event == "os.rename" else 1]:
            if isinstance(path, str | bytes | os.PathLike):
                found = os.path.realpath(os.fsdecode(path))
                if os.path.isabs(os.fsdecode(path)) and not found.startswith(self.allowed):
                    self.seen.append(f"{event} {found}")


PATHS = Paths()  # an audit hook stays until the process ends


@contextmanager
def inside(run: Path) -> Iterator[None]:
    """Every path that is opened or changed is in the run, or one of Python and its packages."""
    PATHS.allowed, PATHS.seen = (str(run.resolve()), sys.prefix, sys.base_prefix, "/proc/"), []
    try:
        yield
    finally:
        PATHS.allowed = None
    assert PATHS.seen == []


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


# ---- what files ask to be run


def test_what_a_pickle_asks_for_is_not_run(checkpoint):
    for name, archive in itertools.product(PICKLED, (True, False)):
        path, weights = checkpoint / name, checkpoint / "model.safetensors"
        before = path.read_bytes() if path.exists() else None
        torch.save({"state": Canary(), "weight": torch.ones(3)}, path, _use_new_zipfile_serialization=archive)
        if name == "pytorch_model.bin":
            weights.rename(checkpoint.parent / "weights")
        refused(checkpoint, name)
        made = saving(checkpoint.parent, **TWO)
        with inside(checkpoint.parent), pytest.raises(DamagedCheckpointError):
            made.train(resume_from_checkpoint=str(checkpoint))
        assert made.optimizer is None
        if name == "pytorch_model.bin":
            (checkpoint.parent / "weights").rename(weights)
        path.write_bytes(before) if before else path.unlink()


def test_what_nobody_reads_is_not_opened(checkpoint):
    """transformers saves its arguments as a pickle that may do anything. Who loads that file runs it."""
    torch.save(Canary(), checkpoint / "training_args.bin")
    seal(checkpoint, True)
    assert trained(checkpoint.parent, max_steps=3, save_steps=3, resumes=checkpoint).state.global_step == 3
    assert has_run == []
    torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert has_run == ["a canary"]
    has_run.clear()


# ---- where files lead


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


# ---- what files claim


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
"""Headers of more bytes than there are, tensors of terabytes, a shape that overflows; one that is nested, or empty."""


def test_headers_of_safetensors_are_not_believed(checkpoint):
    for content in HEADERS:
        (checkpoint / "model.safetensors").write_bytes(content)
        refused(checkpoint, "model.safetensors")


NESTED = "[" * 50_000
TEXTS = ['{"weight_map": ' + NESTED, '{"a": ' + NESTED + "]" * 50_000 + "}", "[]", b"\xff\xfe"]


def test_json_that_cannot_be_read_is_refused(checkpoint):
    """Of the state, a step that is no number, too."""
    for name in (INDEXES[0], "trainer_state.json"):
        before = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else b""
        for text in TEXTS:
            (checkpoint / name).write_bytes(text if isinstance(text, bytes) else text.encode())
            refused(checkpoint, name)
        (checkpoint / name).unlink()
    for step in (None, "4", 4.5, [4]):
        (checkpoint / name).write_text(json.dumps({**json.loads(before), "global_step": step}))
        refused(checkpoint, name)


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
