"""Scripts under `torchrun` and `accelerate launch`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent.parent / "helpers"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--multi_gpu"),
]


def result(launcher: list[str], folder: Path, *more: str) -> list[str]:
    """What the script prints: ranks, steps, a digest of the weights."""
    # Without the last one, gloo finds the addresses of the first attempt in the second: torch's own, on the CPU.
    where = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": f"{HELPERS.parent.parent}:{HELPERS}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, *launcher, str(HELPERS / "rank_script.py"), str(folder), *more]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=150, env={**os.environ, **where}
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT")]
    assert found.returncode == 0 and len(lines) == 1, found.stdout[-2000:] + found.stderr[-4000:]
    return lines[0].split()[1:]


@pytest.mark.slow  # a smaller script: `test_programs.py`
def test_torchrun(tmp_path):
    ranks, steps, _ = result(TORCHRUN, tmp_path)
    assert (ranks, steps) == ("2", "6")
    assert (tmp_path / "checkpoint-6" / "rng_state_1.pth").is_file()


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    """`--multi_gpu` starts as many processes as are asked for. `--cpu` starts one: Accelerate leaves more to MPI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert result([*ACCELERATE, "--main_process_port", port], tmp_path)[0] == "2"


@pytest.mark.slow
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path):
    """From the last whole checkpoint, to the bits of an unbroken training."""
    whole = result(TORCHRUN, tmp_path / "whole")
    assert result([*TORCHRUN, "--max-restarts", "1"], tmp_path / "broken", "5") == whole


@pytest.mark.slow  # a smaller one: `test_trainer_checkpoints.py`
def test_torchrun_goes_on_from_the_newest_generation(tmp_path):
    """A rank is killed in step 5, whose generation is not written any more: step 4 is the newest whole one."""
    whole = result(TORCHRUN, tmp_path / "whole")
    assert result([*TORCHRUN, "--max-restarts", "1"], tmp_path / "broken", "5", "realtime") == whole
    assert [path.name for path in (tmp_path / "broken-now").iterdir()] == ["checkpoint-6"]


@pytest.mark.slow
def test_a_generation_is_resumed_by_another_number_of_ranks(tmp_path):
    """As an elastic launcher starts them: with fewer, and then with more."""
    for ranks, steps in (("2", "6"), ("1", "6"), ("3", "6")):
        launcher = [*TORCHRUN[:-1], ranks]
        assert result(launcher, tmp_path / "run", "0", "realtime")[:2] == [ranks, steps]
