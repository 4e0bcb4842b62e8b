"""Which checkpoint a training goes on from, what it says of it, and that it goes on as if it had never stopped."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf

from hf_l2l.checkpoint import manifest as manifests
from hf_l2l.checkpoint.finding import PassedOver, check_whole, newest_whole, rotate
from hf_l2l.checkpoint.manifest import MANIFEST, check_files, read_manifest, write_manifest
from runs import assert_same_run
from saving import BEST, At, assert_saved, saving, steps_in, trained
from training import StopAt, inner_optimizer, left_in, logs, plain_trainer, rows, tiny_bert

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
]


@pytest.fixture
def parts(whole: Any, tmp_path: Path) -> Path:
    """A folder with the checkpoint of its second step."""
    shutil.copytree(Path(whole.args.output_dir) / "checkpoint-2", tmp_path / "parts" / "checkpoint-2")
    return tmp_path / "parts"


def test_the_last_complete_one_is_gone_on_from(whole, parts, caplog):
    """What was interrupted is renamed, and takes no place among those that are kept; one that the program has saved
    without the rest is not."""
    whole.model.save_pretrained(parts / "checkpoint-1")
    for name in ("checkpoint-3", "checkpoint-9", "_interrupted-checkpoint-9"):
        (parts / name).mkdir()
    shutil.copy(parts / "checkpoint-2" / "model.safetensors", parts / "checkpoint-3")
    with caplog.at_level("WARNING", "hf_l2l"):
        resumed = trained(parts, resumes=True, save_total_limit=2)
    assert_same_run(resumed, whole)
    assert "interrupted in checkpoint-3 (renamed to _interrupted-checkpoint-3)" in caplog.text
    interrupted = [f"_interrupted-checkpoint-{name}" for name in ("3", "9", "9-2")]
    assert left_in(parts) == [*interrupted, "checkpoint-1", "checkpoint-3", "checkpoint-4"]


def test_without_a_complete_one_nothing_is_gone_on_from_or_renamed(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):  # transformers' own
        trained(tmp_path, resumes=True)
    (tmp_path / "checkpoint-3").mkdir()
    for state in (None, '{"epoch": 1.'):
        if state:
            (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(state)
        with pytest.raises(ValueError, match="interrupted in checkpoint-3"):
            trained(tmp_path, resumes=True)
    trained(tmp_path, max_steps=1, save_steps=2)
    assert (tmp_path / "checkpoint-3").is_dir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(ValueError, match="no folder"):
            trained(tmp_path, resumes=tmp_path / name)


def test_a_folder_that_is_a_link_is_resumed_from_only_if_it_is_named(whole, parts, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-2").symlink_to(parts / "checkpoint-2")
    with pytest.raises(ValueError, match="in checkpoint-2 it is a link"):
        trained(run, resumes=True)
    assert_same_run(trained(run, resumes=run / "checkpoint-2"), whole)


def test_what_is_not_there_is_told_and_begins_anew(parts, tmp_path, caplog):
    """Of a checkpoint of transformers' Trainer, whose weights may be in a folder for a trainer that looks there."""
    (parts / "checkpoint-2" / MANIFEST).unlink()
    (parts / "checkpoint-2" / "rng_state_data.pth").unlink()
    torch.save(torch.get_rng_state(), parts / "checkpoint-2" / "rng_state_sim.pth")  # of another device
    run = Path(shutil.copytree(parts, tmp_path / "run"))
    (run / "checkpoint-2" / "scheduler.pt").unlink()
    with caplog.at_level("WARNING", "hf_l2l"):
        resumed = trained(run, resumes=True)
    said = [each.message for each in caplog.records if (each.name, each.levelname) == ("hf_l2l", "WARNING")]
    assert [re.search("has no (.*?):", each)[1] for each in said] == ["scheduler.pt", MANIFEST, "rng_state_data.pth"]
    rates = [entry["learning_rate"] for entry in logs(resumed) if "loss" in entry]
    assert rates[2] == rates[0], "the schedule begins anew"
    weights = parts / "checkpoint-2" / "0_Transformer" / "model.safetensors"
    weights.parent.mkdir()
    (parts / "checkpoint-2" / "model.safetensors").rename(weights)
    assert check_whole(parts / "checkpoint-2") is None


def test_a_data_set_of_another_length_is_told(parts, caplog):
    longer = saving(parts)
    longer.train_dataset = rows(96)
    longer.train(resume_from_checkpoint=True)
    assert "rows of train_dataset (got 96, and the checkpoint has 48)" in caplog.text
    assert longer.state.global_step == 4


def test_a_finished_training_makes_no_further_step(whole, tmp_path, caplog):
    """It says so, and no weight changes. It may be asked for fewer steps than it has made."""
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    checkpoint, events = tmp_path / "checkpoint-4", list[str]()
    again = saving(tmp_path, max_steps=2)
    for name in ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_save", "on_train_end"):
        again.add_callback(At(name, None, lambda name=name: events.append(name)))
    with caplog.at_level("WARNING", "hf_l2l"):
        result = again.train(resume_from_checkpoint=True)
    (said,) = [each.message for each in caplog.records if (each.name, each.levelname) == ("hf_l2l", "WARNING")]
    assert f"{checkpoint} has made 4 steps of 2" in said
    assert events == ["on_train_begin", "on_train_end"]
    assert result.global_step == again.state.global_step == 4 and result.training_loss == 0
    assert "train_runtime" in result.metrics
    assert_saved(again, checkpoint)
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    found = inner_optimizer(again).state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], state["exp_avg"]) for i, state in moments.items())


def test_the_best_model_of_a_finished_one_is_loaded(tmp_path, caplog):
    for resumes in (None, True):
        made = saving(tmp_path, **BEST, max_steps=1)
        caplog.clear()
        with caplog.at_level("WARNING", "hf_l2l"):
            made.train(resume_from_checkpoint=resumes)
        assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
        assert_saved(made, tmp_path / "checkpoint-1")
        assert made.state.global_step == 1 and ("no further step is made" in caplog.text) is (resumes is True)


def test_equal_runs_have_equal_states(tmp_path):
    """One that was interrupted, too: nothing in them is of their times."""
    options = {"gradient_accumulation_steps": 2, "ubatch_size": 3, "stash": "host"}
    options |= {"l2l_nonfinite": "skip", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    whole = trained(tmp_path / "whole", **options)
    trained(tmp_path / "parts", **options, callbacks=[StopAt(1)])
    assert_same_run(trained(tmp_path / "parts", **options, resumes=True), whole)

    def state_of(name: str) -> dict[str, Any]:
        written = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        for entry in written["log_history"]:
            for timed in ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"):  # by transformers
                entry.pop(timed, None)
        return written

    state = state_of("whole")
    assert state == state_of("parts") and state["stateful_callbacks"].keys() == {"TrainerControl"}
    assert {key for entry in state["log_history"] for key in entry} == {
        *("epoch", "eval_loss", "grad_norm", "learning_rate", "loss", "skipped_steps", "step")
    }


def test_weights_loaded_late_are_used_and_the_loaded_file_stays_as_it_was(tmp_path):
    other = tiny_bert(layers=2)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    other.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    short = {"save_strategy": "no", "max_steps": 2}
    made = saving(tmp_path / "l2l", **short)
    made.evaluate()
    made.model.load_state_dict(other.state_dict())
    loaded = [hf.BertForSequenceClassification.from_pretrained(tmp_path / "model") for _ in range(2)]
    plain = saving(tmp_path / "plain", plain_trainer, model=loaded[0], **short)
    assert made.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for each in (made, plain, saving(tmp_path / "again", model=loaded[1], **short)):
        torch.manual_seed(0)
        each.train()
    assert logs(made)[-2] == logs(plain)[-2]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


# ---- which one is found, among whole, damaged and unfinished ones of one or two trainings


SECONDS = itertools.count(1)
"""Each save is a second after the one before."""


def save(run: Path, step: int, of: str | None = "a") -> Path:
    """A checkpoint of the training `of`; None: of transformers' Trainer."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of step {step}")
    (folder / "trainer_state.json").write_text("{}")
    if of is not None:
        with patch.object(manifests.time, "time", lambda: float(next(SECONDS))):
            write_manifest(folder, step, of, {})
    return folder


def newest(run: Path) -> tuple[Path | None, list[PassedOver]]:
    """Without a look at the form of the files, which are none of a trainer."""

    def check(checkpoint: Path) -> None:
        manifest = read_manifest(checkpoint)
        if manifest is not None:
            check_files(checkpoint, manifest)

    return newest_whole(run, check)


def test_damaged_ones_are_passed_over_with_their_reasons(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert newest(tmp_path / "no") == (None, [])
    for step, name in ((3, "model.safetensors"), (4, MANIFEST)):
        (save(tmp_path, step) / name).write_text("other")
    found, passed_over = newest(tmp_path)
    assert found == tmp_path / "checkpoint-2"
    reasons = {each.folder.name: each.reason.partition(" ")[0] for each in passed_over}
    assert reasons == {"checkpoint-4": MANIFEST, "checkpoint-3": "model.safetensors"}


def test_those_of_the_other_trainer_count_by_their_time(tmp_path):
    """A training may go on with the other one; what it has not finished is passed over."""
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2, of=None) / "trainer_state.json").write_text('{"epoch": 1.')
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-1" and passed_over.is_interrupted
    save(tmp_path, 3)
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-3"
    theirs = save(tmp_path, 6, of=None)
    assert newest(tmp_path)[0] == theirs
    for step, at in ((1, 0.1), (2, 0.2), (6, 0.5)):  # ours is saved at second 1 or later
        os.utime(tmp_path / f"checkpoint-{step}" / "trainer_state.json", (at, at))
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-3"
    (tmp_path / "checkpoint-3" / "model.safetensors").unlink()
    assert newest(tmp_path)[0] == theirs


def test_of_two_trainings_the_later_one_counts(tmp_path):
    save(tmp_path, 500, of="a")
    save(tmp_path, 10, of="b")
    assert newest(tmp_path)[0] == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "model.safetensors").unlink()
    found, (passed_over,) = newest(tmp_path)
    assert found == tmp_path / "checkpoint-500" and passed_over.reason == "model.safetensors is missing"


def test_links_are_none_and_only_what_is_newer_is_told_of(tmp_path):
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-3").write_text("a file")
    (save(tmp_path, 2) / MANIFEST).write_text("other")
    (tmp_path / "checkpoint-4").symlink_to(save(tmp_path / "elsewhere", 4))
    for name in ("checkpoint-2/trainer_state.json", "checkpoint-4", "elsewhere/checkpoint-4/trainer_state.json"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    found, passed_over = newest(tmp_path)
    assert found is None and [each.folder.name for each in passed_over] == ["checkpoint-4", "checkpoint-2"]
    assert passed_over[0].reason == "it is a link"
    save(tmp_path, 1)
    assert newest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_a_newer_version_is_told(tmp_path):
    with patch.object(manifests, "FORMAT", 2):
        save(tmp_path, 1)
    with pytest.raises(ValueError, match="upgrade hf_l2l"):
        newest(tmp_path)


def test_old_ones_are_deleted_but_the_best(tmp_path):
    for limit, kept in ((0, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [1, 4]), (2, [1, 4])):
        run = tmp_path / str(limit)
        best, *_ = [save(run, step) for step in (1, 2, 3, 4)]
        rotate(run, limit, best if limit in (1, 2) else None)
        assert steps_in(run) == kept


def test_only_whole_ones_of_ours_are_deleted_and_nothing_that_they_link_to(tmp_path):
    save(tmp_path, 1, of=None)
    (save(tmp_path, 2) / MANIFEST).write_text("damaged")
    outside = save(tmp_path / "elsewhere", 5)
    (tmp_path / "checkpoint-5").symlink_to(outside)
    for step in (3, 4, 6):
        (save(tmp_path, step) / "linked").symlink_to(outside)
        (tmp_path / f"checkpoint-{step}" / "file").symlink_to(outside / "model.safetensors")
    before = sorted(outside.rglob("*"))
    rotate(tmp_path, 1, None)
    assert steps_in(tmp_path) == [1, 2, 5, 6] and sorted(outside.rglob("*")) == before
    assert not list(tmp_path.glob("_l2l-removing-*"))
