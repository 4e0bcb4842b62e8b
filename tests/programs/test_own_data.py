"""Own files: which columns are read, whether labels are classes or numbers, and what is said of slips in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

import run_glue_l2l
from glue_script import NAMED, ROWS, SCORED, Row, command, needs_datasets, refused, trainer_of, write
from hf_l2l.glue.data import assembled
from hf_l2l.glue.own_data.columns import find_text_columns, parsed_columns, text_columns_of
from hf_l2l.glue.own_data.files import check_separator

pytestmark = [pytest.mark.usefixtures("datasets_cache"), needs_datasets]

REVIEWS: list[Row] = [
    {"id": i, "question": "is it good", "answer": row["sentence"], "verdict": row["label"], "label": "a tag"}
    for i, row in enumerate(ROWS)
]
"""Rows whose column "label" is not the one with the labels."""
CHOSEN: Row = {"text_columns": "question,answer", "label_column": "verdict"}


# ---- columns


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
    written: Row = {
        "model_name_or_path": "model",
        "train_file": write(tmp_path / "train.csv", REVIEWS),
        "output_dir": str(tmp_path / "out"),
        "do_train": "true",
        "max_steps": "3",
        "simulate": None,
        "save_steps": 7,
        "l2l_layer_classes": ["BertLayer"],
        "lr_scheduler_kwargs": {"last_epoch": -1},
        "use_cpu": False,
        "label_column": "verdict",
    }
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


# ---- classes, or numbers


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
    for number, (rows, asked, is_regression, said) in enumerate(
        (
            (WHOLE, None, False, taken),
            (WHOLE, True, True, None),
            (SCORED, None, True, left),
            (labelled(*map(float, range(21))), None, True, left),  # too many
            (SCORED, False, False, None),
            (ROWS, None, False, None),
        )
    ):
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
        (NAMED, True, "needs labels that are numbers (got 'negative' in row 1 of FILE)"),
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
    def warnings_of(name: str, *labels: object) -> list[str]:
        caplog.clear()
        loaded(tmp_path, write(tmp_path / f"{name}.csv", labelled(*labels)))
        return [each for each in caplog.messages if "class '" in each]

    [said] = warnings_of("one", *["Pos", "Neg"] * 40, "Posi")
    assert said.startswith("class 'Posi' has 1 of the 81 rows of ")
    assert warnings_of("few", "Pos", "Neg", "neutral") == []


# ---- separators


def test_columns_that_are_wanted_and_counts_tell_the_separator(tmp_path):
    file = tmp_path / "rows.csv"
    for first, wanted, name in (
        ("review;a, b;verdict", (), "semicolons"),  # more of them than commas
        ("review, or text;verdict", ("verdict",), "semicolons"),  # as many, but a column is there with them only
        ("a;b;c,label", ("label",), None),
        ("a;b,c;d,e", (), None),
    ):
        file.write_text(f"{first}\n", encoding="utf-8")
        if name is None:
            check_separator(str(file), wanted)
            continue
        with pytest.raises(ValueError, match=rf"\(got {name} in .*rows.csv, whose first line is '{first[:6]}"):
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
        found = re.search(r"pandas: (.*)$", said)
        assert found is not None
        eval(f"pandas.{found[1]}", {"pandas": pandas})
        assert Path("rows_commas.csv").read_text(encoding="utf-8").startswith("sentence,label\n")
        Path("rows_commas.csv").unlink()
