"""What programs say: the line that a training begins with, and of run_glue_l2l.py its help, its sizes, options as they
were typed, and its last words."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

import run_glue_l2l
from glue_script import NAMED, PAIRS, ROWS, Row, command, needs_datasets, results, write
from hf_l2l.glue.said.typed import as_flags
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.own_command import python
from tiers import more, nightly
from training import l2l_trainer

pytestmark = pytest.mark.usefixtures("datasets_cache")


# ---- a training

ON_THE_CPU = "no accelerator: trains on the CPU, as Trainer would"
PROGRAM = """
import sys
sys.path.insert(0, {helpers!r})
from training import l2l_trainer
absent = ["datasets", "evaluate", "sklearn", "scipy", "matplotlib"]
sys.modules.update(dict.fromkeys(absent))
import run_glue_l2l
l2l_trainer({folder!r}, max_steps=1).train()
"""


@nightly
def test_a_program_says_in_one_line_what_runs_also_without_the_packages_of_the_extra(tmp_path):
    code = PROGRAM.format(helpers=str(Path(__file__).parents[1] / "helpers"), folder=str(tmp_path))
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


# ---- --help


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


# ---- options as they were typed


def test_options_are_called_as_they_were_typed():
    for said, typed in (
        ("stash must be one of 'device' (got 'ssd')", "--stash must be one of 'device' (got 'ssd')"),
        (
            "one (got cmp='bf16' and bf16=True); leave out bf16",
            "one (got --cmp bf16 and --bf16 True); leave out --bf16",
        ),
        ("it needs stash='host', 'disk' or 'auto'", "it needs --stash 'host', 'disk' or 'auto'"),
        ("(got 3.0 with cmp=None), set l2l_trace=['A']", "(got 3.0 without --cmp), set --l2l_trace ['A']"),
        # What is none, or is one already.
        ("the stash and the seed of a token overflow in fp16", None),
        ("add --train_file FILE, or --ubatch_size=2", None),
        ("no file in /data/output_dir/train_file.csv", None),
    ):
        expected = said if typed is None else typed
        assert as_flags(said, run_glue_l2l.PARSER.names) == expected
        assert as_flags(expected, run_glue_l2l.PARSER.names) == expected


@needs_datasets
def test_what_the_model_refuses_is_said_in_one_line_and_leaves_no_folder(tiny_model, tmp_path, capsys):
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    for options, keyword in (
        ({"l2l_resident_layers": 7, "do_train": False}, "--l2l_resident_layers must be at most"),
        ({"l2l_layer_classes": "Nothing"}, "every name in --l2l_layer_classes must be"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run_glue_l2l.main(command(tiny_model, tmp_path, **files, **options))
        assert stopped.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"run_glue_l2l.py: {keyword}")
        assert not (tmp_path / "out").exists()


@needs_datasets
def test_errors_of_the_training_loop_pass(tiny_model, tmp_path, monkeypatch):
    """Those of the package, once training has begun."""
    from hf_l2l.engine import relay

    exec(compile("def fails(*_, **__): raise ValueError('a bug')", relay.__file__, "exec"), found := {})
    monkeypatch.setattr(hf.Trainer, "training_step", found["fails"])
    argv = command(tiny_model, tmp_path, train_file=write(tmp_path / "train.csv", ROWS), do_eval=False)
    with pytest.raises(ValueError, match="a bug"):
        run_glue_l2l.main(argv)


# ---- sizes, and last words


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


STARS = [{"q": row["question"], "a": row["sentence"], "stars": row["label"]} for row in PAIRS]


@needs_datasets
@pytest.mark.parametrize(
    ("rows", "chosen", "metric"),
    [
        (STARS, {"text_columns": "q,a", "label_column": "stars", "is_regression": True}, "eval_mse"),
        *more((NAMED, {}, "eval_accuracy")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_finished_run_says_what_to_type_next_and_that_runs(
    tiny_model, tmp_path, rows, chosen, metric, monkeypatch, caplog, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    for name in ("train", "dev", "test"):
        write(Path(f"{name}.csv"), rows)
    options: Row = {"do_eval": False, "max_seq_length": 16, "save_strategy": "epoch", **chosen}
    with caplog.at_level(logging.INFO):
        run_glue_l2l.main(command(tiny_model, Path("my run"), train_file="train.csv", **options))
    lines = caplog.messages[-1].splitlines()
    out = "my run/out"
    assert out in lines[0]
    *files, _, imported, used, _, evaluated, _, predicted, _, resumed = lines[1:]
    assert all((tmp_path / out / line.split()[0]).stat().st_size > 0 for line in files)
    capsys.readouterr()
    exec(f"{imported.strip()}\n{used.strip().replace('a text', 'a film ' * 40)}", {})  # it is cut
    assert "'label':" in capsys.readouterr().out
    assert "the same command with more --num_train_epochs" in resumed

    interpreter, flag, module, *words = shlex.split(evaluated)
    assert (interpreter, flag, module) == (python(), "-m", "run_glue_l2l")  # the script is not below this folder
    assert "--max_seq_length 16" in evaluated
    assert metric in run_glue_l2l.main(words)
    run_glue_l2l.main(shlex.split(predicted)[3:])
    assert (tmp_path / out / "predictions" / "predict_results.txt").is_file()
