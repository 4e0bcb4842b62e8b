"""The benchmarks run, tiny, and write what they say; nothing here looks at a speed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers as hf

import golden
import golden_runs
import soak
import soak_updates
from benchmark_output import columns
from benchmarks import eps_cpu, gpu, gpu_report, gpu_rows, measured, noise_scale, published, saving, throughput
from glue_script import ROWS, write
from golden_cases import NOT_RECORDED, OPTIONS, Case, cases, quick
from hf_l2l import L2LConfig, L2LTrainingArguments
from rank_pool import RankPool
from tiers import more, nightly

RUNNER = Path(gpu.__file__)
FOLDER, ROOT = RUNNER.parent, RUNNER.parent.parent


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


def test_the_update_is_measured_in_each_case(capsys):
    result = eps_cpu.main(["--layers", "2", "--hidden", "16", "--turns", "2", "--warmup", "1", "--threads", "1", "2"])
    [first, *cases] = [row[0] for row in columns(printed(capsys, result))]
    assert "flat" in first and [case for case in cases if case in eps_cpu.CASES] == list(eps_cpu.CASES)
    for found in result["cases"].values():
        for case in eps_cpu.CASES:
            for name in ("ns", "ratio"):
                assert (
                    0 < found[case][name]["p10"] <= found[case][name]["median"] <= found[case][name]["p90"] < math.inf
                )
    with pytest.raises(SystemExit, match="2"):
        eps_cpu.main(["--turns", "1"])
    assert capsys.readouterr().err.endswith("error: --turns must be at least 2 (got 1)\n")


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


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("attach", ["--rounds", "2", "--layers", "2", "--hidden", "64"], "seconds_per_gb"),
        *more(("host_overhead", ["--rounds", "1", "--depths", "1", "2"], "microseconds")),
        *more(("launch_time", ["--rounds", "1", "--steps", "2", "--settings", "1 thread"], "microseconds")),
    ],
)
def test_attaching_overhead_and_launches_are_measured(module, words, name):
    found = json.loads(measured_apart(module, words)[-1])[name]
    assert found
    for each in found.values():
        assert module != "attach" or all(len(rounds) == 2 and min(rounds) > 0 for rounds in each.values())
        assert module != "host_overhead" or each["step"] > 0


@nightly
def test_the_start_of_a_step_is_measured(tmp_path):
    shown = measured_apart("step_start", ["--out", str(tmp_path / "table.md")])
    rows = (line.strip("| ").split(" | ") for line in shown[2:])
    times = {label: (float(small), float(large)) for label, small, large in rows}
    for each in zip(*times.values(), strict=True):
        end, start, _, host, _, waits, step = each
        assert 0 < end < start < waits < step and host < end + start


def test_the_noise_scale_is_beside_that_of_two_batch_sizes(tmp_path, tiny_model, capsys):
    (tmp_path / "sst2_sentences").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / "sst2_sentences" / f"{split}.csv", [*ROWS, *ROWS])
    options = ["--data", str(tmp_path), "--model", tiny_model, "--batch", "4", "--ubatch", "2", "--draws", "1"]
    result = noise_scale.main([*options, "--rows", "8"])
    text = printed(capsys, result)
    assert [each["step"] for each in result["steps"]] == [1, 2]
    assert [*result["two batch sizes"]] == ["0", "1", "2"]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 4
    result = noise_scale.main(["--cost", "--pairs", "2", "--tokens", "32", "--hidden", "16"])
    assert len(result["ratios"]) == 2 and min(result["ratios"]) > 0


CASE = ["--tiny", "--model", "llama-1b", "--tokens", "64", "--modes"]


@nightly
def test_each_trainer_has_a_row(tmp_path, capsys):
    """And a trace of its last step, if it is ours."""
    file, traces = tmp_path / "result.md", tmp_path / "traces.zip"
    options = ["--out", str(file), "--rows", str(tmp_path / "rows.jsonl"), "--traces", str(traces)]
    modes = ["trainer", "cmp", "bf16-weights", "whole", "deferred", "shell", "planned", "fsdp2"]
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


def test_the_page_is_what_the_command_writes(tmp_path, monkeypatch):
    assert measured.main(["--check"]) == 0
    page = measured.PAGE.read_text(encoding="utf-8")
    assert all(claim.source in page for claim in published.CLAIMS)
    monkeypatch.setattr(measured, "PAGE", tmp_path / "measured.md")
    measured.PAGE.write_text("old")
    assert measured.main(["--check"]) == 1
    assert measured.main([]) == 0 and measured.main(["--check"]) == 0


# ---- what is done with a GPU that is there for minutes: a call that is cut keeps what it had


def test_the_plan_is_over_in_time(stub, monkeypatch, capsys):
    """A rehearsal says so if it is not."""
    monkeypatch.setenv("QUICK", "")
    assert 60 * gpu.parsed([]).minutes == 570
    assert gpu.parsed(["1b-cmp", "probe"]).parts == ["probe", "1b-cmp"], "in the order of their worth"
    assert gpu.main(["--rehearse", "--out", str(stub)]) == 0
    rows = gpu_rows.read(stub / "gpu.jsonl")
    assert [row["part"] for row in gpu_report.of_kind(rows, "process")] == ["probe", "8b", "1b-fsdp2"]
    pids = {row["name"]: row["pid"] for row in gpu_report.of_kind(rows, "ran")}
    assert pids["probe"] == pids["1b-cmp"] and len({pids[name] for name in ("probe", "8b", "1b-fsdp2")}) == 3
    monkeypatch.setitem(gpu.PLAN, "1b-cmp", gpu.PLAN["1b-cmp"]._replace(seconds=600.0))
    capsys.readouterr()
    assert gpu.main(["1b-cmp", "--rehearse", "--out", str(stub)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the plan: 640 s are assumed for an H100, at most 570 s are there"


def test_the_tests_of_the_plan_are_there():
    """Their parameters, too, are checked by the rehearsal of all parts; what only CUDA has is there as a whole."""
    for name in (*gpu.SMOKE, *gpu.OF_CUDA, *gpu.SUITE):
        file, _, function = name.partition("[")[0].partition("::")
        assert not function or f"\ndef {function}(" in (ROOT / file).read_text()
        assert (ROOT / file).is_file() and file.split("/")[1] in ("gpu", "engine", "trainer")
    assert sorted(gpu.OF_CUDA) == sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_*.py"))


STUB = """
import json, os, subprocess, sys, time
rows = open(os.path.join(sys.argv[1], "gpu.jsonl"), "a")
def write(kind, **values):
    print(json.dumps({"kind": kind, **values}), file=rows, flush=True)
print("a library says hello")
print("gpu_worker: ready", flush=True)
for line in sys.stdin:
    name, left_s = line.split()
    write("ran", name=name, pid=os.getpid())
    if "QUICK" in os.environ:
        name = ""
    if name == "1b-trainer":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        write("child", pid=child.pid)
        rows.write('{"kind": "child", "pi')
        rows.flush()
        time.sleep(600)
    if name == "1b-whole":
        os._exit(5)
    if name == "smoke":
        done = [json.loads(line)["name"] for line in open(rows.name) if '"test"' in line]
        test = "abc"[len(done)]
        write("begun", name=test)
        if test == "b":
            os._exit(1)
        write("test", name=test, outcome="passed", seconds=1.5, message="")
        if test == "a":
            os._exit(70)
    print("gpu_worker: ended", flush=True)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a call whose worker measures nothing; with QUICK all parts end at once."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(gpu, "WORKER", tmp_path / "stub.py")
    return tmp_path / "out"


def how_of(folder: Path) -> dict[str, str]:
    """Part -> how it ended."""
    return {row["name"]: row["how"] for row in gpu_rows.read(folder / "gpu.jsonl", "part")}


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or waits for its parent to take notice; one that was killed takes a moment."""
    with suppress(psutil.NoSuchProcess):
        process, until = psutil.Process(pid), time.monotonic() + 60
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.05)
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@nightly
def test_a_part_that_hangs_or_ends_its_process_ends_no_other(stub, monkeypatch):
    short = {name: part._replace(seconds=-9.0) for name, part in gpu.PLAN.items()}  # twice that, and 20 s: 2 s
    monkeypatch.setattr(gpu, "PLAN", short)
    parts = ["probe", "1b-trainer", "1b-whole", "1b-cmp"]
    assert gpu.main([*parts, "--out", str(stub)]) == 1
    found = how_of(stub)
    assert list(found.values()) == ["ended", "stopped after 2 s", "its process ended with 5", "ended"]
    assert [row["name"] for row in gpu_rows.read(stub / "gpu.jsonl", "ran")] == parts
    [child] = gpu_rows.read(stub / "gpu.jsonl", "child")
    assert has_ended(child["pid"])
    assert "- 1b-whole: its process ended with 5" in (stub / "gpu.md").read_text()


def test_tests_go_on_in_another_process(stub):
    """A test that was begun and has no row has died; the others have one each."""
    assert gpu.main(["smoke", "--out", str(stub)]) == 1
    rows = gpu_rows.read(stub / "gpu.jsonl")
    outcomes = [(row["name"], row["outcome"]) for row in gpu_report.of_kind(rows, "test")]
    assert outcomes == [("a", "passed"), ("b", "died"), ("c", "passed")]
    assert how_of(stub) == {"smoke": "ended"} and len(gpu_report.of_kind(rows, "process")) == 3


@nightly
def test_a_call_ends_in_time(stub, monkeypatch):
    monkeypatch.setattr(gpu, "END_S", 4.0)
    monkeypatch.setattr(gpu, "START_S", 0.0)
    monkeypatch.setattr(gpu, "PLAN", {name: part._replace(seconds=0.0) for name, part in gpu.PLAN.items()})
    assert gpu.main(["1b-trainer", "8b", "--out", str(stub), "--minutes", "0.1"]) == 0
    assert how_of(stub) == {
        "1b-trainer": "stopped: no time was left",
        "8b": "not begun: no time was left (it needs about 0 s)",
    }


def test_a_runner_that_is_stopped_stops_its_worker(stub):
    text = (
        "import sys; from pathlib import Path; from benchmarks import gpu\n"
        "gpu.WORKER = Path(sys.argv[1])\n"
        "sys.exit(gpu.main(['1b-trainer', '--out', sys.argv[2]]))"
    )
    runner = subprocess.Popen([sys.executable, "-c", text, str(gpu.WORKER), str(stub)], cwd=ROOT)
    until = time.monotonic() + 60
    while not gpu_rows.read(stub / "gpu.jsonl", "child") and time.monotonic() < until:
        time.sleep(0.05)
    runner.terminate()
    assert runner.wait(60) == 143
    assert how_of(stub) == {"1b-trainer": "stopped with the program that runs the parts"}
    assert has_ended(gpu_rows.read(stub / "gpu.jsonl", "child")[0]["pid"])


def test_rows_are_read_whatever_happened_to_the_last_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    gpu_rows.append(None, "row", value=0)
    gpu_rows.append(file, "row", value=1)
    with file.open("a") as cut:
        cut.write('{"kind": "row", "val')
    gpu_rows.append(file, "end", how="killed")
    assert gpu_rows.read(file) == [{"kind": "row", "value": 1}, {"kind": "end", "how": "killed"}]
    assert gpu_rows.read(file, "row") == [{"kind": "row", "value": 1}]


# ---- a long part of the tests resumes where it was interrupted, and ends with a document


SETTINGS = {"code": "this one"}


def test_finished_rows_are_not_run_again_and_rows_that_failed_are(tmp_path, monkeypatch):
    """The first seed can be a later one."""
    file, fails, made = tmp_path / "rows" / "part.jsonl", {1}, []

    def run(seed: int) -> dict[str, Any]:
        made.append(seed)
        return {"failure": "bits differ" if seed in fails else None}

    part = SimpleNamespace(run=run, RUNS=4, document=lambda rows: f"# {len(rows)} rows")
    assert soak.rows_of(part, range(2), file, SETTINGS)[1]["failure"] == "bits differ"
    fails.clear()
    file.write_text(file.read_text() + '{"settings": {"co')  # interrupted within a line
    rows = soak.rows_of(part, range(4), file, SETTINGS)
    assert made == [0, 1, 1, 2, 3]
    assert [(row["seed"], row["failure"]) for row in rows] == [(seed, None) for seed in range(4)]
    soak.rows_of(part, range(1), file, {"code": "another one"})
    monkeypatch.setitem(sys.modules, "soak_updates", part)
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path)]
    assert soak.main(["updates", "--first", "2", *folders]) == 0
    assert made[5:] == [0, 2, 3, 0, 1]


@nightly
def test_programs_are_compared_and_told_of(tmp_path, monkeypatch):
    """A seed always gives the same program."""
    runs = 3
    folders = ["--rows", str(tmp_path), "--results", str(tmp_path), "--hardware", "here"]
    assert soak.main(["updates", "--runs", str(runs), *folders]) == 0
    rows = [json.loads(line)["row"] for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(range(runs)) and all("deferred" in row["modes"] for row in rows)
    [file] = tmp_path.glob("soak_updates_here_*.md")
    assert "No run failed." in file.read_text()
    trained = soak_updates.trained

    def wrong(program: Any, mode: str) -> Any:
        run = trained(program, mode)
        next(iter(run.weights.values())).add_(float(mode == "deferred"))
        return run

    monkeypatch.setattr(soak_updates, "trained", wrong)
    monkeypatch.setattr(soak, "code_state", lambda: "broken")
    assert soak.main(["updates", "--runs", "1", *folders]) == 1
    assert "- seed 0: AssertionError" in Path(file).read_text()
    programs = [soak_updates.program_of(seed) for seed in range(60)]
    assert programs == [soak_updates.program_of(seed) for seed in range(60)]


LLAMA = Case("cpu", "optimizers", "llama", {"update": "deferred"}, optimizer="fused AdamW", groups=True)


@nightly
def test_equal_runs_have_equal_records_and_a_gradient_of_a_millionth_more_is_found(tmp_path, monkeypatch):
    def larger(model: Any, eps: Any, step: int) -> None:
        model.model.layers[1].mlp.up_proj.weight.grad.mul_(1 + 2**-20 * (step == 0))

    expected, same = ({LLAMA.name: golden_runs.run(LLAMA, tmp_path / name)} for name in "ab")
    assert golden.differences(expected, same) == []
    monkeypatch.setattr(golden_runs, "after_backward", larger)
    first, *_ = found = golden.differences(expected, {LLAMA.name: golden_runs.run(LLAMA, tmp_path / "c")})
    assert {(each.case, each.section) for each in found} == {(LLAMA.name, "bits")}
    assert first.what.startswith(("first at step 1 of 5: ", "first at step 2 of 5: "))


def test_all_options_are_spelled_in_the_table_and_every_kind_has_a_quick_case():
    """A new option gets a term and a case, or a reason to have none."""
    of_transformers = {f.name for f in fields(hf.TrainingArguments)}
    known = {name.partition(".")[0] for names in OPTIONS.values() for name in names if name}
    ours = {f.name for f in fields(L2LConfig)} | {f.name for f in fields(L2LTrainingArguments)} - of_transformers
    assert ours - known == set(NOT_RECORDED) and known <= ours
    used = {term for case in cases() for term in case.options}
    assert set(OPTIONS) - used == {"stash folder", "state folder"}, "which each case has of its own"
    found = quick(cases())
    assert [case.kind for case in found] == list(dict.fromkeys(case.kind for case in found))
    assert {case.kind for case in found} == {case.kind for case in cases()}
