"""The window: what is in memory, what leaves, what is read ahead, and that its bytes are bounded."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_l2l.state_tier.files import Segment
from hf_l2l.state_tier.window import Order, Window


@dataclass(eq=False)
class Piece:
    num_bytes: int
    name: str = ""


@dataclass
class SlowDisk:
    """Transfers are over when they are waited for."""

    log: list[tuple[str, str]] = field(default_factory=list)

    def read(self, piece: Piece) -> Waited:
        self.log.append(("read", piece.name))
        return Waited()

    def leave(self, piece: Piece, *, is_changed: bool) -> Waited:
        self.log.append(("write" if is_changed else "free", piece.name))
        return Waited()


class Waited:
    def __init__(self) -> None:
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def result(self) -> None:
        self.is_over = True


def made(limit: int, reserve: int) -> tuple[Window, SlowDisk]:
    disk = SlowDisk()
    window = Window(disk)
    window.resize(limit, reserve)
    return window, disk


def test_what_was_used_longest_ago_leaves_and_only_what_has_changed_is_written():
    window, disk = made(limit=3, reserve=1)
    a, b, c = (Piece(1, name) for name in "abc")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    window.use([a])
    window.use([c])
    window.use([b])
    assert disk.log == [("read", "b"), ("free", "b"), ("read", "c"), ("write", "a"), ("read", "b")]
    assert (window.bytes_read, window.bytes_written) == (3, 1)


def test_what_is_being_written_is_read_again_only_when_it_has_been():
    window, disk = made(limit=2, reserve=1)
    a, b = Piece(1, "a"), Piece(1, "b")
    window.use([a], changes=True, is_new=True)
    window.use([b])
    leaving = window._leaving[a]
    window.read_ahead([a], [b])
    assert not leaving.is_over and ("read", "a") not in disk.log  # a hint waits for nothing
    window.use([a])
    assert leaving.is_over and disk.log[-1] == ("read", "a")


USES = st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=60)


@given(USES, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(2, 4))
def test_the_bytes_are_bounded(uses, sizes, layers):
    """By the limit, or by what is used alone; and what is used is there."""
    largest = max(sizes)
    window, _ = made(layers * largest, largest)
    pieces = [Piece(size) for size in sizes]
    for number, ahead, changes in uses:
        if ahead:
            window.read_ahead([pieces[number]], [])
        else:
            window.use([pieces[number]], changes=changes)
            assert pieces[number] in window._here
        assert window.num_bytes() <= window.limit
    assert window.peak <= window.limit


def test_a_failed_disk_is_told_to_who_uses_the_window():
    window, disk = made(limit=2, reserve=1)
    failed: Future[None] = Future()
    failed.set_exception(OSError(5, "Input/output error"))
    disk.leave = lambda piece, is_changed: failed
    window.use([Piece(1)], changes=True, is_new=True)
    with pytest.raises(OSError, match="Input/output error"):
        for _ in range(2):
            window.use([Piece(1)], is_new=True)


def test_threads_that_use_more_than_the_window_holds_go_on(tmp_path):
    from hf_l2l.state_tier.disk import Disk

    disk = Disk()
    window = Window(disk)
    window.resize(2 * 4096, 4096)
    segments = [Segment(str(tmp_path), 4096) for _ in range(6)]

    def use(first: int) -> None:
        for number in range(40):
            window.use([segments[(first + number) % 6]], changes=number % 2 == 0)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert window.peak <= 2 * 4096
    disk.close()


def test_an_order_tells_what_followed_the_last_time():
    """Also where a sweep turns round, and a layer has another one after it."""
    order: Order[str] = Order()
    step = "shabcdhdcba"
    assert [order.next_after(each) for each in step].count(None) == len(step)
    again = [order.next_after(each) for each in step]
    assert again[2:] == [*step[3:], "s"] or again[2:-1] == list(step[3:])


def test_two_updates_do_not_hold_more_than_fits():
    """The second one waits for the first."""
    (window, _), order, may_end = made(limit=10, reserve=1), list[str](), threading.Event()

    def hold(name: str, size: int) -> None:
        with window.held([Piece(size, name)]):
            order.append(name)
            assert may_end.wait(timeout=30)
            order.append(f"{name} ended")

    first = threading.Thread(target=hold, args=("large", 7))
    first.start()
    while not order:
        pass
    second = threading.Thread(target=hold, args=("other", 6))
    second.start()
    second.join(timeout=0.2)
    assert order == ["large"]
    may_end.set()
    first.join()
    second.join()
    assert order == ["large", "large ended", "other", "other ended"] and window.peak <= 10
