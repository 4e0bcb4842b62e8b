"""`hf-l2l plan --measured`: a real run on the CPU beside the plan of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from cli_models import LLAMA, ran, refused, written
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.report.traced_steps import traced_steps
from hf_l2l.scale import HARDWARE
from hf_l2l.scale.hardware import GIB
from memory_switches import forced_copies

ROWS, TOKENS = 4, 8


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """Three steps, whose layers travel and are updated in the background."""
    file: Path = tmp_path_factory.mktemp("run") / "trace.json"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    with forced_copies():
        config = L2LConfig(device="cpu", ubatch_size=2, eps_update="deferred", trace=str(file))
        eps = attach_l2l(model, config)
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            ids = torch.randint(0, LLAMA["vocab_size"], (ROWS, TOKENS))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        eps.synchronize()
        eps.timeline.close()
    return file


def given(folder: Path, trace: Path, **changes: str) -> list[str]:
    flags = {"--measured": str(trace), "--batch": str(ROWS), "--tokens": str(TOKENS), "--hardware": "rtx4090"}
    return [
        "plan",
        written(folder / "model", LLAMA),
        *(word for pair in {**flags, **changes}.items() for word in pair),
    ]


def test_each_layer_is_beside_the_plan(tmp_path, trace, capsys):
    found = ran(capsys, *given(tmp_path, trace), "--json").json
    measured, run = found["measured"], traced_steps(trace)
    assert found["plans"] == [] and (measured["steps"], measured["rows"]) == (2, ROWS)
    card, weights = HARDWARE["rtx4090"], found["shape"]["layer_parameters"]
    flops = 2 * ROWS * TOKENS * weights / card.peak_flops
    plan = {
        "forward": flops,
        "backward": 3 * flops,
        "upload": 2 * 2 * weights / (card.pci_express / 2 * GIB),
        "update": 30 * weights / (card.host_memory_bandwidth * GIB),
    }
    assert [layer["name"] for layer in measured["layers"]] == [f"model.layers.{n}" for n in range(3)]
    for layer, its in zip(measured["layers"], run.layers, strict=True):
        for part, seconds in plan.items():
            assert layer[part]["plan"] == pytest.approx(seconds)
            assert layer[part]["measured"] == getattr(its, part) > 0
            assert layer[part]["ratio"] == pytest.approx(getattr(its, part) / seconds)
    for part, seconds in plan.items():
        assert measured["total"][part]["plan"] == pytest.approx(3 * seconds)
    assert measured["total"]["update"]["measured"] == run.update > sum(layer.update or 0 for layer in run.layers)
    assert measured["step"]["measured"] == run.step


def test_as_a_table(tmp_path, trace, capsys):
    lines = ran(capsys, *given(tmp_path, trace)).out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("layer "))
    assert lines[head].split()[1:4] == ["forward", "ms", "plan"]
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == [
        *(f"model.layers.{n}" for n in range(3)),
        "all",
    ]
    assert all(len(line.split()) == 13 for line in lines[head + 1 : head + 5])
    assert any(line.startswith("Means of 2 steps with 4 rows. A step took ") for line in lines)
    assert "rtx4090 at its peak" in "".join(lines)


def test_a_plan_of_more_rows_takes_longer(tmp_path, trace, capsys):
    few, many = (
        ran(capsys, *given(tmp_path, trace, **{"--batch": rows}), "--json").json["measured"]["layers"][0]["forward"]
        for rows in ("4", "8")
    )
    assert many["plan"] == pytest.approx(2 * few["plan"]) and many["measured"] == few["measured"]


def test_without_a_run_there_is_none(tmp_path, capsys):
    assert ran(capsys, "plan", "X32", "--gpus", "1", "--json").json["measured"] is None


def test_refusals(tmp_path, trace, capsys):
    folder = tmp_path / "other"
    plain = ["plan", "X32", "--measured", str(trace)]
    assert "--measured needs --batch, the rows of a step of that run (got" in refused(capsys, *plain)
    says = "on one device, which has no --gpus (got 8); leave that out"
    assert says in refused(capsys, *plain, "--batch", "4", "--gpus", "8")
    assert "has no --no-offload (got True)" in refused(capsys, *plain, "--batch", "4", "--no-offload")
    says = "--measured must be of a run of MODEL, which has 32 layers (got 3 in the trace); give the model of that run"
    assert says in refused(capsys, *plain, "--batch", "4")
    folder.mkdir()
    (folder / "a.json").write_text("{}")
    says = f"--measured must be a trace that a run with l2l_trace wrote (got '{folder}/a.json': it is no such file)"
    assert says in refused(capsys, *given(folder, folder / "a.json"))
