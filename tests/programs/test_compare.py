"""Two runs side by side: the document, the table, the picture."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from hf_l2l.glue.compare import NAMES, OUT_OF_MEMORY, Run, comparison, draw, read_run, table
from tiers import nightly

METRICS = {
    "epoch": 1.0,
    "eval_loss": 0.25,
    "train_loss": 0.5,
    "train_samples_per_second": 20.0,
    "train_device_bytes": 3 * 2**20,
    "train_host_bytes": 0,
    "eval_accuracy": 0.75,
    "eval_runtime": 3.0,
}
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


def row(document: dict, name: str) -> tuple:
    (found,) = (row for row in document["rows"] if row["name"] == name)
    return tuple(found[key] for key in ("hf", "l2l", "difference", "ratio"))


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


# ---- the document


def test_rows_have_both_values_their_difference_and_their_ratio():
    """Times and counts of an evaluation are not compared. What is no number, or not there, is none."""
    document = compared(run(METRICS), run(OTHERS))
    assert row(document, "train_loss") == (0.5, 0.5, 0.0, 1.0)
    assert row(document, "eval_accuracy") == (0.75, 0.5, -0.25, 0.5 / 0.75)
    assert row(document, "train_host_bytes") == (0, 2**22, 2**22, None)
    assert [row["name"] for row in document["rows"]] == [
        *("train_loss", "eval_loss", "eval_accuracy", "train_samples_per_second"),
        *("train_device_bytes", "train_host_bytes"),
    ]
    document = compared(run({"train_loss": NAN}, {1: 0.5, 2: NAN}), run({"train_loss": 1.0}))
    assert row(document, "train_loss") == (None, 1.0, None, None)
    assert document["losses"] == {"hf": [[1, 0.5], [2, None]], "l2l": []}
    document = compared(OUT_OF_MEMORY, run(OTHERS, LOSSES))
    assert document["out_of_memory"] == ["hf"] and document["same_losses"] is None
    assert row(document, "train_loss") == (None, 0.5, None, None)
    assert table(document).splitlines()[-1] == "Trainer ran out of memory"


def test_the_verdict_on_losses():
    """They are compared at the same step."""
    for hf, l2l, same, said in (
        (LOSSES, dict(LOSSES), True, "the same, to the last bit, at 2 logged steps"),
        ({1: NAN}, {1: float("nan")}, True, "the same, to the last bit, at 1 logged step"),
        (LOSSES, {1: 0.75, 2: math.nextafter(0.5, 1)}, False, "at most 1.1e-16 apart at 2 logged steps"),
        (LOSSES, {1: 0.5, 2: NAN}, False, "at most 0.25 apart at 1 logged step; a number on one side only at 1"),
        (
            {1: 9.0, 2: 2.0},
            {2: 2.5, 3: 1.0},
            False,
            "at most 0.5 apart at 1 logged step; logged on one side only at 2",
        ),
        (LOSSES, {}, None, "no training loss was logged"),
    ):
        document = compared(run(losses=hf), run(losses=l2l))
        assert document["same_losses"] is same
        assert said in table(document).splitlines()[-1]


def test_dropout_of_micro_batches_is_noted_where_losses_differ():
    apart = {1: 0.75, 2: 0.25}
    for l2l, noted in (
        (run({"train_ubatch_size": 2}, apart, True), True),
        (run({"train_ubatch_size": 8}, apart, True), False),
        (run({"train_ubatch_size": 2}, apart), False),
        (run({"train_ubatch_size": 2}, LOSSES, True), False),
        (OUT_OF_MEMORY, False),
    ):
        document = compared(run(losses=LOSSES), l2l, batch_rows=8)
        assert len(document["notes"]) == table(document).count("note: ") == noted
        if noted:
            assert "2 rows at a time" in document["notes"][0] and "--ubatch_size 8 draws" in document["notes"][0]


# ---- the table


def test_the_table():
    """Speeds of a simulated device are not compared."""
    document = compared(run(METRICS, LOSSES), run(OTHERS, LOSSES), "cuda")
    lines = table(document).splitlines()
    assert lines[0] == "on: cuda" and lines[1].split() == ["Trainer", "L2LTrainer", "difference"]
    cells = [re.split("  +", line) for line in lines[3:-1]]
    assert cells[2] == ["eval accuracy", "0.750000", "0.500000", "-0.25"]
    assert cells[5] == ["host bytes: weights, gradients, moments", "0 bytes", "4.0 MiB", "-"]
    document = compared(run(METRICS), run(OTHERS), "simulated accelerator, 8GiB", is_simulated=True)
    assert row(document, "train_samples_per_second") == (None, None, None, None)
    assert table(document).count("note: speed: ") == 1


# ---- the picture


@nightly
@pytest.mark.parametrize("hf", [run(METRICS, LOSSES), OUT_OF_MEMORY], ids=["two runs", "out of memory"])
def test_the_picture(hf, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    l2l = run(OTHERS, LOSSES)
    draw(compared(hf, l2l, "cuda"), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    curves, bars = figures[0].axes
    assert (bars.get_ylabel(), bars.get_title()) == ("MiB", "Memory (cuda)")
    for axes in (curves, bars):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(NAMES.values())
    for line, of in zip(curves.lines, (hf, l2l), strict=True):
        assert list(line.get_xdata()) == list(of.losses)
    assert ("out of memory" in [text.get_text() for text in bars.texts]) == hf.out_of_memory
