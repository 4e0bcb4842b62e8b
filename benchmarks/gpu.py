"""What to do with a GPU that is there for half an hour: `make gpu PARTS="probe tests"`, then `make gpu PARTS=bench`.

    python benchmarks/gpu.py [probe] [tests] [bench] [--out FOLDER] [--minutes 9] [--rehearse]

Each part is a process of its own with a time limit, and writes FOLDER/<part>.jsonl row by row. The last row says how
the part ended: a part that was stopped at its limit, or with this program, keeps all rows that it had written. After
each part, FOLDER/<part>.md has its result for people. `bench` adds FOLDER/traces.zip.

    probe   what page-locked copies, host memory, the host's AdamW and attention kernels reach here. If the device
            refuses to page-lock memory, nothing after it is run: it would measure pageable memory.
    tests   the tests marked `gpu`
    bench   `throughput.py`, case by case, the most valuable first

--rehearse runs the same parts with tiny sizes on the CPU or on the simulated accelerator. The exit status is 0 if all
parts ended by themselves and nothing failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_rows

ROOT = Path(__file__).resolve().parent.parent
MARGIN_S = 8.0
"""What a part has less than its limit: in this time it ends by itself."""
DOCUMENT_S = 10.0
"""For the document of the last part, which needs torch."""


class Part(NamedTuple):
    """A part: the script that is called as `script --rows FILE --seconds S [--tiny]`, and its own limit."""

    script: Path
    limit_s: float
    is_needed: bool = False
    """Whether nothing after it is run unless it succeeds."""


PARTS = {
    "probe": Part(ROOT / "benchmarks" / "gpu_probe.py", 100.0, is_needed=True),
    "tests": Part(ROOT / "benchmarks" / "gpu_tests.py", 430.0),
    "bench": Part(ROOT / "benchmarks" / "gpu_bench.py", 530.0),
}
"""In the order in which they run."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="folder of the results"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="after which all of it has ended")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU or the simulated accelerator")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"a part must be one of {', '.join(PARTS)} (got {name})")
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0 (got {options.minutes:g})")
    options.parts = [name for name in PARTS if name in options.parts or not options.parts]
    return options


def surroundings(rehearse: bool) -> dict[str, str]:
    """The environment variables of a part."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONUNBUFFERED"] = "1"
    if rehearse:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return found


def run(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a part for at most `left_s` seconds, and write how it ended; returns that."""
    part, file = PARTS[name], options.out / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    limit_s = min(part.limit_s, left_s)
    if limit_s <= MARGIN_S:
        end = {"how": "not begun: no time was left", "status": None, "seconds": 0.0}
        gpu_rows.append(file, "end", part=name, **end)
        return end
    command = [sys.executable, str(part.script), "--rows", str(file), "--seconds", f"{limit_s - MARGIN_S:.0f}"]
    command += ["--tiny"] if options.rehearse else []
    started = time.monotonic()
    gpu_rows.append(file, "start", part=name, limit_s=limit_s, rehearsal=options.rehearse)
    process = subprocess.Popen(command, env=surroundings(options.rehearse), cwd=ROOT, start_new_session=True)
    how = "stopped with the program that runs the parts"
    try:
        process.wait(limit_s)
        how = "by itself" if process.returncode >= 0 else f"killed by signal {-process.returncode}"
    except subprocess.TimeoutExpired:
        how = f"stopped at its limit of {limit_s:.0f} s"
    finally:
        kill(process)
        end = {"how": how, "status": process.returncode, "seconds": time.monotonic() - started}
        gpu_rows.append(file, "end", part=name, **end)
    return end


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the process, and what it started: all of it is in the group that bears its number."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        pass
    process.wait()


def write_document(name: str, options: argparse.Namespace) -> None:
    """Write FOLDER/<part>.md from the rows that are there."""
    from benchmarks.gpu_report import document  # not earlier: this imports torch

    again = ["PARTS=" + shlex.quote(name)] if not options.rehearse else []
    command = shlex.join(["make", "gpu-rehearse" if options.rehearse else "gpu", *again])
    text = document(name, gpu_rows.read(options.out / f"{name}.jsonl"), command)
    (options.out / f"{name}.md").write_text(text, encoding="utf-8")


def stop(*_: object) -> None:
    """On SIGTERM: the part is ended and its last row written on the way out."""
    sys.exit(143)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if all of them ended well."""
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, stop)
    end_at = time.monotonic() + 60 * options.minutes - DOCUMENT_S
    options.out.mkdir(parents=True, exist_ok=True)
    ends: dict[str, dict[str, Any]] = {}
    for name in options.parts:
        ends[name] = run(name, options, end_at - time.monotonic())
        write_document(name, options)
        if PARTS[name].is_needed and ends[name]["status"] != 0:
            break
    for name in options.parts:
        end = ends.get(name)
        if end is None:
            print(f"{name}: not run, since a part before it failed that it needs")
        else:
            files = f"{options.out / name}.jsonl and .md"
            print(f"{name}: ended {end['how']}, status {end['status']}, {end['seconds']:.0f} s: {files}")
    return 0 if len(ends) == len(options.parts) and all(end["status"] == 0 for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
