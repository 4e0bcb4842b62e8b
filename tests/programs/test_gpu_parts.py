"""What is done with a GPU that is there for minutes can be rehearsed, and a call that is cut keeps what it had."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu, gpu_report, gpu_rows
from tiers import nightly

RUNNER = Path(gpu.__file__)
ROOT = RUNNER.parent.parent


# ---- the plan


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
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the plan: 640 s are assumed for an H100, at most 570 s are there"
    )


def test_the_tests_of_the_plan_are_there():
    """Their parameters, too, are checked by the rehearsal of all parts; what only CUDA has is there as a whole."""
    for name in (*gpu.SMOKE, *gpu.OF_CUDA, *gpu.SUITE):
        file, _, function = name.partition("[")[0].partition("::")
        assert not function or f"\ndef {function}(" in (ROOT / file).read_text()
        assert (ROOT / file).is_file() and file.split("/")[1] in ("gpu", "engine", "trainer")
    assert sorted(gpu.OF_CUDA) == sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_*.py"))


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
    """The folder of a call whose worker measures nothing: one part never ends, one ends its process, and so do two
    tests out of three. With QUICK all parts end at once."""
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
    start = time.monotonic()
    assert gpu.main(["1b-trainer", "8b", "--out", str(stub), "--minutes", "0.1"]) == 0
    assert how_of(stub) == {
        "1b-trainer": "stopped: no time was left",
        "8b": "not begun: no time was left (it needs about 0 s)",
    }
    assert time.monotonic() - start < 30


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
