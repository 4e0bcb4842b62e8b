"""run_glue_l2l.py --compare and --simulate: both trainers in processes of their own, and what is said of them."""

from __future__ import annotations

import json
import math
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
from hf_l2l.glue.compare import OUT_OF_MEMORY, Run, comparison, read_run, run_apart, table
from hf_l2l.glue.messages import NO_MEMORY
from rank_pool import RankPool

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
def test_both_trainers_run_and_are_compared(tiny_model, tmp_path, files, monkeypatch, capfd):
    """And a second time, where the process of plain Trainer ends as one that runs out of memory."""
    pytest.importorskip("matplotlib")
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
    assert all((out / side / "model.safetensors").is_file() for side in ("hf", "l2l"))
    assert "training loss: the same, to the last bit, at 3 logged steps" in capfd.readouterr().out

    # What fits between the two runs of Trainer and L2LTrainer; and what lay in the folder is not taken for new.
    limit = f"{(device['l2l'] + device['hf']) // 2}B"
    shutil.copytree(out / "l2l", tmp_path / "made")

    def ended(words: list[str], **_: Any) -> Any:
        if words[-1].endswith("hf.json"):
            return subprocess.CompletedProcess(words, NO_MEMORY)
        shutil.copytree(tmp_path / "made", out / "l2l", dirs_exist_ok=True)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(compare.subprocess, "run", ended)
    document = run_glue_l2l.main([*argv, "--simulate", limit])
    assert document["out_of_memory"] == ["hf"]
    assert document["device"] == f"simulated accelerator, {limit}"
    loss = row(document, "train_loss")
    assert loss["hf"] is None and loss["l2l"] > 0
    assert capfd.readouterr().out.splitlines()[-2] == "Trainer ran out of memory"


@needs_datasets
def test_a_run_that_dies_after_it_was_out_of_memory_counts_as_out_of_memory(
    tiny_model, tmp_path, files, monkeypatch, capfd
):
    """As a library or a driver can end a process that has no memory left."""
    monkeypatch.setattr(compare.subprocess, "run", partial(forked, dies=True))
    given = {"model_name_or_path": tiny_model, **files, "do_train": True, "max_steps": 1, "simulate": "50KB"}
    assert run_apart(run_glue_l2l.__file__, "hf", given, tmp_path, None).out_of_memory
    said = capfd.readouterr().err
    assert "run_glue_l2l.py: out of memory: the simulated accelerator is out of memory." in said
    assert said.count("try --trainer l2l") == 1
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


def test_both_runs_take_the_same_options_and_plain_trainer_those_it_knows(tmp_path, files, monkeypatch):
    """Logs are left alone where they were asked for; a token is not written down."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "logs")
    environments: list[dict[str, str]] = []

    def ended(words: list[str], env: dict[str, str], check: bool) -> Any:
        environments.append(env)
        return subprocess.CompletedProcess(words, NO_MEMORY)

    monkeypatch.setattr(compare.subprocess, "run", ended)
    flags = ["--stash", "host", "--evaluation_strategy", "steps", "--token", "hf_secret", "--hub_token", "hf_secret"]
    run_glue_l2l.main([*command("model", tmp_path, **files, compare=True, text_columns="sentence"), *flags])
    hf, l2l = (json.loads((tmp_path / "out" / f"{side}.json").read_text()) for side in ("hf", "l2l"))
    assert [environment["TENSORBOARD_LOGGING_DIR"] for environment in environments] == ["logs/hf", "logs/l2l"]
    assert {name for name in {*hf, *l2l} if hf.get(name) != l2l.get(name)} == {
        *("trainer", "output_dir", "ubatch_size", "stash")
    }
    assert not {"ubatch_size", "stash"} & hf.keys() and (l2l["ubatch_size"], l2l["stash"]) == (2, "host")
    assert (hf["text_columns"], hf["logging_steps"]) == (["sentence"], 0.02)
    assert [environment["HF_TOKEN"] for environment in environments] == ["hf_secret"] * 2
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or b"hf_secret" not in file.read_bytes()


# ---- the document


METRICS = {"epoch": 1.0, "eval_loss": 0.25, "train_loss": 0.5, "eval_accuracy": 0.75, "eval_runtime": 3.0}
METRICS |= {"train_samples_per_second": 20.0, "train_device_bytes": 3 * 2**20, "train_host_bytes": 0}
OTHERS = {**METRICS, "eval_accuracy": 0.5, "train_device_bytes": 2**20, "train_host_bytes": 4 * 2**20}
LOSSES = {1: 0.75, 2: 0.5}
NAN = float("nan")


def run(metrics: dict | None = None, losses: dict | None = None, has_dropout: bool = False) -> Run:
    return Run(False, metrics or {}, losses or {}, has_dropout)


def compared(hf: Run, l2l: Run, device: str = "cpu", **options: Any) -> dict:
    """The document, which is always JSON."""
    document = comparison({"hf": hf, "l2l": l2l}, device, **options)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


def cells(document: dict, name: str) -> tuple:
    return tuple(row(document, name)[key] for key in ("hf", "l2l", "difference", "ratio"))


def test_a_folder_is_read(tmp_path):
    """Whether there is dropout is read from the config of the model."""
    log = [{"step": 1, "loss": 0.75, "grad_norm": 1.0}, {"step": 2, "loss": NAN}, {"step": 2, "eval_loss": 0.5}]
    (tmp_path / "all_results.json").write_text(json.dumps(METRICS), encoding="utf-8")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log, "epoch": 1.0}), encoding="utf-8")
    for config, has_dropout in (
        ({"hidden_dropout_prob": 0.0, "attn_pdrop": 0.1}, True),
        ({"text_config": {"attention_dropout": 0.5}}, True),
        ({"hidden_dropout_prob": 0.0, "classifier_dropout": None, "hidden_size": 16}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        found = read_run(tmp_path)
        assert not found.out_of_memory and found.has_dropout is has_dropout, config
    assert found.metrics == METRICS and list(found.losses) == [1, 2]
    assert found.losses[1] == 0.75 and math.isnan(found.losses[2])


def test_rows_have_both_values_their_difference_and_their_ratio():
    """Times of an evaluation and speeds of a simulated device are not compared."""
    document = compared(run(METRICS), run(OTHERS))
    assert cells(document, "train_loss") == (0.5, 0.5, 0.0, 1.0)
    assert cells(document, "eval_accuracy") == (0.75, 0.5, -0.25, 0.5 / 0.75)
    assert cells(document, "train_host_bytes") == (0, 2**22, 2**22, None)
    assert [each["name"] for each in document["rows"]] == [
        *("train_loss", "eval_loss", "eval_accuracy", "train_samples_per_second"),
        *("train_device_bytes", "train_host_bytes"),
    ]
    simulated = compared(run(METRICS), run(OTHERS), "simulated accelerator, 8GiB", is_simulated=True)
    assert cells(simulated, "train_samples_per_second") == (None, None, None, None)
    document = compared(run({"train_loss": NAN}, {1: 0.5, 2: NAN}), run({"train_loss": 1.0}))
    assert cells(document, "train_loss") == (None, 1.0, None, None)
    assert document["losses"] == {"hf": [[1, 0.5], [2, None]], "l2l": []}
    document = compared(OUT_OF_MEMORY, run(OTHERS, LOSSES))
    assert document["out_of_memory"] == ["hf"] and document["same_losses"] is None
    assert cells(document, "train_loss") == (None, 0.5, None, None)
    assert table(document).splitlines()[-1] == "Trainer ran out of memory"


def test_the_verdict_on_losses():
    """They are compared at the same step."""
    for hf, l2l, same, said in (
        (LOSSES, dict(LOSSES), True, "the same, to the last bit, at 2 logged steps"),
        ({1: NAN}, {1: float("nan")}, True, "the same, to the last bit, at 1 logged step"),
        (LOSSES, {1: 0.75, 2: math.nextafter(0.5, 1)}, False, "at most 1.1e-16 apart at 2 logged steps"),
        (LOSSES, {1: 0.5, 2: NAN}, False, "at most 0.25 apart at 1 logged step; a number on one side only at 1"),
        ({1: 9.0, 2: 2.0}, {2: 2.5, 3: 1.0}, False, "at 1 logged step; logged on one side only at 2"),
        (LOSSES, {}, None, "no training loss was logged"),
    ):
        document = compared(run(losses=hf), run(losses=l2l))
        assert document["same_losses"] is same
        assert said in table(document).splitlines()[-1]


def test_dropout_of_micro_batches_is_noted_where_losses_differ():
    halves, apart = {"train_ubatch_size": 2}, {1: 0.75, 2: 0.25}
    for l2l, noted in (
        (run(halves, apart, True), True),
        (run({"train_ubatch_size": 8}, apart, True), False),
        (run(halves, apart), False),
        (run(halves, LOSSES, True), False),
        (OUT_OF_MEMORY, False),
    ):
        document = compared(run(losses=LOSSES), l2l, batch_rows=8)
        assert len(document["notes"]) == table(document).count("note: ") == noted
        if noted:
            assert "2 rows at a time" in document["notes"][0] and "--ubatch_size 8 draws" in document["notes"][0]
