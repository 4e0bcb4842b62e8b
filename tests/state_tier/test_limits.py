"""A model whose state exceeds what the process may have: in a control group, where that is permitted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "helpers" / "limited_state.py"
LAYER = 4 * (2 * 4 * 768**2 + 5 * 768)
"""Bytes of the masters of one of the 16 layers; with gradients and moments four times that."""
LIMIT = 950 * 2**20
"""What Python, torch, gradients (16 layers) and the window (four layers with state) take, and a little."""


@contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """A control group with so much memory; None where none can be made."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    first = next((line.split(":", 2)[2] for line in own if ":memory:" in line), None)
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, name = (
        (version_1, "memory.limit_in_bytes") if first is not None else (Path("/sys/fs/cgroup"), "memory.max")
    )
    made = parent / f"hf_l2l-test-{uuid.uuid4().hex}"
    try:
        made.mkdir()
        (made / name).write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield made
    finally:
        made.rmdir()


def result(tier: str, folder: Path, within: Path | None) -> tuple[int, list[str]]:
    """The exit status, and digest, anonymous bytes and bytes of the window."""
    where = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # It joins the group before it allocates anything.
    join = "" if within is None else f"echo $$ > {within / 'cgroup.procs'} && "
    command = ["sh", "-c", f'{join}exec "$0" "$@"', sys.executable, str(SCRIPT), tier, str(folder)]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **where}
    )
    lines = [line.split()[1:] for line in found.stdout.splitlines() if line.startswith("RESULT")]
    assert found.returncode in (0, -signal.SIGKILL), found.stderr[-3000:]
    return found.returncode, lines[0] if lines else []


@pytest.mark.slow  # a small size: `test_the_window_holds_its_layers`
def test_a_model_whose_state_exceeds_the_limit_trains_to_the_same_bits(tmp_path):
    """Anonymous memory and the window stay below the limit, which masters, gradients and moments alone exceed; in
    memory, the same training is ended by the system."""
    status, (expected, in_memory, _) = result("host", tmp_path, None)
    assert status == 0 and int(in_memory) > LIMIT > 16 * LAYER * 2
    with group(LIMIT) as made:
        status, (digest, anonymous, window) = result("disk", tmp_path, made)
        assert status == 0 and digest == expected
        assert int(anonymous) + int(window) < LIMIT
        assert int(window) <= 4 * 3 * LAYER * 1.05
        if made is not None:
            assert result("host", tmp_path, made)[0] == -signal.SIGKILL
