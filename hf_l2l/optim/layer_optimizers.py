"""Carries out one step of any layer-local `torch.optim.Optimizer` in parts, such as one part per layer.

The eager param-server updates one layer while others are still computed (arXiv:2002.05645, 2.2, L2L-p). The user's
optimizer is not replaced: each layer has a second optimizer, made once, which shares the attributes and the state of
the first, but has only the parameters of that layer. `layerwise_check.why_not_layer_local` finds optimizers for which
that is not possible.

    once per step      the hyper-parameters are recorded, and the part of each layer is made
    part, any thread   one pass over memory (`one_pass`) for all parameters that it takes; the step of the layer's
                       optimizer for the others; torch's hooks for all optimizers around both
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch

from hf_l2l.compat import drop_step_hooks, hooks_of_all_steps, is_profiling, unhooked_step, without_interception
from hf_l2l.optim.forms import ParameterUpdate
from hf_l2l.optim.one_pass import OnePass, Pieces
from hf_l2l.optim.rounded_state import Rounding, is_rounded, keeps_16_bits, widened

_OF_THE_PARAMETERS = ("params", "param_names")
"""The keys of a group whose values have one entry per parameter; the others are hyper-parameters."""


_IMMUTABLE = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, FunctionType, MethodType)
"""Types whose values need no copy. A method counts as its function; the object that it is bound to is not copied."""

_NUMBERS = (bool, int, float, type(None))

Places = dict[torch.Tensor, tuple[tuple[int, int], str | None]]
"""Master -> the number of its group and its own number there, and its name, if the optimizer has names."""


def places_of(optimizer: torch.optim.Optimizer) -> Places:
    """The places of the parameters of an optimizer in its groups."""
    return {
        p: ((number, index), name)
        for number, group in enumerate(optimizer.param_groups)
        for index, (p, name) in enumerate(zip(group["params"], group.get("param_names", repeat(None)), strict=False))
    }


class LayerOptimizers:
    """The optimizers of the layers of one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        one_pass: OnePass | None = None,
        *,
        state: MutableMapping[torch.Tensor, Any] | None = None,
        places: Places | None = None,
    ) -> None:
        """
        Args:
            optimizer: the optimizer; not Accelerate's wrapper of it (see `unwrapped`). It is not kept alive.
            one_pass: computes what it takes.
            state: that of the masters; None is the optimizer's.
            places: of the masters, if they are no parameters of the optimizer.
        """
        self._optimizer = ref(optimizer)
        self.one_pass = one_pass
        self._state, self._given_places = state, places
        self._parameters: list[torch.Tensor] = []
        self._places: Places = {}
        self._of: dict[torch.Tensor, _LayerOptimizer] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all layers."""
        found = self._optimizer()
        assert found is not None, "what steps is alive"
        return found

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """The state of the masters."""
        return self.optimizer.state if self._state is None else self._state

    @property
    def places(self) -> Places:
        """The places of the masters."""
        if self._given_places is not None:
            return self._given_places
        parameters = parameters_of(self.optimizer)
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            self._parameters, self._places = parameters, places_of(self.optimizer)
        return self._places

    def of(self, masters: Sequence[torch.Tensor]) -> _LayerOptimizer:
        """The optimizer that has these masters, and maybe others of their layer; made anew if there is none. To be
        called on the thread that uses the optimizer."""
        found = self._of.get(masters[0])
        if found is None or not found.has(masters):
            # Those that were updated with one of them before stay with it: a layer whose masters do not always have a
            # gradient soon has one optimizer for all of them.
            before = [p for one in {self._of[p] for p in masters if p in self._of} for p in one.masters]
            found = _LayerOptimizer(self.optimizer, list(dict.fromkeys([*masters, *before])), self.places)
            self._of.update(dict.fromkeys(found.masters, found))
        return found


@dataclass(slots=True)
class _Member:
    """One master of a layer's optimizer."""

    master: torch.Tensor
    place: tuple[int, int]
    """The number of its group, and its own number there."""
    stand_in: torch.Tensor
    """A tensor with its memory and version, which is never held, and whose gradient is that of the step."""

    def refresh(self) -> None:
        """Make the stand-in anew if the program has given the master other memory."""
        if not self.stand_in.is_set_to(self.master):
            self.stand_in = self.master.detach()

    def show(self, *, requires_grad: bool) -> None:
        """Make the stand-in look like the master, for who reads more than its values."""
        own, tags = self.stand_in, vars(self.master)
        own.requires_grad_(requires_grad)
        if tags or vars(own):
            vars(own).update(tags)  # some optimizers read attributes that the program set on parameters
            vars(own).pop("_l2l_pending", None)  # the EPS sets one, too, which is of the parameter alone


class _LayerOptimizer:
    """An optimizer with the attributes of the user's, and without its hooks, that has some of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: list[torch.Tensor], places: Places) -> None:
        self.masters = sorted(masters, key=lambda p: places[p][0])
        with without_interception():
            self.members = {p: _Member(p, places[p][0], p.detach()) for p in self.masters}
        self._names = {p: places[p][1] for p in self.masters}
        self.optimizer: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(self.optimizer).update(vars(optimizer))
        drop_step_hooks(self.optimizer)
        self._hooks = {name: value for name, value in vars(self.optimizer).items() if name.endswith("_hooks")}
        self.release()

    def has(self, masters: Iterable[torch.Tensor]) -> bool:
        """Whether it has all of `masters`."""
        return self.members.keys() >= {*masters}

    def release(self) -> None:
        """Refer to no state: it lives longer than the step, in which state may be widened, and than state that is
        replaced by what is loaded."""
        self.optimizer.param_groups, self.optimizer.state = [], defaultdict(dict)

    def prepare(self, step: SplitStep, members: Sequence[_Member], state: defaultdict[torch.Tensor, Any]) -> None:
        """Give it the hyper-parameters of a step, those of its parameters that are updated, and their state."""
        groups: dict[int, dict[str, Any]] = {}
        for member in members:
            number = member.place[0]
            group = groups.get(number)
            if group is None:
                group = groups[number] = {"params": [], **step.hyperparameters(number)}
            group["params"].append(member.stand_in)
            name = self._names[member.master]
            if name is not None:
                group.setdefault("param_names", []).append(name)
        vars(self.optimizer).update(step.attributes)
        vars(self.optimizer).update(self._hooks)
        self.optimizer.param_groups, self.optimizer.state = list(groups.values()), state
        if step.mutable:
            vars(self.optimizer).update(step.copies_of_mutable(self.optimizer))


class SplitStep:
    """One step of an optimizer, to be carried out in parts, on any thread.

    After all parameters with a gradient have been in a part, weights and state have the same bits as after one
    `step()`. This holds for layer-local optimizers only (`layerwise_check.why_not_layer_local`). Parts may run
    concurrently, each in a thread, since they share nothing that a step may write to. `p.grad` is neither read nor
    written, and the hooks of the optimizer do not run; torch's hooks for all optimizers run once per part, in its
    thread.

    The caller must wait for all parts before it reads the masters or the optimizer's state, or makes the next step.
    """

    def __init__(
        self,
        layers: LayerOptimizers,
        gradients: Mapping[torch.Tensor, torch.Tensor],
        rounding: Rounding | None = None,
    ) -> None:
        """Record what the step needs, so that a scheduler may change the hyper-parameters right after this.

        To be called on the thread that uses the optimizer.

        Args:
            layers: the optimizers of the layers.
            gradients: master -> its gradient, of its shape and device, dense or sparse, in its dtype or a shorter one.
                Parameters without a gradient are not updated. Each gradient is released when its part has run.
            rounding: rounds the state to the 16 bits in which it is kept; None keeps it as the step makes it.
        """
        optimizer = layers.optimizer
        self.layers, self.rounding = layers, rounding
        self.state, self.places = layers.state, layers.places
        own = ("param_groups", "state")
        self.attributes = {name: value for name, value in vars(optimizer).items() if name not in own}
        self.mutable = _mutable_attributes(optimizer)
        if self.mutable:  # as they are now: the optimizer's own step goes on meanwhile
            self._base: torch.optim.Optimizer = object.__new__(type(optimizer))
            self._base.param_groups, self._base.state = [], defaultdict(dict)
            memo: dict[int, Any] = {id(p): p for p in self.places}
            memo |= {id(optimizer): self._base, id(optimizer.param_groups): self._base.param_groups}
            memo[id(optimizer.state)] = self._base.state
            self.attributes |= {name: copy.deepcopy(self.attributes[name], memo) for name in self.mutable}
        self._groups = [_snapshots(group) for group in optimizer.param_groups]
        self._copied = [not all(map(_is_immutable, group.values())) for group in self._groups]
        """For each group, whether a part must copy the values too, and not only the dict."""
        one_pass = layers.one_pass
        self._in_one_pass = [one_pass is not None and one_pass.covers(group) for group in self._groups]
        self._gradients = dict(gradients)
        self._without_state: set[torch.Tensor] = set()
        """Masters that had no state before this step."""
        if not self.places.keys() <= self.state.keys():
            new = [p for p in gradients if p in self.places and p not in self.state]
            self._without_state.update(new)
            # In group order and before any part runs: the state dict then has the order of one whole step.
            for p in sorted(new, key=lambda p: self.places[p][0]):
                self.state[p] = {}

    def hyperparameters(self, number: int) -> dict[str, Any]:
        """Those of a group, which a part may write to."""
        return _snapshots(self._groups[number]) if self._copied[number] else self._groups[number]

    def recorded(self, number: int) -> Mapping[str, Any]:
        """The hyper-parameters of a group."""
        return self._groups[number]

    def copies_of_mutable(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Copies of the attributes that a step may write to, such as a list that it fills and empties, for the
        optimizer of one layer: other parts may run concurrently. Parameters are not copied."""
        memo: dict[int, Any] = {id(p): p for p in self.places}
        pairs = ((self._base, optimizer), (self._base.param_groups, optimizer.param_groups))
        memo |= {id(of_base): of_layer for of_base, of_layer in (*pairs, (self._base.state, optimizer.state))}
        return {name: copy.deepcopy(self.attributes[name], memo) for name in self.mutable}

    def part(self, masters: Iterable[torch.Tensor]) -> Part:
        """The update of all `masters` that have a gradient in this step and are in no part yet."""
        gradients, places = self._gradients, self.places
        given = [
            (p, gradient, p.requires_grad)
            for p in masters
            if (gradient := gradients.pop(p, None)) is not None and p in places
        ]
        return Part(self, self.layers.of([p for p, _, _ in given]) if given else None, given)

    def run(self, masters: Iterable[torch.Tensor]) -> None:
        """Make the part for `masters` and run it; see `Part.run`."""
        self.part(masters).run()

    def has_state(self, master: torch.Tensor) -> bool:
        """Whether a master had state before this step."""
        return master not in self._without_state

    def one_pass_of(self, number: int) -> OnePass | None:
        """The pass, if it covers the group of this number."""
        return self.layers.one_pass if self._in_one_pass[number] else None

    def call(self, optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]) -> None:
        """Call `step` with the optimizer of a layer, between torch's hooks for all optimizers."""
        if hooks_of_all_steps() or is_profiling():
            step = torch.optim.Optimizer.profile_hook_step(step)
        step(optimizer)


def _nothing(num_bytes: int) -> None:
    """Count nothing."""


def _rounded_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the fp32 tensors of a state that is kept in 16 bits."""
    return sum(value.nbytes for value in state.values() if is_rounded(value))


class Part:
    """The update of some masters, to be run once, on any thread."""

    def __init__(
        self, step: SplitStep, layer: _LayerOptimizer | None, given: list[tuple[torch.Tensor, torch.Tensor, bool]]
    ) -> None:
        """Of masters, their gradients, and whether they require a gradient; the rest is left to the thread that runs
        it."""
        self._step, self._layer = step, layer
        self._given = given

    def run(
        self,
        factors: Mapping[torch.Tensor, torch.Tensor] | None = None,
        allocated: Callable[[int], None] = _nothing,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        pieces: Pieces | None = None,
    ) -> set[torch.Tensor]:
        """Update the masters.

        Args:
            factors: master -> the number that its gradient is multiplied by first, a 0-dim host tensor.
            allocated: told the bytes of gradients and state in fp32 that exist until this update is over.
            copies: master -> its copy in 16 bits.
            pieces: those of the only master, if its gradient is still arriving; None if all gradients are there.

        Returns:
            the masters whose copies have got the new values.

        Raises:
            Exception: the exception of the optimizer; the part stays as the optimizer left it, and cannot run again.
        """
        given, self._given = self._given, []
        if self._layer is None or not given:
            return set()
        return _PartRun(self._step, self._layer, given, factors or {}, copies or {}, allocated, pieces).run()


class _PartRun:
    """A part that runs."""

    def __init__(
        self,
        step: SplitStep,
        layer: _LayerOptimizer,
        given: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        factors: Mapping[torch.Tensor, torch.Tensor],
        copies: Mapping[torch.Tensor, torch.Tensor],
        allocated: Callable[[int], None],
        pieces: Pieces | None,
    ) -> None:
        self._step, self._layer, self._allocated, self._pieces = step, layer, allocated, pieces
        # Hooks see the gradients that the step uses.
        self._is_seen = any(getattr(hook, "reads_gradients", True) for hook in hooks_of_all_steps())
        self._updates: list[tuple[_Member, ParameterUpdate]] = []
        """Of the masters that are updated in one pass."""
        self._others: list[_Member] = []
        """The others, whose stand-ins have the gradient."""
        with without_interception(), torch.no_grad():  # the masters are held until this update is over
            self._divide(given, factors, copies)

    def _divide(
        self,
        given: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        factors: Mapping[torch.Tensor, torch.Tensor],
        copies: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        to_scale: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p, gradient, requires_grad in given:
            member = self._layer.members[p]
            member.refresh()
            update = self._in_one_pass(member, gradient, factors.get(p), copies.get(p))
            if update is not None:
                self._updates.append((member, update))
            else:
                self._others.append(member)
            if update is None or self._is_seen:
                self._wait_for_pieces()
                member.show(requires_grad=requires_grad)
                member.stand_in.grad = self._converted(member.stand_in, gradient, factors.get(p), to_scale)
        if to_scale:
            torch._foreach_mul_(*map(list, zip(*to_scale, strict=True)))

    def _wait_for_pieces(self) -> None:
        """Wait for the whole gradient, which is used now."""
        if self._pieces is not None:
            self._pieces.before(len(self._pieces.ends) - 1)
            self._pieces = None

    def _in_one_pass(
        self,
        member: _Member,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        copy: torch.Tensor | None,
    ) -> ParameterUpdate | None:
        """The update of a master, if it is computed in one pass."""
        step, number = self._step, member.place[0]
        one_pass = step.one_pass_of(number)
        if one_pass is None:
            return None
        keys = (0, 0) if step.rounding is None else step.rounding.keys(member.place)
        by = 1.0 if factor is None else factor.item()
        state = step.state[member.master]
        update = ParameterUpdate(member.stand_in, gradient, by, step.recorded(number), state, copy, keys)
        return update if one_pass.takes(update) else None

    def _converted(
        self,
        stand_in: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        to_scale: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """A gradient in the dtype of its master, times its factor; or `to_scale`, in place."""
        if gradient.dtype == stand_in.dtype:
            if factor is not None:
                to_scale.append((gradient, factor))
            return gradient
        if factor is None:
            wide = gradient.to(stand_in.dtype)
        else:  # in fp32: one exact pass that both widens and scales
            wide = torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=stand_in.dtype))
        self._allocated(wide.nbytes)
        return wide

    def run(self) -> set[torch.Tensor]:
        """See `Part.run`."""
        step, state = self._step, defaultdict[torch.Tensor, Any](dict)
        # Some optimizers check whether a parameter is in the state: before its first step, it must not be.
        for member in self._others:
            if step.has_state(member.master):
                state[member.stand_in] = self._widened(member)
        if self._others or self._is_seen:
            members = [*self._others, *(member for member, _ in self._updates)] if self._is_seen else self._others
            self._layer.prepare(step, sorted(members, key=lambda member: member.place), state)
        step.call(self._layer.optimizer, self._make)
        self._layer.release()
        for member in self._others:
            member.stand_in.grad = None
            self._take_state(member, state.get(member.stand_in))
        return {member.master for member, update in self._updates if update.copy is not None}

    def _make(self, optimizer: torch.optim.Optimizer) -> None:
        """The step itself; `optimizer` is that of the layer."""
        if self._updates:
            one_pass = self._step.layers.one_pass
            assert one_pass is not None, "it has taken these updates"
            if self._is_seen:  # and changed, maybe
                seen = [(each, m.stand_in.grad) for m, each in self._updates]
                one_pass.run([replace(each, gradient=g, factor=1.0) for each, g in seen if g is not None])
            else:
                one_pass.run([update for _, update in self._updates], self._pieces)
            for member, update in self._updates:
                if self._is_seen:
                    member.stand_in.grad = None
                if not update.state:  # as that of SGD without momentum
                    del self._step.state[member.master]
        if self._others:
            unhooked_step(type(optimizer))(optimizer)

    def _widened(self, member: _Member) -> dict[str, Any]:
        """The state of a master as the optimizer needs it."""
        step = self._step
        state: dict[str, Any] = step.state[member.master]
        if step.rounding is None or member.master.dtype != torch.float32 or not keeps_16_bits(member.master):
            return state
        wide = widened(state)
        self._allocated(_rounded_bytes(wide))
        return wide

    def _take_state(self, member: _Member, made: dict[str, Any] | None) -> None:
        """Keep the state that the optimizer has made of a master."""
        step, master = self._step, member.master
        if made is None:
            # An optimizer without state, such as SGD without momentum, has no entries either.
            del step.state[master]
            return
        kept = step.state[master]
        if step.rounding is not None and keeps_16_bits(master):
            self._allocated(0 if step.has_state(master) else _rounded_bytes(made))
            made = step.rounding.narrowed(made, member.place, kept)
        if made is not kept:
            kept.clear()
            kept.update(made)


def _mutable_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the attributes that a step may write into; groups, state, defaults and hooks are none of them."""
    return [
        name
        for name, value in vars(optimizer).items()
        if not (name in ("param_groups", "state", "defaults") or name.endswith("_hooks") or _is_immutable(value))
    ]


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return value is None or isinstance(value, _IMMUTABLE)


def _snapshots(group: Mapping[str, Any]) -> dict[str, Any]:
    """The current hyper-parameters of a group."""
    return {
        key: value if type(value) in _NUMBERS else _snapshot(value)
        for key, value in group.items()
        if key not in _OF_THE_PARAMETERS
    }


def _snapshot(value: Any) -> Any:
    """The current value of a hyper-parameter; a tensor is copied, since schedulers write to it in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_snapshot, value)) if type(value) in (list, tuple) else value


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside, if `optimizer` is Accelerate's wrapper, which has other attributes than the optimizer."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of the optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The current hyper-parameters of all groups."""
    return [
        {key: _number(value) for key, value in group.items() if key not in _OF_THE_PARAMETERS}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def gradient_hook_error(name: str) -> str:
    """The error for a gradient hook on the parameter `name`."""
    return (
        f"parameters must carry no gradient hooks, which would never run: gradients are made on copies (got one on "
        f"{name}); remove the hook, or use an optimizer that updates in step() and not during backward"
    )
