"""A checkpoint of which anything is damaged is not resumed from, and nothing has changed when that is told."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_l2l.checkpoint.finding import check_whole, checkpoint_to_resume
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError, read_manifest
from training import SAVING, assert_same_run, l2l_trainer, plain_trainer, tiny_bert

OURS = (
    *("config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"),
    *("rng_state_data.pth", "training_args.bin", MANIFEST),
)
READ_OF_ANY = OURS[:6]
"""Those that are read when a training is resumed, which transformers' Trainer writes, too."""
READ = OURS[:-2]
"""Those that are read when a training is resumed."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two trainings, and of one of transformers' Trainer, with checkpoints at two and four steps."""
    folder = tmp_path_factory.mktemp("trained")
    for name, make, seed in (("ours", l2l_trainer, 1), ("other", l2l_trainer, 2), ("plain", plain_trainer, 1)):
        make(folder / name, seed=seed, **SAVING).train()
    found = {name: folder / name for name in ("ours", "other", "plain")}
    assert tuple(sorted(path.name for path in (found["ours"] / "checkpoint-4").iterdir())) == tuple(sorted(OURS))
    return found


@pytest.fixture
def run(trained: dict[str, Path], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(trained["ours"], tmp_path / "run"))


def cut(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    for length in {0, 1, 8, len(content) // 2, len(content) - 2} - {len(content)}:
        path.write_bytes(content[:length])
        yield
    path.write_bytes(content)


def flipped(path: Path, times: int = 64) -> Iterator[None]:
    content, draw = path.read_bytes(), random.Random(path.name)
    for _ in range(times):
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


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", OURS)
def test_each_file_is_checked(run, trained, name):
    """Cut, with flipped bits, from another step, from another training at the same step, and gone."""
    checkpoint = run / "checkpoint-4"
    path = checkpoint / name
    others = (trained["ours"] / "checkpoint-2" / name, trained["other"] / "checkpoint-4" / name)
    damages, found = {"cut": cut(path), "flipped": flipped(path), "swapped": swapped(path, *others)}, []
    for kind, damage in damages.items():
        for _ in damage:
            with pytest.raises(DamagedCheckpointError) as caught:
                check_whole(checkpoint)
            # Of a whole manifest of another checkpoint, some file differs.
            assert caught.value.file == name or (kind, name) == ("swapped", MANIFEST)
            found.append(kind)
    assert found.count("flipped") == 64 and found.count("cut") >= 4
    assert found.count("swapped") == {"config.json": 0, "scheduler.pt": 1, "training_args.bin": 1}.get(name, 2)
    assert check_whole(checkpoint) is not None
    path.unlink()
    if name != MANIFEST:
        with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
            check_whole(checkpoint)


def damaged(run: Path, trained: dict[str, Path], name: str, how: str) -> None:
    path = run / "checkpoint-4" / name
    if how == "missing":
        path.unlink()
    elif how == "swapped":
        other = trained["ours"] / "checkpoint-2" if name == "scheduler.pt" else trained["other"] / "checkpoint-4"
        shutil.copyfile(other / name, path)
    else:
        next({"cut": cut, "flipped": flipped}[how](path))


SAME = {("config.json", "swapped"), (MANIFEST, "missing")}
"""That is the same in both trainings; and without a manifest it is one of transformers' Trainer, see below."""
CASES = [(name, how) for name in OURS for how in ("missing", "cut", "flipped", "swapped") if (name, how) not in SAME]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_nothing_has_changed_when_a_damaged_one_is_refused(run, trained, caplog, name, how):
    """By its folder, it is refused; as the last one, the one before it is taken, with one warning."""
    damaged(run, trained, name, how)
    trainer = l2l_trainer(run, seed=1, **SAVING)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(DamagedCheckpointError, match="resume from another one, or copy") as caught:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert caught.value.file == name or name == MANIFEST
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.optimizer is None and trainer.state.global_step == 0
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    with caplog.at_level("WARNING", "hf_l2l"):
        assert checkpoint_to_resume(True, trainer.args) == str(run / "checkpoint-2")
    (said,) = caplog.records
    assert f"{run / 'checkpoint-4'} is not resumed from, but {run / 'checkpoint-2'} is: " in said.message


def test_the_older_one_is_resumed_from(run, trained, tmp_path):
    damaged(run, trained, "optimizer.pt", "flipped")
    resumed = l2l_trainer(run, seed=1, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    whole = l2l_trainer(tmp_path / "whole", seed=1, **SAVING)
    whole.train()
    assert_same_run(resumed, whole)
    assert check_whole(run / "checkpoint-4") is not None  # replaced


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", READ_OF_ANY)
def test_one_of_transformers_trainer_is_checked_as_far_as_can_be(trained, tmp_path, name):
    """It has no manifest: what is cut off is noticed, and what nothing can be loaded without."""
    run = Path(shutil.copytree(trained["plain"], tmp_path / "run"))
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
        with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
            check_whole(checkpoint)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.pt", "no optimizer.pt: the optimizer's state and the schedule of the learning rate begin anew"),
        ("scheduler.pt", "no scheduler.pt: the optimizer's state and the schedule of the learning rate begin anew"),
        ("rng_state.pth", "no rng_state.pth: random numbers begin anew"),
        (MANIFEST, f"no {MANIFEST}: whether its files are as they were saved is not known"),
    ],
)
def test_what_is_not_loaded_is_said(trained, tmp_path, caplog, name, said):
    checkpoint = Path(shutil.copytree(trained["ours"], tmp_path / "run")) / "checkpoint-2"
    (checkpoint / MANIFEST).unlink()
    (checkpoint / name).unlink(missing_ok=True)
    with caplog.at_level("WARNING", "hf_l2l"):
        checkpoint_to_resume(str(checkpoint), SimpleNamespace(output_dir=str(tmp_path), should_save=False))
    assert said in caplog.text
    resumed = l2l_trainer(tmp_path / "resumed", model=tiny_bert(), **SAVING)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    # transformers loads the state of the optimizer only if there is one of the schedule, too.
    assert resumed.state.global_step == 4


def test_the_best_checkpoint_is_checked_before_it_is_loaded(tmp_path):
    options = {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = l2l_trainer(tmp_path, **options)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    next(flipped(best / "model.safetensors"))
    with pytest.raises(DamagedCheckpointError, match="model.safetensors has another content"):
        trainer._load_best_model()
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert read_manifest(best) is not None
