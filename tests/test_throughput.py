"""The benchmark of throughput runs, tiny, and its results have the form that is promised; nothing looks at a speed."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers as hf

import hf_l2l
from benchmark_output import columns, refused
from benchmarks import environment, gpu_report, gpu_rows, throughput, throughput_fsdp, throughput_models
from hf_l2l.runtime.tensors import size_text


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


CASE = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes"]


def test_all_rows_are_there(tmp_path, capsys):
    file, traces = tmp_path / "result.md", tmp_path / "traces.zip"
    options = ["--out", str(file), "--rows", str(tmp_path / "rows.jsonl"), "--traces", str(traces)]
    modes = ["trainer", "whole", "bf16-weights", "deferred", "cmp", "shell", "planned"]
    rows = throughput.main([*CASE, *reversed(modes), *options])
    printed = capsys.readouterr()
    assert file.read_text() == printed.out
    written = gpu_rows.read(tmp_path / "rows.jsonl")
    assert written == [written[0], *({"kind": "case", **json.loads(json.dumps(row))} for row in rows)]
    assert [row["mode"] for row in rows] == modes, "plain Trainer first, with which the others are compared"
    assert {row["failure"] for row in rows} == {None}
    cells = columns(printed.out)
    for row, cell in zip(rows, cells, strict=True):
        assert all(0 < row[name] < math.inf for name in ("tokens_per_s", "host_bytes", "flop_per_s"))
        assert 0 < row["fastest_s"] <= row["mean_s"] <= row["slowest_s"] < math.inf
        assert cell[:4] == ["llama-1b", "64", throughput.MODES[row["mode"]].title, f"{row['tokens_per_s']:,.0f}"]
        assert cell[4] == f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.1%}"
        assert cell[6] == "-", "the CPU has no memory of its own"
        is_plain = throughput.MODES[row["mode"]].l2l is None
        assert (cell[9] == "-") == (row["bound"] is None) == is_plain
        assert cell[10] in (("-",) if is_plain else ("compute", "link", "host update"))
    with zipfile.ZipFile(traces) as packed:
        assert packed.namelist() == [f"llama-1b_{mode}_64.json" for mode in modes[3:]]
        events = json.loads(packed.read(packed.namelist()[0]))["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"].count("step") == 1


@pytest.mark.parametrize("mode", ["trainer", "cmp", "fsdp2"])
def test_one_trainer_has_a_row_for_each_number_of_tokens(mode, monkeypatch):
    """Of which each step has as many as the row says."""
    seen: list[int] = []
    made = throughput.quickly_made

    def counting(*args: Any) -> Any:
        model = made(*args)
        model.register_forward_pre_hook(
            lambda _, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
        )
        return model

    monkeypatch.setattr(throughput, "quickly_made", counting)
    options = throughput.parsed([*CASE, mode, "--steps", "2"])
    totals = []
    for row in throughput.measured("llama-1b", mode, (128, 64), options):
        assert row["failure"] is None and row["tokens_per_s"] == row["tokens"] / row["mean_s"]
        totals.append((row["tokens"], sum(seen)))
        seen.clear()
    assert totals == [(128, 4 * 128), (64, 4 * 64)], "one before those that are measured, and one after them"


def test_the_document_says_where_it_ran(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    torch.set_num_threads(2)
    found = environment.environment("throughput.py", CASE)
    assert datetime.date.today() - datetime.date.fromisoformat(found["date"]) <= datetime.timedelta(days=1)
    assert (found["cores"], found["threads"]) == (os.cpu_count(), 2)
    assert 0 < found["usable_cores"] <= found["cores"]
    assert found["host_bytes"] == psutil.virtual_memory().total > found["available_host_bytes"] > 0
    text = throughput.document([], found, throughput.parsed(CASE[:-1]))
    for name in ("torch", "transformers", "accelerate", "hf_l2l"):
        module = importlib.import_module(name)
        assert found["versions"][name] == module.__version__
        assert f"{name} {module.__version__}" in text
    assert found["command"] == f"OMP_NUM_THREADS=2 python benchmarks/throughput.py {' '.join(CASE)}"
    for words in (found["date"], found["cpu"], "threads: 2 for", size_text(found["host_bytes"]), found["command"]):
        assert words in text


@pytest.mark.parametrize(
    ("gib", "mode", "setting"),
    [(200, "cmp", 0), (144, "cmp", 1), (128, "cmp", 2), (112, "cmp", 3), (96, "cmp", 4), (80, "cmp", None)]
    + [(128, "shell", 0), (122, "shell", 1), (106, "shell", 2)],
)
def test_a_large_model_gets_the_first_host_setting_that_fits(gib, mode, setting, monkeypatch):
    monkeypatch.setattr(throughput, "available_host_bytes", lambda: gib * 2**30)
    options = throughput.parsed(["--model", "llama-8b", "--modes", mode, "--tokens", "32768"])
    model = throughput_models.on_meta("llama-8b", tiny=False)
    found, need = throughput.host_setting(model, mode, options, torch.device("cuda"))
    assert found == (None if setting is None else throughput.HOST_SETTINGS[setting])
    assert need > 10 * 7e9
    if setting is None:
        words, _ = throughput.refusal(model, mode, 32768, options, math.inf)
        assert words == f"needs {size_text(need)} of host memory, 80.0 GiB is available"


def test_moments_that_are_rounded_make_an_update_longer():
    options = throughput.parsed(["--model", "llama-8b", "--tokens", "32768", "--warmup", "1", "--steps", "2"])
    model = throughput_models.on_meta("llama-8b", tiny=False)
    plain, exact, rounded = (
        throughput.seconds_needed(model, mode, 32768, options, setting)
        for mode, setting in (("trainer", {}), ("cmp", {"grad_dtype": "16bit"}), ("cmp", {"moment_dtype": "bf16"}))
    )
    billions = 8.030261248
    assert exact - plain == pytest.approx(4 * 0.8 * billions) and rounded - plain == pytest.approx(4 * 2.1 * billions)


def test_cases_without_time_or_memory_are_rows(monkeypatch, capsys):
    options = throughput.parsed([*CASE, "trainer"])
    [row] = throughput.measured("llama-8b", "trainer", (64,), options, left_s=0.0)
    assert row["failure"] == "no time was left (it needs about 4 s)" and gpu_report.NO_TIME in row["failure"]
    monkeypatch.setattr(throughput, "available_host_bytes", lambda: 1000)
    rows = throughput.main([*CASE, "trainer", "cmp"])
    assert all("of host memory, 1000 bytes is available" in row["failure"] for row in rows)
    assert all(cell == "-" for cell in columns(capsys.readouterr().out)[0][4:])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("no more"), "out of memory"),
        (MemoryError("no more"), "out of host memory: no more"),
        (RuntimeError("no such kernel\nmore words"), "failed: RuntimeError: no such kernel"),
        (KeyError("size"), "failed: KeyError: 'size'"),
        (AssertionError("odd"), "failed: AssertionError: odd"),
        (ZeroDivisionError("no steps"), "failed: ZeroDivisionError: no steps"),
    ],
)
def test_a_case_that_fails_is_a_row(error, words, monkeypatch, capsys):
    train = hf.Trainer.train

    def fail_plain(self, *args, **kwargs):
        if type(self) is hf.Trainer:
            raise error
        return train(self, *args, **kwargs)

    monkeypatch.setattr(hf.Trainer, "train", fail_plain)
    plain, l2l = throughput.main([*CASE, "trainer", "serial"])
    assert (plain["failure"], l2l["failure"]) == (words, None)
    first, second = columns(capsys.readouterr().out)
    assert first[3:] == [words, *["-"] * 10]
    assert second[4] == "-", "there is nothing to compare with"


@pytest.mark.parametrize("name", ["refusal", "attention_kernel"])
def test_a_case_that_fails_before_it_begins_is_a_row(name, monkeypatch):
    def fail(*args: Any) -> None:
        raise IndexError("no stack")

    monkeypatch.setattr(throughput, name, fail)
    rows = list(throughput.measured("llama-1b", "trainer", (128, 64), throughput.parsed([*CASE, "trainer"])))
    assert [(row["tokens"], row["failure"]) for row in rows] == [
        (tokens, "failed: IndexError: no stack") for tokens in (128, 64)
    ]
    assert throughput.case_table(rows).count("no stack") == 2


def test_fsdp2_has_the_micro_batches_that_are_asked_for(monkeypatch):
    seen: list[int] = []
    step = throughput_fsdp.step
    monkeypatch.setattr(
        throughput_fsdp, "step", lambda *args: (seen.extend(len(b["input_ids"]) for b in args[2]), step(*args))
    )
    throughput.main([*CASE, "fsdp2", "--ubatch-size", "1"])
    assert seen == 3 * 4 * [1]


def test_operations_are_counted_by_shape_and_peaks_known_by_name():
    tokens, row = 32768, 1024
    model = throughput_models.on_meta("llama-1b", tiny=False)
    matrices = 1_235_814_400 - 2 * 2048 * 16 - 2048  # without norms; the embedding is the head
    attention = 6 * 16 * 2048 * row
    assert throughput_models.flop_per_step(model, tokens, row) == tokens * (6 * matrices + attention)
    bert = throughput_models.on_meta("bert-large", tiny=False)
    layers = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 1024**2 + 2 * 1024
    assert throughput_models.flop_per_step(bert, 512, 512) == 512 * (6 * layers + 12 * 24 * 1024 * 512)
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "cpu")
    assert [throughput_models.peak_flop_per_s(name) for name in names] == [989.4e12, 989.4e12, 756.5e12, None]


@pytest.mark.parametrize("name", throughput_models.MODELS)
def test_models_that_are_made_quickly_are_the_models(name):
    quick, slow = throughput_models.quickly_made(name, True), throughput_models.made(name, True)
    ours, theirs = quick.state_dict(), slow.state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    assert len(list(quick.parameters())) == len(list(slow.parameters())), "the same weights are tied"
    for key, buffer in slow.named_buffers():
        assert torch.equal(quick.get_buffer(key), buffer)
    assert all(value.std() > 0.01 for value in ours.values() if value.dim() == 2 and value.is_floating_point())
    data = throughput_models.RandomTokens(quick, 4, 16)
    loss = quick(**torch.utils.data.default_collate([data[i] for i in range(4)])).loss
    assert loss.item() == pytest.approx(math.log(100 if data.is_decoder else 2), rel=0.1)


@pytest.mark.slow
def test_it_runs_as_a_script_from_anywhere(tmp_path):
    script = Path(throughput.__file__).resolve()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "hf_l2l").symlink_to(Path(hf_l2l.__file__).parent)
    asked = [sys.executable, str(script), "--help"]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--tokens" in done.stdout


@pytest.mark.parametrize("name", throughput_models.MODELS)
def test_full_sizes(name):
    with torch.device("meta"):
        model = throughput_models.made(name, tiny=False)
    count = sum(p.numel() for p in model.parameters())
    assert (
        count
        == {
            "bert-large": 335_143_938,
            "llama-1b": 1_235_814_400,
            "llama-3b": 3_212_749_824,
            "llama-8b": 8_030_261_248,
        }[name]
    )


def test_all_trainers_see_the_same_tokens(tmp_path):
    options = throughput.parsed([*CASE, "trainer"])
    modes = [mode for mode in throughput.MODES if mode != "fsdp2"]
    made = [
        throughput.trainer_for(
            throughput_models.made("llama-1b", tiny=True), "llama-1b", mode, (64,), options, str(tmp_path), 2, {}
        )
        for mode in modes
    ]
    assert len({t.args.train_batch_size * t.args.gradient_accumulation_steps for t in made}) == 1
    checkpointing = {mode: getattr(t.args, throughput.CHECKPOINTING) for mode, t in zip(modes, made, strict=True)}
    assert [mode for mode, asked in checkpointing.items() if asked] == ["trainer", "bf16-weights"]
    dtypes = {mode: next(t.model.parameters()).dtype for mode, t in zip(modes, made, strict=True)}
    assert [mode for mode, dtype in dtypes.items() if dtype == torch.bfloat16] == ["bf16-weights"]
    updates = [getattr(t.args, "eps_update", "trainer") for t in made]
    assert updates == [*["trainer"] * 3, "serial", "deferred", "eager", *["deferred"] * 3]

    def first_step(of: hf.Trainer) -> torch.Tensor:
        torch.manual_seed(0)
        batches = iter(of.get_train_dataloader())
        return torch.cat([next(batches)["input_ids"] for _ in range(of.args.gradient_accumulation_steps)])

    plain, *others = (first_step(t) for t in made)
    assert plain.numel() == 64
    assert all(torch.equal(plain, other) for other in others)


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
