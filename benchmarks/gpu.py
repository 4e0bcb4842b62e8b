"""What to do with a GPU that is there for minutes: one call that measures and tests, what is worth most first.

    python3 benchmarks/gpu.py [PART ...] [--out FOLDER] [--minutes 9.5] [--rehearse]

It needs torch for the device, transformers, accelerate and psutil, and for the tests pytest, pytest-timeout and, for
a few of them, hypothesis; no make, no datasets or evaluate, and no installed package. `PLAN` has the parts in the
order of their worth, and the seconds that each is assumed to take on an H100 with 16 cores. A part for which no time
is left is left out. Parts share a process as long as that lives: to import torch again takes longer than some of
them. A part that fails, hangs, or ends its process costs its own rows only; another process goes on with the next
part.

FOLDER gets five files: gpu.jsonl, row by row; gpu.md, the page to read; figures.json, what the machine reaches, as
`hf-l2l estimate --figures` takes it; traces.zip, for ui.perfetto.dev; and log.txt. The last lines of the output say
what was measured and how each part ended. The exit status is 0 if nothing failed.

--rehearse runs the same plan at tiny size, with the simulated accelerator in the place of the GPU.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Nothing here may import torch: this process watches the one that does.
from benchmarks import gpu_report, gpu_rows

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "gpu_worker.py"
FIRST_START_S, START_S = 25.0, 15.0
"""For a process to import torch, transformers and the package: the first time, and when the files are in memory."""
END_S = 15.0
"""For the end of a process that holds 100 GB of page-locked memory, and for the page."""
ANSWER = "gpu_worker: "
"""How a line of a worker begins that is an answer."""
REFUSED = "the device does not page-lock memory"
"""How the probe ends then; nothing else is run."""
MOST_PROCESSES = 12
"""For one part: tests go on in another process if one of them has ended theirs."""

MINUTES = 9.5
"""After which all of a call has ended."""

_PARITY, _MIXED = "tests/engine/test_parity.py", "tests/engine/test_mixed_precision.py"
_ENGINE, _OVERLAP = "tests/gpu/test_engine.py", "tests/gpu/test_overlap.py"
SMOKE = (
    f"{_PARITY}::test_ubatches_give_the_gradients_of_the_whole_batch",
    f"{_PARITY}::test_what_travels_ahead_changes_no_bit",
    f"{_OVERLAP}::test_uploads_run_beside_the_computation[True]",
    f"{_OVERLAP}::test_the_host_runs_ahead_of_the_device",
    f"{_OVERLAP}::test_no_layer_call_of_a_steady_step_waits_for_the_device[{{}}]",
    f"{_OVERLAP}::test_no_layer_call_of_a_steady_step_waits_for_the_device[{{'cmp': 'bf16'}}]",
    f"{_ENGINE}::test_masters_and_gradients_are_page_locked",
    f"{_ENGINE}::test_a_refused_registration_is_forgotten",
    f"{_MIXED}::test_losses_and_masters_are_those_of_plain_torch",
)
"""The tests without which no figure is worth much."""


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names.split())


OF_CUDA = _files("gpu", "engine overlap several faults")
"""What only a GPU has, the most valuable first; the last one begins processes."""
SUITE = (
    *_files("engine", "parity mixed_precision"),
    *_files("trainer", "trainer resume"),
    *_files("engine", "stash gradients nonfinite residency updates placements"),
)
"""Of the tests that any device runs, the most valuable first; the last two need hypothesis."""


class Case(NamedTuple):
    """A training of `throughput.py`: one model that is attached once, for some numbers of tokens per step."""

    model: str
    mode: str
    tokens: tuple[int, ...]
    warmup: int = 2
    steps: int = 5


class Part(NamedTuple):
    """A part of the plan."""

    seconds: float
    """That it is assumed to take on an H100."""
    case: Case | None = None
    tests: tuple[str, ...] = ()
    """Files or single tests."""
    is_alone: bool = False
    """Whether its process has no part before it or after it: it needs nearly all memory of the host."""


PLAN = {
    "probe": Part(20),
    "smoke": Part(40, tests=SMOKE),
    # Seconds of steps: 0.8 with checkpointing, 0.65 without, 1.2 layer to layer; to make and move the weights takes 6,
    # 8 more to attach them, 2 to estimate what they take, and 15 to plan.
    "1b-trainer": Part(14, Case("llama-1b", "trainer", (32768,))),
    "1b-whole": Part(12, Case("llama-1b", "whole", (32768,))),
    "1b-bf16-weights": Part(13, Case("llama-1b", "bf16-weights", (32768,))),
    "1b-cmp": Part(28, Case("llama-1b", "cmp", (32768,))),
    "1b-planned": Part(45, Case("llama-1b", "planned", (32768,))),
    "profile": Part(15),
    # 10 s to make the weights, 30 to attach them, 10 until the moments have memory; steps of 7 and 5 s if the host
    # holds fp32 moments.
    "8b": Part(115, Case("llama-8b", "shell", (32768, 16384), warmup=1, steps=2), is_alone=True),
    "1b-fsdp2": Part(30, Case("llama-1b", "fsdp2", (32768,), warmup=1, steps=3)),
    "1b-tokens": Part(40, Case("llama-1b", "cmp", (8192, 65536))),
    "tests": Part(65, tests=OF_CUDA),
    # All of them take longer: those for which there is no time have no row.
    "suite": Part(60, tests=SUITE),
}
"""Name -> part, what is worth most first; all after the first four are optional."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PLAN)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="folder of the results"
    )
    parser.add_argument(
        "--minutes", type=float, help=f"after which all of it has ended (default: {MINUTES}; 60 for a rehearsal)"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the simulated accelerator")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PLAN:
            parser.error(f"a part must be one of {', '.join(PLAN)} (got {name})")
    if options.minutes is None:
        options.minutes = 60.0 if options.rehearse else MINUTES
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0 (got {options.minutes:g})")
    options.parts = [name for name in PLAN if name in options.parts or not options.parts]
    return options


def surroundings(options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of a worker."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found |= {"PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # which tests ask for, and Hoppers have
    found["L2L_TEST_DEVICE"] = "sim" if options.rehearse else "cuda"
    if options.rehearse:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return found


class Worker:
    """A process that runs parts whose names it gets, and says so when one has ended."""

    def __init__(self, options: argparse.Namespace, log: Any) -> None:
        command = [sys.executable, str(WORKER), str(options.out), *(["--tiny"] if options.rehearse else [])]
        self.process = subprocess.Popen(
            command,
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log},
            **{"env": surroundings(options), "cwd": ROOT, "start_new_session": True},
        )
        self.is_alone = False

    def ask(self, name: str, left_s: float) -> None:
        """Let it run a part, for which there are so many seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{name} {left_s:.0f}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:  # it has ended: `answer` says so
            pass

    def answer(self, limit_s: float) -> str | None:
        """What it answers within so many seconds; None if that is nothing, "" if it has ended."""
        assert self.process.stdout is not None
        end_at, said = time.monotonic() + limit_s, b""
        while True:
            left_s = end_at - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, min(left_s, 1.0)))
            more = os.read(self.process.stdout.fileno(), 4096) if readable else b""
            said += more
            for line in said.decode(errors="replace").splitlines(keepends=True):
                if line.startswith(ANSWER) and line.endswith("\n"):  # a library may print something, too
                    return line.removeprefix(ANSWER).strip()
            # What it has forked may hold the pipe after its end.
            if (readable and not more) or (not readable and self.process.poll() is not None):
                return ""
            if left_s <= 0:
                return None

    def end(self, wait_s: float = 0.0) -> str:
        """End it, and all that it has started, which gets so many seconds to end by itself; returns how it ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all have ended
            pass
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "its process does not end"
        return f"its process was killed by signal {-status}" if status < 0 else f"its process ended with {status}"


class Call:
    """One call: the parts of a plan, one after the other, as far as time goes."""

    def __init__(self, options: argparse.Namespace, log: Any) -> None:
        self.options, self.log = options, log
        self.rows = options.out / "gpu.jsonl"
        self.end_at = time.monotonic() + 60 * options.minutes - END_S
        self.worker: Worker | None = None
        self.has_started = False
        self.start_s, self.assumed_start_s = 0.0, 0.0
        """Of the part that runs: to start its process, or several, and to start one on an H100."""

    @property
    def left_s(self) -> float:
        """Seconds until the last part has to end."""
        return self.end_at - time.monotonic()

    def run(self) -> None:
        """Run the parts; each has a row that says how it ended."""
        limits = {"minutes": self.options.minutes, "most_s": 60 * MINUTES, "end_s": END_S}
        gpu_rows.append(self.rows, "call", rehearsal=self.options.rehearse, **limits)
        refuses = False
        try:
            for name in self.options.parts:
                start, how = time.monotonic(), "stopped with the program that runs the parts"
                self.start_s = self.assumed_start_s = 0.0
                try:
                    if refuses:
                        how = "not run: other copies would be measured than those of training"
                    elif self.left_s < self.needed_s(name):
                        how = f"not begun: {gpu_report.NO_TIME} (it needs about {self.needed_s(name):.0f} s)"
                    else:
                        how = self.part(name)
                        refuses = how == REFUSED
                finally:
                    self.write_end(name, how, time.monotonic() - start)
        finally:
            if self.worker is not None:
                self.worker.end()

    def needed_s(self, name: str) -> float:
        """The least time that a part is begun with."""
        part = PLAN[name]
        seconds = min(part.seconds, 20.0) if part.tests else part.seconds
        return seconds + (START_S if self.needs_process(name) else 0.0)

    def needs_process(self, name: str) -> bool:
        """Whether the part needs a new process."""
        return self.worker is None or self.worker.is_alone or PLAN[name].is_alone

    def part(self, name: str) -> str:
        """Run a part; returns how it ended."""
        is_tests = bool(PLAN[name].tests)
        end_at: float | None = None
        for _ in range(MOST_PROCESSES if is_tests else 1):
            before = len(gpu_rows.read(self.rows, "test"))
            how = self.started(name) if self.needs_process(name) else None
            if end_at is None:  # the first start has a limit of its own
                end_at = min(self.end_at, time.monotonic() + self.limit_s(name))
            how = self.answered(name, end_at) if how is None else how
            if is_tests:
                self.write_the_dead()
            is_over = end_at - time.monotonic() < START_S
            if self.worker is not None or len(gpu_rows.read(self.rows, "test")) == before or is_over:
                break
        return how

    def limit_s(self, name: str) -> float:
        """The most seconds for a part, whatever number of processes it takes; the last one has what is left."""
        is_open = self.options.rehearse or name == list(PLAN)[-1]
        return float("inf") if is_open else 2 * PLAN[name].seconds + 20

    def started(self, name: str) -> str | None:
        """Start a process for the part; returns why that failed, if so."""
        if self.worker is not None:
            self.worker.end(END_S)
        start = time.monotonic()
        self.assumed_start_s = START_S if self.has_started else FIRST_START_S
        self.has_started = True
        self.worker = Worker(self.options, self.log)
        answer = self.worker.answer(min(self.left_s, 8 * FIRST_START_S))
        self.start_s += time.monotonic() - start
        gpu_rows.append(self.rows, "process", part=name)
        self.worker.is_alone = PLAN[name].is_alone
        return None if answer == "ready" else self.lost(answer, 8 * FIRST_START_S)

    def answered(self, name: str, end_at: float) -> str:
        """Let the process run the part until then; returns how it ended."""
        assert self.worker is not None
        limit_s = end_at - time.monotonic()
        self.worker.ask(name, limit_s)
        answer = self.worker.answer(limit_s)
        return answer if answer else self.lost(answer, limit_s)

    def lost(self, answer: str | None, limit_s: float) -> str:
        """How a part ended whose process is gone, or has to go."""
        assert self.worker is not None
        how = self.worker.end(5.0 if answer == "" else 0.0)  # the pipe may end before the process
        self.worker = None
        if answer is not None:
            return how
        return f"stopped: {gpu_report.NO_TIME}" if self.left_s < 1 else f"stopped after {limit_s:.0f} s"

    def write_the_dead(self) -> None:
        """Write a row for each test that was begun and has none."""
        have = {row["name"] for row in gpu_rows.read(self.rows, "test")}
        begun = dict.fromkeys(row["name"] for row in gpu_rows.read(self.rows, "begun"))
        for name in begun:
            if name not in have:
                message = "its process ended within it, at the limit for one test or by itself; see log.txt"
                gpu_rows.append(self.rows, "test", name=name, outcome="died", seconds=0.0, message=message)

    def write_end(self, name: str, how: str, seconds: float) -> None:
        """Write how a part ended, here and to the file, and the page as it is now."""
        starts = {"start_s": self.start_s, "assumed_start_s": self.assumed_start_s}
        gpu_rows.append(self.rows, "part", name=name, how=how, seconds=seconds, assumed_s=PLAN[name].seconds, **starts)
        print(f"{name}: {how}, {seconds:.0f} s", flush=True)
        try:
            write_page(self.options)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            # The rows are there, and the other parts are of more worth than the page.
            gpu_rows.append(self.rows, "page", part=name, failure=f"{type(error).__name__}: {error}")
            print(f"gpu.md is not written: {type(error).__name__}: {error}", flush=True)


def write_page(options: argparse.Namespace) -> None:
    """Write gpu.md from the rows that are there."""
    text = gpu_report.page(gpu_rows.read(options.out / "gpu.jsonl"), "python3 benchmarks/gpu.py")
    (options.out / "gpu.md").write_text(text, encoding="utf-8")


def stop(*_: object) -> None:
    """On SIGTERM: the worker is ended and the last row written on the way out."""
    sys.exit(143)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print what they found; 0 if nothing failed."""
    options = parsed(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.jsonl", "gpu.md", "figures.json", "traces.zip", "log.txt"):
        (options.out / name).unlink(missing_ok=True)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with (options.out / "log.txt").open("wb") as log:
            Call(options, log).run()
    finally:
        signal.signal(signal.SIGTERM, before)
        gpu_rows.cut(options.out / "log.txt")
    rows = gpu_rows.read(options.out / "gpu.jsonl")
    print(gpu_report.summary(rows))
    return 1 if gpu_report.failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
