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
from safetensors.torch import load_file

from hf_l2l import attach_l2l
from hf_l2l.checkpoint.finding import check_whole
from hf_l2l.checkpoint.manifest import MANIFEST, DamagedCheckpointError
from models import llama
from runs import assert_same_run, assert_same_tensors
from saving import BEST, assert_saved, saving, steps_in, trained
from tiers import more
from training import StopAt, inner_optimizer, l2l_trainer, left_in, logs, plain_trainer, rows, tiny_bert

pytestmark = [
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its checkpoints are of all its four steps."""
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def parts(whole: Any, tmp_path: Path) -> Path:
    """A folder with the checkpoint of its second step."""
    shutil.copytree(Path(whole.args.output_dir) / "checkpoint-2", tmp_path / "parts" / "checkpoint-2")
    return tmp_path / "parts"


# ---- the folder


def test_the_last_complete_one_is_gone_on_from(whole, parts, caplog):
    """What was interrupted is renamed, and takes no place among those that are kept; one that the program has saved
    without the rest is not."""
    whole.save_model(str(parts / "checkpoint-1"))
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


def test_of_two_trainings_in_a_folder_the_later_one_is_gone_on_with(tmp_path):
    """Though the earlier one has made more steps; the files of both are never mixed."""
    trained(tmp_path / "parts")
    later = {"learning_rate": 5e-4}
    trained(tmp_path / "parts", **later, save_steps=2, callbacks=[StopAt(2)])
    assert steps_in(tmp_path / "parts") == [1, 2, 3, 4]
    resumed = trained(tmp_path / "parts", **later, save_steps=2, resumes=True)
    whole = trained(tmp_path / "whole", **later)
    assert_same_run(resumed, whole)
    for name in ("parts", "whole"):
        assert_saved(whole, tmp_path / name / "checkpoint-4")


# ---- what is said


def test_what_is_not_there_is_told_and_begins_anew(parts, tmp_path, caplog):
    """Of a checkpoint of transformers' Trainer, whose weights may be in a folder for a trainer that looks there."""
    (parts / "checkpoint-2" / MANIFEST).unlink()
    (parts / "checkpoint-2" / "rng_state_data.pth").unlink()
    torch.save(torch.get_rng_state(), parts / "checkpoint-2" / "rng_state_sim.pth")  # of another device
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        run = Path(shutil.copytree(parts, tmp_path / name))
        (run / "checkpoint-2" / name).unlink()
        caplog.clear()
        with caplog.at_level("WARNING", "hf_l2l"):
            resumed = trained(run, resumes=True)
        said = [each.message for each in caplog.records if (each.name, each.levelname) == ("hf_l2l", "WARNING")]
        assert [re.search("has no (.*?):", each)[1] for each in said] == [name, MANIFEST, "rng_state_data.pth"]
        rates = [entry["learning_rate"] for entry in logs(resumed) if "loss" in entry]
        assert (rates[2] == rates[0]) == (name != "rng_state.pth"), "the schedule begins anew"
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


EPOCH = {"max_steps": -1, "num_train_epochs": 1}
"""Six batches."""


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [
        ({}, {"max_steps": 2}, 2),
        (EPOCH, EPOCH, 6),
        *more(({}, {}, 4), ({"max_steps": 8}, {"max_steps": 3}, 3), ({"max_steps": 8}, EPOCH, 6)),
        *more(
            ({"max_steps": 3, "gradient_accumulation_steps": 4}, {"max_steps": 3, "gradient_accumulation_steps": 4}, 3)
        ),
    ],
    ids=str,
)
def test_a_finished_training_makes_no_further_step(tmp_path, caplog, first, then, steps):
    """It says so, and no weight changes."""
    trained(tmp_path, **first)
    made = steps_in(tmp_path)[-1]
    checkpoint, events = tmp_path / f"checkpoint-{made}", Counter[str]()
    again = saving(tmp_path, callbacks=[counted(events)], **then)
    with caplog.at_level("WARNING", "hf_l2l"):
        result = again.train(resume_from_checkpoint=True)
    (said,) = [each.message for each in caplog.records if (each.name, each.levelname) == ("hf_l2l", "WARNING")]
    assert f"{checkpoint} has made {made} steps of {steps}" in said
    assert events == {"on_train_begin": 1, "on_train_end": 1}
    assert result.global_step == again.state.global_step == made and result.training_loss == 0
    assert "train_runtime" in result.metrics
    assert_saved(again, checkpoint)
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    found = inner_optimizer(again).state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], state["exp_avg"]) for i, state in moments.items())


class _FirstIsBest(hf.TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows())


def test_the_best_model_of_a_finished_one_is_loaded_and_more_steps_are_made(tmp_path, caplog):
    """Of rows of which nobody knows how many epochs there are."""
    for resumes, steps in ((None, 2), (True, 2), (True, 3)):
        made = saving(tmp_path, **BEST, max_steps=steps, callbacks=[_FirstIsBest()])
        made.train_dataset = _Stream()
        caplog.clear()
        with caplog.at_level("WARNING", "hf_l2l"):
            made.train(resume_from_checkpoint=resumes)
        assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
        assert_saved(made, tmp_path / "checkpoint-1")
        assert made.state.global_step == steps
        assert ("no further step is made" in caplog.text) is (resumes is True and steps == 2)


# ---- what goes on


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3, "ubatch_size": 3, "stash": "host"}, *more({})])
def test_equal_runs_have_equal_states(tmp_path, options):
    """One that was interrupted, too: nothing in them is of their times."""
    options = {**options, "l2l_nonfinite": "skip", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    whole = trained(tmp_path / "whole", **options)
    trained(tmp_path / "parts", **options, callbacks=[StopAt(2)])
    assert_same_run(trained(tmp_path / "parts", **options, resumes=True), whole)
    states = []
    for name in ("whole", "parts"):
        written = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")  # by transformers
        history = [{k: v for k, v in e.items() if k not in timed} for e in written["log_history"]]
        states.append({**written, "log_history": history})
    assert states[0] == states[1] and states[0]["stateful_callbacks"].keys() == {"TrainerControl"}
    assert {key for entry in states[0]["log_history"] for key in entry} == {
        *("epoch", "eval_loss", "grad_norm", "learning_rate", "loss", "skipped_steps", "step")
    }


@pytest.mark.parametrize(("first", "second"), [(plain_trainer, l2l_trainer), (l2l_trainer, plain_trainer)])
def test_checkpoints_go_both_ways(tmp_path, whole, first, second):
    trained(tmp_path, first, callbacks=[StopAt(2)])
    assert_same_run(trained(tmp_path, second, resumes=True), whole)


def test_tied_weights_are_saved_once_and_loaded_tied(tmp_path):
    model = llama(tie_word_embeddings=True)
    plain_keys = set(model.state_dict())
    attach_l2l(model)
    ids = torch.randint(5, 60, (4, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert set(model.state_dict()) == plain_keys and model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert_same_tensors(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_weights_loaded_late_are_used_and_the_loaded_file_stays_as_it_was(tmp_path):
    other = tiny_bert(layers=2)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    other.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    made = saving(tmp_path / "l2l", save_strategy="no")
    made.evaluate()
    made.model.load_state_dict(other.state_dict())
    loaded = [hf.BertForSequenceClassification.from_pretrained(tmp_path / "model") for _ in range(2)]
    plain = saving(tmp_path / "plain", plain_trainer, model=loaded[0], save_strategy="no")
    assert made.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for each in (made, plain, saving(tmp_path / "again", model=loaded[1], save_strategy="no")):
        torch.manual_seed(0)
        each.train()
    assert logs(made)[-2] == logs(plain)[-2]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
