"""What a disk makes of a training: rates, bytes of a step, real-time checkpoints."""

from __future__ import annotations

import pytest

from cli_models import LLAMA, ran, refused, written
from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.memory.state_traffic import StatePart, StateTraffic, state_traffic
from hf_l2l.probe.disk import DiskRates, disk_rates, write_rate
from hf_l2l.sizing.disk import disk_seconds, disk_sentences, measured_rates

GB = 10**9
ON_DISK = MemoryEstimate(
    masters=4 * GB,
    gradients=4 * GB,
    moments=8 * GB,
    shell=0,
    slots=0,
    on_disk=12 * GB,
    state_traffic=StateTraffic(window=2 * GB, read=16 * GB, written=12 * GB),
)
RATES = DiskRates(read=2.0 * GB, written=1.0 * GB, read_beside=0.0 + GB, written_beside=0.5 * GB)
"""Of a disk that shares its time among reading and writing."""


def test_the_probe_leaves_nothing(tmp_path):
    rates = disk_rates(tmp_path, 2**20)
    assert min(rates) > 0 and write_rate(tmp_path, 2**20) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="No such file or directory"):
        measured_rates(str(tmp_path / "nowhere"))


def test_a_step_takes_as_long_as_the_disk_does():
    assert disk_seconds(ON_DISK, RATES) == pytest.approx(8.0 + 12.0)
    # One that does both at once: 12 s of writing, and of the reading what comes before it.
    both = DiskRates(2.0 * GB, 1.0 * GB, 2.0 * GB, 1.0 * GB)
    assert disk_seconds(ON_DISK, both) == pytest.approx(12.0)
    assert both.seconds(16 * GB, 12 * GB, alone=4 * GB) == pytest.approx(2.0 + 12.0)
    assert both.seconds(30 * GB, 12 * GB, alone=4 * GB) == pytest.approx(2.0 + 13.0)
    assert both.seconds(0, 0) == 0
    told = "\n".join(disk_sentences(ON_DISK, RATES, 5.0))
    assert "keeps it busy for 20 s: at most 180 steps per hour, the disk bounds it" in told
    # A checkpoint of 12 GB after every second step: 6 s to read the state on disk, 12 s to write, 6 s for digests.
    assert "which this disk takes in 24 s, with digests; copies of layers" in told
    assert "With l2l_realtime_every='auto', a crash loses at most 4 steps" in told
    assert f"{12e9 * 86400 / 40 / 1e12:.3g} TB are written per day" in told
    assert "at most 120 steps per hour, the rest of the step bounds it" in "\n".join(
        disk_sentences(ON_DISK, RATES, 30.0)
    )


@pytest.mark.parametrize(
    ("layers", "read", "written"),
    [
        # All parts and moments: nothing is read again where the window holds everything.
        (8, 0, 0),
        # Room for two layers, and for one that is being written. The forward finds the masters of layer 4, which was
        # updated last, the backward those of all; updates find those of 1 and 2. State is read for each update.
        (3, 3 + (2 + 2 + 3 + 3), 3 * 4),
    ],
)
def test_what_a_step_reads_and_writes(layers, read, written):
    """Four layers of one page of masters and two of state."""
    page = 4096
    parts = [StatePart(float(number), page, 2 * page) for number in range(1, 5)]
    found = state_traffic(parts, layers, reads_masters=True, stays=0)
    assert (found.read // page, found.written // page) == (read, written)
    # Each forward follows the update; the backward reads the masters of two layers, which the next updates find.
    after = state_traffic(parts, layers, reads_masters=True, stays=0, updates="deferred")
    assert (after.read // page, after.written // page) == ((0, 0) if layers == 8 else (2 + 4 * 3 - 2, 12))
    eager = state_traffic(parts, layers, reads_masters=True, stays=0, updates="eager")
    assert eager[:3] == found[:3]
    alone = [each.read_alone // page for each in (found, eager, after)]
    assert alone == ([0, 0, 0] if layers == 8 else [3, 3, 2])
    copies = state_traffic(parts, layers, reads_masters=False, stays=0)
    assert (copies.read // page, copies.written // page) == ((0, 0) if layers == 8 else (12, 12))


def test_ranks_have_no_state_on_disk(tmp_path, capsys):
    """The estimate refuses what a training refuses."""
    given = ("estimate", written(tmp_path / "model", LLAMA), "--l2l_state_tier", "disk")
    assert "is for one process" in refused(capsys, *given, "--ranks", "2")
    assert ran(capsys, *given, "--ranks", "1").status == 0
