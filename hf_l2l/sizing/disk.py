"""What a disk makes of a training: state that passes through it in each step, and real-time checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hf_l2l.memory.memory_estimate import MemoryEstimate
from hf_l2l.probe.disk import DiskRates, disk_rates
from hf_l2l.realtime.schedule import Schedule
from hf_l2l.runtime.tensors import size_text


def measured_rates(folder: str) -> DiskRates:
    """The rates of the disk of a folder.

    Raises:
        ValueError: if nothing can be written there.
    """
    try:
        return disk_rates(Path(folder))
    except OSError as error:
        raise ValueError(
            f"--disk must be a folder in which a file can be written (got {folder!r}: {error.strerror or error}); "
            "name the one for l2l_state_dir or l2l_realtime_checkpoint"
        ) from error


def disk_seconds(found: MemoryEstimate, rates: DiskRates) -> float:
    """The time for which a step keeps the disk busy with state that is there."""
    traffic = found.state_traffic
    return rates.seconds(traffic.read, traffic.written, alone=traffic.read_alone)


def disk_sentences(found: MemoryEstimate, rates: DiskRates | None, step_s: float | None) -> Iterator[str]:
    """What is told of the disk.

    Args:
        found: bytes of masters and state, and of what a step reads and writes of them.
        rates: those of the disk, if they were measured.
        step_s: seconds of a step, without the disk, if they are known.
    """
    traffic = found.state_traffic
    if found.on_disk:
        yield (
            f"masters and optimizer state, {size_text(found.on_disk)}, are on disk; a step reads "
            f"{size_text(traffic.read)} of them and writes {size_text(traffic.written)}"
        )
    if rates is None:
        return
    read, written, *both = (f"{size_text(int(each))}/s" for each in rates)
    yield f"the disk reads {read} and writes {written}, at once {' and '.join(both)} (measured)"
    if found.on_disk:
        seconds = disk_seconds(found, rates)
        most = max(seconds, step_s or 0.0)
        bound = "" if step_s is None else f", {'the disk' if seconds > step_s else 'the rest of the step'} bounds it"
        yield f"a step keeps it busy for {seconds:.3g} s: at most {3600 / most:,.0f} steps per hour{bound}"
        step_s = None if step_s is None else most
    # Beside weights and state, a checkpoint has a few KiB.
    num_bytes = found.masters + found.moments
    # Written, and read again for its digests; what is on disk is read first.
    write_s = num_bytes / rates.written + num_bytes / rates.read * (2 if found.on_disk else 1)
    told = (
        f"a real-time checkpoint has {size_text(num_bytes)}, which this disk takes in {write_s:.3g} s, with digests; "
        f"copies of layers that are updated meanwhile take up to {size_text(found.layers_being_saved)} of host memory"
    )
    if step_s is None:
        yield told
        return
    schedule = Schedule("auto", 0)
    per_day = schedule.bytes_per_day(num_bytes, step_s, write_s) / 1e12
    lost = schedule.most_lost(step_s, write_s)
    yield (
        f"{told}. With l2l_realtime_every='auto', a crash loses at most {lost} steps, and {per_day:.3g} TB are "
        "written per day"
    )
