"""Time of a small operation, as a stand-in for the launch of a kernel: alone, and while the EPS updates weights.

The thread that launches kernels shares Python's lock, the cores and the memory with the threads of the updates. It
adds 16 numbers again and again, alone and after each `optimizer.step()` of a model whose update is deferred, until
that update is over: of few layers whose update is nearly all arithmetic ("large"), and of many that are nearly all
Python ("tiny"). The model never runs, and its gradients are constant. Each setting of the environment runs in a
process of its own, and they take turns.

    python benchmarks/launch_time.py [--rounds 3] [--steps 20]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_l2l import L2LConfig, attach_l2l

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import description, environment

SETTINGS: dict[str, dict[str, str]] = {
    "1 thread": {"threads": "1"},
    "2 threads": {"threads": "2"},
    "4 threads": {"threads": "4"},
    "4 threads, passive": {"threads": "4", "OMP_WAIT_POLICY": "PASSIVE"},
    "4 threads, active": {"threads": "4", "OMP_WAIT_POLICY": "ACTIVE"},
    "4 threads, no spinning": {"threads": "4", "GOMP_SPINCOUNT": "0"},
    "1 thread, lock for 0.5 ms": {"threads": "1", "switch_s": "0.0005"},
    "2 threads, lock for 0.5 ms": {"threads": "2", "switch_s": "0.0005"},
}
"""Name -> `num_threads` of the update, seconds after which Python's lock changes hands, and environment variables."""

MODELS = {"large": (4, 1024), "small": (60, 128), "tiny": (200, 16)}
"""Name -> layers, and width: a layer has 8 parameters, two of which have 4 times the square of the width."""

OPS_AT_ONCE = 50


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.norm = nn.LayerNorm(width)


class Stacked(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))


def now() -> tuple[int, int, int]:
    """Nanoseconds: of the clock, of this thread's own time, and for which it waited for a core (Linux only)."""
    try:
        queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        queued = 0
    return time.perf_counter_ns(), time.thread_time_ns(), queued


def ops_until(is_over: Callable[[], bool]) -> dict[str, float]:
    """Microseconds per operation until `is_over`, by what the thread did."""
    x, y, done, start = torch.ones(16), torch.ones(16), 0, now()
    while True:
        for _ in range(OPS_AT_ONCE):
            torch.add(x, y)
        done += OPS_AT_ONCE
        if is_over():
            clock, own, queued = ((b - a) / done * 1e-3 for a, b in zip(start, now(), strict=True))
            return {"clock": clock, "own": own, "for a core": queued, "for the lock": max(0.0, clock - own - queued)}


def alone() -> dict[str, float]:
    until = time.perf_counter() + 0.02
    return ops_until(lambda: time.perf_counter() > until)


def measured(setting: dict[str, str], steps: int) -> dict[str, list[float]]:
    """What was done -> microseconds per operation, one for each step."""
    sys.setswitchinterval(float(setting.get("switch_s", sys.getswitchinterval())))
    torch.set_num_threads(int(setting["threads"]))
    found: dict[str, list[float]] = {}
    for name, shape in MODELS.items():
        model = Stacked(*shape)
        eps = attach_l2l(model, L2LConfig(device="cpu", eps_update="deferred", layer_classes=("Block",)))
        eps.updates.worker.num_threads = int(setting["threads"])  # the option refuses more than there are cores
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        gradients = [torch.full_like(p, 1e-3) for p in model.parameters()]
        parameters = list(model.parameters())
        for step in range(steps + 3):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            quiet = alone()
            start = time.perf_counter()
            optimizer.step()
            began = eps.updates._begun
            last = ops_until(lambda: all([task.done for task in began[-2:]]))  # noqa: B023  # called here only
            lasted = time.perf_counter() - start
            eps.synchronize()
            if step >= 3:  # the first ones are not counted
                for when, values in (("alone", quiet), ("beside", last)):
                    for what, value in values.items():
                        found.setdefault(f"{name}, {when}, {what}", []).append(value)
                found.setdefault(f"{name}, update, ms", []).append(lasted * 1e3)
    return found


def in_a_process(name: str, steps: int) -> dict[str, list[float]]:
    setting = SETTINGS[name]
    env = {**os.environ, **{key: value for key, value in setting.items() if key.isupper()}}
    asked = [sys.executable, str(Path(__file__).resolve()), "--setting", name, "--steps", str(steps)]
    done = subprocess.run(asked, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Medians over steps. The last quotient leaves out waits for a core, which other processes may have."""
    head = ["microseconds per operation"]
    for name in MODELS:
        head += [f"{name}: alone", "beside", "own", "for a core", "for the lock", "(own + lock) / alone", "update, ms"]
    lines = [head]
    for setting, of in found.items():
        line = [setting]
        for name in MODELS:
            median = {what: statistics.median(values) for what, values in of.items() if what.startswith(name)}
            alone = median[f"{name}, alone, own"]
            beside = [median[f"{name}, beside, {what}"] for what in ("clock", "own", "for a core", "for the lock")]
            quotient = (beside[1] + beside[3]) / alone
            update = median[f"{name}, update, ms"]
            line += [f"{alone:.2f}", *(f"{each:.2f}" for each in beside), f"x {quotient:.2f}", f"{update:.0f}"]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each setting, in turns")
    parser.add_argument("--steps", type=int, default=20, help="measured steps in each process")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)  # of the process itself
    options = parser.parse_args(arguments)
    if options.setting is not None:
        print(json.dumps(measured(SETTINGS[options.setting], options.steps)))
        return
    where: dict[str, Any] = environment("launch_time.py", sys.argv[1:] if arguments is None else arguments)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in options.settings}
    for _ in range(options.rounds):
        for name in options.settings:
            for what, values in in_a_process(name, options.steps).items():
                found[name].setdefault(what, []).extend(values)
    print(table(found))
    print(description(where))
    print(json.dumps({"microseconds": found, "environment": where}))


if __name__ == "__main__":
    main()
