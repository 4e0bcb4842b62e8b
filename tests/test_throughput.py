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
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers as hf

import hf_l2l
from benchmark_output import columns, refused
from benchmarks import gpu_rows, throughput, throughput_check, throughput_models, throughput_report, throughput_runs
from hf_l2l import L2LConfig
from hf_l2l.memory.memory_estimate import estimate
from hf_l2l.runtime.tensors import size_text, tensor_bytes


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MODELS, MODES = throughput.BY_DEFAULT, throughput.MODES[:5]
"""What is measured by default."""


def test_all_rows_are_there(tmp_path, capsys):
    file = tmp_path / "result.md"
    options = ["--out", str(file), "--rows", str(tmp_path / "rows.jsonl"), "--traces", str(tmp_path / "traces.zip")]
    result = throughput.main(["--tiny", "--steps", "1", "--tokens", "64", *options])
    text, last, progress = parts(capsys)
    assert file.read_text() + "\n" == text
    assert last == json.loads(json.dumps(result))
    rows = result["rows"]
    assert progress == [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(r["model"], r["mode"], r["tokens"]) for r in rows] == [
        (model, mode, 64) for model in MODELS for mode in MODES
    ]
    written = gpu_rows.read(tmp_path / "rows.jsonl")
    assert [each["kind"] for each in written] == ["environment", "settings", *["check"] * 2, *["row"] * len(rows)]
    assert [each["tokens_per_s"] for each in written[4:]] == [row["tokens_per_s"] for row in rows]
    cells = columns(text)
    assert [row[0] for row in cells] == [r["model"] for r in rows]
    for row, cell in zip(rows, cells, strict=True):
        assert row["failure"] is None
        assert all(0 < row[name] < math.inf for name in ("tokens_per_s", "device_bytes", "host_bytes", "flop_per_s"))
        assert 0 < row["fastest_s"] <= row["mean_s"] <= row["slowest_s"] < math.inf
        assert ("eager cannot clip" in cell[3]) == (row["mode"] == "eager")
        assert cell[2] == throughput_report.name_of(row)
        assert float(cell[3].split(":")[0]) == row["max_grad_norm"]
        assert cell[4] == f"{row['tokens_per_s']:,.0f}"
        plain = next(r for r in rows if (r["model"], r["mode"]) == (row["model"], "trainer"))
        assert row["of_trainer"] == row["tokens_per_s"] / plain["tokens_per_s"]
        assert cell[5] == f"{row['of_trainer']:.1%}"
        assert cell[6] == f"{row['fastest_s']:.3f}, {row['slowest_s']:.3f}, 1"
        assert cell[7:9] == [f"{size_text(row['device_bytes'])} (accounted)", size_text(row["host_bytes"])]
        is_plain = row["mode"] == "trainer"
        assert cell[9] == "-", "no peak of this device is known"
        assert (cell[10] == "-") == (row["bound"] is None) == (row["attach_s"] is None) == is_plain
        assert cell[11] in (("-",) if is_plain else ("compute", "link", "host update"))


def test_a_trace_has_one_step_of_each_case(unchecked, tmp_path):
    traces = tmp_path / "traces.zip"
    options = ["--tokens", "64", "--modes", "trainer", "serial", "deferred", "--traces", str(traces)]
    throughput.main(["--tiny", "--model", "bert-large", *options])
    with zipfile.ZipFile(traces) as packed:
        assert packed.namelist() == ["bert-large_serial_64.json", "bert-large_deferred_64.json"]
        for name in packed.namelist():
            events = json.loads(packed.read(name))["traceEvents"]
            assert [e["name"] for e in events if e["ph"] == "X"].count("step") == 1


def parts(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any], list[str]]:
    """What was printed: the document, the JSON after it, and the rows of the table that told of progress."""
    printed = capsys.readouterr()
    text, last = printed.out.removesuffix("\n").rsplit("\n", 1)
    return f"{text}\n", json.loads(last), [line for line in printed.err.splitlines() if line.startswith("| ")]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainers compute is not compared first."""
    passed = {"tolerance": 1.0, "difference": 0.0, "failure": None}
    monkeypatch.setattr(throughput, "check", lambda name, options: {"model": name, **passed})


def test_progress_is_compared_with_plain_trainer_in_whatever_order_one_asks(unchecked, capsys):
    throughput.main(["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes", "deferred", "trainer"])
    shares = [line.split(" | ")[5] for line in parts(capsys)[2]]
    assert shares[0] == "100.0%" and shares[1].endswith("%")


def test_at_least_ten_steps_are_measured_unless_one_says_otherwise(unchecked, capsys):
    assert throughput.parsed([]).steps >= 10
    assert throughput.parsed(["--steps", "4"]).steps == 4
    throughput.main(["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "serial", "--steps", "3"])
    text, last, _ = parts(capsys)
    assert "3 measured steps after 1." in text
    assert (last["settings"]["steps"], last["settings"]["warmup"]) == (3, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_compared_first_is_what_the_trainers_log(name):
    options = throughput.parsed(["--model", name, "--stash", "host"])
    plain, serial, deferred = (
        throughput_check.logged(name, mode, options) for mode in ("trainer", "serial", "deferred")
    )
    assert len(plain) == throughput_check.CHECKED_STEPS == len(set(plain))
    assert serial == deferred
    for ours, theirs in zip(serial, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    # The loss of guessing, not the sum over the batches that are accumulated.
    assert plain[0][0] == pytest.approx(math.log({"bert-large": 2, "llama-1b": 100}[name]), rel=0.05)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("mode", "factor", "message"),
    [
        ("deferred", 1 + 1e-15, "serial and deferred log other bits: "),
        ("deferred", math.nan, "serial and deferred log other bits: "),
        ("trainer", 1.001, "L2L and plain Trainer differ: "),
        ("trainer", math.nan, "L2L and plain Trainer differ: "),
        ("trainer", 1 + 1e-7, None),
    ],
)
@pytest.mark.parametrize("what", [0, 1], ids=["loss", "grad_norm"])
def test_a_difference_is_in_the_result_and_measuring_goes_on(mode, factor, message, what, monkeypatch, capsys):
    def fake(name: str, asked: str, options: Namespace) -> list[tuple[float, float]]:
        steps = [[3.0, 7.0] for _ in range(throughput_check.CHECKED_STEPS)]
        steps[-1][what] *= factor if asked == mode else 1.0
        return [(loss, norm) for loss, norm in steps]

    monkeypatch.setattr(throughput_check, "logged", fake)
    result = throughput.main(["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "serial"])
    [found], [row] = result["checks"], result["rows"]
    text = parts(capsys)[0]
    assert row["failure"] is None and row["tokens_per_s"] > 0
    if message is None:
        assert found["failure"] is None and "bert-large: plain `Trainer` within 1e-05, found 1.0e-07." in text
    else:
        assert found["failure"].startswith(message)
        assert f"**bert-large: {message}" in text


def test_the_check_leaves_no_kernel_of_attention_without_a_fixed_order():
    flash = torch.backends.cuda.flash_sdp_enabled()
    with throughput_check.fixed_order():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() == flash
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_document_and_the_json_say_where_it_ran(unchecked, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    torch.set_num_threads(2)
    arguments = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes", "serial", "--steps", "1"]
    throughput.main(arguments)
    text, last, _ = parts(capsys)
    found = last["environment"]
    assert datetime.date.today() - datetime.date.fromisoformat(found["date"]) <= datetime.timedelta(days=1)
    assert (found["cores"], found["threads"]) == (os.cpu_count(), 2)
    assert found["host_bytes"] == psutil.virtual_memory().total > found["available_host_bytes"] > 0
    for name in ("torch", "transformers", "accelerate", "hf_l2l"):
        module = importlib.import_module(name)
        assert found["versions"][name] == module.__version__
        assert f"{name} {module.__version__}" in text
    assert found["command"] == f"OMP_NUM_THREADS=2 python benchmarks/throughput.py {' '.join(arguments)}"
    for words in (found["date"], found["cpu"], "threads: 2 for", size_text(found["host_bytes"]), found["command"]):
        assert words in text


def test_throughput_of_cross_mixed_precision(unchecked):
    found = throughput.main(["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "cmp"])
    plain, cmp = found["rows"]
    need = estimate(throughput_models.made("bert-large", tiny=True), L2LConfig(cmp="bf16"))
    assert (cmp["cmp"], cmp["host_setting"]) == ("bf16", {})
    assert cmp["host_bytes"] == need.host_bytes > plain["device_bytes"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("gib", "setting"),
    [(200, 0), (140, 1), (128, 2), (100, 3), (80, None)],
)
def test_a_large_model_gets_the_first_host_setting_that_fits(gib, setting, monkeypatch):
    monkeypatch.setattr(throughput_runs, "available_host_bytes", lambda: gib * 2**30)
    options = throughput.parsed(["--model", "llama-8b", "--modes", "cmp", "--tokens", "32768"])
    model = throughput_models.on_meta("llama-8b", tiny=False)
    found, need = throughput_runs.host_setting(model, "cmp", options)
    assert found == (None if setting is None else throughput_runs.HOST_SETTINGS[setting])
    assert need > 10 * 8e9
    if setting is None:
        words, _ = throughput_runs.refusal(model, "cmp", 32768, options, math.inf)
        assert words == f"needs {size_text(need)} of host memory, 80.0 GiB is available"


def test_cases_without_time_or_memory_are_rows(unchecked, monkeypatch, capsys):
    case = ["--tiny", "--model", "llama-8b", "--tokens", "64", "--modes", "trainer", "cmp"]
    rows = throughput.main([*case, "--seconds", "0"])["rows"]
    assert [row["failure"] for row in rows] == ["no time left (needs about 4 s)"] * 2
    monkeypatch.setattr(throughput_runs, "available_host_bytes", lambda: 1000)
    capsys.readouterr()
    rows = throughput.main(case)["rows"]
    assert all("of host memory, 1000 bytes is available" in row["failure"] for row in rows)
    assert all(cell == "-" for cell in columns(parts(capsys)[0])[0][5:])


def test_a_case_that_fails_is_a_row(unchecked, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel\nmore words")

    monkeypatch.setattr(throughput_runs, "run_fsdp", fail)
    case = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes", "serial", "fsdp2"]
    l2l, fsdp = throughput.main(case)["rows"]
    assert l2l["failure"] is None and fsdp["failure"] == "failed: RuntimeError: no such kernel"


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


ON_AN_ACCELERATOR = """
import json, sys
from hf_l2l.testing import enable_simulated_accelerator
enable_simulated_accelerator()
import hf_l2l
from benchmarks import environment, throughput
environment.LINK_BYTES = 2**20
options = ["--tokens", "64", "--modes", "trainer", "deferred", "cmp", "--traces", sys.argv[1]]
throughput.main(["--tiny", "--model", "bert-large", *options])
"""


@pytest.mark.slow
def test_on_an_accelerator_the_link_and_the_peaks_are_measured(tmp_path):
    """In a process of its own: the accelerator is simulated."""
    asked = [sys.executable, "-c", ON_AN_ACCELERATOR, str(tmp_path / "traces.zip")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text, last = done.stdout.removesuffix("\n").rsplit("\n", 1)
    found = json.loads(last)
    ways = found["environment"]["link_bytes_per_s"]
    assert set(ways) == {"to_device", "to_host"} and all(0 < way < math.inf for way in ways.values())
    assert f"link {ways['to_device'] / 1e9:.1f} GB/s to the device, {ways['to_host'] / 1e9:.1f} GB/s back" in text
    assert all(row["is_measured"] for row in found["rows"])
    assert "by shapes, without activations" in text


@pytest.mark.slow
def test_it_runs_as_a_script_from_anywhere(tmp_path):
    script = Path(throughput.__file__).resolve()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "hf_l2l").symlink_to(Path(hf_l2l.__file__).parent)
    asked = [sys.executable, str(script), "--help"]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--tokens" in done.stdout


def test_bytes_on_the_cpu_are_accounted_and_not_measured(unchecked, capsys):
    options = ["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "deferred"]
    plain, l2l = throughput.main(options)["rows"]
    assert "measured)" not in capsys.readouterr().out
    model = throughput_models.made("bert-large", tiny=True)
    need = estimate(model)
    # A moment more than shapes say: the step counters of AdamW.
    assert plain["device_bytes"] == 4 * tensor_bytes(model.parameters()) + 4 * len(list(model.parameters()))
    assert (l2l["device_bytes"], l2l["host_bytes"]) == (need.device_bytes, need.host_bytes)
    assert not plain["is_measured"] and not l2l["is_measured"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("no more"), "out of memory"), (MemoryError("no more"), "out of host memory: no more")],
)
def test_running_out_of_memory_is_a_row(error, words, unchecked, monkeypatch, capsys):
    train = hf.Trainer.train

    def fail_plain(self, *args, **kwargs):
        if type(self) is hf.Trainer:
            raise error
        return train(self, *args, **kwargs)

    monkeypatch.setattr(hf.Trainer, "train", fail_plain)
    options = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes", "trainer", "serial"]
    plain, l2l = throughput.main(options)["rows"]
    assert (plain["failure"], l2l["failure"]) == (words, None)
    first, second = columns(capsys.readouterr().out)
    assert first[4:] == [words, *["-"] * 8]
    assert second[5] == "-", "there is nothing to compare with"


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


def test_both_trainers_see_the_same_tokens(tmp_path):
    options = throughput.parsed(["--tiny", "--tokens", "64", "--model", "llama-1b"])
    made = [
        throughput_runs.trainer_for(
            throughput_models.made("llama-1b", tiny=True), "llama-1b", mode, 64, options, str(tmp_path), []
        )
        for mode in MODES
    ]
    assert len({t.args.train_batch_size * t.args.gradient_accumulation_steps for t in made}) == 1
    assert getattr(made[0].args, throughput_runs.CHECKPOINTING)
    assert [getattr(t.args, "eps_update", "trainer") for t in made] == [*MODES[:4], "deferred"]

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
