"""What programs say: the line that a training begins with, and of run_glue_l2l.py its help, its sizes, options as they
were typed, and its last words."""

from __future__ import annotations

import importlib.util
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
from hf_l2l.glue.messages import leaves_no_empty_folder
from hf_l2l.glue.said import ending
from hf_l2l.glue.said.ending import last_words
from hf_l2l.glue.said.typed import as_flags
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.own_command import python
from tiers import more
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
import run_glue_l2l  # without the packages of the extra
assert "hf_l2l.glue.metric" not in sys.modules
l2l_trainer({folder!r}, max_steps=1).train()
"""


def test_a_program_says_in_one_line_what_runs(tmp_path):
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


def test_details_are_for_those_who_ask(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_l2l"):
        l2l_trainer(tmp_path / "a", max_steps=1).train()
        assert "Layer-to-layer execution" not in caplog.text
        hf.logging.set_verbosity_info()
        l2l_trainer(tmp_path / "b", max_steps=1).train()
    assert "Layer-to-layer execution" in caplog.text
    assert {record.name for record in caplog.records if "ayer" in record.getMessage()} == {"hf_l2l"}


# ---- --help


def shown_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(["--task_name", "mrpc", "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_begins_with_examples_and_the_options_of_l2l(monkeypatch, capsys):
    lines = shown_help(monkeypatch, capsys, 100).splitlines()
    assert lines[0].startswith("usage: run_glue_l2l.py ")
    titles = [title for title in lines if re.fullmatch(r"(Options of|The) [^.`]*:", title)]
    first, script, model, data, theirs, retired = map(lines.index, titles)
    assert len([line for line in lines[:first] if line.startswith("    python run_glue_l2l.py")]) >= 4

    def flags(start: int, end: int) -> list[str]:
        return [line.split()[0].removeprefix("--") for line in lines[start:end] if line.startswith("  --")]

    assert flags(first, script) == list(OWN_OPTIONS)
    assert flags(script, model) == ["trainer", "compare", "simulate", "help"]
    assert {"train_file", "text_columns", "label_column", "is_regression"} <= {*flags(data, theirs)}
    assert {"learning_rate", "output_dir"} <= {*flags(theirs, retired)}
    assert flags(retired, len(lines))[0] == "evaluation_strategy"
    every = flags(first, len(lines))
    assert len(every) == len(set(every))
    assert run_glue_l2l.PARSER.names < {*every}


def test_help_says_values_and_defaults_within_the_width_of_the_terminal(monkeypatch, capsys):
    for columns in (80, 200):
        shown = shown_help(monkeypatch, capsys, columns)
        assert max(map(len, shown.splitlines())) <= min(100, columns)

    def entry(flag: str) -> str:
        [found] = re.findall(rf"^  {flag}\b.*\n(?: {{8}}.*\n)+", shown, flags=re.MULTILINE)
        return " ".join(found.split())

    for begins in (
        "--ubatch_size N Rows",
        "--stash {device,host,disk,auto} ",
        '--l2l_spill_dir FOLDER With --stash disk or "auto", ',
        "--l2l_state_window N With --l2l_state_tier disk, ",
        "--compare [true|false] ",
        "--text_columns VALUE ... ",
        "--train_file FILE ",
        "--learning_rate X The initial learning rate for the optimizer. Default: 5e-05.",
    ):
        assert entry(begins.split()[0]).startswith(begins)
    ends = {"--stash": "Default: device.", "--logging_steps": "Default: 0.02.", "--model_name_or_path": "Required."}
    assert {flag: entry(flag)[-len(end) :] for flag, end in ends.items()} == ends
    assert "One of adamw_torch, adamw_torch_fused, " in entry("--optim")
    assert "%%" not in shown


# ---- options as they were typed


def test_options_are_called_as_they_were_typed():
    for said, typed in (
        ("stash must be one of 'device' (got 'ssd')", "--stash must be one of 'device' (got 'ssd')"),
        ("fp16 cannot be used (got fp16=True)", "--fp16 cannot be used (got --fp16 True)"),
        (
            "one (got cmp='bf16' and bf16=True); leave out bf16",
            "one (got --cmp bf16 and --bf16 True); leave out --bf16",
        ),
        ("it needs stash='host', 'disk' or 'auto'", "it needs --stash 'host', 'disk' or 'auto'"),
        ("or leave l2l_spill_dir out", "or leave --l2l_spill_dir out"),
        ("(got 3.0 with cmp=None), set l2l_trace=['A']", "(got 3.0 without --cmp), set --l2l_trace ['A']"),
        ("set device_memory_budget='1.5 GiB'", "set --device_memory_budget '1.5 GiB'"),
        # What is none, or is one already.
        ("the stash and the seed of a token overflow in fp16", None),
        ("add --train_file FILE, or --ubatch_size=2", None),
        ("no file in /data/output_dir/train_file.csv", None),
        ("its columns are 'label_column', 'text_columns'", None),
        ("there is no trainer_state.json and no max_stepsize", None),
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
@pytest.mark.parametrize("ours", [True, False])
def test_errors_of_the_training_loop_pass(tiny_model, tmp_path, monkeypatch, ours):
    """Those of the package, once training has begun, and others at any time."""
    from hf_l2l.engine import relay

    file = relay.__file__ if ours else __file__
    exec(compile("def fails(*_, **__): raise ValueError('a bug')", file, "exec"), found := {})
    monkeypatch.setattr(hf.Trainer, "training_step" if ours else "get_train_dataloader", found["fails"])
    argv = command(tiny_model, tmp_path, train_file=write(tmp_path / "train.csv", ROWS), do_eval=False)
    with pytest.raises(ValueError, match="a bug"):
        run_glue_l2l.main(argv)


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    def stops_in(folder: Path, *made: str) -> None:
        with pytest.raises(SystemExit), leaves_no_empty_folder(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            for name in made:
                (folder / name).touch()
            raise SystemExit(2)

    stops_in(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    stops_in(tmp_path / "c" / "d", "file")
    assert (tmp_path / "c" / "d" / "file").exists()
    (tmp_path / "e").mkdir()
    stops_in(tmp_path / "e")
    assert (tmp_path / "e").is_dir()


# ---- sizes, and last words


@needs_datasets
@pytest.mark.parametrize("disable_tqdm", [False, *more(True)])
def test_sizes_are_printed_as_text_and_written_as_bytes(tiny_model, tmp_path, monkeypatch, capsys, disable_tqdm):
    log = hf.Trainer.log
    monkeypatch.setattr(
        hf.Trainer, "log", lambda self, logs, *rest: log(self, {**logs, "device_peak_bytes": 5 * 2**20}, *rest)
    )
    file = write(tmp_path / "train.csv", ROWS)
    argv = command(tiny_model, tmp_path, train_file=file, do_eval=False, logging_steps=1, disable_tqdm=disable_tqdm)
    run_glue_l2l.main(argv)
    shown = "".join(capsys.readouterr())
    assert shown.count("'device_peak_bytes': '5.0 MiB'") == 3
    assert re.search(r"^  train_host_bytes += +\d+\.\d KiB$", shown, flags=re.MULTILINE)
    assert isinstance(results(tmp_path, "train")["train_host_bytes"], int)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert {entry["device_peak_bytes"] for entry in state["log_history"]} == {5 * 2**20}


def said_at_the_end(caplog: pytest.LogCaptureFixture, argv: list[str]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_glue_l2l.main(argv)
    return caplog.messages[-1].splitlines()


STARS = [{"q": row["question"], "a": row["sentence"], "stars": row["label"]} for row in PAIRS]


@needs_datasets
@pytest.mark.parametrize(
    ("rows", "chosen", "metric"),
    [
        (NAMED, {}, "eval_accuracy"),
        (STARS, {"text_columns": "q,a", "label_column": "stars", "is_regression": True}, "eval_mse"),
    ],
    ids=["text", "pair"],
)
def test_a_finished_run_says_what_to_type_next_and_that_runs(
    tiny_model, tmp_path, rows, chosen, metric, monkeypatch, caplog, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    for name in ("train", "dev", "test"):
        write(Path(f"{name}.csv"), rows)
    options: Row = {"do_eval": False, "max_seq_length": 16, "save_strategy": "epoch", **chosen}
    lines = said_at_the_end(caplog, command(tiny_model, Path("my run"), train_file="train.csv", **options))
    out = "my run/out"
    assert out in lines[0]
    *files, _, imported, used, _, evaluated, _, predicted, _, resumed = lines[1:]
    named = [line.split()[0] for line in files]
    assert all((tmp_path / out / name).stat().st_size > 0 for name in named)
    has_pictures = importlib.util.find_spec("matplotlib") is not None
    assert named == ["all_results.json", "trainer_state.json", *(["training.png"] if has_pictures else [])]
    capsys.readouterr()
    assert "truncation=True, max_length=16)" in used
    exec(f"{imported.strip()}\n{used.strip().replace('a text', 'a film ' * 40)}", {})  # it is cut
    assert "'label':" in capsys.readouterr().out
    assert "the same command with more --num_train_epochs" in resumed

    interpreter, flag, module, *words = shlex.split(evaluated)
    assert (interpreter, flag, module) == (python(), "-m", "run_glue_l2l")  # the script is not below this folder
    assert "--max_seq_length 16" in evaluated
    assert metric in run_glue_l2l.main(words)
    assert capsys.readouterr().out.splitlines()[-1].startswith("accuracy ") == (metric == "eval_accuracy")
    assert "training is done" not in caplog.messages[-1]
    run_glue_l2l.main(shlex.split(predicted)[3:])
    assert (tmp_path / out / "predictions" / "predict_results.txt").is_file()


def test_last_words_without_checkpoints_and_of_a_task(monkeypatch):
    monkeypatch.setattr(ending, "python", lambda: "my python")
    given: Row = {"task_name": "mrpc", "learning_rate": 1.0}
    lines = last_words("out", {"a.json": "the metrics"}, given, "run_glue_l2l.py", 1, False, 512).splitlines()
    assert lines[1] == "  a.json  the metrics"
    commands = [line.strip() for line in lines if "run_glue_l2l.py" in line]
    start = "'my python' run_glue_l2l.py --model_name_or_path out --task_name mrpc"
    assert [re.sub(r"python' \S*run", "python' run", each) for each in commands] == [
        f"{start} --do_eval --output_dir out/evaluation",
        f"{start} --do_predict --output_dir out/predictions",
    ]
    assert lines[-1].strip().startswith("no checkpoint was saved")
    assert any(', truncation=True)("a text")' in line for line in lines)
    said = last_words("out", {}, {**given, "max_seq_length": 600}, "run_glue_l2l.py", 1, False, 512)
    assert ', truncation=True, max_length=512)("a text")' in said
