"""What this machine reaches, before anything is measured on it: page-locked copies, host memory, the host's AdamW,
matrix products, and which kernels attention may use.

    python benchmarks/gpu_probe.py [--rows FILE.jsonl] [--seconds 90] [--tiny]

It page-locks 1 GiB with the package's own `Pages`. If the device refuses that, the program ends with status 3 and a
row that has the code of the refusal: everything measured after it would be about pageable memory. --tiny runs on the
simulated accelerator, whose rates mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import environment as where
from benchmarks import gpu_rows
from hf_l2l.devices import execution_device
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages

REFUSED = 3
"""The exit status if the device does not page-lock memory."""
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


class Probe:
    """One device, and the memory that all rates are measured with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = execution_device(None)
        self.module: Any = stream.device_module(self.device)
        self.num_bytes = 2**20 if options.tiny else 2**30
        self.turns = 2 if options.tiny else 5
        self.pages = Pages(self.num_bytes)
        self.locked = torch.frombuffer(self.pages, dtype=torch.uint8)

    def write(self, name: str, **values: Any) -> None:
        """One row, also on standard error."""
        gpu_rows.append(self.options.rows, "row", name=name, **values)
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}", file=sys.stderr, flush=True)

    def seconds(self, work: Callable[[], Any]) -> float:
        """The median time of `work`, after one turn that is not counted; the device is waited for."""
        found = []
        for _ in range(self.turns + 1):
            self.module.synchronize()
            start = time.perf_counter()
            work()
            self.module.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    # ---- page-locked memory

    def registration(self) -> bool:
        """Page-lock the memory; False if the device refuses."""
        self.locked.fill_(1)  # the pages are there: what is timed is registering
        start = time.perf_counter()
        accepted = self.pages.lock(self.device)
        taken = time.perf_counter() - start
        code = 0 if accepted else self.code_of_registration()
        self.write("page-locking", bytes=self.num_bytes, code=code, seconds=taken, is_pinned=self.locked.is_pinned())
        return accepted

    def code_of_registration(self) -> int:
        """What the driver answers to a registration of this memory. The answer is not left to the next kernel."""
        code = int(self.module.cudart().cudaHostRegister(self.locked.data_ptr(), self.num_bytes, 0))
        if code:
            stream.page_lock(self.locked.data_ptr(), self.num_bytes, self.device)
        return code

    def second_registration(self) -> None:
        """Of memory that is registered: it must be refused, and the next kernel must not report that."""
        code = self.code_of_registration()
        try:
            next_kernel = "ran" if float(torch.ones(3, device=self.device).sum()) == 3.0 else "computed wrong"
        except RuntimeError as error:
            next_kernel = f"failed: {error}"
        self.write("second registration of the same address", code=code, next_kernel=next_kernel)

    # ---- rates

    def copies(self) -> None:
        """Bytes per second between host and device, alone and in both directions at once."""
        there = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
        pageable = torch.zeros(self.num_bytes, dtype=torch.uint8)
        half = self.num_bytes // 2
        lanes = [self.module.Stream(device=self.device) for _ in range(2)]

        def both() -> None:
            with self.module.stream(lanes[0]):
                there[:half].copy_(self.locked[:half], non_blocking=True)
            with self.module.stream(lanes[1]):
                self.locked[half:].copy_(there[half:], non_blocking=True)

        for name, work in (
            ("page-locked to the device", lambda: there.copy_(self.locked, non_blocking=True)),
            ("device to page-locked", lambda: self.locked.copy_(there, non_blocking=True)),
            ("page-locked, half of the bytes each way at once", both),
            ("pageable to the device", lambda: there.copy_(pageable)),
            ("device to pageable", lambda: pageable.copy_(there)),
        ):
            self.write(f"copy, {name}", bytes_per_s=self.num_bytes / self.seconds(work))

    def dram(self) -> None:
        """Bytes per second that the host reads and writes while it copies its own memory, by threads."""
        a, b = torch.zeros(self.num_bytes, dtype=torch.uint8), torch.zeros(self.num_bytes, dtype=torch.uint8)
        for threads in thread_counts():
            with threads_set(threads):
                rate = 2 * self.num_bytes / self.seconds(lambda: b.copy_(a))
            self.write("copy within the host, read and written", threads=threads, bytes_per_s=rate)

    def adamw(self) -> None:
        """Parameters per second of torch's fused AdamW on the host, by threads."""
        count = 2**12 if self.options.tiny else 2**26
        p = torch.zeros(count).requires_grad_()
        p.grad = torch.ones(count)
        optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
        for threads in thread_counts():
            with threads_set(threads):
                self.write("AdamW", threads=threads, parameters_per_s=count / self.seconds(optimizer.step))

    def matrix_product(self) -> None:
        """FLOP per second of one large product of bf16 matrices of random numbers."""
        size = 64 if self.options.tiny else 8192
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        taken = self.seconds(lambda: [torch.mm(a, b, out=out) for _ in range(10)])
        self.write("bf16 matrix product", size=size, flop_per_s=10 * 2 * size**3 / taken)

    def attention(self) -> None:
        """For each dtype, width of a head and dropout: the kernels that run, and which one torch chooses."""
        widths = (8,) if self.options.tiny else (64, 128, 192, 256)
        for dtype in (torch.bfloat16, torch.float32):
            for width in widths:
                for dropout in (0.0, 0.1):
                    found = {name: self.runs(name, dtype, width, dropout) for name in BACKENDS}
                    self.write(
                        "attention",
                        dtype=str(dtype).removeprefix("torch."),
                        head_dim=width,
                        dropout=dropout,
                        runs=[name for name, runs in found.items() if runs],
                        chosen_without_grad=self.chosen(dtype, width, dropout, requires_grad=False),
                        chosen_with_grad=self.chosen(dtype, width, dropout, requires_grad=True),
                    )

    def inputs(self, dtype: torch.dtype, width: int, requires_grad: bool) -> list[torch.Tensor]:
        """Query, key and value (2, 4, 128, width) on the device."""
        made = (torch.randn(2, 4, 128, width, device=self.device).to(dtype) for _ in range(3))
        return [tensor.requires_grad_(requires_grad) for tensor in made]

    def runs(self, backend: str, dtype: torch.dtype, width: int, dropout: float) -> bool:
        """Whether forward and backward run on this kernel."""
        try:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                out = scaled_dot_product_attention(*self.inputs(dtype, width, True), dropout_p=dropout)
                out.float().sum().backward()
            self.module.synchronize()
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def chosen(self, dtype: torch.dtype, width: int, dropout: float, requires_grad: bool) -> str:
        """What torch chooses by default. If the answers differ, forward and recompute draw different masks."""
        try:
            with torch.set_grad_enabled(requires_grad):
                number = torch._fused_sdp_choice(*self.inputs(dtype, width, requires_grad), dropout_p=dropout)
        except (RuntimeError, NotImplementedError):
            return "-"
        return str(SDPBackend(number).name) if number >= 0 else "-"


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the cores, and all cores but one."""
    cores = os.cpu_count() or 1
    return sorted({2**n for n in range(cores.bit_length()) if 2**n <= cores} | {cores, max(cores - 1, 1)})


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Inside, operations on the host have `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="file to which a line of JSON is added per row")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which nothing new is begun")
    parser.add_argument("--tiny", action="store_true", help="few bytes, on the simulated accelerator")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, and write; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options, start = parsed(arguments), time.monotonic()
    if options.tiny:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator()
        where.LINK_BYTES = 2**20
    if not stream.can_page_lock(execution_device(None)):
        print("gpu_probe.py needs a device that page-locks host memory, as CUDA does", file=sys.stderr)
        return 2
    probe = Probe(options)
    # Before the environment, which page-locks memory by torch's own allocator.
    if not probe.registration():
        gpu_rows.append(options.rows, "environment", **where.environment("gpu_probe.py", arguments))
        return REFUSED
    gpu_rows.append(options.rows, "environment", **where.environment("gpu_probe.py", arguments))
    warnings.simplefilter("ignore")  # torch gives its reasons for each kernel that it does not take
    works = (probe.second_registration, probe.copies, probe.adamw, probe.dram, probe.attention, probe.matrix_product)
    for work in works:
        if time.monotonic() - start > options.seconds:
            probe.write(work.__name__, failure="no time was left")
            continue
        try:
            work()
        except RuntimeError as error:  # of this device: the other rates are still of use
            probe.write(work.__name__, failure=str(error).splitlines()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
