"""The tables of arXiv:2106.02679, to the printed digit."""

from __future__ import annotations

import pytest

from hf_l2l.scale import HARDWARE, Cluster, Degrees, Method, TransformerShape, Usage, critical_batch, fastest

GIB, DAY_S, YEAR_S = 2**30, 86_400, 365 * 86_400

X160 = TransformerShape.family(160)
A100 = Cluster(HARDWARE["a100"])
BASELINE, PARTITIONED, IMPROVED = Method.BASELINE, Method.PARTITIONED, Method.IMPROVED

FASTEST = {
    ("none", BASELINE): (True, 2416, 4, 604, 1, 1, 1, 1, "1.00", "630 y"),
    ("data", BASELINE): (True, 2415, 5, 1, 483, 483, 1, 1, "1.00", "1.3 y"),
    ("data", PARTITIONED): (True, 2415, 5, 1, 483, 483, 1, 1, "1.00", "1.3 y"),
    ("data+pipe", BASELINE): (True, 2412, 4, 201, 480, 3, 160, 1, "0.56", "2.4 y"),
    ("data+pipe", IMPROVED): (False, 2415, 1, 5, 2415, 483, 5, 1, "0.94", "100 d"),
    ("data+tensor", BASELINE): (True, 2415, 5, 1, 7728, 483, 1, 16, "0.93", "32 d"),
    ("data+tensor", PARTITIONED): (False, 2415, 5, 1, 7728, 483, 1, 16, "0.93", "32 d"),
    ("3d", BASELINE): (False, 2408, 1, 172, 35840, 14, 160, 16, "0.48", "13 d"),
    ("3d", IMPROVED): (False, 2415, 1, 5, 38640, 483, 5, 16, "0.88", "6.8 d"),
}
"""Table 6.1: offload, batch, micro-batch, micro-batches, devices, data, pipeline, tensor, efficiency, time."""

MEMORY = {
    ("none", BASELINE): ("14.1k", "47.2k", "43.9", "24.9", "61.2k", "68.8"),
    ("data", BASELINE): ("14.1k", "97.7", "43.9", "31.1", "14.2k", "75.1"),
    ("data", PARTITIONED): ("29.1", "97.7", "43.9", "31.1", "127", "75.1"),
    ("data+pipe", BASELINE): ("87.9", "98.1", "43.9", "24.9", "186", "68.8"),
    ("data+pipe", IMPROVED): ("5.82", "19.5", "43.9", "6.23", "25.4", "50.2"),
    ("data+tensor", BASELINE): ("879", "6.10", "2.75", "1.95", "885", "4.69"),
    ("data+tensor", PARTITIONED): ("1.82", "6.10", "2.75", "1.95", "7.92", "4.69"),
    ("3d", BASELINE): ("5.49", "1.31", "2.75", "0.389", "6.81", "3.14"),
    ("3d", IMPROVED): ("0.364", "1.22", "2.75", "0.389", "1.58", "3.14"),
}
"""Table 6.2, in GiB: state, checkpoint, buffers, activations, offloadable, not offloadable."""

CHOSEN = [
    (PARTITIONED, Degrees(5, 1, data=483, tensor=16), 2415, 7728, "7.92", "4.69", "0.93", "32 d"),
    (BASELINE, Degrees(1, 604, data=4, pipeline=160, tensor=16), 2416, 10240, "10.1", "3.14", "0.74", "31 d"),
    (IMPROVED, Degrees(1, 6, data=370, pipeline=5, tensor=4), 2220, 7400, "7.76", "12.5", "0.97", "32 d"),
    (PARTITIONED, Degrees(5, 2, data=166, tensor=8), 1660, 1328, "35.0", "9.38", "0.97", "180 d"),
    (BASELINE, Degrees(1, 2416, pipeline=160, tensor=8), 2416, 1280, "47.9", "6.27", "0.91", "199 d"),
    (IMPROVED, Degrees(1, 6, data=132, pipeline=5, tensor=2), 792, 1320, "22.4", "25.1", "0.97", "180 d"),
    (IMPROVED, Degrees(1, 6, data=262, pipeline=5, tensor=1), 1572, 1310, "34.2", "50.2", "0.98", "180 d"),
    (IMPROVED, Degrees(1, 6, data=17, pipeline=5, tensor=16), 102, 1360, "11.8", "3.14", "0.91", "186 d"),
]
"""Table 6.3, for which micro-batches and degrees follow from the batch, the devices and the memory. The second one's
efficiency is printed as 0.73, which its printed time of 31 days does not follow from."""


def same(value: float, printed: str) -> bool:
    """Whether a value is the printed one, to its digits: half of the last one more or less, and 1 in a million for
    what is halfway."""
    thousands = printed.endswith("k")
    digits = printed.removesuffix("k")
    last = 10.0 ** -len(digits.partition(".")[2]) if "." in digits else 10.0 ** _zeros(digits)
    return abs(value / (1000 if thousands else 1) - float(digits)) <= 0.5 * last * (1 + 1e-6)


def _zeros(digits: str) -> int:
    return len(digits) - len(digits.rstrip("0"))


def in_days_or_years(seconds: float, printed: str) -> bool:
    number, unit = printed.split()
    return same(seconds / (DAY_S if unit == "d" else YEAR_S), number)


def test_fastest_arrangements_and_their_memory():
    for (parallelism, method), (*expected, efficiency, time) in FASTEST.items():
        plan = fastest(X160, A100, method, parallelism)
        usage, to, memory = plan.usage, plan.usage.degrees, plan.usage.memory
        counts = [to.batch, to.micro_batch, to.micro_batches, to.devices, to.data, to.pipeline, to.tensor]
        assert [usage.is_offloaded, *counts] == expected
        assert same(usage.efficiency.value, efficiency), usage.efficiency
        assert in_days_or_years(plan.seconds, time)
        held = [memory.state, memory.checkpoints, memory.buffers, memory.activations]
        for value, printed in zip(
            [*held, memory.offloadable, memory.resident], MEMORY[parallelism, method], strict=True
        ):
            assert same(value / GIB, printed), (value / GIB, printed)


def test_arrangements_for_a_month_and_half_a_year():
    for method, degrees, batch, devices, off, on, efficiency, time in CHOSEN:
        usage = Usage(X160, A100, method, degrees)
        assert (degrees.batch, degrees.devices) == (batch, devices)
        assert same(usage.memory.offloadable / GIB, off) and same(usage.memory.resident / GIB, on)
        assert same(usage.efficiency.value, efficiency) and in_days_or_years(usage.seconds(), time)


def test_thresholds_of_links():
    """Table A.1."""
    printed = ["143", "484", "4.61k", "5.81k", "9.22k", "46.5k", "90.8k"]
    found = HARDWARE["a100"].intensities()
    order = ["GPU memory", "NVLINK", "PCI-express", "InfiniBand (200 Gb/s)", "CPU-GPU", "Ethernet (25 Gb/s)"]
    for name, expected in zip([*order, "Disk (NVMe)"], printed, strict=True):
        assert same(found[name], expected), name
    assert same(found["Disk (Hard drive)"] / 1e6, "2.91")


MODELS = [
    (TransformerShape.family(32), 403e6, "826"),
    (TransformerShape.of(72, 3072, 32, 1024), 8.15e9, "1130"),
    (TransformerShape.family(64), 12.9e9, "1310"),
    (TransformerShape.of(78, 4256, 28, 1024), 17.0e9, "1440"),
    (TransformerShape.of(96, 12288, 96, 2048), 174e9, "1560"),
    (TransformerShape.family(108), 176e9, "1860"),
    (TransformerShape.family(160), 1.26e12, "2420"),
    (TransformerShape.of(24, 1024, 16, 512), 302e6, "751"),
]
"""Table B.1; its parameters are to three digits, and of BERT one less (301 M)."""


def test_models():
    for shape, parameters, batch in MODELS:
        assert shape.parameters == pytest.approx(parameters, rel=4e-3)
        assert same(shape.critical_batch, batch)
    assert critical_batch(174_000_000_000) == pytest.approx(3.2e6, rel=1e-2), "in tokens, of GPT-3"


def test_the_family():
    """Equation 1, and the smallest row of table B.1, whose 488 parameters include biases and norms."""
    assert (X160.layers, X160.heads, X160.width, X160.tokens, X160.intermediate) == (160, 80, 25600, 2560, 102400)
    smallest = TransformerShape.named("X_[2]")
    assert smallest is not None and same(smallest.critical_batch, "130")
    assert smallest.parameters + 13 * smallest.width * smallest.layers == 488
    assert TransformerShape.named("gpt2") is None
