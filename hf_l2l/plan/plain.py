"""The device memory of plain training, with the whole model on the device: what L2L is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_l2l.model.precision import Precision
from hf_l2l.runtime.tensors import tensor_bytes
from hf_l2l.shapes.traced import Tracer


class PlainBytes:
    """Bytes of transformers' Trainer with fp32 weights, with and without activation checkpointing."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        moments: int,
        *,
        layer_classes: tuple[str, ...] | None,
        fuses: Callable[..., bool],
        autocast: torch.dtype | None,
    ) -> None:
        """`moments` are bytes of the optimizer's state in fp32; see `Tracer` for the others."""
        tracer = Tracer(
            model,
            Precision(model),
            layer_classes=layer_classes,
            chunk_rows=None,
            fuses=fuses,
            autocast=autocast,
        )
        self._traced = tracer.trace(inputs)
        self.weights = tensor_bytes([*model.parameters(), *model.buffers()])
        self._gradients = tensor_bytes([p for p in model.parameters() if p.requires_grad])
        self._moments = moments
        self._of_layers = [tensor_bytes([p for p in layer.parameters() if p.requires_grad]) for layer in tracer.layers]

    def peak(self, *, checkpointing: bool) -> int:
        """The most bytes at once: of the state, the graph that is left, and the gradients that are there already."""
        traced = self._traced
        kept = [call.layer.graph for call in traced.calls]
        if checkpointing:
            kept = [sum(a.num_bytes for a in call.arguments if a.needs_gradient) for call in traced.calls]
        between = sum(piece.kept for piece in traced.pieces[:-1])
        of_layers = dict(enumerate(self._of_layers))
        gradients = self._gradients - sum(self._of_layers)
        found = [sum(kept) + between + traced.pieces[-1].backward_peak]
        for number in reversed(range(len(kept))):
            layer = traced.calls[number].layer
            working = layer.backward_peak if checkpointing else layer.backward_peak - layer.graph
            found.append(sum(kept[: number + 1]) + between + gradients + working)
            gradients += of_layers.get(number, 0)
        found.append(gradients + traced.pieces[0].backward_peak)
        return self.weights + self._moments + traced.inputs + max(found)
