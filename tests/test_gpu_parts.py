"""What is done with a GPU that is there for minutes can be rehearsed, and a call that is cut keeps what it had."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmark_output import refused
from benchmarks import gpu, gpu_report, gpu_rows

RUNNER = Path(gpu.__file__)
ROOT = RUNNER.parent.parent


# ---- the rehearsal


def rehearsed(folder: Path, *parts: str) -> list[gpu_rows.Row]:
    """The rows of a rehearsal in a process of its own, in which nothing failed."""
    asked = [sys.executable, str(RUNNER), *parts, "--rehearse", "--out", str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + (folder / "log.txt").read_text()[-3000:]
    assert done.stdout.splitlines()[-1] == "nothing failed" and len(done.stdout) < 12_000
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert len(files) <= 8 and max(files.values()) < 16 * 2**20
    rows = gpu_rows.read(folder / "gpu.jsonl")
    assert {row["how"] for row in gpu_report.of_kind(rows, "part")} == {"ended"}
    return rows


def test_the_probe_is_rehearsed(tmp_path):
    """Other parts are run in `tests/sim/test_benchmarks.py`, where the simulated accelerator is there already."""
    rows = rehearsed(tmp_path, "probe")
    kinds = Counter(row["kind"] for row in rows)
    assert (kinds["call"], kinds["environment"], kinds["process"], kinds["part"]) == (1, 1, 1, 1)
    probed = {row["name"]: row for row in gpu_report.of_kind(rows, "probe")}
    assert probed["page-locking"]["code"] == 0
    second = probed["second registration of the same address"]
    assert (second["code"], second["next_kernel"]) == (712, "ran")
    assert {"link_up, bytes/s", "dram, bytes/s", "attention, FLOP/s"} <= probed.keys()
    assert (
        (tmp_path / "gpu.md").read_text().startswith("# A few minutes of sim:0, a rehearsal: its figures mean nothing")
    )


@pytest.mark.slow
def test_all_parts_are_rehearsed(tmp_path):
    rows = rehearsed(tmp_path)
    assert [row["name"] for row in gpu_report.of_kind(rows, "part")] == list(gpu.PLAN)
    assert [row["part"] for row in gpu_report.of_kind(rows, "process")] == ["probe", "8b", "1b-fsdp2"]
    plain = next(row for row in gpu_report.of_kind(rows, "case") if row["mode"] == "trainer")
    cells = gpu_report.against_the_estimate(plain).strip("| ").split(" | ")
    assert cells[3] == cells[5] == "-" and "estimate" in cells[4], "there is one of the device's peak alone"
    without = {row["mode"] for row in gpu_report.of_kind(rows, "case") if "expected" not in row}
    assert without == {"bf16-weights", "fsdp2"}
    cases = [part.case for part in gpu.PLAN.values() if part.case is not None]
    expected = [(case.model, case.mode) for case in cases for _ in case.tokens]
    assert [(row["model"], row["mode"]) for row in gpu_report.of_kind(rows, "case")] == expected
    tests = gpu_report.of_kind(rows, "test")
    assert [row["name"] for row in tests[:12]] == sorted(gpu.SMOKE, key=[row["name"] for row in tests].index)
    outcomes = {row["name"].rpartition("::")[2].partition("[")[0]: row["outcome"] for row in tests}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {
        "test_a_synchronization_would_be_noticed",
        "test_the_sanitizer_finds_no_race",
    }
    folder = ROOT / "tests" / "gpu"
    written = sum(file.read_text().count("\ndef test_") for file in folder.glob("test_*.py"))
    assert len(outcomes) == written >= 25


# ---- the plan


def test_the_plan_is_over_in_time(stub, monkeypatch, capsys):
    """A rehearsal says so if it is not."""
    monkeypatch.setenv("QUICK", "")
    assert 60 * gpu.parsed([]).minutes == 570
    assert gpu.main(["--rehearse", "--out", str(stub)]) == 0
    rows = gpu_rows.read(stub / "gpu.jsonl")
    assert [row["part"] for row in gpu_report.of_kind(rows, "process")] == ["probe", "8b", "1b-fsdp2"]
    starts = gpu.FIRST_START_S + 2 * gpu.START_S
    assert gpu_report.seconds(rows)[-1][2] == sum(p.seconds for p in gpu.PLAN.values()) + starts + gpu.END_S <= 570
    monkeypatch.setitem(gpu.PLAN, "1b-cmp", gpu.PLAN["1b-cmp"]._replace(seconds=600.0))
    capsys.readouterr()
    assert gpu.main(["1b-cmp", "--rehearse", "--out", str(stub)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the plan: 640 s are assumed for an H100, at most 570 s are there"
    )


def test_the_smoke_tests_are_there():
    """Their parameters, too, are checked by the rehearsal of all parts."""
    assert len(set(gpu.SMOKE)) == 12
    for name in gpu.SMOKE:
        file, _, function = name.partition("[")[0].partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text()


def test_the_process_that_watches_does_not_import_torch():
    asked = "import sys; from benchmarks import gpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True)


def test_parts_run_in_the_order_of_their_worth():
    assert gpu.parsed(["1b-cmp", "probe"]).parts == ["probe", "1b-cmp"]
    assert gpu.parsed([]).parts == list(gpu.PLAN)
    assert gpu.parsed(["--rehearse"]).minutes == 60
    found = gpu.surroundings(gpu.parsed(["--rehearse"]))
    assert (found["HF_HUB_OFFLINE"], found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("1", "", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prob"], f"a part must be one of {', '.join(gpu.PLAN)} (got prob)"),
        (["probe", "--minutes", "0"], "--minutes must be above 0 (got 0)"),
    ],
)
def test_bad_options_of_the_runner_are_refused(arguments, message, capsys):
    assert refused(gpu.main, arguments, capsys) == message


# ---- a call that is cut

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
    if "DYING" in os.environ:
        write("begun", name=str(os.getpid()))
        time.sleep(0.5)
        os._exit(1)
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
    how = "the device does not page-lock memory" if "REFUSES" in os.environ else "ended"
    print(f"gpu_worker: {how}", flush=True)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a call whose worker measures nothing: one part never ends, one ends its process, and so do two
    tests out of three. With QUICK all parts end at once, with DYING every test ends its process."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(gpu, "WORKER", tmp_path / "stub.py")
    return tmp_path / "out"


def how_of(folder: Path) -> dict[str, str]:
    """Part -> how it ended."""
    return {row["name"]: row["how"] for row in gpu_rows.read(folder / "gpu.jsonl", "part")}


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or waits for its parent to take notice; one that was killed takes a moment."""
    for _ in range(600):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_hangs_or_ends_its_process_ends_no_other(stub, monkeypatch, capsys):
    short = {name: part._replace(seconds=-9.0) for name, part in gpu.PLAN.items()}  # twice that, and 20 s: 2 s
    monkeypatch.setattr(gpu, "PLAN", short)
    parts = ["probe", "1b-trainer", "1b-whole", "1b-cmp"]
    assert gpu.main([*parts, "--out", str(stub)]) == 1
    found = how_of(stub)
    assert list(found.values()) == ["ended", "stopped after 2 s", "its process ended with 5", "ended"]
    assert [row["name"] for row in gpu_rows.read(stub / "gpu.jsonl", "ran")] == parts
    [child] = gpu_rows.read(stub / "gpu.jsonl", "child")
    assert has_ended(child["pid"])
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last == ["2 failed:", "1b-trainer: stopped after 2 s", "1b-whole: its process ended with 5"]
    assert "- 1b-whole: its process ended with 5" in (stub / "gpu.md").read_text()


def test_tests_go_on_in_another_process(stub):
    """A test that was begun and has no row has died; the others have one each."""
    assert gpu.main(["smoke", "--out", str(stub)]) == 1
    rows = gpu_rows.read(stub / "gpu.jsonl")
    outcomes = [(row["name"], row["outcome"]) for row in gpu_report.of_kind(rows, "test")]
    assert outcomes == [("a", "passed"), ("b", "died"), ("c", "passed")]
    assert how_of(stub) == {"smoke": "ended"} and len(gpu_report.of_kind(rows, "process")) == 3


def test_tests_that_end_their_processes_have_the_time_of_one_part(stub, monkeypatch):
    """Whatever number of processes that takes."""
    monkeypatch.setenv("DYING", "")
    monkeypatch.setattr(gpu, "START_S", 1.0)
    monkeypatch.setattr(gpu, "MOST_PROCESSES", 10**6)
    monkeypatch.setitem(gpu.PLAN, "smoke", gpu.PLAN["smoke"]._replace(seconds=-8.0))  # twice that, and 20 s: 4 s
    assert gpu.main(["smoke", "--out", str(stub)]) == 1
    rows = gpu_rows.read(stub / "gpu.jsonl")
    assert {row["outcome"] for row in gpu_report.of_kind(rows, "test")} == {"died"}
    [part] = gpu_report.of_kind(rows, "part")
    assert part["seconds"] < 60, "the call has 570"


def test_a_page_that_cannot_be_made_ends_no_part(stub, monkeypatch, capsys):
    def fail(*args: Any) -> str:
        raise KeyError("tokens_per_s")

    monkeypatch.setattr(gpu_report, "page", fail)
    assert gpu.main(["probe", "1b-cmp", "--out", str(stub)]) == 1
    assert how_of(stub) == {"probe": "ended", "1b-cmp": "ended"}
    printed = capsys.readouterr().out.splitlines()
    assert "gpu.md is not written: KeyError: 'tokens_per_s'" in printed
    assert printed[-1] == "gpu.md after 1b-cmp: KeyError: 'tokens_per_s'"


def test_a_part_that_needs_all_memory_has_a_process_of_its_own(stub):
    assert gpu.main(["probe", "1b-cmp", "8b", "1b-fsdp2", "profile", "--out", str(stub)]) == 0
    pids = [row["pid"] for row in gpu_rows.read(stub / "gpu.jsonl", "ran")]
    assert pids[0] == pids[1] == pids[2] and len(set(pids[2:])) == 3


def test_what_has_no_time_left_is_not_begun(stub, monkeypatch):
    """All but 20 seconds of the tests can be left out."""
    plan = {"1b-cmp": gpu.PLAN["1b-cmp"]._replace(seconds=200.0), "tests": gpu.PLAN["tests"]._replace(seconds=300.0)}
    monkeypatch.setattr(gpu, "PLAN", plan)
    assert gpu.main(["1b-cmp", "tests", "--out", str(stub), "--minutes", "2"]) == 0
    assert how_of(stub) == {"1b-cmp": "not begun: no time was left (it needs about 215 s)", "tests": "ended"}
    options = Namespace(rehearse=False, minutes=0.1, out=stub, parts=["1b-trainer"])
    call = gpu.Call(options, None)
    call.end_at = time.monotonic()
    assert call.left_s <= 0 and call.needed_s("tests") == 20 + gpu.START_S


def test_a_call_ends_in_time(stub, monkeypatch):
    monkeypatch.setattr(gpu, "END_S", 4.0)
    monkeypatch.setattr(gpu, "START_S", 0.0)
    monkeypatch.setattr(gpu, "PLAN", {name: part._replace(seconds=0.0) for name, part in gpu.PLAN.items()})
    start = time.monotonic()
    assert gpu.main(["1b-trainer", "8b", "--out", str(stub), "--minutes", "0.1"]) == 0
    assert how_of(stub) == {
        "1b-trainer": "stopped: no time was left",
        "8b": "not begun: no time was left (it needs about 0 s)",
    }
    assert time.monotonic() - start < 30


def test_without_page_locked_memory_nothing_else_is_run(stub, monkeypatch, capsys):
    monkeypatch.setenv("REFUSES", "")
    assert gpu.main(["probe", "1b-cmp", "--out", str(stub)]) == 1
    assert how_of(stub) == {
        "probe": gpu.REFUSED,
        "1b-cmp": "not run: other copies would be measured than those of training",
    }
    assert len(gpu_rows.read(stub / "gpu.jsonl", "ran")) == 1


def test_a_runner_that_is_stopped_stops_its_worker(stub):
    text = (
        "import sys; from pathlib import Path; from benchmarks import gpu\n"
        "gpu.WORKER = Path(sys.argv[1])\n"
        "sys.exit(gpu.main(['1b-trainer', '--out', sys.argv[2]]))"
    )
    runner = subprocess.Popen([sys.executable, "-c", text, str(gpu.WORKER), str(stub)], cwd=ROOT)
    for _ in range(600):
        if gpu_rows.read(stub / "gpu.jsonl", "child"):
            break
        time.sleep(0.1)
    runner.terminate()
    assert runner.wait(60) == 143
    assert how_of(stub) == {"1b-trainer": "stopped with the program that runs the parts"}
    assert has_ended(gpu_rows.read(stub / "gpu.jsonl", "child")[0]["pid"])


DYING = """
import os
import pytest
import torch

pytestmark = pytest.mark.gpu

def test_a():
    pass

def test_b():
    os._exit(1)

def test_c():
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

def test_d():
    assert False, "plain"
"""


@pytest.mark.slow
def test_tests_go_on_after_one_that_has_ended_the_process(tmp_path, monkeypatch):
    """And after an error of the device, after which it would refuse all others; with the true worker."""
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "test_dying.py").write_text(DYING)
    (tmp_path / "worker.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from benchmarks import gpu, gpu_worker\n"
        f"gpu.PLAN['smoke'] = gpu.PLAN['smoke']._replace(tests=({str(tmp_path)!r},))\n"
        "gpu_worker.main()\n"
    )
    monkeypatch.setattr(gpu, "WORKER", tmp_path / "worker.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers"))))
    out = tmp_path / "out"
    assert gpu.main(["smoke", "--rehearse", "--out", str(out)]) == 1
    rows = gpu_rows.read(out / "gpu.jsonl")
    tests: dict[str, Any] = {row["name"].rpartition("::")[2]: row for row in gpu_report.of_kind(rows, "test")}
    outcomes = {name: row["outcome"] for name, row in tests.items()}
    assert outcomes == {"test_a": "passed", "test_b": "died", "test_c": "failed", "test_d": "failed"}
    begun = Counter(row["name"] for row in gpu_report.of_kind(rows, "begun"))
    assert set(begun.values()) == {1}, "no test is run twice"
    assert "illegal memory access" in tests["test_c"]["message"]
    text = (out / "gpu.md").read_text()
    assert "4 tests: 1 passed, 1 died, 2 failed." in text and "plain" in text


# ---- rows and the page


def test_rows_are_read_whatever_happened_to_the_last_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    gpu_rows.append(None, "row", value=0)
    gpu_rows.append(file, "row", value=1)
    with file.open("a") as cut:
        cut.write('{"kind": "row", "val')
    gpu_rows.append(file, "end", how="killed")
    assert gpu_rows.read(file) == [{"kind": "row", "value": 1}, {"kind": "end", "how": "killed"}]
    assert gpu_rows.read(file, "row") == [{"kind": "row", "value": 1}]
    assert gpu_rows.read(tmp_path / "none.jsonl") == []
    gpu_rows.cut(file, 10)
    assert file.stat().st_size == 10 and file.read_text().endswith('killed"}\n')


def test_what_differs_from_the_estimate_is_bold():
    row = {"model": "m", "tokens": 1000, "title": "t", "host_setting": {}, "tokens_per_s": 890.0}
    row |= {"device_bytes": 2**30, "host_bytes": 2**30}
    row["expected"] = {"step_s": 1.0, "device_bytes": 2**30, "host_bytes": 2 * 2**30}
    cells = gpu_report.against_the_estimate(row).strip("| ").split(" | ")
    assert cells[3:] == [
        "**890, estimate 1,000, -11%**",
        "1.0 GiB, estimate 1.0 GiB, +0%",
        "**1.0 GiB, estimate 2.0 GiB, -50%**",
    ]


def test_the_profile_tells_launches_from_computation():
    profile = {"kind": "profile", "busy_share": 0.6}
    row = {"mode": "cmp", "bound": "compute"}
    assert gpu_report.bound_of({"mode": "trainer", "bound": None}, [profile]).startswith(
        "not measured (the model is on"
    )
    assert gpu_report.bound_of(row, [profile]).startswith("launches (the device is busy for 60%")
    assert gpu_report.bound_of(row, [{**profile, "busy_share": 0.97}]) == "compute"
    assert gpu_report.bound_of({**row, "bound": "host update"}, [profile]) == "host update"


def test_a_result_without_rows_has_a_page():
    assert "The environment was not written." in gpu_report.page([], "python3 benchmarks/gpu.py")


def test_a_signal_kills_what_does_not_end(stub):
    stub.mkdir()
    worker = gpu.Worker(gpu.parsed(["--out", str(stub)]), subprocess.DEVNULL)
    assert worker.answer(60) == "ready"
    worker.process.send_signal(signal.SIGSTOP)
    assert worker.answer(0.1) is None
    assert worker.end() == "its process was killed by signal 9"
