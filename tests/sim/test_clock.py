"""The virtual clock: what a program would take, by hand; units are such that everything takes whole seconds."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_l2l.testing import Costs, Task, VirtualClock, sim_recorder, sim_tensor, virtual_clock
from hf_l2l.testing.sim_race import ORDER
from hf_l2l.testing.sim_schedule import START, Schedule
from models import attached, batch_for, gradients, train_once
from training import tiny_bert

UNIT = 1024
COSTS = Costs(link_bytes_per_s=UNIT, flop_per_s=UNIT, host_bytes_per_s=UNIT)


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


def test_a_chain_of_kernels_takes_their_sum_and_launching_takes_nothing():
    x, factor = on_device(8, 8), on_device(8, 8)
    with running() as clock:
        for _ in range(3):
            x = torch.relu(x @ factor) + 1
        assert clock.now == 0
        assert clock.end == 3
    assert clock.tasks == [Task("compute", "aten::mm", i, i + 1, "the default stream") for i in range(3)]


A, B, C = (2, 3), (3, 5), (2, 5)
BATCH_A, BATCH_B, BATCH_C = (7, *A), (7, *B), (7, *C)
QUERY = (2, 3, 4, 8)  # batch, heads, positions, width
CASES: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], int]] = {
    "mm": (torch.mm, [A, B], 2 * 2 * 3 * 5),
    "mm, out": (lambda a, b, out: torch.mm(a, b, out=out), [A, B, C], 2 * 2 * 3 * 5),
    "addmm": (torch.addmm, [C, A, B], 2 * 2 * 3 * 5),
    "addmm_": (lambda c, a, b: c.addmm_(a, b), [C, A, B], 2 * 2 * 3 * 5),
    "bmm": (torch.bmm, [BATCH_A, BATCH_B], 7 * 2 * 2 * 3 * 5),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), [BATCH_C, BATCH_A, BATCH_B], 7 * 2 * 2 * 3 * 5),
    "baddbmm_": (lambda c, a, b: c.baddbmm_(a, b), [BATCH_C, BATCH_A, BATCH_B], 7 * 2 * 2 * 3 * 5),
    "matmul": (torch.matmul, [BATCH_A, B], 7 * 2 * 2 * 3 * 5),
    "linear": (nn.functional.linear, [(4, 3), (5, 3), (5,)], 2 * 4 * 3 * 5),
    "convolution": (nn.functional.conv1d, [(2, 3, 10), (4, 3, 5)], 2 * 2 * 3 * 4 * 5 * 6),
    "fused attention": (nn.functional.scaled_dot_product_attention, [QUERY] * 3, 2 * 2 * (2 * 3) * 4 * 4 * 8),
    "add": (torch.add, [C, C], 0),
    "softmax": (lambda x: x.softmax(-1), [C], 0),
    "fill": (lambda x: x.fill_(1.0), [C], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_cost_their_flops(case):
    function, shapes, flops = CASES[case]
    tensors = [on_device(*shape) for shape in shapes]
    with running() as clock:
        function(*tensors)
    assert clock.end * UNIT == flops
    assert len(clock.tasks) == (flops > 0), "what takes no time is no task"


def test_half_precision_costs_the_same_flops():
    a, b = (on_device(*shape).bfloat16() for shape in (A, B))
    with running() as clock:
        a @ b
    assert clock.end * UNIT == 2 * 2 * 3 * 5


def test_a_backward_costs_two_forwards_and_the_first_layer_one():
    """On the thread of autograd: every layer has its weight's gradient, all but the first their input's."""
    layers, rows, width = 4, 3, 8
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("sim")
    x = on_device(rows, width)
    forward = 2 * rows * width * width
    with running() as clock:
        loss = model(x).sum()
        assert clock.end * UNIT == layers * forward
        loss.backward()
    assert clock.end * UNIT == (3 * layers - 1) * forward


def test_the_backward_of_a_convolution_costs_two_forwards():
    x, weight = on_device(2, 3, 10).requires_grad_(), on_device(4, 3, 5).requires_grad_()
    with running() as clock:
        nn.functional.conv1d(x, weight).sum().backward()
    assert clock.end * UNIT == 3 * CASES["convolution"][2]


def test_the_backward_of_attention_recomputes_the_scores():
    tensors = [on_device(*QUERY).requires_grad_() for _ in range(3)]
    with running() as clock:
        nn.functional.scaled_dot_product_attention(*tensors).sum().backward()
    one_product = 2 * (2 * 3) * 4 * 4 * 8
    assert clock.end * UNIT == (2 + 5) * one_product


# ---- copies


def test_a_copy_on_a_side_stream_travels_under_a_kernel():
    side, kernel, target, source = torch.sim.Stream(), Kernel(3), device_bytes(2), host_bytes(2)
    with running() as clock:
        kernel()
        with torch.sim.stream(side):
            upload(target, source)
    assert clock.end == 3
    assert spans(clock, "upload") == [(0, 2)]


def test_without_a_side_stream_it_comes_after_the_kernel():
    kernel, target, source = Kernel(3), device_bytes(2), host_bytes(2)
    with running() as clock:
        kernel()
        upload(target, source)
        assert clock.now == 0
    assert clock.end == 5


def double_buffered(count: int, copy_seconds: int, kernel_seconds: int) -> float:
    """The end of `count` kernels, each of which reads one of two slots that a side stream fills."""
    side = torch.sim.Stream()
    slots = [on_device(8, 8 * kernel_seconds) for _ in range(2)]
    # A copy takes its slot's bytes, so the link's speed makes it as long as is asked for.
    link = slots[0].nbytes / copy_seconds
    sources = [torch.zeros_like(slots[0], device="cpu").pin_memory() for _ in range(count)]
    factor = on_device(8, 8)
    left: list[torch.sim.Event | None] = [None, None]
    with virtual_clock(Costs(link_bytes_per_s=link, flop_per_s=UNIT, host_bytes_per_s=UNIT)) as clock:
        for i, source in enumerate(sources):
            slot, free = slots[i % 2], left[i % 2]
            with torch.sim.stream(side):
                if free is not None:
                    free.wait()
                upload(slot, source)
            torch.sim.current_stream().wait_stream(side)
            factor @ slot
            left[i % 2] = torch.sim.current_stream().record_event()
        assert clock.now == 0
    return clock.end


@pytest.mark.parametrize(("copy", "kernel"), [(1, 4), (4, 1), (3, 3)])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_double_buffering_hides_the_shorter(count, copy, kernel):
    assert double_buffered(count, copy, kernel) == copy + (count - 1) * max(copy, kernel) + kernel


def test_the_two_directions_do_not_share():
    streams = torch.sim.Stream(), torch.sim.Stream()
    up, down, target, source = host_bytes(3), host_bytes(2), device_bytes(3), device_bytes(2)
    with running() as clock:
        with torch.sim.stream(streams[0]):
            upload(target, up)
        with torch.sim.stream(streams[1]):
            down.copy_(source, non_blocking=True)
    assert clock.end == 3
    assert spans(clock, "upload") == [(0, 3)] and spans(clock, "download") == [(0, 2)]


@pytest.mark.parametrize("lane", ["upload", "download"])
def test_two_streams_share_a_direction(lane):
    streams = torch.sim.Stream(), torch.sim.Stream()
    pairs = [(host_bytes(n), device_bytes(n)) for n in (3, 2)]
    with running() as clock:
        for stream, (host, device) in zip(streams, pairs, strict=True):
            source, target = (host, device) if lane == "upload" else (device, host)
            with torch.sim.stream(stream):
                target.copy_(source, non_blocking=True)
    assert spans(clock, lane) == [(0, 3), (3, 5)]


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
    # Two fit before the first one issued is ready. The next is ready before that one, and goes before it.
    assert [(t.stream, t.start, t.end) for t in clock.tasks if t.lane == "upload"] == [
        *((late.name, 0, 4), (late.name, 4, 8), (late.name, 8, 12)),
        (early.name, 12, 16),
    ]


def test_a_copy_is_put_into_the_gap_before_one_that_is_placed_already():
    early, late = torch.sim.Stream(), torch.sim.Stream()
    kernel, targets, sources = Kernel(10), [device_bytes() for _ in range(2)], [host_bytes() for _ in range(2)]
    with running() as clock:
        kernel()
        early.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(early):
            upload(targets[0], sources[0])
        assert clock.end == 11
        with torch.sim.stream(late):
            upload(targets[1], sources[1])
        assert spans(clock, "upload") == [(0, 1), (10, 11)]


def test_copies_on_the_device_cost_nothing():
    one, other = device_bytes(), device_bytes()
    with running() as clock:
        one.copy_(other)
        one.clone()
    assert clock.tasks == [] and clock.end == 0


def test_what_travels_has_the_type_of_the_target():
    source, target = torch.zeros(UNIT // 4).pin_memory(), on_device(UNIT // 4).double()
    with running() as clock:
        upload(target, source)
    assert clock.busy("upload") == 2


# ---- what the host waits for


def registered(x: torch.Tensor) -> torch.Tensor:
    assert torch.sim.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0
    return x


@pytest.fixture
def page_locked() -> Iterator[torch.Tensor]:
    x = registered(host_bytes(2, pinned=False))
    yield x
    assert torch.sim.cudart().cudaHostUnregister(x.data_ptr()) == 0


@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
@pytest.mark.parametrize("lane", ["upload", "download"])
@pytest.mark.parametrize("memory", ["pageable", "pinned", "registered"])
def test_an_asynchronous_copy_of_pageable_memory_holds_up_the_host(memory, lane, side, page_locked):
    host = page_locked if memory == "registered" else host_bytes(2, pinned=memory == "pinned")
    source, target = (host, device_bytes(2)) if lane == "upload" else (device_bytes(2), host)
    kernel = Kernel(1)
    with running() as clock:
        with torch.sim.stream(torch.sim.Stream() if side else None):
            target.copy_(source, non_blocking=True)
        assert clock.now == (2 if memory == "pageable" else 0)
        kernel()
    assert clock.end == (3 if memory == "pageable" or not side else 2)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("lane", ["upload", "download"])
def test_a_blocking_copy_holds_up_the_host(lane, pinned):
    host, device = host_bytes(2, pinned), device_bytes(2)
    with running() as clock:
        (device if lane == "upload" else host).copy_(host if lane == "upload" else device)
        assert clock.now == 2


def test_an_asynchronous_move_to_the_host_does_not_hold_it_up():
    x = device_bytes(2)
    with running() as clock:
        arriving = x.to("cpu", non_blocking=True)
        assert clock.now == 0 and clock.end == 2
        torch.sim.synchronize()
    assert arriving.shape == x.shape


WAITS: dict[str, tuple[Callable[[torch.Stream, torch.sim.Event, torch.Tensor], object], int]] = {
    "nothing": (lambda side, done, x: None, 0),
    "event.synchronize": (lambda side, done, x: done.synchronize(), 3),
    "event.query": (lambda side, done, x: done.query(), 3),
    "stream.synchronize": (lambda side, done, x: side.synchronize(), 4),
    "device": (lambda side, done, x: torch.sim.synchronize(), 8),
    "accelerator": (lambda side, done, x: torch.accelerator.synchronize(), 8),
    "item": (lambda side, done, x: x.item(), 8),
    "bool": (lambda side, done, x: bool(x), 8),
    "blocking download": (lambda side, done, x: x.cpu(), 9),
    "blocking upload": (lambda side, done, x: x.copy_(torch.zeros(UNIT // 4)[0]), 9),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_waits_for_what_it_asks_for(wait):
    """A side stream is busy for 3 and 1 seconds, with an event between; the default stream for 8."""
    side, fresh = torch.sim.Stream(), torch.sim.Stream(name="fresh")
    kernels, x = [Kernel(3), Kernel(1), Kernel(8), Kernel(1)], on_device()
    asked, expected = WAITS[wait]
    costs = Costs(link_bytes_per_s=4, flop_per_s=UNIT, host_bytes_per_s=UNIT)  # a number travels for a second
    with virtual_clock(costs) as clock:
        with torch.sim.stream(side):
            kernels[0]()
            done = side.record_event()
            kernels[1]()
        kernels[2]()
        asked(side, done, x)
        assert clock.now == expected
        with torch.sim.stream(fresh):
            kernels[3]()
    starts = [t.start for t in clock.tasks if t.stream == "fresh"]
    assert starts == [expected], "what is issued starts when the host has issued it"


# ---- events


def test_an_event_stands_for_what_was_before_it():
    side, first, second, after = torch.sim.Stream(), Kernel(2), Kernel(4), Kernel(1)
    with running() as clock:
        first()
        event = torch.sim.current_stream().record_event()
        second()
        with torch.sim.stream(side):
            event.wait()
            after()
    assert spans(clock, "compute") == [(0, 2), (2, 3), (2, 6)]


def test_an_event_that_is_recorded_again_stands_for_more():
    side, kernel, after = torch.sim.Stream(), Kernel(2), Kernel(1)
    with running() as clock:
        kernel()
        event = torch.sim.current_stream().record_event()
        kernel()
        event.record()
        side.wait_event(event)
        with torch.sim.stream(side):
            after()
    assert clock.tasks[-1].start == 4


def test_an_event_is_not_before_the_host_has_recorded_it():
    side, kernel = torch.sim.Stream(), Kernel(1)
    with running() as clock:
        start = clock.moment()
        clock.host_work("work", seconds=5)
        event = torch.sim.current_stream().record_event()
        with clock.own_time("another thread", since=start), torch.sim.stream(side):
            event.wait()
            kernel()
    assert spans(clock, "compute") == [(5, 6)]


def test_what_takes_no_time_still_comes_after_the_host_and_before_the_next():
    x, kernel, side = on_device(4), Kernel(1), torch.sim.Stream()
    with running() as clock:
        start = clock.moment()
        clock.host_work("work", seconds=5)
        with torch.sim.stream(side):
            x.relu_()
            with clock.own_time("another thread", since=start):
                kernel()
                assert clock.now == 0
    assert spans(clock, "compute") == [(5, 6)]


@pytest.mark.parametrize("of", ["no clock", "another clock"])
def test_an_event_of_before_is_done(of):
    side, kernel, after = torch.sim.Stream(), Kernel(2), Kernel(1)
    with running() if of == "another clock" else nullcontext():
        kernel()
        event = torch.sim.current_stream().record_event()
    with running() as clock:
        side.wait_event(event)
        event.synchronize()
        assert clock.now == 0
        with torch.sim.stream(side):
            after()
    assert clock.end == 1


def test_an_event_that_is_recorded_again_after_the_clock_is_done():
    kernel, side = Kernel(2), torch.sim.Stream()
    with running() as clock:
        kernel()
        event = torch.sim.current_stream().record_event()
    event.record()
    with running() as later, torch.sim.stream(side):
        side.wait_event(event)
        kernel()
    assert clock.end == later.end == 2


# ---- the host


@pytest.mark.parametrize(
    ("make", "floats"),
    [
        (lambda p: torch.optim.AdamW(p), 7),  # gradient; parameter and two moments, read and written
        (lambda p: torch.optim.Adam(p, amsgrad=True), 9),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 5),
        (lambda p: torch.optim.SGD(p), 3),
    ],
    ids=["AdamW", "amsgrad", "momentum", "SGD"],
)
def test_a_step_costs_what_it_reads_and_writes(make, floats):
    parameters = [nn.Parameter(torch.zeros(n)) for n in (100, 28, 999)]
    for p in parameters[:2]:
        p.grad = torch.ones_like(p)
    optimizer = make(parameters)
    with running() as clock:
        optimizer.step()
        assert clock.now * UNIT == 4 * floats * 128
        optimizer.step()
    name = f"{type(optimizer).__name__}.step"
    assert [(t.lane, t.name, t.stream) for t in clock.tasks] == [("host", name, "host")] * 2
    assert clock.end * UNIT == 2 * 4 * floats * 128
    optimizer.step()
    assert len(clock.tasks) == 2, "the clock has stopped"


def test_gradients_that_the_step_clears_or_makes_count():
    p = nn.Parameter(torch.zeros(64))
    p.grad = torch.ones(64)
    optimizer = torch.optim.SGD([p])

    def closure() -> float:
        p.grad = torch.ones(64)
        return 0.0

    with running() as clock:
        handle = optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
        optimizer.step()
        handle.remove()
        assert p.grad is None
        optimizer.step(closure)
        assert clock.now * UNIT == 2 * 3 * 4 * 64


def test_a_step_on_the_device_costs_the_host_nothing():
    p = nn.Parameter(on_device(64))
    p.grad = on_device(64)
    with running() as clock:
        torch.optim.AdamW([p]).step()
    assert spans(clock, "host") == []


def test_kernels_run_while_the_host_works():
    kernel = Kernel(3)
    with running() as clock:
        clock.host_work("before", seconds=1)
        kernel()
        clock.host_work("beside", num_bytes=2 * UNIT)
        kernel()
        clock.host_work("nothing", seconds=0)
    assert spans(clock, "compute") == [(1, 4), (4, 7)]
    assert spans(clock, "host") == [(0, 1), (1, 3)]
    assert (clock.now, clock.end) == (3, 7)


@pytest.mark.parametrize("amount", [{}, {"seconds": 1, "num_bytes": 1}, {"seconds": -1}, {"num_bytes": math.inf}])
def test_host_work_that_is_none_is_refused(amount):
    with running() as clock:
        with pytest.raises(ValueError, match="host work .*got .*; give"):
            clock.host_work("work", **amount)
        assert clock.tasks == []


# ---- threads


def take_turns(turns: tuple[int, ...], *programs: list[Callable[[], object]]) -> None:
    """Run each program in a thread of its own, so that steps come in the order `turns`."""
    done = [threading.Event() for _ in turns]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        mine = [i for i, turn in enumerate(turns) if turn == number]
        for i, step in zip(mine, programs[number], strict=True):
            if i and not done[i - 1].wait(timeout=30):
                return
            try:
                step()
            except RuntimeError as error:
                errors.append(error)
            done[i].set()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(event.is_set() for event in done)


INTERLEAVINGS = sorted(set(itertools.permutations((0, 0, 0, 1, 1, 1))))


def two_streams(turns: tuple[int, ...]) -> list[Task]:
    """Two threads, each of which uploads and computes on its stream; the first fills the link for longer."""
    streams = [torch.sim.Stream(name=name) for name in ("one", "other")]
    programs = []
    for stream, copy_seconds, kernel_seconds in zip(streams, (3, 2), (5, 1), strict=True):
        target, source, kernel = device_bytes(copy_seconds), host_bytes(copy_seconds), Kernel(kernel_seconds)

        def copying(stream=stream, target=target, source=source) -> None:
            with torch.sim.stream(stream):
                upload(target, source)

        def computing(stream=stream, kernel=kernel) -> None:
            with torch.sim.stream(stream):
                kernel()

        programs.append([copying, computing, copying])
    with running() as clock:
        take_turns(turns, *programs)
    torch.sim.synchronize()
    return clock.tasks


def test_interleaving_does_not_matter():
    results = [two_streams(turns) for turns in INTERLEAVINGS]
    assert all(result == results[0] for result in results)
    assert [(t.stream, t.start, t.end) for t in results[0] if t.lane == "upload"] == [
        ("one", 0, 3),
        ("other", 3, 5),
        ("other", 6, 8),  # ready when its kernel has ended at 6, before the one that is ready at 8
        ("one", 8, 11),
    ]


def test_a_thread_with_its_own_time_works_beside_the_others():
    kernel, results = Kernel(4), []
    for turns in INTERLEAVINGS:
        with running() as clock:
            clock.host_work("before", seconds=1)
            submitted, finished = clock.moment(), []

            def work(clock=clock, submitted=submitted, finished=finished) -> None:
                with clock.own_time("worker", since=submitted):
                    clock.host_work("update", seconds=2)
                    finished.append(clock.moment())

            def main(clock=clock) -> None:
                kernel()
                clock.host_work("main", seconds=1)

            take_turns(turns, [lambda: None, work, lambda: None], [lambda: None, main, lambda: None])
            assert clock.now == 2
            clock.wait_for(finished[0])
            assert clock.now == finished[0].seconds == 4
            results.append(clock.tasks)
    assert results == [results[0]] * len(INTERLEAVINGS)
    # The host's memory is shared, and "host" goes before "worker" when both are ready.
    assert [(t.name, t.stream, t.start, t.end) for t in results[0]] == [
        ("before", "host", 0, 1),
        ("main", "host", 1, 2),
        ("aten::mm", "the default stream", 1, 5),
        ("update", "worker", 2, 4),
    ]


def test_a_worker_does_one_job_after_the_other():
    side, kernel = torch.sim.Stream(), Kernel(4)
    with running() as clock:
        submitted = [clock.moment()]
        clock.host_work("main", seconds=1)
        submitted.append(clock.moment())
        with clock.own_time("worker", since=submitted[0]), torch.sim.stream(side):
            kernel()
            side.synchronize()
            clock.wait_for(submitted[1])
            assert clock.now == 4, "the second job was submitted at 1, and the worker was busy"
            clock.host_work("update", seconds=2)
            assert clock.now == 6
        assert clock.now == 1


def test_own_time_ends_with_its_block():
    with running() as clock:
        with clock.own_time("beside"):
            clock.host_work("work", seconds=2)
            assert clock.now == 2
        assert (clock.now, clock.end) == (0, 2)
        with pytest.raises(KeyError), clock.own_time("beside"):
            raise KeyError
        clock.host_work("work", seconds=1)
        assert clock.now == 3, "the host's memory is shared"


def test_a_moment_of_another_clock_has_passed():
    with running() as clock:
        clock.host_work("work", seconds=2)
        moment = clock.moment()
    with running() as clock:
        clock.wait_for(moment)
        assert clock.now == 0
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
    assert clock.busy("compute", 1) == 4
    assert clock.busy("compute", 1, 6) == 3
    assert clock.busy("compute", 3.5, 4.5) == 0
    assert clock.busy("compute", 2, 2.5) == 0.5
    assert clock.busy("host", end=4) == 4
    assert clock.busy("upload") == 0
    with pytest.raises(ValueError, match="compute, launch, disk, download, host, peer, upload"):
        clock.busy("link")


def test_free_work_takes_no_time():
    kernel, target, source = Kernel(), device_bytes(), host_bytes(pinned=False)
    free = Costs(link_bytes_per_s=math.inf, flop_per_s=math.inf, host_bytes_per_s=math.inf)
    with virtual_clock(free) as clock:
        kernel()
        upload(target, source)
        clock.host_work("work", num_bytes=5)
        torch.sim.synchronize()
        assert clock.now == 0
    assert clock.end == 0 and clock.tasks == []


@pytest.mark.parametrize("rate", [0, -1.5, math.nan])
@pytest.mark.parametrize("kind", ["link_bytes_per_s", "flop_per_s", "host_bytes_per_s"])
def test_costs_are_positive(kind, rate):
    rates = {"link_bytes_per_s": 1, "flop_per_s": 1, "host_bytes_per_s": 1} | {kind: rate}
    with pytest.raises(ValueError, match=rf"{kind} must be positive \(got {rate}\); give"):
        Costs(**rates)


def test_one_clock_at_a_time():
    with running() as clock:
        with pytest.raises(RuntimeError, match="only one virtual clock"), running():
            pass
        clock.host_work("work", seconds=1)
    with pytest.raises(KeyError), running():
        raise KeyError
    with running() as other:
        assert other.now == 0 and other.tasks == []


def test_a_clock_that_has_stopped_is_read_and_not_added_to():
    kernel = Kernel()
    with running() as clock:
        kernel()
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


def test_a_clock_lets_the_order_of_operations_be_looked_at(monkeypatch):
    monkeypatch.setattr(ORDER, "active", False)
    with running():
        assert ORDER.active


# ---- the schedule


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


# ---- all together


def test_layer_to_layer_training_takes_the_same_time_twice_and_gives_the_same_bits():
    def train() -> tuple[VirtualClock, dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        torch.sim.manual_seed(3)
        model = attached(tiny_bert(layers=3), device="sim", ubatch_size=3)
        with virtual_clock(Costs(link_bytes_per_s=16e9, flop_per_s=30e12, host_bytes_per_s=40e9)) as clock:
            train_once(model, batch_for(model))
        return clock, gradients(model)

    (one, bits), (other, same) = train(), train()
    assert 0 < one.now <= one.end
    unnamed = [[task._replace(stream="") for task in clock.tasks] for clock in (one, other)]
    assert unnamed[0] == unnamed[1] and {t.lane for t in unnamed[0]} == {"compute", "upload", "download"}
    assert bits.keys() == same.keys() and all(torch.equal(bits[name], same[name]) for name in bits)
