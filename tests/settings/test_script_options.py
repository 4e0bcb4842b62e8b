"""What run_glue_l2l.py says of files and options that it cannot use, of options that are gone, in its help, and at the
end; and the line that a training begins with. What its parser refuses anyway: tests/helpers/refusal_commands.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import run_glue_l2l
from glue_script import NAMED, PAIRS, ROWS, SCORED, Row, command, needs_datasets, refused, results, trainer_of, write
from hf_l2l import L2LTrainingArguments
from hf_l2l.glue.options import Options
from hf_l2l.glue.retired import NEEDLESS, REPLACED, SUCCESSORS, RetiredArguments
from hf_l2l.glue.said.typed import as_flags
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.own_command import python
from tiers import nightly
from training import l2l_trainer

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


@pytest.mark.usefixtures("_no_model")
def test_bad_command_lines_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "full.csv", ROWS)
    start = "--model_name_or_path model --train_file full.csv --output_dir out --do_train --max_grad_norm 0"
    for words, keyword in (
        # Options are called as they were typed, whoever refuses them.
        ("--l2l_nonfinite skip --eps_update eager", "--l2l_nonfinite"),
        ("--l2l_boundary host", "--l2l_boundary"),
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
    for words, logs, evaluation in (
        ("", ("steps", 0.02), ("no", None)),
        ("--eval_strategy steps", ("steps", 0.02), ("steps", 500)),  # not as often as logs
        ("--eval_strategy steps --eval_steps 7", ("steps", 0.02), ("steps", 7)),
        ("--eval_strategy steps --logging_steps 5", ("steps", 5), ("steps", 5)),
        ("--logging_strategy epoch", ("epoch", 500), ("no", None)),
    ):
        args = parsed(tmp_path, "--validation_file", str(tmp_path / "train.csv"), *words.split()).training
        assert (args.logging_strategy, args.logging_steps) == logs
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
def test_what_only_the_run_can_tell_is_said_in_one_sentence(tiny_model, tmp_path, capsys):
    """Packages and files that are not there are named."""
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    for package, options, keyword in (
        (None, {"task_name": "mrpc"}, "the data set nyu-mll/glue could not be had from the Hub (Couldn't reach"),
        (None, {**files, "model_name_or_path": "no/where"}, "--model_name_or_path must be a folder or a name"),
        (None, {**files, "l2l_resident_layers": 7, "do_train": False}, "--l2l_resident_layers must be at most"),
        (None, {**files, "l2l_layer_classes": "Nothing"}, "every name in --l2l_layer_classes must be"),
        (None, {**files, "metric_for_best_model": "eval_bleu"}, "--metric_for_best_model must be one of loss, acc"),
        ("tensorboard", {**files, "report_to": "tensorboard"}, "TensorBoardCallback requires tensorboard to be"),
        ("bitsandbytes", {**files, "optim": "adamw_8bit"}, "You need to install `bitsandbytes`"),
    ):
        if package is not None and importlib.util.find_spec(package) is not None:
            continue
        with pytest.raises(SystemExit) as stopped:
            run_glue_l2l.main(command(tiny_model, tmp_path, **options))
        assert stopped.value.code == 2
        assert keyword in (said := capsys.readouterr().err.splitlines()[-1]) and said.startswith("run_glue_l2l.py: ")
        assert "no/where" not in options.values() or "connection" in said
        assert not (tmp_path / "out").exists() or package or "bleu" in str(options)


@pytest.mark.usefixtures("_no_model")
def test_without_datasets_the_command_that_installs_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hf_l2l.glue.metric", raising=False)  # imported by an earlier test
    monkeypatch.setitem(sys.modules, "datasets", None)
    options = {"train_file": write(tmp_path / "train.csv", ROWS), "do_eval": False}
    assert "pip install datasets evaluate scikit-learn scipy" in refused(command("model", tmp_path, **options), capsys)


# ---- what it says: help, options as they were typed, sizes, and last words


def test_help_begins_with_examples_and_the_options_of_l2l_and_says_values_and_defaults(monkeypatch, capsys):
    """Within the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(["--task_name", "mrpc", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("usage: run_glue_l2l.py ")
    flags = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    assert flags[: len(OWN_OPTIONS)] == list(OWN_OPTIONS)
    assert len(flags) == len(set(flags)) and run_glue_l2l.PARSER.names < {*flags}
    text = " ".join(shown.split())
    for words in (
        "python run_glue_l2l.py ",
        "--stash {device,host,disk,auto} ",
        '--l2l_spill_dir FOLDER With --stash disk or "auto", ',
        "--text_columns VALUE ... ",
        "--learning_rate X The initial learning rate for the optimizer. Default: 5e-05.",
    ):
        assert words in text


def test_options_are_called_as_they_were_typed():
    for said, typed in (
        ("stash must be one of 'device' (got 'ssd')", "--stash must be one of 'device' (got 'ssd')"),
        ("(got cmp='bf16' and bf16=True); leave out bf16", "(got --cmp bf16 and --bf16 True); leave out --bf16"),
        ("it needs stash='host', 'disk' or 'auto'", "it needs --stash 'host', 'disk' or 'auto'"),
        ("(got 3.0 with cmp=None), set l2l_trace=['A']", "(got 3.0 without --cmp), set --l2l_trace ['A']"),
        # What is none, or is one already.
        ("the stash and the seed of a token overflow in fp16", None),
        ("add --train_file FILE, or --ubatch_size=2", None),
        ("no file in /data/output_dir/train_file.csv", None),
    ):
        expected = said if typed is None else typed
        assert [as_flags(each, run_glue_l2l.PARSER.names) for each in (said, expected)] == [expected] * 2


@needs_datasets
def test_errors_of_the_training_loop_pass(tiny_model, tmp_path, monkeypatch):
    """Those of the package, once training has begun."""
    from hf_l2l.engine import relay

    exec(compile("def fails(*_, **__): raise ValueError('a bug')", relay.__file__, "exec"), found := {})
    monkeypatch.setattr(hf.Trainer, "training_step", found["fails"])
    argv = command(tiny_model, tmp_path, train_file=write(tmp_path / "train.csv", ROWS), do_eval=False)
    with pytest.raises(ValueError, match="a bug"):
        run_glue_l2l.main(argv)


@nightly
@needs_datasets
def test_sizes_are_printed_as_text_and_written_as_bytes(tiny_model, tmp_path, monkeypatch, capsys):
    log = hf.Trainer.log
    monkeypatch.setattr(
        hf.Trainer, "log", lambda self, logs, *rest: log(self, {**logs, "device_peak_bytes": 5 * 2**20}, *rest)
    )
    file = write(tmp_path / "train.csv", ROWS)
    argv = command(tiny_model, tmp_path, train_file=file, do_eval=False, logging_steps=1, disable_tqdm=False)
    run_glue_l2l.main(argv)
    shown = "".join(capsys.readouterr())
    assert shown.count("'device_peak_bytes': '5.0 MiB'") == 3
    assert re.search(r"^  train_host_bytes += +\d+\.\d KiB$", shown, flags=re.MULTILINE)
    assert isinstance(results(tmp_path, "train")["train_host_bytes"], int)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert {entry["device_peak_bytes"] for entry in state["log_history"]} == {5 * 2**20}


@needs_datasets
def test_a_finished_run_says_what_to_type_next_and_that_runs(tiny_model, tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    for name in ("train", "dev", "test"):
        rows = [{"q": row["question"], "a": row["sentence"], "stars": row["label"]} for row in PAIRS]
        write(Path(f"{name}.csv"), rows)
    options: Row = {"text_columns": "q,a", "label_column": "stars", "is_regression": True, "max_seq_length": 16}
    argv = command(tiny_model, Path("my run"), train_file="train.csv", do_eval=False, save_strategy="epoch", **options)
    with caplog.at_level(logging.INFO):
        run_glue_l2l.main(argv)
    out = "my run/out"
    first, *files, _, imported, used, _, evaluated, _, predicted, _, resumed = caplog.messages[-1].splitlines()
    assert out in first
    assert all((tmp_path / out / line.split()[0]).stat().st_size > 0 for line in files)
    capsys.readouterr()
    exec(f"{imported.strip()}\n{used.strip().replace('a text', 'a film ' * 40)}", {})  # it is cut
    assert "'label':" in capsys.readouterr().out
    assert "the same command with more --num_train_epochs" in resumed

    assert shlex.split(evaluated)[:3] == [python(), "-m", "run_glue_l2l"]  # the script is not below this folder
    assert "--max_seq_length 16" in evaluated
    assert "eval_mse" in run_glue_l2l.main(shlex.split(evaluated)[3:])
    run_glue_l2l.main(shlex.split(predicted)[3:])
    assert (tmp_path / out / "predictions" / "predict_results.txt").is_file()


# ---- what a training says

ON_THE_CPU = "no accelerator: trains on the CPU, as Trainer would"


@nightly
def test_a_program_says_in_one_line_what_runs_also_without_the_packages_of_the_extra(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
from training import l2l_trainer
sys.modules.update(dict.fromkeys(["datasets", "evaluate", "sklearn", "scipy", "matplotlib"]))
import run_glue_l2l
l2l_trainer({str(tmp_path)!r}, max_steps=1).train()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stderr.splitlines() if "hf_l2l" in line] == [f"[hf_l2l] {ON_THE_CPU}"]


def test_it_is_shown_as_the_program_shows_logs(tmp_path, monkeypatch, capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s - %(message)s"))
    for has_handler, verbosity, expected in (
        (True, "warning", [f"hf_l2l - {ON_THE_CPU}"]),
        (False, "warning", [f"[hf_l2l] {ON_THE_CPU}"]),
        (False, "error", []),
    ):
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler] * has_handler)
        getattr(hf.logging, f"set_verbosity_{verbosity}")()
        l2l_trainer(tmp_path, max_steps=1).train()
        assert [line for line in capsys.readouterr().err.splitlines() if "hf_l2l" in line] == expected
