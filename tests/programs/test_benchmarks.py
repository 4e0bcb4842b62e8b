"""The benchmarks run, tiny, and write what they say; nothing here looks at a speed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from benchmark_output import columns, refused
from benchmarks import (
    cmp_glue,
    cmp_glue_report,
    environment,
    eps_cpu,
    gpu_rows,
    noise_scale,
    saving,
    throughput,
)
from glue_script import ROWS, write
from rank_pool import RankPool
from tiers import more, nightly

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def printed(capsys: pytest.CaptureFixture[str], result: dict[str, Any]) -> str:
    """The text before the last line, which is the result as JSON."""
    text, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(last) == result
    return str(text)


# ---- updates on the host


def test_the_update_is_measured_in_both_cases(capsys):
    tiny = ["--layers", "2", "--hidden", "64", "--vocab", "50", "--pairs", "2", "--warmup", "1", "--threads", "1"]
    result = eps_cpu.main(tiny)
    assert [row[0] for row in columns(printed(capsys, result))] == list(result["cases"]) == list(eps_cpu.CASES)
    for case in result["cases"].values():
        for name in ("ratio", "layered_ms", "flat_ms"):
            assert 0 < case[name]["p10"] <= case[name]["median"] <= case[name]["p90"] < math.inf
        assert case["target"] > 1
    assert refused(eps_cpu.main, ["--pairs", "1"], capsys) == "--pairs must be at least 2 (got 1)"


def test_checkpoints_are_timed_by_each_trainer(capsys):
    tiny = ["--rounds", "2", "--between", "2", "--layers", "1", "--hidden", "64", "--batch", "2", "--tokens", "8"]
    result = saving.main(tiny)
    assert "l2l_async_save" in printed(capsys, result)
    assert list(result["kinds"]) == ["Trainer", "L2LTrainer", "L2LTrainer, l2l_async_save"]
    assert all(each["held_ms"] > 0 and each["mib"] > 1 for each in result["kinds"].values())


# ---- in processes of their own, since they take the CPU for a device with streams


def shown_by(module: str, words: list[str]) -> str:
    """What a benchmark prints, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(FOLDER / f"{module}.py"), *words])
        patch.setenv("OMP_NUM_THREADS", "1")
        importlib.import_module(f"benchmarks.{module}").main()
    return shown.getvalue()


def measured_apart(module: str, words: list[str]) -> list[str]:
    """The lines of a benchmark in a process that was forked from one that has imported transformers."""
    pool = RankPool(1)
    (shown,) = pool.run(shown_by, module, words)
    pool.close()
    return str(shown).splitlines()


def test_attaching_is_measured():
    *_, last = measured_apart("attach", ["--rounds", "2", "--layers", "2", "--hidden", "64"])
    for way in json.loads(last)["seconds_per_gb"].values():
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in way.values())


@nightly
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("host_overhead", ["--rounds", "1", "--depths", "1", "2"]),
        ("launch_time", ["--rounds", "1", "--steps", "2", "--settings", "1 thread"]),
    ],
)
def test_overhead_and_launches_are_measured(module, words):
    found = json.loads(measured_apart(module, words)[-1])["microseconds"]
    assert found
    assert module == "launch_time" or all(each["step"] > 0 for each in found.values())


@nightly
def test_the_start_of_a_step_is_measured(tmp_path):
    shown = measured_apart("step_start", ["--out", str(tmp_path / "table.md")])
    rows = (line.strip("| ").split(" | ") for line in shown[2:])
    times = {label: (float(tied), float(own)) for label, tied, own in rows}
    tied, own = times["the device waits for the first layer of a step"]
    assert tied == pytest.approx(own, rel=0.01), "a head of its own does not hold it up"
    assert tied > times["the update of the embedding alone takes"][0]


# ---- on data of GLUE


@pytest.fixture
def glue_folder(tmp_path: Path) -> Path:
    """Made-up rows of both tasks, in the files where the benchmarks look for them."""
    pairs = [{"sentence1": row["sentence"], "sentence2": "it is good", "label": row["label"]} for row in ROWS]
    for name, rows in (("sst2_sentences", ROWS), ("rte", pairs)):
        (tmp_path / name).mkdir()
        for split in ("train", "validation"):
            write(tmp_path / name / f"{split}.csv", [*rows, *rows])
    return tmp_path


def test_precisions_have_the_rows_of_their_tasks(glue_folder, tiny_model):
    """The trainings are run in `sim/test_benchmarks.py`."""
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_model)
    for most, name, sizes in (([], "rte", (24, 24)), (["--rows", "7"], "sst2", (7, 7))):
        found = cmp_glue.tokenized(cmp_glue.parsed(["--data", str(glue_folder), *most]), name, tokenizer)
        assert (len(found["train"]), len(found["validation"])) == sizes
        assert max(found["train"][0]["token_type_ids"]) == (1 if name == "rte" else 0)
    file = glue_folder / "result.jsonl"
    rows = [{"settings": {"rate": rate}, "run": {"seed": seed}} for rate, seed in ((1, 0), (2, 1), (1, 2))]
    file.write_text("\n".join([*map(json.dumps, rows), '{"settings": {"ra']))
    assert cmp_glue.finished(file, {"rate": 1}) == [{"seed": 0}, {"seed": 2}], "runs with the same settings only"


def test_precisions_are_compared_with_the_spread_of_fp32():
    def runs(precision: str, *found: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            {"task": "rte", "precision": precision, "seed": seed, "accuracy": accuracy, "eval_loss": loss}
            for seed, (accuracy, loss) in enumerate(found)
        ]

    base = runs("fp32", (0.5, 0.6), (0.6, 0.7))
    spread, bf16, fp16, one = cmp_glue_report.verdicts(
        [*base, *runs("bf16", (0.5, 0.7), (0.62, 0.8)), *runs("fp16", (0.4, 0.5), (0.5, 0.6)), *runs("other", (1, 1))]
    )
    assert "accuracy 0.5000..0.6000; eval loss 0.6000..0.7000" in spread
    assert "accuracy 0.5600 is within 0.5000..0.6000, at most 0.0200 off" in bf16
    assert "eval loss 0.7500 is above" in bf16 and "accuracy 0.4500 is below" in fp16
    assert "there is no fp32 with these seeds" in one


def test_the_noise_scale_is_beside_that_of_two_batch_sizes(glue_folder, tiny_model, capsys):
    options = ["--data", str(glue_folder), "--model", tiny_model, "--batch", "4", "--ubatch", "2", "--draws", "1"]
    result = noise_scale.main([*options, "--rows", "8"])
    text = printed(capsys, result)
    assert [each["step"] for each in result["steps"]] == [1, 2]
    assert [*result["two batch sizes"]] == ["0", "1", "2"]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 4
    result = noise_scale.main(["--cost", "--pairs", "2", "--tokens", "32", "--hidden", "16"])
    assert len(result["ratios"]) == 2 and min(result["ratios"]) > 0


# ---- the environment


def test_the_environment_is_described(monkeypatch, tmp_path):
    """The driver is asked of its own tool."""
    found = environment.environment("throughput.py", ["--tokens", "64"])
    assert found["versions"]["torch"] == torch.__version__ and found["cores"] == os.cpu_count()
    found |= {"device": "H200", "device_bytes": 2**37, "cuda": "12.8", "driver": "570.1"}
    found["link_bytes_per_s"] = {"to_device": 53.2e9, "to_host": 51.04e9}
    text = environment.description(found)
    assert "device H200 with 128.0 GiB; CUDA 12.8, driver 570.1; link 53.2 GB/s to the device, 51.0 GB/s back" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    for text, driver in (("echo 570.86.15", "570.86.15"), ("exit 6", None)):
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        assert environment.driver_version() == driver


# ---- throughput

CASE = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes"]


def test_each_trainer_has_a_row(tmp_path, capsys):
    """And a trace of its last step, if it is ours."""
    file, traces = tmp_path / "result.md", tmp_path / "traces.zip"
    options = ["--out", str(file), "--rows", str(tmp_path / "rows.jsonl"), "--traces", str(traces)]
    modes = ["trainer", "cmp", *more("bf16-weights", "whole", "deferred", "shell", "planned", "fsdp2")]
    modes = [mode for mode in throughput.MODES if mode in modes]
    rows = throughput.main([*CASE, *reversed(modes), *options])
    shown = capsys.readouterr()
    assert file.read_text() == shown.out
    written = gpu_rows.read(tmp_path / "rows.jsonl")
    assert written == [written[0], *({"kind": "case", **json.loads(json.dumps(row))} for row in rows)]
    assert [row["mode"] for row in rows] == modes, "plain Trainer first, with which the others are compared"
    assert {row["failure"] for row in rows} == {None}
    for row, cell in zip(rows, columns(shown.out), strict=True):
        assert 0 < row["fastest_s"] <= row["mean_s"] <= row["slowest_s"] < math.inf
        assert row["tokens_per_s"] == row["tokens"] / row["mean_s"]
        assert cell[4] == f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.1%}"
        is_plain = throughput.MODES[row["mode"]].l2l is None
        assert cell[10] in (("-",) if is_plain else ("compute", "link", "host update"))
    with zipfile.ZipFile(traces) as packed:
        ours = [mode for mode in modes if throughput.MODES[mode].l2l is not None]
        assert packed.namelist() == [f"llama-1b_{mode}_64.json" for mode in ours]
        events = json.loads(packed.read(packed.namelist()[0]))["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"].count("step") == 1


def test_a_case_that_fails_or_has_no_time_is_a_row(monkeypatch, capsys):
    [row] = throughput.measured("llama-8b", "trainer", (64,), throughput.parsed([*CASE, "trainer"]), left_s=0.0)
    assert row["failure"].startswith("no time was left (it needs about ")
    errors = {
        "out of memory": torch.OutOfMemoryError("no more"),
        "failed: RuntimeError: no such kernel": RuntimeError("no such kernel\nmore words"),
    }
    for words, error in errors.items():

        def fail(*args: Any, error: BaseException = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(hf.Trainer, "train", fail)
        [row] = throughput.main([*CASE, "trainer"])
        assert row["failure"] == words
        assert columns(capsys.readouterr().out)[0][3:] == [words, *["-"] * 10]
    monkeypatch.setattr(throughput, "refusal", fail)
    rows = list(throughput.measured("llama-1b", "trainer", (128, 64), throughput.parsed([*CASE, "trainer"])))
    assert [(row["tokens"], row["failure"]) for row in rows] == [(128, words), (64, words)]
