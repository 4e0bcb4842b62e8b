"""Ranks meet and share memory: who may take part, what the memory is, and that nothing of it is left."""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
import stat
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.ranks import meeting, shared_pages
from hf_l2l.ranks import team as teams
from hf_l2l.ranks.peers import Peers, RankFailedError
from hf_l2l.ranks.shared_pages import SharedPages, check_file, new_file
from hf_l2l.ranks.team import Team
from left_over import own_threads, shared_memory
from models import batch_for, bert
from rank_pool import digest

SIZE = 3 * mmap.PAGESIZE


def mapped() -> int:
    """Maps of this process of memory that ranks share."""
    return Path("/proc/self/maps").read_text().count("memfd:hf_l2l")


def opened() -> list[str]:
    """The open descriptors of such memory, and of sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [each for each in found if each.startswith(("/memfd:hf_l2l", "socket:"))]


# ---- the memory


def test_the_size_of_the_memory_is_sealed():
    """Whoever has the descriptor: reading memory that was made smaller would end the process."""
    descriptor = new_file(SIZE)
    try:
        for size in (0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        assert os.fstat(descriptor).st_size == SIZE
        with pytest.raises(PermissionError):  # the seals cannot be changed either
            shared_pages.fcntl.fcntl(descriptor, shared_pages.fcntl.F_ADD_SEALS, shared_pages.fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


def test_the_memory_is_of_its_user_alone_and_has_no_name():
    before = shared_memory()
    descriptor = new_file(SIZE)
    try:
        found = os.fstat(descriptor)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert (found.st_uid, found.st_nlink) == (os.getuid(), 0)
        assert not os.get_inheritable(descriptor)
        assert shared_memory() == before
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


@pytest.mark.parametrize("made", [lambda: unsealed(SIZE), lambda: new_file(SIZE - mmap.PAGESIZE)])
def test_memory_that_could_get_smaller_is_refused(made):
    descriptor = made()
    try:
        with pytest.raises(ValueError, match="shared memory must be sealed and have the size that was agreed on"):
            check_file(descriptor, SIZE)
    finally:
        os.close(descriptor)


# ---- a team in threads of this process


def teams_of(count: int, timeout_s: float = 60.0) -> list[Team]:
    """Teams that have met, without a process group."""
    messages: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(count)}
    files: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(count)}
    for a in range(count):
        for b in range(a + 1, count):
            messages[a][b], messages[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if a == 0:
                files[a][b], files[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [Team(Peers(r, messages[r], timeout_s, files[r].values()), files[r]) for r in range(count)]


def at_once(calls: list[Any]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except (RuntimeError, ValueError) as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_a_team_shares_memory_and_leaves_nothing(count):
    before = opened(), mapped()
    with ExitStack() as stack:
        ranks = [stack.enter_context(closing(each)) for each in teams_of(count)]
        pages = at_once([lambda each=each: each.share(100, "a test") for each in ranks])
        pages[count - 1].bytes_at(0, 100).fill_(3)
        assert all(each.bytes_at(0, 100).eq(3).all() for each in pages)
        for _ in range(2):
            for each in ranks:
                each.counts += each.rank + 1
            at_once([lambda each=each: each.come_to_step("test", 0) for each in ranks])
        assert [(each.counts, each.counted) for each in ranks] == [(0, count * (count + 1))] * count
    del pages
    assert (opened(), mapped()) == before


@pytest.mark.parametrize("length", [0, 1, 2**14, 100_000])
def test_texts_of_any_length_are_told_whole(length):
    teams = teams_of(3)
    try:
        for texts in (["x" * length, "", "short"], ["a" * length, "\N{SNOWMAN}" * length, "-"]):
            told = at_once(
                [lambda team=team, text=text: team.tell(text, "test") for team, text in zip(teams, texts, strict=True)]
            )
            assert told == [texts] * 3
    finally:
        for each in teams:
            each.close()


def test_other_arguments_are_refused_in_all_ranks():
    ranks = teams_of(3)
    try:
        found = at_once([lambda each=each: each.share(100 + each.rank // 2, "a test") for each in ranks])
    finally:
        for each in ranks:
            each.close()
    for error in found:
        assert str(error).startswith("all ranks must attach the same model with the same options (got 10")
        assert "100 bytes for a test" in str(error) and "101 bytes for a test on rank" in str(error).replace(
            "101 bytes for a test, ", "101 bytes for a test on rank"
        )


def test_memory_that_another_rank_sends_unsealed_is_refused(monkeypatch):
    ranks = teams_of(2)
    monkeypatch.setattr(teams, "new_file", unsealed)
    before = opened()
    try:
        found = at_once([lambda each=each: each.share(100, "a test") for each in ranks])
        assert isinstance(found[1], ValueError) and "shared memory must be sealed" in str(found[1])
        assert opened() == before
    finally:
        for each in ranks:
            each.close()


def test_a_rank_that_fails_before_it_has_sent_memory_is_not_waited_for(monkeypatch):
    """Also if its connection for descriptors stays open."""
    ranks = teams_of(2, timeout_s=2.0)

    def fails(num_bytes: int) -> int:
        ranks[0].peers.tell_failure("it has no memory left")
        raise ValueError("no memory")

    monkeypatch.setattr(teams, "new_file", fails)
    try:
        found = at_once([lambda each=each: each.share(100, "a test") for each in ranks])
    finally:
        for each in ranks:
            each.close()
    assert isinstance(found[1], RankFailedError) and "rank 0 has failed: it has no memory left" in str(found[1])


# ---- who is at the other end


def test_processes_of_other_users_are_left_out():
    """A child of root that has become another user connects, as any process can that knows the address."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    address = f"\0hf_l2l-test-{os.getpid()}"
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
        server.settimeout(30)
        server.bind(address)
        server.listen(4)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            other.connect(address)
            os._exit(other.recv(1) != b"")
        while not select.select([server], [], [], 30)[0]:
            pass
        for kind in (0, 1):  # those of rank 1 come after it
            to = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            to.connect(address)
            to.send(meeting._NUMBER.pack(2 + kind))
        messages, files = meeting.connected(0, [0, 1], [address[1:]] * 2, server, stack, 30.0)
        assert set(messages) == set(files) == {1}
        assert meeting._user_of(messages[1]) == meeting._user_of(files[1]) == os.getuid()
        assert os.waitpid(child, 0)[1] == 0  # its connection has been closed


def alone_at_the_meeting() -> str:
    """The second rank never attaches the model."""
    if distributed.get_rank() == 1:
        return "elsewhere"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "MEETS_WITHIN_S", 0.5)
        with pytest.raises(RuntimeError) as error:
            attach_l2l(bert(), L2LConfig())
    return str(error.value)


def test_a_rank_that_does_not_come_is_told(pool):
    first, second = pool(2).run(alone_at_the_meeting)
    assert "all ranks attach the model within 0.5 seconds" in first and second == "elsewhere"


def test_a_rank_of_another_user_is_told(monkeypatch):
    address = f"\0hf_l2l-test-{os.getpid()}"
    monkeypatch.setattr(meeting, "_user_of", lambda to: 65534)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as server:
        server.bind(address)
        server.listen(1)
        with (
            ExitStack() as at_errors,
            pytest.raises(RuntimeError, match="must belong to one user .got a process of user 65534, and this one"),
        ):
            meeting.connected(1, [0, 1], [address[1:]] * 2, server, at_errors, 30.0)


# ---- processes


def nothing() -> dict[str, Any]:
    """What this process has now."""
    gc.collect()
    return {"files": sorted(each[:6] for each in opened()), "maps": mapped(), "threads": len(own_threads())}


def attached_again_and_again(times: int) -> list[dict[str, Any]]:
    found = [nothing()]
    for number in range(times):
        model = bert()
        eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
        model(**batch_for(model, seed=distributed.get_rank())).loss.backward()
        optimizer.step()
        assert mapped() > 3
        detach_l2l(model)
        del model, eps, optimizer
        if number in (0, times - 1):
            found.append(nothing())
    return found


@pytest.mark.parametrize(
    ("sim", "times"),
    [(True, 3), pytest.param(False, 20, marks=pytest.mark.slow), pytest.param(True, 20, marks=pytest.mark.slow)],
)
def test_attaching_again_and_again_leaves_nothing(pool, sim, times):
    for before, once, often in pool(2, sim=sim).run(attached_again_and_again, times):
        assert len(often["files"]) <= len(once["files"])  # gloo closes some of its sockets later
        assert "/memfd" not in often["files"]
        assert (often["maps"], often["threads"]) == (0, before["threads"])


def still_mapped() -> dict[str, Any]:
    """After a detach, while model and optimizer, with its state, are in use."""
    model = bert()
    eps = attach_l2l(model, L2LConfig(eps_update="deferred"))
    optimizer = eps.wrap(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(**batch_for(model)).loss.backward()
        optimizer.step()
    model(**batch_for(model)).loss.backward()
    detach_l2l(model)
    del eps
    gc.collect()
    found = nothing()
    before = digest(*(p.grad for p in model.parameters() if p.grad is not None))
    if distributed.get_rank() == 0:
        model(**batch_for(model, seed=1)).loss.backward()
        optimizer.step()
    distributed.barrier()
    state = optimizer.state_dict()["state"]
    after = digest(*(p.grad for p in model.parameters() if p.grad is not None))
    steps = {int(each["step"]) for each in state.values()}
    return {**found, "grad": (before, after), "steps": steps, "state": digest(*(e["exp_avg"] for e in state.values()))}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_a_detached_model_has_memory_of_its_own(pool, sim):
    """And so has its optimizer: what one rank does to it does not reach the others."""
    first, second = pool(2, sim=sim).run(still_mapped)
    assert [(each["maps"], each["threads"]) for each in (first, second)] == [(0, 0)] * 2
    assert first["steps"] == {3} and second["steps"] == {2}
    assert first["state"] != second["state"]
    assert first["grad"][0] == second["grad"][0] == second["grad"][1] != first["grad"][1]


def attached_with_a_view() -> tuple[str, bool]:
    model = bert()
    weight = model.bert.embeddings.word_embeddings.weight
    model.bert.first_row, before = weight.detach()[0], weight.data_ptr()
    with pytest.raises(ValueError) as error:
        attach_l2l(model, L2LConfig())
    return str(error.value), before == weight.data_ptr()


def test_a_weight_of_which_a_module_keeps_a_view_is_refused(pool):
    """The ranks share the memory of the weight, and the view would have its first values for ever."""
    for text, stayed in pool(2).run(attached_with_a_view):
        assert "got bert.embeddings.word_embeddings.weight, a Parameter whose memory is also that of another" in text
        assert stayed


def attached_otherwise(what: str) -> tuple[str, str, dict[str, Any]]:
    """Rank 1 attaches something else."""
    is_other = distributed.get_rank() == 1
    layers = {"num_hidden_layers": 3} if is_other and what == "model" else {}
    model = bert(**layers)
    if is_other and what == "frozen":
        model.bert.embeddings.requires_grad_(False)
    options: dict[str, Any] = {
        "updates": {"eps_update": "eager"},
        "cmp": {"cmp": "bf16"},
        "nonfinite": {"nonfinite": "skip"},
    }
    given = options.get(what, {}) if is_other else {}
    before = [p.data_ptr() for p in model.parameters()]
    try:
        attach_l2l(model, L2LConfig(**{"eps_update": "deferred", **given}, rank_timeout=5.0))
    except (ValueError, RuntimeError) as error:
        found = type(error).__name__, str(error)
        del error
    else:
        found = "", "nothing was raised"
    assert before == [p.data_ptr() for p in model.parameters()]
    return *found, nothing()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", ["model", "frozen", "updates", "cmp", "nonfinite"])
def test_ranks_that_attach_something_else_are_refused_and_do_not_wait(pool, what):
    named = {"model": "parameters", "frozen": "parameters", "updates": "eps_update"}.get(what, what)
    for rank, (kind, text, left) in enumerate(pool(2).run(attached_otherwise, what)):
        assert kind == "ValueError", text
        assert text.startswith(f"all ranks must attach the same model with the same options (got {named}: "), text
        assert f"on rank {rank}, and " in text and text.endswith("start all of them with the same arguments")
        assert (left["maps"], left["threads"]) == (0, 0)


def out_of_memory_in_attach(place: str) -> tuple[str, dict[str, Any]]:
    """Rank 1 has no memory for what it makes when the model is attached."""
    from hf_l2l.shared_eps import host_memory, server

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError(place)

    owner: Any = {"masters": host_memory.SharedMemory, "updates": server}[place]
    name = {"masters": "_make_copies", "updates": "SharedUpdates"}[place]
    model, before = bert(), getattr(owner, name)
    if distributed.get_rank() == 1:
        setattr(owner, name, fails)
    try:
        attach_l2l(model, L2LConfig(rank_timeout=5.0))
    except (MemoryError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
        del error
    else:
        found = "nothing was raised"
    finally:
        setattr(owner, name, before)
    return found, nothing()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["masters", "updates"])
def test_an_error_of_one_rank_while_it_attaches(pool, place):
    (first, left), (second, left_of_second) = pool(2).run(out_of_memory_in_attach, place)
    assert first.startswith("RankFailedError: rank 1 has failed: its model cannot be attached")
    assert second == f"MemoryError: {place}"
    for each in (left, left_of_second):
        assert (each["maps"], each["threads"]) == (0, 0)


def attached_beside_other_ranks() -> float:
    """Time is for the other test: how long an orderly end takes."""
    model = bert()
    attach_l2l(model, L2LConfig(rank_timeout=60.0))
    distributed.barrier()
    began = time.monotonic()
    detach_l2l(model)
    return time.monotonic() - began


def test_leaving_does_not_wait_for_a_heartbeat(pool):
    """Which come every 6 seconds here: the thread that receives is woken."""
    assert max(pool(2).run(attached_beside_other_ranks)) < 3
