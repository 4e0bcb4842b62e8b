"""Measures what the machine reaches. Every rate is the median of a few turns after one that is not counted."""

from __future__ import annotations

import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hf_l2l.devices import execution_device
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages
from hf_l2l.runtime.wait_reasons import PROBE_COPIED, PROBE_FILLED
from hf_l2l.runtime.worker import usable_cores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """How much is measured with. The defaults take a few seconds in all, and exceed the caches of a processor."""

    copied_bytes: int = 2**28
    """Of one copy; at most a 16th of the memory of the device."""
    parameters: int = 2**24
    """That AdamW updates."""
    most_rows: int = 8192
    """Rows and columns of the largest square matrices; slower devices multiply smaller ones."""
    seconds: float = 0.25
    """After which a rate gets no further turn, once it has had three."""


def probe(device: torch.device | str | None = None, sizes: Sizes | None = None) -> HardwareFigures:
    """Measure what this machine reaches; it should do nothing else meanwhile.

    Args:
        device: the execution device; None for the current accelerator, or the CPU if there is none.
        sizes: how much is measured with; None for the defaults.

    Raises:
        ValueError: if this machine has no such device.
    """
    device, sizes = execution_device(device), sizes or Sizes()
    pageable: Mapping[str, float] = {}
    link: Mapping[str, float] = {}
    page_locked = None
    if not stream.shares_host_memory(device):
        num_bytes = min(sizes.copied_bytes, (stream.memory_of(device) or 16 * sizes.copied_bytes) // 16)
        link = pageable = _link_rates(device, num_bytes, None, sizes.seconds)
        pages = Pages(num_bytes)
        page_locked = pages.lock(device)
        if page_locked:
            link = _link_rates(device, num_bytes, pages, sizes.seconds)
        pages.unlock()
    cores = usable_cores()
    figures = HardwareFigures(
        device_name=device_name(device),
        device_memory_bytes=stream.memory_of(device),
        link_up=link.get("up"),
        link_down=link.get("down"),
        link_up_both=link.get("up_both"),
        link_down_both=link.get("down_both"),
        dram=_dram(sizes, cores),
        adamw_by_threads={n: _adamw(sizes, n) for n in sorted({1, max(1, cores // 2), cores})},
        device_adamw=None if stream.shares_host_memory(device) else _device_adamw(device, sizes),
        flops={name: rate for name, dtype in DTYPES.items() if (rate := flops_of(device, dtype, sizes)) is not None},
        page_locked=page_locked,
        pageable=pageable,
    )
    stream.empty_cache(device)  # training wants blocks of other sizes
    return figures


def device_name(device: torch.device) -> str:
    """What the device calls itself; of the CPU, the name of the processor."""
    if device == stream.HOST:
        return processor_name()
    ask = getattr(stream.device_module(device), "get_device_name", None)
    return str(device) if ask is None else str(ask(device))


def processor_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """What the system calls the processor, in `info` if it has that."""
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def median(turn: Callable[[], float], seconds: float) -> float:
    """The median of what `turn` returns, in 3 to 9 turns after one that is not counted."""
    turn()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or (len(found) < 9 and time.perf_counter() < end):
        found.append(turn())
    return max(statistics.median(found), 1e-9)  # a clock may be too coarse for the least of sizes


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """A turn that returns the seconds that `work` takes."""

    def turn() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return turn


# ---- the link


def _link_rates(device: torch.device, num_bytes: int, pages: Pages | None, seconds: float) -> dict[str, float]:
    """Bytes/s of the link, alone and both ways at once, from and to `pages`, or pageable memory without them."""
    half = num_bytes // 2
    here = torch.zeros(num_bytes, dtype=torch.uint8) if pages is None else _bytes_of(pages, num_bytes)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    up = _Way(device, here[:half], there[:half], "upload")
    down = _Way(device, there[half:], here[half:], "download")
    # The compute stream fills it, and lanes are other streams. The host waits: this is before any time is taken.
    stream.wait(stream.record(device), PROBE_FILLED, host=True)
    rates = {}
    for name, way in (("up", up), ("down", down)):
        rates[name] = half / median(way.copied, seconds)
    with ThreadPoolExecutor(2) as pool:
        for name, ways in (("up_both", (up, down)), ("down_both", (down, up))):
            rates[name] = half / median(partial(_beside, *ways, pool), seconds)
    return rates


def _bytes_of(pages: Pages, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes).fill_(0)


class _Way:
    """Copies in one direction, on a lane of its own."""

    def __init__(self, device: torch.device, source: torch.Tensor, target: torch.Tensor, row: str) -> None:
        self.source, self.target = source, target
        self.lane = stream.Lane(device, row)

    def copied(self) -> float:
        """Copy once; returns the seconds that it took."""
        start = time.perf_counter()
        with self.lane.entered():
            self.target.copy_(self.source, non_blocking=self.lane.is_stream)
        # The host waits, since it measures the time; the memory is used again after that.
        stream.wait(self.lane.record(), PROBE_COPIED, host=True)
        return time.perf_counter() - start


def _beside(way: _Way, other: _Way, pool: ThreadPoolExecutor) -> float:
    """The seconds that a copy takes while another one goes the other way. Each has a thread: copies from and to
    pageable memory keep the host until they are done."""
    begin = threading.Barrier(2)

    def begun(each: _Way) -> float:
        begin.wait()
        return each.copied()

    found = [pool.submit(begun, each) for each in (way, other)]
    return [each.result() for each in found][0]


# ---- the host


def _dram(sizes: Sizes, threads: int) -> float:
    """Bytes/s that are read and written by a copy within host memory."""
    source = torch.zeros(sizes.copied_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with _threads(threads):
        return 2 * sizes.copied_bytes / median(timed(lambda: target.copy_(source)), sizes.seconds)


def _adamw(sizes: Sizes, threads: int) -> float:
    """Parameters/s of torch's fused AdamW."""
    p = torch.zeros(sizes.parameters).requires_grad_()
    p.grad = torch.ones(sizes.parameters)
    optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
    with _threads(threads):
        return sizes.parameters / median(timed(optimizer.step), sizes.seconds)


def _device_adamw(device: torch.device, sizes: Sizes) -> float | None:
    """Parameters/s of torch's AdamW on the device; None if it has not the memory."""
    try:
        p = torch.zeros(sizes.parameters, device=device).requires_grad_()
        p.grad = torch.ones(sizes.parameters, device=device)
        optimizer = torch.optim.AdamW([p], lr=1e-3, foreach=True)

        def step() -> None:
            optimizer.step()
            stream.download(p.detach()[:1])  # returns once the step is done

        return sizes.parameters / median(timed(step), sizes.seconds)
    except torch.OutOfMemoryError:
        return None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Inside, operations on the host have `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- products


def flops_of(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float | None:
    """FLOP/s of products of square matrices, the smallest that take 10 ms, or the largest that it has memory for; None
    if the device has none of `dtype`."""
    rows, measured = min(256, sizes.most_rows), None
    try:
        while True:
            turn = product(device, dtype, rows)
            turn()  # kernels are chosen, and loaded
            measured = turn, rows
            if turn() > 0.01 or 2 * rows > sizes.most_rows:
                break
            rows *= 2
    except torch.OutOfMemoryError:
        pass  # what was measured before stands
    except (RuntimeError, NotImplementedError, TypeError):  # no such product
        return None
    return None if measured is None else 2 * measured[1] ** 3 / median(measured[0], sizes.seconds)


def product(device: torch.device, dtype: torch.dtype, rows: int) -> Callable[[], float]:
    """A turn of one product of two square matrices."""
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, b, out=out)
        stream.download(out[:1, :1])  # returns once the product is there

    return timed(work)
