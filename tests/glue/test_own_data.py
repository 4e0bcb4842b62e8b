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
from glue_script import NAMED, ROWS, SCORED, Row, command, needs_datasets, refused, results, trainer_of, write
from hf_l2l.glue.data import assembled
from hf_l2l.glue.own_data.columns import parsed_columns, text_columns_of
from hf_l2l.glue.own_data.files import check_separator

pytestmark = [pytest.mark.usefixtures("datasets_cache"), needs_datasets]

REVIEWS: list[Row] = [
    {"id": i, "question": "is it good", "answer": row["sentence"], "verdict": row["label"], "label": "a tag"}
    for i, row in enumerate(ROWS)
]
"""Rows whose column "label" is not the one with the labels."""
CHOSEN: Row = {"text_columns": "question,answer", "label_column": "verdict"}


# ---- columns


@pytest.mark.parametrize("extension", ["csv", "json"])
def test_columns_are_chosen(tiny_model: str, tmp_path: Path, extension: str) -> None:
    """For training, evaluation and prediction; a test file needs no labels."""
    unlabelled = [{name: row[name] for name in ("answer", "question")} for row in REVIEWS[:3]]
    files = {
        "train_file": write(tmp_path / f"train.{extension}", REVIEWS),
        "validation_file": write(tmp_path / f"dev.{extension}", REVIEWS),
        "test_file": write(tmp_path / f"test.{extension}", unlabelled),
    }
    argv = command(tiny_model, tmp_path, **files, **CHOSEN, do_predict=True, pad_to_max_length=False)
    trainer = trainer_of(argv)
    row = trainer.train_dataset[0]
    assert trainer.processing_class.decode(row["input_ids"]) == "[CLS] is it good [SEP] the film was bad [SEP]"
    assert trainer.eval_dataset["labels"] == [row["verdict"] for row in REVIEWS]
    assert "eval_accuracy" in run_glue_l2l.main(argv)
    lines = (tmp_path / "out" / "predict_results.txt").read_text().splitlines()
    assert len(lines) == 1 + len(unlabelled)
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}


def test_a_column_called_label_is_a_text_while_another_one_has_the_labels() -> None:
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
    where.text_columns = ["label"]
    for texts, said in (([1, 0], "column 'label' must hold text"), ([None, "a"], "column 'label' must have text")):
        with pytest.raises(ValueError, match=said):
            assembled({"train": Dataset.from_dict({**rows, "label": texts})}, {"train": "t.csv"}, where)
    parts["test"] = parts["test"].remove_columns("label")
    with pytest.raises(ValueError, match=r"p.csv must have the text column 'label' .* columns are 'note'\)"):
        assembled(parts, {"train": "t.csv", "test": "p.csv"}, where)


@pytest.mark.parametrize("columns", ["question,answer", ["question", "answer"]])
def test_columns_are_chosen_in_a_file_of_options(tmp_path: Path, columns: object) -> None:
    options = {
        "model_name_or_path": "model",
        "train_file": write(tmp_path / "train.csv", REVIEWS),
        "output_dir": str(tmp_path / "out"),
        "do_train": True,
        "use_cpu": True,
        "text_columns": columns,
        "label_column": "verdict",
        "is_regression": False,
    }
    (tmp_path / "options.json").write_text(json.dumps(options), encoding="utf-8")
    data = run_glue_l2l.parse_options([str(tmp_path / "options.json")]).data
    assert (data.text_columns, data.label_column, data.is_regression) == (["question", "answer"], "verdict", False)


def test_columns_may_be_several_words() -> None:
    assert parsed_columns(["a", "b"]) == parsed_columns(["a,b"]) == parsed_columns("a, b") == ["a", "b"]
    assert parsed_columns(["one"]) == ["one"]
    assert parsed_columns(None) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"text_columns": "question,reply"},
            "--text_columns must be columns of DIR/train.csv (got 'reply', and its columns are 'id', 'question', "
            "'answer', 'verdict'); name one or two of them",
        ),
        (
            {"label_column": "stars"},
            "--label_column must be a column of each file with labels (got 'stars' for DIR/train.csv, whose columns "
            "are 'id', 'question', 'answer', 'verdict'); name one of them",
        ),
        (
            {"text_columns": "verdict"},
            "--text_columns must be other columns than that of the labels (got 'verdict'); name the one of the labels "
            "with --label_column",
        ),
        (
            {"text_columns": "id,question,answer"},
            "--text_columns must be the name of one column, or the different names of two (got 'id,question,answer'); "
            "write --text_columns question,answer",
        ),
        (
            {"text_columns": "question,question"},
            "--text_columns must be the name of one column, or the different names of two (got 'question,question'); "
            "write --text_columns question,answer",
        ),
        (
            {"text_columns": "question,"},
            "--text_columns must be the name of one column, or the different names of two (got 'question,'); write "
            "--text_columns question,answer",
        ),
        (
            {"text_columns": "id"},
            "column 'id' must hold text (got 0 in row 1 of DIR/train.csv); give --text_columns question,answer, "
            "or call them 'sentence', or 'sentence1' and 'sentence2'",
        ),
    ],
)
def test_columns_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Row, said: str
) -> None:
    rows = [{name: value for name, value in row.items() if name != "label"} for row in REVIEWS]
    options = {"label_column": "verdict", **options, "train_file": write(tmp_path / "train.csv", rows)}
    found = refused(command("model", tmp_path, do_eval=False, **options), capsys)
    assert found.replace(str(tmp_path), "DIR") == said
    assert not (tmp_path / "out").exists()


def test_a_validation_file_without_the_chosen_label_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"train_file": write(tmp_path / "t.csv", REVIEWS), "validation_file": write(tmp_path / "v.csv", ROWS)}
    assert refused(command("model", tmp_path, **files, **CHOSEN), capsys).startswith(
        f"--label_column must be a column of each file with labels (got 'verdict' for {tmp_path / 'v.csv'}, whose"
    )


def test_columns_of_a_task_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**CHOSEN, "is_regression": True}.items():
        assert refused(command("model", tmp_path, task_name="mrpc", **{name: value}), capsys) == (
            f"--{name} is for own data (got --task_name mrpc, of which it is known); drop it"
        )


def test_without_a_choice_columns_are_found_by_their_names() -> None:
    assert text_columns_of(["id", "text", "label"], None, None, "train.csv") == ("text",)
    assert text_columns_of(["id", "text", "label"], ["id", "text"], "stars", "train.csv") == ("id", "text")


# ---- classes, or numbers


def labelled(*labels: object) -> list[Row]:
    return [{"sentence": ROWS[i % len(ROWS)]["sentence"], "label": label} for i, label in enumerate(labels)]


WHOLE = labelled(*[0.0, 1.0] * 4)
TAKEN = "the labels of {} are whole numbers, 0.0, 1.0: taken as classes; --is_regression true makes it a regression"
LEFT = "the labels of {} are decimal numbers: it is a regression; --is_regression false takes them as classes"


@pytest.mark.parametrize("extension", ["csv", "json"])
def test_a_few_whole_decimal_numbers_are_classes(
    tiny_model: str, tmp_path: Path, extension: str, caplog: pytest.LogCaptureFixture
) -> None:
    train = write(tmp_path / f"train.{extension}", WHOLE)
    dev = write(tmp_path / f"dev.{extension}", labelled(1, 0))  # the same classes, written as whole numbers
    with caplog.at_level("INFO"):
        metrics = run_glue_l2l.main(command(tiny_model, tmp_path, train_file=train, validation_file=dev))
    assert TAKEN.format(train) in caplog.text
    assert "eval_accuracy" in metrics
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "0", 1: "1"}


@pytest.mark.parametrize(
    ("rows", "asked", "is_regression", "said"),
    [
        pytest.param(WHOLE, True, True, None, id="asked for"),
        pytest.param(ROWS, True, True, None, id="of whole numbers"),
        pytest.param(SCORED, None, True, LEFT, id="scores"),
        pytest.param(labelled(*map(float, range(21))), None, True, LEFT, id="many"),
        pytest.param(labelled(-1.0, 0.5), None, True, LEFT, id="negative"),
        pytest.param(labelled(-1.0, 1.0), True, True, None, id="negative whole numbers"),
        pytest.param(SCORED, False, False, None, id="scores as classes"),
        pytest.param(ROWS, None, False, None, id="whole numbers"),
        pytest.param(ROWS, False, False, None, id="whole numbers as asked for"),
    ],
)
def test_what_is_a_regression(
    tiny_model: str,
    tmp_path: Path,
    rows: list[Row],
    asked: bool | None,
    is_regression: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train = write(tmp_path / "train.csv", rows)
    with caplog.at_level("INFO"):
        trainer = trainer_of(command(tiny_model, tmp_path, train_file=train, do_eval=False, is_regression=asked))
    assert (trainer.model.config.problem_type == "regression") == is_regression
    assert [each for each in caplog.messages if "--is_regression" in each] == (
        [] if said is None else [said.format(train)]
    )
    label = trainer.train_dataset["labels"][0]
    assert label == (rows[0]["label"] if is_regression else 0)


NEGATIVE = (
    "labels of classes must not be negative, which stands for a row without one (got -1, 1 in FILE); drop the rows "
    "without one, or renumber the classes from 0 (-1 as 0, 1 as 1)"
)


@pytest.mark.parametrize(
    ("rows", "is_regression", "said"),
    [
        (
            NAMED,
            True,
            "--is_regression true needs labels that are numbers (got 'negative' in row 1 of FILE); leave it out to "
            "have classes",
        ),
        (labelled(-1.0, 1.0), False, NEGATIVE),
        (labelled(-1, 1), False, NEGATIVE),
        (labelled(-1.0, 1.0), None, f"{NEGATIVE}, or add --is_regression true if they are numbers to come near to"),
        (labelled(-1, 1), None, f"{NEGATIVE}, or add --is_regression true if they are numbers to come near to"),
    ],
)
def test_a_choice_that_labels_do_not_allow_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Row], is_regression: bool | None, said: str
) -> None:
    file = write(tmp_path / "train.csv", rows)
    argv = command("model", tmp_path, train_file=file, do_eval=False, is_regression=is_regression)
    assert refused(argv, capsys).replace(file, "FILE") == said


# ---- slips


@pytest.mark.parametrize("odd", ["pos", " Pos", "Pos ", "POS"])
@pytest.mark.parametrize("times", [1, 2])
def test_classes_that_differ_in_case_and_white_space_only_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str, times: int
) -> None:
    file = write(tmp_path / "train.csv", labelled(*["Pos", "Neg"] * 3, *[odd] * times))
    where = "row 7" if times == 1 else "2 rows, the first row 7,"
    assert refused(command("model", tmp_path, train_file=file, do_eval=False), capsys) == (
        f"classes must differ in more than case and white space (got {odd!r} in {where} of {file}, and 'Pos' in 3 "
        "rows); write them alike, or rename one of them"
    )


def test_a_class_with_very_few_rows_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings_of(*labels: object) -> list[str]:
        caplog.clear()
        file = write(tmp_path / "train.csv", labelled(*labels))
        parsed = run_glue_l2l.parse_options(command("model", tmp_path, train_file=file, do_eval=False))
        run_glue_l2l.load_data(parsed.data, parsed.model, parsed.training)
        return [each.replace(file, "FILE") for each in caplog.messages if "class '" in each]

    assert warnings_of(*["Pos", "Neg"] * 40, "Posi") == [
        "class 'Posi' has 1 of the 81 rows of FILE: correct or drop them if it is none"
    ]
    assert warnings_of(*["Pos", "Neg"] * 40, *["neutral"] * 3) == []
    assert warnings_of("Pos", "Neg", "neutral") == []


def test_a_slip_in_a_validation_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "train_file": write(tmp_path / "train.csv", labelled("Pos", "Neg")),
        "validation_file": write(tmp_path / "dev.csv", labelled("Pos", "Neg ")),
    }
    assert refused(command("model", tmp_path, **files), capsys) == (
        f"labels must be among the classes, which are 'Neg', 'Pos' (got 'Neg ' in {tmp_path / 'dev.csv'}); drop the "
        "row or correct it to 'Neg', or add training rows of that class"
    )


@pytest.mark.parametrize(
    ("first", "wanted", "name"),
    [
        ("review;a, b;verdict", (), "semicolons"),  # more of them than commas
        ("review, or text;verdict", ("verdict",), "semicolons"),  # as many, but a column is there with them only
        ("review\ta, b\tverdict", ("other",), "tabs"),
        ("a;b;c,label", ("label",), None),
        ('"a;b;c",note', ("label",), None),
        ("a;b,c;d,e", (), None),
    ],
)
def test_columns_that_are_wanted_and_counts_tell_the_separator(
    tmp_path: Path, first: str, wanted: tuple[str, ...], name: str | None
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"{first}\n", encoding="utf-8")
    if name is None:
        return check_separator(str(file), wanted)
    with pytest.raises(ValueError, match=rf"\(got {name} in .*rows.csv, whose first line is '{first[:6]}"):
        check_separator(str(file), wanted)


@pytest.mark.parametrize(
    ("text", "name", "separator"),
    [
        ("sentence;label\nthe film;0\n", "semicolons", ";"),
        ("\ufeffsentence\tlabel\na, b\t0\n", "tabs", "\\t"),
        ("sentence|label\r\na|0\r\n", "bars", "|"),
    ],
)
def test_another_separator_than_commas_is_named_with_what_converts_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    name: str,
    separator: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text(text, encoding="utf-8")
    said = refused(command("model", tmp_path, train_file="rows.csv", do_eval=False), capsys)
    first = text.splitlines()[0].removeprefix("\ufeff")
    assert said == (
        f"columns of a csv file must be separated by commas (got {name} in rows.csv, whose first line is {first!r}); "
        f"save it with commas, as with pandas: read_csv('rows.csv', sep='{separator}').to_csv('rows_commas.csv', "
        "index=False)"
    )
    import pandas

    found = re.search(r"pandas: (.*)$", said)
    assert found is not None
    eval(f"pandas.{found[1]}", {"pandas": pandas})
    assert Path("rows_commas.csv").read_text(encoding="utf-8").startswith("sentence,label\n")


def test_a_single_column_of_text_and_semicolons_in_texts_are_fine(tiny_model: str, tmp_path: Path) -> None:
    rows = [{**row, "sentence": row["sentence"] + "; fine"} for row in ROWS]
    files = {
        "train_file": write(tmp_path / "train.csv", rows),
        "test_file": write(tmp_path / "test.csv", [{"sentence": row["sentence"]} for row in rows]),
    }
    run_glue_l2l.main(command(tiny_model, tmp_path, **files, do_eval=False, do_predict=True))
    assert results(tmp_path, "train")["train_samples"] == len(rows)
