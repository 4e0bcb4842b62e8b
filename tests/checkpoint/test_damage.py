"""A checkpoint of which anything is damaged is not resumed from, and nothing has changed when that is told."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_l2l.checkpoint.finding import check_whole, checkpoint_to_resume
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError
from saving import BEST, At, saving, trained
from tiers import more
from training import SAVING, assert_same_run, plain_trainer

READ_OF_ANY = (
    *("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "config.json"),
)
"""Files that are read when a training is resumed, which transformers' Trainer writes, too."""


@pytest.fixture
def run(whole: Any, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    names = {path.name for path in (Path(whole.args.output_dir) / "checkpoint-4").iterdir()}
    assert names == {*READ_OF_ANY, "rng_state_data.pth", "training_args.bin", MANIFEST}
    return Path(shutil.copytree(whole.args.output_dir, tmp_path / "run"))


def damaged(path: Path, how: str) -> None:
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
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(DamagedCheckpointError) as caught:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert caught.value.file == name
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.optimizer is None and trainer.state.global_step == 0
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    with caplog.at_level("WARNING", "hf_l2l"):
        assert checkpoint_to_resume(True, trainer.args) == str(run / "checkpoint-3")
    (said,) = caplog.messages
    assert said.startswith(f"{run / 'checkpoint-4'} is not resumed from")


def test_the_older_one_is_resumed_from_and_the_damaged_one_is_replaced(run, whole):
    damaged(run / "checkpoint-4" / "optimizer.pt", "flipped")
    assert_same_run(trained(run, resumes=True), whole)
    assert check_whole(run / "checkpoint-4") is not None


def test_one_of_transformers_trainer_is_checked_as_far_as_can_be(tmp_path):
    """It has no manifest: what is cut off is noticed, and what nothing can be loaded without."""
    trained(tmp_path, plain_trainer, **SAVING)
    checkpoint = tmp_path / "checkpoint-4"
    assert check_whole(checkpoint) is None
    for name in READ_OF_ANY:
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

    def damage() -> None:
        at_the_end.update({key: value.clone() for key, value in made.model.state_dict().items()})
        damaged(tmp_path / "checkpoint-1" / "model.safetensors", "flipped")

    options = {**BEST, "max_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    made = saving(tmp_path, **options, callbacks=[At("on_save", 2, damage)])
    scores = itertools.count(4, -1)
    made.compute_metrics = lambda predictions: {"score": next(scores)}
    with pytest.raises(DamagedCheckpointError) as caught:
        made.train()
    assert caught.value.file == "model.safetensors" and caught.value.folder == tmp_path / "checkpoint-1"
    assert all(torch.equal(value, at_the_end[key]) for key, value in made.model.state_dict().items())
