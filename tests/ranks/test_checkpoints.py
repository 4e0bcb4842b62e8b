"""Checkpoints of several ranks, at once or in the background: whole or absent, with the values of their step, and
resumed with as many ranks, fewer, or more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from hf_l2l.checkpoint.manifest import MANIFEST
from hf_l2l.checkpoint.snapshot import Snapshot
from hf_l2l.checkpoint.staging import CheckpointSaveError
from hf_l2l.rank_saves.secured import ALL, WRITTEN, Secured, secured_of, tell_secured
from hf_l2l.ranks.team import Team
from hf_l2l.shared_eps.server import SharedEagerParamServer
from host_cases import on_hosts
from rank_pool import digest
from rank_trainer import REALTIME, SAME, SAVED, failed_generation, failed_to_save, trained
from slow_disk import assert_same_checkpoints
from tiers import more, nightly
from training import left_in

SHORT: dict[str, Any] = {**SAVED, "save_steps": 1, "max_steps": 2}
PLAIN = {k: v for k, v in SHORT.items() if k != "eps_update"}
"""For transformers' Trainer."""


def assert_resumed(found: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Each rank has the bits of an unbroken run."""
    for rank, each in enumerate(found):
        for what in SAME:
            assert each[what] == whole[rank][what], f"{what} of rank {rank}"


def test_a_checkpoint_has_what_each_rank_saves_and_is_resumed(pool, tmp_path):
    """As that of transformers' Trainer, and a manifest. Dropout and drawn rows go on: each rank has its generators,
    and the loss that has not been logged yet. Of a resume, the first rank alone loads weights, whose values win when
    the model is attached; no rank has all of the optimizer's state in memory of its own, since the file is mapped."""
    options = {**SAVED, "max_steps": 6, "logging_steps": 3}
    whole = pool(2).run(trained, "drawing", "l2l", str(tmp_path / "whole"), options)
    assert left_in(tmp_path / "whole") == whole[0]["checkpoints"] == [f"checkpoint-{step}" for step in (2, 4, 6)]
    names = {path.name for path in (tmp_path / "whole" / "checkpoint-4").iterdir()}
    pool(2).run(trained, "drawing", "hf", str(tmp_path / "hf"), {**PLAIN, "max_steps": 1})
    plain = {path.name for path in (tmp_path / "hf" / "checkpoint-1").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rng_state_1.pth", "trainer_state.json"} <= plain
    assert names - plain == {MANIFEST, "rng_state_data_0.pth", "rng_state_data_1.pth"} and plain <= names
    state = torch.load(tmp_path / "whole" / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    assert len(state) > 10 and all({"exp_avg", "exp_avg_sq"} <= set(each) for each in state.values())

    (tmp_path / "whole" / "checkpoint-6" / "model.safetensors").write_bytes(b"damaged")
    found = pool(2).run(trained, "drawing", "l2l", str(tmp_path / "whole"), options, 70, True)
    assert_resumed(found, whole)  # from the newest whole one
    assert [each["losses"][-1] for each in found] == [each["losses"][-1] for each in whole]
    assert [each["loaded_weights"] for each in found] == [1, 0]
    assert [each["mapped"] for each in found] == [[True], [True]]


@nightly
def test_on_devices_the_state_is_loaded_to_the_host(pool, tmp_path):
    """Each rank has its share of the devices, two of four, and their generators."""
    options = {**SHORT, "use_cpu": False, "per_device_train_batch_size": 2}
    whole = pool(2, sim=True).run(trained, "dropout", "l2l", str(tmp_path / "run"), options)
    assert [each["devices"] for each in whole] == [["sim:0", "sim:2"], ["sim:1", "sim:3"]]
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert {"rng_state_sim_0.pth", "rng_state_sim_1.pth"} <= {p.name for p in checkpoint.iterdir()}
    found = pool(2, sim=True).run(trained, "dropout", "l2l", str(tmp_path / "next"), options, 70, str(checkpoint))
    assert [each["loaded_to"] for each in found] == [["cpu"], ["cpu"]]
    assert_resumed(found, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), *more((1, 2))])
def test_another_number_of_ranks_goes_on(pool, tmp_path, before, after):
    """With as many rows in a step, whichever rank has them: the same to rounding. Other batches are told."""
    constant = {**SHORT, "lr_scheduler_type": "constant"}
    rows = {1: {**constant, "gradient_accumulation_steps": 2}, 2: constant}
    whole = pool(1).run(trained, "bert", "l2l", str(tmp_path / "whole"), rows[1])[0]
    pool(before).run(trained, "bert", "l2l", str(tmp_path / "run"), {**rows[before], "max_steps": 1})
    given = "bert", "l2l", str(tmp_path / "next"), rows[after], 70, str(tmp_path / "run" / "checkpoint-1")
    for each in pool(after).run(trained, *given):
        assert each["step"] == 2
        assert each["values"] == pytest.approx(whole["values"], rel=1e-3, abs=1e-3)
        assert "rng_state_data" in each["logged"]


def test_checkpoints_go_both_ways(pool, tmp_path):
    """Under transformers' Trainer with DistributedDataParallel, and back."""

    def run(kind: str, folder: str, *rest: Any) -> list[str]:
        given = "dropout", kind, str(tmp_path / folder), SHORT if kind == "l2l" else PLAIN
        return [each["weights"] for each in pool(2).run(trained, *given, *rest)]

    whole = run("hf", "hf")
    assert run("l2l", "l2l") == whole
    for before, after in (("hf", "l2l"), ("l2l", "hf")):
        assert run(after, f"{after} after", 70, str(tmp_path / before / "checkpoint-1")) == whole


def test_the_best_and_the_newest_are_kept(pool, tmp_path):
    options = {**SAVED, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    options["save_total_limit"] = 1
    (tmp_path / "checkpoint-1").mkdir()  # of somebody else
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), options)
    best = {Path(each["best"]).name for each in found}
    assert len(best) == 1 and set(found[0]["checkpoints"]) == {"checkpoint-1"} | best
    saved = load_file(tmp_path / best.pop() / "model.safetensors")
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["named"] == digest(*(saved[name] for name in sorted(saved)))


@pytest.mark.parametrize("where", [(1, "generators"), *more((0, "commit"), (0, "room"), (0, "weights"))])
def test_a_checkpoint_that_one_rank_cannot_write_fails_in_all(pool, tmp_path, where):
    """Nothing of it is left, the one before is there, and the same ranks can train again."""
    for rank, found in enumerate(pool(2).run(failed_to_save, str(tmp_path), *where)):
        assert "No space left on device" in found["error"]
        assert (f"in rank {where[0]}" in found["error"]) == (rank != where[0])
        assert found["left"] == ["checkpoint-2"] and found["step"] == 4
        assert found["then"] == ["checkpoint-2", "checkpoint-4"]


def saved_apart(folder: str) -> list[str]:
    """The errors of a rank that does not see what the first one writes; and of one that looks for a batch size."""
    is_dir, own = Path.is_dir, distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: is_dir(path) and (own == 0 or "_l2l-saving" not in path.name))
        with pytest.raises(CheckpointSaveError) as error:
            trained("bert", "l2l", folder, SAVED)
    with pytest.raises(ValueError) as refused:
        trained("bert", "l2l", folder, {**SAVED, "auto_find_batch_size": True})
    return [str(error.value), str(refused.value)]


def test_hosts_without_a_common_file_system_and_what_one_rank_would_do_alone_are_refused(pool, tmp_path):
    for apart, alone in pool(2).run(saved_apart, str(tmp_path)):
        assert "a folder that rank 1 does not see" in apart
        assert alone.startswith("several ranks train without auto_find_batch_size")
    assert left_in(tmp_path) == []


# ---- in the background


@contextmanager
def slow_disk(*, until_copied: bool = False) -> Iterator[list[Snapshot]]:
    """Inside, checkpoints take time; with `until_copied`, the first one waits for an update that copies a layer."""
    take = Snapshot.next_group
    found: list[Snapshot] = []

    def taken(snapshot: Snapshot) -> Any:
        if snapshot not in found:
            found.append(snapshot)
        copied = any(each.most_copied_bytes for each in found)
        until = time.monotonic() + (3.0 if until_copied and snapshot.room and not copied else 0.03)
        while time.monotonic() < until and not (snapshot.most_copied_bytes or snapshot.is_stopped):
            time.sleep(0.005)
        return take(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "next_group", taken)
        yield found


def trained_slowly(name: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A training whose checkpoints take longer than a step."""
    with slow_disk(until_copied=True) as snapshots:
        found = trained(name, "l2l", folder, options)
    return {**found, "copied": sum(each.most_copied_bytes for each in snapshots)}


@nightly
@pytest.mark.parametrize(
    ("size", "hosts", "name", "options"),
    [
        (2, 2, "dropout", {}),
        (3, 1, "large", {"cmp": "bf16"}),
        (2, 1, "dropout", {"l2l_moment_dtype": "8bit"}),
        (2, 2, "dropout", {"l2l_moment_dtype": "8bit"}),
    ],
    ids=["2 hosts", "rows in 16 bits", "moments of 8 bits", "2 hosts, moments of 8 bits"],
)
def test_checkpoints_have_the_values_of_their_step(pool, tmp_path, size, hosts, name, options):
    """All of the state, and are resumed."""
    options = {**SHORT, **options}
    at_once = pool(size).run(on_hosts, hosts, trained, name, "l2l", str(tmp_path / "at once"), options)
    later = {**options, "l2l_async_save": True}
    found = pool(size).run(on_hosts, hosts, trained_slowly, name, str(tmp_path / "later"), later)
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")
    assert sum(each["copied"] for each in found) > 0, "updates have gone on beside the saving"
    checkpoint = str(tmp_path / "later" / "checkpoint-1")
    state = torch.load(f"{checkpoint}/optimizer.pt", weights_only=True)["state"]
    assert len(state) > 10 and all({"exp_avg", "exp_avg_sq"} <= set(each) for each in state.values())
    given = name, "l2l", str(tmp_path / "next"), options, 70, checkpoint
    assert_resumed(pool(size).run(on_hosts, hosts, trained, *given), at_once)
    assert_resumed(found, at_once)


@pytest.mark.parametrize(("after", "every"), [(2, "auto"), *more((3, "1"))])
def test_ranks_write_generations_beside_the_steps(pool, tmp_path, after, every):
    """The newest one alone is there, and another number of ranks goes on from it."""
    now = {**REALTIME, "l2l_realtime_checkpoint": str(tmp_path / "now"), "l2l_realtime_every": every}
    pool(2).run(trained_slowly, "dropout", str(tmp_path / "broken"), {**now, "max_steps": 3})
    (left,) = (tmp_path / "now").glob("checkpoint-*")
    assert left.name in ("checkpoint-2", "checkpoint-3") and (left / MANIFEST).is_file()
    found = pool(after).run(trained, "dropout", "l2l", str(tmp_path / "broken"), {**now, "max_steps": 4}, 70, True)
    assert all(each["step"] == 4 for each in found)
    if after == 2:
        unbroken = {**SAVED, "save_strategy": "no", "lr_scheduler_type": "constant"}
        assert_resumed(found, pool(2).run(trained, "dropout", "l2l", str(tmp_path / "whole"), unbroken))
    (last,) = (tmp_path / "now").glob("checkpoint-*")
    assert int(last.name.removeprefix("checkpoint-")) > int(left.name.removeprefix("checkpoint-"))


@pytest.mark.parametrize(
    ("errors", "what"), [("stop", "values"), ("warn", "folder"), *more(("warn", "part"), ("warn", "generators"))]
)
def test_a_generation_that_one_rank_cannot_write_is_missing_for_all(pool, tmp_path, errors, what):
    """All end with its error, or go on; the one before is whole. A folder that cannot be read changes nothing."""
    options = {**REALTIME, "l2l_realtime_checkpoint": str(tmp_path / "now"), "max_steps": 6}
    options["l2l_realtime_errors"] = errors
    for found in pool(2).run(failed_generation, str(tmp_path / "run"), options, what):
        assert found["step"] in ((4, 5) if errors == "stop" else (6,))
        assert ("checkpoint-3" if errors == "stop" else "checkpoint-6") in found["left"]
        assert len(found["left"]) == 1 or what == "folder"
        assert found["error"].count("No space left on device") == (errors == "stop")


def trained_and_doing(do: Callable[[SharedEagerParamServer], None], folder: str, options: dict[str, Any]) -> None:
    """A training whose program does something when a forward begins."""
    begin = SharedEagerParamServer.start_forward
    with pytest.MonkeyPatch.context() as patch, slow_disk():
        patch.setattr(SharedEagerParamServer, "start_forward", lambda eps: (begin(eps), do(eps)))
        trained("bert", "l2l", folder, options)


def interrupted(folder: str, options: dict[str, Any]) -> tuple[str, list[str], int]:
    """The error that ends a training while a checkpoint is written, what is left, and how many threads save."""

    def failing(eps: SharedEagerParamServer) -> None:
        if eps.saving is not None:
            raise KeyError("of the program")

    with pytest.raises(KeyError) as error:
        trained_and_doing(failing, folder, options)
    distributed.barrier()  # rank 0 has removed what it wrote
    saving = sum(thread.name == "hf_l2l save" for thread in threading.enumerate())
    return str(error.value), left_in(Path(folder)), saving


def test_an_error_of_the_training_gives_up_the_checkpoint(pool, tmp_path):
    """Without waiting for ranks that are elsewhere."""
    options = {**SHORT, "l2l_async_save": True}
    assert pool(2).run(interrupted, str(tmp_path), options) == [("'of the program'", [], 0)] * 2


def changed(folder: str, options: dict[str, Any]) -> None:
    """A training whose program writes to weights after each step: rank 1 alone, to all of them."""

    def changing(eps: SharedEagerParamServer) -> None:
        eps.team.barrier("of the test")
        if eps.team.rank == 1 and torch.is_grad_enabled():
            with torch.no_grad():
                for parameter in eps.model.parameters():
                    parameter.mul_(0.5)
        eps.team.barrier("of the test")

    trained_and_doing(changing, folder, options)


@nightly
def test_what_one_rank_changes_is_written_first(pool, tmp_path):
    """Though another rank writes it to the file."""
    pool(2).run(changed, str(tmp_path / "at once"), SHORT)
    pool(2).run(changed, str(tmp_path / "later"), {**SHORT, "l2l_async_save": True})
    assert_same_checkpoints(tmp_path / "later", tmp_path / "at once")


def told() -> list[bool]:
    """What a rank knows of groups that the other one has secured."""
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
    """What is true of a checkpoint is true of those before it. A stopped snapshot lets all values change."""
    assert pool(2).run(told) == [[False, False, False, True, True, False, False]] * 2
    stopped: list[int | None] = []
    snapshot = Snapshot([[], []], room=0, secured=stopped.append)
    snapshot.stop()
    snapshot.write()
    assert stopped == [None]
