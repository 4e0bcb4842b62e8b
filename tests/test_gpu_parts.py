"""What is done with a GPU of half an hour can be rehearsed, and a run that is cut keeps what it had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmark_output import refused
from benchmarks import gpu, gpu_bench, gpu_report, gpu_rows, gpu_tests

RUNNER = Path(gpu.__file__)


def rehearsed(part: str, folder: Path, capsys: pytest.CaptureFixture[str] | None = None) -> list[gpu_rows.Row]:
    """The rows of a part that ended by itself and well; with `capsys`, the runner is this process."""
    words = [part, "--rehearse", "--out", str(folder)]
    if capsys is None:
        asked = [sys.executable, str(RUNNER), *words]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        printed = done.stdout
    else:
        assert gpu.main(words) == 0
        printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(f"{part}: ended by itself, status 0, ")
    rows = gpu_rows.read(folder / f"{part}.jsonl")
    kinds = Counter(row["kind"] for row in rows)
    assert kinds["environment"] >= 1 and (kinds["start"], kinds["end"]) == (1, 1)
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("start", "end")
    text = (folder / f"{part}.md").read_text()
    assert text.startswith(f"# {part}, a rehearsal") and "The part ended by itself, status 0" in text
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**20
    return [row for row in rows if row["kind"] == "row"]


def test_the_probe_is_rehearsed(tmp_path, capsys):
    rows = rehearsed("probe", tmp_path, capsys)
    assert [row["name"] for row in rows if "failure" in row] == []
    by_name = {row["name"]: row for row in rows}
    assert by_name["page-locking"] | {"seconds": 0} == {
        **{"kind": "row", "name": "page-locking", "bytes": 2**20, "code": 0},
        **{"seconds": 0, "is_pinned": True},
    }
    second = by_name["second registration of the same address"]
    assert (second["code"], second["next_kernel"]) == (712, "ran")
    assert sum(row["name"].startswith("copy, ") for row in rows) == 5
    assert all(row["bytes_per_s"] > 0 for row in rows if row["name"].startswith("copy"))
    threads = [row["threads"] for row in rows if row["name"] == "AdamW"]
    assert threads[0] == 1 and threads[-1] == os.cpu_count()
    attention = [row for row in rows if row["name"] == "attention"]
    assert {(row["dtype"], row["dropout"]) for row in attention} == {
        (dtype, dropout) for dtype in ("bfloat16", "float32") for dropout in (0.0, 0.1)
    }
    assert all("MATH" in row["runs"] for row in attention)


@pytest.mark.slow
def test_the_tests_are_rehearsed(tmp_path):
    rows = rehearsed("tests", tmp_path)
    outcomes = {row["name"].rpartition("::")[2].partition("[")[0]: row["outcome"] for row in rows}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {
        "test_a_synchronization_would_be_noticed",
        "test_the_sanitizer_finds_no_race",
    }
    folder = RUNNER.parent.parent / "tests" / "gpu"
    written = sum(file.read_text().count("\ndef test_") for file in folder.glob("test_*.py"))
    assert len(outcomes) == len(rows) == written >= 25


@pytest.mark.slow
def test_the_bench_is_rehearsed(tmp_path):
    rows = rehearsed("bench", tmp_path)
    assert {row["failure"] for row in rows} == {None}
    cases = [group.options.split(" --")[:3] for group in gpu_bench.GROUPS if group.script == "throughput.py"]
    expected = [
        (model.split()[1], mode)
        for model, modes, tokens in cases
        for _ in tokens.split()[1:]
        for mode in sorted(modes.split()[1:], key=("trainer", "serial", "deferred", "cmp", "resident", "fsdp2").index)
    ]
    assert [(row["model"], row["mode"]) for row in rows] == expected
    assert [row["card"] for row in rows if row["model"] == "llama-3b"][:2] == ["24GiB"] * 2
    checks = gpu_rows.read(tmp_path / "bench.jsonl", "check")
    assert [(each["model"], each["failure"]) for each in checks] == [("llama-1b", None), ("bert-large", None)]
    with zipfile.ZipFile(tmp_path / "traces.zip") as packed:
        assert len(packed.namelist()) == sum(mode not in ("trainer", "fsdp2") for _, mode in expected)
    assert len((tmp_path / "bench.md").read_text().split("\n| llama-8b | ")) == 2
    (resident,) = gpu_rows.read(tmp_path / "bench.jsonl", "resident")
    assert len(resident["ratios"]) == 1 and "A BERT that fits whole" in (tmp_path / "bench.md").read_text()


# ---- a run that is cut

STUB = """
import json, subprocess, sys, time
file = sys.argv[sys.argv.index("--rows") + 1]
with open(file, "a") as rows:
    row = {"kind": "row", "outcome": "passed", "seconds": 1.5, "message": ""}
    print(json.dumps({**row, "name": "first"}), file=rows, flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(json.dumps({**row, "name": "second", "child": child.pid}), file=rows, flush=True)
    rows.write('{"kind": "row", "name": "cut o')
    rows.flush()
    time.sleep(600 if "LAST" != "fails" else 0)
sys.exit(5)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that writes two rows, begins a third one, and never ends; it stands for every part."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    monkeypatch.setattr(gpu, "MARGIN_S", 0.0)
    monkeypatch.setattr(gpu, "DOCUMENT_S", 0.0)
    parts = {name: part._replace(script=script, limit_s=3.0) for name, part in gpu.PARTS.items()}
    monkeypatch.setattr(gpu, "PARTS", parts)
    return script


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


def test_a_part_that_is_stopped_keeps_its_rows_and_leaves_no_process(stub, tmp_path, capsys):
    out = tmp_path / "out"
    assert gpu.main(["tests", "--out", str(out)]) == 1
    start, first, second, end = gpu_rows.read(out / "tests.jsonl")
    assert (start["kind"], first["seconds"], second["name"]) == ("start", 1.5, "second")
    assert end["how"] == "stopped at its limit of 3 s" and end["status"] == -signal.SIGKILL
    assert has_ended(second["child"])
    assert capsys.readouterr().out.startswith("tests: ended stopped at its limit of 3 s")


def test_all_parts_share_the_time(stub, tmp_path):
    out = tmp_path / "out"
    assert gpu.main(["tests", "bench", "--out", str(out), "--minutes", "0.04"]) == 1
    ends = [gpu_rows.read(out / f"{name}.jsonl", "end")[0] for name in ("tests", "bench")]
    assert [end["how"] for end in ends] == ["stopped at its limit of 2 s", "not begun: no time was left"]
    assert "The part ended not begun" in (out / "bench.md").read_text()


def test_without_page_locked_memory_nothing_else_is_run(stub, tmp_path, capsys):
    stub.write_text(STUB.replace("LAST", "fails"))
    out = tmp_path / "out"
    assert gpu.main(["probe", "tests", "--out", str(out)]) == 1
    [end] = gpu_rows.read(out / "probe.jsonl", "end")
    assert (end["how"], end["status"]) == ("by itself", 5)
    assert not (out / "tests.jsonl").exists()
    assert "tests: not run, since a part before it failed that it needs" in capsys.readouterr().out
    assert gpu.main(["probe", "--out", str(out)]) == 1
    assert not gpu.PARTS["tests"].is_needed, "a test that fails stops nothing"


def test_a_runner_that_is_stopped_stops_its_part(stub, tmp_path):
    out = tmp_path / "out"
    text = (
        "import sys; from pathlib import Path; from benchmarks import gpu\n"
        "gpu.PARTS['tests'] = gpu.PARTS['tests']._replace(script=Path(sys.argv[1]))\n"
        "sys.exit(gpu.main(['tests', '--out', sys.argv[2]]))"
    )
    runner = subprocess.Popen([sys.executable, "-c", text, str(stub), str(out)], cwd=RUNNER.parent.parent)
    for _ in range(600):
        if len(gpu_rows.read(out / "tests.jsonl", "row")) == 2:
            break
        time.sleep(0.1)
    runner.terminate()
    assert runner.wait(60) == 143
    *_, second, end = gpu_rows.read(out / "tests.jsonl")
    assert end["how"] == "stopped with the program that runs the parts"
    assert has_ended(second["child"])


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
    """And after an error of the device, after which it would refuse all others."""
    shutil.copy(RUNNER.parent.parent / "tests" / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "test_dying.py").write_text(DYING)
    root = RUNNER.parent.parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (root, root / "tests" / "helpers"))))
    file = tmp_path / "tests.jsonl"
    assert gpu_tests.main(["--rows", str(file), "--tiny"], where=tmp_path) == 1
    rows = {row["name"].rpartition("::")[2]: row for row in gpu_rows.read(file, "row")}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {"test_a": "passed", "test_b": "died", "test_c": "failed", "test_d": "failed"}
    begun = Counter(row["name"] for row in gpu_rows.read(file, "begun"))
    assert set(begun.values()) == {1}, "no test is run twice"
    assert "illegal memory access" in rows["test_c"]["message"]
    text = gpu_report.document("tests", gpu_rows.read(file), "make gpu")
    assert "4 tests: 1 passed, 1 died, 2 failed." in text and "plain" in text


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


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_result_without_rows_has_a_document(part):
    text = gpu_report.document(part, [], "make gpu")
    assert "The part did not end." in text


CASES = """
import sys, time
time.sleep(60) if "no-such" not in sys.argv else sys.exit(2)
"""


@pytest.mark.parametrize("stands_for_it", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_of_cases_that_fails_is_a_row(stands_for_it, tmp_path, monkeypatch):
    """The benchmark, or a script in its place that imports nothing."""
    if stands_for_it:
        (tmp_path / "throughput.py").write_text(CASES)
        monkeypatch.setattr(gpu_bench, "__file__", str(tmp_path / "gpu_bench.py"))
    monkeypatch.setattr(gpu_bench, "START_S", 0.0)
    options = SimpleNamespace(rows=tmp_path / "bench.jsonl")
    for group, left_s in (("--model no-such", 100.0), ("--model bert-large", 0.05), ("--model bert-large", -1.0)):
        gpu_bench.run(gpu_bench.Group(group), options, tmp_path / "traces.zip", left_s)
    how = [row["how"] for row in gpu_rows.read(options.rows, "group")]
    assert how == ["ended with status 2", "stopped at its limit of 0 s", "not begun: no time was left"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prob"], "a part must be one of probe, tests, bench (got prob)"),
        (["probe", "--minutes", "0"], "--minutes must be above 0 (got 0)"),
    ],
)
def test_bad_options_of_the_runner_are_refused(arguments, message, capsys):
    assert refused(gpu.main, arguments, capsys) == message


def test_parts_run_in_the_order_of_their_value():
    assert gpu.parsed(["bench", "probe"]).parts == ["probe", "bench"]
    assert gpu.parsed([]).parts == ["probe", "tests", "bench"]
    assert gpu.parsed([]).minutes == 9.0
    result: dict[str, Any] = json.loads(json.dumps(gpu.surroundings(True)))
    assert (result["HF_HUB_OFFLINE"], result["CUDA_VISIBLE_DEVICES"], result["OMP_NUM_THREADS"]) == ("1", "", "1")
