"""A checkpoint of which anything is damaged is not resumed from, and nothing has changed when that is told."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_l2l.checkpoint.finding import check_whole, checkpoint_to_resume
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError
from saving import BEST, At, saving, trained
from tiers import more, times
from training import SAVING, assert_same_run, plain_trainer

OURS = (
    *("config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"),
    *("rng_state_data.pth", "training_args.bin", MANIFEST),
)
READ_OF_ANY = OURS[:6]
"""Those that are read when a training is resumed, which transformers' Trainer writes, too."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two trainings, and one of transformers' Trainer, with checkpoints at two and four steps."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for name, options in {"ours": {"seed": 1}, "other": {"seed": 2}, "plain": {"make": plain_trainer}}.items():
        found[name] = trained(folder / name, **SAVING, **options)
    assert sorted(path.name for path in (folder / "ours" / "checkpoint-4").iterdir()) == sorted(OURS)
    return found


def folder_of(made: Any) -> Path:
    return Path(made.args.output_dir)


@pytest.fixture
def run(runs: dict[str, Any], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(folder_of(runs["ours"]), tmp_path / "run"))


def cut(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    for length in {0, 1, 8, len(content) // 2, len(content) - 2} - {len(content)}:
        path.write_bytes(content[:length])
        yield
    path.write_bytes(content)


def flipped(path: Path) -> Iterator[None]:
    content, draw = path.read_bytes(), random.Random(path.name)
    for _ in range(times(5, 64)):
        changed = bytearray(content)
        changed[draw.randrange(len(content) - 1)] ^= 1 << draw.randrange(8)  # the last byte of JSON is white space
        path.write_bytes(changed)
        yield
    path.write_bytes(content)


def swapped(path: Path, *others: Path) -> Iterator[None]:
    content = path.read_bytes()
    for other in others:
        if other.read_bytes() != content:
            shutil.copyfile(other, path)
            yield
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", MANIFEST, *more(*OURS[:2], *OURS[3:-1])])
def test_each_file_is_checked(run, runs, name):
    """Cut, with flipped bits, from another step, from another training at the same step, and gone."""
    checkpoint = run / "checkpoint-4"
    path = checkpoint / name
    others = (run / "checkpoint-2" / name, folder_of(runs["other"]) / "checkpoint-4" / name)
    damages, found = {"cut": cut(path), "flipped": flipped(path), "swapped": swapped(path, *others)}, []
    for kind, damage in damages.items():
        for _ in damage:
            with pytest.raises(DamagedCheckpointError) as caught:
                check_whole(checkpoint)
            # Of a whole manifest of another checkpoint, some file differs.
            assert caught.value.file == name or (kind, name) == ("swapped", MANIFEST)
            found.append(kind)
    assert found.count("flipped") == times(5, 64) and found.count("cut") >= 4
    assert found.count("swapped") == {"config.json": 0, "scheduler.pt": 1, "training_args.bin": 1}.get(name, 2)
    assert check_whole(checkpoint) is not None
    path.unlink()
    if name != MANIFEST:
        with pytest.raises(DamagedCheckpointError, match="is missing"):
            check_whole(checkpoint)


def damaged(run: Path, runs: dict[str, Any], name: str, how: str) -> None:
    path = run / "checkpoint-4" / name
    if how == "missing":
        path.unlink()
    elif how == "swapped":
        other = run / "checkpoint-2" if name == "scheduler.pt" else folder_of(runs["other"]) / "checkpoint-4"
        shutil.copyfile(other / name, path)
    else:
        next({"cut": cut, "flipped": flipped}[how](path))


HOW = ("flipped", "swapped", "missing", "cut")
SAME = {("config.json", "swapped"), (MANIFEST, "missing")}
"""That is the same in both trainings; and without a manifest it is one of transformers' Trainer, see below."""
FEW = list(zip(OURS[1:5], HOW, strict=True))
ALL = [each for each in itertools.product(OURS, HOW) if each not in {*SAME, *FEW}]


@pytest.mark.parametrize(("name", "how"), [*FEW, *more(*ALL)])
def test_nothing_has_changed_when_a_damaged_one_is_refused(run, runs, caplog, name, how):
    """By its folder, it is refused; as the last one, the one before it is taken, with one warning."""
    damaged(run, runs, name, how)
    trainer = saving(run, **SAVING)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(DamagedCheckpointError) as caught:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert caught.value.file == name or name == MANIFEST
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.optimizer is None and trainer.state.global_step == 0
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    with caplog.at_level("WARNING", "hf_l2l"):
        assert checkpoint_to_resume(True, trainer.args) == str(run / "checkpoint-2")
    (said,) = caplog.messages
    assert said.startswith(f"{run / 'checkpoint-4'} is not resumed from")


def test_the_older_one_is_resumed_from_and_the_damaged_one_is_replaced(run, runs):
    damaged(run, runs, "optimizer.pt", "flipped")
    assert_same_run(trained(run, seed=1, resumes=True, **SAVING), runs["ours"])
    assert check_whole(run / "checkpoint-4") is not None


@pytest.mark.parametrize("name", ["model.safetensors", *more("config.json", *READ_OF_ANY[2:])])
def test_one_of_transformers_trainer_is_checked_as_far_as_can_be(runs, tmp_path, name):
    """It has no manifest: what is cut off is noticed, and what nothing can be loaded without."""
    run = Path(shutil.copytree(folder_of(runs["plain"]), tmp_path / "run"))
    checkpoint = run / "checkpoint-4"
    assert check_whole(checkpoint) is None
    for _ in cut(checkpoint / name):
        with pytest.raises(DamagedCheckpointError) as caught:
            check_whole(checkpoint)
        assert caught.value.file == name
        args = SimpleNamespace(output_dir=str(run), should_save=False)
        assert checkpoint_to_resume(True, args) == str(run / "checkpoint-2")
    (checkpoint / name).unlink()
    if name in ("model.safetensors", "trainer_state.json"):
        with pytest.raises(DamagedCheckpointError, match="is missing"):
            check_whole(checkpoint)


def test_the_best_checkpoint_is_checked_before_it_is_loaded(tmp_path):
    at_the_end: dict[str, torch.Tensor] = {}

    def damage() -> None:
        at_the_end.update({key: value.clone() for key, value in made.model.state_dict().items()})
        next(flipped(tmp_path / "checkpoint-1" / "model.safetensors"))

    options = {**BEST, "metric_for_best_model": "score", "greater_is_better": True}
    made = saving(tmp_path, **options, callbacks=[At("on_save", 4, damage)])
    scores = itertools.count(4, -1)
    made.compute_metrics = lambda predictions: {"score": next(scores)}
    with pytest.raises(DamagedCheckpointError) as caught:
        made.train()
    assert caught.value.file == "model.safetensors" and caught.value.folder == tmp_path / "checkpoint-1"
    assert all(torch.equal(value, at_the_end[key]) for key, value in made.model.state_dict().items())
