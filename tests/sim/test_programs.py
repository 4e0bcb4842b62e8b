"""What looks at the simulated accelerator: the probe, hf-l2l env and verify, run_glue_l2l.py, and traces of memory."""

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
from hf_l2l.probe.figures import LINK, HardwareFigures
from hf_l2l.probe.rates import Sizes, probe
from hf_l2l.runtime import stream, wait_reasons
from hf_l2l.testing import copies_under_way, enable_simulated_accelerator, page_lock_limit, page_locked_bytes
from hf_l2l.verify import checks
from training import settled_memory

# ---- the probe, whose rates mean nothing here

TINY = Sizes(copied_bytes=2**16, parameters=2**10, most_rows=64, seconds=0.0)


def test_the_figures(monkeypatch):
    """The second half of the measurement of the link is from or to page-locked memory."""
    pinned, locked = [], []
    copy, lock = torch.Tensor.copy_, stream.page_lock

    def copy_(target, source, non_blocking=False):
        if non_blocking:
            here = source if source.device == stream.HOST else target
            pinned.append(any(here.data_ptr() in range(start, start + 2**16) for start in locked))
        return copy(target, source, non_blocking)

    def page_lock(address, num_bytes, device):
        locked.append(address)
        return lock(address, num_bytes, device)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "page_lock", page_lock)
    before = page_locked_bytes()
    figures = probe(sizes=TINY)
    assert pinned == [False] * (len(pinned) // 2) + [True] * (len(pinned) // 2) and len(pinned) == 48
    assert figures.device_name == "simulated accelerator" and figures.page_locked is True
    assert figures.device_memory_bytes == stream.memory_of(torch.device("sim:0"))
    assert all(getattr(figures, name) > 0 for name in LINK) and figures.flops["fp32"] > 0
    assert figures.pageable.keys() == {"up", "down", "up_both", "down_both"}
    assert page_locked_bytes() == before and copies_under_way() == 0
    assert HardwareFigures.from_json(figures.to_json()) == figures


def test_a_small_device():
    enable_simulated_accelerator("2MiB")
    try:
        figures = probe(sizes=Sizes(copied_bytes=2**16, parameters=2**20, most_rows=2048, seconds=0.0))
    finally:
        enable_simulated_accelerator()
    assert figures.flops["fp32"] > 0 and figures.link_up > 0
    assert figures.device_adamw is None, "its state has 16 MiB"


def test_page_locking_that_is_refused():
    """The rates of the link are those of pageable memory then."""
    with page_lock_limit(0):
        figures = probe(sizes=TINY)
    stream.forget_refusal(torch.device("sim:0"))
    assert figures.page_locked is False
    assert [getattr(figures, name) for name in LINK] == [figures.pageable[name.removeprefix("link_")] for name in LINK]


def test_lanes_need_the_memory_filled(monkeypatch):
    wait = stream.wait

    def without(point, why, **options):
        if why != wait_reasons.PROBE_FILLED:
            wait(point, why, **options)

    monkeypatch.setattr(stream, "wait", without)
    with pytest.raises(RuntimeError, match="write-after-write race"):
        probe(sizes=TINY)
    torch.sim.synchronize()


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


def test_verify_runs_the_layers_there_if_asked(tmp_path, capsys, monkeypatch):
    """Two of the checks; all of them, on the CPU: tests/programs."""
    verify, some = checks.verify, ("gradients", "generate")
    monkeypatch.setattr("hf_l2l.cli.verify.COMPARED", some)
    monkeypatch.setattr(checks, "verify", lambda family, names=some, device="cpu": verify(family, names, device))
    source = written(tmp_path, LLAMA, num_hidden_layers=1)
    for device, flags in (("cpu", ()), ("sim:0", ("--device", "sim"))):
        held = settled_memory()
        torch.sim.reset_peak_memory_stats()
        found = ran(capsys, "verify", source, *flags, "--json")
        assert (found.status, found.json["device"], found.json["status"]) == (0, device, "green")
        assert all(each["verdict"] in ("exact", "within tolerance") for each in found.json["checks"].values())
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
    assert trace.seconds == sorted(trace.seconds) and 0 <= trace.seconds[0] < trace.seconds[-1] <= took
    assert trace.device_bytes[0] == trace.device_bytes[-1] == before
    assert max(trace.device_bytes) == trace.peak_bytes == before + 4 * 2**20


def test_the_peak_is_found_between_samples_and_is_the_block_s_own():
    """The trace ends when its block raises, and can be taken again."""
    before, trace = settled_memory(), DeviceMemoryTrace(interval_s=60)
    for count in (2**22, 2**20):
        with pytest.raises(RuntimeError, match="^on purpose$"), trace:
            wait_for_samples(trace, 1)
            short = torch.zeros(count, device="sim")
            del short
            raise RuntimeError("on purpose")
        assert has_ended() and trace.device_bytes == [before]
        assert trace.peak_bytes == before + 4 * count
