"""The virtual clock: what a program would take, by hand; units are such that everything takes whole seconds."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from hf_l2l.testing import Costs, VirtualClock, virtual_clock
from hf_l2l.testing.sim_race import ORDER

UNIT = 1024
COSTS = {"link_bytes_per_s": UNIT, "flop_per_s": UNIT, "host_bytes_per_s": UNIT}
running = partial(virtual_clock, Costs(**COSTS))


@pytest.fixture(autouse=True)
def _everything_done() -> Iterator[None]:
    torch.sim.synchronize()
    yield
    torch.sim.synchronize()
    kept.clear()


kept: list[torch.Tensor] = []
"""What is on the device stays until all copies have landed."""


def on_device(*shape: int) -> torch.Tensor:
    """A tensor that every stream may use."""
    x = torch.zeros(shape, device="sim")
    torch.sim.synchronize()
    kept.append(x)
    return x


def host_bytes(seconds: int = 1) -> torch.Tensor:
    """A page-locked host tensor that travels for `seconds`."""
    return torch.zeros(seconds * UNIT // 4).pin_memory()


def kernel_of(seconds: int = 1) -> Callable[[], torch.Tensor]:
    """A matrix product that takes `seconds`, with operands of its own."""
    return partial(torch.mm, on_device(8, 8), on_device(8, 8 * seconds))


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def spans(clock: VirtualClock, lane: str) -> list[tuple[float, float]]:
    return [(t.start, t.end) for t in clock.tasks if t.lane == lane]


A, B, C = (2, 3), (3, 5), (2, 5)
BATCH_A, BATCH_B, BATCH_C = (7, *A), (7, *B), (7, *C)
QUERY = (2, 3, 4, 8)  # batch, heads, positions, width
PRODUCT, SCORES = 2 * 2 * 3 * 5, 2 * (2 * 3) * 4 * 4 * 8
CASES: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], int]] = {
    "mm": (torch.mm, [A, B], PRODUCT),
    "mm, out": (lambda a, b, out: torch.mm(a, b, out=out), [A, B, C], PRODUCT),
    "addmm": (torch.addmm, [C, A, B], PRODUCT),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), [BATCH_C, BATCH_A, BATCH_B], 7 * PRODUCT),
    "matmul": (torch.matmul, [BATCH_A, B], 7 * PRODUCT),
    "linear": (nn.functional.linear, [(4, 3), (5, 3), (5,)], 2 * 4 * 3 * 5),
    "convolution": (nn.functional.conv1d, [(2, 3, 10), (4, 3, 5)], 2 * 2 * 3 * 4 * 5 * 6),
    "fused attention": (nn.functional.scaled_dot_product_attention, [QUERY] * 3, 2 * SCORES),
    "add": (torch.add, [C, C], 0),
}


def test_kernels_and_backwards_cost_their_flops():
    """A backward, on the thread of autograd: two forwards, and one in a first layer, whose input needs no gradient."""
    for case, (function, shapes, flops) in CASES.items():
        tensors = [on_device(*shape) for shape in shapes]
        with running() as clock:
            function(*tensors)
            assert clock.now == 0, "launching takes nothing"
        assert clock.end * UNIT == flops, case
        assert len(clock.tasks) == (flops > 0), "what takes no time is no task"
    layers, rows, width = 4, 3, 8
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("sim")
    x = on_device(rows, width)
    with running() as clock:
        model(x).sum().backward()
    assert clock.end * UNIT == (3 * layers - 1) * 2 * rows * width * width


def test_streams_share_a_direction_and_directions_and_kernels_share_nothing():
    side, other, default = torch.sim.Stream(), torch.sim.Stream(), torch.sim.default_stream()
    ups = [(on_device(n * UNIT // 4), host_bytes(n)) for n in (3, 2)]
    downs, kernel = [(host, device) for device, host in ups], kernel_of(3)
    for first, second, spans_of in (
        (partial(copy, *ups[0]), partial(copy, *ups[1]), {"upload": [(0, 3), (3, 5)]}),
        (partial(copy, *downs[0]), partial(copy, *downs[1]), {"download": [(0, 3), (3, 5)]}),
        (partial(copy, *ups[0]), partial(copy, *downs[1]), {"upload": [(0, 3)], "download": [(0, 2)]}),
        (kernel, partial(copy, *ups[1]), {"compute": [(0, 3)], "upload": [(0, 2)]}),
    ):
        with running() as clock:
            for stream, work in ((side, first), (other, second)):
                with torch.sim.stream(stream):
                    work()
        assert {lane: spans(clock, lane) for lane in spans_of} == spans_of
        torch.sim.synchronize()
    with running() as clock, torch.sim.stream(default):
        kernel()
        copy(*ups[1])
    assert spans(clock, "upload") == [(3, 5)], "a stream does one after the other"


def test_a_copy_that_waits_for_long_holds_up_no_other():
    early, late = torch.sim.Stream(name="issued first"), torch.sim.Stream(name="issued later")
    kernel, pairs = kernel_of(10), [(on_device(UNIT), host_bytes(4)) for _ in range(4)]
    with running() as clock:
        kernel()
        early.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(early):
            copy(*pairs[0])
        assert clock.end == 14, "it is placed already, and others go into the gap before it"
        with torch.sim.stream(late):
            for pair in pairs[1:]:
                copy(*pair)
    # Two fit before the first one issued is ready. The next is ready before that one, and goes before it.
    order = [(late.name, 0, 4), (late.name, 4, 8), (late.name, 8, 12), (early.name, 12, 16)]
    assert [(t.stream, t.start, t.end) for t in clock.tasks if t.lane == "upload"] == order


def test_a_copy_that_is_blocking_or_of_pageable_memory_holds_up_the_host():
    hosts = {"pageable": torch.zeros(UNIT // 2), "pinned": host_bytes(2), "registered": torch.zeros(UNIT // 2)}
    registered = hosts["registered"]
    assert torch.sim.cudart().cudaHostRegister(registered.data_ptr(), registered.nbytes, 0) == 0
    device, kernel = on_device(2 * UNIT // 4), kernel_of(1)
    for kind, blocking, side, up in itertools.product(hosts, *[(True, False)] * 3):
        target, source = (device, hosts[kind]) if up else (hosts[kind], device)
        holds_up = blocking or kind == "pageable"
        with running() as clock:
            with torch.sim.stream(torch.sim.Stream() if side else None):
                target.copy_(source, non_blocking=not blocking)
            assert clock.now == (2 if holds_up else 0), (kind, blocking, side, up)
            kernel()
        assert clock.end == (3 if holds_up or not side else 2), (kind, blocking, side, up)
        torch.sim.synchronize()
    assert torch.sim.cudart().cudaHostUnregister(registered.data_ptr()) == 0
    with running() as clock:
        arriving = device.to("cpu", non_blocking=True)
        assert clock.now == 0 and clock.end == 2
        torch.sim.synchronize()
    assert arriving.shape == device.shape
    wide = on_device(UNIT // 2).double()
    with running() as clock:
        device.clone()
        assert clock.tasks == [] and clock.end == 0, "copies on the device cost nothing"
        copy(wide, host_bytes(2))
    assert clock.busy("upload") == 4, "what travels has the type of the target"


WAITS: dict[str, tuple[Callable[[torch.Stream, torch.sim.Event, torch.Tensor], object], int]] = {
    "nothing": (lambda side, done, x: None, 0),
    "event.synchronize": (lambda side, done, x: done.synchronize(), 3),
    "event.query": (lambda side, done, x: done.query(), 3),
    "stream.synchronize": (lambda side, done, x: side.synchronize(), 4),
    "device": (lambda side, done, x: torch.sim.synchronize(), 8),
    "item": (lambda side, done, x: x.item(), 8),
    "blocking download": (lambda side, done, x: x.cpu(), 9),
    "blocking upload": (lambda side, done, x: x.copy_(torch.zeros(UNIT // 4)[0]), 9),
}


def test_the_host_waits_for_what_it_asks_for():
    """A side stream is busy for 3 and 1 seconds, with an event between; the default stream for 8."""
    kernels, x = [kernel_of(3), kernel_of(1), kernel_of(8), kernel_of(1)], on_device()
    costs = Costs(link_bytes_per_s=4, flop_per_s=UNIT, host_bytes_per_s=UNIT)  # a number travels for a second
    for wait, (asked, expected) in WAITS.items():
        side, fresh = torch.sim.Stream(), torch.sim.Stream(name="fresh")
        with virtual_clock(costs) as clock:
            with torch.sim.stream(side):
                kernels[0]()
                done = side.record_event()
                kernels[1]()
            kernels[2]()
            asked(side, done, x)
            assert clock.now == expected, wait
            with torch.sim.stream(fresh):
                kernels[3]()
        starts = [t.start for t in clock.tasks if t.stream == "fresh"]
        assert starts == [expected], "what is issued starts when the host has issued it"
        torch.sim.synchronize()


def test_an_event_stands_for_what_was_before_it_was_recorded_last():
    before = torch.sim.current_stream().record_event()
    for again, start in ((False, 2), (True, 6)):
        side, first, second, after = torch.sim.Stream(), kernel_of(2), kernel_of(4), kernel_of(1)
        with running() as clock:
            first()
            event = torch.sim.current_stream().record_event()
            second()
            if again:
                event.record()
            side.wait_event(event)
            side.wait_event(before)  # of another clock, or of none: it is done
            with torch.sim.stream(side):
                after()
        before = event
        assert (start, start + 1) in spans(clock, "compute") and clock.busy("compute") == (7 if again else 6)


def test_a_step_costs_what_it_reads_and_writes():
    """The gradient, and the parameter and moments twice."""

    def with_gradient(size: int, device: str = "cpu") -> nn.Parameter:
        p = nn.Parameter(torch.zeros(size, device=device))
        p.grad = torch.ones_like(p)
        return p

    makes = (torch.optim.AdamW, partial(torch.optim.Adam, amsgrad=True), partial(torch.optim.SGD, momentum=0.9))
    for make, floats in zip(makes, (7, 9, 5), strict=True):
        optimizer = make([with_gradient(100), with_gradient(28), nn.Parameter(torch.zeros(999))])
        with running() as clock:
            optimizer.step()
            assert clock.now * UNIT == 4 * floats * 128
            optimizer.step()
        optimizer.step()  # the clock has stopped
        name = f"{type(optimizer).__name__}.step"
        assert [(t.lane, t.name, t.stream) for t in clock.tasks] == [("host", name, "host")] * 2
        assert clock.end * UNIT == 2 * 4 * floats * 128
    with running() as clock:
        torch.optim.AdamW([with_gradient(64, device="sim")]).step()
        assert spans(clock, "host") == []


@pytest.mark.parametrize("worker_is_first", [True, False])
def test_a_thread_with_its_own_time_works_beside_the_others(worker_is_first):
    kernel, finished = kernel_of(4), []
    with running() as clock:
        clock.host_work("before", seconds=1)
        submitted = clock.moment()

        def work() -> None:
            with clock.own_time("worker", since=submitted):
                clock.host_work("update", seconds=2)
                finished.append(clock.moment())

        def main() -> None:
            kernel()
            clock.host_work("main", seconds=1)

        worker = threading.Thread(target=work)
        for step in (worker.start, worker.join, main) if worker_is_first else (main, worker.start, worker.join):
            step()
        assert clock.now == 2
        clock.wait_for(finished[0])
        assert clock.now == finished[0].seconds == 4
    # The host's memory is shared, and "host" goes before "worker" when both are ready.
    assert [(t.name, t.stream, t.start, t.end) for t in clock.tasks] == [
        ("before", "host", 0, 1),
        ("main", "host", 1, 2),
        ("aten::mm", "the default stream", 1, 5),
        ("update", "worker", 2, 4),
    ]


def test_own_time_ends_with_its_block_a_moment_with_its_clock_and_work_that_is_none_is_refused():
    with running() as clock:
        for amount in ({}, {"seconds": 1, "num_bytes": 1}, {"num_bytes": math.inf}):
            with pytest.raises(ValueError, match="host work"):
                clock.host_work("work", **amount)
        assert clock.tasks == []
        with clock.own_time("beside"):
            clock.host_work("work", seconds=2)
            assert clock.now == 2
        assert (clock.now, clock.end) == (0, 2)
        with pytest.raises(KeyError), clock.own_time("beside"):
            raise KeyError
        clock.host_work("work", seconds=1)
        assert clock.now == 3, "the host's memory is shared"
        moment = clock.moment()
    with running() as clock:
        clock.wait_for(moment)
        assert clock.now == 0, "it has passed"
        with pytest.raises(ValueError, match="of this clock"), clock.own_time("beside", since=moment):
            pass
    with pytest.raises(ValueError, match=r"flop_per_s must be positive"):
        Costs(**{**COSTS, "flop_per_s": math.nan})


def test_busy_counts_within_an_interval_and_once_and_a_clock_that_has_stopped_is_not_added_to(monkeypatch):
    monkeypatch.setattr(ORDER, "active", False)
    kernels = kernel_of(2), kernel_of(3)
    with running() as clock:
        assert ORDER.active, "the order of operations can be looked at"
        with pytest.raises(RuntimeError, match="only one virtual clock"), running():
            pass
        for kernel in kernels:
            with torch.sim.stream(torch.sim.Stream()):
                kernel()
        clock.host_work("work", seconds=5)
        kernels[0]()
    with running() as other:
        assert other.now == 0 and other.tasks == []
    kernels[0]()
    torch.sim.synchronize()
    assert (clock.now, clock.end) == (5, 7)
    assert clock.busy("compute") == 5  # 0 to 3 and 5 to 7
    assert clock.busy("compute", 1, 6) == 3 and clock.busy("compute", 3.5, 4.5) == 0
    assert clock.busy("host", end=4) == 4 and clock.busy("upload") == 0
    with pytest.raises(ValueError, match="compute, launch, disk, download, host, peer, upload"):
        clock.busy("link")
    for add in (
        lambda: clock.host_work("work", seconds=1),
        lambda: clock.wait_for(clock.moment()),
        lambda: clock.own_time("beside").__enter__(),
    ):
        with pytest.raises(RuntimeError, match="has stopped"):
            add()
