"""Host memory of loading, attaching, training, saving and resuming, against that of a process that does all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from hf_l2l import L2LConfig, estimate
from hf_l2l.plan.estimate import Estimate
from host_phases import ROWS, SIZES, TOKENS, measured
from models import llama

W = sum(p.numel() for p in llama().parameters()) * 4


def of_gpt2(size: str, **options: Any) -> Estimate:
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES[size]))
    return estimate(model, L2LConfig(**options), rows=ROWS, tokens=TOKENS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read in Linux' way")
@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("l2l", "small", {"stash": "host"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("l2l", "large", {"stash": "host"}),
                ("l2l", "large", {"stash": "host", "cmp": "bf16"}),
                ("plain", "large", {}),
                ("plain_checkpointing", "large", {}),
            )
        ),
    ],
    ids=str,
)
def test_a_process_takes_what_was_expected(kind, size, options, tmp_path):
    """In steps within 5 %, else within a tenth of the weights, and 2 MiB that threads keep of what they have freed.
    Memory of the simulated device is memory of the process, too: what of it there was is added to what was expected
    of the host."""
    found, expected = measured(kind, size, tmp_path, **options), of_gpt2(size, **options)
    phases, weights = expected.phases[kind], expected.masters
    simulated = found["train"]["simulated"]
    assert found["train"]["process"] == pytest.approx(phases["train"].host + simulated, rel=0.05)
    for phase in ("attach", "save", "resume"):
        assert abs(found[phase]["host"] - phases[phase].host) < 0.1 * weights + 2 * 2**20, phase


def phases(**options: Any) -> dict[str, tuple[int, int]]:
    """Bytes of host and device by phase, in weights."""
    model = llama()
    adamw = torch.optim.AdamW(model.parameters())
    found = estimate(model, L2LConfig(**options), adamw, rows=2, tokens=4, device="cuda").phases
    return {phase: (size.host, size.device) for phase, size in found["l2l"].items()}


def test_what_is_resident_comes_back_to_be_saved():
    found = phases(resident="all")
    steps = 4 * len(list(llama().parameters()))
    norms = 8 * len(list(llama().parameters()))
    assert found["attach"] == (0, W) and found["save"][0] == W + norms
    assert found["resume"] == (2 * W + steps, 3 * W + steps)


def test_copies_are_there_from_the_start():
    found = phases(cmp="bf16")
    assert found["attach"][0] == W // 2 and found["resume"][0] == pytest.approx(3.5 * W, rel=0.01)
    assert phases()["attach"][0] == W and phases(cmp="bf16", host_copies="per_sweep")["attach"][0] == 0


def test_saving_adds_nothing_to_what_is_streamed():
    found = phases(stash="host", boundary="host", ubatch_size=1)
    assert 4 * W < found["save"][0] <= found["train"][0] and found["load"] == (0, 0)
