"""Checkpoints that ranks write in the background: each its own values, those of the step at which the saving began."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hf_l2l.checkpoint.background import BackgroundSave
from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.checkpoint.snapshot import Snapshot
from hf_l2l.rank_saves.secured import ALL, WRITTEN, Secured, secured_of, tell_secured
from hf_l2l.shared_eps.server import SharedEagerParamServer
from host_cases import on_hosts
from rank_trainer import REALTIME, SAME, SAVED, failed_generation, trained
from slow_disk import assert_same_checkpoints
from training import left_in

EACH_STEP: dict[str, Any] = {**SAVED, "save_steps": 1}


@contextmanager
def slow_disk(*, until_copied: bool = False) -> Iterator[list[int]]:
    """Inside, checkpoints take some time; with `until_copied`, the first one waits for an update that has to copy a
    layer. Lists the bytes that were copied of each one."""
    take, end = Snapshot._next, BackgroundSave._end
    copied: list[int] = []

    def taken(snapshot: Snapshot) -> Any:
        until = time.monotonic() + (3.0 if until_copied and snapshot._room and not any(copied) else 0.03)
        while time.monotonic() < until and not (snapshot.most_copied_bytes or snapshot._is_stopped):
            time.sleep(0.005)
        return take(snapshot)

    def ended(saving: BackgroundSave) -> None:
        copied.append(saving._snapshot.most_copied_bytes)
        end(saving)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "_next", taken)
        patch.setattr(BackgroundSave, "_end", ended)
        yield copied


def trained_slowly(name: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training whose checkpoints take longer than a step."""
    with slow_disk(until_copied=True) as copied:
        found = trained(name, "l2l", folder, options)
    return {**found, "copied": sum(copied)}


CASES = {
    "2 ranks": (2, 1, "bert", {}),
    "rows": (2, 1, "large", {}),
    "2 hosts": (2, 2, "bert", {}),
    "2 hosts of 2": (4, 2, "bert", {}),
    "serial": (2, 1, "bert", {"eps_update": "serial"}),
    "eager": (2, 1, "bert", {"eps_update": "eager", "max_grad_norm": 0.0}),
    "3 ranks": (3, 1, "llama", {"l2l_moment_dtype": "bf16"}),
    "rows in 16 bits": (3, 1, "large", {"cmp": "bf16"}),
}
QUICK = ("rows", "2 hosts")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_checkpoints_have_the_values_of_their_step(pool, tmp_path, case):
    size, hosts, name, options = CASES[case]
    options = {**EACH_STEP, **options}
    at_once = pool(size).run(on_hosts, hosts, trained, name, "l2l", str(tmp_path / "at once"), options)
    later = {**options, "l2l_async_save": True}
    found = pool(size).run(on_hosts, hosts, trained_slowly, name, str(tmp_path / "later"), later)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    for rank in range(size):
        assert found[rank]["weights"] == at_once[rank]["weights"]
    assert sum(each["copied"] for each in found) > 0, "updates have gone on beside the saving"


@pytest.mark.parametrize(("before", "after"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [pytest.param("1", marks=pytest.mark.slow), "auto"])
def test_ranks_write_generations_beside_the_steps(pool, tmp_path, before, after, every):
    """The newest one alone is there, and another number of ranks goes on from it."""
    now = {**REALTIME, "l2l_realtime_checkpoint": str(tmp_path / "now"), "l2l_realtime_every": every}
    unbroken = {**SAVED, "lr_scheduler_type": "constant", "max_steps": 6}
    whole = pool(before).run(trained, "dropout", "l2l", str(tmp_path / "whole"), unbroken)
    pool(before).run(trained_slowly, "dropout", str(tmp_path / "broken"), {**now, "max_steps": 3})
    (left,) = (tmp_path / "now").glob("checkpoint-*")
    assert left.name in ("checkpoint-2", "checkpoint-3") and (left / MANIFEST).is_file()
    resumed = {**now, "max_steps": 6}
    found = pool(after).run(trained, "dropout", "l2l", str(tmp_path / "broken"), resumed, 70, True)
    assert all(each["step"] == 6 for each in found)
    if before == after:
        for rank in range(before):
            for what in SAME:
                assert found[rank][what] == whole[rank][what], what
    (last,) = (tmp_path / "now").glob("checkpoint-*")
    assert int(last.name.removeprefix("checkpoint-")) > int(left.name.removeprefix("checkpoint-"))


@pytest.mark.parametrize(("errors", "steps"), [("stop", (4, 5)), ("warn", (6,))])
@pytest.mark.parametrize("what", [pytest.param("generators", marks=pytest.mark.slow), "part", "values"])
def test_a_generation_that_one_rank_cannot_write_is_missing_for_all(pool, tmp_path, errors, steps, what):
    """All ranks end with its error, or all go on; the one before is whole, and nothing else is left."""
    options = {**REALTIME, "l2l_realtime_checkpoint": str(tmp_path / "now"), "max_steps": 6}
    options["l2l_realtime_errors"] = errors
    for found in pool(2).run(failed_generation, str(tmp_path / "run"), options, what):
        assert found["step"] in steps
        assert found["left"] == ["checkpoint-3" if errors == "stop" else "checkpoint-6"]
        assert ("No space left on device" in found["error"]) == (errors == "stop")
        assert found["error"].count("fix that") == (errors == "stop"), "one sentence"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", ["1", "auto"])
def test_a_folder_that_rank_0_cannot_look_into_changes_nothing(pool, tmp_path, every):
    """The generation is in its place; all ranks begin the next one after the same step."""
    now = {"l2l_realtime_checkpoint": str(tmp_path / "now"), "l2l_realtime_every": every}
    options = {**REALTIME, **now, "max_steps": 6, "l2l_realtime_errors": "warn"}
    for found in pool(2).run(failed_generation, str(tmp_path / "run"), options, "folder"):
        assert (found["step"], found["error"]) == (6, "")
        assert "checkpoint-6" in found["left"] or every == "auto"


def interrupted(folder: str, options: dict[str, Any]) -> tuple[str, list[str], int]:
    """A training that ends by an error in all ranks while a checkpoint is being written: the error, what is left in
    its folder, and how many threads save."""
    step = SharedEagerParamServer.start_forward
    calls = [0]

    def failing(eps: SharedEagerParamServer) -> None:
        step(eps)
        calls[0] += eps.saving is not None
        if eps.saving is not None:
            raise KeyError("of the program")

    with pytest.MonkeyPatch.context() as patch, slow_disk():
        patch.setattr(SharedEagerParamServer, "start_forward", failing)
        with pytest.raises(KeyError) as error:
            trained("bert", "l2l", folder, options)
    distributed.barrier()  # rank 0 has removed what it wrote
    saving = sum(thread.name == "hf_l2l save" for thread in threading.enumerate())
    return str(error.value), left_in(Path(folder)), saving


def test_an_error_of_the_training_gives_up_the_checkpoint(pool, tmp_path):
    """Without waiting for ranks that are elsewhere."""
    options = {**EACH_STEP, "l2l_async_save": True}
    found = pool(2).run(interrupted, str(tmp_path), options)
    assert found == [("'of the program'", [], 0)] * 2


def changed(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training whose program writes to weights after each step: rank 1 alone, to all of them."""
    step = SharedEagerParamServer.start_forward

    def changing(eps: SharedEagerParamServer) -> None:
        step(eps)
        eps.team.barrier("of the test")
        if eps.team.rank == 1 and torch.is_grad_enabled():
            with torch.no_grad():
                for parameter in eps.model.parameters():
                    parameter.mul_(0.5)
        eps.team.barrier("of the test")

    with pytest.MonkeyPatch.context() as patch, slow_disk():
        patch.setattr(SharedEagerParamServer, "start_forward", changing)
        return trained("bert", "l2l", folder, options)


def test_what_one_rank_changes_is_written_first(pool, tmp_path):
    """Though another rank writes it to the file."""
    pool(2).run(changed, str(tmp_path / "at once"), EACH_STEP)
    pool(2).run(changed, str(tmp_path / "later"), {**EACH_STEP, "l2l_async_save": True})
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


def told() -> list[bool]:
    """What a rank knows of groups that the other one has secured."""
    from hf_l2l.ranks.team import Team

    team = Team.met(30.0)
    own, other = team.rank, 1 - team.rank
    secured: Secured = secured_of(team.peers)
    written: list[int] = []
    assert secured.begin() == 1
    secured.when_written(lambda: written.append(1))
    team.barrier("of the test")
    tell_secured(team.peers, 1, 3 + own)
    team.peers.wait(lambda: secured.has(other, 1, 3 + other), "of the test")
    found = [secured.has(other, 1, 3 + own), secured.has(other, 1, ALL), secured.has(other, 2, 3 + other)]
    team.barrier("of the test")
    assert secured.begin() == 2
    secured.when_written(lambda: written.append(2))
    tell_secured(team.peers, 2, ALL)
    tell_secured(team.peers, 1, WRITTEN)  # late: of a checkpoint before
    team.peers.wait(lambda: secured.has(other, 2, ALL), "of the test")
    found += [secured.has(other, 1, 3 + own), secured.has(other, 2, 7), secured.has(other, 3, ALL), bool(written)]
    team.barrier("of the test")
    tell_secured(team.peers, 2, WRITTEN)
    team.peers.wait(lambda: bool(written), "of the test")
    assert written == [2]
    team.barrier("of the test")
    team.close()
    return found


def test_ranks_know_what_the_others_have_secured(pool):
    """A group, then all; what is true of a checkpoint is true of those before it."""
    assert pool(2).run(told) == [[False, False, False, True, True, False, False]] * 2


def test_a_snapshot_that_is_stopped_writes_no_more():
    """And tells that all values may change."""
    told: list[int | None] = []
    snapshot = Snapshot([[], []], room=0, secured=told.append)
    snapshot.stop()
    snapshot.write()
    assert told == [None]
