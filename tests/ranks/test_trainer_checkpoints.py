"""Checkpoints of several ranks: whole or absent, and resumed with as many ranks, fewer, or more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.checkpoint.staging import CheckpointSaveError
from rank_pool import digest
from rank_trainer import SAME, SAVED, failed_to_save, trained
from training import left_in


@pytest.mark.parametrize("kind", ["l2l", "hf"])
def test_a_checkpoint_has_what_each_rank_saves(pool, tmp_path, kind):
    """As that of transformers' Trainer, and a manifest."""
    options = SAVED if kind == "l2l" else {k: v for k, v in SAVED.items() if k != "eps_update"}
    found = pool(2).run(trained, "bert", kind, str(tmp_path), options)
    assert found[0]["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    plain = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    plain |= {"config.json", "trainer_state.json", "training_args.bin"}
    assert plain <= names and (MANIFEST in names) == (kind == "l2l")
    assert not [name for name in left_in(tmp_path) if not name.startswith("checkpoint-")]
    state = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    assert len(state) > 10 and all({"exp_avg", "exp_avg_sq"} <= set(each) for each in state.values())


@pytest.mark.slow  # so do those whose rows are drawn, too
def test_resumed_by_as_many_ranks_it_has_the_bits_of_an_unbroken_run(pool, tmp_path):
    """Dropout included: each rank has its generators."""
    whole = pool(2).run(trained, "dropout", "l2l", str(tmp_path / "whole"), SAVED)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    found = pool(2).run(trained, "dropout", "l2l", str(tmp_path / "next"), SAVED, 70, str(checkpoint))
    for rank in range(2):
        for what in SAME:
            assert found[rank][what] == whole[rank][what], what


def test_a_resume_takes_the_memory_of_one_process(pool, tmp_path):
    """The first rank alone loads weights, whose values win when the model is attached; and no rank has all of the
    optimizer's state in memory of its own, since the file is mapped."""
    pool(2).run(trained, "bert", "l2l", str(tmp_path), {**SAVED, "max_steps": 2})
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), SAVED, 70, True)
    assert [each["loaded_weights"] for each in found] == [1, 0]
    assert [each["mapped"] for each in found] == [[True], [True]]


@pytest.mark.parametrize("save_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_rows_and_collators_draw_goes_on_within_an_epoch(pool, tmp_path, save_steps):
    """Each rank has its own generators for its batches, and the loss that has not been logged yet."""
    options = {**SAVED, "save_steps": save_steps, "max_steps": 6, "logging_steps": 3}
    whole = pool(2).run(trained, "drawing", "l2l", str(tmp_path / "whole"), options)
    checkpoint = tmp_path / "whole" / f"checkpoint-{2 * save_steps}"
    assert {"rng_state_data_0.pth", "rng_state_data_1.pth"} <= {path.name for path in checkpoint.iterdir()}
    found = pool(2).run(trained, "drawing", "l2l", str(tmp_path / "next"), options, 70, str(checkpoint))
    for rank in range(2):
        for what in SAME:
            assert found[rank][what] == whole[rank][what], what
        assert found[rank]["losses"][-1] == whole[rank]["losses"][-1]


def test_another_number_of_ranks_has_other_batches_and_is_told(pool, tmp_path):
    pool(2).run(trained, "bert", "l2l", str(tmp_path), {**SAVED, "max_steps": 2})
    args = {**SAVED, "gradient_accumulation_steps": 2}
    found = pool(1).run(trained, "bert", "l2l", str(tmp_path), args, 70, str(tmp_path / "checkpoint-2"))
    assert "has no rng_state_data.pth" in found[0]["logged"]


def saved_apart(folder: str) -> str:
    """A training whose second rank does not see what the first one writes, as on a host with a disk of its own."""
    is_dir, own = Path.is_dir, distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: is_dir(path) and (own == 0 or "_l2l-saving" not in path.name))
        with pytest.raises(CheckpointSaveError) as error:
            trained("bert", "l2l", folder, SAVED)
    return str(error.value)


def test_hosts_without_a_common_file_system_are_told(pool, tmp_path):
    for text in pool(2).run(saved_apart, str(tmp_path)):
        assert "a folder that rank 1 does not see, where all hosts need one file system" in text
    assert left_in(tmp_path) == []


def test_on_devices_the_state_is_loaded_to_the_host(pool, tmp_path):
    """transformers loads it to the device of each of several processes. Each rank has its device's generator, too."""
    options = {**SAVED, "use_cpu": False, "l2l_devices": "1", "per_device_train_batch_size": 2}
    whole = pool(2, sim=True).run(trained, "dropout", "l2l", str(tmp_path / "run"), options)
    assert {"rng_state_sim_0.pth", "rng_state_sim_1.pth"} <= {
        p.name for p in (tmp_path / "run/checkpoint-2").iterdir()
    }
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    found = pool(2, sim=True).run(trained, "dropout", "l2l", str(tmp_path / "next"), options, 70, checkpoint)
    for rank, each in enumerate(found):
        assert each["loaded_to"] == ["cpu"]
        for what in SAME:
            assert each[what] == whole[rank][what], what


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(pool, tmp_path, before, after):
    """With as many rows in a step, whichever rank has them: the same to rounding."""
    rows = {1: {"gradient_accumulation_steps": 2}, 2: {}}
    whole = pool(1).run(trained, "bert", "l2l", str(tmp_path / "whole"), {**SAVED, **rows[1]})[0]
    pool(before).run(trained, "bert", "l2l", str(tmp_path / "run"), {**SAVED, **rows[before]})
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    found = pool(after).run(trained, "bert", "l2l", str(tmp_path / "next"), {**SAVED, **rows[after]}, 70, checkpoint)
    for each in found:
        assert each["step"] == 4
        assert each["values"] == pytest.approx(whole["values"], rel=1e-3, abs=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("saves", "resumes"), [("l2l", "hf"), ("hf", "l2l")])
def test_checkpoints_go_both_ways(pool, tmp_path, saves, resumes):
    """Under transformers' Trainer with DistributedDataParallel, and back."""
    plain = {k: v for k, v in SAVED.items() if k != "eps_update"}
    options = {"l2l": SAVED, "hf": plain}
    whole = pool(2).run(trained, "dropout", "hf", str(tmp_path / "whole"), plain)
    pool(2).run(trained, "dropout", saves, str(tmp_path / "run"), options[saves])
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    found = pool(2).run(trained, "dropout", resumes, str(tmp_path / "next"), options[resumes], 70, checkpoint)
    assert [each["weights"] for each in found] == [each["weights"] for each in whole]


@pytest.mark.slow  # with fewer checkpoints: `test_with_a_limit_of_one_the_best_is_left`
def test_the_best_and_the_newest_are_kept(pool, tmp_path):
    options = {
        **SAVED,
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), options)
    best = {each["best"] for each in found}
    assert len(best) == 1 and Path(best.pop()).is_dir()
    assert len(found[0]["checkpoints"]) == 2 and found[0]["weights"] == found[1]["weights"]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == found[0]["best"]


def test_the_newest_whole_one_is_found_by_all(pool, tmp_path):
    """The newest one is damaged: all ranks go on from the one before."""
    whole = pool(2).run(trained, "bert", "l2l", str(tmp_path), SAVED)
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"damaged")
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), SAVED, 70, True)
    assert [each["weights"] for each in found] == [each["weights"] for each in whole]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("where", [(0, "room"), (0, "weights"), (1, "weights"), (1, "generators"), (0, "commit")])
def test_a_checkpoint_that_one_rank_cannot_write_fails_in_all(pool, tmp_path, where):
    """Nothing of it is left, the one before is there, and the same ranks can train again."""
    for rank, found in enumerate(pool(2).run(failed_to_save, str(tmp_path), *where)):
        assert "a checkpoint must be written as a whole" in found["error"]
        assert "No space left on device" in found["error"]
        assert (f", in rank {where[0]}, while saving" in found["error"]) == (rank != where[0])
        assert found["left"] == ["checkpoint-2"] and found["step"] == 4
        assert found["then"] == ["checkpoint-2", "checkpoint-4"]


def test_with_a_limit_of_one_the_best_is_left(pool, tmp_path):
    options = {
        **SAVED,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    (tmp_path / "checkpoint-1").mkdir()  # of somebody else
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), options)
    assert found[0]["checkpoints"] == ["checkpoint-1", "checkpoint-2"]
    assert {each["best"] for each in found} == {str(tmp_path / "checkpoint-2")}
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["named"] == digest(*(saved[name] for name in sorted(saved)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"auto_find_batch_size": True}, "several ranks train without auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "several ranks train without enable_jit_checkpoint"),
        ({"save_on_each_node": True}, "several ranks train without save_on_each_node"),
    ],
)
def test_what_one_rank_would_do_alone_is_refused(pool, tmp_path, options, text):
    with pytest.raises(AssertionError, match=f"ValueError: {text}"):
        pool(2).run(trained, "bert", "l2l", str(tmp_path), {**SAVED, **options})
