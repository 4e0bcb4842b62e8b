"""The benchmarks run, tiny, and their results have the form that is promised; nothing here looks at a speed."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers as hf

import hf_l2l
from benchmarks import cmp_glue, cmp_glue_report, environment, eps_cpu, launch_time, throughput
from glue_script import ROWS, write
from hf_l2l import L2LConfig
from hf_l2l.report.memory_estimate import estimate
from hf_l2l.runtime.tensors import size_text, tensor_bytes

FOLDER = Path(__file__).parent.parent / "benchmarks"
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
    result = throughput.main(["--tiny", "--steps", "1", "--tokens", "64", "--out", str(file)])
    text, last, progress = parts(capsys)
    assert file.read_text() + "\n" == text
    assert last == json.loads(json.dumps(result))
    rows = result["rows"]
    assert progress == [line for line in text.splitlines() if line.startswith("| ")][1:]
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
        assert cell[2] == ("`Trainer`, checkpointing" if row["mode"] == "trainer" else f"`L2LTrainer`, {row['mode']}")
        assert float(cell[3].split(":")[0]) == row["max_grad_norm"]
        assert cell[4] == f"{row['tokens_per_s']:,.0f}"
        plain = next(r for r in rows if (r["model"], r["mode"]) == (row["model"], "trainer"))
        assert row["of_trainer"] == row["tokens_per_s"] / plain["tokens_per_s"]
        assert cell[5] == f"{row['of_trainer']:.1%}"
        assert cell[6] == f"{row['fastest_s']:.3f}, {row['slowest_s']:.3f}"
        assert cell[7:] == [f"{size_text(row['device_bytes'])} (accounted)", size_text(row["host_bytes"])]


def parts(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any], list[str]]:
    """What was printed: the document, the JSON after it, and the rows of the table that told of progress."""
    printed = capsys.readouterr()
    text, last = printed.out.removesuffix("\n").rsplit("\n", 1)
    return f"{text}\n", json.loads(last), [line for line in printed.err.splitlines() if line.startswith("| ")]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainers compute is not compared first."""
    monkeypatch.setattr(throughput, "check", lambda options: dict.fromkeys(options.model, 0.0))


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


@pytest.mark.parametrize("name", throughput.MODELS)
def test_what_is_compared_first_is_what_the_trainers_log(name):
    plain, serial, deferred = (throughput.logged(name, mode, "host") for mode in ("trainer", "serial", "deferred"))
    assert len(plain) == throughput.CHECKED_STEPS == len(set(plain))
    assert serial == deferred
    for ours, theirs in zip(serial, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    # The loss of guessing, not the sum over the batches that are accumulated.
    assert plain[0][0] == pytest.approx(math.log({"bert-large": 2, "llama-1b": 100}[name]), rel=0.05)


@pytest.mark.parametrize(
    ("mode", "factor", "message"),
    [
        ("deferred", 1 + 1e-15, "serial and deferred log other bits (bert-large, tiny)"),
        ("deferred", math.nan, "serial and deferred log other bits (bert-large, tiny)"),
        ("trainer", 1.001, "L2L and plain Trainer differ (bert-large, tiny)"),
        ("trainer", math.nan, "L2L and plain Trainer differ (bert-large, tiny)"),
        ("trainer", 1 + 1e-7, None),
    ],
)
@pytest.mark.parametrize("what", [0, 1], ids=["loss", "grad_norm"])
def test_nothing_is_measured_if_the_trainers_differ(mode, factor, message, what, monkeypatch):
    def fake(name: str, asked: str, stash: str) -> list[tuple[float, float]]:
        steps = [[3.0, 7.0] for _ in range(throughput.CHECKED_STEPS)]
        steps[-1][what] *= factor if asked == mode else 1.0
        return [(loss, norm) for loss, norm in steps]

    def measured(*args: Any) -> dict[str, Any]:
        assert message is None, "there is nothing to be measured"
        raise InterruptedError

    monkeypatch.setattr(throughput, "logged", fake)
    monkeypatch.setattr(throughput, "measured", measured)
    with pytest.raises(InterruptedError if message is None else SystemExit) as stopped:
        throughput.main(["--tiny", "--model", "bert-large"])
    if message is not None:
        assert str(stopped.value).startswith(f"nothing is measured: {message}: ")


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


def test_a_machine_without_an_accelerator_has_no_link_and_no_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.link(torch.device("cpu")) is None
    found = environment.environment("throughput.py", [])
    if not torch.accelerator.is_available():
        assert [found[name] for name in ("device", "cuda", "driver", "link_bytes_per_s")] == ["cpu", None, None, None]


def test_what_only_some_machines_have_is_described():
    found = environment.environment("throughput.py", [])
    found |= {"device": "H200", "device_bytes": 2**37, "cuda": "12.8", "driver": "570.1"}
    found["link_bytes_per_s"] = {"to_device": 53.2e9, "to_host": 51.04e9}
    text = environment.description(found)
    assert "device H200 with 128.0 GiB; CUDA 12.8, driver 570.1; link 53.2 GB/s to the device, 51.0 GB/s back" in text


def test_the_driver_is_asked_of_its_own_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 570.86.15\n')
    tool.chmod(0o755)
    assert environment.driver_version() == "570.86.15"
    tool.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert environment.driver_version() is None


def test_the_processor_is_named(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\n")
    assert environment.cpu_model(file) == "Some CPU: 3 GHz"
    assert environment.cpu_model(tmp_path / "none") != ""


def test_throughput_of_cross_mixed_precision(unchecked):
    options = ["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "deferred", "--cmp", "bf16"]
    found = throughput.main(options)
    assert found["settings"]["precision"] == "fp32, and L2L by cmp='bf16'"
    need = estimate(throughput.made("bert-large", tiny=True), L2LConfig(cmp="bf16"))
    assert found["rows"][1]["host_bytes"] == need.host_bytes > found["rows"][0]["device_bytes"]


@pytest.mark.slow
def test_memory_of_cross_mixed_precision(tmp_path):
    """In a process of its own: the accelerator is simulated."""
    script = Path(throughput.__file__).parent / "cmp_memory.py"
    asked = [sys.executable, str(script), "--width", "64", "--layers", "2", "--rows", "4", "--tokens", "16"]
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent)}
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [round(row["host_bytes_per_parameter"], 1) for row in rows.values()] == [16.0, 18.0, 16.0, 12.0, 10.0]
    peaks = [row["device_peak_bytes"] for row in rows.values()]
    assert all(peak < peaks[0] for peak in peaks[1:])


ON_AN_ACCELERATOR = """
import json, sys
from hf_l2l.testing import enable_simulated_accelerator
enable_simulated_accelerator()
import hf_l2l
from benchmarks import environment, throughput
environment.LINK_BYTES = 2**20
throughput.main(["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "deferred"])
"""


@pytest.mark.slow
def test_on_an_accelerator_the_link_and_the_peaks_are_measured():
    """In a process of its own: the accelerator is simulated."""
    done = subprocess.run([sys.executable, "-c", ON_AN_ACCELERATOR], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text, last = done.stdout.removesuffix("\n").rsplit("\n", 1)
    found = json.loads(last)
    ways = found["environment"]["link_bytes_per_s"]
    assert set(ways) == {"to_device", "to_host"} and all(0 < way < math.inf for way in ways.values())
    assert f"link {ways['to_device'] / 1e9:.1f} GB/s to the device, {ways['to_host'] / 1e9:.1f} GB/s back" in text
    assert all(row["is_measured"] for row in found["rows"])


@pytest.mark.slow
def test_it_runs_as_a_script_from_anywhere(tmp_path):
    script = Path(throughput.__file__).resolve()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "hf_l2l").symlink_to(Path(hf_l2l.__file__).parent)
    asked = [sys.executable, str(script), "--help"]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--tokens" in done.stdout


def test_host_overhead_runs_as_a_script():
    """In a process of its own, since it takes the CPU for a device with streams."""
    asked = [sys.executable, str(FOLDER / "host_overhead.py"), "--rounds", "1", "--depths", "1", "2"]
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(asked, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines[0].split() == "microseconds checkpointing fp32 bf16 fp32, 4 micro-batches".split()
    found = json.loads(last)
    assert found["environment"]["command"].startswith("OMP_NUM_THREADS=1 python benchmarks/host_overhead.py")
    assert all(case["step"] > 0 for case in found["microseconds"].values())


def test_attach_runs_as_a_script():
    """In a process of its own, as above."""
    asked = [sys.executable, str(FOLDER / "attach.py"), "--rounds", "2", "--layers", "2", "--hidden", "64"]
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(asked, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines[0].split() == "seconds per GB of weights before threads".split()
    for way in json.loads(last)["seconds_per_gb"].values():
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in way.values())


def test_launch_time_runs_as_a_script():
    asked = [sys.executable, str(FOLDER / "launch_time.py"), "--rounds", "1", "--steps", "2", "--settings", "1 thread"]
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent)}
    done = subprocess.run(asked, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["microseconds"]
    assert list(found) == ["1 thread"]
    for name in launch_time.MODELS:
        for when in ("alone", "beside"):
            assert all(each > 0 for each in found["1 thread"][f"{name}, {when}, clock"])
            assert len(found["1 thread"][f"{name}, {when}, for the lock"]) == 2


def test_bytes_on_the_cpu_are_accounted_and_not_measured(unchecked, capsys):
    options = ["--tiny", "--model", "bert-large", "--tokens", "64", "--modes", "trainer", "deferred"]
    plain, l2l = throughput.main(options)["rows"]
    assert "measured)" not in capsys.readouterr().out
    model = throughput.made("bert-large", tiny=True)
    need = estimate(model)
    # A moment more than shapes say: the step counters of AdamW.
    assert plain["device_bytes"] == 4 * tensor_bytes(model.parameters()) + 4 * len(list(model.parameters()))
    assert (l2l["device_bytes"], l2l["host_bytes"]) == (need.device_bytes, need.host_bytes)
    assert not plain["is_measured"] and not l2l["is_measured"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("no more"), "out of memory"), (MemoryError("no more"), "out of host memory")],
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
    assert first[4:] == [words, "-", "-", "-", "-"]
    assert second[5] == "-", "there is nothing to compare with"


@pytest.mark.parametrize("name", throughput.MODELS)
def test_full_sizes(name):
    with torch.device("meta"):
        model = throughput.made(name, tiny=False)
    count = sum(p.numel() for p in model.parameters())
    assert count == {"bert-large": 335_143_938, "llama-1b": 1_235_814_400}[name]


def test_both_trainers_see_the_same_tokens(tmp_path):
    options = throughput.parsed(["--tiny", "--tokens", "64", "--model", "llama-1b"])
    made = [
        throughput.trainer_for(
            throughput.made("llama-1b", tiny=True), "llama-1b", mode, 64, options, str(tmp_path), []
        )
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


# ---- cmp_glue

CMP_TWICE = """
import sys
from benchmarks import cmp_glue
options = sys.argv[1:]
cmp_glue.main([*options, "--precisions", "fp32", "bf16"])
print("---")
cmp_glue.main([*options, "--precisions", "fp32", "bf16", "fp16"])
"""


@pytest.fixture
def glue_folder(tmp_path: Path) -> Path:
    """Made-up rows of both tasks, in the files where the benchmark looks for them."""
    pairs = [{"sentence1": row["sentence"], "sentence2": "it is good", "label": row["label"]} for row in ROWS]
    for name, rows in (("sst2_sentences", ROWS), ("rte", pairs)):
        (tmp_path / name).mkdir()
        for split in ("train", "validation"):
            write(tmp_path / name / f"{split}.csv", [*rows, *rows])
    return tmp_path


@pytest.mark.slow
def test_precisions_are_compared_and_no_run_is_made_twice(glue_folder, tiny_model):
    """In a process of its own: the accelerator is simulated."""
    file = glue_folder / "result.md"
    options = ["--data", str(glue_folder), "--model", tiny_model, "--rows", "16", "--seeds", "3", "--tasks", "rte"]
    asked = [sys.executable, "-c", CMP_TWICE, *options, "--out", str(file)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ended = re.findall(r"^(\w+ \w+) seed 3: accuracy", done.stderr, re.MULTILINE)
    assert ended == ["rte fp32", "rte bf16", "rte fp16"]
    text, last = done.stdout.split("---\n")[1].removesuffix("\n").rsplit("\n", 1)
    assert file.read_text() == text
    assert str(glue_folder) not in text.replace(str(file), "")
    runs = json.loads(last)["runs"]
    assert [row[:3] for row in columns(text)] == [[run["task"], run["precision"], "3"] for run in runs]
    assert {(run["train_rows"], run["eval_rows"], run["steps"]) for run in runs} == {(16, 16, 1)}
    full, bf16, fp16 = runs
    assert [run["precision"] for run in runs] == list(cmp_glue.PRECISIONS)
    assert [run["loss_scale"] for run in runs] == [None, None, 2.0**16]
    for other in (bf16, fp16):
        assert other["losses"] != full["losses"]
        assert other["losses"] == pytest.approx(full["losses"], rel=1e-2), "another head, or other rows"
        assert 0 < other["device_bytes"] < full["device_bytes"]
    assert ("Not measured on a GPU." in text) == (not torch.cuda.is_available())


def test_the_rows_of_both_tasks_are_read(glue_folder, tiny_model, monkeypatch):
    monkeypatch.setitem(cmp_glue.TASKS, "sst2", cmp_glue.TASKS["sst2"]._replace(rows=20))
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_model)
    for most, name, sizes in (([], "rte", (24, 24)), ([], "sst2", (20, 24)), (["--rows", "7"], "sst2", (7, 7))):
        options = cmp_glue.parsed(["--data", str(glue_folder), *most])
        found = cmp_glue.tokenized(options, name, tokenizer)
        assert (len(found["train"]), len(found["validation"])) == sizes
        assert [row["labels"] for row in found["train"]][:7] == [row["label"] for row in ROWS][:7]
        assert max(found["train"][0]["token_type_ids"]) == (1 if name == "rte" else 0)


def test_a_run_counts_as_made_with_the_same_settings_only(tmp_path):
    file = tmp_path / "result.jsonl"
    lines = [
        json.dumps({"settings": {"rate": rate}, "run": {"seed": seed}}) for rate, seed in ((1, 0), (2, 1), (1, 2))
    ]
    file.write_text("\n".join((*lines, lines[0][:20])))
    assert cmp_glue.finished(file, {"rate": 1}) == [{"seed": 0}, {"seed": 2}]
    assert cmp_glue.finished(tmp_path / "none.jsonl", {}) == cmp_glue.finished(None, {}) == []


def test_what_is_said_of_cmp_and_the_spread_of_fp32():
    def runs(precision: str, *found: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            {"task": "rte", "precision": precision, "seed": seed, "accuracy": accuracy, "eval_loss": loss}
            for seed, (accuracy, loss) in enumerate(found)
        ]

    base = runs("fp32", (0.5, 0.6), (0.6, 0.7))
    spread, bf16, fp16, one = cmp_glue_report.verdicts(
        [*base, *runs("bf16", (0.5, 0.7), (0.62, 0.8)), *runs("fp16", (0.4, 0.5), (0.5, 0.6)), *runs("other", (1, 1))]
    )
    assert spread == "rte, fp32, spread of the seeds: accuracy 0.5000..0.6000; eval loss 0.6000..0.7000."
    assert "mean accuracy 0.5600 is within 0.5000..0.6000, at most 0.0200 off at a seed" in bf16
    assert "mean eval loss 0.7500 is above 0.6000..0.7000, at most 0.1000 off at a seed" in bf16
    assert "mean accuracy 0.4500 is below" in fp16 and "mean eval loss 0.5500 is below" in fp16
    assert one == "rte, other: there is no fp32 with these seeds to compare with."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows must be at least 1 (got 0)"),
        (["--out", "nowhere/result.md"], "--out must be in a folder that exists (got nowhere/result.md)"),
        (["--precisions", "int8"], "argument --precisions: invalid choice: 'int8'"),
    ],
)
def test_bad_options_of_the_precisions_are_refused(arguments, message, glue_folder, capsys):
    assert refused(cmp_glue.main, ["--data", str(glue_folder), *arguments], capsys).startswith(message)


def test_data_that_is_not_there_is_refused(tmp_path, capsys):
    message = refused(cmp_glue.main, ["--data", str(tmp_path)], capsys)
    assert message == f"--data must hold the files of the tasks (there is no {tmp_path}/rte/train.csv)"
    assert refused(cmp_glue.main, [], capsys) == "the following arguments are required: --data"


# ---- all of them


def test_the_readme_says_what_the_peak_of_a_decoder_contains():
    text = " ".join((FOLDER / "README.md").read_text().split())
    assert "the head and the loss see the whole device batch" in text
    assert "12 bytes" in text


def test_the_command_of_the_update_is_the_same_everywhere():
    found = [
        re.findall(r"^.*python benchmarks/eps_cpu\.py --pairs.*$", (FOLDER / name).read_text(), re.MULTILINE)
        for name in ("README.md", "results/eps_cpu_2cores_202611.md")
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda f: f.name)
def test_the_readme_names_every_benchmark(file):
    assert len(file.read_text().splitlines()) <= 300
    assert f"`{file.name}`" in (file.parent / "README.md").read_text()
