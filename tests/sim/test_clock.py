"""The virtual clock: what a program would take, by hand; units are such that everything takes whole seconds."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l.testing import Costs, Task, VirtualClock, sim_recorder, sim_tensor, virtual_clock
from hf_l2l.testing.sim_race import ORDER
from hf_l2l.testing.sim_schedule import START, Schedule
from tiers import nightly, times

UNIT = 1024
COSTS_GIVEN = {"link_bytes_per_s": UNIT, "flop_per_s": UNIT, "host_bytes_per_s": UNIT}
COSTS = Costs(**COSTS_GIVEN)


@pytest.fixture(autouse=True)
def _everything_done() -> Iterator[None]:
    torch.sim.synchronize()
    yield
    torch.sim.synchronize()
    kept.clear()


kept: list[torch.Tensor] = []
"""What is on the device stays until all copies have landed."""


def running() -> AbstractContextManager[VirtualClock]:
    return virtual_clock(COSTS)


def on_device(*shape: int) -> torch.Tensor:
    """A tensor that every stream may use."""
    x = torch.zeros(shape, device="sim")
    torch.sim.synchronize()
    kept.append(x)
    return x


def device_bytes(seconds: int = 1) -> torch.Tensor:
    return on_device(seconds * UNIT // 4)


def host_bytes(seconds: int = 1, pinned: bool = True) -> torch.Tensor:
    """A host tensor that travels for `seconds`."""
    x = torch.zeros(seconds * UNIT // 4)
    return x.pin_memory() if pinned else x


class Kernel:
    """A matrix product that takes `seconds`, with operands of its own."""

    def __init__(self, seconds: int = 1) -> None:
        self.one, self.other = on_device(8, 8), on_device(8, 8 * seconds)

    def __call__(self) -> torch.Tensor:
        return self.one @ self.other


def upload(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def spans(clock: VirtualClock, lane: str) -> list[tuple[float, float]]:
    return [(t.start, t.end) for t in clock.tasks if t.lane == lane]


# ---- kernels


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


def test_kernels_cost_their_flops():
    for case, (function, shapes, flops) in CASES.items():
        tensors = [on_device(*shape) for shape in shapes]
        with running() as clock:
            function(*tensors)
            assert clock.now == 0, "launching takes nothing"
        assert clock.end * UNIT == flops, case
        assert len(clock.tasks) == (flops > 0), "what takes no time is no task"


def test_backwards_cost_their_flops():
    """On the thread of autograd: two forwards, and one in a first layer, whose input needs no gradient."""
    layers, rows, width = 4, 3, 8
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("sim")
    x = on_device(rows, width)
    with running() as clock:
        model(x).sum().backward()
    assert clock.end * UNIT == (3 * layers - 1) * 2 * rows * width * width


# ---- copies


def test_streams_share_a_direction_and_directions_and_kernels_share_nothing():
    streams = torch.sim.Stream(), torch.sim.Stream()
    hosts, devices = [host_bytes(n) for n in (3, 2)], [device_bytes(n) for n in (3, 2)]
    copies = {"upload": [(devices[0], hosts[0]), (devices[1], hosts[1])]}
    copies["download"] = [(host, device) for device, host in copies["upload"]]

    def clock_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> VirtualClock:
        with running() as clock:
            for stream, (target, source) in zip(streams, pairs, strict=True):
                with torch.sim.stream(stream):
                    target.copy_(source, non_blocking=True)
        torch.sim.synchronize()
        return clock

    for lane, pairs in copies.items():
        assert spans(clock_of(*pairs), lane) == [(0, 3), (3, 5)]
    both = clock_of(copies["upload"][0], copies["download"][1])
    assert both.end == 3 and spans(both, "upload") == [(0, 3)] and spans(both, "download") == [(0, 2)]
    kernel = Kernel(3)
    for stream, span in ((streams[0], (0, 2)), (torch.sim.default_stream(), (3, 5))):
        with running() as clock:
            kernel()
            with torch.sim.stream(stream):
                upload(devices[1], hosts[1])
        assert spans(clock, "upload") == [span] and clock.end == max(3, span[1])
        torch.sim.synchronize()


def test_a_copy_that_waits_for_long_holds_up_no_other():
    early, late = torch.sim.Stream(name="issued first"), torch.sim.Stream(name="issued later")
    kernel, targets, sources = Kernel(10), [device_bytes(4) for _ in range(4)], [host_bytes(4) for _ in range(4)]
    with running() as clock:
        kernel()
        early.wait_stream(torch.sim.current_stream())
        for stream, order in ((early, [0]), (late, [1, 2, 3])):
            with torch.sim.stream(stream):
                for i in order:
                    upload(targets[i], sources[i])
            if stream is early:
                assert clock.end == 14, "it is placed already, and others go into the gap before it"
    # Two fit before the first one issued is ready. The next is ready before that one, and goes before it.
    assert [(t.stream, t.start, t.end) for t in clock.tasks if t.lane == "upload"] == [
        *((late.name, 0, 4), (late.name, 4, 8), (late.name, 8, 12)),
        (early.name, 12, 16),
    ]


# ---- what the host waits for


@pytest.fixture
def page_locked() -> Iterator[torch.Tensor]:
    x = host_bytes(2, pinned=False)
    assert torch.sim.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0
    yield x
    assert torch.sim.cudart().cudaHostUnregister(x.data_ptr()) == 0


def test_a_copy_that_is_blocking_or_of_pageable_memory_holds_up_the_host(page_locked):
    hosts = {"pageable": host_bytes(2, pinned=False), "pinned": host_bytes(2), "registered": page_locked}
    device, kernel = device_bytes(2), Kernel(1)
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
    with running() as clock:
        arriving = device.to("cpu", non_blocking=True)
        assert clock.now == 0 and clock.end == 2
        torch.sim.synchronize()
    assert arriving.shape == device.shape
    wide = on_device(UNIT // 2).double()
    with running() as clock:
        device.clone()
        assert clock.tasks == [] and clock.end == 0, "copies on the device cost nothing"
        upload(wide, host_bytes(2))
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
    kernels, x = [Kernel(3), Kernel(1), Kernel(8), Kernel(1)], on_device()
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


# ---- events


def test_an_event_stands_for_what_was_before_it_was_recorded_last():
    before = torch.sim.current_stream().record_event()
    for again, start in ((False, 2), (True, 6)):
        side, first, second, after = torch.sim.Stream(), Kernel(2), Kernel(4), Kernel(1)
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


# ---- the host


def with_gradients(*sizes: int, device: str = "cpu") -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for p in parameters:
        p.grad = torch.ones_like(p)
    return parameters


def test_a_step_costs_what_it_reads_and_writes():
    """The gradient, and the parameter and moments twice."""
    makes = (torch.optim.AdamW, partial(torch.optim.Adam, amsgrad=True), partial(torch.optim.SGD, momentum=0.9))
    for make, floats in zip(makes, (7, 9, 5), strict=True):
        optimizer = make([*with_gradients(100, 28), nn.Parameter(torch.zeros(999))])
        with running() as clock:
            optimizer.step()
            assert clock.now * UNIT == 4 * floats * 128
            optimizer.step()
        name = f"{type(optimizer).__name__}.step"
        assert [(t.lane, t.name, t.stream) for t in clock.tasks] == [("host", name, "host")] * 2
        assert clock.end * UNIT == 2 * 4 * floats * 128
        optimizer.step()
        assert len(clock.tasks) == 2, "the clock has stopped"
    with running() as clock:
        torch.optim.AdamW(with_gradients(64, device="sim")).step()
        assert spans(clock, "host") == []


def test_work_and_costs_that_are_none_are_refused():
    with running() as clock:
        for amount in ({}, {"seconds": 1, "num_bytes": 1}, {"num_bytes": math.inf}):
            with pytest.raises(ValueError, match="host work"):
                clock.host_work("work", **amount)
        assert clock.tasks == []
    with pytest.raises(ValueError, match=r"flop_per_s must be positive"):
        Costs(**{**COSTS_GIVEN, "flop_per_s": math.nan})


# ---- threads


@pytest.mark.parametrize("worker_is_first", [True, False])
def test_a_thread_with_its_own_time_works_beside_the_others(worker_is_first):
    kernel, finished = Kernel(4), []
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


def test_own_time_ends_with_its_block_and_a_moment_with_its_clock():
    with running() as clock:
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


# ---- readings


def test_busy_counts_within_an_interval_and_once():
    kernels = Kernel(2), Kernel(3)
    with running() as clock:
        for kernel in kernels:
            with torch.sim.stream(torch.sim.Stream()):
                kernel()
        clock.host_work("work", seconds=5)
        kernels[0]()
    assert clock.busy("compute") == 5  # 0 to 3 and 5 to 7
    assert clock.busy("compute", 1, 6) == 3 and clock.busy("compute", 3.5, 4.5) == 0
    assert clock.busy("host", end=4) == 4 and clock.busy("upload") == 0
    with pytest.raises(ValueError, match="compute, launch, disk, download, host, peer, upload"):
        clock.busy("link")


def test_there_is_one_clock_at_a_time_and_one_that_has_stopped_is_read_and_not_added_to(monkeypatch):
    monkeypatch.setattr(ORDER, "active", False)
    kernel = Kernel()
    with running() as clock:
        assert ORDER.active, "the order of operations can be looked at"
        with pytest.raises(RuntimeError, match="only one virtual clock"), running():
            pass
        kernel()
    with running() as other:
        assert other.now == 0 and other.tasks == []
    kernel()
    torch.sim.synchronize()
    assert (clock.now, clock.end) == (0, 1)
    for add in (
        lambda: clock.host_work("work", seconds=1),
        lambda: clock.wait_for(clock.moment()),
        lambda: clock.own_time("beside").__enter__(),
    ):
        with pytest.raises(RuntimeError, match="has stopped"):
            add()


def test_without_a_clock_nothing_is_counted(monkeypatch):
    def forbidden(*args: object) -> None:
        raise AssertionError("counted")

    for name in ("kernel", "copy", "mark", "line_waits", "host_waits", "host_waits_for", "host_waits_for_device"):
        monkeypatch.setattr(sim_recorder.Recorder, name, forbidden)
    monkeypatch.setattr(sim_tensor, "flops_of", forbidden)
    side, target = torch.sim.Stream(), device_bytes()
    with torch.sim.stream(side):
        upload(target, host_bytes())
    torch.sim.current_stream().wait_stream(side)
    assert not Kernel()().sum().item()
    assert side.query()


# ---- the schedule


@nightly
@settings(max_examples=times(60, 300))
@given(st.data())
def test_the_order_of_recording_and_of_reading_does_not_matter(data):
    """Random programs of three streams: one after the other, and in turns that keep every wait after its event."""
    lanes, streams = ("compute", "upload", "host"), range(3)
    # (stream, lane, seconds, the task it waits for, of those before it)
    program = []
    for i in range(data.draw(st.integers(1, 12))):
        stream, lane = data.draw(st.sampled_from(streams)), data.draw(st.sampled_from(lanes))
        program.append((stream, lane, data.draw(st.integers(1, 3)), data.draw(st.integers(-1, i - 1))))

    def recorded(order: list[int], read_often: bool) -> list[Task]:
        schedule, tails, nodes = Schedule(), dict.fromkeys(streams, START), {-1: START}
        for i in order:
            stream, lane, seconds, awaited = program[i]
            kind = {
                "seconds": float(seconds),
                "lane": lane,
                "name": str(i),
                "stream": str(stream),
                "rank": (stream, ""),
            }
            tails[stream] = nodes[i] = schedule.add(schedule.join(tails[stream], nodes[awaited]), START, **kind)
            if read_often:
                schedule.end()
        return schedule.tasks()

    left, order = list(range(len(program))), []
    while left:
        able = [i for i in left if not any(j in left for j in range(i) if program[j][0] == program[i][0])]
        able = [i for i in able if program[i][3] not in left]
        order.append(data.draw(st.sampled_from(able)))
        left.remove(order[-1])
    expected = recorded(list(range(len(program))), False)
    assert recorded(order, False) == expected
    assert recorded(order, True) == expected
    for lane in lanes[1:]:
        ends = [(t.start, t.end) for t in expected if t.lane == lane]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends)), "one at a time"
