"""The benchmarks run, tiny, and write what they say; nothing here looks at a speed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
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
    eps_cpu,
    gpu_rows,
    measured,
    noise_scale,
    published,
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


@nightly
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
    """Made-up rows, in the files where the benchmarks look for them."""
    (tmp_path / "sst2_sentences").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / "sst2_sentences" / f"{split}.csv", [*ROWS, *ROWS])
    return tmp_path


def test_the_noise_scale_is_beside_that_of_two_batch_sizes(glue_folder, tiny_model, capsys):
    options = ["--data", str(glue_folder), "--model", tiny_model, "--batch", "4", "--ubatch", "2", "--draws", "1"]
    result = noise_scale.main([*options, "--rows", "8"])
    text = printed(capsys, result)
    assert [each["step"] for each in result["steps"]] == [1, 2]
    assert [*result["two batch sizes"]] == ["0", "1", "2"]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 4
    result = noise_scale.main(["--cost", "--pairs", "2", "--tokens", "32", "--hidden", "16"])
    assert len(result["ratios"]) == 2 and min(result["ratios"]) > 0


# ---- throughput

CASE = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes"]


@nightly
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
        assert cell[4] == f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.1%}"
    with zipfile.ZipFile(traces) as packed:
        ours = [mode for mode in modes if throughput.MODES[mode].l2l is not None]
        assert packed.namelist() == [f"llama-1b_{mode}_64.json" for mode in ours]
        events = json.loads(packed.read(packed.namelist()[0]))["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"].count("step") == 1


def test_a_case_that_fails_or_has_no_time_is_a_row(monkeypatch, capsys):
    [row] = throughput.measured("llama-8b", "trainer", (64,), throughput.parsed([*CASE, "trainer"]), left_s=0.0)
    assert row["failure"].startswith("no time was left (it needs about ")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(hf.Trainer, "train", fail)
    [row] = throughput.main([*CASE, "trainer"])
    assert row["failure"] == "out of memory"
    assert columns(capsys.readouterr().out)[0][3:] == ["out of memory", *["-"] * 10]
    monkeypatch.setattr(throughput, "refusal", fail)
    rows = list(throughput.measured("llama-1b", "trainer", (128, 64), throughput.parsed([*CASE, "trainer"])))
    assert [(row["tokens"], row["failure"]) for row in rows] == [(128, "out of memory"), (64, "out of memory")]


# ---- docs/measured.md is what its command makes of the documents in benchmarks/results


def test_the_page_is_what_the_command_writes(tmp_path, monkeypatch):
    assert measured.main(["--check"]) == 0
    page = measured.PAGE.read_text(encoding="utf-8")
    assert all(claim.source in page for claim in published.CLAIMS)
    monkeypatch.setattr(measured, "PAGE", tmp_path / "measured.md")
    measured.PAGE.write_text("old")
    assert measured.main(["--check"]) == 1
    assert measured.main([]) == 0 and measured.main(["--check"]) == 0
