"""Several simulated accelerators: each has memory, streams, links and a generator. Peer copies have CUDA's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_l2l.testing import Costs, enable_simulated_accelerator, virtual_clock

N = 64


@pytest.fixture(autouse=True)
def _four() -> Iterator[None]:
    enable_simulated_accelerator(devices=4)
    yield
    torch.sim.set_device(0)
    enable_simulated_accelerator()


def square(device: str) -> torch.Tensor:
    return torch.ones(N, N, device=device)


def test_a_tensor_is_where_it_was_asked_for():
    for index in range(4):
        made = torch.zeros(3, device=f"sim:{index}"), torch.randn(2).to(index)
        assert {t.device for t in made} == {torch.device("sim", index)}
        assert (made[0] + 1).device == made[0].new_empty(5).device == made[0].bool().device == made[0].device
    with torch.sim.device(2):
        assert torch.empty(1, device="sim").device.index == torch.sim.current_device() == 2
    assert torch.empty(1, device="sim").device.index == 0
    assert torch.sim.device_count() == torch.accelerator.device_count() == 4
    assert (square("sim:1") + torch.ones(())).device.index == 1, "a number of the host may be anywhere"


def test_what_is_refused():
    for make, error, match in (
        (lambda: torch.empty(1, device="sim:4"), RuntimeError, "invalid device sim:4.* an index below 4"),
        (lambda: torch.sim.synchronize("sim:7"), ValueError, "an index below 4"),
        (lambda: square("sim:0") + square("sim:1"), RuntimeError, "aten::add.* on the same device.*sim:0.*sim:1"),
        (lambda: square("sim:0") + torch.ones((), device="sim:1"), RuntimeError, "same device"),
        *((lambda n=n: enable_simulated_accelerator(devices=n), ValueError, "from 1 to 8") for n in (0, 9, 1.0, "2")),
        (lambda: costs(launch_s=-1.0), ValueError, "launch_s must be a number of seconds"),
    ):
        with pytest.raises(error, match=match):
            make()


def test_inference_tensors_are_those_that_are_made_in_inference_mode():
    """Whatever the first one of a device and dtype in the process was."""
    before, host = torch.ones(2, dtype=torch.int16, device="sim:3"), torch.ones(2, dtype=torch.int16)
    for is_inference in (True, False, True, False):
        with torch.inference_mode(is_inference):
            made = torch.ones_like(before), before + 1, host.to("sim:3")
        assert [x.is_inference() for x in made] == [is_inference] * 3


def test_memory_is_counted_for_each():
    before = [torch.sim.memory_allocated(index) for index in range(4)]
    kept = torch.ones(1000, device="sim:2")
    assert [torch.sim.memory_allocated(index) - n for index, n in enumerate(before)] == [0, 0, 4000, 0]
    free = torch.sim.mem_get_info(1)[0]
    enable_simulated_accelerator(20_000, devices=4)
    with pytest.raises(torch.OutOfMemoryError, match="live on sim:1"):
        torch.empty(6000, device="sim:1")
    assert free > torch.sim.mem_get_info(1)[0] and torch.empty(3000, device="sim:3").nbytes == 12_000
    del kept
    assert torch.sim.memory_allocated(2) == before[2]


def test_each_draws_of_its_own_generator():
    torch.sim.manual_seed_all(5)
    first, again = (torch.rand(4, device=f"sim:{index}").cpu() for index in (0, 3))
    assert first.equal(again)
    state = torch.sim.get_rng_state(1)
    torch.rand(4, device="sim:0")
    assert torch.sim.get_rng_state(1).equal(state)
    torch.nn.functional.dropout(square("sim:1"))
    assert not torch.sim.get_rng_state(1).equal(state)
    assert len(torch.sim.get_rng_state_all()) == 4


def test_kernels_run_on_the_stream_of_the_device_of_their_tensors():
    side = torch.sim.Stream(device="sim:1", name="side of one")
    value = square("sim:1")
    side.wait_stream(torch.sim.default_stream("sim:1"))
    with side, torch.sim.device(0):
        value.add_(1)  # the current device is another one
    race = "aten::sum on the default stream of sim:1: read-after-write race.* side of one"
    with pytest.raises(RuntimeError, match=race):
        value.sum()
    torch.sim.synchronize("sim:0")  # waits for no other device
    with pytest.raises(RuntimeError, match=race):
        value.sum()
    torch.sim.synchronize("sim:1")
    assert value.sum().item() == 2 * N * N


def test_a_peer_copy_on_a_side_stream_is_late_and_must_be_waited_for():
    source, target = square("sim:0"), torch.zeros(N, N, device="sim:1")
    side, other = torch.sim.Stream(device="sim:0", name="out"), torch.sim.Stream(device="sim:1", name="in")
    side.wait_stream(torch.sim.default_stream("sim:0"))
    other.wait_stream(torch.sim.default_stream("sim:1"))
    before = torch.sim.current_device()
    with side, other:
        target.copy_(source, non_blocking=True)
    assert torch.sim.current_device() == before
    with pytest.raises(RuntimeError, match="write-after-read race.* out"):
        source.zero_()
    with pytest.raises(RuntimeError, match="read-after-write race.* out"):
        target.sum()
    torch.sim.default_stream("sim:1").wait_stream(other)  # which has waited for the copy
    total = target.sum()
    with pytest.raises(RuntimeError, match="write-after-read race"):
        source.zero_()
    torch.sim.default_stream("sim:0").wait_stream(side)
    source.zero_()
    assert total.item() == N * N
    target.copy_(source, non_blocking=True)  # on the current streams of both, which it follows and is followed by
    assert target.sum().item() == 0
    source.add_(1)


def costs(**options: Any) -> Costs:
    known = {"link_bytes_per_s": 4.0 * N * N, "flop_per_s": 2.0 * N**3, "host_bytes_per_s": 1e12}
    return Costs(**{**known, **options})


def test_devices_have_links_of_their_own_a_peer_copy_takes_the_time_of_its_bytes_and_a_launch_time_of_the_host():
    value, host = square("sim:0"), torch.ones(N, N).pin_memory()
    with virtual_clock(costs(peer_bytes_per_s=2.0 * N * N)) as clock:
        squared = value @ value
        first, second = squared.to("sim:1"), squared.to("sim:2")  # one after the other: one device sends both
        first @ first
        second @ second
        for index in range(2):
            with torch.sim.Stream(device=index):
                host.to(f"sim:{index}", non_blocking=True)
        assert clock.end == 1 + 4 + 1
        assert clock.busy("peer") == 4 and clock.busy("peer", device=1) == 0
        for index in range(3):
            assert (clock.busy("compute", device=index), clock.busy("upload", device=index)) == (1, index < 2)
        assert clock.now == 0, "the host waits for none of it"
    with virtual_clock(costs(peer_bytes_per_s=2.0 * N * N)) as clock:
        first @ first
        first.copy_(value)
        assert clock.end == 1 + 2, "after what the device that receives it was given"
    with virtual_clock(costs(launch_s=0.25, flop_per_s=1e30)) as clock:
        for _ in range(8):
            value @ value
        assert clock.now == 2 and clock.busy("launch") == 2
