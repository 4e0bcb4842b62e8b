"""The time of several ranks: bytes of host memory by the table, and where scaling stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_l2l.pipeline.ranks import ADAMW_BYTES, HostBytes, RanksTime, ranks_time
from hf_l2l.pipeline.times import LayerSeconds, step_time

OUTSIDE = LayerSeconds(0.001, 0.002, 0.0, up=0.001, down=0.002, update=0.001)


def layers(count: int, compute: float) -> list[LayerSeconds]:
    return [LayerSeconds(compute, 2 * compute, compute, up=0.01, up_again=0.01, down=0.02, update=0.005)] * count


@pytest.mark.parametrize(("ranks", "per_parameter"), [(1, 38), (2, 58), (4, 82), (8, 130)])
def test_bytes_of_host_memory_per_parameter(ranks, per_parameter):
    """Weights travel in 2 bytes, twice; sums in 4; and AdamW's 30."""
    assert HostBytes(up=4, down=4, parameters=1).moved(ranks) == per_parameter


def test_one_rank_is_the_plain_relay():
    found = ranks_time(layers(12, 0.05), OUTSIDE, [HostBytes(4, 4, 1)] * 13, 1, dram=1e9)
    one = step_time(layers(12, 0.05), OUTSIDE)
    assert (found.seconds, found.bound, found.times_as_many) == (one.seconds, one.bound, 1)


def test_ranks_scale_until_the_host_has_no_more_bytes_per_second():
    moved = [HostBytes(4 * 10**7, 4 * 10**7, 10**7)] * 12 + [HostBytes(4 * 10**6, 4 * 10**6, 10**6)]
    found = {n: ranks_time(layers(12, 0.05), OUTSIDE, moved, n, dram=2e10) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert found[2].times_as_many == pytest.approx(2, rel=0.01)
    assert found[8].times_as_many == pytest.approx(8, rel=0.01)
    assert [found[n].bound for n in (8, 64)] == ["compute", "host memory"]
    limit = 2e10 / (12 * 10**7 * 12)  # ranks per second of step that host memory carries, in the end
    assert found[64].times_as_many < found[1].seconds * limit
    assert found[64].times_as_many > found[32].times_as_many > found[16].times_as_many


DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "ranks.md"
TOKENS = 8 * 4096
MACHINES = {
    # parameters of a layer, layers, parameters outside, FLOP/s, bytes/s of a link each way, bytes/s of the host
    "BERT-large, V100 at 100 TFLOP/s, PCIe 12 GB/s, host 100 GB/s": (12_600_000, 24, 32_000_000, 1e14, 12e9, 1e11),
    "the same, host 400 GB/s": (12_600_000, 24, 32_000_000, 1e14, 12e9, 4e11),
    "Llama-8B, H100 at 400 TFLOP/s, PCIe 50 GB/s, host 300 GB/s": (218_000_000, 32, 1_050_000_000, 4e14, 5e10, 3e11),
    "the same, host 800 GB/s": (218_000_000, 32, 1_050_000_000, 4e14, 5e10, 8e11),
}


def of_machine(name: str, ranks: int) -> RanksTime:
    """With 8 micro-batches of 4,096 tokens in each rank, and weights in 16 bits."""
    size, count, rest, flops, link, dram = MACHINES[name]

    def seconds(parameters: int) -> LayerSeconds:
        forward, up = 2 * parameters * TOKENS / flops, 2 * parameters / link
        update = parameters * ADAMW_BYTES / dram
        return LayerSeconds(forward, 2 * forward, forward, up=up, up_again=up, down=2 * up, update=update)

    moved = [HostBytes(4 * each, 4 * each, each) for each in [size] * count + [rest]]
    return ranks_time([seconds(size)] * count, seconds(rest), moved, ranks, ubatches=8, dram=dram)


@pytest.mark.parametrize("name", MACHINES)
def test_the_table_of_the_document(name):
    found = {ranks: of_machine(name, ranks) for ranks in (2, 4, 8, 16, 32, 64)}
    row = " | ".join(f"{each.times_as_many:.1f}" for each in found.values())
    stops = next((f"{ranks}: {each.bound}" for ranks, each in found.items() if each.bound == "host memory"), "none")
    assert f"| {name} | {row} | {stops} |" in DOCUMENT.read_text()
