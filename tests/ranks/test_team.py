"""Ranks meet and share memory: who may take part, what the memory is, and that nothing of it is left."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from torch import distributed

from connected_ranks import at_once, connected
from hf_l2l import RankFailedError, detach_l2l
from hf_l2l.ranks import meeting, shared_pages
from hf_l2l.ranks import team as teams
from hf_l2l.ranks.peers import Peers
from hf_l2l.ranks.shared_pages import SharedPages, new_file
from hf_l2l.ranks.team import Team
from left_over import own_threads, shared_memory
from models import batch_for
from rank_cases import Ranked, mapped, state_digest
from tiers import times

SIZE = 3 * mmap.PAGESIZE


def opened() -> list[str]:
    """The open descriptors of such memory, and of sockets."""
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    found = [os.readlink(file) for file in files if os.path.lexists(file)]
    return [each for each in found if each.startswith(("/memfd:hf_l2l", "socket:"))]


def test_the_memory_is_of_its_user_alone_and_its_size_is_sealed():
    """Whoever has the descriptor: reading memory that was made smaller would end the process. It has no name."""
    before = shared_memory()
    descriptor = new_file(SIZE)
    try:
        found = os.fstat(descriptor)
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o600, os.getuid(), 0)
        assert not os.get_inheritable(descriptor) and shared_memory() == before
        for size in (0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        assert os.fstat(descriptor).st_size == SIZE
        with pytest.raises(PermissionError):  # the seals cannot be changed either
            shared_pages.fcntl.fcntl(descriptor, shared_pages.fcntl.F_ADD_SEALS, shared_pages.fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


def test_pages_outlive_their_descriptor_and_are_unmapped_with_the_last_tensor():
    descriptor = new_file(SIZE)
    pages = SharedPages(descriptor, SIZE)
    os.close(descriptor)
    there = mapped()
    tensor = pages.bytes_at(8, 16)
    assert not tensor.any()
    tensor.fill_(7)
    assert pages[7:25] == b"\0" + 16 * b"\7" + b"\0"
    del pages
    assert mapped() == there
    del tensor
    assert mapped() == there - 1


def unsealed(num_bytes: int) -> int:
    descriptor = os.memfd_create("hf_l2l test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


@contextmanager
def teams_of(count: int, timeout_s: float = 60.0) -> Iterator[list[Team]]:
    """Teams that have met, without a process group."""
    messages, of_all = connected(count), connected(count)
    files = {0: of_all[0], **{rank: {0: of_all[rank][0]} for rank in range(1, count)}}
    for a, b in itertools.permutations(range(1, count), 2):
        of_all[a][b].close()
    teams = [Team(Peers(r, messages[r], timeout_s, files[r].values()), files[r]) for r in range(count)]
    try:
        yield teams
    finally:
        for each in teams:
            each.close()


def test_a_team_shares_memory_and_leaves_nothing():
    """Texts are told whole, those that are longer than a message, too."""
    before, count = (opened(), mapped()), 3
    with teams_of(count) as ranks:
        pages = at_once(*(lambda each=each: each.share(100, "a test") for each in ranks))
        pages[count - 1].bytes_at(0, 100).fill_(3)
        assert all(each.bytes_at(0, 100).eq(3).all() for each in pages)
        for _ in range(2):
            for each in ranks:
                each.counts += each.rank + 1
            at_once(*(lambda each=each: each.come_to_step("test", 0) for each in ranks))
        assert [(each.counts, each.counted) for each in ranks] == [(0, count * (count + 1))] * count
        texts = ["a" * 100_000, "\N{SNOWMAN}" * 100_000, "-"]
        told = at_once(*(lambda each=each: each.tell(texts[each.rank], "test") for each in ranks))
        assert told == [texts] * count
    del pages
    assert (opened(), mapped()) == before


def test_other_arguments_are_refused_in_all_ranks():
    with teams_of(3) as ranks:
        found = at_once(*(lambda each=each: each.share(100 + each.rank // 2, "a test") for each in ranks))
    for error in found:
        assert "must attach the same model" in str(error)
        assert "100 bytes for a test" in str(error) and "101 bytes for a test" in str(error)


@pytest.mark.parametrize("made", [unsealed, lambda size: new_file(size - mmap.PAGESIZE)])
def test_memory_that_could_get_smaller_is_refused(monkeypatch, made):
    """In the rank that gets it."""
    monkeypatch.setattr(teams, "new_file", made)
    with teams_of(2) as ranks:
        before = opened()
        found = at_once(*(lambda each=each: each.share(SIZE, "a test") for each in ranks))
        assert "shared memory must be sealed and have the size that was agreed on" in str(found[1])
        assert isinstance(found[1], ValueError) and opened() == before


def test_a_rank_that_fails_before_it_has_sent_memory_is_not_waited_for(monkeypatch):
    """Also if its connection for descriptors stays open."""
    with teams_of(2, timeout_s=2.0) as ranks:

        def fails(num_bytes: int) -> int:
            ranks[0].peers.tell_failure("it has no memory left")
            raise ValueError("no memory")

        monkeypatch.setattr(teams, "new_file", fails)
        found = at_once(*(lambda each=each: each.share(100, "a test") for each in ranks))
    assert isinstance(found[1], RankFailedError) and "rank 0 has failed: it has no memory left" in str(found[1])


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as server:
        server.settimeout(30)
        server.bind(address)
        server.listen(4)
        yield server


def test_processes_of_other_users_are_left_out():
    """A child of root that has become another user connects, as any process can that knows the address."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    address = f"\0hf_l2l-test-{os.getpid()}"
    with ExitStack() as stack, listening(address) as server:
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            other.connect(address)
            os._exit(other.recv(1) != b"")
        assert select.select([server], [], [], 30)[0]
        for kind in (0, 1):  # those of rank 1 come after it
            to = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            to.connect(address)
            to.send(struct.pack("<I", 2 + kind))
        messages, files = meeting.connected(0, [0, 1], [address[1:]] * 2, server, stack, 30.0)
        assert set(messages) == set(files) == {1}
        for to in (messages[1], files[1]):
            assert struct.unpack("3i", to.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid()
        assert os.waitpid(child, 0)[1] == 0  # its connection has been closed


def test_a_rank_of_another_user_is_told(monkeypatch):
    address = f"\0hf_l2l-test-{os.getpid()}"
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    said = f"one user .got .* of user {user}, and this one is of {user + 1}"
    with listening(address) as server, ExitStack() as at_errors, pytest.raises(RuntimeError, match=said):
        meeting.connected(1, [0, 1], [address[1:]] * 2, server, at_errors, 30.0)


# ---- processes


def nothing() -> dict[str, Any]:
    """What this process has now."""
    gc.collect()
    return {"files": sorted(each[:6] for each in opened()), "maps": mapped(), "threads": len(own_threads())}


def attached_again_and_again(count: int) -> list[dict[str, Any]]:
    found = [nothing()]
    for _ in range(count):
        run = Ranked(eps_update="deferred")
        run.steps([0])
        assert mapped() > 3
        run.ended()
        del run
        found.append(nothing())
    return [*found[:2], found[-1]]


def test_attaching_again_and_again_leaves_nothing(pool):
    for before, once, often in pool(2).run(attached_again_and_again, times(3, 20)):
        assert len(often["files"]) <= len(once["files"])  # gloo closes some of its sockets later
        assert "/memfd" not in often["files"]
        # A thread of the test before may have ended meanwhile.
        assert often["maps"] == 0 and often["threads"] <= before["threads"]


def still_mapped() -> dict[str, Any]:
    """After a detach, while model and optimizer, with its state, are in use."""
    run = Ranked(eps_update="deferred")
    run.steps(range(2))
    run.backward(2)
    detach_l2l(run.model)
    del run.eps
    found, before = nothing(), run.gradients()
    if run.rank == 0:
        run.model(**batch_for(run.model, seed=1)).loss.backward()
        run.optimizer.step()
    distributed.barrier()
    state = run.optimizer.state_dict()["state"]
    steps = {int(each["step"]) for each in state.values()}
    return {**found, "grad": (before, run.gradients()), "steps": steps, "state": state_digest(state)}


def test_a_detached_model_has_memory_of_its_own(pool):
    """And so has its optimizer: what one rank does to it does not reach the others."""
    first, second = pool(2).run(still_mapped)
    assert [(each["maps"], each["threads"]) for each in (first, second)] == [(0, 0)] * 2
    assert first["steps"] == {3} and second["steps"] == {2}
    assert first["state"] != second["state"]
    assert first["grad"][0] == second["grad"][0] == second["grad"][1] != first["grad"][1]


def seconds_to_leave() -> float:
    """How long an orderly end takes."""
    run = Ranked(rank_timeout=60.0)
    distributed.barrier()
    began = time.monotonic()
    detach_l2l(run.model)
    return time.monotonic() - began


def test_leaving_does_not_wait_for_a_heartbeat(pool):
    """Which come every 6 seconds here: the thread that receives is woken."""
    assert max(pool(2).run(seconds_to_leave)) < 3
