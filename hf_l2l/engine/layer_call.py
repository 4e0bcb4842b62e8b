"""The record of one layer call: its arguments, its outputs, and what is needed to run it again on some of its rows.

Tensor arguments are separated from all others, so that the call can be split into ubatches, and recomputed in the
backward sweep.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.device.device_weights import as_parameter, uploaded
from hf_l2l.device.layer_device import LayerDevice
from hf_l2l.engine.collected import CollectedOutputs, shares_memory, with_dimensions
from hf_l2l.engine.recompute_check import CallCheck
from hf_l2l.engine.trials import Trial, WithoutDropout, evaluating, same_results
from hf_l2l.eps.masters import FUNCTIONAL_CALL, MasterUnit
from hf_l2l.eps.weight_copies import Copies
from hf_l2l.model.batch_dims import BatchDims, NoConsistentSplit, Split, Ubatch
from hf_l2l.model.captured_outputs import CapturedOutputs
from hf_l2l.model.container_writes import Containers, write
from hf_l2l.model.hook_writes import Collected, HookWrites
from hf_l2l.model.kept_state import KeptState, Place, is_started_anew, is_tensor, kept_as_it_was
from hf_l2l.model.layer_state import LayerState, as_if_not_run, own_generators_kept
from hf_l2l.rows.host_rows import Passing, host_of
from hf_l2l.runtime import compute_state, stream
from hf_l2l.runtime.compute_state import AutocastState, RngState
from hf_l2l.runtime.tensors import flatten, tensors_within
from hf_l2l.stash.boundary import FOR_THE_MODEL


@dataclass(slots=True)
class LayerCall:
    """One call of one layer: how to run it on some rows, and the structure of its outputs.

    It holds no tensors except generator states.
    """

    unit: MasterUnit
    forward: Callable[..., Any]
    leaves: list[Any]
    """The arguments, flattened; tensors are replaced by None."""
    tensor_positions: list[int]
    spec: pytree.TreeSpec
    at: LayerDevice
    """The device that it runs on, and what belongs to it."""
    autocast: AutocastState
    copies: Copies
    input_shapes: list[torch.Size]
    needed: list[bool]
    """Per tensor argument, whether it requires a gradient."""
    before: LayerCall | None = None
    """The previous call, which is the next one of the backward sweep."""
    before_here: LayerCall | None = None
    """The previous call on this device."""
    fetched_in_forward: MasterUnit | None = None
    """The layer that is uploaded while this one computes in the forward sweep."""
    fetched_in_backward: MasterUnit | None = None
    """The layer that is uploaded while this one computes in the backward sweep."""
    in_graph: bool = False
    """True if a backward can reach this call."""
    is_trial: bool = False
    """True while the layer runs to find something out about it."""
    on_own_stream: bool = True
    """With several devices, whether it computes on a stream that the program does not have. Not with a key-value
    cache, whose tensors the program uses between calls, or another object with tensors."""
    leaves_tensors_only: bool = True
    """Whether the attributes that its last such run has written to are tensors, and no objects or containers."""
    left: KeptState | None = None
    """What a run has left in attributes of the layer, until it is known whether that matters."""
    state: LayerState | None = None
    """What its forward has computed with beside arguments, weights and torch's generators."""
    check: CallCheck | None = None
    """Compares its recompute with its forward; None if this call is not checked."""
    kept: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Its tensor arguments in the stash, which live as long as its graph."""
    split: Split | None = None
    rng: list[RngState | None] = field(default_factory=list)
    """Per ubatch, the state of the generators before it ran; None if it drew no random numbers."""
    versions: list[int] = field(default_factory=list)
    """Versions of the layer's parameters at its forward."""
    graph: Any = None
    """The graph of its forward, until the node of the call takes it."""
    captured_keys: tuple[str, ...] | None = None
    passing: Passing | None = None
    """How its output passes through host memory; None: it stays on a device."""
    way: tuple[torch.device, Passing] | None = None
    """With several devices, the one that computes what comes next, to which the output passes, and how."""
    output_spec: pytree.TreeSpec | None = None
    output_leaves: list[Any] = field(default_factory=list)
    """The outputs, flattened; tensors are replaced by None."""
    output_positions: list[int] = field(default_factory=list)
    output_kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    """Shapes and dtypes of the tensor outputs, with all rows."""
    own: int = 0
    """How many of the tensor outputs it has returned; the others have been collected by hooks inside the layer."""
    hooks: CollectedOutputs = field(init=False)
    """The outputs that hooks inside the layer have collected; they follow its own."""
    trial: list[Collected] = field(default_factory=list)
    """What hooks have collected in the last trial."""

    def __post_init__(self) -> None:
        self.hooks = CollectedOutputs(self.unit.modules, self.unit.known)

    @classmethod
    def of(
        cls,
        unit: MasterUnit,
        forward: Callable[..., Any],
        arguments: list[Any],
        spec: pytree.TreeSpec,
        at: LayerDevice,
        copies: Copies,
    ) -> LayerCall:
        """Record a call with these flattened arguments, under the current autocast settings."""
        positions = [i for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)]
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments]
        shapes = [arguments[i].shape for i in positions]
        needed = [arguments[i].requires_grad for i in positions]
        autocast = AutocastState.current(at.device)
        return cls(unit, forward, static, positions, spec, at, autocast, copies, shapes, needed)

    @property
    def is_after_itself(self) -> bool:
        """Whether the next call of the backward sweep is one of the same layer, on the same device."""
        before = self.before
        return before is not None and before.in_graph and before.unit is self.unit and before.at is self.at

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.at.device

    @property
    def layer(self) -> nn.Module:
        """The layer that is called."""
        return self.unit.module

    @property
    def draws(self) -> bool:
        """Whether earlier calls of the layer in its present mode (training or evaluation) drew random numbers."""
        return self.layer.training in self.unit.drawing_modes

    @property
    def input_dims(self) -> Sequence[int | None]:
        """Per tensor argument, the dimension that is split into ubatches; None for an argument without rows."""
        return (None,) * len(self.tensor_positions) if self.split is None else self.split.inputs.dims

    @property
    def ubatches(self) -> Sequence[Ubatch | None]:
        """The row ranges of the inner loop; [None] for all rows at once."""
        return [None] if self.split is None else self.split.ubatches

    def remember(self, kept: Sequence[torch.Tensor]) -> None:
        """Record that this call becomes a node of the graph, with its tensor arguments `kept` in the stash."""
        self.in_graph, self.kept = True, [weakref.ref(tensor) for tensor in kept]

    def kept_rows(self, turn: int) -> list[torch.Tensor]:
        """The rows in the stash that ubatch number `turn` alone needs; none if there is no such ubatch."""
        kept = [each() for each in self.kept]
        alive = [tensor for tensor in kept if tensor is not None]
        return self.rows_of_turn(alive, turn) if kept and len(alive) == len(kept) else []

    def recompute(self, tensors: Sequence[torch.Tensor], turn: int) -> list[torch.Tensor]:
        """`execute` ubatch number `turn` once more, for the backward."""
        with self.hooks.as_in_forward(turn):
            return self.execute(tensors, turn)

    def execute(self, tensors: Sequence[torch.Tensor], turn: int | None = None) -> list[torch.Tensor]:
        """Run the layer's original forward on these tensor arguments and return its tensor outputs, and those that
        hooks have collected. It is the recompute of ubatch number `turn`; None: a forward, or a trial."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        containers = Containers((args, kwargs), self.leaves)
        writes = HookWrites(self.unit.modules)
        with CapturedOutputs(self.captured_keys) as captured, self._state_as_found():
            output = self.forward(*args, **kwargs)
        self.captured_keys = captured.keys
        outputs, self.output_spec = flatten((output, captured.taken, containers.written()))
        self.output_positions = [i for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
        self.output_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
        self.own = len(self.output_positions)
        return [*(outputs[i] for i in self.output_positions), *self._collected(writes, turn)]

    def _collected(self, writes: HookWrites, turn: int | None) -> list[torch.Tensor]:
        """The outputs that hooks have collected in this run."""
        if self.is_trial:
            self.trial = with_dimensions(writes.collected())
            for each in self.trial:
                each.weights = [shares_memory(tensor, self.unit.modules) for tensor in each.tensors]
            writes.take_back()
            return []
        if turn is not None:
            return self.hooks.recompute(writes, turn)
        found = self.hooks.forward(writes, None if self.split is None else self.split.collected)
        if self.split is not None:
            dims = (*self.split.outputs.dims[: self.own], *self.hooks.dims)
            self.split = replace(self.split, outputs=BatchDims(dims))
        return found

    def assemble(self, outputs: Sequence[torch.Tensor], containers: Sequence[Any]) -> Any:
        """Build the layer's return value from its tensor outputs, pass captured ones to the model's collector, and
        write into the `containers` of the arguments what the layer has written into its own, and into others what
        hooks have collected."""
        assert self.output_spec is not None
        self.hooks.deliver(outputs[self.own :])
        leaves = list(self.output_leaves)
        for position, tensor in zip(self.output_positions, outputs[: self.own], strict=True):
            leaves[position] = tensor
        output, captured, written = pytree.tree_unflatten(leaves, self.output_spec)
        CapturedOutputs.deliver(captured)
        write(written, containers)
        return output

    def input_rows(self, tensors: Sequence[torch.Tensor], ubatch: Ubatch | None) -> list[torch.Tensor]:
        """Views of the tensor arguments that have only the rows of `ubatch`."""
        return list(tensors) if ubatch is None or self.split is None else self.split.input_rows(tensors, ubatch)

    def rows_of_turn(self, tensors: Sequence[torch.Tensor], turn: int) -> list[torch.Tensor]:
        """The rows of its tensor arguments that ubatch number `turn` alone needs; none if there is no such ubatch."""
        if turn >= len(self.ubatches):
            return []
        rows = self.input_rows(tensors, self.ubatches[turn])
        return rows if turn == 0 else [t for t, dim in zip(rows, self.input_dims, strict=True) if dim is not None]

    def way_of(
        self, split: Split, number: int, shape: Sequence[int], itemsize: int
    ) -> tuple[torch.device | None, Passing | None]:
        """Where output `number`, with rows and of this `shape`, goes, None if it stays on the device, and how.

        It passes to the next layer, through host memory or directly, if its rows are along the first dimension, and it
        is like a tensor that this layer was given. Other outputs are for the code of the model, or of the program.
        """
        dims, whole = split.inputs.dims, torch.Size(shape)
        pairs = zip(dims, self.input_shapes, strict=True)
        is_own = number < self.own
        passes = is_own and split.outputs.dims[number] == 0 and any(dim == 0 and each == whole for dim, each in pairs)
        if passes and self.passing is not None and whole.numel() * itemsize >= self.passing.fewest_bytes:
            return stream.HOST, self.passing
        if self.way is None:
            return None, None
        return self.way if passes else (self.at.first, FOR_THE_MODEL)

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its tensor arguments, with all rows, where its device finds them."""
        return [self.at.given(t, self.cut_input(number)) for number, t in enumerate(tensors)]

    def given_back(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of its outputs, with all rows, where its device finds them."""
        found = enumerate(gradients)
        return [None if t is None else self.at.given(t, self.cut_output(number)) for number, t in found]

    def cut_input(self, number: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        """What cuts something like tensor argument `number` into ubatches."""
        split = self.split
        if split is None or split.inputs.dims[number] is None:
            return lambda tensor: [tensor]
        return lambda tensor: [split.rows_of_input(tensor, number, each) for each in split.ubatches]

    def cut_output(self, number: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        """What cuts something like output `number` into ubatches."""
        split = self.split
        if split is None or split.outputs.dims[number] is None:
            return lambda tensor: [tensor]
        return lambda tensor: [split.rows_of_output(tensor, number, each) for each in split.ubatches]

    def gradient_rows(self, gradient: torch.Tensor, number: int, ubatch: Ubatch | None) -> torch.Tensor | None:
        """The rows `ubatch` of the gradient of output `number`, where they are; None if it gets none."""
        gradient = host_of(gradient)
        return gradient if ubatch is None or self.split is None else self.split.gradient_rows(gradient, number, ubatch)

    def execute_once(self, tensors: Sequence[torch.Tensor], *, keep_buffers: bool = False) -> Trial:
        """Run the layer once, without a graph, to compare outputs. Plain attributes stay as it leaves them, and with
        `keep_buffers`, buffers do: in the next run, a layer that reads them has another output.

        The layer runs in its own mode, without dropout, so that rows that influence each other in training only are
        found; in evaluation mode if it draws random numbers all the same, which would make equal results differ.
        """
        with self.at.joined():
            given = [t.to(self.device) for t in tensors]
            outputs = [t.to(self.at.first) for t in self._execute_once(given, keep_buffers)]
        found, self.trial = self.trial, []
        return Trial(outputs, found)

    def _execute_once(self, tensors: Sequence[torch.Tensor], keep_buffers: bool) -> list[torch.Tensor]:
        weights = uploaded(self.unit, self.device, self.copies, requires_grad=False)
        weights.leaves = [*map(_not_zero, weights.leaves)]
        with (
            torch.no_grad(),
            compute_state.all_rng_states_kept(self.device),
            own_generators_kept(self.unit.modules),
            self.autocast.entered(),
            weights.placed(keep_buffers=keep_buffers),
            self._as_trial(),
        ):
            before = compute_state.get_rng_state(self.device)
            with WithoutDropout():
                outputs = self.execute([t.clone() for t in tensors])  # a layer may write into its arguments
            if not self.leaves_tensors_only:  # but something in an object, which cannot be put back
                raise NoConsistentSplit("it keeps tensors from one call to the next")
            if compute_state.get_rng_state(self.device) == before:
                return outputs
            del outputs
            with evaluating(self.layer):
                return self.execute([t.clone() for t in tensors])

    @contextmanager
    def _as_trial(self) -> Iterator[None]:
        self.is_trial = True
        try:
            yield
        finally:
            self.is_trial = False

    @contextmanager
    def _state_as_found(self) -> Iterator[None]:
        """Inside, the layer runs. In trials, and in its first forward that trains, all runs begin alike: attributes
        have their values back after each."""
        if self.is_trial or (self.in_graph and self.unit.keeps.places is None):
            state = KeptState(self.unit.modules)
            given = [] if self.is_trial else state.from_outside()
            try:
                yield
            except RuntimeError as error:
                if given and not isinstance(error, torch.OutOfMemoryError):
                    raise self._graphs_from_outside(given) from error
                raise
            finally:
                self.unit.keeps.written = state.changed()
                self.leaves_tensors_only = all(map(is_tensor, self.unit.keeps.written))
                self.left = KeptState(self.unit.modules) if self.unit.keeps.written else None
                state.put_back(self.unit.keeps.written)
            given = [place for place in given if place not in self.unit.keeps.written]
            if given:
                raise self._graphs_from_outside(given)
        elif self.in_graph and self.unit.keeps.started_anew:
            with kept_as_it_was(self.unit.keeps.started_anew):
                yield
        else:
            yield

    def _graphs_from_outside(self, places: Sequence[Place]) -> ValueError:
        names = ", ".join(f"{type(m).__name__}.{name}" for m, name in places)
        return ValueError(
            "a layer that trains must get what needs a gradient as arguments, since its backward computes it again in "
            f"a graph of its own (a {type(self.layer).__name__} has tensors of another graph in {names}, which it has "
            "not put there); pass them to the layer, put them there with .detach(), or train this model without L2L"
        )

    def learn_what_it_keeps(self, sources: Sequence[torch.Tensor]) -> None:
        """Find out which attributes its first forward that trains has written tensors to.

        Raises:
            ValueError: if the layer would read them in its next call, or keeps them where another layer could.
        """
        written, left, self.unit.keeps.places = self.unit.keeps.written, self.left, []
        if left is None:
            return
        if all(map(is_started_anew, written)):
            self.unit.keeps.started_anew = written
            return
        is_read = not self.leaves_tensors_only
        before = KeptState(self.unit.modules)
        if not is_read:
            some = self.input_rows(sources, self.ubatches[-1])  # what it has left is of these
            rows = [self.at.stash.fetch(t) for t in some]
            with as_if_not_run(self.unit.modules):
                found = self.execute_once(rows)
            left.put_back(written)  # as the next call would find it; the program finds it, too
            with as_if_not_run(self.unit.modules):
                is_read = not same_results(found.outputs, self.execute_once(rows).outputs)
        if is_read:
            before.put_back(written)
            raise ValueError(
                "a layer that trains must not keep tensors for a later call, since its recompute would find others, "
                f"and they would get no gradient (a {type(self.layer).__name__} keeps "
                f"{', '.join(f'{type(m).__name__}.{name}' for m, name in written)}); train this model without L2L"
            )
        self.unit.keeps.places = written

    @contextmanager
    def refusing_writes_to_arguments(self) -> Iterator[None]:
        """Refuse tensors that the layer writes into its arguments: it runs without a graph, so they have no gradients.

        Raises:
            ValueError: if an argument that is an object gained, lost or changed tensors. (Of lists and dicts, it is
                found out what was written into them; see `container_writes`. Key-value caches are dropped.)
        """
        before = {i: _contents(leaf) for i, leaf in enumerate(self.leaves) if leaf is not None}  # None: a tensor
        yield
        for position, contents in before.items():
            now = _contents(self.leaves[position])
            if len(now) != len(contents) or any(
                a is not b or version != later for (a, version), (b, later) in zip(contents, now, strict=True)
            ):
                raise ValueError(
                    "a layer that trains must not write tensors into its arguments, since such tensors would get no "
                    f"gradient (a {type(self.layer).__name__} wrote to {self._argument_name(position)!r}); train this "
                    "model without L2L, or configure it so that its layers share only the tensors that they return"
                )

    def _argument_name(self, position: int) -> str:
        args, kwargs = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        names = inspect.signature(self.forward).parameters
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return next((name for name, value in named.items() if position in pytree.tree_leaves(value)), str(position))

    def check_number(self, outputs: Sequence[torch.Tensor], expected: int, remedy: str) -> None:
        """Raise RuntimeError if the layer did not return the `expected` number of tensors."""
        if len(outputs) != expected:
            raise RuntimeError(
                f"a layer must return the same number of tensors in all its ubatches, and when it is recomputed (a "
                f"{type(self.layer).__name__} returned {len(outputs)} after {expected}, captured ones included); "
                f"{remedy}"
            )

    def check_weights_unchanged(self) -> None:
        """Raise RuntimeError if a weight has changed since the forward: the recompute would give other activations."""
        name = type(self.layer).__name__
        if not self.unit.has_its_parameters():
            raise RuntimeError(
                f"a layer must have the same parameters in its forward and its backward (those of a {name} were "
                f"replaced in between); {FUNCTIONAL_CALL}"
            )
        self.unit.wait()  # an update changes the versions
        if self.unit.versions() != self.versions:
            raise RuntimeError(
                f"the weights of a layer must not change between its forward and its backward (a {name} was changed "
                "in place); run backward before optimizer.step(), load_state_dict or other writes"
            )


def _not_zero(weight: torch.Tensor) -> torch.Tensor:
    """A weight for a trial; others instead of one of zeros, as adapters begin: what it is multiplied with shows."""
    if not weight.is_floating_point() or type(weight) is not nn.Parameter or weight.numel() == 0:
        return weight
    if torch.linalg.vector_norm(weight.detach(), float("inf")) > 1e-3:
        return weight
    values = torch.arange(weight.numel(), dtype=torch.float32, device=weight.device).sin_().mul_(0.1)
    return as_parameter(values.to(weight.dtype).view(weight.shape))


def _contents(argument: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors that an object holds, with their versions."""
    return [(t, 0 if t.is_inference() else t._version) for t in tensors_within(argument)]
