"""The demonstration: what it says of its trainings, and, in full, what these show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documented_commands import check
from glue_script import needs_datasets, needs_demo_model
from hf_l2l.cli import demo


def run(mib: int, losses: list[float]) -> dict[str, Any]:
    metrics = {"train_device_bytes": mib * 2**20, "train_loss": losses[-1], "eval_accuracy": 0.8}
    return {
        "metrics": metrics,
        "losses": [[1 + i, loss] for i, loss in enumerate(losses)],
        "device_bytes": {"shell": 2**20},
    }


def found(small: Any = None, plain: Any = None, ours: Any = None) -> Any:
    losses = [0.7, 0.6]
    return {
        ("Trainer", demo.SMALL): None,
        ("L2LTrainer", demo.SMALL): run(119, losses) if small is None else small,
        ("Trainer", demo.LARGE): run(369, losses) if plain is None else plain,
        ("L2LTrainer", demo.LARGE): run(119, losses) if ours is None else ours,
    }


def test_the_last_line_says_what_was_shown(tmp_path, capsys):
    assert demo.tell(found(), tmp_path, "simulated card") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == (
        "Trainer needs 369 MiB of the card, L2LTrainer 119; their 2 losses are equal to the last bit."
    )
    assert "the card's memory with L2LTrainer, in MiB: shell 1.0" in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert demo.tell(found(ours=run(119, [0.7, 0.5])), tmp_path, "cuda") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("their 2 losses differ by at most 0.1.")


def test_the_commands_at_the_end_are_understood(tmp_path, capsys):
    demo.tell(found(), tmp_path, "simulated card")
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and " -m " in line]
    assert [words[1:3] for words in said] == [["-m", "run_glue_l2l"], ["-m", "hf_l2l"]]
    check(["hf-l2l", *said[1][3:]])


def test_what_was_not_shown_is_an_error(capsys):
    failed = found()
    failed["L2LTrainer", demo.SMALL] = None
    assert demo.verdict(failed) == 1
    assert capsys.readouterr().out.startswith("Not shown: L2LTrainer ran out of memory on 256MiB")


def test_missing_packages_are_told_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        demo.main([])
    assert stopped.value.code == 2
    assert 'pip install ".[demo]"' in capsys.readouterr().err


@needs_datasets
@needs_demo_model
@pytest.mark.slow
def test_it_shows_what_it_says(tmp_path):
    """Trainer does not fit the small card, the losses are equal, and the commands at the end name what is there."""
    ran = subprocess.run(
        [sys.executable, "-m", "hf_l2l.cli.demo", "--steps", "2", "--output", str(tmp_path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "out of memory" in ran.stdout.partition("[2 of 4]")[0]
    assert ran.stdout.splitlines()[-1].endswith("their 2 losses are equal to the last bit.")
    assert Path(tmp_path / "compare.png").is_file()
