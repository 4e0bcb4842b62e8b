"""Streams of the simulated accelerator: what waits is right, and what forgot to wait is found."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l.testing import copies_under_way
from hf_l2l.testing.sim_stream import late_copies, random_landing
from memory_switches import land_the_rest
from tiers import times


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    torch.sim.synchronize()
    yield
    land_the_rest()  # what a test left undone may be wrong on purpose
    assert torch.sim.current_stream() == torch.sim.default_stream()


def ready(*shape: int, value: float = 1.0) -> torch.Tensor:
    """A tensor on the device that every stream may use."""
    x = torch.full(shape, value, device="sim")
    torch.sim.synchronize()
    return x


def queued(target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> torch.sim.Event:
    """Queue a copy on `stream` and return the event after it."""
    with torch.sim.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def is_poison(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


def test_the_default_stream_is_the_current_one_of_every_thread_until_another_one_is_set():
    side, default = torch.sim.Stream(), torch.sim.default_stream("sim:0")
    with torch.sim.stream(side), ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.sim.current_stream).result() is default
        with torch.sim.stream(None), torch.sim.stream(default):
            assert torch.sim.current_stream() is default
        assert torch.sim.current_stream() is side
    with side, torch.sim.Stream("sim:0", name="inner") as inner:
        assert torch.sim.current_stream() is inner and inner.name == "inner"
    torch.sim.set_stream(side)
    assert torch.sim.current_stream() is side
    torch.sim.set_stream(default)
    with pytest.raises(ValueError, match="the only one"):
        torch.sim.Stream("sim:1")
    event = torch.sim.Event(enable_timing=False)
    assert event.query(), "it was never recorded"
    side.wait_event(event)


WAITS: dict[str, Callable[[torch.Stream, torch.sim.Event], object]] = {
    "event.synchronize": lambda side, done: done.synchronize(),
    "stream.synchronize": lambda side, done: side.synchronize(),
    "device": lambda side, done: torch.sim.synchronize(),
    "accelerator": lambda side, done: torch.accelerator.synchronize(),
    "wait_event": lambda side, done: torch.sim.current_stream().wait_event(done),
    "event.wait": lambda side, done: done.wait(),
    "wait_stream": lambda side, done: torch.sim.current_stream().wait_stream(side),
}


def test_an_upload_lands_with_any_wait_for_it_and_reads_its_source_then():
    for name, wait in WAITS.items():
        side, x, h = torch.sim.Stream(), ready(4), torch.zeros(4)
        done = queued(x, h, side)
        assert not done.query() and not side.query() and not done.query(), "asking lands nothing"
        h.copy_(torch.arange(4.0))
        wait(side, done)
        assert done.query() and side.query(), name
        assert (x + 0).tolist() == [0.0, 1.0, 2.0, 3.0], name


def test_what_has_not_landed_is_poison():
    floats = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16, torch.complex64), "nan")
    for dtype, poison in (floats | {torch.int64: str(2**63 - 1), torch.uint8: "255", torch.bool: "True"}).items():
        x, h = torch.zeros(2, dtype=dtype, device="sim"), torch.zeros(2, dtype=dtype)
        h.copy_(x, non_blocking=True)
        assert poison in str(h[0].item()), dtype
        torch.sim.synchronize()
        assert torch.equal(h, torch.zeros(2, dtype=dtype))


def test_a_download_is_seen_when_the_host_waits():
    for by in ("copy_", "to", "side"):
        side, x = torch.sim.Stream(), ready(3, value=7.0)
        with torch.sim.stream(side if by == "side" else None):
            h = torch.ones(3).copy_(x, non_blocking=True) if by == "copy_" else x.to("cpu", non_blocking=True)
            done = torch.sim.current_stream().record_event()
        torch.sim.default_stream().wait_event(done)
        assert is_poison(h) and not done.query(), "a stream has waited, and the host has not"
        done.synchronize()
        assert h.tolist() == [7.0] * 3 and done.query(), by
    for read in (lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.equal(x, x), torch.Tensor.tolist):
        h = (x := ready(3)).to("cpu", non_blocking=True)
        assert is_poison(h)
        read(x)
        assert h.tolist() == [1.0] * 3, "what the host reads it waits for"


def test_autograd_does_not_see_a_landing():
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        side, x, master = torch.sim.Stream(), ready(3), torch.nn.Parameter(torch.zeros(3))
        with mode():
            queued(master.detach(), x, side)
            queued(x, torch.full((3,), 2.0), side)
        version = master._version
        torch.sim.synchronize()
        assert master.tolist() == [1.0] * 3 and x.tolist() == [2.0] * 3
        assert master._version == version and master.grad_fn is None


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda x: x.sum(),
    "write": lambda x: x.zero_(),
    "update": lambda x: x.add_(1),
    "out": lambda x: torch.mul(torch.ones(2, 3, device="sim"), 2, out=x),
    "upload": lambda x: x.copy_(torch.ones(2, 3), non_blocking=True),
    "blocking upload": lambda x: x.copy_(torch.ones(2, 3)),
    "download": lambda x: x.to("cpu", non_blocking=True),
    "blocking download": lambda x: x.cpu(),
    "copy": lambda x: x.copy_(torch.ones(2, 3, device="sim"), non_blocking=True),
    "resize": lambda x: x.view(-1).resize_(9),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
}
READS = ["read", "download", "blocking download", "resize", "update", "foreach"]
WRITES = ["write", "out", "upload", "blocking upload", "copy", "update", "foreach"]
KINDS = {
    "download": dict.fromkeys(WRITES, "write-after-read"),
    "upload": dict.fromkeys(WRITES, "write-after-write") | dict.fromkeys(READS, "read-after-write"),
}
"""Two uses of a tensor that are in no order -> the race between them."""


def said_of(first: str, second: str, wait: str | None = None) -> str:
    """What the simulator says of two uses of a tensor, the first on another stream; "" if it says nothing."""
    there, x = torch.sim.Stream(name="there"), ready(2, 3)
    with torch.sim.stream(there):
        USES[first](x)
        done = there.record_event()
    try:
        if wait is not None:
            WAITS[wait](there, done)
        USES[second](x)
    except RuntimeError as error:
        return str(error)
    finally:
        land_the_rest()  # while the tensor is there
    return ""


@pytest.mark.parametrize("first", KINDS)
def test_races_are_found_and_what_is_ordered_is_none(first):
    for second, kind in KINDS[first].items():
        race = f"aten::.* on the default stream: {kind} race.* on there still.* wait for an event recorded on there"
        said = said_of(first, second)
        assert re.match(race, said, re.DOTALL) and "of shape (" in said, (second, said)
        assert {wait: said_of(first, second, wait) for wait in WAITS} == dict.fromkeys(WAITS, ""), second


def test_slots_of_one_arena_do_not_conflict():
    side, arena = torch.sim.Stream(), ready(4, 8)
    queued(arena[1], torch.zeros(8), side)
    for i in (0, 2, 3):
        arena[i].add_(1)
    assert arena[0].tolist() == [2.0] * 8
    for overlapping in (arena, arena[1], arena[1:3], arena.view(-1)[15:17], arena[:, 3]):
        with pytest.raises(RuntimeError, match="race"):
            overlapping.add_(1)
    queued(arena.view(-1)[16:16], torch.zeros(0), side)  # nothing is touched
    arena[2].add_(1)


def test_the_host_may_not_write_to_what_is_being_uploaded():
    default, x, h = torch.sim.default_stream(), ready(2), torch.zeros(2, 2)
    for side, late in ((torch.sim.Stream(), True), (torch.sim.Stream(), False), (default, True)):
        with late_copies(late):
            default.wait_event(queued(x, h[0], side))
            h[1].fill_(3)  # beside it
            side.synchronize()
            h[0].fill_(2)
            again = queued(x, h[0], side)
            default.wait_event(again)
            h[0, 1] = 7
            with pytest.raises(RuntimeError, match=r"the host wrote into a tensor of shape \(2,\).*write-after-read"):
                again.synchronize()


def test_a_queued_copy_finds_poison_where_its_memory_was_freed():
    side, x, y, h = torch.sim.Stream(), ready(100), ready(100), torch.zeros(100)
    held = torch.sim.memory_allocated()
    queued(h, x, side)
    del x
    assert torch.sim.memory_allocated() == held - 400
    with pytest.raises(RuntimeError, match="freed before it landed.*record_stream"):
        side.synchronize()
    assert is_poison(h)
    queued(y, torch.zeros(100), side)
    view = y[3:]
    del y
    gc.collect()
    assert not side.query()
    del view
    with pytest.raises(RuntimeError, match="freed before it landed"):
        torch.sim.synchronize()


def test_record_stream_keeps_memory_until_the_stream_has_done_what_was_queued_when_it_was_freed():
    side, other, h = torch.sim.Stream(), torch.sim.Stream(), torch.zeros(100)
    for recorded in (side, other):
        x = ready(100)
        held = torch.sim.memory_allocated()
        queued(h, x, side)
        x.record_stream(recorded)
        del x
        assert torch.sim.memory_allocated() == held - (400 if recorded is other else 0), "it is for one stream"
        other.synchronize()
        assert torch.sim.memory_allocated() == held - (400 if recorded is other else 0)
        with pytest.raises(RuntimeError, match="freed") if recorded is other else contextlib.nullcontext():
            side.synchronize()
        assert torch.sim.memory_allocated() == held - 400
        assert is_poison(h) if recorded is other else h.tolist() == [1.0] * 100


def test_memory_is_not_handed_out_again_while_another_stream_uses_it():
    side, default = torch.sim.Stream(name="uploads"), torch.sim.default_stream()
    waits: list[Callable[[], object]] = [lambda: side.wait_stream(default), default.synchronize, lambda: None]
    said = "on uploads may be given memory.* aten::sum on the default stream still"
    for recorded, wait in ((True, waits[-1]), *((False, wait) for wait in waits)):
        with torch.sim.stream(side):
            x = torch.ones(5).to("sim", non_blocking=True)
        default.wait_stream(side)
        x.sum()
        if recorded:
            x.record_stream(default)
        del x
        wait()
        forgotten = wait is waits[-1] and not recorded
        found = pytest.raises(RuntimeError, match=said) if forgotten else contextlib.nullcontext()
        with found, torch.sim.stream(side):
            torch.ones(5).to("sim", non_blocking=True)


def test_random_landing_depends_on_its_seed_only():
    def landed(seed: int) -> list[bool]:
        side, x = torch.sim.Stream(), ready(16)
        with random_landing(seed):
            done = [queued(x[i], torch.zeros(()), side) and not copies_under_way(side) for i in range(16)]
        side.synchronize()
        return done

    first = landed(1)
    assert landed(1) == first != landed(2) and len(set(first)) == 2
    side, x = torch.sim.Stream(), ready(4)
    with random_landing(0), late_copies(False):
        assert queued(x, torch.zeros(4), side).query()
    assert not queued(x, torch.zeros(4), side).query(), "the switches end with their blocks"


def test_backwards_thread_has_the_default_stream_and_finds_races():
    side, default, here = torch.sim.Stream(name="uploads"), torch.sim.default_stream(), threading.get_ident()
    seen = []
    for waits in (True, False):

        def offloaded(grad: torch.Tensor, waits: bool = waits) -> torch.Tensor:
            seen.append((threading.get_ident() == here, torch.sim.current_stream() is default))
            with torch.sim.stream(side):
                factor = torch.full((3,), 2.0).to("sim", non_blocking=True)
            if waits:
                default.wait_stream(side)
            return grad * factor

        x = torch.ones(3, device="sim", requires_grad=True)
        y = x * 2
        y.register_hook(offloaded)
        loss = y.sum()
        torch.sim.synchronize()
        with contextlib.nullcontext() if waits else pytest.raises(RuntimeError, match="copy_ on uploads still writes"):
            loss.backward()
        assert not waits or x.grad.tolist() == [4.0] * 3
    assert seen == [(False, True)] * 2


# Any program: a race, or the result of running it in order

STREAMS, EVENTS, BUFFERS, FIRST_ON_HOST = 3, 3, 5, 3
_stream, _event, _buffer = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1), st.integers(0, BUFFERS - 1)
_device = st.integers(0, FIRST_ON_HOST - 1)


def is_on_host(*buffers: int) -> bool:
    return min(buffers) >= FIRST_ON_HOST


def is_copy(op: tuple) -> bool:
    """Not from host to host, or from a buffer to itself."""
    return op[2] != op[3] and not is_on_host(op[2], op[3])


OPERATION = st.one_of(
    st.tuples(st.just("add"), _stream, _device, _device),
    st.tuples(st.just("double"), _stream, _device),
    st.tuples(st.just("copy"), _stream, _buffer, _buffer, st.sampled_from([True, True, False])).filter(is_copy),
    st.tuples(st.just("record"), _stream, _event),
    st.tuples(st.just("wait"), _stream, _event),
    st.tuples(st.just("wait_stream"), _stream, _stream),
    st.tuples(st.just("synchronize"), _event),
    st.tuples(st.just("host"), st.integers(FIRST_ON_HOST, BUFFERS - 1)),
)
# Whom an operation waits for first. Mostly everybody: else nearly every program has a race near its start.
WAITED = st.sampled_from([range(STREAMS)] * 9 + [range(1), range(1, 2), range(0)])
ON_STREAM = ("add", "double", "copy")


@st.composite
def programs(draw: st.DrawFn) -> list[tuple]:
    program: list[tuple] = []
    for op, waited in draw(st.lists(st.tuples(OPERATION, WAITED), max_size=20)):
        waits = [("wait_stream", op[1], other) for other in waited if other != op[1]]
        program += [*(waits if op[0] in ON_STREAM else ()), op]
    return program


def accesses(op: tuple) -> tuple[set[int], set[int]]:
    """The buffers that an operation of `ON_STREAM` reads and those that it writes."""
    return {"add": {op[2], op[-1]}, "double": {op[2]}, "copy": {op[-2]}}[op[0]], {op[2]}


def has_race(program: list[tuple]) -> bool:
    """Whether two operations that conflict are in no order, found by what each has to come after."""
    after: list[set[int]] = [set() for _ in range(STREAMS)]  # by stream, all that its next operation comes after
    events: list[set[int]] = [set() for _ in range(EVENTS)]
    host: set[int] = set()
    for i, op in enumerate(program):
        if op[0] == "record":
            events[op[2]] = after[op[1]] | host
        elif op[0] == "wait":
            after[op[1]] |= events[op[2]]
        elif op[0] == "wait_stream":
            after[op[1]] |= after[op[2]] | host
        elif op[0] == "synchronize":
            host |= events[op[1]]
        elif op[0] == "host":
            host = set(range(i))
        else:
            before, (reads, writes) = after[op[1]] | host, accesses(op)
            for j in {j for j in range(i) if program[j][0] in ON_STREAM} - before:
                others_reads, others_writes = accesses(program[j])
                if writes & (others_reads | others_writes) or reads & others_writes:
                    return True
            after[op[1]] = before | {i}
            if op[0] == "copy" and not op[4] and (is_on_host(op[2]) or is_on_host(op[3])):
                host |= after[op[1]]
    return False


def results_of(program: list[tuple], device: str) -> list[list[float]]:
    """Of a program in its order on the host, or on streams of the device."""
    buffers = [torch.full((2,), i + 1.0, device="cpu" if is_on_host(i) else device) for i in range(BUFFERS)]
    on = [torch.sim.default_stream(), *(torch.sim.Stream() for _ in range(STREAMS - 1))]
    events = [torch.sim.Event() for _ in range(EVENTS)]
    operations: dict[str, Callable[..., object]] = {
        "add": lambda stream, to, of: buffers[to].add_(buffers[of]),
        "double": lambda stream, to: buffers[to].mul_(2),
        "copy": lambda stream, to, of, late: buffers[to].copy_(buffers[of], non_blocking=late),
        "record": lambda stream, event: events[event].record(on[stream]),
        "wait": lambda stream, event: on[stream].wait_event(events[event]),
        "wait_stream": lambda stream, other: on[stream].wait_stream(on[other]),
        "synchronize": lambda event: events[event].synchronize(),
        "host": lambda to: (torch.sim.synchronize(), buffers[to].add_(0.5)),
    }
    torch.sim.synchronize()
    for name, *arguments in program:
        with torch.sim.stream(on[arguments[0]] if name in ON_STREAM else None):
            operations[name](*arguments)
    torch.sim.synchronize()
    return [buffer.tolist() for buffer in buffers]


@settings(max_examples=times(120, 1000))
@given(program=programs(), seed=st.integers(0, 1000))
def test_a_program_races_or_gives_the_results_of_its_order(program, seed):
    races, want = has_race(program), results_of(program, "cpu")
    for landing in (late_copies(True), late_copies(False), random_landing(seed)):
        with landing:
            try:
                got = results_of(program, "sim")
            except RuntimeError as error:
                assert races and "race" in str(error)
                torch.sim.synchronize()
            else:
                assert not races and got == want
