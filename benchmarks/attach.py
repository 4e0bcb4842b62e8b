"""Seconds that attaching takes for each GB of weights: masters move to page-locked memory, and gradients get theirs.

The device is the CPU behind the interface of a device with streams (`host_overhead.py`). Page-locking is pretended: as
a driver would, it makes the pages present that are not. "Before" asks for one block after the other on the calling
thread; "threads" is what `attach_l2l` does. Both attach the same model in turn, so that a machine that slows down
slows both.

    python benchmarks/attach.py [--rounds 7] [--layers 18] [--hidden 1024]

A table for people, then one JSON document as the last line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps import host_memory
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import Pages, pages_ahead
from hf_l2l.runtime.tensors import tensor_bytes

if not __package__:  # run as a script: the folder above is not where Python looks for modules
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.environment import description, environment
from benchmarks.host_overhead import cpu_with_streams

POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux: makes pages present, as the driver does when it locks them."""


def locked(address: int, num_bytes: int, device: torch.device) -> bool:
    """Pretends to page-lock memory; Python's other threads run meanwhile, as they do in torch's call of the driver."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE), which Linux has since 5.14")
    return True


def one_by_one(sizes: Iterable[int], device: torch.device) -> Iterator[Pages]:
    """What `pages_ahead` does, on the calling thread."""
    for size in sizes:
        pages = Pages(size)
        pages.lock(device)
        yield pages


WAYS = {"before": one_by_one, "threads": pages_ahead}


def bert(layers: int, hidden: int) -> nn.Module:
    """A model whose weights are in memory of their own."""
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1)
    return model


def measured(model: nn.Module, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Way -> what was done -> seconds per GB, one for each round: of the clock, and of the processor."""
    size = tensor_bytes(model.parameters()) / 1e9
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for turn in range(rounds + 1):  # the first one is not counted
        for way in list(WAYS) if turn % 2 else reversed(WAYS):
            host_memory.pages_ahead = WAYS[way]
            marks = [(time.perf_counter(), time.process_time())]
            eps = attach_l2l(model, L2LConfig(device="cpu"))
            marks.append((time.perf_counter(), time.process_time()))
            eps.memory.take_gradients()
            marks.append((time.perf_counter(), time.process_time()))
            detach_l2l(model)
            for what, start, end in zip(("attach_l2l", "gradients"), marks, marks[1:], strict=False):
                for number, clock in enumerate(("clock", "processor")):
                    if turn:
                        found[way].setdefault(f"{what}, {clock}", []).append((end[number] - start[number]) / size)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Medians, and the least in parentheses."""
    lines = [("seconds per GB of weights", *found)]
    for row in found["before"]:
        cells = [found[way][row] for way in found]
        lines.append((row, *(f"{statistics.median(cell):.3f} ({min(cell):.3f})" for cell in cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64")
    options = parser.parse_args(arguments)
    where = environment(
        "attach.py", sys.argv[1:] if arguments is None else arguments
    )  # it asks what devices there are
    cpu_with_streams()
    stream.page_lock = locked
    model = bert(options.layers, options.hidden)
    found = measured(model, options.rounds)
    print(table(found))
    print(f"{tensor_bytes(model.parameters()) / 1e9:.3f} GB; medians of {options.rounds} rounds (the least)")
    print(description(where))
    print(json.dumps({"seconds_per_gb": found, "environment": where}))


if __name__ == "__main__":
    main()
