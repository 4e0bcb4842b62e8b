"""Streams of the simulated accelerator: what waits is right, and what forgot to wait is found."""

from __future__ import annotations

import contextlib
import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_l2l.testing import copies_under_way
from hf_l2l.testing.sim_stream import late_copies, random_landing

SIM = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    torch.sim.synchronize()
    yield
    for _ in range(3):  # what a test left undone may be wrong on purpose
        with contextlib.suppress(RuntimeError):
            torch.sim.synchronize()
    assert torch.sim.current_stream() == torch.sim.default_stream()


def ready(*shape: int, value: float = 1.0) -> torch.Tensor:
    """Return a tensor on the device that every stream may use."""
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


# The interface


def test_the_default_stream_is_the_current_one_of_every_thread() -> None:
    side, seen = torch.sim.Stream(), []
    with torch.sim.stream(side):
        assert torch.sim.current_stream() is side
        other = threading.Thread(target=lambda: seen.append(torch.sim.current_stream()))
        other.start()
        other.join()
        with torch.sim.stream(None), torch.sim.stream(torch.sim.default_stream()):
            assert torch.sim.current_stream() is torch.sim.default_stream("sim:0")
        assert torch.sim.current_stream() is side
    assert seen == [torch.sim.default_stream()]
    with side, torch.sim.Stream(SIM) as inner:
        assert torch.sim.current_stream() is inner
    with pytest.raises(KeyError), torch.sim.stream(side):
        raise KeyError
    torch.sim.set_stream(side)
    assert torch.sim.current_stream() is side
    torch.sim.set_stream(torch.sim.default_stream())


def test_streams_have_names() -> None:
    assert torch.sim.Stream(name="uploads").name == "uploads"
    first, second = torch.sim.Stream(), torch.sim.Stream()
    assert first.name.startswith("sim stream ") and first.name != second.name and first != second
    assert first.name in repr(first) and isinstance(first, torch.Stream)
    assert torch.sim.default_stream().name == "the default stream"


@pytest.mark.parametrize("make", [torch.sim.Stream, torch.sim.current_stream, torch.sim.default_stream])
def test_there_is_one_device(make: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="the only one"):
        make("sim:1")


def test_an_event_never_recorded_is_waited_for_at_once() -> None:
    event = torch.sim.Event(enable_timing=False)
    assert event.query()
    event.synchronize()
    event.wait()
    torch.sim.Stream().wait_event(event)


# Late landing


def test_an_upload_lands_late_and_reads_its_source_then() -> None:
    side, x, h = torch.sim.Stream(), ready(4), torch.zeros(4)
    done = queued(x, h, side)
    assert not done.query() and not side.query() and not done.query(), "asking lands nothing"
    h.fill_(5)
    done.synchronize()
    assert done.query() and side.query() and x.tolist() == [5.0] * 4


WAITS: dict[str, Callable[[torch.Stream, torch.sim.Event], object]] = {
    "event.synchronize": lambda side, done: done.synchronize(),
    "stream.synchronize": lambda side, done: side.synchronize(),
    "device": lambda side, done: torch.sim.synchronize(),
    "accelerator": lambda side, done: torch.accelerator.synchronize(),
    "wait_event": lambda side, done: torch.sim.current_stream().wait_event(done),
    "event.wait": lambda side, done: done.wait(),
    "wait_stream": lambda side, done: torch.sim.current_stream().wait_stream(side),
}


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_lands_it(wait: str) -> None:
    side, x = torch.sim.Stream(), ready(4)
    done = queued(x, torch.arange(4.0), side)
    assert not done.query()
    WAITS[wait](side, done)
    assert done.query()
    assert (x + 0).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_event_covers_what_was_before_it_only() -> None:
    side, x, y = torch.sim.Stream(), ready(2), ready(2)
    first, second = queued(x, torch.zeros(2), side), queued(y, torch.zeros(2), side)
    first.synchronize()
    assert first.query() and not second.query()
    second.record(torch.sim.default_stream())
    assert second.query() and not side.query(), "an event stands where it was recorded last"
    assert x.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="race"):
        y.tolist()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float32, "nan"),
        (torch.bfloat16, "nan"),
        (torch.float16, "nan"),
        (torch.complex64, "nan"),
        (torch.int64, str(2**63 - 1)),
        (torch.uint8, "255"),
        (torch.bool, "True"),
    ],
)
def test_what_has_not_landed_is_poison(dtype: torch.dtype, poison: str) -> None:
    x, h = torch.zeros(2, dtype=dtype, device="sim"), torch.zeros(2, dtype=dtype)
    h.copy_(x, non_blocking=True)
    assert poison in str(h[0].item())
    torch.sim.synchronize()
    assert torch.equal(h, torch.zeros(2, dtype=dtype))


def test_a_kernel_on_a_side_stream_comes_after_its_copies() -> None:
    side, x = torch.sim.Stream(), ready(3)
    with torch.sim.stream(side):
        x.copy_(torch.arange(3.0), non_blocking=True)
        y = x * 2
        assert y.tolist() == [0.0, 2.0, 4.0], "and a blocking copy on it waits for it"


def test_a_copy_to_the_device_by_to_lands_late() -> None:
    side, h, ones = torch.sim.Stream(), torch.zeros(3), ready(3)
    with torch.sim.stream(side):
        x = h.to("sim", torch.bfloat16, non_blocking=True)
        inside = ones.to("sim", torch.float64, non_blocking=True)
    assert not side.query()
    h.fill_(2)
    side.synchronize()
    assert x.dtype == torch.bfloat16 and x.tolist() == [2.0] * 3 and inside.tolist() == [1.0] * 3


@pytest.mark.parametrize("by", ["copy_", "to", "side"])
def test_a_download_is_seen_when_the_host_waits(by: str) -> None:
    side, x = torch.sim.Stream(), ready(3, value=7.0)
    with torch.sim.stream(side if by == "side" else None):
        h = torch.ones(3).copy_(x, non_blocking=True) if by == "copy_" else x.to("cpu", non_blocking=True)
        done = torch.sim.current_stream().record_event()
    assert is_poison(h) and not done.query()
    if by != "side":
        x.zero_()  # later on the same stream
    torch.sim.default_stream().wait_event(done)
    assert is_poison(h) and not done.query(), "a stream has waited, and the host has not"
    done.synchronize()
    assert h.tolist() == [7.0] * 3 and done.query()


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.equal(x, x), torch.Tensor.tolist]
)
def test_what_the_host_reads_it_waits_for(read: Callable[[torch.Tensor], object]) -> None:
    x = ready(3)
    h = x.to("cpu", non_blocking=True)
    assert is_poison(h)
    x + x
    assert is_poison(h)
    read(x)
    assert h.tolist() == [1.0] * 3


def test_an_offloaded_tensor_comes_back_though_the_host_never_waits() -> None:
    down, up, x, y, h = torch.sim.Stream(), torch.sim.Stream(), ready(3, value=4.0), ready(3), torch.zeros(3)
    up.wait_event(queued(h, x, down))
    done = queued(y, h, up)
    torch.sim.default_stream().wait_event(done)
    assert (y + 0).tolist() == [4.0] * 3


def test_host_memory_that_was_uploaded_may_be_downloaded_into() -> None:
    down, up, x, y, h = torch.sim.Stream(), torch.sim.Stream(), ready(3, value=4.0), ready(3), torch.zeros(3)
    done = queued(y, h, up)
    torch.sim.default_stream().wait_event(done)
    down.wait_event(done)
    queued(h, x, down).synchronize()
    assert h.tolist() == [4.0] * 3 and y.tolist() == [0.0] * 3


def test_queued_copies_that_others_wait_for_come_first() -> None:
    one, two, x, y, z = torch.sim.Stream(), torch.sim.Stream(), ready(2), ready(2), ready(2)
    two.wait_event(queued(x, torch.full((2,), 3.0), one))
    queued(y, x, two).synchronize()
    assert y.tolist() == [3.0, 3.0]
    # Poison for a later copy does not reach an earlier one that has not landed yet.
    one.wait_event(queued(z, x, two))
    queued(x, torch.zeros(2), one).synchronize()
    assert z.tolist() == [3.0, 3.0] and x.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_autograd_does_not_see_a_landing(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    side, x, master = torch.sim.Stream(), ready(3), torch.nn.Parameter(torch.zeros(3))
    with mode():
        queued(master.detach(), x, side)
        queued(x, torch.full((3,), 2.0), side)
    version = master._version
    torch.sim.synchronize()
    assert master.tolist() == [1.0] * 3 and x.tolist() == [2.0] * 3
    assert master._version == version and master.grad_fn is None


# Races


class Race:
    """Two accesses to `x` on two streams: the first on `there`, the second on `here`."""

    def __init__(self, here: torch.Stream, there: torch.Stream) -> None:
        self.here, self.there, self.x = here, there, ready(2, 3)

    def run(self, first: str, second: str, wait: Callable[[Race, torch.sim.Event], object] | None = None) -> None:
        use = {
            "read": lambda: self.x.sum(),
            "write": lambda: self.x.zero_(),
            "update": lambda: self.x.add_(1),
            "out": lambda: torch.mul(torch.ones(2, 3, device="sim"), 2, out=self.x),
            "upload": lambda: self.x.copy_(torch.ones(2, 3), non_blocking=True),
            "blocking upload": lambda: self.x.copy_(torch.ones(2, 3)),
            "download": lambda: self.x.to("cpu", non_blocking=True),
            "blocking download": lambda: self.x.cpu(),
            "copy": lambda: self.x.copy_(torch.ones(2, 3, device="sim"), non_blocking=True),
            "dropout": lambda: torch.ops.aten.native_dropout(self.x, 0.5, True),
            "resize": lambda: self.x.view(-1).resize_(9),
            "cat": lambda: torch.cat([torch.ones(1, 3, device="sim"), self.x]),
            "foreach": lambda: torch._foreach_mul_([self.x], 2.0),
        }
        with torch.sim.stream(self.there):
            use[first]()
            done = self.there.record_event()
        if wait is not None:
            wait(self, done)
        with torch.sim.stream(self.here):
            use[second]()


READS = ["read", "download", "blocking download", "dropout", "resize", "cat"]
WRITES = ["write", "out", "upload", "blocking upload", "copy"]
UPDATES = ["update", "foreach"]
KINDS = [
    *[("write-after-read", "download", second) for second in (*WRITES, *UPDATES)],
    *[("write-after-read", first, "write") for first in ("read", "dropout", "resize", "cat")],
    *[("write-after-write", "upload", second) for second in WRITES],
    *[("read-after-write", first, "read") for first in ("write", "out", "upload", "copy", "update", "foreach")],
    *[("read-after-write", "upload", second) for second in (*READS, *UPDATES)],
]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("kind", "first", "second"), KINDS)
@pytest.mark.parametrize("here_is_default", [True, False])
def test_races_are_found(kind: str, first: str, second: str, here_is_default: bool, late: bool) -> None:
    here = torch.sim.default_stream() if here_is_default else torch.sim.Stream(name="here")
    race = Race(here, torch.sim.Stream(name="there"))
    with late_copies(late), pytest.raises(RuntimeError) as raised:
        race.run(first, second)
    message = str(raised.value)
    assert message.startswith("aten::") and f"on {here.name}: {kind} race" in message
    assert "on there still" in message and "of shape (" in message and "wait for an event recorded on there" in message


ORDERED: dict[str, Callable[[Race, torch.sim.Event], object]] = {
    "stream": lambda race, done: race.here.wait_event(done),
    "wait_stream": lambda race, done: race.here.wait_stream(race.there),
    "host": lambda race, done: done.synchronize(),
    "device": lambda race, done: torch.sim.synchronize(),
}


@pytest.mark.parametrize("wait", ORDERED)
@pytest.mark.parametrize(("first", "second"), [(first, second) for _, first, second in KINDS])
def test_what_is_ordered_is_no_race(first: str, second: str, wait: str) -> None:
    Race(torch.sim.Stream(), torch.sim.Stream()).run(first, second, ORDERED[wait])


def test_reading_twice_is_no_race() -> None:
    one, two, x = torch.sim.Stream(), torch.sim.Stream(), ready(3)
    queued(torch.zeros(3), x, one)
    with torch.sim.stream(two):
        x.sum()
    x.sum()


@pytest.mark.parametrize("first", [0, 1])
def test_both_readers_must_be_waited_for(first: int) -> None:
    streams, x = [torch.sim.Stream(name="a"), torch.sim.Stream(name="b")], ready(3)
    for stream in streams:
        with torch.sim.stream(stream):
            x.sum()
    torch.sim.default_stream().wait_stream(streams[first])
    with pytest.raises(RuntimeError, match=f"sum on {'ba'[first]} still reads"):
        x.zero_()
    torch.sim.default_stream().wait_stream(streams[1 - first])
    x.zero_()


def test_a_write_is_not_forgotten_for_what_its_own_stream_did_next() -> None:
    side, x = torch.sim.Stream(), ready(6)
    with torch.sim.stream(side):
        x[:4].zero_()
        x.sum()
        x[2:].zero_()
    for part in (x[:2], x[4:]):
        with pytest.raises(RuntimeError, match="read-after-write"):
            part.sum()


def test_waits_are_transitive_and_one_way() -> None:
    one, two, x = torch.sim.Stream(), torch.sim.Stream(), ready(3)
    two.wait_event(queued(x, torch.zeros(3), one))
    torch.sim.default_stream().wait_stream(two)
    x.add_(1)
    with torch.sim.stream(one), pytest.raises(RuntimeError, match="read-after-write"):
        x.sum()


def test_an_event_before_the_operation_is_no_wait_for_it() -> None:
    side, x = torch.sim.Stream(), ready(3)
    before = side.record_event()
    queued(x, torch.zeros(3), side)
    torch.sim.default_stream().wait_event(before)
    with pytest.raises(RuntimeError, match="race"):
        x.sum()


def test_a_blocking_copy_orders_the_host() -> None:
    side, x, y = torch.sim.Stream(), ready(3), ready(3)
    queued(x, torch.zeros(3), side)
    with torch.sim.stream(side):
        y.copy_(torch.ones(3))
    assert x.tolist() == [0.0] * 3
    with torch.sim.stream(side):
        y.copy_(x)  # inside the device, for which the host does not wait
    with pytest.raises(RuntimeError, match="race"):
        y.tolist()


def test_a_query_that_says_done_is_a_wait() -> None:
    side, x = torch.sim.Stream(), ready(3)
    with torch.sim.stream(side):
        x.add_(1)
    assert side.query()
    assert x.tolist() == [2.0] * 3


def test_slots_of_one_arena_do_not_conflict() -> None:
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


def test_two_copies_in_no_order_race_on_host_memory_too() -> None:
    down, up, x, y, h = torch.sim.Stream(), torch.sim.Stream(), ready(3), ready(3), torch.zeros(2, 3)
    queued(h[0], x, down)
    queued(y, h[1], up)
    with pytest.raises(RuntimeError, match="read-after-write race.*on the host"):
        queued(y, h[0], up)
    with pytest.raises(RuntimeError, match="write-after-write race.*on the host"):
        h[0].copy_(x)
    with pytest.raises(RuntimeError, match="write-after-read race.*on the host"):
        queued(h[1], x, down)


@pytest.mark.parametrize("late", [True, False])
def test_the_host_may_not_write_to_what_is_being_uploaded(late: bool) -> None:
    side, x, h = torch.sim.Stream(), ready(2), torch.zeros(2, 2)
    with late_copies(late):
        done = queued(x, h[0], side)
        torch.sim.default_stream().wait_event(done)
        h[1].fill_(3)  # beside it
        done.synchronize()
        h[0].fill_(2)
        again = queued(x, h[0], side)
        torch.sim.default_stream().wait_event(again)
        h[0, 1] = 7
        with pytest.raises(RuntimeError, match=r"the host wrote into a tensor of shape \(2,\).*write-after-read"):
            again.synchronize()


def test_new_memory_belongs_to_the_stream_it_was_made_on() -> None:
    side = torch.sim.Stream()
    slot = torch.empty(3, device="sim")  # may have been freed a moment ago, with kernels that still read it
    with pytest.raises(RuntimeError, match="write-after-write race.* the allocation on the default stream"):
        queued(slot, torch.zeros(3), side)
    side.wait_stream(torch.sim.default_stream())
    queued(slot, torch.zeros(3), side)


def test_results_from_before_the_first_stream_must_be_waited_for() -> None:
    script = """
import torch
from hf_l2l.testing import enable_simulated_accelerator
enable_simulated_accelerator()
torch.sim.synchronize()
x = torch.ones(3, device="sim") * 2
h = torch.ones(3).to("sim", non_blocking=True).cpu()
side = torch.sim.Stream()
try:
    with torch.sim.stream(side):
        x.sum()
except RuntimeError as error:
    print(error)
side.wait_stream(torch.sim.default_stream())
with torch.sim.stream(side):
    print(x.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "an operation before the first stream was made on the default stream still writes" in done.stdout
    assert done.stdout.endswith("6.0\n")


# Freed memory


def test_a_queued_copy_finds_poison_where_its_source_was_freed() -> None:
    side, x, h = torch.sim.Stream(), ready(100), torch.zeros(100)
    held = torch.sim.memory_allocated()
    queued(h, x, side)
    del x
    assert torch.sim.memory_allocated() == held - 400
    with pytest.raises(RuntimeError, match="freed before it landed.*record_stream"):
        side.synchronize()
    side.synchronize()
    assert is_poison(h)


def test_a_queued_copy_finds_its_target_freed() -> None:
    side, x = torch.sim.Stream(), ready(100)
    queued(x, torch.zeros(100), side)
    view = x[3:]
    del x
    gc.collect()
    assert not side.query()
    del view
    with pytest.raises(RuntimeError, match="freed before it landed"):
        torch.sim.synchronize()


def test_record_stream_keeps_memory_until_the_stream_is_done() -> None:
    side, other, x, y, h = torch.sim.Stream(), torch.sim.Stream(), ready(100), ready(1), torch.zeros(100)
    held = torch.sim.memory_allocated()
    queued(h, x, side)
    x.record_stream(side)
    del x
    later = queued(y, torch.zeros(1), side)
    assert torch.sim.memory_allocated() == held
    other.synchronize()
    assert torch.sim.memory_allocated() == held
    side.synchronize()
    assert torch.sim.memory_allocated() == held - 400 and h.tolist() == [1.0] * 100 and later.query()


def test_record_stream_is_for_one_stream_and_for_what_is_queued_when_freed() -> None:
    side, other, x, y, h = torch.sim.Stream(), torch.sim.Stream(), ready(100), ready(2), torch.zeros(100)
    held = torch.sim.memory_allocated()
    queued(h, x, side)
    x.record_stream(other)
    del x
    assert torch.sim.memory_allocated() == held - 400
    with pytest.raises(RuntimeError, match="freed"):
        side.synchronize()
    z = ready(100)
    z.record_stream(side)
    first = queued(y[:1], torch.zeros(1), side)
    del z
    queued(y[1:], torch.zeros(1), side)
    assert torch.sim.memory_allocated() == held
    first.synchronize()
    assert torch.sim.memory_allocated() == held - 400, "the later copy is not waited for"


def test_memory_made_on_a_stream_is_safe_there_without_record_stream() -> None:
    side, x = torch.sim.Stream(), ready(50, value=3.0)
    with torch.sim.stream(side):
        h = torch.zeros(50).copy_(x * 2, non_blocking=True)
    gc.collect()
    side.synchronize()
    assert h.tolist() == [6.0] * 50


@pytest.mark.parametrize("how", ["forgotten", "record_stream", "wait", "host"])
def test_memory_is_not_handed_out_again_while_another_stream_uses_it(how: str) -> None:
    side, default = torch.sim.Stream(name="uploads"), torch.sim.default_stream()

    def upload() -> torch.Tensor:
        with torch.sim.stream(side):
            return torch.ones(5).to("sim", non_blocking=True)

    x = upload()
    default.wait_stream(side)
    x.sum()
    if how == "record_stream":
        x.record_stream(default)
    del x
    if how == "wait":
        side.wait_stream(default)
    elif how == "host":
        default.synchronize()
    found = pytest.raises(RuntimeError, match="on uploads may be given memory.* aten::sum on the default stream still")
    with found if how == "forgotten" else contextlib.nullcontext():
        upload()


def test_landed_copies_keep_nothing() -> None:
    side, x, h = torch.sim.Stream(), ready(10), torch.zeros(10)
    held = torch.sim.memory_allocated()
    storage = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
    queued(x, h, side).synchronize()
    del h
    assert storage.expired()
    del x
    assert torch.sim.memory_allocated() == held - 40
    assert not copies_under_way()


# A pipeline: host -> staging -> slot -> result -> host, two of each

LAYERS, WIDTH = 20, 6
STEPS = ("memory", "staging", "slot", "uploaded", "result", "computed", "downloaded", "memory of results")


def weights() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(LAYERS)]


def serial() -> list[torch.Tensor]:
    x, results = torch.ones(WIDTH, WIDTH), []
    for w in weights():
        x = (x @ w).tanh()
        results.append(x)
    return results


def pipelined(without: str = "") -> list[torch.Tensor]:
    """Return the results of all layers, double-buffered; `without` is a step that forgets to wait."""
    up, down, main = torch.sim.Stream(name="up"), torch.sim.Stream(name="down"), torch.sim.current_stream()
    staging, home = torch.empty(2, WIDTH, WIDTH), torch.empty(2, WIDTH, WIDTH)
    slots, out = torch.empty(2, WIDTH, WIDTH, device="sim"), torch.empty(2, WIDTH, WIDTH, device="sim")
    uploaded, computed, downloaded = ([torch.sim.Event() for _ in range(2)] for _ in range(3))
    x, results = torch.ones(WIDTH, WIDTH, device="sim"), []

    def does(step: str) -> bool:
        return step != without

    if does("memory"):
        up.wait_stream(main)
    for i, w in enumerate(weights()):
        k = i % 2
        if does("staging"):
            uploaded[k].synchronize()
        staging[k].copy_(w)
        if does("slot"):
            up.wait_event(computed[k])
        with torch.sim.stream(up):
            slots[k].copy_(staging[k], non_blocking=True)
            uploaded[k].record()
        if does("uploaded"):
            main.wait_event(uploaded[k])
        if does("result"):
            main.wait_event(downloaded[k])
        torch.tanh(torch.mm(x, slots[k]), out=out[k])
        x = out[k].clone()
        computed[k].record()
        if does("computed"):
            down.wait_event(computed[k])
        if i >= 2:
            if does("downloaded"):
                downloaded[k].synchronize()
            results.append(home[k].clone())
        with torch.sim.stream(down):
            home[k].copy_(out[k], non_blocking=True)
            downloaded[k].record()
    if does("memory of results"):
        down.synchronize()
    return [*results, *(home[i % 2].clone() for i in (LAYERS - 2, LAYERS - 1))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def landings() -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
    yield "late", late_copies(True)
    yield "early", late_copies(False)
    for seed in range(50):
        yield f"random {seed}", random_landing(seed)


def test_a_right_pipeline_gives_the_serial_results_whenever_copies_land() -> None:
    want = serial()
    for name, landing in landings():
        with landing:
            assert same(pipelined(), want), name
            torch.sim.synchronize()


@pytest.mark.parametrize("step", STEPS)
def test_every_wait_of_the_pipeline_is_missed(step: str) -> None:
    try:
        got = pipelined(without=step)
        torch.sim.synchronize()
    except RuntimeError as error:
        assert "race" in str(error) or "freed before it landed" in str(error)
    else:
        assert not same(got, serial()), "the wait is found missing by no error and no wrong value"


@pytest.mark.parametrize("step", ["memory", "slot", "uploaded", "result", "computed"])
def test_a_missing_wait_between_streams_is_found_though_copies_land_early(step: str) -> None:
    with late_copies(False), pytest.raises(RuntimeError, match="race"):
        pipelined(without=step)


def test_random_landing_depends_on_its_seed_only() -> None:
    def landed(seed: int) -> list[bool]:
        side, x, done = torch.sim.Stream(), ready(16), []
        with random_landing(seed):
            for i in range(16):
                queued(x[i], torch.zeros(()), side)
                done.append(not copies_under_way(side))
        side.synchronize()
        return done

    first = landed(1)
    assert landed(1) == first != landed(2) and len(set(first)) == 2
    x = ready(4)
    with random_landing(0), late_copies(False):
        assert queued(x, torch.zeros(4), torch.sim.Stream()).query()
    queued(x, torch.zeros(4), side := torch.sim.Stream())
    assert not side.query(), "the switches end with their blocks"


# Threads


class Offloaded(torch.autograd.Function):
    """Doubles; its backward uploads the factor on a side stream, and waits for it or not."""

    waits, side, seen = True, None, None

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        Offloaded.seen = (threading.get_ident(), torch.sim.current_stream())
        with torch.sim.stream(Offloaded.side):
            factor = torch.full((3,), 2.0).to("sim", non_blocking=True)
        if Offloaded.waits:
            torch.sim.current_stream().wait_stream(Offloaded.side)
        return grad * factor


@pytest.mark.parametrize("waits", [True, False])
def test_backwards_thread_has_the_default_stream_and_finds_races(waits: bool) -> None:
    Offloaded.waits, Offloaded.side = waits, torch.sim.Stream(name="uploads")
    x = torch.ones(3, device="sim", requires_grad=True)
    loss = Offloaded.apply(x).sum()
    torch.sim.synchronize()
    with contextlib.nullcontext() if waits else pytest.raises(RuntimeError, match="copy_ on uploads still writes"):
        loss.backward()
    assert Offloaded.seen[0] != threading.get_ident() and Offloaded.seen[1] == torch.sim.default_stream()
    assert not waits or x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("waits", [True, False])
def test_two_python_threads(waits: bool) -> None:
    slots, events, free = ready(2, 50), queue.Queue(), queue.Queue()
    side, sums = torch.sim.Stream(name="uploads"), []

    def upload() -> None:
        torch.sim.set_stream(side)
        for i in range(40):
            if i >= 2:
                side.wait_event(free.get(timeout=20))
            slots[i % 2].copy_(torch.full((50,), float(i)), non_blocking=True)
            events.put(side.record_event())

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        for i in range(40):
            done = events.get(timeout=20)
            if waits:
                torch.sim.current_stream().wait_event(done)
            sums.append(slots[i % 2].sum())
            free.put(torch.sim.current_stream().record_event())
    except RuntimeError as error:
        assert not waits and "copy_ on uploads still writes" in str(error)
        for _ in range(40):
            free.put(torch.sim.current_stream().record_event())
        thread.join()
        return
    thread.join()
    assert waits and [s.item() for s in sums] == [50.0 * i for i in range(40)]


# Any program: a race, or the result of running it in order

DEVICE_BUFFERS, HOST_BUFFERS, STREAMS, EVENTS = 3, 2, 3, 3
BUFFERS = DEVICE_BUFFERS + HOST_BUFFERS
_streams, _events = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1)
_device = st.integers(0, DEVICE_BUFFERS - 1)
OPERATION = st.one_of(
    st.tuples(st.just("add"), _streams, _device, _device),
    st.tuples(st.just("double"), _streams, _device),
    st.tuples(
        st.just("copy"), _streams, st.integers(0, BUFFERS - 1), st.integers(0, BUFFERS - 1), st.sampled_from([1, 1, 0])
    ),
    st.tuples(st.just("record"), _streams, _events),
    st.tuples(st.just("wait"), _streams, _events),
    st.tuples(st.just("wait_stream"), _streams, _streams),
    st.tuples(st.just("synchronize"), _events),
    st.tuples(st.just("host"), st.integers(DEVICE_BUFFERS, BUFFERS - 1)),
)


def is_copy_outside(op: tuple) -> bool:
    """Copies from host to host, and from a buffer to itself, are left out."""
    return op[0] == "copy" and (op[2] == op[3] or (op[2] >= DEVICE_BUFFERS and op[3] >= DEVICE_BUFFERS))


STEP = st.tuples(
    OPERATION.filter(lambda op: not is_copy_outside(op)),
    # Whom an operation waits for first. Mostly everybody: else nearly every program has a race near its start.
    st.sampled_from([range(STREAMS)] * 9 + [range(1), range(1, 2), range(0)]),
)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple]:
    program: list[tuple] = []
    for op, waited in draw(st.lists(STEP, max_size=20)):
        if op[0] in ("add", "double", "copy"):
            program += [("wait_stream", op[1], other) for other in waited if other != op[1]]
        program.append(op)
    return program


def accesses(op: tuple) -> tuple[set[int], set[int]]:
    """The buffers that an operation reads and those that it writes."""
    if op[0] == "add":
        return {op[2], op[3]}, {op[2]}
    if op[0] == "double":
        return {op[2]}, {op[2]}
    return ({op[3]}, {op[2]}) if op[0] == "copy" else (set(), set())


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
            for j in set(range(i)) - before:
                others_reads, others_writes = accesses(program[j])
                if writes & (others_reads | others_writes) or reads & others_writes:
                    return True
            after[op[1]] = before | {i}
            if op[0] == "copy" and not op[4] and (op[2] >= DEVICE_BUFFERS or op[3] >= DEVICE_BUFFERS):
                host |= after[op[1]]
    return False


def run_program(program: list[tuple], device: str) -> list[list[float]]:
    on_sim = device == "sim"
    buffers = [torch.full((2,), i + 1.0, device=device if i < DEVICE_BUFFERS else "cpu") for i in range(BUFFERS)]
    if on_sim:
        streams = [torch.sim.default_stream(), *(torch.sim.Stream() for _ in range(STREAMS - 1))]
        events = [torch.sim.Event() for _ in range(EVENTS)]
        torch.sim.synchronize()
    for op in program:
        with torch.sim.stream(streams[op[1]]) if on_sim and op[0] in ("add", "double", "copy") else torch.no_grad():
            if op[0] == "add":
                buffers[op[2]].add_(buffers[op[3]])
            elif op[0] == "double":
                buffers[op[2]].mul_(2)
            elif op[0] == "copy":
                buffers[op[2]].copy_(buffers[op[3]], non_blocking=bool(op[4]))
            elif on_sim and op[0] == "record":
                events[op[2]].record(streams[op[1]])
            elif on_sim and op[0] == "wait":
                streams[op[1]].wait_event(events[op[2]])
            elif on_sim and op[0] == "wait_stream":
                streams[op[1]].wait_stream(streams[op[2]])
            elif on_sim and op[0] == "synchronize":
                events[op[1]].synchronize()
            elif op[0] == "host":
                if on_sim:
                    torch.sim.synchronize()
                buffers[op[1]].add_(0.5)
    if on_sim:
        torch.sim.synchronize()
    return [b.tolist() for b in buffers]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(program=programs(), seed=st.integers(0, 1000))
def test_a_program_races_or_gives_the_results_of_its_order(program: list[tuple], seed: int) -> None:
    races, want = has_race(program), run_program(program, "cpu")
    for landing in (late_copies(True), late_copies(False), random_landing(seed)):
        with landing:
            try:
                got = run_program(program, "sim")
            except RuntimeError as error:
                assert races and "race" in str(error)
                torch.sim.synchronize()
            else:
                assert not races and got == want
