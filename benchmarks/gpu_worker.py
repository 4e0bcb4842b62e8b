"""Runs the parts of `gpu.py` whose names it reads, one a line, and prints a line when each has ended.

    python benchmarks/gpu_worker.py FOLDER [--tiny]

A line of input is a part and the seconds that there are for it. What is found goes to FOLDER/gpu.jsonl, row by row,
and all other output to standard error. --tiny is a rehearsal, on the simulated accelerator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment, gpu, gpu_probe, gpu_rows, throughput
from benchmarks.throughput_models import RandomTokens, quickly_made
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.devices import execution_device
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.runtime import stream

FEWER_TOKENS = 256
"""By which the tokens of a rehearsal are divided."""


class Parts:
    """What is measured and tested in this process."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny
        self.rows, self.figures = folder / "gpu.jsonl", folder / "figures.json"
        if not gpu_rows.read(self.rows, "environment"):
            # Not with the link: to measure it page-locks memory, which the probe has to try first.
            gpu_rows.append(self.rows, "environment", **environment.environment("gpu.py", [], with_link=False))

    def run(self, name: str, left_s: float) -> str:
        """Run a part; returns how it ended."""
        part = gpu.PLAN[name]
        if name == "probe":
            accepted = gpu_probe.run(self.tiny, self.figures, self.probed)
            return "ended" if accepted else gpu.REFUSED
        if part.case is not None:
            return self.case(part.case, left_s)
        if part.tests:
            from benchmarks import gpu_tests  # which needs pytest

            return gpu_tests.run(part.tests, self.rows, self.tiny)
        return self.profile()

    def probed(self, name: str, **values: Any) -> None:
        """A row of the probe."""
        gpu_rows.append(self.rows, "probe", name=name, **values)

    def options(self, warmup: int, steps: int) -> Namespace:
        """Of `throughput.py`."""
        small = {"warmup": 1, "steps": 1} if self.tiny else {"warmup": warmup, "steps": steps}
        same = {"ubatch_size": None, "stash": "device", "traces": self.folder / "traces.zip"}
        return Namespace(tiny=self.tiny, **small, **same)

    def case(self, case: gpu.Case, left_s: float) -> str:
        """Measure a training; a row for each number of tokens."""
        figures = None
        if self.figures.exists():
            figures = HardwareFigures.from_json(self.figures.read_text())
            os.environ["HF_L2L_FIGURES"] = str(self.figures)  # a plan does not measure them again
        tokens = [count // FEWER_TOKENS if self.tiny else count for count in case.tokens]
        options = self.options(case.warmup, case.steps)
        for row in throughput.measured(case.model, case.mode, tokens, options, left_s, figures):
            gpu_rows.append(self.rows, "case", **row)
        return "ended"

    def profile(self) -> str:
        """Forward and backward of two layers of Llama-3.2-1B's width under torch's profiler: whether the thread that
        launches kernels keeps the device busy. The vocabulary is small, and nothing is updated."""
        model = quickly_made("llama-1b", self.tiny, num_hidden_layers=2, vocab_size=2048)
        tokens, rows = (16, 2) if self.tiny else (1024, 8)
        data = RandomTokens(model, 4 * rows, tokens)
        batch = torch.utils.data.default_collate([data[index] for index in range(4 * rows)])
        device = execution_device(None)
        attach_l2l(model, L2LConfig(cmp="bf16", ubatch_size=rows, device=device))
        try:
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            for number in range(4):
                torch.accelerator.synchronize()
                is_last = number == 3
                with torch.profiler.profile(activities=kinds, acc_events=True) if is_last else nullcontext() as found:
                    start = time.perf_counter()
                    model(**on_device).loss.backward()
                    torch.accelerator.synchronize()
                    taken = time.perf_counter() - start
                model.zero_grad()
        finally:
            detach_l2l(model)
        gpu_rows.append(self.rows, "profile", seconds=taken, **summary_of(found))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "profile.json")
            found.export_chrome_trace(str(file))
            throughput.add_to_zip(self.folder / "traces.zip", file, "profile_two_layers.json")
        return "ended"

    def forget(self) -> None:
        """Nothing of a part is left to the next one: no memory, and no refusal to page-lock some."""
        gc.unfreeze()  # tests freeze what there is
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # of a test that failed
            vars(sys).pop(name, None)
        throughput.forget()
        stream.forget_refusal(execution_device(None))
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which else keeps what was freed
        if trim is not None:
            trim(0)


def summary_of(found: Any) -> dict[str, Any]:
    """Of a profile: the number of kernels, the share of the time in which one of them ran, and which took longest."""
    kernels = [
        event
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        and not getattr(event, "is_user_annotation", False)
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    seconds: dict[str, float] = {}
    for event in kernels:
        seconds[event.name] = seconds.get(event.name, 0.0) + 1e-6 * (event.time_range.end - event.time_range.start)
    longest = sorted(seconds.items(), key=lambda each: -each[1])[:8]
    return {
        "kernels": len(kernels),
        "busy_share": busy / (until - spans[0][0]) if spans else None,
        "longest": [{"name": name[:100], "seconds": taken} for name, taken in longest],
    }


def main() -> None:
    """Answer with "ready", and then for each part with how it ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not be taken for an answer
    if options.tiny:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator("64GiB")
    parts = Parts(options.folder, options.tiny)
    print(f"{gpu.ANSWER}ready", file=answers, flush=True)
    for line in sys.stdin:
        name, left_s = line.split()
        try:
            how = parts.run(name, float(left_s))
        except (*throughput.FAILURES, MemoryError) as error:  # the other parts are still of use
            traceback.print_exc()
            how = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        try:
            parts.forget()
        except RuntimeError:  # the device has failed, and would refuse everything else in this process
            traceback.print_exc()
            os._exit(1)
        print(f"{gpu.ANSWER}{how}", file=answers, flush=True)


if __name__ == "__main__":
    main()
