"""What run_glue_l2l.py says for people: its help, options as they were typed, sizes, and its last words."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import run_glue_l2l
from glue_script import NAMED, PAIRS, ROWS, Row, command, needs_datasets, refused, results, write
from hf_l2l.glue.messages import leaves_no_empty_folder
from hf_l2l.glue.said import ending
from hf_l2l.glue.said.ending import last_words, with_sizes
from hf_l2l.glue.said.typed import as_flags
from hf_l2l.hf.training_args import OWN_OPTIONS
from hf_l2l.own_command import python

pytestmark = pytest.mark.usefixtures("datasets_cache")


# ---- --help


def shown_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(["--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_begins_with_examples_and_the_options_of_l2l(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown_help(monkeypatch, capsys, 100).splitlines()
    assert lines[0].startswith("usage: run_glue_l2l.py ")
    at = {title: lines.index(title) for title in lines if re.fullmatch(r"(Options of|The) [^.`]*:", title)}
    assert list(at) == [
        "Options of layer-to-layer execution (L2L):",
        "Options of this script:",
        "The model:",
        "The data:",
        "Options of transformers' TrainingArguments:",
        "Options of earlier versions of transformers:",
    ]
    first, script, model, data, theirs, retired = at.values()
    examples = [line for line in lines[:first] if line.startswith("    python run_glue_l2l.py")]
    assert len(examples) >= 4

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


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    assert max(map(len, shown_help(monkeypatch, capsys, columns).splitlines())) <= min(100, columns)


def test_help_says_values_and_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_help(monkeypatch, capsys, 100)

    def entry(flag: str) -> str:
        [found] = re.findall(rf"^  {flag}\b.*\n(?: {{8}}.*\n)+", shown, flags=re.MULTILINE)
        return " ".join(found.split())

    assert entry("--ubatch_size").startswith("--ubatch_size N Rows of the device batch")
    assert entry("--stash").startswith("--stash {device,host,disk,auto} ")
    assert entry("--stash").endswith("Default: device.")
    assert entry("--logging_steps").endswith("Default: 0.02.")  # that of the script
    assert entry("--l2l_spill_dir").startswith('--l2l_spill_dir FOLDER With --stash disk or "auto", ')
    assert entry("--l2l_state_window").startswith("--l2l_state_window N With --l2l_state_tier disk, ")
    assert entry("--model_name_or_path").endswith("Required.")
    assert entry("--compare").startswith("--compare [true|false] ")
    assert entry("--text_columns").startswith("--text_columns VALUE ... ")
    assert entry("--train_file").startswith("--train_file FILE ")
    assert entry("--learning_rate") == (
        "--learning_rate X The initial learning rate for the optimizer. Default: 5e-05."
    )
    assert "One of adamw_torch, adamw_torch_fused, " in entry("--optim")
    assert "%%" not in shown


# ---- options as they were typed

NAMES = run_glue_l2l.PARSER.names


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("ubatch_size must be 1 (got 0)", "--ubatch_size must be 1 (got 0)"),
        ("stash must be one of 'device' (got 'ssd')", "--stash must be one of 'device' (got 'ssd')"),
        (
            "fp16 cannot be used (got fp16=True); use cmp='fp16'",
            "--fp16 cannot be used (got --fp16 True); use --cmp fp16",
        ),
        (
            "one of them (got cmp='bf16' and bf16=True); leave out bf16",
            "one of them (got --cmp bf16 and --bf16 True); leave out --bf16",
        ),
        (
            "it needs stash='host', 'disk' or 'auto'; or leave l2l_spill_dir out",
            "it needs --stash 'host', 'disk' or 'auto'; or leave --l2l_spill_dir out",
        ),
        (
            "fp16 alone has it (got 3.0 with cmp=None), set l2l_layer_classes=['A', 'B']",
            "fp16 alone has it (got 3.0 without --cmp), set --l2l_layer_classes ['A', 'B']",
        ),
        ("set device_memory_budget='1.5 GiB'", "set --device_memory_budget '1.5 GiB'"),
        # What is none, or is one already.
        ("the stash and the seed of a token overflow in fp16", "the stash and the seed of a token overflow in fp16"),
        ("add --train_file FILE, or --ubatch_size=2", "add --train_file FILE, or --ubatch_size=2"),
        ("no file in /data/output_dir/train_file.csv", "no file in /data/output_dir/train_file.csv"),
        ("its columns are 'label_column', 'text_columns'", "its columns are 'label_column', 'text_columns'"),
        ("there is no trainer_state.json and no max_stepsize", "there is no trainer_state.json and no max_stepsize"),
    ],
)
def test_options_are_called_as_they_were_typed(said: str, typed: str) -> None:
    assert as_flags(said, NAMES) == typed
    assert as_flags(typed, NAMES) == typed


@needs_datasets
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"l2l_resident_layers": 7},
            "--l2l_resident_layers must be at most the number of layers of the model (got 7 for a model of 2 layers); "
            "use 2 for all of them",
        ),
        (
            {"l2l_layer_classes": "Nothing"},
            "every name in --l2l_layer_classes must be the class of a module of the model (no module is a 'Nothing')",
        ),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_the_model_refuses_is_said_in_one_line_and_leaves_no_folder(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Row, said: str, trains: bool
) -> None:
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(command(tiny_model, tmp_path, **files, do_train=trains, **options))
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"run_glue_l2l.py: {said}")
    assert not (tmp_path / "out").exists()


@needs_datasets
@pytest.mark.parametrize("ours", [True, False])
def test_errors_of_the_training_loop_pass(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Those of the package, once training has begun, and others at any time."""

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    if ours:
        from hf_l2l.engine import relay

        source = "def fails(*_, **__): raise ValueError('a bug')"
        exec(compile(source, relay.__file__, "exec"), found := {})
        monkeypatch.setattr(hf.Trainer, "training_step", found["fails"])
    else:
        monkeypatch.setattr(hf.Trainer, "get_train_dataloader", fails)
    file = write(tmp_path / "train.csv", ROWS)
    with pytest.raises(ValueError, match="a bug"):
        run_glue_l2l.main(command(tiny_model, tmp_path, train_file=file, do_eval=False))


# ---- folders


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
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


# ---- sizes


def test_sizes_are_text_for_people() -> None:
    metrics = {"train_device_bytes": 3 * 2**20, "train_loss": 0.5, "train_samples": 2048, "device_peak_bytes": 2**30}
    assert with_sizes(metrics) == {
        "train_device_bytes": "3.0 MiB",
        "train_loss": 0.5,
        "train_samples": 2048,
        "device_peak_bytes": "1.0 GiB",
    }


@needs_datasets
@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_sizes_are_printed_as_text_and_written_as_bytes(
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    disable_tqdm: bool,
) -> None:
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


# ---- last words


def said_at_the_end(caplog: pytest.LogCaptureFixture, argv: list[str]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_glue_l2l.main(argv)
    return caplog.messages[-1].splitlines()


@needs_datasets
@pytest.mark.parametrize("rows", [NAMED, PAIRS], ids=["text", "pair"])
def test_a_finished_run_says_what_to_type_next_and_that_runs(
    tiny_model: str,
    tmp_path: Path,
    rows: list[Row],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    for name in ("train", "dev", "test"):
        write(Path(f"{name}.csv"), rows)
    argv = command(
        tiny_model, Path("my run"), train_file="train.csv", do_eval=False, max_seq_length=16, save_strategy="epoch"
    )
    lines = said_at_the_end(caplog, argv)
    out = "my run/out"
    assert lines[0] == f"training is done: the model and its tokenizer are in {out}, with"
    *files, _, imported, used, _, evaluated, _, predicted, _, resumed = lines[1:]
    named = [line.split()[0] for line in files]
    assert all((tmp_path / out / name).stat().st_size > 0 for name in named)
    has_pictures = importlib.util.find_spec("matplotlib") is not None
    assert named == ["all_results.json", "trainer_state.json", *(["training.png"] if has_pictures else [])]
    capsys.readouterr()
    assert "truncation=True, max_length=16)" in used
    exec(f"{imported.strip()}\n{used.strip().replace('a text', 'a film ' * 40)}", {})  # it is cut
    assert "'label':" in capsys.readouterr().out
    assert resumed.strip().startswith("the same command with more --num_train_epochs")

    interpreter, flag, module, *words = shlex.split(evaluated)
    assert (interpreter, flag, module) == (python(), "-m", "run_glue_l2l")  # the script is not below this folder
    assert "eval_accuracy" in run_glue_l2l.main(words)
    run_glue_l2l.main(shlex.split(predicted)[3:])
    assert (tmp_path / out / "predictions" / "predict_results.txt").is_file()
    assert "max_seq_length 16" in evaluated


def test_last_words_without_checkpoints_and_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "python", lambda: "my python")
    given: Row = {"task_name": "mrpc", "learning_rate": 1.0}
    files = {"a.json": "the metrics", "picture.png": "memory"}
    said = last_words("out", files, given, "run_glue_l2l.py", 1, False, 512)
    assert said.splitlines()[:3] == [
        "training is done: the model and its tokenizer are in out, with",
        "  a.json       the metrics",
        "  picture.png  memory",
    ]
    commands = [line.strip() for line in said.splitlines() if "run_glue_l2l.py" in line]
    start = "'my python' run_glue_l2l.py --model_name_or_path out --task_name mrpc"
    assert [re.sub(r"python' \S*run", "python' run", each) for each in commands] == [
        f"{start} --do_eval --output_dir out/evaluation",
        f"{start} --do_predict --output_dir out/predictions",
    ]
    assert said.splitlines()[-1].strip().startswith("no checkpoint was saved; with --save_strategy epoch")
    assert ', truncation=True)("a text")' in said and "to use the model, in Python ('my python'):" in said
    said = last_words("out", {}, {**given, "max_seq_length": 600}, "run_glue_l2l.py", 1, False, 512)
    assert ', truncation=True, max_length=512)("a text")' in said


@needs_datasets
def test_what_was_chosen_of_own_data_is_repeated(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"q": row["sentence"], "a": "good", "stars": row["label"]} for row in ROWS]
    chosen = {"text_columns": "q,a", "label_column": "stars", "is_regression": True}
    argv = command(tiny_model, tmp_path, train_file=write(tmp_path / "t.csv", rows), do_eval=False, **chosen)
    words = next(line for line in said_at_the_end(caplog, argv) if "--do_eval" in line)
    data = run_glue_l2l.parse_options(
        [word if word != "dev.csv" else str(tmp_path / "t.csv") for word in shlex.split(words)[2:]]
    ).data
    assert (data.text_columns, data.label_column, data.is_regression) == (["q", "a"], "stars", True)


@needs_datasets
def test_an_evaluation_alone_has_no_last_words(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    assert not any(
        "training is done" in line
        for line in said_at_the_end(caplog, command(tiny_model, tmp_path, **files, do_train=False))
    )
    assert capsys.readouterr().out.splitlines()[-1].startswith("accuracy ")


def test_a_bad_option_of_the_trainer_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In transformers' own words, where it is transformers that refuses it."""
    file = write(tmp_path / "t.csv", ROWS)
    argv = command("model", tmp_path, train_file=file, do_eval=False, lr_scheduler_type="reduce_lr_on_plateau")
    assert refused(argv, capsys) == "--lr_scheduler_type reduce_lr_on_plateau requires an eval strategy"
