"""What this machine reaches, before anything is measured on it, within about 20 seconds.

The rates are those of the package's own probe (`hf_l2l.probe`), kept in a file so that the planner and the estimates
take them from there. Beside them: whether memory is page-locked at all, and what a second registration does; AdamW on
the host by threads; matrix products and attention, with its kernel, per width of the models that are measured.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.throughput import chosen_attention
from benchmarks.throughput_models import LLAMA, UBATCH_TOKENS
from hf_l2l.devices import execution_device
from hf_l2l.probe.figures import HardwareFigures
from hf_l2l.probe.rates import Sizes, probe
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages

WIDTHS = ((2048, 32), (4096, 32))
"""Hidden size and heads of Llama-3.2-1B and Llama-3.1-8B."""
ROW = 1024
"""Tokens that attend to each other."""
TURNS = 20
"""Of a small operation in one measured time, so that its launch and the synchronization count little."""
THREADS = (1, 4, 8, 16)
"""For AdamW on the host, as far as there are cores."""
TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=32, seconds=0.0)


class Probe:
    """One device; `write` gets the name of a row and its values."""

    def __init__(self, tiny: bool, write: Callable[..., None]) -> None:
        self.tiny, self.write = tiny, write
        self.device = execution_device(None)
        self.module: Any = stream.device_module(self.device)

    def registration(self) -> bool:
        """Page-lock memory as the package does, and once more; False if the device refuses the first."""
        num_bytes = 2**20 if self.tiny else 2**30
        pages = Pages(num_bytes)
        locked = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)  # the pages are there: registering is timed
        start = time.perf_counter()
        accepted = pages.lock(self.device)
        taken = time.perf_counter() - start
        second = self._code(locked)  # the code of the refusal, or that of the second registration
        self.write("page-locking", bytes=num_bytes, seconds=taken, code=0 if accepted else second)
        if accepted:
            # It must be refused, and the next kernel must not report that.
            try:
                ran = "ran" if float(torch.ones(3, device=self.device).sum()) == 3.0 else "computed wrong"
            except RuntimeError as error:
                ran = f"failed: {error}"
            self.write("second registration of the same address", code=second, next_kernel=ran)
        pages.unlock()
        stream.forget_refusal(self.device)
        return accepted

    def _code(self, memory: torch.Tensor) -> int:
        """What the driver answers to a registration of this memory. The answer is not left to the next kernel."""
        code = int(self.module.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            stream.page_lock(memory.data_ptr(), memory.numel(), self.device)
        return code

    def rates(self, file: Path) -> HardwareFigures:
        """Link, host memory, AdamW and matrix products, by the package's own probe; `file` gets them as JSON."""
        figures = probe(self.device, TINY if self.tiny else Sizes(copied_bytes=2**30, parameters=2**26))
        file.write_text(figures.to_json(), encoding="utf-8")
        for name in ("link_up", "link_down", "link_up_both", "link_down_both", "dram"):
            self.write(f"{name}, bytes/s", value=getattr(figures, name))
        for threads, rate in figures.adamw_by_threads.items():
            self.write("AdamW on the host, parameters/s", threads=threads, value=rate)
        self.write("AdamW on the device, parameters/s", value=figures.device_adamw)
        for dtype, rate in figures.flops.items():
            self.write("large matrix product, FLOP/s", dtype=dtype, value=rate)
        return figures

    def adamw(self, known: HardwareFigures) -> None:
        """AdamW on the host with the numbers of threads that are not known."""
        count = 2**12 if self.tiny else 2**26
        p = torch.zeros(count).requires_grad_()
        p.grad = torch.ones(count)
        optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
        for threads in THREADS:
            if threads not in known.adamw_by_threads and threads <= (os.cpu_count() or 1):
                with threads_set(threads):
                    rate = count / self.seconds(optimizer.step)
                self.write("AdamW on the host, parameters/s", threads=threads, value=rate)

    def widths(self) -> None:
        """A product of a micro-batch and a weight of each width, and the forward of causal attention."""
        for hidden, heads in WIDTHS:
            tokens, row, width = (64, 16, 256) if self.tiny else (UBATCH_TOKENS, ROW, hidden)
            a, b = (torch.randn(n, width, device=self.device).bfloat16() for n in (tokens, width))
            taken = self.seconds(lambda a=a, b=b: torch.mm(a, b), TURNS)
            self.write(
                f"bf16 product of {UBATCH_TOKENS:,} tokens, FLOP/s", width=hidden, value=2 * tokens * width**2 / taken
            )
            head = width // heads
            query, key, value = (
                torch.randn(tokens // row, count, row, head, device=self.device).bfloat16()
                for count in (heads, *2 * (LLAMA["num_key_value_heads"],))
            )
            given = {"query": query, "key": key, "value": value, "is_causal": True, "enable_gqa": True}
            taken = self.seconds(lambda given=given: scaled_dot_product_attention(**given), TURNS)
            kernel = chosen_attention(self.device, heads, head, True)
            # Half of the scores of a causal row are needed.
            flop = 2 * tokens * row * width
            self.write("attention, FLOP/s", head_dim=head, kernel=kernel, value=flop / taken)

    def seconds(self, work: Callable[[], Any], turns: int = 1) -> float:
        """The median time of `work`, of so many turns each, after some that are not counted; the device is waited
        for."""
        found = []
        for _ in range(4):
            self.module.synchronize()
            start = time.perf_counter()
            for _ in range(turns):
                work()
            self.module.synchronize()
            found.append((time.perf_counter() - start) / turns)
        return statistics.median(found[1:])


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Inside, operations on the host have `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(tiny: bool, figures_file: Path, write: Callable[..., None]) -> bool:
    """Probe; False if the device does not page-lock memory."""
    made = Probe(tiny, write)
    if not stream.can_page_lock(made.device) or not made.registration():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reasons for each kernel that it does not take
        made.adamw(made.rates(figures_file))
        made.widths()
    return True
