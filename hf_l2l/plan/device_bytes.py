"""The bytes that training layer to layer takes on the device, by name as in its report, in each phase of a step:
what is computed before the layers, each layer, and what comes after, forward and backward; the largest is the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from hf_l2l.memory.device_memory import (
    BOUNDARY,
    EMBEDDING,
    HEAD,
    INPUTS,
    KEPT_GRAPHS,
    KEPT_WEIGHTS,
    MASK,
    OPTIMIZER,
    RESIDENT,
    SHELL,
    SLOTS,
    STASH,
    WORKSPACE,
)
from hf_l2l.model.residency import LayerPlace
from hf_l2l.pipeline.schedule import Turn
from hf_l2l.plan.weights import ModelWeights, WeightBytes
from hf_l2l.shapes.passed import Passed
from hf_l2l.shapes.pieces import Traced, TracedCall, graph_bytes, most_of_last

Bytes = dict[str, int]


class _Kept(NamedTuple):
    """Memory that the stash holds on the device, until the backward of call number `first`."""

    name: str
    num_bytes: int
    first: int


class DeviceBytes:
    """The device memory of one step, from what was traced with all rows, and with those of one micro-batch."""

    def __init__(
        self,
        weights: ModelWeights,
        held: WeightBytes,
        places: Sequence[LayerPlace],
        whole: Traced,
        part: Traced | None,
        passed: Passed,
        *,
        stash: str,
        boundary: str,
        head: Traced | None = None,
        chunk_rows: int = 0,
        transients: int = 0,
        accumulates: bool = False,
        copies_of_inputs: int = 1,
        turn: Turn,
        head_copy: int = 0,
    ) -> None:
        """`held` are the weights on the device with these `places` of the layers; `part` is None if the device batch
        is one micro-batch; `passed` is of the calls of `whole`. `accumulates` says whether a step has several batches,
        one after the other. `turn` tells which calls run on the device; with a copy of the head, it takes `head_copy`
        bytes."""
        self.turn, self.head_copy = turn, head_copy
        self.weights, self.held = weights, held
        self.layer_places = places
        self.places = [places[call.number] for call in whole.calls]
        self.chunked_head = head  # with all rows in host memory, if the boundary is there, and logits in chunks
        self.chunk_rows = chunk_rows
        self.transients = transients  # of the optimizer's step on the device
        self.accumulates = accumulates
        self.copies_of_inputs = copies_of_inputs  # 2 where batches are put together, and are there as well
        self.whole, self.part = whole, part or whole
        self.is_split = part is not None
        self.by_rows = boundary == "host" and self.is_split
        self.leaves = stash != "device"
        self._passed = passed
        self._kept = {memory: kept for call in range(len(whole.calls)) for memory, kept in self._kept_of(call)}

    def peak(self) -> tuple[str, Bytes]:
        """The phase in which most is held, and the bytes by name."""
        return max(self.phases(), key=lambda phase: sum(phase[1].values()))

    def phases(self) -> Iterator[tuple[str, Bytes]]:
        """All phases in which the peak may be."""
        whole, part, calls = self.whole, self.part, self.whole.calls
        for number in [n for n in reversed(range(len(calls))) if calls[n].in_graph and self.turn.has(n)]:
            yield f"backward of layer {number + 1}", self._layer(number)
        if not self.turn.is_first:
            yield "head", self._held(len(calls)) | {HEAD: self.head_copy}
            return
        yield "head", self._head(in_forward=True)
        yield "head", self._head(in_forward=False)
        for number, piece in enumerate(whole.pieces[1:-1]):
            if piece.backward_peak > 0:
                yield f"backward between layers {number + 1} and {number + 2}", self._between(number)
        rows = self._arguments_of_first()
        before = self.weights.sent_in_turn(whole.first, whole.pieces[0].backward_peak)
        if self.by_rows:
            sums, short = self.weights.table_sums, self.weights.table_gradients
            # While the last micro-batch is still there, the sums are converted.
            before = sums + max(part.pieces[0].backward_peak + 2 * rows, short + 3 * rows)
            before = max(before, short + self.weights.tables_leaving)
        found = self._base() | {EMBEDDING: before, HEAD: whole.late, BOUNDARY: 0 if self.by_rows else rows}
        yield "embedding", self._with_gradients(found, 0)
        if self.held.resident or self.held.shell_is_resident:
            found = self._with_gradients(self._base() | {OPTIMIZER: self.transients}, 0)
            found[SHELL] += 0 if self.accumulates else self._late_gradients()
            yield "update on the device", found

    def _between(self, number: int) -> Bytes:
        """In the backward of what is computed after call `number`, such as the embedding of a decoder."""
        found = self._held(number)
        found[EMBEDDING] += self.whole.late  # gradients of a table that is read in several places are added anew
        if self.by_rows:
            found[EMBEDDING] += self.weights.table_sums + 2 * self._arguments_of_first()
        else:
            found[EMBEDDING] += self.whole.pieces[number + 1].backward_peak
        self._add_boundary(found, number)
        return found

    def _late_gradients(self) -> int:
        """Of the resident shell: the gradients that come last, those of what is computed before the layers."""
        if not self.held.shell_is_resident:
            return 0
        return self.weights.shell.gradients - self._early_gradients()

    def most(self) -> int:
        """The most bytes at once on a slow link: gradients of the head may leave as late as in the last layer."""
        peak, last = sum(self.peak()[1].values()), len(self.whole.calls) - 1
        if self.held.shell_is_resident or not self.whole.calls[last].in_graph or not self.turn.is_first:
            return peak
        later = self.weights.shell.widened(self.whole.of_last - self.whole.leaves_last)
        return max(peak, sum(self._layer(last).values()) + later)

    def _leaving(self) -> int:
        """What leaves while the last layer computes: the last gradient of what is computed after the layers alone, and
        those of the last chunk of hidden states."""
        hidden = 0 if self.chunked_head is None else min(self.chunked_head.head, self._chunk())
        return hidden + self.weights.shell.widened(0 if self.held.shell_is_resident else self.whole.leaves_last)

    def _early_gradients(self) -> int:
        """Of the resident shell: gradients of what is computed after the layers alone."""
        return self.weights.shell.widened(self.whole.of_last) if self.held.shell_is_resident else 0

    def _with_gradients(self, found: Bytes, number: int) -> Bytes:
        """And the gradients of what is resident, in the backward of call `number`, which makes its own."""
        if self.accumulates:  # those of the batch before are there
            gradients = zip(self.weights.layers, self.layer_places, strict=True)
            found[RESIDENT] += sum(layer.gradients for layer, place in gradients if place.is_resident)
            found[SHELL] += self.weights.shell.gradients if self.held.shell_is_resident else 0
            return found
        found[SHELL] += self._early_gradients()
        for call, place in zip(self.whole.calls[number:], self.places[number:], strict=True):
            found[RESIDENT] += self.weights.layers[call.number].gradients if place.is_resident else 0
        return found

    def _has_rows(self, call: int, argument: int) -> bool:
        if not self.is_split:
            return True
        both = (traced.calls[call].arguments[argument].shape for traced in (self.whole, self.part))
        return len(set(both)) == 2

    def _kept_of(self, number: int) -> Iterator[tuple[int, _Kept]]:
        if not self.whole.calls[number].in_graph or not self.turn.has(number):
            return
        arguments = self.whole.calls[number].arguments
        for i, argument in enumerate(arguments):
            uses = self._passed.uses[argument.memory]
            passes = self._has_rows(number, i) and self.by_rows and argument.needs_gradient
            is_alone = len(uses) == 1 or argument.memory in self._passed.returned
            if not self.places[number].keeps_input and (passes or (self._travels(number, i) and is_alone)):
                continue
            # A layer that keeps its graph has nothing in the stash.
            stashed = any(not self.places[use].keeps_graph for use in uses)
            name = MASK if argument.is_mask else STASH if stashed else BOUNDARY
            # Of layers that share an argument, the first one has its own copy in host memory.
            first = uses[1] if len(uses) > 1 and self._travels(*self._passed.first[argument.memory]) else uses[0]
            yield argument.memory, _Kept(name, argument.num_bytes, first)

    def _travels(self, number: int, argument: int) -> bool:
        """Whether the stash of call `number` has its argument in host memory."""
        memory = self.whole.calls[number].arguments[argument].memory
        is_first = self._passed.first[memory] == (number, argument) or memory in self._passed.returned
        return self.leaves and is_first and self._has_rows(number, argument) and not self.places[number].keeps_input

    @property
    def _freed_tables(self) -> int:
        """Frozen tables that are freed after the forward. What is computed by rows before the layers keeps its weights
        until it is recomputed."""
        return 0 if self.held.shell_is_resident or self.by_rows else self.weights.frozen_tables

    def _base(self) -> Bytes:
        held = self.held
        found = {SHELL: 0, RESIDENT: held.resident, SLOTS: held.slots, KEPT_WEIGHTS: held.kept, INPUTS: 0}
        return (
            found
            if not self.turn.is_first
            else found
            | {
                SHELL: held.shell - self._freed_tables,
                # What trains before the layers is recomputed of them, if it is computed by rows.
                INPUTS: (self.whole.inputs if self.by_rows and self._arguments_of_first() else self.whole.kept_inputs)
                + (self.copies_of_inputs - 1) * self.whole.inputs,
            }
        )

    def _held(self, number: int) -> Bytes:
        """What is held in the backward of call `number`, besides what it computes with."""
        whole = self.whole
        found = self._base() | {STASH: 0, MASK: 0, BOUNDARY: 0, KEPT_GRAPHS: self._graphs(number)}
        if number < len(whole.calls) or self.accumulates:
            found = self._with_gradients(found, number)
        for kept in self._kept.values():
            if kept.first <= number:
                found[kept.name] += kept.num_bytes
        if self.by_rows:
            return found | {EMBEDDING: self._last_sent, HEAD: whole.late}
        if not self.turn.is_first:
            return found | {EMBEDDING: 0, HEAD: 0}
        left = whole.left + whole.late
        found[EMBEDDING] = min(left, max(0, whole.pieces[0].kept))
        return found | {HEAD: left - found[EMBEDDING]}

    def _graphs(self, number: int) -> int:
        """Graphs that are kept up to this call, of all rows."""
        kept = [i for i, place in enumerate(self.places[: number + 1]) if place.keeps_graph and self.turn.has(i)]
        # It has the 16-bit copies of masters that are on the device.
        copies = [self.weights.layers[self.whole.calls[i].number].copies for i in kept if self.places[i].is_resident]
        # Of a whole batch, what a layer returns is the memory that the next one is given.
        given = [out for i in kept for out in self.whole.calls[i].outputs if out.is_new and out.memory in self._kept]
        shared = 0 if self.is_split else sum(out.num_bytes for out in given)
        return sum(copies) + sum(graph_bytes(self.whole, self.part, i) for i in kept) - shared

    @cached_property
    def _last_sent(self) -> int:
        """Bytes of the last rows that were sent to the host, with a boundary there."""
        return max(
            (
                a.num_bytes
                for number, call in enumerate(self.part.calls)
                for i, a in enumerate(call.arguments)
                if a.needs_gradient and self._has_rows(number, i)
            ),
            default=0,
        )

    def _arguments_of_first(self) -> int:
        """Bytes of what the embedding gives to the first layer."""
        return sum(a.num_bytes for a in self.part.calls[0].arguments if a.needs_gradient)

    def _layer(self, number: int) -> Bytes:
        call, small = self.whole.calls[number], self.part.calls[number]
        found = self._held(number)
        found[WORKSPACE] = small.layer.backward_peak + self._uploaded(number)
        if self.places[number].keeps_graph:
            found[WORKSPACE] -= small.layer.graph
        elif self.places[number].is_resident:
            found[WORKSPACE] += self.weights.layers[call.number].copies
        found[WORKSPACE] += self._added_gradients(number)
        if not self.places[number].is_resident:
            found[WORKSPACE] = max(found[WORKSPACE], self.weights.layers[call.number].rounded)
        if number == len(self.whole.calls) - 1 and self.turn.is_first:
            found[HEAD] += self._leaving()
        self._add_boundary(found, number)
        if self.turn.devices > 1 and self.is_split and not self.by_rows:
            # The gradients of the last micro-batch are on their way to another device.
            found[WORKSPACE] += max((a.num_bytes for a in small.arguments if a.needs_gradient), default=0)
        ahead = self._rows_on_host(number) if self.leaves and self.is_split else 0
        if self.by_rows:
            rows = self._gradient_rows(call, small, number)
            ahead += rows // 2
            found[WORKSPACE] += rows + self._sent_besides(number)
        elif not self.is_split:
            # What the layer computes itself becomes the gradients of its arguments.
            own = sum(a.num_bytes for a in call.arguments if a.needs_gradient)
            found[WORKSPACE] -= own
            found[BOUNDARY] += own
        if self.is_split:
            # Gradients of arguments without rows are summed over the micro-batches.
            found[BOUNDARY] += sum(
                a.num_bytes for i, a in enumerate(call.arguments) if a.needs_gradient and not self._has_rows(number, i)
            )
        if number + 1 < len(self.whole.calls):
            # The first rows were uploaded in the backward of the layer after it, and are what that has left.
            found[WORKSPACE] -= ahead
            found[EMBEDDING] += ahead
        return found

    def _added_gradients(self, number: int) -> int:
        """Of a resident layer, and of the layer whose backward came before: gradients that are added to those of the
        batch before."""
        calls = zip(self.whole.calls[number : number + 2], self.places[number : number + 2], strict=True)
        both = [self.weights.layers[call.number].gradients if place.is_resident else 0 for call, place in calls]
        return sum(both) if self.accumulates and both[0] else 0

    def _add_boundary(self, found: Bytes, number: int) -> None:
        """What passes between layers, and its gradients, in the backward of call `number`."""
        waiting, sums = self._passed.gradients_waiting(number, self._kept if self.by_rows else self._passed.uses)
        found[BOUNDARY] += self._boundary(number, self.whole.calls[number]) + waiting
        found[EMBEDDING] += sums

    def _sent_besides(self, number: int) -> int:
        """Rows of gradients of one micro-batch that go to the host besides those that are sent last."""
        sizes = [
            a.num_bytes
            for i, a in enumerate(self.part.calls[number].arguments)
            if a.needs_gradient and self._has_rows(number, i) and not self.places[number].keeps_input
        ]
        return sum(sizes) - max(sizes, default=0)

    def _uploaded(self, number: int) -> int:
        """Rows of one micro-batch in host memory, and those that are uploaded meanwhile: of the next micro-batch, or
        the first ones of the layer before on this device."""
        both = (number, number - self.turn.devices)
        rows, before = (self._rows_on_host(each) if each >= 0 else 0 for each in both)
        return rows + max(before, rows if self.is_split else 0)

    def _rows_on_host(self, number: int) -> int:
        """Of one micro-batch."""
        pairs = zip(self.whole.calls[number].arguments, self.part.calls[number].arguments, strict=True)
        return sum(
            part.num_bytes
            for i, (whole, part) in enumerate(pairs)
            if whole.memory not in self._kept or self._travels(number, i)
        )

    def _gradients_arrive(self, number: int, call: TracedCall) -> list[int]:
        """The outputs of the call that get a gradient, by their numbers."""
        return [
            i
            for i, output in enumerate(call.outputs)
            if output.has_gradient or any(use > number for use in self._passed.uses.get(output.memory, ()))
        ]

    def _gradient_rows(self, call: TracedCall, small: TracedCall, number: int) -> int:
        """Gradients of the outputs of one micro-batch, and of the next one, uploaded meanwhile."""
        return sum(
            2 * small.outputs[i].num_bytes
            for i in self._gradients_arrive(number, call)
            if self._passes(call, small, i)
        )

    def _passes(self, call: TracedCall, small: TracedCall, i: int) -> bool:
        """Whether output `i` passes through the host: it has rows, and no layer that takes it keeps it."""
        has_rows = call.outputs[i].num_bytes != small.outputs[i].num_bytes
        uses = self._passed.uses.get(call.outputs[i].memory, ())
        return self.by_rows and has_rows and not any(self.places[use].keeps_input for use in uses)

    def _boundary(self, number: int, call: TracedCall) -> int:
        small = self.part.calls[number]
        total = sum(
            call.outputs[i].num_bytes for i in self._gradients_arrive(number, call) if not self._passes(call, small, i)
        )
        given = self.is_split and (not self.by_rows or self.places[number].keeps_input)
        # Of several devices, another one is sent the gradients, but there is memory for what this one is sent next.
        if given and (self.turn.devices == 1 or number >= self.turn.devices):
            total += sum(
                a.num_bytes for i, a in enumerate(call.arguments) if a.needs_gradient and self._has_rows(number, i)
            )
        return total + self._kept_outputs(number)

    def _kept_outputs(self, number: int) -> int:
        """Of layers, which are no argument of another one, and which what is computed between layers keeps."""
        if self.by_rows:
            return 0
        return sum(out.num_bytes for call in self.whole.calls[:number] for out in call.outputs if out.kept)

    def _chunk(self) -> int:
        """Bytes of the hidden states of one chunk of tokens."""
        given = next(a for a in self.whole.calls[-1].arguments if a.needs_gradient)
        width = given.shape[-1]
        return self.chunk_rows * width * given.num_bytes // given.shape.numel()

    def _uploaded_for_head(self, hidden: int) -> int:
        """Hidden states of one chunk of tokens and of the next one, instead of all `hidden` bytes of gradients, which
        go to the host, and which the first chunk does not have yet."""
        two = 2 * self._chunk()
        return two - hidden if hidden >= two else hidden

    def _head(self, *, in_forward: bool) -> Bytes:
        found = self._held(len(self.whole.calls))
        if in_forward:
            found[SHELL] += self._freed_tables
            found[INPUTS] = self.copies_of_inputs * self.whole.inputs
            found[BOUNDARY] += self._on_their_way()
        # With those of an earlier batch there, they are added, and not the first.
        early = 0 if self.accumulates or in_forward else self._early_gradients()
        found[SHELL] += early
        if self.chunked_head is not None:
            last, hidden = self.chunked_head.pieces[-1], self.chunked_head.head
            most = last.forward_peak if in_forward else last.backward_peak
            return found | {HEAD: most + self._uploaded_for_head(hidden) - early}
        found[HEAD] = most_of_last(self.whole, in_forward=in_forward) - early
        found[EMBEDDING] = self._last_sent if self.by_rows else self.whole.left
        # With a boundary on the host, all rows of the last layer's output alone are needed at once.
        there = self.whole.calls[-1:] if self.by_rows else self.whole.calls
        kept = sum(out.num_bytes for call in there for out in call.outputs if out.kept)
        # At the end of the head, the gradient of what the last layer has returned takes the place of that.
        arrived = sum(out.num_bytes for out in self.whole.calls[-1].outputs if out.has_gradient)
        later = 0 if self.by_rows or in_forward else max(0, arrived - kept)
        found[BOUNDARY] += kept + later
        found[HEAD] -= later
        return found

    def _on_their_way(self) -> int:
        """Of several devices: what the last layer on this one was sent, and what it has sent to the next one. Both
        wait for their copies when the forward of the head begins."""
        if self.turn.devices == 1 or self.by_rows:
            return 0
        call = [call for number, call in enumerate(self.whole.calls) if self.turn.has(number)][-1]
        given = [a.num_bytes for a in call.arguments if a.needs_gradient and a.memory not in self._kept]
        return sum(given) + sum(out.num_bytes for out in call.outputs if out.is_new)
