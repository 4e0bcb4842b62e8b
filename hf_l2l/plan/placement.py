"""`Placement`: what stays on the device, and what each layer costs then, in bytes and in time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Placement:
    """How many layers keep what on the device. The fields are those of `L2LConfig`."""

    ubatch_size: int
    stash: str
    boundary: str
    resident: str = "none"
    resident_layers: int = 0
    kept_weights: int = 0
    kept_graphs: int = 0
    device_stash: int = 0

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
