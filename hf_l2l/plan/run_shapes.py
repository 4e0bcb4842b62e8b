"""`RunShapes`: what is known of one model and device batch before the run, for any options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_l2l.across_devices.sums import bytes_of_sums
from hf_l2l.config import L2LConfig
from hf_l2l.devices import execution_device, execution_devices
from hf_l2l.logits.heads import chunk_rows as find_chunk_rows
from hf_l2l.logits.heads import output_embeddings
from hf_l2l.memory import memory_estimate
from hf_l2l.model.batch_dims import RowCuts, Ubatch
from hf_l2l.model.precision import Precision, computing_dtype
from hf_l2l.model.residency import LayerPlace, places_of
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.option_names import option
from hf_l2l.pipeline.schedule import Turn
from hf_l2l.pipeline.times import LayerSeconds
from hf_l2l.plan.device_bytes import Bytes, DeviceBytes
from hf_l2l.plan.step_time import Cost, Rates, pipelined
from hf_l2l.plan.weights import ModelWeights, SplitHead
from hf_l2l.runtime import stream
from hf_l2l.runtime.compute_state import autocast_dtype
from hf_l2l.shapes.inputs import rows_of
from hf_l2l.shapes.passed import Passed
from hf_l2l.shapes.pieces import Traced
from hf_l2l.shapes.traced import Tracer
from hf_l2l.stash.boundary import fewest_bytes_on_host
from hf_l2l.stash.tiers import SHARE

ELSEWHERE = torch.device("cuda")
"""The device that is assumed where this machine has none with memory of its own."""

_FUSING = ("cuda", "xpu", "hpu", "npu", "mps")
"""Devices whose attention is one kernel with dropout, too."""


@dataclass(frozen=True)
class Costs:
    """The costs of one step, for the cost model."""

    layers: list[Cost]
    shell: Cost
    ubatches: int


class RunShapes:
    """What is traced of one model and batch, for any number of rows per micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        config: L2LConfig,
        inputs: Mapping[str, torch.Tensor],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        device_memory: int | None = None,
        chunk_memory: int | None = None,
        chunk_rows: int | None = None,
        given: Collection[str] = (),
        batches: int = 1,
        accumulates: bool = False,
        autocast: torch.dtype | None = None,
        devices: int = 1,
        ranks_add: int = 0,
    ) -> None:
        """`inputs` are those of the whole device batch, which consists of so many `batches`, whose rows are in
        micro-batches of their own; `accumulates` says whether a step has several such batches, one after the other;
        `given` names options of `config` that bind a plan even if they have their defaults; the model is called under
        `autocast` in this dtype, or, with None, as the region of autocast says that is entered now for the device; so
        many `devices` run the layers in turn; so many ranks add their gradients on their devices (0: on the host);
        chunks of logits have `chunk_rows` if these were decided before, else as many as fit `chunk_memory`, which is
        `device_memory` if it is None; see `estimate` for the others."""
        self.turns = [Turn(number, devices) for number in range(devices)]
        """Of the devices that run the layers."""
        self.given, self._ranks_add = given, ranks_add
        self.device = device or device_to_train_on(config)
        self.model, self.config, self.inputs = model, config, dict(inputs)
        self.optimizer = optimizer
        self.dtype = computing_dtype(config.cmp, self.device)
        self.autocast = autocast or autocast_dtype(self.device)
        self.precision = Precision(model, self.dtype, gradients=config.grad_dtype)
        self.rows = rows_of(model, inputs)
        self.batches, self.most_rows, self.accumulates = batches, self.rows // batches, accumulates
        self.device_memory = device_memory or known_memory(
            [each for each in devices_here(config) if each.type == self.device.type] or [self.device]
        )
        self.fuses = _always if self.device.type in _FUSING else _without_dropout
        layers = [layer for stack in find_stacks(model, config.layer_classes) for layer in stack.layers]
        self._heads = output_embeddings(list(shell_modules(model, layers)))
        memory = self.device_memory if chunk_memory is None else chunk_memory
        self.chunk_rows = find_chunk_rows(chunk_rows or config.chunked_loss, self._heads, memory)
        """Rows of a chunk of logits; None if there are no logits of a vocabulary, or all are made at once."""
        self._tracer = Tracer(
            model,
            self.precision,
            layer_classes=config.layer_classes,
            chunk_rows=self.chunk_rows,
            fuses=self.fuses,
            autocast=self.autocast,
        )
        state = memory_estimate.estimate(model, L2LConfig(), optimizer, ELSEWHERE)
        if not self._tracer.layers:
            raise ValueError(
                "an estimate for a batch is made of a model with a stack of layers (none was found in a "
                f"{type(model).__name__}); name the classes of its layers with {option('layer_classes')}"
            )
        self.moments = state.moments
        """Bytes of the optimizer's state in fp32, wherever it is."""
        self.layers = self._tracer.layers
        self.weights = ModelWeights(model, layers, self.precision, state.moments / max(1, state.gradients))
        # It refers weakly to parameters that stay in fp32, and what something refers to cannot become resident.
        self.precision.release()
        self._traced: dict[tuple[int, bool], Traced] = {}
        self._most: dict[L2LConfig, int] = {}

    @property
    def fewest_chunk_rows(self) -> int | None:
        """Rows of a chunk of logits as "auto" decides where memory is short; None if there are no logits."""
        return find_chunk_rows("auto", self._heads, 0)

    @property
    def multiplies_in(self) -> torch.dtype | None:
        """The dtype in which layers multiply matrices; None for that of the masters."""
        return self.autocast or self.dtype

    @property
    def has_head(self) -> bool:
        """Whether the model computes logits of a vocabulary."""
        return bool(self._heads)

    @property
    def has_chunked_head(self) -> bool:
        """Whether logits of a vocabulary are made for a chunk of tokens at a time."""
        return self.chunk_rows is not None

    def traced(self, rows: int, *, by_rows: bool = False) -> Traced:
        """The trace of so many rows (see `Tracer`)."""
        key = rows, by_rows
        if key not in self._traced:
            part = {name: self._part(tensor, rows) for name, tensor in self.inputs.items()}
            self._traced[key] = self._tracer.trace(part, by_rows=by_rows)
        return self._traced[key]

    def _part(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        # What is packed, such as the patches of all images, is not cut: no layer takes it by rows.
        has_rows = tensor.dim() > 0 and tensor.shape[0] == self.rows
        shape = (rows, *tensor.shape[1:]) if has_rows else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    @cached_property
    def _passed(self) -> Passed:
        return Passed(self.traced(self.rows).calls)

    @property
    def own_input(self) -> int:
        """Bytes of a layer's own input, the largest."""
        return max(_own(call.arguments) for call in self.traced(self.rows).calls)

    def resolved(self, config: L2LConfig) -> tuple[str, str, int]:
        """Where the stash is, and the boundary, and the rows of a micro-batch: without "auto" and None."""
        ubatch = max(stop - start for start, stop in self._cuts(config))
        stash: str = config.stash
        if stash == "auto":
            needed = self.own_input * -(-len(self.layers) // len(self.turns))  # each device has its own layers
            fits = self.device_memory is not None and needed * SHARE <= self.device_memory
            stash = "device" if fits and config.boundary != "host" else "host"
        boundary: str = "device" if stash == "device" else config.boundary
        if boundary == "auto":
            fewest = fewest_bytes_on_host(self.device_memory)
            boundary = "host" if fewest is not None and self.own_input >= fewest else "device"
        return stash, boundary, ubatch

    def _cuts(self, config: L2LConfig) -> list[Ubatch]:
        """The micro-batches of each batch."""
        parts = RowCuts.parts_of_each(RowCuts.parts_for(len(self.turns)), self.batches)
        return RowCuts(config.ubatch_size, parts).of(self.most_rows)

    def places(self, config: L2LConfig) -> list[LayerPlace]:
        """What stays on the device of each layer."""
        return list(places_of(self.layers, config, self.device).values())

    def on_device(self, config: L2LConfig, number: int = 0) -> DeviceBytes:
        """The memory of device `number` in a step."""
        turn = self.turns[number]
        stash, boundary, ubatch = self.resolved(config)
        places = self.places(config)
        # What stays of a layer is on the device of its number.
        places = [place if turn.has(place.number) else LayerPlace(number=place.number) for place in places]
        whole, head_copy = self.traced(self.rows), self.split_head(config)
        part = self.traced(ubatch, by_rows=boundary == "host") if ubatch < self.rows else None
        shell = _updates_shell_there(config)
        held = self.weights.on_device(places, gradient_slots=config.gradient_slots, shell_is_resident=shell)
        if all(place.is_resident for place in places if turn.has(place.number)):
            held = replace(held, slots=0)  # nothing is uploaded there
        is_chunked = part is not None and boundary == "host" and self.has_chunked_head
        head = self.traced(self.rows, by_rows=True) if is_chunked else None
        return DeviceBytes(
            self.weights,
            held,
            places,
            whole,
            part,
            self._passed,
            stash=stash,
            boundary=boundary,
            head=head,
            chunk_rows=self.chunk_rows or 0,
            transients=self._transients(places, shell),
            accumulates=self.accumulates,
            copies_of_inputs=2 if self.batches > 1 else 1,
            turn=turn,
            head_copy=head_copy.num_bytes if head_copy and number < head_copy.devices else 0,
        )

    def split_head(self, config: L2LConfig) -> SplitHead | None:
        """The output embedding, if several devices compute chunks of logits. Devices that are not known can read each
        other's memory."""
        if len(self.turns) == 1 or config.head_device == "first" or self.chunk_rows is None:
            return None
        devices = devices_here(config)
        if not all(stream.copies_directly(*pair) for pair in itertools.permutations(devices, 2)):
            return None
        labels = self.inputs.get("labels")
        tokens = self.rows * self.tokens_per_row if labels is None or labels.dim() < 2 else labels.numel()
        itemsize = 4 if self.multiplies_in is None else self.multiplies_in.itemsize
        done = self.traced(self.rows).head_is_done_in_forward
        return SplitHead.of(self._heads[0], itemsize, tokens, self.chunk_rows, len(self.turns), done)

    def outside_seconds(self, config: L2LConfig, rates: Rates) -> LayerSeconds:
        """The time of what is in no layer, of which several devices may compute the head."""
        cost, head = self.costs(config).shell, self.split_head(config)
        if head is None:
            return pipelined(cost, rates)
        (forward, backward), (down, down_again) = head.spared_flops, head.copied
        found = pipelined(
            replace(cost, forward_flops=cost.forward_flops - forward, backward_flops=cost.backward_flops - backward),
            rates,
        )
        return found._replace(
            forward=found.forward + down / rates.link_down, backward=found.backward + down_again / rates.link_down
        )

    def _transients(self, places: Sequence[LayerPlace], shell: bool) -> int:
        """What the step of an optimizer that is not fused allocates on the device: two tensors for each that is
        updated, if all are updated at once (`foreach`), else for the largest."""
        options = {} if self.optimizer is None else self.optimizer.param_groups[0]
        if self.optimizer is None or options.get("fused"):
            return 0
        foreach = options.get("foreach")
        units = [unit for unit, place in zip(self.weights.layers, places, strict=True) if place.is_resident]
        units += [self.weights.shell] if shell else []
        if self.device.type in _FUSING if foreach is None else foreach:
            return 2 * sum(unit.gradients for unit in units)
        return 2 * max((unit.largest for unit in units), default=0)

    def peak(self, config: L2LConfig) -> tuple[str, Bytes]:
        """What runs when a device holds most, and its bytes by name."""
        peaks = (self.on_device(config, turn.number).peak() for turn in self.turns)
        return max(peaks, key=lambda peak: sum(peak[1].values()))

    @property
    def for_ranks(self) -> int:
        """Bytes on the device for the sums over ranks."""
        largest = max(each.gradients for each in (*self.weights.layers, self.weights.small))
        return bytes_of_sums(largest, self._ranks_add) if self._ranks_add else 0

    def most(self, config: L2LConfig) -> int:
        """Bytes that are enough on each device, however slow its link is."""
        if config not in self._most:
            own = max(self.on_device(config, turn.number).most() for turn in self.turns)
            self._most[config] = own + self.for_ranks
        return self._most[config]

    def costs(self, config: L2LConfig) -> Costs:
        """What each layer computes and sends, for the cost model."""
        stash, boundary, ubatch = self.resolved(config)
        places, whole = self.places(config), self.traced(self.rows)
        leaves, by_rows = stash != "device", boundary == "host" and ubatch < self.rows
        short = 2 if config.grad_dtype == "16bit" else 4
        layers: list[Cost] = []
        updated: set[int] = set()
        in_turn = [number for number, call in enumerate(whole.calls) if places[call.number].is_fetched_in_backward]
        for number, call in enumerate(whole.calls):
            place, weights = places[call.number], self.weights.layers[call.number]
            # A layer that is called several times is updated once.
            trained = 0 if call.number in updated else weights.trained
            updated.add(call.number)
            own = _own(call.arguments)
            # Of calls of a layer in a row, its weights stay for all, and so do their gradient sums.
            follows, leads = self._is_repeated(whole, number), self._is_repeated(whole, number + 1)
            up = 0 if place.is_resident else weights.travels
            # Of what takes turns, the last two layers of the forward on each device are still in their slots.
            up_again = up if number in in_turn[: -2 * len(self.turns)] else 0
            stashed = own if leaves and not place.keeps_input and call.in_graph else 0
            passing = own if by_rows and not place.keeps_input else 0
            layers.append(
                Cost(
                    forward_flops=call.layer.forward_flops,
                    backward_flops=call.layer.backward_flops - (call.layer.forward_flops if place.keeps_graph else 0),
                    recomputes=not place.keeps_graph,
                    forward_up=0 if follows else up,
                    backward_up=0 if leads else up_again,
                    keeps_weights=place.keeps_weights,
                    backward_down=0 if place.is_resident or follows else weights.trained * short,
                    stashed=0 if by_rows else stashed,
                    rows_up=passing,
                    rows_down=passing,
                    rows_up_again=stashed + passing,
                    gradient_rows=passing,
                    rows_down_again=passing,
                    parameters=0 if place.is_resident else trained,
                    on_device=trained if place.is_resident else 0,
                )
            )
        if by_rows:
            own = self.own_input
            # The embedding, and a final norm and a head.
            layers.insert(0, Cost(rows_down=own, rows_up_again=own, gradient_rows=own))
            if self.has_chunked_head:
                down = own if whole.head_is_done_in_forward else 0
                head = Cost(rows_up=own, rows_down=down, rows_up_again=own, rows_down_again=own)
                layers += [replace(head, rows_down=own, rows_up_again=2 * own, gradient_rows=own), head]
        return Costs(layers, self._shell_cost(config, short), self.batches * len(self._cuts(config)))

    def _is_repeated(self, whole: Traced, number: int) -> bool:
        """Whether call `number` is of the same layer as the one before, and on the same device."""
        pair = whole.calls[max(0, number - 1) : number + 1]
        return len(self.turns) == 1 and len(pair) == 2 and pair[0].number == pair[1].number

    @property
    def tokens_per_row(self) -> int:
        """The tokens of the longest row."""
        return max((t.shape[1] for t in self.inputs.values() if t.dim() > 1), default=1)

    def tokens_that_hide(self, config: L2LConfig, rates: Rates) -> dict[str, int]:
        """From how many tokens per step on the forward of the layers takes as long as the upload of their weights
        ("upload"), and as the update of their masters ("update"; "update in a step" for forward and backward)."""
        costs = self.costs(config).layers
        tokens = self.rows * self.tokens_per_row
        streamed = [
            self.weights.layers[number] for number, place in enumerate(self.places(config)) if not place.is_resident
        ]
        forward = sum(cost.forward_flops for cost in costs) / tokens / rates.flops
        backward = sum(cost.backward_flops for cost in costs) / tokens / rates.flops
        update = sum(layer.trained for layer in streamed) / rates.update
        return {
            "upload": math.ceil(sum(layer.travels for layer in streamed) / rates.link_up / forward),
            "update": math.ceil(update / forward),
            "update in a step": math.ceil(update / (forward + backward)),
        }

    def _shell_cost(self, config: L2LConfig, short: int) -> Cost:
        whole, shell = self.traced(self.rows), self.weights.shell
        is_resident = _updates_shell_there(config)
        return Cost(
            forward_flops=sum(piece.forward_flops for piece in whole.pieces),
            recomputes=False,
            backward_flops=sum(piece.backward_flops for piece in whole.pieces),
            forward_up=0 if is_resident else shell.travels,
            backward_down=0 if is_resident else shell.trained * short,
            parameters=0 if is_resident else shell.trained,
            on_device=shell.trained if is_resident else 0,
        )


def _updates_shell_there(config: L2LConfig) -> bool:
    """Whether the state of the shell is on the device. With updates on the host, its weights are uploaded once per
    step, as they are if they do not stay."""
    return config.resident != "none" and config.resident_update == "device"


def device_to_train_on(config: L2LConfig) -> torch.device:
    """The execution device, if it has memory of its own; otherwise that of another machine."""
    device = execution_device(config.device)
    return ELSEWHERE if stream.shares_host_memory(device) else device


def devices_here(config: L2LConfig) -> list[torch.device]:
    """The several devices of `config`; none if it names one, or this machine does not have them."""
    if not isinstance(config.device, tuple):
        return []
    try:
        return execution_devices(config.device)
    except ValueError:  # the estimate is for another machine
        return []


def known_memory(devices: Sequence[torch.device]) -> int | None:
    """Bytes of the smallest of the devices in all; None if this machine has no such device, or it does not tell."""
    module: Any = stream.device_module(devices[0])
    return stream.least_memory(devices) if module is not None and module.is_available() else None


def _own(arguments: Sequence[Any]) -> int:
    """Bytes of the largest argument that gets a gradient: the output of the layer before."""
    return max((a.num_bytes for a in arguments if a.needs_gradient), default=0)


def _always(*_: Any) -> bool:
    return True


def _without_dropout(query: Any, key: Any, value: Any, mask: Any, dropout: float) -> bool:
    return dropout == 0
