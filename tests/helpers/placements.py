"""Where weights, their state, graphs and stash can be: options, and what each of them changes of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from devices import DEVICE
from hf_l2l.testing import Costs, virtual_clock

LAYERS = 4
"""Of the models that the numbers below are about; placements fit models of 3 layers, too."""


class Placement(NamedTuple):
    """Options, and what follows from them on a device with memory of its own."""

    options: dict[str, Any]
    resident_layers: int = 0
    """How many layers' masters are on the device, the first ones."""
    resident_shell: bool = False
    uploads: int = 2 * LAYERS - 2
    """Layers that a steady step uploads: two stay in their slots between the sweeps."""
    kept: dict[str, int] = {}
    """Names in the memory report -> layers whose weights they have."""

    is_exact: bool = True
    """Whether sums have the order of those of streamed layers: the gradients of embeddings and heads that run by
    micro-batches have not."""

    @property
    def has_same_bits(self) -> bool:
        """Whether a training has the bits of streamed layers. CUDA's updates round in another way than the host's."""
        updates = (self.resident_layers or self.resident_shell) and "resident_update" not in self.options
        return self.is_exact and not (DEVICE == "cuda" and updates)

    def is_resident(self, name: str) -> bool:
        """Whether the parameter of that name of a `Toy` is on the device."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) < self.resident_layers
        return self.resident_shell


PLACEMENTS: dict[str, Placement] = {
    "streamed": Placement({}),
    "tight": Placement({"prefetch": False, "gradient_slots": 1}),
    "stash on the host": Placement({"stash": "host"}),
    "boundary on the host": Placement({"stash": "host", "boundary": "host"}, is_exact=False),
    "some stash on the device": Placement({"stash": "host", "device_stash": 2}),
    "shell": Placement({"resident": "shell"}, resident_shell=True),
    "first layer": Placement({"resident_layers": 1}, 1, uploads=4),
    "shell and layers": Placement({"resident": "shell", "resident_layers": 2}, 2, True, uploads=2),
    "all": Placement({"resident": "all"}, LAYERS, True, uploads=0),
    "layers, updated on the host": Placement(
        {"resident_layers": 2, "resident_update": "host"}, uploads=2 + 2, kept={"resident layers": 2}
    ),
    "all, updated on the host": Placement({"resident": "all", "resident_update": "host"}, uploads=LAYERS),
    "kept weights": Placement({"kept_weights": 1}, uploads=2 * LAYERS - 2 - 1, kept={"kept weights": 1}),
    "kept graphs": Placement({"kept_graphs": 2}, uploads=2 * LAYERS - 2 - 2, kept={"kept weights": 2}),
    "all and graphs": Placement({"resident": "all", "kept_graphs": 3}, LAYERS, True, uploads=0),
    "some of each": Placement({"resident_layers": 1, "kept_weights": 2, "kept_graphs": 1}, 1, uploads=LAYERS - 1),
}

RATE = 1e9
"""Bytes per second of the links of `traffic`."""


def traffic(run: Callable[[], object]) -> dict[str, int]:
    """Bytes of weights and their gradients that `run` uploads and downloads, on the simulated accelerator: those of
    the lanes, which are not the stream that computes."""
    with virtual_clock(Costs(link_bytes_per_s=RATE, flop_per_s=1e12, host_bytes_per_s=1e12)) as clock:
        run()
    found = {"upload": 0.0, "download": 0.0}
    for task in clock.tasks:
        if task.lane in found and task.stream != "the default stream":
            found[task.lane] += task.end - task.start
    return {lane: round(seconds * RATE) for lane, seconds in found.items()}


def travelling_bytes(module: Any, element: int = 4) -> int:
    """Of the weights of a layer: each of them begins at a multiple of 256 bytes."""
    return sum(-(-p.numel() * element // 256) * 256 for p in module.parameters())
