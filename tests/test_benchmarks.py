"""The benchmarks run, tiny, and their results have the form that is promised; nothing here looks at a speed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import hf_l2l
from benchmark_output import columns, refused
from benchmarks import cmp_glue, cmp_glue_report, environment, eps_cpu, launch_time, noise_scale, saving, throughput
from glue_script import ROWS, write
from rank_pool import RankPool

FOLDER = Path(__file__).parent.parent / "benchmarks"
EPS_TINY = ["--layers", "2", "--hidden", "64", "--vocab", "50", "--pairs", "2", "--warmup", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
    """Two ways to update one model, and the gradients they are given.

    The copies hold NaN until they are written: fresh memory may hold the values of another test.
    """
    updates = eps_cpu.Updates(eps_cpu.bert(eps_cpu.parsed(EPS_TINY)), threads=1)
    for copy in updates.copies.values():
        copy.fill_(math.nan)
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


# ---- environment, and scripts in a process of their own


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
    tool.write_text("#!/bin/sh\necho 1980, 2619, 40, 690.10\n")
    asked = environment.asked_for_clocks()
    assert environment.clocks(asked)["power.draw"] == "690.10"
    tool.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert environment.driver_version() is None


def test_the_processor_is_named(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\n")
    assert environment.cpu_model(file) == "Some CPU: 3 GHz"
    assert environment.cpu_model(tmp_path / "none") != ""


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


def printed(module: str, words: list[str]) -> str:
    """What a benchmark prints, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(FOLDER / f"{module}.py"), *words])
        patch.setenv("OMP_NUM_THREADS", "1")
        importlib.import_module(f"benchmarks.{module}").main()
    return shown.getvalue()


def lines_of(module: str, words: list[str], as_a_script: bool) -> list[str]:
    """The same, in a process of its own: begun anew, or forked from one that has imported transformers."""
    if not as_a_script:
        pool = RankPool(1)
        (found,) = pool.run(printed, module, words)
        pool.close()
        return str(found).splitlines()
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, str(FOLDER / f"{module}.py"), *words]
    done = subprocess.run(asked, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


in_both_ways = pytest.mark.parametrize("as_a_script", [False, pytest.param(True, marks=pytest.mark.slow)])


@in_both_ways
def test_host_overhead_runs(as_a_script):
    """In a process of its own, since it takes the CPU for a device with streams."""
    *lines, last = lines_of("host_overhead", ["--rounds", "1", "--depths", "1", "2"], as_a_script)
    columns = "microseconds checkpointing fp32 checkpointing, bf16 weights bf16 fp32, 4 micro-batches"
    assert lines[0].split() == columns.split()
    found = json.loads(last)
    assert found["environment"]["command"].startswith("OMP_NUM_THREADS=1 python benchmarks/host_overhead.py")
    assert all(case["step"] > 0 for case in found["microseconds"].values())


@pytest.mark.slow
def test_a_head_of_its_own_does_not_hold_up_the_start_of_a_step(tmp_path):
    """In a process of its own, with the simulated accelerator."""
    asked = [sys.executable, str(FOLDER / "step_start.py"), "--out", str(tmp_path / "table.md")]
    env = {**os.environ, "PYTHONPATH": str(Path(hf_l2l.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(asked, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.md").read_text() == done.stdout
    _, _, *rows = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    found = {label: (float(tied), float(own)) for label, tied, own in rows}
    tied, own = found["the device waits for the first layer of a step"]
    assert tied == pytest.approx(own, rel=0.01)
    assert tied > found["the update of the embedding alone takes"][0]


@in_both_ways
def test_attach_runs(as_a_script):
    """In a process of its own, as above."""
    words = ["--rounds", "2", "--layers", "2", "--hidden", "64"]
    *lines, last = lines_of("attach", words, as_a_script)
    assert lines[0].split() == "seconds per GB of weights before threads".split()
    for way in json.loads(last)["seconds_per_gb"].values():
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in way.values())


@pytest.mark.slow
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
    assert "holds the logits of one micro-batch: with what the loss makes of them, 12 bytes" in text
    assert "L2L makes them a chunk of tokens at a time" in text


def test_the_command_of_the_update_is_the_same_everywhere():
    found = [
        re.findall(r"^.*python benchmarks/eps_cpu\.py --pairs.*$", (FOLDER / name).read_text(), re.MULTILINE)
        for name in ("README.md", "results/eps_cpu_2cores_202611.md")
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("[!_]*.py")), ids=lambda f: f.name)
def test_the_readme_names_every_benchmark(file):
    assert len(file.read_text().splitlines()) <= 600
    assert f"`{file.name}`" in (file.parent / "README.md").read_text()


# ---- saving


def test_checkpoints_are_timed_by_each_trainer(capsys):
    tiny = ["--rounds", "2", "--between", "2", "--layers", "1", "--hidden", "64", "--batch", "2", "--tokens", "8"]
    result = saving.main(tiny)
    text, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result
    assert list(result["kinds"]) == ["Trainer", "L2LTrainer", "L2LTrainer, l2l_async_save"]
    assert all(each["held_ms"] > 0 and each["mib"] > 1 for each in result["kinds"].values())
    assert "l2l_async_save" in text


# ---- noise_scale


def test_the_noise_scale_is_beside_that_of_two_batch_sizes(glue_folder, tiny_model, capsys):
    options = ["--data", str(glue_folder), "--model", tiny_model, "--batch", "4", "--ubatch", "2", "--draws", "1"]
    result = noise_scale.main([*options, "--rows", "16"])
    text, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result
    assert [each["step"] for each in result["steps"]] == [1, 2, 3, 4]
    assert [*result["two batch sizes"]] == ["0", "1", "2", "3", "4"]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 6


def test_what_measuring_costs_is_measured(capsys):
    result = noise_scale.main(["--cost", "--pairs", "2", "--tokens", "32", "--hidden", "16"])
    assert len(result["ratios"]) == 2 and min(result["ratios"]) > 0
    assert "| 32 |" in capsys.readouterr().out


def test_a_noise_scale_of_no_data_is_refused(tmp_path, capsys):
    message = refused(noise_scale.main, ["--data", str(tmp_path)], capsys)
    assert message == f"--data must be a folder with sst2_sentences/train.csv (got {tmp_path})"
    assert refused(noise_scale.main, ["--cost", "--pairs", "0"], capsys) == "--pairs must be at least 1 (got 0)"
