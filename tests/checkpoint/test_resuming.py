"""Which checkpoint a training goes on from, what it says of it, and that it goes on as if it had never stopped."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError
from runs import assert_same_run
from saving import BEST, assert_saved, saving, trained
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


# ---- the folder


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


def test_links_are_named_and_never_followed(whole, parts, tmp_path):
    """A folder that is one may be named; a file that is one is damage."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-2").symlink_to(parts / "checkpoint-2")
    with pytest.raises(ValueError, match="in checkpoint-2 it is a link"):
        trained(run, resumes=True)
    assert_same_run(trained(run, resumes=run / "checkpoint-2"), whole)
    for name in ("config.json", MANIFEST):
        file = parts / "checkpoint-2" / name
        file.rename(tmp_path / name).chmod(0o600)
        file.symlink_to(tmp_path / name)
        with pytest.raises(DamagedCheckpointError) as told:
            check_whole(parts / "checkpoint-2")
        assert told.value.file == name


# ---- what is said


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


def counted(counts: Counter[str]) -> hf.TrainerCallback:
    """Counts the events of a training."""
    names = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_save", "on_train_end")
    calls = {name: lambda *_, name=name, **__: counts.update([name]) for name in names}
    found: hf.TrainerCallback = type("Counted", (hf.TrainerCallback,), calls)()
    return found


def test_a_finished_training_makes_no_further_step(whole, tmp_path, caplog):
    """It says so, and no weight changes. It may be asked for fewer steps than it has made."""
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    checkpoint, events = tmp_path / "checkpoint-4", Counter[str]()
    again = saving(tmp_path, callbacks=[counted(events)], max_steps=2)
    with caplog.at_level("WARNING", "hf_l2l"):
        result = again.train(resume_from_checkpoint=True)
    (said,) = [each.message for each in caplog.records if (each.name, each.levelname) == ("hf_l2l", "WARNING")]
    assert f"{checkpoint} has made 4 steps of 2" in said
    assert events == {"on_train_begin": 1, "on_train_end": 1}
    assert result.global_step == again.state.global_step == 4 and result.training_loss == 0
    assert "train_runtime" in result.metrics
    assert_saved(again, checkpoint)
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    found = inner_optimizer(again).state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], state["exp_avg"]) for i, state in moments.items())


class _FirstIsBest(hf.TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


def test_the_best_model_of_a_finished_one_is_loaded(tmp_path, caplog):
    for resumes, steps in ((None, 1), (True, 1)):
        made = saving(tmp_path, **BEST, max_steps=steps, callbacks=[_FirstIsBest()])
        caplog.clear()
        with caplog.at_level("WARNING", "hf_l2l"):
            made.train(resume_from_checkpoint=resumes)
        assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
        assert_saved(made, tmp_path / "checkpoint-1")
        assert made.state.global_step == steps
        assert ("no further step is made" in caplog.text) is (resumes is True)


# ---- what goes on


def test_equal_runs_have_equal_states(tmp_path):
    """One that was interrupted, too: nothing in them is of their times."""
    options = {"gradient_accumulation_steps": 2, "ubatch_size": 3, "stash": "host"}
    options |= {"l2l_nonfinite": "skip", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    whole = trained(tmp_path / "whole", **options)
    trained(tmp_path / "parts", **options, callbacks=[StopAt(1)])
    assert_same_run(trained(tmp_path / "parts", **options, resumes=True), whole)
    states = []
    for name in ("whole", "parts"):
        written = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")  # by transformers
        history = [{k: v for k, v in e.items() if k not in timed} for e in written["log_history"]]
        states.append({**written, "log_history": history})
    assert states[0] == states[1] and states[0]["stateful_callbacks"].keys() == {"TrainerControl"}
    assert {key for entry in states[0]["log_history"] for key in entry} == {
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
