"""What devices and their links reach at most: table A.1 of arXiv:2106.02679, and the same of other cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from hf_l2l.option_names import option

GIB = 1024**3
"""Bytes of what the paper calls a GB: its intensities and its memory are in these."""
TERA = 1e12


@dataclass(frozen=True)
class Hardware:
    """A device of a cluster. Bandwidths count input and output together, in GiB/s, as in table A.1."""

    name: str
    peak_flops: float
    """Operations per second of dense matrix products in 16 bits that add in fp32."""
    memory_gib: float
    memory_bandwidth: float
    """Of the device's memory."""
    pci_express: float
    """Of the device's slot."""
    cpu_gpu: float
    """Between the device and host memory; half of the slot where two devices share one link to the processor."""
    node_link: float | None
    """Among the devices of a node, as NVLink; None: over PCI-express."""
    node_size: int
    """Devices of a node that `node_link` connects, the bound of tensor parallelism (section 5)."""
    network: float
    """Of one device to other nodes."""
    host_memory_bandwidth: float
    """Of a node's host memory, reads and writes together, which bounds updates on the host."""
    source: str
    """Where the figures are from."""

    def intensity(self, gib_per_s: float) -> float:
        """From which arithmetic intensity on a transfer is hidden at this bandwidth, in flop/byte (section 2.3)."""
        return self.peak_flops / (gib_per_s * GIB)

    @property
    def tensor_link(self) -> float:
        """The bandwidth of tensor parallelism, in GiB/s."""
        return self.pci_express if self.node_link is None else self.node_link

    def intensities(self) -> dict[str, float]:
        """The thresholds of table A.1: what -> flop/byte."""
        found = {
            "GPU memory": self.memory_bandwidth,
            "NVLINK": self.node_link,
            "PCI-express": self.pci_express,
            "InfiniBand (200 Gb/s)": INFINIBAND,
            "CPU-GPU": self.cpu_gpu,
            "Ethernet (25 Gb/s)": ETHERNET,
            "Disk (NVMe)": NVME,
            "Disk (Hard drive)": HARD_DRIVE,
        }
        return {name: self.intensity(value) for name, value in found.items() if value is not None}


INFINIBAND, ETHERNET, NVME, HARD_DRIVE = 50.0, 6.25, 3.2, 0.1
"""Of 200 Gbit/s and 25 Gbit/s, both directions together, and of disks, as table A.1 has them."""

PAPER = "arXiv:2106.02679, appendix A"
_HOPPER = "dense, half of what is listed with sparsity; DGX: 400 Gbit/s per GPU, two Xeon 8480C at DDR5-4400"
_DESKTOP = "fp16 with fp32 sums, dense; two channels of DDR5-5600; 25 Gbit/s assumed"
_CARDS = (
    Hardware(
        *("v100", 125 * TERA, 32, 900, 31.5, 15.75, 300, 8, INFINIBAND / 4, 136.5),
        source="NVIDIA V100 datasheet (SXM2); DGX-1: four times 100 Gbit/s, two Xeon E5-2698 v4 at DDR4-2133",
    ),
    Hardware(
        *("a100", 312 * TERA, 80, 2039, 63, 31.5, 600, 16, INFINIBAND, 409.6),
        source=f"{PAPER}; DGX A100: two EPYC 7742 at DDR4-3200",
    ),
    Hardware(
        *("h100", 989.4 * TERA, 80, 3350, 126, 126, 900, 8, 2 * INFINIBAND, 563.2),
        source=f"NVIDIA H100 datasheet (SXM; {_HOPPER})",
    ),
    Hardware(
        *("h200", 989.4 * TERA, 141, 4800, 126, 126, 900, 8, 2 * INFINIBAND, 563.2),
        source=f"NVIDIA H200 datasheet (SXM; {_HOPPER})",
    ),
    Hardware(
        *("rtx4090", 165.2 * TERA, 24, 1008, 63, 63, None, 8, ETHERNET, 89.6),
        source=f"NVIDIA Ada architecture whitepaper ({_DESKTOP})",
    ),
    Hardware(
        *("rtx5090", 209.5 * TERA, 32, 1792, 126, 126, None, 8, ETHERNET, 89.6),
        source=f"NVIDIA RTX Blackwell architecture whitepaper ({_DESKTOP})",
    ),
)
HARDWARE: Mapping[str, Hardware] = {card.name: card for card in _CARDS}
"""Name -> device. Only the A100 has the paper's figures; memory and links of others are the makers' nominal ones."""


def hardware_named(name: str) -> Hardware:
    """The device of this name, in any case and with or without blanks and dashes.

    Raises:
        ValueError: if there is none.
    """
    plain = "".join(character for character in name.lower() if character.isalnum())
    if plain in HARDWARE:
        return HARDWARE[plain]
    near = get_close_matches(plain, HARDWARE, n=1)
    remedy = f"did you mean {near[0]}?" if near else "take the one that is most like yours"
    raise ValueError(f"{option('hardware')} must be one of {', '.join(HARDWARE)} (got {name!r}); {remedy}")
