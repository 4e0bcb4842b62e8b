"""Processes that play ranks: started once, then given one function after the other to run in all of them.

`RankPool(3).run(function, *args)` calls `function(*args)` in three processes, each with a process group of three, and
returns what they return. A function is named by module and name, and its arguments and results are pickled: they are
numbers, text and digests, no tensors. With `sim=True` the processes have the simulated accelerator; `devices_of` gives
each rank its own device there.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

_CONTEXT = multiprocessing.get_context("forkserver")


def forked_context() -> Any:
    """All are forked from one process, which has imported what they need, and finds modules where a new one does."""
    _CONTEXT.set_forkserver_preload(["rank_imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, sys.path)))
        forkserver.ensure_running()
    return _CONTEXT


class RankDiedError(AssertionError):
    """A rank has ended without a result."""


def _serve(rank: int, size: int, sim: bool, to_parent: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"] = "", "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends these
    torch.set_num_threads(1)
    if sim:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator(devices=min(8, 2 * size))  # a second one for each, if asked for
        torch.sim.set_device(rank)
    while (job := to_parent.recv()) is not None:
        file, function, args = job
        try:
            with _process_group(file, rank, size):
                torch.manual_seed(0)
                answer: tuple[bool, Any] = True, function(*args)
        except BaseException:  # noqa: BLE001  # all of it is for the test
            answer = False, traceback.format_exc()
        to_parent.send(answer)


@contextmanager
def _process_group(file: str, rank: int, size: int) -> Iterator[None]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if size == 1:
        yield
        return
    os.environ.update({name: str(value) for name, value in names.items()})
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # a rank may have failed
            distributed.destroy_process_group()
        for name in names:
            os.environ.pop(name, None)


class RankPool:
    """`size` processes, each of which is a rank."""

    def __init__(self, size: int, *, sim: bool = False, within_s: float = 120.0) -> None:
        """A function has to end `within_s` seconds."""
        self.size, self.sim, self.within_s = size, sim, within_s
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        # Where the ranks meet: one file per call, for a file of another call would hold that one's addresses.
        self._folder = tempfile.mkdtemp(prefix="l2l_ranks_")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._calls = 0

    def start(self) -> None:
        """Start the processes, if they do not run."""
        if self.processes and all(process.is_alive() for process in self.processes):
            return
        self.close()
        context = forked_context()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self.sim, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in all ranks; `results` waits for them."""
        self.start()
        self._calls += 1
        file = Path(self._folder) / f"store_{self._calls}"
        for pipe in self._pipes:
            pipe.send((str(file), function, args))

    def results(self, but: Collection[int] = ()) -> list[Any]:
        """Whether each rank has returned, and what, or its error; None for those that are not asked (`but`)."""
        found: list[Any] = [None] * self.size
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in but}
        while open_pipes:
            ready = wait(list(open_pipes), self.within_s)
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(open_pipes.values())} have not ended in {self.within_s} seconds")
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    found[rank] = False, f"rank {rank} has ended"
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` in all ranks, and return what each returns. RankDiedError if one has raised."""
        self.begin(function, *args)
        found = self.results()
        if not all(is_right for is_right, _ in found):
            self.close()
            raise RankDiedError("\n".join(f"rank {n}: {text}" for n, (right, text) in enumerate(found) if not right))
        return [result for _, result in found]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self._pipes = [], []


def digest(*tensors: torch.Tensor) -> str:
    """The bits of tensors, as text."""
    found = hashlib.sha256()
    for tensor in tensors:
        host = tensor.detach().to("cpu").contiguous()
        found.update(f"{host.dtype}{list(host.shape)}".encode())
        found.update(host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b"")
    return found.hexdigest()
