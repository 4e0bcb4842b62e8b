"""Host memory of loading, attaching, training, saving and resuming, against that of a process that does all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, estimate
from host_phases import ROWS, SIZES, TOKENS, measured
from models import llama
from tiers import nightly

W = sum(p.numel() for p in llama().parameters()) * 4


@nightly  # the bytes that the engine counts: `tests/sim/test_estimate.py`
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read in Linux' way")
@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("l2l", "large", {"stash": "host"}),
        ("plain_checkpointing", "large", {}),
    ],
    ids=str,
)
def test_a_process_takes_what_was_expected(kind, size, options, tmp_path):
    """In steps within 5 %, else within a tenth of the weights, and 2 MiB that threads keep of what they have freed.
    Memory of the simulated device is memory of the process, too: what of it there was is added to what was expected
    of the host."""
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES[size]))
    expected = estimate(model, L2LConfig(**options), rows=ROWS, tokens=TOKENS)
    found = measured(kind, size, tmp_path, **options)
    phases, weights = expected.phases[kind], expected.masters
    simulated = found["train"]["simulated"]
    assert found["train"]["process"] == pytest.approx(phases["train"].host + simulated, rel=0.05)
    for phase in ("attach", "save", "resume"):
        assert abs(found[phase]["host"] - phases[phase].host) < 0.1 * weights + 2 * 2**20, phase


def phases(**options: Any) -> dict[str, tuple[int, int]]:
    """Bytes of host and device by phase."""
    model = llama()
    adamw = torch.optim.AdamW(model.parameters())
    found = estimate(model, L2LConfig(**options), adamw, rows=2, tokens=4, device="cuda").phases
    return {phase: (size.host, size.device) for phase, size in found["l2l"].items()}


def test_what_is_resident_comes_back_to_be_saved_and_copies_are_there_from_the_start():
    count = len(list(llama().parameters()))
    found = phases(resident="all")
    assert found["attach"] == (0, W) and found["save"][0] == W + 8 * count, "and the norms of gradients"
    assert found["resume"] == (2 * W + 4 * count, 3 * W + 4 * count), "and the step counts"
    found = phases(cmp="bf16")
    assert found["attach"][0] == W // 2 and found["resume"][0] == pytest.approx(3.5 * W, rel=0.01)
    found = phases(stash="host", boundary="host", ubatch_size=1)
    assert 4 * W < found["save"][0] <= found["train"][0] and found["load"] == (0, 0)
