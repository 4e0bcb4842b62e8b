"""`L2LTrainer` in several ranks has the bits of transformers' Trainer under DistributedDataParallel."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks.hosts import NETWORK, namespaces
from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from models import batch_for
from rank_trainer import trained, trained_and_growing, trained_with_loss, trained_with_other_lengths
from tiers import more, nightly
from training import measured, tiny_bert

SAME = ("losses", "norms", "eval_loss", "predictions", "weights", "state", "step")
UNCLIPPED = {"max_grad_norm": 0.0}
DEFERRED = {"eps_update": "deferred"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dropout", {"warmup_steps": 2, "weight_decay": 0.1}),
        *more(("bert", UNCLIPPED), ("llama", {})),  # whose batches have unequal numbers of tokens
    ],
)
def test_two_ranks_have_the_bits_of_data_parallel(pool, tmp_path, model, options):
    rest = 70, None, True
    plain = pool(2).run(trained, model, "hf", str(tmp_path / "hf"), options, *rest)
    found = pool(2).run(trained, model, "l2l", str(tmp_path / "l2l"), {**options, **DEFERRED}, *rest)
    assert plain[0]["wrapped"] == "DistributedDataParallel" != found[0]["wrapped"]
    for rank in range(2):
        for what in SAME:
            assert found[rank][what] == plain[rank][what], f"{what} of rank {rank}"


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 2), *more(({"cmp": "fp16"}, 1), ({"eps_update": "eager", **UNCLIPPED}, 2))]
)
def test_two_ranks_have_the_bits_of_one_process_that_accumulates(pool, tmp_path, options, steps):
    """Without dropout, which each rank draws. Losses are rounded in another order."""
    options = {**DEFERRED, "l2l_merge_accumulation": "off", "max_steps": 3, **options}
    alone = {**options, "gradient_accumulation_steps": 2 * steps}
    expected = pool(1).run(trained, "llama", "l2l", str(tmp_path / "alone"), alone)[0]
    options["gradient_accumulation_steps"] = steps
    for found in pool(2).run(trained, "llama", "l2l", str(tmp_path / "ranks"), options):
        for what in ("norms", "weights", "state", "step"):
            assert found[what] == expected[what], what
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def test_batches_that_ranks_accumulate(pool, tmp_path):
    """They are not merged, a warning says; DistributedDataParallel adds them in another order: equal to rounding."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    found = pool(2).run(trained, "llama", "l2l", str(tmp_path / "l2l"), {**options, **DEFERRED})
    assert found[0]["weights"] == found[1]["weights"]
    assert all("gradients are added after each batch" in each["warned"] for each in found)
    plain = pool(2).run(trained, "llama", "hf", str(tmp_path / "hf"), options)
    for what in ("losses", "norms"):
        assert found[0][what] == pytest.approx(plain[0][what], rel=1e-4)


@nightly
def test_a_loss_with_parameters_is_trained(pool, tmp_path):
    """The norms are those of the model alone, as transformers has them; ranks update it, and the loss."""
    options = {**DEFERRED, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 2}
    alone = pool(1).run(trained_with_loss, str(tmp_path / "alone"), options)[0]
    options["gradient_accumulation_steps"] = 1
    found = pool(2).run(trained_with_loss, str(tmp_path / "ranks"), options)
    for rank, each in enumerate(found):
        assert each["norms"] == alone["norms"] and each["weights"] == alone["weights"]
        assert f"Ranks = 2, of which this is rank {rank}; it updates " in each["summary"]
    assert "Ranks" not in alone["summary"]
    said = [re.search(r"it updates ([0-9,]+) of ([0-9,]+) trained parameters", each["summary"]) for each in found]
    shares, totals = ([int(each[n].replace(",", "")) for each in said] for n in (1, 2))
    assert sum(shares) == totals[0] == totals[1] and min(shares) > 0


def test_other_modes_train(pool, tmp_path):
    """Each rank writes a trace, and one rank the times of all."""
    trace = tmp_path / "trace.json"
    options = {**DEFERRED, "l2l_trace": str(trace), "l2l_log_times": True, "max_steps": 2, "bf16": True}
    found = pool(2).run(trained, "bert", "l2l", str(tmp_path), options)
    assert found[0]["weights"] == found[1]["weights"] and found[0]["step"] == 2
    assert trace.is_file() and (tmp_path / "trace.rank1.json").is_file()
    rows = measured(tmp_path)
    assert rows and all("l2l_tokens_per_s" in row for row in rows)
    assert len({row["step"] for row in rows}) == len(rows)


def begun(folder: str) -> list[float]:
    """In the trace of this rank, when the first span begins, and when the last backward ends, in seconds."""
    model, rank = tiny_bert(layers=2), distributed.get_rank()
    eps = attach_l2l(model, L2LConfig(trace=f"{folder}/trace.json"))
    if rank == 0:  # an evaluation of its own
        with torch.no_grad():
            model(**batch_for(model))
        time.sleep(1.0)
    optimizer = eps.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    distributed.barrier()
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    detach_l2l(model)
    text = Path(folder, "trace.json" if rank == 0 else "trace.rank1.json").read_text()
    events = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    backwards = [event["ts"] + event["dur"] for event in events if event["name"].startswith("backward")]
    return [min(event["ts"] for event in events) / 1e6, max(backwards) / 1e6]


@nightly
def test_traces_of_ranks_have_one_time(pool, tmp_path):
    """What both do at the same time is at the same time in both."""
    (first, end), (first_of_other, end_of_other) = pool(2).run(begun, str(tmp_path))
    assert min(first, first_of_other) >= 0.0
    assert end == pytest.approx(end_of_other, abs=0.5)


# ---- the noise scale

NOISE: dict[str, Any] = {**DEFERRED, "ubatch_size": 2, "l2l_noise_scale": True}
EACH = {"l2l_noise_scale_every": "1"}


@nightly
@pytest.mark.parametrize("average", [True, False], ids=["tokens of all ranks", "tokens of each"])
def test_the_noise_scale_is_that_of_all_ranks(pool, tmp_path, average):
    """Batches weigh the same in one process that accumulates them, if ranks divide by the tokens of all."""
    options = {**NOISE, **EACH, "l2l_merge_accumulation": "off", "learning_rate": 0.0, "max_steps": 3}
    options |= {"logging_steps": 2}
    alone = {**options, "gradient_accumulation_steps": 2}
    expected = pool(1).run(trained, "llama", "l2l", str(tmp_path / "alone"), alone)[0]["noise"]
    options["average_tokens_across_devices"] = average
    found = pool(2).run(trained, "llama", "l2l", str(tmp_path / "ranks"), options)
    assert found[0]["noise"] == found[1]["noise"] and expected["steps"] == 3
    for what in ("items", "rows", "steps"):
        assert found[0]["noise"][what] == expected[what]
    noise = found[0]["noise"]["noise"]
    assert noise == pytest.approx(expected["noise"], rel=1e-5 if average else 0.2)
    assert average or noise != pytest.approx(expected["noise"], rel=1e-5)


def test_a_noise_scale_is_measured_at_the_same_steps(pool, tmp_path):
    """As rank 0 would: the first batches of ranks may have other lengths."""
    found = pool(2).run(trained_with_other_lengths, "llama", "l2l", str(tmp_path), NOISE)
    assert [each["noise"]["steps"] for each in found] == [1, 1] and found[0]["noise"] == found[1]["noise"]


def test_batches_of_ranks_grow_together_and_are_resumed(pool, tmp_path):
    """And a rank alone may log meanwhile."""
    options = {**NOISE, **EACH, "max_steps": -1, "save_strategy": "steps", "save_steps": 6, "num_train_epochs": 2}
    options |= {"logging_steps": 2}
    found = pool(2).run(trained_and_growing, "llama", "l2l", str(tmp_path), options)
    # 9 batches of each rank in an epoch: 4 and 5 / 2 steps, and 9 / 2.
    assert [each["step"] for each in found] == [12, 12] and found[0]["noise"] == found[1]["noise"]
    assert found[0]["weights"] == found[1]["weights"]
    checkpoint = str(tmp_path / "checkpoint-6")
    again = pool(2).run(trained_and_growing, "llama", "l2l", str(tmp_path), options, 70, checkpoint)
    for what in ("weights", "state", "step", "noise"):
        assert [each[what] for each in again] == [each[what] for each in found], what


# ---- scripts under `torchrun` and `accelerate launch`, on one host and on two network namespaces


Process = subprocess.Popen[str]
HELPERS = Path(__file__).parent.parent / "helpers"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--multi_gpu"),
]


def started(launcher: list[str], folder: Path, *more: str, before: tuple[str, ...] = (), **env: str) -> Process:
    # Without the first one, gloo finds the addresses of the first attempt in the second: torch's own, on the CPU.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": f"{HELPERS.parent.parent}:{HELPERS}"}
    command = [*before, sys.executable, *launcher, str(HELPERS / "rank_script.py"), str(folder), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, **pipes)


def results(*processes: Process) -> list[str]:
    """What one of them prints: ranks, steps, a digest of the weights."""
    found = [each.communicate(timeout=170) for each in processes]
    lines = [line for out, _ in found for line in out.splitlines() if line.startswith("RESULT")]
    texts = "".join(out[-2000:] + error[-4000:] for out, error in found)
    assert not any(each.returncode for each in processes) and len(lines) == 1, texts
    return lines[0].split()[1:]


@nightly  # that a rank's script ends: `test_programs.py`
def test_accelerate_launch(tmp_path):
    """`--multi_gpu` starts as many processes as are asked for. `--cpu` starts one: Accelerate leaves more to MPI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert results(started([*ACCELERATE, "--main_process_port", port], tmp_path))[0] == "2"


@nightly
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path):
    """From the last checkpoint, or from the generation of step 4: the rank is killed in step 5."""
    again = [*TORCHRUN, "--max-restarts", "1"]
    whole = results(started(TORCHRUN, tmp_path / "whole"))
    assert whole[:2] == ["2", "6"] and (tmp_path / "whole" / "checkpoint-6" / "rng_state_1.pth").is_file()
    assert results(started(again, tmp_path / "broken", "5")) == whole
    assert results(started(again, tmp_path / "other", "5", "realtime")) == whole
    assert [path.name for path in (tmp_path / "other-now").iterdir()] == ["checkpoint-6"]


@nightly
def test_torchrun_on_two_hosts(tmp_path):
    """One rank on each has the bits of two on one; two on each end as they should."""
    if os.getuid() != 0 or subprocess.run(["ip", "netns", "list"], check=False).returncode:
        pytest.skip("only root can make network namespaces")
    found = []
    for hosts, ranks in ((1, 2), (2, 1), (2, 2)):
        with namespaces(2, 1000) if hosts > 1 else nullcontext([""]) as names:
            nodes = []
            for node, name in enumerate(names):
                address = f"{NETWORK}.1" if hosts > 1 else "127.0.0.1"
                launcher = ["-m", "torch.distributed.run", "--nnodes", str(hosts), "--node_rank", str(node)]
                launcher += ["--nproc_per_node", str(ranks), "--master_port", "29517", "--master_addr", address]
                before = ("ip", "netns", "exec", name) if hosts > 1 else ()
                env = {"GLOO_SOCKET_IFNAME": "eth0"} if hosts > 1 else {}
                nodes.append(started(launcher, tmp_path / f"{hosts}.{ranks}", before=before, **env))
            found.append(results(*nodes))
    assert found[0] == found[1] and found[2][0] == "4"
