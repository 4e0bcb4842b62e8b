"""What run_glue_l2l.py says of files and options that it cannot use, and what becomes of options that are gone. Those
that its parser refuses in any case are in tests/helpers/refusal_commands.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import run_glue_l2l
from glue_script import NAMED, PAIRS, ROWS, SCORED, Row, command, needs_datasets, refused, trainer_of, write
from hf_l2l import L2LTrainingArguments
from hf_l2l.glue.options import Options
from hf_l2l.glue.retired import NEEDLESS, REPLACED, SUCCESSORS, RetiredArguments
from hf_l2l.option_names import argument
from refusal_settings import TOGETHER

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: what is wrong with the input is to be said before."""
    monkeypatch.setattr(run_glue_l2l, "load_model", lambda *_: pytest.fail("a model was loaded"))


def labelled(*labels: object) -> list[Row]:
    return [{"sentence": "the film was good", "label": label} for label in labels]


@needs_datasets
@pytest.mark.usefixtures("_no_model")
def test_bad_files_are_refused(tmp_path, capsys):
    for number, (name, train, dev, keyword) in enumerate(
        (
            ("train.csv", [{"text": "a film", "stars": 1}], ROWS, "train.csv must have a column 'label'"),
            ("train.csv", "sentence,label\n", ROWS, "data files must have rows"),
            ("train.json", labelled(1, "yes"), ROWS, "all numbers or all words"),
            ("train.csv", labelled(0, 0), ROWS, "at least two classes"),
            ("train.csv", labelled("yes", "no", ""), ROWS, "got None in row 3"),
            ("train.csv", SCORED, labelled(0.5, "inf"), "got inf in row 2"),
            ("train.csv", NAMED, labelled("positive", "neutral"), "which are 'negative', 'positive' (got 'neutral'"),
            ("train.csv", SCORED, NAMED, "labels must be numbers as in the training file (got 'negative'"),
            ("train.csv", [{"label": 0}, {"label": 1}], ROWS, "must have a column of text"),
            ("train.csv", ROWS, [{"text": "a film", "label": 1}], "dev.csv must have the text column 'sentence'"),
            ("train.csv", [*ROWS, {"sentence": "NA", "label": 1}], ROWS, "got none in row 13"),
            ("train.json", "{not json", ROWS, "could not be read as json"),
        )
    ):
        train_file = tmp_path / str(number) / name
        train_file.parent.mkdir()
        if isinstance(train, str):
            train_file.write_text(train, encoding="utf-8")
        else:
            write(train_file, train)
        dev_file = write(train_file.with_stem("dev"), dev)
        said = refused(command("model", tmp_path, train_file=train_file, validation_file=dev_file), capsys)
        assert keyword in said and str(tmp_path) in said and "; " in said


def flags(settings: Row) -> str:
    return " ".join(f"--{argument(name)} {value}" for name, value in settings.items())


@pytest.mark.usefixtures("_no_model")
def test_bad_command_lines_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "full.csv", ROWS)
    start = "--model_name_or_path model --train_file full.csv --output_dir out --do_train --max_grad_norm 0"
    for words, keyword in (
        # Options are called as they were typed, whoever refuses them.
        *((flags(each), f"--{argument(next(iter(each)))}") for each in TOGETHER[:3]),
        ("--bf16 --cmp bf16", "(got --cmp bf16 and --bf16 True, which is autocast); leave out --bf16"),
        ("--num_train_epochs many", "invalid float value: 'many'; --help"),
        ("--compare --push_to_hub", "(got --push_to_hub True)"),
        ("--simulate 8GiB --use_cpu", "(got --simulate and --use_cpu)"),
        ("--evaluate_during_training", "use --eval_strategy steps"),
        ("--no_cuda --use_cpu", "drop --no_cuda"),
        ("--output_dir full.csv/out", "(got full.csv/out: Not a directory)"),
        # Numbers that no training can have.
        ("--learning_rate nan", "at least 0 (got nan)"),
        ("--adam_beta2 1", "below 1 (got 1)"),
        ("--max_steps -2", "or -1 for none (got -2)"),
        ("--save_steps 0", "or --save_strategy no"),
    ):
        assert keyword in refused(f"{start} {words}".split(), capsys)
        assert [each.name for each in tmp_path.iterdir()] == ["full.csv"], words


def test_a_bad_options_file_is_refused(tmp_path, capsys):
    for text, keyword in (
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"do_train": true}', "model_name_or_path"),
        ('{"model_name_or_path": "model", "learning_speed": 1}', "learning_speed"),
        ('{"model_name_or_path": "model", "max_steps": "many"}', "invalid int value: 'many'"),
    ):
        file = tmp_path / "options.json"
        if text is not None:
            file.write_text(text, encoding="utf-8")
        said = refused([str(file)], capsys)
        assert said.startswith(f"the options in {file} could not be used: ") and keyword in said


# ---- options that are gone


def parsed(folder: Path, *argv: str) -> Options[Any, Any]:
    file = write(folder / "train.csv", ROWS)
    start = ["--model_name_or_path", "model", "--train_file", file, "--output_dir", str(folder / "out")]
    return run_glue_l2l.parse_options([*start, "--do_train", *argv])


def test_options_with_a_successor_are_translated(tmp_path, caplog):
    for words, option, value in (
        ("--evaluation_strategy no", "eval_strategy", "no"),
        ("--warmup_ratio 0.25", "warmup_steps", 0.25),
        ("--no_cuda False", "use_cpu", False),
        ("--per_gpu_train_batch_size 3", "per_device_train_batch_size", 3),
        ("--group_by_length", "train_sampling_strategy", "group_by_length"),
        ("--adafactor", "optim", "adafactor"),
        ("--push_to_hub_token secret", "hub_token", "secret"),
    ):
        caplog.clear()
        options = parsed(tmp_path, *words.split())
        old = words.split()[0].removeprefix("--")
        assert getattr(options.training, option) == value
        assert old not in options.given
        [warned] = caplog.messages
        shown = "..." if value == "secret" else value
        assert warned == f"--{old} is gone from transformers 5: it is taken as --{option} {shown}"


def test_options_without_effect_are_accepted_with_the_reason(tmp_path, caplog):
    usual = parsed(tmp_path).given
    for name, reason in NEEDLESS.items():
        caplog.clear()
        assert parsed(tmp_path, f"--{name}").given == usual
        assert caplog.messages == [f"--{name} is gone from transformers 5 and has no effect: {reason}"]
    assert parsed(tmp_path, "--group_by_length", "False").given == usual
    assert parsed(tmp_path, "--warmup_ratio", "0.1").training.get_warmup_steps(25) == 3  # rounded up


def test_every_option_that_is_gone_is_gone_and_has_a_fate():
    retired = {field.name for field in dataclasses.fields(RetiredArguments)}
    current = {field.name for field in dataclasses.fields(L2LTrainingArguments)}
    assert not retired & current
    assert set(SUCCESSORS.values()) <= current
    assert sorted(retired) == sorted([*SUCCESSORS, *NEEDLESS, *REPLACED, "logging_dir"])


@needs_datasets
def test_fifty_logs_are_made_of_a_run_unless_it_was_said_how_often(tmp_path):
    for words, logging, evaluation in (
        ("", ("steps", 0.02), ("no", None)),
        ("--eval_strategy steps", ("steps", 0.02), ("steps", 500)),  # not as often as logs
        ("--eval_strategy steps --eval_steps 7", ("steps", 0.02), ("steps", 7)),
        ("--eval_strategy steps --logging_steps 5", ("steps", 5), ("steps", 5)),
        ("--logging_strategy epoch", ("epoch", 500), ("no", None)),
    ):
        args = parsed(tmp_path, "--validation_file", str(tmp_path / "train.csv"), *words.split()).training
        assert (args.logging_strategy, args.logging_steps) == logging
        assert (args.eval_strategy, args.eval_steps) == evaluation


# ---- what only the model, the Hub or other packages can tell


@needs_datasets
def test_a_length_has_room_for_text_and_is_no_more_than_the_tokenizer_allows(tiny_model, tmp_path, capsys, caplog):
    """Special tokens take three of a pair of texts, and two of one."""
    for name, rows, least in (("text", ROWS, 3), ("pair", PAIRS, 5)):
        options = {"train_file": write(tmp_path / f"{name}.csv", rows), "do_eval": False}
        with pytest.raises(SystemExit):
            run_glue_l2l.main(command(tiny_model, tmp_path / name, **options, max_seq_length=least - 1))
        assert f"--max_seq_length must be at least {least}: " in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / name / "out").exists()
        trainer = trainer_of(command(tiny_model, tmp_path / name, **options, max_seq_length=least))
        assert {len(ids) for ids in trainer.train_dataset["input_ids"]} == {least}
    assert not any("max_seq_length" in each for each in caplog.messages)
    trainer_of(command(tiny_model, tmp_path, **options, max_seq_length=40))
    assert "--max_seq_length 40 is more than the tokenizer allows; using 32" in caplog.messages


@needs_datasets
def test_what_is_not_there_is_said_in_one_line(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", ROWS)
    for options, keyword in (
        ({"task_name": "mrpc"}, "the data set nyu-mll/glue could not be had from the Hub (Couldn't reach"),
        ({"train_file": "t.csv", "model_name_or_path": "no/where"}, "--model_name_or_path must be a folder or a name"),
    ):
        said = refused(command(tiny_model, tmp_path, **{"do_eval": "task" in str(options), **options}), capsys)
        assert said.startswith(keyword) and "connection" in said


@needs_datasets
def test_what_only_the_run_can_tell_is_said_in_one_sentence(tiny_model, tmp_path, capsys):
    """Packages that are not there are named."""
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    for package, options, keyword in (
        (None, {"metric_for_best_model": "eval_bleu"}, "--metric_for_best_model must be one of loss, accuracy"),
        ("tensorboard", {"report_to": "tensorboard"}, "TensorBoardCallback requires tensorboard to be installed."),
        ("bitsandbytes", {"optim": "adamw_8bit"}, "You need to install `bitsandbytes`"),
    ):
        if package is not None and importlib.util.find_spec(package) is not None:
            continue
        with pytest.raises(SystemExit) as stopped:
            run_glue_l2l.main(command(tiny_model, tmp_path, **files, **options))
        assert stopped.value.code == 2
        assert keyword in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("_no_model")
def test_without_datasets_the_command_that_installs_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hf_l2l.glue.metric", raising=False)  # imported by an earlier test
    monkeypatch.setitem(sys.modules, "datasets", None)
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    assert "pip install datasets evaluate scikit-learn scipy" in refused(command("model", tmp_path, **options), capsys)
