"""Checkpoints: going on is never having stopped, and plain Trainer reads and writes the same ones."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from accumulated import tiny_llama
from hf_l2l.checkpoint.data_position import position_file
from hf_l2l.checkpoint.manifest import MANIFEST
from models import llama
from resumed import assert_equal_content, assert_same_checkpoint, loaded
from training import (
    SAVING,
    StopAt,
    assert_same_run,
    inner_optimizer,
    l2l_trainer,
    left_in,
    logs,
    plain_trainer,
    rows,
    stopped_at_two,
    tiny_bert,
)

pytestmark = pytest.mark.filterwarnings(
    # torch warns of the scheduler's order when the optimizer is loaded; plain Trainer does the same.
    "ignore:.*lr_scheduler.step.*:UserWarning",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.filterwarnings("ignore:.*moves the weights:UserWarning")
def test_going_on_is_never_having_stopped(tmp_path, accumulation):
    options = {"gradient_accumulation_steps": accumulation, "ubatch_size": 3, "stash": "host"}
    whole = l2l_trainer(tmp_path / "whole", **SAVING, **options)
    whole.train()
    checkpoint = stopped_at_two(l2l_trainer, tmp_path / "parts", **options)
    resumed = l2l_trainer(tmp_path / "parts", model=tiny_bert(), **SAVING, **options)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("first, second", [(plain_trainer, l2l_trainer), (l2l_trainer, plain_trainer)])
def test_checkpoints_go_both_ways(tmp_path, first, second):
    whole = plain_trainer(tmp_path / "whole", **SAVING)
    whole.train()
    checkpoint = stopped_at_two(first, tmp_path / "parts")
    resumed = second(tmp_path / "parts", **SAVING)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_run(resumed, whole)


def test_a_checkpoint_goes_to_the_other_trainer_and_back(tmp_path):
    """Of a model with tied weights, with dropout: names, dtypes and bits of all that both save are the same."""
    runs = {}
    for name, kinds in {"plain": [plain_trainer], "three": [plain_trainer, l2l_trainer, plain_trainer]}.items():
        for number, make in enumerate(kinds, start=1):
            model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1)
            made = make(tmp_path / name, model=model, **{**SAVING, "max_steps": 6, "save_steps": 1})
            made.train_dataset = [{**row, "labels": row["input_ids"]} for row in rows()]
            if number < len(kinds):
                made.add_callback(StopAt(2 * number))
            made.train(resume_from_checkpoint=number > 1)
            runs[name] = made
    assert_same_run(runs["three"], runs["plain"])
    for step in (4, 6):  # of ours, and of theirs after ours
        theirs, found = (tmp_path / name / f"checkpoint-{step}" for name in ("plain", "three"))
        assert {p.name for p in found.iterdir()} - {p.name for p in theirs.iterdir()} <= {
            MANIFEST,
            position_file(None),
        }
        assert (found / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            assert_equal_content(loaded(found / name), loaded(theirs / name), name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("optimizer.pt", "the optimizer's state and the schedule of the learning rate begin anew"),
        ("scheduler.pt", "the optimizer's state and the schedule of the learning rate begin anew"),
        ("rng_state.pth", "random numbers begin anew"),
    ],
)
def test_a_file_that_is_missing_is_told(tmp_path, caplog, name, what):
    checkpoint = stopped_at_two(plain_trainer, tmp_path)
    (tmp_path / "checkpoint-2" / name).unlink()
    torch.save(torch.get_rng_state(), tmp_path / "checkpoint-2" / "rng_state_sim.pth")  # of another device
    resumed = l2l_trainer(tmp_path, **SAVING)
    with caplog.at_level("WARNING", "hf_l2l"):
        resumed.train(resume_from_checkpoint=checkpoint)
    said = [record.message for record in caplog.records if record.name == "hf_l2l" and record.levelname == "WARNING"]
    assert said[0] == f"{checkpoint} has no {name}: {what}"
    assert [re.search("has no (.*?):", each).group(1) for each in said] == [name, MANIFEST, position_file(None)]
    assert resumed.state.global_step == 4
    rates = [entry["learning_rate"] for entry in logs(resumed) if "loss" in entry]
    assert (rates[2] == rates[0]) == (name != "rng_state.pth")  # the schedule begins anew


def test_of_two_trainings_in_a_folder_the_later_one_is_gone_on_with(tmp_path):
    """Though the earlier one has made more steps; the files of both are never mixed."""
    options = {**SAVING, "max_steps": 6, "l2l_log_times": False}
    l2l_trainer(tmp_path / "parts", **options).train()
    for name in ("whole", "parts"):
        model = tiny_bert(dropout=0.3)
        later = l2l_trainer(tmp_path / name, model=model, **{**options, "learning_rate": 5e-4})
        if name == "parts":
            later.add_callback(StopAt(2))
        else:
            whole = later
        later.train()
    assert left_in(tmp_path / "parts") == [f"checkpoint-{n}" for n in (2, 4, 6)]
    resumed = l2l_trainer(tmp_path / "parts", model=tiny_bert(dropout=0.3), **{**options, "learning_rate": 5e-4})
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)
    for step in (4, 6):
        assert_same_checkpoint(*(tmp_path / name / f"checkpoint-{step}" for name in ("parts", "whole")))


def test_the_last_complete_checkpoint_is_gone_on_from(tmp_path, caplog):
    whole = l2l_trainer(tmp_path / "whole", **SAVING)
    whole.train()
    stopped_at_two(l2l_trainer, tmp_path / "parts")
    interrupted = tmp_path / "parts" / "checkpoint-3"
    interrupted.mkdir()
    shutil.copy(tmp_path / "parts" / "checkpoint-2" / "model.safetensors", interrupted)
    resumed = l2l_trainer(tmp_path / "parts", **SAVING)
    with caplog.at_level("WARNING", "hf_l2l"):
        resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)
    said = "saving was interrupted in checkpoint-3 (renamed to _interrupted-checkpoint-3): training resumes from"
    assert said in caplog.text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("named", [False, True], ids=["the last one", "by its folder"])
def test_what_was_interrupted_takes_no_place_among_the_checkpoints_that_are_kept(tmp_path, named):
    checkpoint = stopped_at_two(l2l_trainer, tmp_path)
    for name in ("checkpoint-3", "checkpoint-9", "_interrupted-checkpoint-9"):
        (tmp_path / name).mkdir()
    resumed = l2l_trainer(tmp_path, **SAVING, save_total_limit=2)
    resumed.train(resume_from_checkpoint=checkpoint if named else True)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [
        *("_interrupted-checkpoint-3", "_interrupted-checkpoint-9", "_interrupted-checkpoint-9-2"),
        *("checkpoint-2", "checkpoint-4"),
    ]


def test_a_training_that_does_not_go_on_renames_nothing(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="interrupted in checkpoint-3"):
        l2l_trainer(tmp_path).train(resume_from_checkpoint=True)
    l2l_trainer(tmp_path, max_steps=1).train()
    assert (tmp_path / "checkpoint-3").is_dir()


def test_without_a_complete_checkpoint_nothing_is_gone_on_from(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):  # transformers' own
        l2l_trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"epoch": 1.', encoding="utf-8")
    with pytest.raises(ValueError, match="interrupted in checkpoint-3.; name the one"):
        l2l_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoint_files_are_those_of_trainer(tmp_path):
    for make, name in ((plain_trainer, "plain"), (l2l_trainer, "l2l")):
        make(tmp_path / name, **SAVING).train()
    theirs, ours = (tmp_path / name / "checkpoint-4" for name in ("plain", "l2l"))
    assert {p.name for p in ours.iterdir()} - {p.name for p in theirs.iterdir()} == {MANIFEST, position_file(None)}
    expected, found = load_file(theirs / "model.safetensors"), load_file(ours / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    states = [torch.load(p / "optimizer.pt", weights_only=True) for p in (ours, theirs)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    histories = [json.loads((p / "trainer_state.json").read_text())["log_history"] for p in (ours, theirs)]
    assert [e.get("loss") for e in histories[0]] == [e.get("loss") for e in histories[1]]


def test_tied_weights_are_saved_once_and_loaded_tied(tmp_path):
    model = llama(tie_word_embeddings=True)
    plain_keys = set(model.state_dict())
    from hf_l2l import attach_l2l

    attach_l2l(model)
    ids = torch.randint(5, 60, (4, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert set(model.state_dict()) == plain_keys
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = type(model).from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_weights_loaded_late_are_used(tmp_path):
    made = l2l_trainer(tmp_path)
    made.evaluate()
    other = tiny_bert()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    made.model.load_state_dict(other.state_dict())
    plain = plain_trainer(tmp_path / "plain", model=other)
    assert made.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for trainer in (made, plain):
        torch.manual_seed(0)
        trainer.train()
    assert logs(made)[-2] == logs(plain)[-2]


def test_training_leaves_the_loaded_file_as_it_was(tmp_path):
    tiny_bert().save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    model = hf.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    made = l2l_trainer(tmp_path / "run", model=model)
    made.train()
    assert inner_optimizer(made).state
    assert not torch.equal(model.classifier.bias, torch.zeros(2))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


TIMED_BY_TRANSFORMERS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def state_without_their_times(of) -> dict[str, Any]:
    written = json.loads((of / "checkpoint-4" / "trainer_state.json").read_text())
    history = [{k: v for k, v in e.items() if k not in TIMED_BY_TRANSFORMERS} for e in written["log_history"]]
    return {**written, "log_history": history}


def test_equal_runs_have_equal_states(tmp_path):
    options = {**SAVING, "l2l_nonfinite": "skip", "eval_strategy": "steps", "eval_steps": 2}
    for name in ("once", "again"):
        l2l_trainer(tmp_path / name, **options).train()
    checkpoint = stopped_at_two(l2l_trainer, tmp_path / "parts", **options)
    l2l_trainer(tmp_path / "parts", model=tiny_bert(), **options).train(resume_from_checkpoint=checkpoint)
    once, again, parts = (state_without_their_times(tmp_path / name) for name in ("once", "again", "parts"))
    assert once == again == parts and once["stateful_callbacks"].keys() == {"TrainerControl"}
    assert {key for entry in once["log_history"] for key in entry} == {
        *("epoch", "eval_loss", "grad_norm", "learning_rate", "loss", "skipped_steps", "step")
    }
