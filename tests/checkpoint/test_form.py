"""Checkpoints by somebody who means harm: nothing of them is run, and nothing elsewhere read, written or deleted."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_l2l.checkpoint.finding import check_whole, rotate
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError, read_manifest, write_manifest
from training import SAVING, l2l_trainer, left_in

PICKLED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin", "rng_state_sim.pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

has_run: list[str] = []


class Canary:
    """An object that says so if it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sing, ()


def sing() -> None:
    has_run.append("a canary")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained")
    l2l_trainer(run, **SAVING).train()
    return run


@pytest.fixture(params=[True, False], ids=["manifest", "none"])
def sealed(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Gives a checkpoint a manifest that holds, as anybody can, or takes it away."""

    def seal(checkpoint: Path) -> None:
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        if request.param:
            write_manifest(checkpoint, 4, "a", {})

    return seal


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the last one, to be changed."""
    has_run.clear()
    yield Path(shutil.copytree(trained, tmp_path / "run")) / "checkpoint-4"
    assert has_run == []


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


def refused(checkpoint: Path, name: str) -> DamagedCheckpointError:
    """A training that is asked to resume from it has another checkpoint named, and has not changed."""
    trainer = l2l_trainer(checkpoint.parent, **SAVING)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with inside(checkpoint.parent), pytest.raises(DamagedCheckpointError) as caught:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert caught.value.file == name
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.optimizer is None
    return caught.value


# ---- what files ask to be run


@pytest.mark.one_in(6)
@pytest.mark.parametrize("archive", [True, False], ids=["archive", "pickle"])
@pytest.mark.parametrize("name", PICKLED)
def test_what_a_pickle_asks_for_is_not_run(checkpoint, sealed, name, archive):
    torch.save({"state": Canary(), "weight": torch.ones(3)}, checkpoint / name, _use_new_zipfile_serialization=archive)
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    sealed(checkpoint)
    assert "Weights only load failed" in refused(checkpoint, name).reason


def test_the_canary_would_run(tmp_path):
    torch.save(Canary(), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert has_run == ["a canary"]
    has_run.clear()


@pytest.mark.one_in(2)
def test_what_nobody_reads_is_not_opened(checkpoint, sealed):
    """transformers saves its arguments as a pickle that may do anything."""
    torch.save(Canary(), checkpoint / "training_args.bin")
    sealed(checkpoint)
    trainer = l2l_trainer(checkpoint.parent, **{**SAVING, "max_steps": 6})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 6


# ---- where files lead


def sharded(checkpoint: Path, index: str) -> Path:
    """Its weights in two files, with an index; the path of the second file."""
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(weights)
    end = ".safetensors" if "safetensors" in index else ".bin"
    files = {f"{'model' if end[1] == 's' else 'pytorch_model'}-0000{n}-of-00002{end}": names[n::2] for n in (1, 2)}
    files = {file: names[number::2] for number, file in enumerate(files)}
    for file, keys in files.items():
        part = {key: weights[key] for key in keys}
        save_file(part, checkpoint / file) if end == ".safetensors" else torch.save(part, checkpoint / file)
    placed = {key: file for file, keys in files.items() for key in keys}
    (checkpoint / index).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return checkpoint / max(files)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("index", INDEXES)
def test_weights_in_parts_are_resumed_from(checkpoint, sealed, index):
    expected = load_file(checkpoint / "model.safetensors")
    sharded(checkpoint, index)
    sealed(checkpoint)
    trainer = l2l_trainer(checkpoint.parent, **{**SAVING, "max_steps": 4})
    check_whole(checkpoint)
    trainer._load_from_checkpoint(str(checkpoint))
    assert all(torch.equal(value, expected[key]) for key, value in trainer.model.state_dict().items())


ELSEWHERE = ["../../outside/x.safetensors", "", ".", "..", "a/../../../outside/x", "x\0", "x" * 5000, "no", 7, ["x"]]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("part", [*ELSEWHERE, "absolute"], ids=[repr(name)[:12] for name in (*ELSEWHERE, "absolute")])
def test_an_index_names_files_beside_it_only(checkpoint, sealed, index, part):
    outside = checkpoint.parents[1] / "outside"
    outside.mkdir()
    second = sharded(checkpoint, index)
    shutil.move(second, outside / "x.safetensors")
    part = str(outside / "x.safetensors") if part == "absolute" else part
    content = json.loads((checkpoint / index).read_text())
    content["weight_map"] = {k: part if v == second.name else v for k, v in content["weight_map"].items()}
    (checkpoint / index).write_text(json.dumps(content))
    sealed(checkpoint)
    refused(checkpoint, index)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("to", ["file", "dangling", "folder", "fifo"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "adapter", "notes.txt"])
def test_links_and_pipes_are_refused(checkpoint, sealed, name, to):
    """Wherever they are: the trainer loads adapters from folders of any name."""
    outside = checkpoint.parents[1] / "outside"
    outside.mkdir()
    path = checkpoint / name
    if path.exists():
        shutil.move(path, outside / name)
    else:
        (outside / name).write_text("a file")
    sealed(checkpoint)
    if to == "fifo":
        os.mkfifo(path)  # who opened it would wait for ever
    else:
        path.symlink_to({"file": outside / name, "dangling": outside / "no", "folder": outside}[to])
    refused(checkpoint, name)


def test_a_link_in_the_place_of_the_manifest_is_refused(checkpoint):
    outside = checkpoint.parents[1] / "outside.json"
    shutil.move(checkpoint / MANIFEST, outside)
    (checkpoint / MANIFEST).symlink_to(outside)
    refused(checkpoint, MANIFEST)


def test_old_checkpoints_are_deleted_and_nothing_that_they_link_to(checkpoint):
    run, outside = checkpoint.parent, checkpoint.parents[1] / "outside"
    shutil.copytree(checkpoint, outside / "checkpoint-1")
    (run / "checkpoint-1").symlink_to(outside / "checkpoint-1")
    (run / "checkpoint-2" / "linked").symlink_to(outside)
    (run / "checkpoint-2" / "file").symlink_to(outside / "checkpoint-1" / "config.json")
    before = sorted(path.relative_to(outside) for path in outside.rglob("*"))
    with inside(run):
        rotate(run, 1, None)
    assert left_in(run) == ["checkpoint-1", "checkpoint-4"]
    assert sorted(path.relative_to(outside) for path in outside.rglob("*")) == before


# ---- what files claim


def header(text: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


TENSOR = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
HEADERS = {
    "claims a header of gigabytes": header(b"{}", 2**33),
    "claims a header of all memory": header(b"{}", 2**64 - 1),
    "claims tensors of terabytes": header(json.dumps({"weight": TENSOR}).encode()),
    "claims a shape that overflows": header(json.dumps({"weight": {**TENSOR, "shape": [2**40, 2**40]}}).encode()),
    "is nested": header(b'{"a":' * 100_000),
    "is empty": b"",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_headers_of_safetensors_are_not_believed(checkpoint, sealed, content):
    (checkpoint / "model.safetensors").write_bytes(content)
    sealed(checkpoint)
    refused(checkpoint, "model.safetensors")


TEXTS = {
    "nested": '{"weight_map": ' + "[" * 100_000,
    "nested whole": '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "a list": "[]",
    "not of text": b"\xff\xfe",
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["trainer_state.json", "config.json", *INDEXES, "l2l_plan.json"])
def test_json_that_cannot_be_read_is_refused(checkpoint, sealed, name, text):
    (checkpoint / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    sealed(checkpoint)
    refused(checkpoint, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("step", [None, "4", 4.5, [4]])
def test_a_state_without_a_step_is_refused(checkpoint, sealed, step):
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "global_step": step}))
    sealed(checkpoint)
    refused(checkpoint, "trainer_state.json")


# ---- any bytes


@SETTINGS
@given(content=st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_manifest_is_read_or_refused(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match="a checkpoint must be"):
        read_manifest(tmp_path)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


@SETTINGS
@given(data=st.data())
def test_a_manifest_of_any_values_is_read_or_refused(checkpoint, data):
    """With the SHA-256 that it has: whoever means harm can compute it."""
    from hf_l2l.checkpoint.manifest import _of_content

    content = json.loads((checkpoint / MANIFEST).read_text())
    del content["sha256"]
    name = data.draw(st.sampled_from(sorted(content)))
    files = st.dictionaries(st.text(), JSON | st.tuples(st.integers(), st.from_regex("[0-9a-f]{64}")), max_size=3)
    content[name] = data.draw(files if name == "files" else JSON)
    altered = checkpoint.parent / "altered"
    altered.mkdir(exist_ok=True)
    (altered / MANIFEST).write_text(json.dumps({**content, "sha256": _of_content(content)}))
    try:
        check_whole(altered)
    except ValueError as error:  # of which DamagedCheckpointError is one
        assert "a checkpoint must be" in str(error)


@SETTINGS
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("optimizer.pt", "rng_state.pth", "trainer_state.json", INDEXES[0])
        ),
    ],
)
@given(seed=st.integers(0, 2**32), start=st.integers(0, 400))
def test_a_file_of_any_bytes_is_read_or_refused(checkpoint, name, seed, start):
    """A file with some bytes changed, those of its header above all."""
    if name == INDEXES[0] and not (checkpoint / name).exists():
        (checkpoint / name).write_text('{"weight_map": {"a": "model.safetensors"}}')
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
