"""The demonstration: what it says of its trainings, in full what these show, and the data that comes with it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from documented_commands import check
from glue_script import needs_datasets, needs_demo_model
from hf_l2l.cli import demo
from hf_l2l.demo import demo_files
from tiers import nightly


def run(mib: int, losses: list[float]) -> dict[str, Any]:
    metrics = {"train_device_bytes": mib * 2**20, "train_loss": losses[-1], "eval_accuracy": 0.8}
    return {
        "metrics": metrics,
        "losses": [[1 + i, loss] for i, loss in enumerate(losses)],
        "device_bytes": {"shell": 2**20},
    }


def found(last_loss: float = 0.6) -> Any:
    """What the four trainings found: plain Trainer had no room on the small card."""
    return {
        ("Trainer", demo.SMALL): None,
        ("L2LTrainer", demo.SMALL): run(119, [0.7, 0.6]),
        ("Trainer", demo.LARGE): run(369, [0.7, 0.6]),
        ("L2LTrainer", demo.LARGE): run(119, [0.7, last_loss]),
    }


def test_the_last_line_says_what_was_shown(tmp_path, capsys):
    assert demo.tell(found(), tmp_path, "simulated card") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == (
        "Trainer needs 369 MiB of the card, L2LTrainer 119; their 2 losses are equal to the last bit."
    )
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    said = [line.split() for line in out.splitlines() if line.startswith("  ") and " -m " in line]
    assert [words[1:3] for words in said] == [["-m", "run_glue_l2l"], ["-m", "hf_l2l"]]
    check(["hf-l2l", *said[1][3:]])
    assert demo.tell(found(last_loss=0.5), tmp_path, "cuda") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("their 2 losses differ by at most 0.1.")


def test_what_was_not_shown_is_an_error(capsys):
    assert demo.verdict({**found(), ("L2LTrainer", demo.SMALL): None}) == 1
    assert capsys.readouterr().out.startswith("Not shown: L2LTrainer ran out of memory on 256MiB")
    assert demo.verdict({**found(), ("Trainer", demo.SMALL): run(119, [0.7])}) == 1
    assert capsys.readouterr().out.startswith("Not shown: Trainer has trained")


def test_missing_packages_are_told_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        demo.main([])
    assert stopped.value.code == 2
    assert 'pip install ".[demo]"' in capsys.readouterr().err


@needs_datasets
@needs_demo_model
@nightly
def test_it_shows_what_it_says(tmp_path):
    """Trainer does not fit the small card, the losses are equal, and the commands at the end name what is there."""
    ran = subprocess.run(
        [sys.executable, "-m", "hf_l2l.cli.demo", "--steps", "2", "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "out of memory" in ran.stdout.partition("[2 of 4]")[0]
    assert ran.stdout.splitlines()[-1].endswith("their 2 losses are equal to the last bit.")
    assert Path(tmp_path / "compare.png").is_file()


# ---- the sentences of which it learns


def test_splits_are_balanced_and_no_sentence_occurs_twice():
    sentences = []
    for split, count in (("train", 400), ("validation", 120)):
        with open(demo_files()[split], encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert Counter(row["label"] for row in rows) == {"0": count // 2, "1": count // 2}
        # Without case, punctuation and spacing, so that near copies are found, too.
        kept = ("".join(c if c.isalnum() else " " for c in row["sentence"].lower()).split() for row in rows)
        sentences += map(" ".join, kept)
    assert [sentence for sentence, count in Counter(sentences).items() if count > 1] == []
