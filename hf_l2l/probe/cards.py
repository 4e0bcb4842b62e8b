"""Figures of well-known cards and a host as they are often sold, assumed: for a question before there is a machine.

Layers are assumed to reach 60 % of the dense peak of the data sheet, as a well-run training of a transformer does; a
large matrix product alone comes closer to the peak. `probe` measures a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple

from hf_l2l.probe.disk import DiskRates
from hf_l2l.probe.figures import HardwareFigures

REACHED = 0.6
"""The part of a card's dense peak that layers reach in a training."""
ADAMW_BYTES = 28
"""Bytes of memory that AdamW reads and writes per parameter, in fp32."""


ASSUMED_DISK = DiskRates(read=3e9, written=2e9, read_beside=2e9, written_beside=1.5e9)
"""Of an NVMe disk beside them."""


class _Card(NamedTuple):
    title: str
    memory: int
    """MiB, as the driver reports it."""
    peak: Mapping[str, float]
    """Dense TFLOP/s of the data sheet by the dtype in which layers compute, with sums in fp32."""
    link: float
    """GB/s each way, both at once."""
    dram: float
    """GB/s of host memory: two channels of a desktop, or one socket of a server."""
    device_dram: float
    """GB/s of the device's own memory, of its data sheet."""

    def figures(self) -> HardwareFigures:
        link = self.link * 1e9
        return HardwareFigures(
            device_name=self.title,
            device_memory_bytes=self.memory * 2**20,
            link_up=link,
            link_down=link,
            link_up_both=link,
            link_down_both=link,
            dram=self.dram * 1e9,
            adamw_by_threads={1: self.dram * 1e9 / ADAMW_BYTES},
            flops={dtype: REACHED * peak * 1e12 for dtype, peak in self.peak.items()},
            page_locked=True,
            device_adamw=self.device_dram * 1e9 / ADAMW_BYTES,
        )


_CARDS: Mapping[str, _Card] = {
    "t4": _Card("T4", 15360, {"fp32": 8.1, "fp16": 65}, 12, 70, 320),
    "v100": _Card("V100", 32768, {"fp32": 15.7, "fp16": 125}, 12, 100, 900),
    "a100": _Card("A100", 81920, {"fp32": 19.5, "fp16": 312, "bf16": 312}, 25, 150, 2039),
    "h100": _Card("H100", 81559, {"fp32": 67, "fp16": 989, "bf16": 989}, 55, 150, 3350),
    "h200": _Card("H200", 143771, {"fp32": 67, "fp16": 989, "bf16": 989}, 55, 150, 4800),
    "rtx3090": _Card("RTX 3090", 24576, {"fp32": 35.6, "fp16": 71, "bf16": 71}, 25, 50, 936),
    "rtx4090": _Card("RTX 4090", 24564, {"fp32": 82.6, "fp16": 165, "bf16": 165}, 25, 70, 1000),
    "rtx5090": _Card("RTX 5090", 32607, {"fp32": 104.8, "fp16": 209.5, "bf16": 209.5}, 50, 70, 1792),
}
CARDS = tuple(_CARDS)
"""The names of the cards."""


def card_named(name: str, option: str = "--card") -> HardwareFigures:
    """The assumed figures of a card, in any case and with or without blanks and dashes.

    Raises:
        ValueError: if it is not known; `option` is what the user calls it.
    """
    plain = "".join(character for character in name.lower() if character.isalnum())
    if plain in _CARDS:
        return _CARDS[plain].figures()
    near = get_close_matches(plain, CARDS, n=1)
    remedy = f"did you mean {near[0]}?" if near else "take the one most like yours, or measure yours with --probe"
    raise ValueError(f"{option} must be one of {', '.join(CARDS)} (got {name!r}); {remedy}")


def assumed_sentence(figures: HardwareFigures) -> str:
    """What is said of times that are computed with figures of a card."""
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in figures.flops.items())
    assert figures.link_up is not None
    return (
        f"times are computed with assumed figures, not measured ones, of the {figures.device_name} and its host: "
        f"layers reach {REACHED:.0%} of the dense peak ({rates}), the link {figures.link_up / 1e9:g} GB/s each way, "
        f"host memory {figures.dram / 1e9:g} GB/s, a disk reads {ASSUMED_DISK.read / 1e9:g} GB/s; --probe measures "
        "the machine on which it runs"
    )
