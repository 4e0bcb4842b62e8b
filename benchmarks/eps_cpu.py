"""The EPS's update on the CPU, layer by layer, for each kind of state, over one flat step of torch's fused AdamW.

No model runs: random numbers are the gradients of a model with layers of BERT-large and one matrix in no layer. Ours
is what `optimizer.step()` submits, to its end: gradients that are multiplied by the factor of clipping (but in the
first row), masters, moments, and a copy in 16 bits (`cmp`). Flat is `AdamW(fused=True).step()` of as many parameters
in one tensor, in fp32, with neither. Each case takes turns with it, so that a machine that slows down slows both; a
ratio is that of a turn. With one thread, times are those of the processor, and else those of a clock.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/eps_cpu.py [--turns 9] [--layers 6] [--threads 1 2]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.environment import environment
from hf_l2l import Lamb
from hf_l2l.memory.host_limits import available_host_bytes
from hf_l2l.optim import one_pass
from hf_l2l.optim.layer_optimizers import LayerOptimizers, SplitStep
from hf_l2l.optim.one_pass import OnePass
from hf_l2l.optim.rounded_state import Kept, Rounding
from hf_l2l.runtime.tensors import size_text
from hf_l2l.runtime.worker import Task, Worker

FACTOR = 0.999
"""Of clipping; so near to 1 that gradients never become too small to be normal numbers, which the processor would be
slow with."""

B16, F32 = torch.bfloat16, torch.float32


class Kind(NamedTuple):
    """What is updated, and how."""

    optimizer: str = "AdamW"
    gradients: torch.dtype = F32
    moments: Kept = "fp32"
    clips: bool = True
    copies: bool = True
    is_compiled: bool = True
    most: float | None = None
    """The ratio that it should not exceed."""


CASES = {
    "fp32 gradients, no clipping": Kind(clips=False, copies=False, most=1.05),
    "clip + 16-bit copy": Kind(most=1.15),
    "16-bit gradients + clip + copy": Kind(gradients=B16, most=1.3),
    "16-bit gradients, bf16 moments + clip + copy": Kind(gradients=B16, moments="bf16", most=1.7),
    "16-bit gradients, moments of 8 bits + clip + copy": Kind(gradients=B16, moments="8bit", most=3.0),
    "SGD": Kind("SGD"),
    "SGD with momentum": Kind("momentum"),
    "LAMB": Kind("LAMB"),
    "16-bit gradients + clip + copy, not compiled": Kind(gradients=B16, is_compiled=False),
    "16-bit gradients, bf16 moments + clip + copy, not compiled": Kind(
        gradients=B16, moments="bf16", is_compiled=False
    ),
    "16-bit gradients, moments of 8 bits + clip + copy, not compiled": Kind(
        gradients=B16, moments="8bit", is_compiled=False
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-5, weight_decay=0.01, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-5, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-5, momentum=0.9, fused=True),
    "LAMB": lambda ps: Lamb(ps, lr=1e-5),
}

WHOLE = "torch's fused AdamW, the same parameters"
DEEPSPEED = "DeepSpeed's CPUAdam, flat, fp32"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; one message and the end of the program for those that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9, help="measured turns of all cases")
    parser.add_argument("--warmup", type=int, default=2, help="turns before that")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024, help="of a layer, which is four times as wide inside")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args(arguments)
    for name, least in {"turns": 2, "warmup": 1, "layers": 1, "hidden": 8}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least} (got {getattr(options, name)})")
    if min(options.threads) < 1:
        parser.error(f"--threads must be at least 1 (got {options.threads})")
    need, have = 40 * sum(shape.numel() for layer in layers_of(options) for shape in layer), available_host_bytes()
    if need > have:
        parser.error(f"this takes {size_text(need)}, and {size_text(have)} can be had; use fewer --layers")
    return options


def layers_of(options: argparse.Namespace) -> list[list[torch.Size]]:
    """Shapes of the parameters of each layer, and of a matrix in none."""
    h = options.hidden
    layer = [(h, h), (h,)] * 4 + [(4 * h, h), (4 * h,), (h, 4 * h), (h,)] + [(h,)] * 4
    return [[torch.Size([8 * h, h])], *([torch.Size(shape) for shape in layer] for _ in range(options.layers))]


@contextmanager
def compiled(*, wanted: bool) -> Iterator[None]:
    """Inside, updates are compiled, or computed by torch."""
    before = one_pass.ENGINES.compiles
    if not wanted:
        one_pass.ENGINES.compiles = lambda form, kind: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        one_pass.ENGINES.compiles = before  # type: ignore[method-assign]


class Shared:
    """Tensors that all cases update, in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.layers = [
            [nn.Parameter(torch.randn(shape).mul_(0.02)) for shape in layer] for layer in layers_of(options)
        ]
        self.masters = [p for layer in self.layers for p in layer]
        self.gradients = {
            dtype: {p: torch.randn(p.shape).mul_(1e-3).to(dtype) for p in self.masters} for dtype in (F32, B16)
        }
        self.copies = {p: torch.empty(p.shape, dtype=B16) for p in self.masters}
        self.size = sum(p.numel() for p in self.masters)


class Ours:
    """The updates of one kind."""

    def __init__(self, kind: Kind, shared: Shared, worker: Worker) -> None:
        self._kind, self._shared, self._worker = kind, shared, worker
        self._optimizer = OPTIMIZERS[kind.optimizer](shared.masters)
        self._layers = LayerOptimizers(self._optimizer, OnePass.of(self._optimizer, kind.moments))
        self._steps = 0

    def __call__(self) -> None:
        """Make one step."""
        kind, shared = self._kind, self._shared
        rounding = None if kind.moments == "fp32" else Rounding(0, self._steps, kind.moments)
        step = SplitStep(self._layers, shared.gradients[kind.gradients], rounding)
        factors = dict.fromkeys(shared.masters, torch.tensor(FACTOR)) if kind.clips else {}
        copies = shared.copies if kind.copies else {}
        tasks = []
        with compiled(wanted=kind.is_compiled):
            for layer in shared.layers:
                part, task = step.part(layer), Task("an update")
                self._worker.submit(task, lambda part=part: part.run(factors, copies=copies))  # type: ignore[misc]
                tasks.append(task)
            for task in tasks:
                task.wait("the step has ended")
        self._steps += 1


class Flat:
    """A step of all parameters in one tensor."""

    def __init__(self, size: int, make: Callable[[Any], torch.optim.Optimizer], threads: int) -> None:
        self._master, self._threads = nn.Parameter(torch.randn(size).mul_(0.02)), threads
        self._master.grad = torch.randn(size).mul_(1e-3)
        self._optimizer = make([self._master])

    def __call__(self) -> None:
        """Make one step."""
        torch.set_num_threads(self._threads)
        self._optimizer.step()


class Whole:
    """torch's own step of the parameters that all cases update, which lie apart as those of a model do."""

    def __init__(self, shared: Shared, threads: int) -> None:
        self._gradients, self._threads = shared.gradients[F32], threads
        self._optimizer = OPTIMIZERS["AdamW"](shared.masters)

    def __call__(self) -> None:
        """Make one step."""
        torch.set_num_threads(self._threads)
        for p, gradient in self._gradients.items():
            p.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()


def deepspeed() -> Callable[[Any], torch.optim.Optimizer] | None:
    """What makes DeepSpeed's optimizer; None where it is not installed, or cannot be built."""
    try:
        module = importlib.import_module("deepspeed.ops.adam")
        module.DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])
    except Exception as error:  # noqa: BLE001 - it compiles C++, which fails in many ways
        print(f"without DeepSpeed: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None
    return lambda ps: module.DeepSpeedCPUAdam(ps, lr=1e-5, weight_decay=0.01)


def measured(options: argparse.Namespace, threads: int) -> dict[str, dict[str, Any]]:
    """For each case the nanoseconds for a parameter, and the ratio to the flat step of the same turn."""
    shared, worker = Shared(options), Worker(threads)
    flat = Flat(shared.size, OPTIMIZERS["AdamW"], threads)
    found: dict[str, dict[str, Any]] = {}
    flats: list[float] = []

    def measure(name: str, case: Callable[[], None], most: float | None = None) -> None:
        turns = in_turns(flat, case, threads, shared.size, options)
        flats.extend(one for one, _ in turns)
        ns, ratios = [other for _, other in turns], [other / one for one, other in turns]
        found[name] = {"ns": percentiles(ns), "ratio": percentiles(ratios), "most": most}

    measure(WHOLE, Whole(shared, threads))
    for name, kind in CASES.items():
        measure(name, Ours(kind, shared, worker), kind.most)
    other = deepspeed()  # at the end: its import makes the work of Python slower
    if other is not None:
        measure(DEEPSPEED, Flat(shared.size, other, threads))
    worker.close()
    return {"torch's fused AdamW, flat": {"ns": percentiles(flats), "ratio": None}, **found}


def in_turns(
    flat: Flat, case: Callable[[], None], threads: int, size: int, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Nanoseconds for a parameter of the flat step and of a case, in turns. A third one between them would have the
    caches of the processor forget more of the case than of the flat step."""
    clock = time.process_time if threads == 1 else time.perf_counter
    found = []
    for _ in range(options.warmup + options.turns):
        times = []
        for run in (flat, case):
            began = clock()
            run()
            times.append((clock() - began) / size * 1e9)
        found.append((times[0], times[1]))
    return found[options.warmup :]


def percentiles(values: list[float]) -> dict[str, float]:
    """The middle, and what a tenth of the values is below and above of."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The result for people, in markdown."""
    counts = list(results)
    heads = [f"ns, {n} thread{'s' * (n != '1')} | ratio | p10 to p90" for n in counts]
    lines = [f"| case | {' | '.join(heads)} | target |", "|---" * (2 + 3 * len(counts)) + "|"]
    for case in results[counts[0]]:
        cells = []
        for count in counts:
            found = results[count][case]
            ratio = found["ratio"]
            cells.append(f"{found['ns']['median']:.2f}")
            cells += (
                ["", ""] if ratio is None else [f"{ratio['median']:.2f}", f"{ratio['p10']:.2f} to {ratio['p90']:.2f}"]
            )
        most = results[counts[0]][case].get("most")
        lines.append(f"| {case} | {' | '.join(cells)} | {'' if most is None else f'at most {most}'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return what was printed as the last line."""
    options = parsed(arguments)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    results = {str(threads): measured(options, threads) for threads in options.threads}
    size = sum(shape.numel() for layer in layers_of(options) for shape in layer)
    found = {
        "cases": results,
        "parameters": size,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "options": vars(options),
        "environment": environment("eps_cpu.py", arguments or [], with_link=False),
    }
    print(table(results))
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
