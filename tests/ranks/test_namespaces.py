"""Two hosts with a network between them: namespaces of this machine, with limited bandwidth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import NETWORK, namespaces

HELPERS = Path(__file__).parent.parent / "helpers"


def result(names: list[str], ranks: int, folder: Path) -> list[str]:
    """What rank 0 prints of a training under torchrun: ranks, steps, a digest of the weights."""
    where = {
        "PYTHONPATH": f"{HELPERS.parent.parent}:{HELPERS}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    several = {**where, "GLOO_SOCKET_IFNAME": "eth0"} if len(names) > 1 else where
    nodes = [
        subprocess.Popen(
            [
                *(["ip", "netns", "exec", name] if len(names) > 1 else []),
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    str(len(names)),
                    "--node_rank",
                    str(node),
                ),
                *("--nproc_per_node", str(ranks), "--master_port", "29517"),
                *("--master_addr", f"{NETWORK}.1" if len(names) > 1 else "127.0.0.1"),
                *(str(HELPERS / "rank_script.py"), str(folder)),
            ],
            env={**os.environ, **several},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, name in enumerate(names)
    ]
    found = [node.communicate(timeout=170) for node in nodes]
    assert not any(node.returncode for node in nodes), "".join(out[-2000:] + error[-4000:] for out, error in found)
    (line,) = [line for out, _ in found for line in out.splitlines() if line.startswith("RESULT")]
    return line.split()[1:]


@pytest.mark.slow
def test_torchrun_on_two_hosts(tmp_path):
    """One rank on each has the bits of two on one; two on each end as they should."""
    if os.getuid() != 0 or subprocess.run(["ip", "netns", "list"], check=False).returncode:
        pytest.skip("only root can make network namespaces")
    near = result(["one host"], 2, tmp_path / "near")
    with namespaces(2, 1000) as names:
        assert result(names, 1, tmp_path / "far") == near
        assert result(names, 2, tmp_path / "both")[0] == "4"
