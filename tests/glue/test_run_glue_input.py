"""What run_glue_l2l.py says of files and options that it cannot use, and what becomes of options that are gone."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_glue_l2l
from glue_script import NAMED, PAIRS, ROWS, SCORED, Row, command, needs_datasets, refused, trainer_of, write
from hf_l2l import L2LTrainingArguments
from hf_l2l.glue.options import Options
from hf_l2l.glue.retired import NEEDLESS, REPLACED, SUCCESSORS, RetiredArguments
from rank_pool import RankPool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test: what is wrong with the input is to be said before."""

    def load_model(*_: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(run_glue_l2l, "load_model", load_model)


def labelled(*labels: object) -> list[Row]:
    return [{"sentence": "the film was good", "label": label} for label in labels]


NO_LABEL = (
    "DIR/{}.csv must have a column 'label' (its columns are {}); name the one with the labels with --label_column"
)
MISSING = "every row must have a label (got {} in row {} of DIR/{}.csv); fill it in, or drop the row"
UNKNOWN = (
    "labels must be among the classes, which are {} (got {} in DIR/dev.csv); drop the row or correct it, or add "
    "training rows of that class"
)


@needs_datasets
@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("name", "train", "dev", "said"),
    [
        pytest.param(
            "train.csv",
            [{"text": "a film", "stars": 1}],
            ROWS,
            NO_LABEL.format("train", "'text', 'stars'"),
            id="no label",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            [{"sentence": "a film", "stars": 1}],
            NO_LABEL.format("dev", "'sentence', 'stars'"),
            id="no validation label",
        ),
        pytest.param(
            "train.csv",
            "sentence,label\n",
            ROWS,
            'data files must have rows (got none in DIR/train.csv: Instruction "train" corresponds to no data!); '
            "check how it was written",
            id="head only",
        ),
        pytest.param(
            "train.csv",
            labelled(-1, 1),
            ROWS,
            "labels of classes must not be negative, which stands for a row without one (got -1, 1 in "
            "DIR/train.csv); drop the rows without one, or renumber the classes from 0 (-1 as 0, 1 as 1), or "
            "add --is_regression true if they are numbers to come near to",
            id="negative",
        ),
        pytest.param(
            "train.json",
            labelled(1, "yes"),
            ROWS,
            "labels must be all numbers or all words (got 1, 'yes' in DIR/train.json); write them alike",
            id="mixed",
        ),
        pytest.param(
            "train.csv",
            labelled(0, 0),
            ROWS,
            "there must be at least two classes (got only 0 in DIR/train.csv); add rows of another one",
            id="one class",
        ),
        pytest.param(
            "train.csv",
            labelled(0, "", 1),
            ROWS,
            MISSING.format("None", 2, "train"),
            id="missing number",
        ),
        pytest.param(
            "train.csv",
            labelled("yes", "no", ""),
            ROWS,
            MISSING.format("None", 3, "train"),
            id="missing word",
        ),
        pytest.param(
            "train.csv",
            SCORED,
            labelled(0.5, "inf"),
            MISSING.format("inf", 2, "dev"),
            id="infinite",
        ),
        pytest.param(
            "train.json",
            labelled([0], [1]),
            ROWS,
            "labels must be whole numbers, words, or decimal numbers (got [0] in row 1 of DIR/train.json); "
            "write one of them",
            id="list",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            labelled(0, 2),
            UNKNOWN.format("0, 1", "2"),
            id="unknown number",
        ),
        pytest.param(
            "train.csv",
            NAMED,
            labelled("positive", "neutral"),
            UNKNOWN.format("'negative', 'positive'", "'neutral'"),
            id="unknown word",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            labelled(0.0, 0.5),
            UNKNOWN.format("0, 1", "0.5"),
            id="a score for a class",
        ),
        pytest.param(
            "train.csv",
            SCORED,
            NAMED,
            "labels must be numbers as in the training file (got 'negative' in DIR/dev.csv); correct one of the files",
            id="a class for a score",
        ),
        pytest.param(
            "train.csv",
            [{"label": 0}, {"label": 1}],
            ROWS,
            "DIR/train.csv must have a column of text (got only 'label'); add one called 'sentence'",
            id="no text",
        ),
        pytest.param(
            "train.csv",
            ROWS,
            [{"text": "a film", "label": 1}],
            "DIR/dev.csv must have the text column 'sentence' of the training file (its columns are 'text', 'label'); "
            "rename the one it stands in",
            id="other validation text",
        ),
        pytest.param(
            "train.csv",
            [{"id": 7, "review": "a film", "label": 1}],
            ROWS,
            "column 'id' must hold text (got 7 in row 1 of DIR/train.csv); give --text_columns review, or call "
            "them 'sentence', or 'sentence1' and 'sentence2'",
            id="text that is none",
        ),
        pytest.param(
            "train.csv",
            [*ROWS, {"sentence": "NA", "label": 1}],
            ROWS,
            "column 'sentence' must have text in every row (got none in row 13 of DIR/train.csv; in csv, words like "
            "NA and null count as none); fill it in, or drop the row",
            id="missing text",
        ),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    train: list[Row] | str,
    dev: list[Row],
    said: str,
) -> None:
    train_file = tmp_path / name
    if isinstance(train, str):
        train_file.write_text(train, encoding="utf-8")
    else:
        write(train_file, train)
    dev_file = write(train_file.with_stem("dev"), dev)
    found = refused(command("model", tmp_path, train_file=train_file, validation_file=dev_file), capsys)
    assert found.replace(str(tmp_path), "DIR") == said


@needs_datasets
@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("name", "text"), [("train.json", "{not json"), ("train.csv", "sentence,label\na,0\na,b,c,d,1\n")]
)
def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = refused(command("model", tmp_path, train_file=tmp_path / name, do_eval=False), capsys)
    start = f"{tmp_path / name} could not be read as {(tmp_path / name).suffix[1:]} ("
    assert found.startswith(start)
    assert found.endswith("); correct it")


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "there must be data (got none); add --task_name, --dataset_name, or --train_file",
        ),
        (
            {"do_train": False, "validation_file": "full.csv"},
            "own files need --train_file, whose labels say which classes there are (got none); add --train_file FILE",
        ),
        ({"train_file": "full.csv"}, "--do_eval needs --validation_file (got none); add --validation_file FILE"),
        (
            {"do_train": False, "do_eval": False},
            "there must be something to do (got neither --do_train, --do_eval nor --do_predict); add one of them",
        ),
        (
            {"train_file": "nowhere.csv", "do_eval": False},
            "data files must exist (there is no file nowhere.csv); check the path",
        ),
        (
            {"train_file": "full.txt", "do_eval": False},
            "data files must end in .csv or .json (got full.txt); convert it, or rename it if it is one",
        ),
        (
            {"train_file": "empty.csv", "do_eval": False},
            "data files must have rows (got the empty file empty.csv); check how it was written",
        ),
        (
            {"train_file": "full.csv", "validation_file": "full.json"},
            "--train_file, --validation_file must have the same extension (got full.csv, full.json); "
            "convert those that differ",
        ),
        (
            {"train_file": "full.csv", "do_eval": False, "max_train_samples": 0},
            "--max_train_samples must be at least 1 (got 0); leave it out for the default",
        ),
        (
            {"train_file": "full.csv", "do_eval": False, "ubatch_size": 0},
            "--ubatch_size must be a whole number of at least 1, or None for the whole device batch (got 0); "
            "set it to the rows that fit through one layer at once",
        ),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Row,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("full.csv", "full.json", "full.txt"):
        write(tmp_path / name, ROWS)
    (tmp_path / "empty.csv").touch()
    assert refused(command("model", tmp_path, **options), capsys) == said


KEPT = "must be at least 1 (got {}); leave it out to keep all, or use --save_strategy no"


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"task_name": "mrcp"},
            "--task_name must be a task of GLUE, one of cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli (got "
            "mrcp); did you mean mrpc?",
        ),
        (
            {"task_name": "movies"},
            "--task_name must be a task of GLUE, one of cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli (got "
            "movies); own data goes into --train_file",
        ),
        (
            {"task_name": "mrpc", "train_file": "full.csv"},
            "the data must have one source (got --task_name mrpc and --train_file full.csv); drop all but one",
        ),
        (
            {"dataset_name": "imdb", "validation_file": "full.csv"},
            "the data must have one source (got --dataset_name imdb and --validation_file full.csv); drop all but one",
        ),
    ],
)
@needs_datasets
def test_bad_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Row, said: str) -> None:
    assert refused(command("model", tmp_path, **options), capsys) == said


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--do_trian"],
            "every flag must be that of an option (got --do_trian); did you mean --do_train? --help lists all options",
        ),
        (["--zzz=1"], "every flag must be that of an option (got --zzz); --help lists all options"),
        (
            ["--num_train_epochs", "many"],
            "argument --num_train_epochs/--num-train-epochs: invalid float value: 'many'; --help lists all options",
        ),
        (
            ["--simulate", "8GiB", "--use_cpu"],
            "the device must be one (got --simulate and --use_cpu); drop one of them",
        ),
        (
            ["--compare", "--do_train", "False", "--do_eval", "--validation_file", "full.csv"],
            "--compare compares training runs (got no --do_train); add it",
        ),
        (
            ["--compare", "--trainer", "hf"],
            "--compare starts both trainers from the same model and keeps what they made apart (got --trainer hf); "
            "drop one of them",
        ),
        (
            ["--compare", "--push_to_hub"],
            "--compare starts both trainers from the same model and keeps what they made apart (got --push_to_hub "
            "True); drop one of them",
        ),
        (
            ["--resume_from_checkpoint", "nowhere"],
            "--resume_from_checkpoint must be the folder of a checkpoint (there is no complete trainer_state.json "
            "in nowhere); check the path",
        ),
        (
            ["--resume_from_checkpoint", "True"],
            "--resume_from_checkpoint True needs a checkpoint in --output_dir (got out, with none); name its folder, "
            "or leave the option out",
        ),
        (
            ["--output_dir", "full.csv/out"],
            "--output_dir must be a folder that can be written to (got full.csv/out: Not a directory); choose another "
            "one",
        ),
        (
            ["--test_file", "full.csv"],
            "--test_file is for --do_predict (got --test_file full.csv without it); add --do_predict",
        ),
        (
            ["--dataset_config_name", "plain"],
            "a configuration is for --dataset_name (got --dataset_config_name plain alone); drop it",
        ),
        (
            ["--evaluate_during_training"],
            "--evaluate_during_training is gone from transformers 5 (got True); use --eval_strategy steps",
        ),
        (["--do_predict"], "--do_predict needs --test_file (got none); add --test_file FILE"),
        (
            ["--do_predict", "--test_file", "full.json"],
            "--train_file, --test_file must have the same extension (got full.csv, full.json); convert those that "
            "differ",
        ),
        (
            ["--fp16"],
            "--fp16 cannot be used with L2L (got --fp16 True): its loss scaler would have to see gradients on the "
            "device; use --cmp fp16",
        ),
        (
            ["--fp16_opt_level", "O1"],
            "--fp16_opt_level is gone from transformers 5 (got 'O1'); use --cmp fp16",
        ),
        (
            ["--save_safetensors", "False"],
            "checkpoints are always safetensors (got --save_safetensors False); leave it out",
        ),
        (
            ["--no_cuda", "--use_cpu"],
            "--no_cuda is the former name of --use_cpu (got both); drop --no_cuda",
        ),
        (
            ["--task_name", "mrpc", "--train_file", "full.csv"],
            "the data must have one source (got --task_name mrpc and --train_file full.csv); drop all but one",
        ),
        (
            ["--l2l_num_threads", "0"],
            "--l2l_num_threads must be a whole number of at least 1, or None for all cores but one (got 0); set it to "
            "the threads of an update in the background, or leave it out",
        ),
        (
            ["--l2l_boundary", "host"],
            "--l2l_boundary host passes what is in the stash from layer to layer, so it needs --stash 'host', 'disk' "
            "or 'auto' (got --stash device); set --stash host, or leave --l2l_boundary out",
        ),
        (
            ["--bf16", "--cmp", "bf16"],
            "one option says in what layers compute (got --cmp bf16 and --bf16 True, which is autocast); leave out "
            "--bf16",
        ),
        (
            ["--learning_rate", "-1"],
            "--learning_rate must be a finite number, at least 0 (got -1); use one such as 2e-5",
        ),
        (
            ["--learning_rate", "nan"],
            "--learning_rate must be a finite number, at least 0 (got nan); use one such as 2e-5",
        ),
        (
            ["--num_train_epochs", "-2"],
            "--num_train_epochs must be a finite number, at least 0 (got -2); use one such as 3",
        ),
        (
            ["--num_train_epochs", "inf"],
            "--num_train_epochs must be a finite number, at least 0 (got inf); use one such as 3",
        ),
        (
            ["--weight_decay", "-0.1"],
            "--weight_decay must be a finite number, at least 0 (got -0.1); use one such as 0.01, or leave it out for "
            "none",
        ),
        (
            ["--warmup_steps", "nan"],
            "--warmup_steps must be a finite number, at least 0 (got nan); give a number of steps, or a share of them "
            "below 1",
        ),
        (["--adam_beta2", "1"], "--adam_beta2 must be at least 0 and below 1 (got 1); leave it out for 0.999"),
        (
            ["--per_device_train_batch_size", "0"],
            "--per_device_train_batch_size must be at least 1 (got 0); leave it out for 8",
        ),
        (
            ["--max_grad_norm", "nan"],
            "--max_grad_norm must be at least 0 (got nan); use 0 to clip nothing",
        ),
        (
            ["--save_steps", "0"],
            "--save_steps must be above 0 (got 0); give a number of steps, a share of them below 1, or "
            "--save_strategy no",
        ),
        (["--save_total_limit", "0"], f"--save_total_limit {KEPT.format(0)}"),
        (["--save_total_limit", "-1"], f"--save_total_limit {KEPT.format(-1)}"),
        (
            ["--eval_accumulation_steps", "0"],
            "--eval_accumulation_steps must be at least 1 (got 0); leave it out to gather all at the end",
        ),
        (
            ["--eval_delay", "-1"],
            "--eval_delay must be a finite number, at least 0 (got -1); leave it out for no delay",
        ),
        (["--max_steps", "0"], "--max_steps must be at least 1, or -1 for none (got 0); leave it out for none"),
        (["--max_steps", "-2"], "--max_steps must be at least 1, or -1 for none (got -2); leave it out for none"),
        (
            ["--warmup_steps", "-1"],
            "--warmup_steps must be a finite number, at least 0 (got -1); give a number of steps, or a share of them "
            "below 1",
        ),
        (
            ["--logging_steps", "0"],
            "--logging_steps must be above 0 (got 0); give a number of steps, a share of them below 1, or "
            "--logging_strategy no",
        ),
        (["--output_dir="], "--output_dir must be a folder (got ''); name one, such as --output_dir output"),
        (
            ["--warmup_ratio", "1.5"],
            "--warmup_ratio must be a share of the steps, at least 0 and below 1 (got 1.5); give --warmup_steps a "
            "number of steps",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_command_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("full.csv", "full.json"):
        write(tmp_path / name, ROWS)
    start = ["--model_name_or_path", "model", "--train_file", "full.csv", "--output_dir", "out", "--do_train"]
    before = set(tmp_path.iterdir())
    assert refused([*start, *argv], capsys) == said
    assert set(tmp_path.iterdir()) == before


def test_a_model_must_be_named_once_something_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--do_train"], capsys)
    assert said.startswith("the following arguments are required: --model_name_or_path")


def test_help_lists_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(["--task_name", "mrpc", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for name in ("--compare", "--task_name", "--ubatch_size", "--learning_rate", "--evaluation_strategy"):
        assert name in shown


# ---- Options that are gone


def parsed(tmp_path: Path, *argv: str) -> Options:
    file = write(tmp_path / "train.csv", ROWS)
    start = ["--model_name_or_path", "model", "--train_file", file, "--output_dir", str(tmp_path / "out")]
    return run_glue_l2l.parse_options([*start, "--do_train", *argv])


@pytest.mark.parametrize(
    ("argv", "option", "value", "said"),
    [
        (["--evaluation_strategy", "no"], "eval_strategy", "no", "--eval_strategy no"),
        (["--warmup_ratio", "0.25"], "warmup_steps", 0.25, "--warmup_steps 0.25"),
        (["--no_cuda"], "use_cpu", True, "--use_cpu True"),
        (["--no_cuda", "False"], "use_cpu", False, "--use_cpu False"),
        (["--per_gpu_train_batch_size", "3"], "per_device_train_batch_size", 3, "--per_device_train_batch_size 3"),
        (["--per_gpu_eval_batch_size", "5"], "per_device_eval_batch_size", 5, "--per_device_eval_batch_size 5"),
        (["--group_by_length"], "train_sampling_strategy", "group_by_length", "--train_sampling_strategy group_by"),
        (["--adafactor"], "optim", "adafactor", "--optim adafactor"),
        (["--push_to_hub_model_id", "me/it"], "hub_model_id", "me/it", "--hub_model_id me/it"),
        (["--push_to_hub_token", "secret"], "hub_token", "secret", "--hub_token"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_with_a_successor_are_translated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, argv: list[str], option: str, value: object, said: str
) -> None:
    options = parsed(tmp_path, *argv)
    assert getattr(options.training, option) == value
    assert argv[0].removeprefix("--") not in options.given
    [warned] = caplog.messages
    assert warned.startswith(f"{argv[0]} is gone from transformers 5: it is taken as {said}")
    assert "secret" not in warned


def test_a_share_of_warmup_steps_is_what_it_was(tmp_path: Path) -> None:
    assert parsed(tmp_path, "--warmup_ratio", "0.1").training.get_warmup_steps(25) == 3  # rounded up


@pytest.mark.parametrize(
    "argv",
    [["--overwrite_output_dir"], ["--save_safetensors"], ["--use_auth_token"], ["--use_mps_device"]],
    ids=lambda argv: argv[0],
)
def test_options_without_effect_are_accepted_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, argv: list[str]
) -> None:
    options = parsed(tmp_path, *argv)
    [warned] = caplog.messages
    reason = NEEDLESS[argv[0].removeprefix("--")]
    assert warned == f"{argv[0]} is gone from transformers 5 and has no effect: {reason}"
    assert options.given == parsed(tmp_path).given


def test_the_folder_of_logs_goes_to_where_transformers_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    parsed(tmp_path, "--logging_dir", "logs")
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "logs"
    assert "TENSORBOARD_LOGGING_DIR=logs" in caplog.text


def test_every_option_that_is_gone_is_gone_and_has_a_fate() -> None:
    retired = {field.name for field in dataclasses.fields(RetiredArguments)}
    current = {field.name for field in dataclasses.fields(L2LTrainingArguments)}
    assert not retired & current
    assert set(SUCCESSORS.values()) <= current
    fates = [*SUCCESSORS, *NEEDLESS, *REPLACED, "logging_dir"]
    assert sorted(retired) == sorted(fates)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"do_train": true}', "model_name_or_path"),
        ('{"model_name_or_path": "model", "learning_speed": 1}', "learning_speed"),
        ('{"model_name_or_path": "model", "trainer": "both"}', "argument --trainer: invalid choice: 'both'"),
        ('{"model_name_or_path": "model", "max_steps": "many"}', "invalid int value: 'many'"),
        ('{"model_name_or_path": "model", "do_train": "perhaps"}', "Truthy value expected: got perhaps"),
        ("[1, 2]", "must hold one object"),
    ],
)
def test_a_bad_options_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    file = tmp_path / "options.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    found = refused([str(file)], capsys)
    assert found.startswith(f"the options in {file} could not be used: ")
    assert reason in found


@needs_datasets
@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("argv", "logging", "evaluation"),
    [
        ([], ("steps", 0.02), ("no", None)),
        (["--eval_strategy", "steps"], ("steps", 0.02), ("steps", 500)),  # not as often as logs
        (["--eval_strategy", "steps", "--eval_steps", "7"], ("steps", 0.02), ("steps", 7)),
        (["--eval_strategy", "steps", "--logging_steps", "5"], ("steps", 5), ("steps", 5)),
        (["--logging_strategy", "steps"], ("steps", 500), ("no", None)),
        (["--logging_strategy", "epoch"], ("epoch", 500), ("no", None)),
    ],
)
def test_fifty_logs_are_made_of_a_run_unless_it_was_said_how_often(
    tmp_path: Path, argv: list[str], logging: object, evaluation: object
) -> None:
    words = command("model", tmp_path, train_file=write(tmp_path / "t.csv", ROWS), do_eval=False)
    words += ["--validation_file", str(tmp_path / "t.csv")]
    args = run_glue_l2l.parse_options([*words, *argv]).training
    assert (args.logging_strategy, args.logging_steps) == logging
    assert (args.eval_strategy, args.eval_steps) == evaluation


@needs_datasets
@pytest.mark.parametrize(("rows", "added", "least"), [(ROWS, 2, 3), (PAIRS, 3, 5)], ids=["text", "pair"])
def test_a_length_without_room_for_text_is_refused_and_more_than_the_tokenizer_allows_is_said(
    tiny_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    rows: list[Row],
    added: int,
    least: int,
) -> None:
    options = {"train_file": write(tmp_path / "t.csv", rows), "do_eval": False}
    with pytest.raises(SystemExit):
        run_glue_l2l.main(command(tiny_model, tmp_path, **options, max_seq_length=least - 1))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"run_glue_l2l.py: --max_seq_length must be at least {least}: {added} tokens that the tokenizer adds, and one "
    )
    assert not (tmp_path / "out").exists()
    trainer = trainer_of(command(tiny_model, tmp_path, **options, max_seq_length=least))
    assert {len(ids) for ids in trainer.train_dataset["input_ids"]} == {least}
    assert not any("max_seq_length" in each for each in caplog.messages)
    trainer_of(command(tiny_model, tmp_path, **options, max_seq_length=40))
    assert "--max_seq_length 40 is more than the tokenizer allows; using 32" in caplog.messages


@needs_datasets
@pytest.mark.parametrize("source", ["task_name", "dataset_name"])
def test_a_hub_out_of_reach_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    options = {"task_name": ("mrpc", "nyu-mll/glue"), "dataset_name": ("some/data", "some/data")}
    given, name = options[source]
    said = refused(command("model", tmp_path, **{source: given}), capsys)
    assert said.startswith(f"the data set {name} could not be had from the Hub (Couldn't reach '{name}' on the Hub")
    assert said.endswith(
        "; try again with a connection, or give files of your own with --train_file train.csv --validation_file "
        "validation.csv in the place of --task_name or --dataset_name"
    )


@needs_datasets
def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    found = refused(command(str(tmp_path / "nowhere"), tmp_path, **options), capsys)
    assert found.startswith(
        f"--model_name_or_path must be a folder or a name on the Hub, with a model and its tokenizer (got {tmp_path}"
    )
    assert found.endswith("); check the name, the path, or the connection")


@needs_datasets
def test_a_tokenizer_that_is_not_there_is_said_by_its_own_option(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False, "tokenizer_name": "no/where"}
    said = refused(command(tiny_model, tmp_path, **options), capsys)
    assert said.startswith(
        "--tokenizer_name must be a folder or a name on the Hub, with a model and its tokenizer (got"
    )


@needs_datasets
@pytest.mark.parametrize(
    ("package", "options", "said"),
    [
        (
            None,
            {"metric_for_best_model": "eval_bleu"},
            "--metric_for_best_model must be one of loss, accuracy, f1, matthews_correlation (got eval_bleu)",
        ),
        ("tensorboard", {"report_to": "tensorboard"}, "TensorBoardCallback requires tensorboard to be installed."),
        ("bitsandbytes", {"optim": "adamw_8bit"}, "You need to install `bitsandbytes`"),
    ],
)
def test_what_only_the_run_can_tell_is_said_in_one_sentence(
    tiny_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    package: str | None,
    options: Row,
    said: str,
) -> None:
    if package is not None and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(command(tiny_model, tmp_path, **files, **options))
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_script_is_imported_without_the_packages_of_the_extra(apart: bool) -> None:
    """In a process that begins anew, or that was forked when transformers was there."""
    code = """
import sys

absent = ["datasets", "evaluate", "sklearn", "scipy", "matplotlib"]
sys.modules.update(dict.fromkeys(absent))
import run_glue_l2l
assert "hf_l2l.glue.metric" not in sys.modules
"""
    if not apart:
        pool = RankPool(1)
        pool.run(exec, code)
        pool.close()
        return
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.usefixtures("_no_model")
def test_without_datasets_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "hf_l2l.glue.metric", raising=False)  # imported by an earlier test
    monkeypatch.setitem(sys.modules, "datasets", None)
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    assert refused(command("model", tmp_path, **options), capsys) == (
        "tasks, files and metrics need the package datasets (it is not installed); install all that is needed with: "
        "pip install datasets evaluate scikit-learn scipy"
    )
