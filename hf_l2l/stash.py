"""The stash: what a layer call was given, kept until the backward sweep recomputes it.

"The forward pass [stashes] away only the output activations [...] in on-chip or off-chip device memory"
(arXiv:2002.05645, first text, section 3), and `stash="host"` is its equation 4: device memory that does not grow with
depth. Tensors kept here are handed to autograd's saved tensors, so that they live exactly as long as the graph does:
freed by the backward that uses them, by a batch that is thrown away, kept by `retain_graph=True`; and a change in
place between the two sweeps is found out.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l import stream
from hf_l2l.config import StashPlace


class Stash:
    """Keeps the tensor arguments of layer calls, on the device or in host memory.

    One instance serves one engine. With `place="host"` each layer's own input travels to the host; what several layers
    are given alike (an attention mask, position embeddings, encoder states) stays on the device, where it exists once
    and not once per layer.
    """

    def __init__(self, place: StashPlace, device: torch.device) -> None:
        self.place = place
        self.device = device
        # Tensors that a layer of this forward has been given, to find those that are given again.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def start_forward(self) -> None:
        """Forget which tensors earlier forwards shared among layers."""
        self._seen = WeakIdKeyDictionary()

    def keep(self, tensors: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
        """What stands in the stash for `tensors`; only those whose rows can be fetched one ubatch at a time travel."""
        if self.place == "device" or stream.shares_host_memory(self.device):
            return tensors
        return [self._to_host(t) if rows else t for t, rows in zip(tensors, batched, strict=True)]

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor in self._seen
        self._seen[tensor] = True
        return tensor if shared else tensor.detach().to(stream.HOST, copy=True)

    def fetch(self, kept: torch.Tensor) -> torch.Tensor:
        """`kept`, or the rows of it that the caller narrowed it to, on the device."""
        return kept if kept.device == self.device else kept.to(self.device)
