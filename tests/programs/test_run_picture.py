"""The picture of a run says what the run logged, from its Trainer or from its files."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_l2l.memory.ledger import OTHER
from hf_l2l.report.pictures.run_log import (
    MEMORY_MAY_COME,
    NO_LOG,
    NOT_OF_L2L,
    RUN_FILE,
    RunFacts,
    RunLog,
    StepTime,
    append_row,
    begin_rows,
    read_rows,
    read_run,
)
from hf_l2l.report.pictures.run_picture import draw_run
from tiers import more
from training import SAVING, StopAt, l2l_trainer, measured, plain_trainer

EVALUATED = {**SAVING, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "ubatch_size": 4}


def drawn(log: RunLog) -> Any:
    pytest.importorskip("matplotlib")
    return draw_run(log, "a picture", None, "leave it out")


def texts(figure: Any) -> str:
    """All that is written in a picture."""
    figure.draw_without_rendering()
    found = [each.get_text() for each in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(found).replace("\n", " ")


def log_of(entries: list[dict[str, Any]], rows: Sequence[dict[str, Any]] = ()) -> RunLog:
    return RunLog.of_state({"log_history": entries, "global_step": 4}, RunFacts("Model", 9), rows)


def test_a_trainer_draws_its_run_and_files_say_the_same(tmp_path):
    """A run without rows says why it has none."""
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path, **EVALUATED)
    trainer.train()
    trainer.save_state()
    figure = trainer.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # for notebooks
    written, parameters = texts(figure), sum(p.numel() for p in trainer.model.parameters())
    assert f"{type(trainer.model).__name__}, {parameters:,} parameters" in written
    assert "device batch of 8 rows, ubatch_size=4; on cpu" in written
    memory, time, loss = figure.axes
    assert {"masters", "gradients", "moments"} <= {label.get_text() for label in memory.get_yticklabels()}
    assert memory.get_xlabel() == "KiB" and OTHER in written and "host: each name's peak" in written
    steps_s = [row["l2l_step_s"] for row in measured(tmp_path)]
    assert list(time.patches[-1].get_data().values) == pytest.approx(steps_s)  # all causes together
    assert list(time.patches[-1].get_data().edges) == [0, 1, 2, 3, 4]
    losses = {line.get_label(): list(line.get_xdata()) for line in loss.lines}
    assert losses == {"training": [1, 2, 3, 4], "eval loss": [2, 4]}

    found, halfway = (read_run(tmp_path / name / "trainer_state.json") for name in ("", "checkpoint-2"))
    facts = RunFacts("BertForSequenceClassification", parameters, 8, 1, 1, 4, "cpu")
    assert found.facts == halfway.facts == facts
    assert (found.steps, len(found.times), len(halfway.times)) == (4, 4, 2)
    assert found.missing == halfway.missing == {}
    for log in (found, halfway):
        assert log.memory is not None and log.memory["host"]["masters"]["peak"] == 4 * parameters
        assert json.loads(json.dumps(log.as_json()))["memory"] == log.memory

    (tmp_path / RUN_FILE).unlink()
    log = read_run(tmp_path / "checkpoint-4" / "trainer_state.json")
    assert log.missing == {"time": NOT_OF_L2L, "memory": NOT_OF_L2L} and len(log.losses) == 4
    assert log.facts == RunFacts("BertForSequenceClassification", rows=8)  # as the checkpoint's config says
    written = texts(trainer.plot())
    assert f"time, memory: {NOT_OF_L2L}" in written and "ubatch_size=4" in written


NO_LAYERS = "not logged: the model has no layers that are streamed"


def test_before_a_training_there_is_nothing_to_draw(tmp_path, monkeypatch):
    """Nor without matplotlib, or where it cannot be written. Reasons that do not depend on losses are given."""
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path)
    figure = trainer.plot()
    assert f"memory, time, loss: {NO_LOG}" in texts(figure) and figure.axes == []
    state = {"log_history": [], "global_step": 1}
    found = RunLog.of_state(state, RunFacts("Model"), without_times=NO_LAYERS).missing
    assert (found["time"], found["memory"]) == (NO_LAYERS, NO_LAYERS) and "logged in 1 step;" in found["loss"]
    found = log_of([]).missing
    assert found["memory"] == MEMORY_MAY_COME and found["time"] == found["loss"] and "4 steps" in found["loss"]
    with pytest.raises(ValueError, match="path must be a file that can be written"):
        trainer.plot(tmp_path / "none" / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs the package matplotlib .* pip install matplotlib"):
        trainer.plot("a.png")


def test_a_run_that_was_too_short_to_log_a_loss_says_so(tmp_path):
    """There are no empty panels. An evaluation has a loss."""
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path, **{**EVALUATED, "logging_steps": 500, "eval_strategy": "no"})
    trainer.train()
    why = "no training loss was logged in 4 steps; set logging_steps"
    figure = trainer.plot()
    assert f"time, loss: {why}" in texts(figure) and len(figure.axes) == 1
    assert "masters" in {label.get_text() for label in figure.axes[0].get_yticklabels()}
    trainer.evaluate()
    figure = trainer.plot()
    assert f"time, training loss: {why}" in texts(figure) and len(figure.axes) == 2
    assert [line.get_label() for line in figure.axes[1].lines] == ["eval loss"]


class Flat(nn.Module):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **rest: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.table(input_ids).mean() + 0 * labels.sum()}


@pytest.mark.filterwarnings("ignore:no stack of layers:UserWarning")
def test_a_model_without_layers_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    trainer = l2l_trainer(tmp_path, model=Flat(), max_steps=1)
    trainer.train()
    figure = trainer.plot()
    assert f"time, memory: {NO_LAYERS}" in texts(figure)
    assert [axes.get_title() for axes in figure.axes] == ["training loss"]


def test_a_resumed_run_goes_on_with_the_rows_of_the_one_before(tmp_path):
    options = {**SAVING, "eval_strategy": "no"}
    for _ in range(2):
        l2l_trainer(tmp_path, **options, callbacks=[StopAt(3)]).train()
    assert [row["step"] for row in measured(tmp_path)] == [1, 2, 3]  # and none of a training before
    with (tmp_path / RUN_FILE).open("a") as file:
        file.write('{"step": 4, "l2l_wai')  # killed while it wrote
    resumed = l2l_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [row for row in read_rows(tmp_path / RUN_FILE) if "memory" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    times = read_run(tmp_path / "checkpoint-4" / "trainer_state.json").times
    assert [each.step for each in times] == [1, 2, 3, 4]
    assert [each.upload + each.download + each.eps + (each.compute or 0) for each in times] == pytest.approx(
        [row["l2l_step_s"] for row in (*rows[:2], *rows[3:])]
    )


@pytest.mark.parametrize("make", [l2l_trainer, *more(plain_trainer)])
def test_a_checkpoint_whose_state_has_what_was_measured_is_resumed_from(make, tmp_path):
    """As versions before `l2l_run.jsonl` have written it."""
    l2l_trainer(tmp_path, **SAVING).train()
    (tmp_path / "checkpoint-4" / "l2l_manifest.json").unlink()
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["log_history"] = [each | row for each, row in zip(state["log_history"], measured(tmp_path), strict=True)]
    state["stateful_callbacks"]["L2LRun"] = {"args": {}, "attributes": {"facts": {}, "memory": {}}}
    file.write_text(json.dumps(state))
    (tmp_path / RUN_FILE).unlink()
    assert len(read_run(file).times) == 4
    resumed = make(tmp_path, **{**SAVING, "max_steps": 6}, restore_callback_states_from_checkpoint=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*checkpoint-4 has no manifest.*")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6


def test_rows_that_cannot_be_written_do_not_end_a_training(tmp_path, caplog):
    trainer = l2l_trainer(tmp_path, max_steps=2)
    (tmp_path / RUN_FILE).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "transformers"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert [text for text in caplog.messages if f"{RUN_FILE} cannot be written" in text] == [caplog.messages[0]]


# ---- what is read, and how it is drawn


def loss(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, **more}


def row(step: int, **more: float) -> dict[str, Any]:
    waits = {f"l2l_wait_{cause}_s": seconds for cause, seconds in (("upload", 1.0), ("download", 0.5), ("eps", 0.25))}
    return {"step": step, **waits, **more}


def test_the_rest_of_a_step_is_computation_and_steps_whose_times_were_not_logged_are_left_empty():
    log = log_of([loss(2), loss(3), loss(4)], [row(2, l2l_step_s=4.0), row(3, l2l_step_s=1.5), row(4)])
    assert log.times == [
        StepTime(0, 2, 1.0, 0.5, 0.25, 2.25),
        StepTime(2, 3, 1.0, 0.5, 0.25, 0.0),  # of rounding
        StepTime(3, 4, 1.0, 0.5, 0.25, None),
    ]
    assert "step time not logged" in texts(drawn(log))
    log = log_of([loss(1), loss(3), loss(4)], [row(1, l2l_step_s=2.0), row(4, l2l_step_s=2.0)])
    [*_, top] = drawn(log).axes[0].patches
    assert (list(top.get_data().edges), list(top.get_data().values)) == ([0, 1, 3, 4], [2.0, 0.0, 2.0])


def legend_of(axes: Any) -> list[str]:
    return [] if axes.get_legend() is None else [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_legend_has_what_occurs_and_times_without_any_are_no_panel():
    never = {"l2l_wait_download_s": 0.0, "l2l_wait_eps_s": 0.0, "l2l_step_s": 2.0}
    time, losses = drawn(log_of([loss(1)], [row(1, **never)])).axes
    assert legend_of(time) == ["waits for uploads", "computation, and all else"] and legend_of(losses) == []
    [time, losses] = drawn(
        log_of([loss(1), {"step": 1, "eval_loss": 2.0}], [row(1, l2l_wait_upload_s=0.0, **never)])
    ).axes
    assert (legend_of(time), time.get_title()) == ([], "time per step")  # as on the CPU
    assert (legend_of(losses), losses.get_title()) == (["training", "eval loss"], "loss")
    log = log_of([loss(1)], [row(1, l2l_wait_upload_s=0.0, l2l_wait_download_s=0.0, l2l_wait_eps_s=0.0)])
    assert log.missing["time"] == "the step time was not logged, and nothing was waited for"
    assert [axes.get_title() for axes in drawn(log).axes] == ["training loss"]


def test_rows_of_steps_that_the_state_does_not_have_are_left_out():
    memory = {"host": {"total": {"now": 1, "peak": 7}}}
    rows = [row(2), row(3), {"step": 4, "memory": memory}, row(6), {"step": 6, "memory": {}}]
    log = log_of([loss(2), loss(4)], rows)
    assert [each.step for each in log.times] == [2] and log.memory == memory


def test_numbers_that_json_does_not_have_are_null():
    log = log_of([loss(1), {"step": 2, "loss": float("nan"), "eval_loss": float("inf")}], [row(1)])
    found = json.loads(json.dumps(log.as_json(), allow_nan=False))
    assert found["losses"] == [[1, 1.0], [2, None]] and found["evaluations"] == {"eval_loss": [[2, None]]}
    assert (found["facts"]["parameters"], found["times"][0]["upload"], found["missing"].keys()) == (9, 1.0, {"memory"})
    drawn(log).draw_without_rendering()


def test_names_that_are_small_are_one_bar():
    sizes = {"masters": 1000, "moments": 2000, "norm rooms": 5, "stash": 4, OTHER: 10**6}
    host = {name: {"now": 0, "peak": size} for name, size in {**sizes, "total": sum(sizes.values())}.items()}
    axes = drawn(log_of([loss(4)], [{"step": 4, "memory": {"host": host, "of which": {}}}])).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["moments", "masters", "2 smaller"]


def test_what_a_title_says_of_a_model_and_of_a_batch():
    for count, text in ((512, "512"), (22_700_000, "22.7 M"), (8_030_000_000, "8.0 B")):
        assert RunFacts("Model", count).lines() == (f"Model, {text} parameters", "")
    facts = RunFacts("Model", rows=1, device="cuda:0 (a card)")
    assert facts.lines() == ("Model", "device batch of 1 row; on cuda:0 (a card)")
    more = replace(facts, rows=8, ranks=2, accumulated=4, ubatch_size=2).lines()[1]
    assert more == "device batch of 8 rows, ubatch_size=2, 4 of them a step, on each of 2 ranks; on cuda:0 (a card)"


def test_what_is_no_state_or_no_row_is_refused(tmp_path):
    file = tmp_path / "trainer_state.json"
    with pytest.raises(ValueError, match="Is a directory"):
        read_run(tmp_path)
    for text, why in (
        ("no JSON", "it is no JSON: Expecting value"),
        ("[]", "it has no log of a Trainer"),
        ("{}", "it has no log of a Trainer"),
        ('{"log_history": [{"loss": {}, "step": 1}]}', "it has no log of a Trainer"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_run(file)
    file.write_text('{"log_history": [], "global_step": 4}')
    for line, why in (
        ("[]", f"line 1 of .*{RUN_FILE} is no row of a run"),
        ('{"times": 1}', f"line 1 of .*{RUN_FILE} is no row of a run"),
        ('{"step": 4, "memory": {"host": {"a": 1}}}', "it has no log of a Trainer"),
    ):
        (tmp_path / RUN_FILE).write_text(f"{line}\n")
        with pytest.raises(ValueError, match=why):
            read_run(file)


def test_a_row_is_whole_after_one_that_was_cut_off(tmp_path):
    file = tmp_path / "run" / RUN_FILE
    begin_rows(file, goes_on=True)
    assert read_rows(file) == []
    file.write_text('{"step": 1}\n{"step"')
    begin_rows(file, goes_on=True)
    append_row(file, {"step": 2})
    assert read_rows(file) == [{"step": 1}, {"step": 2}]
