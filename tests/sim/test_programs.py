"""Programs that see the simulated accelerator: hf-l2l env and verify, run_glue_l2l.py, and traces of its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import run_glue_l2l
from cli_models import LLAMA, ran, written
from glue_script import ROWS, command, needs_datasets, write
from hf_l2l.measure import DeviceMemoryTrace
from hf_l2l.probe import rates
from hf_l2l.probe.rates import Sizes
from hf_l2l.runtime.tensors import tensor_bytes
from hf_l2l.testing import enable_simulated_accelerator, page_lock_limit, page_locked_bytes
from training import settled_memory

# ---- hf-l2l


def test_env_has_the_device_and_page_locking(capsys, monkeypatch):
    before = page_locked_bytes()
    found = ran(capsys, "env", "--json").json
    [device] = found["devices"]
    assert (device["device"], device["name"]) == ("sim:0", "simulated accelerator")
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert found["page_locking"]["works"] is True and page_locked_bytes() == before
    with page_lock_limit(0):
        locking = ran(capsys, "env", "--json").json["page_locking"]
    assert locking["works"] is False and locking["result"].startswith("refused with code ")
    assert ran(capsys, "env", "--json").json["page_locking"]["works"] is True
    monkeypatch.setattr(rates, "Sizes", lambda: Sizes(2**16, 2**10, 64, 0.0))
    probe = ran(capsys, "env", "--probe", "--json").json["probe"]
    assert probe["device_name"] == "simulated accelerator" and probe["link_up"] > 0
    text = ran(capsys, "env", "--probe").out
    assert "link_up" in text and "devices:\n  device: sim:0, name: simulated accelerator, " in text


def test_verify_runs_the_layers_there_if_asked(tmp_path, capsys):
    source = written(tmp_path, LLAMA, num_hidden_layers=1)
    for device, flags in (("cpu", ()), ("sim:0", ("--device", "sim"))):
        held = settled_memory()
        torch.sim.reset_peak_memory_stats()
        found = ran(capsys, "verify", source, *flags, "--json")
        assert (found.status, found.json["device"], found.json["status"]) == (0, device, "green")
        assert (torch.sim.max_memory_allocated() > held) == (device == "sim:0")


# ---- run_glue_l2l.py


@pytest.fixture
def _without_a_limit_afterwards() -> Iterator[None]:
    settled_memory()
    yield
    enable_simulated_accelerator()


@needs_datasets
@pytest.mark.usefixtures("datasets_cache", "_without_a_limit_afterwards")
def test_too_small_a_device_is_said_in_one_line(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: write(tmp_path / f"{name}.csv", ROWS) for name in ("train_file", "validation_file")}
    with pytest.raises(SystemExit) as stopped:
        run_glue_l2l.main(
            command(tiny_model, tmp_path, **files, simulate="2KiB", use_cpu=None, device_memory_budget="off")
        )
    assert stopped.value.code == 3
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("run_glue_l2l.py: out of memory: the simulated accelerator is out of memory.")
    assert last.endswith("; try a smaller --ubatch_size, or --stash host")
    assert "Traceback" not in said


# ---- the memory of the device


def has_ended() -> bool:
    """Whether the thread that samples is gone."""
    return "l2l-memory-trace" not in [thread.name for thread in threading.enumerate()]


def wait_for_samples(trace: DeviceMemoryTrace, count: int) -> None:
    """Until there are `count` in all."""
    while len(trace.device_bytes) < count:
        time.sleep(0.001)


def test_a_trace_shows_memory_come_and_go():
    """It can be taken again."""
    before, started = settled_memory(), time.perf_counter()
    with DeviceMemoryTrace(interval_s=0.001) as trace:
        assert not has_ended()
        wait_for_samples(trace, 1)
        large = torch.zeros(2**20, device="sim")
        wait_for_samples(trace, len(trace.device_bytes) + 2)
        del large
        wait_for_samples(trace, len(trace.device_bytes) + 2)
    took = time.perf_counter() - started
    assert has_ended()
    assert len(trace.seconds) == len(trace.device_bytes) >= 5
    assert trace.seconds == sorted(trace.seconds)
    assert 0 <= trace.seconds[0] < trace.seconds[-1] <= took
    assert trace.device_bytes[0] == trace.device_bytes[-1] == before
    assert max(trace.device_bytes) == trace.peak_bytes == before + 4 * 2**20
    with trace:
        torch.empty(10, device="sim")
    assert 40 <= trace.peak_bytes - before < 40 + 4000 and trace.seconds[0] < 1


def test_the_peak_is_found_between_samples_and_is_the_block_s_own():
    """The trace ends when its block raises."""
    before = settled_memory()
    earlier = torch.zeros(2**22, device="sim")
    del earlier
    with DeviceMemoryTrace(interval_s=60) as trace:
        wait_for_samples(trace, 1)
        short = torch.zeros(2**20, device="sim")
        del short
    assert has_ended() and trace.device_bytes == [before]
    assert trace.peak_bytes == before + 4 * 2**20
    with pytest.raises(RuntimeError, match="^on purpose$"), DeviceMemoryTrace() as trace:
        large = torch.zeros(2**20, device="sim")
        raise RuntimeError("on purpose")
    assert has_ended() and trace.seconds
    assert trace.peak_bytes >= tensor_bytes([large])
