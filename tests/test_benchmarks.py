"""The benchmarks run, tiny, and their results have the form that is promised; nothing here looks at a speed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from benchmarks import eps_cpu, throughput
from hf_l2l.estimate import estimate
from hf_l2l.stacks import tensor_bytes

EPS_TINY = ["--layers", "2", "--hidden", "64", "--vocab", "50", "--pairs", "2", "--warmup", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def refused(main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which a benchmark refuses its options."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    errors = [line for line in printed.err.splitlines() if ": error: " in line]
    assert len(errors) == 1
    return errors[0].split(": error: ")[1]


def columns(text: str) -> list[list[str]]:
    """The cells of the markdown table in `text`, its head and ruler left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert re.fullmatch(r"\|(---\|)+", lines[1])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


# ---- eps_cpu


def test_the_update_is_measured_in_both_cases(capsys):
    result = eps_cpu.main(EPS_TINY)
    text, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result
    assert [row[0] for row in columns(text)] == list(result["cases"]) == list(eps_cpu.CASES)
    for case in result["cases"].values():
        for name in ("ratio", "layered_ms", "flat_ms"):
            found = case[name]
            assert 0 < found["p10"] <= found["median"] <= found["p90"] < math.inf
        assert case["target"] > 1
    assert result["options"]["layers"] == 2


def test_the_full_size_is_bert_large():
    assert eps_cpu.parameters_of(eps_cpu.parsed(["--layers", "24"])) == 335_143_938


def tiny_updates() -> tuple[eps_cpu.Updates, list[torch.Tensor]]:
    """Two ways to update one model, and the gradients they are given."""
    updates = eps_cpu.Updates(eps_cpu.bert(eps_cpu.parsed(EPS_TINY)), threads=1)
    return updates, [gradient.clone() for gradient in updates.gradients]


@pytest.mark.parametrize("way", ["flat", "layered", "layered_and_more"])
def test_all_that_is_timed_has_happened(way):
    updates, gradients = tiny_updates()
    before = [p.detach().clone() for p in updates.masters]
    updates.timed(getattr(updates, way))
    assert not any(torch.equal(p, old) for p, old in zip(updates.masters, before, strict=True))
    assert all(updates.optimizer.state[p]["step"] == 1 for p in updates.masters)
    for p, gradient, was in zip(updates.masters, updates.gradients, gradients, strict=True):
        factor = torch.tensor(1.0) / (eps_cpu.NORM + 1e-6) if way == "layered_and_more" else 1.0
        assert torch.equal(gradient, was * factor)
        same = torch.equal(updates.copies[p.data_ptr()], p.detach().bfloat16())
        assert same == (way == "layered_and_more")


def test_both_ways_share_weights_and_moments():
    updates, _ = tiny_updates()
    for way in (updates.flat, updates.layered, updates.layered_and_more, updates.flat):
        updates.timed(way)
    assert all(updates.optimizer.state[p]["step"] == 4 for p in updates.masters)
    assert updates.plain.state is updates.optimizer.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "1"], "--pairs must be at least 2 (got 1)"),
        (["--layers", "0"], "--layers must be at least 1 (got 0)"),
        (["--threads", "0"], "--threads must be at least 1 (got 0)"),
        (["--hidden", "100"], "--hidden must be a multiple of 64, the width of a head (got 100)"),
        (["--pairs", "many"], "argument --pairs: invalid int value: 'many'"),
    ],
)
def test_bad_options_of_the_update_are_refused(arguments, message, capsys):
    assert refused(eps_cpu.main, arguments, capsys) == message


def test_a_model_that_does_not_fit_the_host_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(eps_cpu, "available_host_bytes", lambda: 2**30)
    message = refused(eps_cpu.main, [], capsys)
    assert message == "this takes 5.6 GiB, and 1.0 GiB can be had; use fewer --layers"


# ---- throughput


def test_all_rows_are_there(tmp_path, capsys):
    file = tmp_path / "result.md"
    rows = throughput.main(["--tiny", "--steps", "1", "--tokens", "64", "--out", str(file)])
    text = capsys.readouterr().out
    assert file.read_text() + "\n" == text
    assert [(r["model"], r["mode"], r["tokens"]) for r in rows] == [
        (model, mode, 64) for model in throughput.MODELS for mode in throughput.MODES
    ]
    cells = columns(text)
    assert [row[0] for row in cells] == [r["model"] for r in rows]
    for row, cell in zip(rows, cells, strict=True):
        assert row["failure"] is None
        assert all(0 < row[name] < math.inf for name in ("tokens_per_s", "device_bytes", "host_bytes"))
        assert 0 < row["fastest_s"] <= row["slowest_s"] < math.inf
        assert ("eager cannot clip" in cell[3]) == (row["mode"] == "eager")
        assert cell[5].endswith("%")


def test_bytes_on_the_cpu_are_accounted_and_not_measured(capsys):
    options = ["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "deferred"]
    plain, l2l = throughput.main(options)
    assert "measured)" not in capsys.readouterr().out
    model = throughput.made("bert-large", throughput.parsed(options))
    need = estimate(model)
    # A moment more than shapes say: the step counters of AdamW.
    assert plain["device_bytes"] == 4 * tensor_bytes(model.parameters()) + 4 * len(list(model.parameters()))
    assert (l2l["device_bytes"], l2l["host_bytes"]) == (need.device_bytes, need.host_bytes)
    assert not plain["is_measured"] and not l2l["is_measured"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("no more"), "out of memory"), (MemoryError("no more"), "out of host memory")],
)
def test_running_out_of_memory_is_a_row(error, words, monkeypatch, capsys):
    train = hf.Trainer.train

    def fail_plain(self, *args, **kwargs):
        if type(self) is hf.Trainer:
            raise error
        return train(self, *args, **kwargs)

    monkeypatch.setattr(hf.Trainer, "train", fail_plain)
    options = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes", "trainer", "serial"]
    plain, l2l = throughput.main(options)
    assert (plain["failure"], l2l["failure"]) == (words, None)
    first, second = columns(capsys.readouterr().out)
    assert first[4:] == [words, "-", "-", "-", "-"]
    assert second[5] == "-", "there is nothing to compare with"


@pytest.mark.parametrize("name", throughput.MODELS)
def test_full_sizes(name):
    with torch.device("meta"):
        model = throughput.made(name, throughput.parsed([]))
    count = sum(p.numel() for p in model.parameters())
    assert count == {"bert-large": 335_143_938, "llama-1b": 1_235_814_400}[name]


def test_both_trainers_see_the_same_tokens(tmp_path):
    options = throughput.parsed(["--tiny", "--tokens", "64", "--model", "llama-1b"])
    made = [
        throughput.trainer_for(throughput.made("llama-1b", options), "llama-1b", mode, 64, options, str(tmp_path), [])
        for mode in throughput.MODES
    ]
    assert len({t.args.train_batch_size * t.args.gradient_accumulation_steps for t in made}) == 1
    assert getattr(made[0].args, throughput.CHECKPOINTING)
    assert [getattr(t.args, "eps_update", "trainer") for t in made] == list(throughput.MODES)

    def first_step(of: hf.Trainer) -> torch.Tensor:
        torch.manual_seed(0)
        batches = iter(of.get_train_dataloader())
        return torch.cat([next(batches)["input_ids"] for _ in range(of.args.gradient_accumulation_steps)])

    plain, *others = (first_step(t) for t in made)
    assert plain.numel() == 64
    assert all(torch.equal(plain, other) for other in others)
    assert len({t.args.max_steps for t in made}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1 (got 0)"),
        (["--warmup", "0"], "--warmup must be at least 1 (got 0)"),
        (["--ubatch-size", "0"], "--ubatch-size must be at least 1 (got 0)"),
        (
            ["--model", "bert-large", "--tokens", "8192", "9000"],
            "--tokens must be a multiple of 8192 for bert-large, 16 rows of 512 (got 9000)",
        ),
        (["--tokens", "0"], "--tokens must be a multiple of 8192 for bert-large, 16 rows of 512 (got 0)"),
        (["--out", "nowhere/result.md"], "--out must be in a folder that exists (got nowhere/result.md)"),
    ],
)
def test_bad_options_of_the_throughput_are_refused(arguments, message, capsys):
    assert refused(throughput.main, arguments, capsys) == message


@pytest.mark.parametrize("option", ["--model", "--modes", "--stash"])
def test_unknown_choices_are_refused(option, capsys):
    assert refused(throughput.main, [option, "none"], capsys).startswith(f"argument {option}: invalid choice: 'none'")


# ---- all of them


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py")), ids=lambda f: f.name
)
def test_the_readme_names_every_benchmark(file):
    assert len(file.read_text().splitlines()) <= 300
    assert f"`{file.name}`" in (file.parent / "README.md").read_text()
