"""run_glue_l2l.py --compare and --simulate: both trainers in processes of their own, and what is said of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import run_glue_l2l
from glue_script import ROWS, Row, command, needs_datasets, write
from hf_l2l.glue import compare
from hf_l2l.glue.compare import run_apart
from hf_l2l.glue.messages import NO_MEMORY
from rank_pool import RankPool
from tiers import more

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """Options that name data files; what the other processes cache lies with the test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}


def row(document: dict[str, Any], name: str) -> Row:
    [found] = [row for row in document["rows"] if row["name"] == name]
    assert isinstance(found, dict)
    return found


def in_this_process(words: list[str], **_: Any) -> Any:
    """In place of `subprocess.run`: the script runs in this process, which takes a tenth of the time."""
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(words[2:])
    return subprocess.CompletedProcess(words, stopped.value.code)


def script(words: list[str], env: dict[str, str], said: str, dies: bool) -> int:
    """Run the script in this process, which writes what it says into a file."""
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(env["HF_DATASETS_CACHE"])
    status = 0
    try:
        run_glue_l2l.main(words)
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return status


def forked(words: list[str], env: dict[str, str] | None = None, check: bool = False, dies: bool = False) -> Any:
    """In place of `subprocess.run`: a process that was forked when transformers was there runs the script."""
    pool = RankPool(1)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
        pool.begin(script, words[2:], {**os.environ, **(env or {})}, said.name, dies)
        [(returned, status)] = pool.results()
        pool.close()
        sys.stderr.write(said.read())
    assert returned or dies, status
    return subprocess.CompletedProcess(words, status if returned else -signal.SIGKILL)


@needs_datasets
@pytest.mark.parametrize("plain_runs", ["it is said to", *more("it does")])
def test_both_trainers_run_and_are_compared(tiny_model, tmp_path, files, plain_runs, monkeypatch, capfd):
    """Both, and then on a device on which plain Trainer runs out of memory (or a process that ends as if it did)."""
    pytest.importorskip("matplotlib")
    if plain_runs == "it is said to":
        monkeypatch.setattr(compare.subprocess, "run", forked)
    argv = command(tiny_model, tmp_path, **files, compare=True, ubatch_size=None, use_cpu=None, max_steps=3)
    document = run_glue_l2l.main(argv)
    out = tmp_path / "out"
    assert json.loads((out / "compare.json").read_text()) == document
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert document["device"] == "simulated accelerator, unlimited"
    assert document["same_losses"] is True
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert row(document, name)["difference"] == 0
    assert row(document, "train_samples_per_second")["l2l"] is None  # of a simulated device
    device, host = row(document, "train_device_bytes"), row(document, "train_host_bytes")
    assert 0 < device["l2l"] < device["hf"]
    assert host["hf"] == 0 < host["l2l"]
    for side in ("hf", "l2l"):
        assert (out / side / "model.safetensors").is_file()
        assert json.loads((out / f"{side}.json").read_text())["trainer"] == side
    shown, _ = capfd.readouterr()
    assert "training loss: the same, to the last bit, at 3 logged steps" in shown

    # What fits between the two runs of Trainer and L2LTrainer; and what lay in the folder is not taken for new.
    limit = f"{(device['l2l'] + device['hf']) // 2}B"
    if plain_runs == "it is said to":
        shutil.copytree(out / "l2l", tmp_path / "made")

        def said(words: list[str], **_: Any) -> Any:
            if words[-1].endswith("hf.json"):
                return subprocess.CompletedProcess(words, NO_MEMORY)
            shutil.copytree(tmp_path / "made", out / "l2l", dirs_exist_ok=True)
            return subprocess.CompletedProcess(words, 0)

        monkeypatch.setattr(compare.subprocess, "run", said)
    document = run_glue_l2l.main([*argv, "--simulate", limit])
    assert document["out_of_memory"] == ["hf"]
    assert document["device"] == f"simulated accelerator, {limit}"
    loss = row(document, "train_loss")
    assert loss["hf"] is None and loss["l2l"] > 0
    shown, said = capfd.readouterr()
    assert shown.splitlines()[-2] == "Trainer ran out of memory"
    if plain_runs == "it is said to":
        return
    assert "run_glue_l2l.py: out of memory: the simulated accelerator is out of memory." in said
    assert said.count("try --trainer l2l") == 1


@needs_datasets
def test_a_run_that_dies_after_it_was_out_of_memory_counts_as_out_of_memory(
    tiny_model, tmp_path, files, monkeypatch, capfd
):
    """As a library or a driver can end a process that has no memory left."""
    monkeypatch.setattr(compare.subprocess, "run", partial(forked, dies=True))
    given = {"model_name_or_path": tiny_model, **files, "do_train": True, "max_steps": 1, "simulate": "50KB"}
    assert run_apart(run_glue_l2l.__file__, "hf", given, tmp_path, None).out_of_memory
    # What it left there is not taken for another run's.
    monkeypatch.setattr(compare.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, -6))
    with pytest.raises(SystemExit, match="-6"):
        run_apart(run_glue_l2l.__file__, "hf", given, tmp_path, None)


@needs_datasets
def test_a_run_that_fails_ends_the_comparison_and_one_that_is_refused_leaves_no_folder(
    tiny_model, tmp_path, files, monkeypatch, capfd
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(compare.subprocess, "run", in_this_process)

    def said_by(argv: list[str]) -> list[str]:
        with pytest.raises(SystemExit) as stopped:
            run_glue_l2l.main(argv)
        assert stopped.value.code == 2
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("run_glue_l2l.py: ")]

    given = {"train_file": files["train_file"], "do_eval": False, "compare": True}
    argv = command(tiny_model, tmp_path, **given)
    assert "--label_column must be a column" in said_by([*argv, "--label_column", "stars"])[0]
    assert not (tmp_path / "out").exists()
    of_run, of_comparison = said_by(command(str(tmp_path / "nowhere"), tmp_path, **given))
    assert of_run.startswith("run_glue_l2l.py: --model_name_or_path must be a folder")
    assert "the run of Trainer failed (exit code 2)" in of_comparison
    assert not (tmp_path / "out" / "compare.json").exists()


def children(folder: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[list[Row], list[dict[str, str]]]:
    """The options and the environment that a comparison starts its runs with, which do not run."""
    environments: list[dict[str, str]] = []

    def run(words: list[str], env: dict[str, str], check: bool) -> Any:
        environments.append(env)
        return subprocess.CompletedProcess(words, NO_MEMORY)

    monkeypatch.setattr(compare.subprocess, "run", run)
    files = {"train_file": write(folder / "t.csv", ROWS), "validation_file": write(folder / "v.csv", ROWS)}
    run_glue_l2l.main([*command("model", folder, **files, compare=True), *argv])
    return [json.loads((folder / "out" / f"{side}.json").read_text()) for side in ("hf", "l2l")], environments


def test_both_runs_take_the_same_options_and_plain_trainer_those_it_knows(tmp_path, monkeypatch):
    """Logs are left alone where they were asked for; a token is not written down."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "logs")
    flags = ["--stash", "host", "--evaluation_strategy", "steps", "--token", "hf_secret", "--hub_token", "hf_secret"]
    (hf, l2l), environments = children(tmp_path, monkeypatch, *flags, "--text_columns", "sentence")
    assert hf["text_columns"] == ["sentence"]
    assert [environment["TENSORBOARD_LOGGING_DIR"] for environment in environments] == ["logs/hf", "logs/l2l"]
    apart = {"trainer", "output_dir", "ubatch_size", "stash"}
    assert {name: value for name, value in l2l.items() if name not in apart} == {
        name: value for name, value in hf.items() if name not in apart
    }
    assert not {"ubatch_size", "stash"} & hf.keys()
    assert (l2l["ubatch_size"], l2l["stash"]) == (2, "host")
    assert hf["logging_steps"] == 0.02
    assert [environment["HF_TOKEN"] for environment in environments] == ["hf_secret"] * 2
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or b"hf_secret" not in file.read_bytes()
