"""Plans past one machine, by the resource usage of "Layered gradient accumulation and modular pipeline parallelism"
(arXiv:2106.02679): which micro-batches and degrees of parallelism train a transformer fastest on given hardware, how
efficient that is, how long it takes, and how much memory each device needs. Plain arithmetic, without torch.
"""

from __future__ import annotations

from hf_l2l.scale.hardware import HARDWARE, Hardware, hardware_named
from hf_l2l.scale.planner import METHODS, PARALLELISM, Limits, Plan, fastest, smallest
from hf_l2l.scale.shape import TransformerShape, critical_batch
from hf_l2l.scale.usage import ARRANGED, Cluster, Degrees, Efficiency, Memory, Method, Usage

__all__ = [
    "ARRANGED",
    "HARDWARE",
    "METHODS",
    "PARALLELISM",
    "Cluster",
    "Degrees",
    "Efficiency",
    "Hardware",
    "Limits",
    "Memory",
    "Method",
    "Plan",
    "TransformerShape",
    "Usage",
    "critical_batch",
    "fastest",
    "hardware_named",
    "smallest",
]
