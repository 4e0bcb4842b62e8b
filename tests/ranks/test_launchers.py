"""Scripts under `torchrun` and `accelerate launch`, on one host and on two network namespaces of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.hosts import NETWORK, namespaces
from tiers import nightly

Process = subprocess.Popen[str]
HELPERS = Path(__file__).parent.parent / "helpers"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--multi_gpu"),
]


def started(
    launcher: list[str], folder: Path, *more: str, before: tuple[str, ...] = (), **env: str
) -> subprocess.Popen:
    # Without the first one, gloo finds the addresses of the first attempt in the second: torch's own, on the CPU.
    where = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": f"{HELPERS.parent.parent}:{HELPERS}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*before, sys.executable, *launcher, str(HELPERS / "rank_script.py"), str(folder), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **where, **env}, **pipes)


def results(*processes: Process) -> list[str]:
    """What one of them prints: ranks, steps, a digest of the weights."""
    found = [each.communicate(timeout=170) for each in processes]
    lines = [line for out, _ in found for line in out.splitlines() if line.startswith("RESULT")]
    texts = "".join(out[-2000:] + error[-4000:] for out, error in found)
    assert not any(each.returncode for each in processes) and len(lines) == 1, texts
    return lines[0].split()[1:]


def result(launcher: list[str], folder: Path, *more: str) -> list[str]:
    return results(started(launcher, folder, *more))


@nightly  # that a rank's script ends: `test_programs.py`; the Trainer in ranks: `test_trainer.py`
def test_accelerate_launch(tmp_path):
    """`--multi_gpu` starts as many processes as are asked for. `--cpu` starts one: Accelerate leaves more to MPI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert result([*ACCELERATE, "--main_process_port", port], tmp_path)[0] == "2"


@nightly
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path):
    """From the last whole checkpoint, or from the newest generation, to the bits of an unbroken training. The rank is
    killed in step 5, whose generation is not written any more: step 4 is the newest whole one."""
    whole = result(TORCHRUN, tmp_path / "whole")
    assert whole[:2] == ["2", "6"] and (tmp_path / "whole" / "checkpoint-6" / "rng_state_1.pth").is_file()
    assert result([*TORCHRUN, "--max-restarts", "1"], tmp_path / "broken", "5") == whole
    assert result([*TORCHRUN, "--max-restarts", "1"], tmp_path / "other", "5", "realtime") == whole
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
