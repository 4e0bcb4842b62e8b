"""Carries out one step of any layer-local `torch.optim.Optimizer` in parts, such as one part per layer.

The eager param-server updates one layer while others are still computed (arXiv:2002.05645, 2.2, L2L-p). The user's
optimizer is not replaced: for each part, a second optimizer is made that shares the attributes and the state of the
first, but has only the parameters of that part. `layerwise_check.why_not_layer_local` finds optimizers for which that
is not possible.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any

import torch

from hf_l2l.compat import drop_step_hooks, without_interception
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


@dataclass(slots=True)
class _Share:
    """The gradient, place and state of one master in the step."""

    gradient: torch.Tensor
    place: tuple[int, int]
    """The number of its group, and its own number there."""
    name: str | None
    state: dict[str, Any]
    """The dict of the master in `optimizer.state`."""
    has_state: bool
    """True if that dict existed before this step."""
    requires_grad: bool
    """Whether the master required a gradient at the step."""


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
        optimizer: torch.optim.Optimizer,
        gradients: Mapping[torch.Tensor, torch.Tensor],
        places: Places | None = None,
        rounding: Rounding | None = None,
        *,
        state: MutableMapping[torch.Tensor, Any] | None = None,
    ) -> None:
        """Record what the step needs, so that a scheduler may change the hyper-parameters right after this.

        To be called on the thread that uses the optimizer.

        Args:
            optimizer: the optimizer; not Accelerate's wrapper of it (see `unwrapped`).
            gradients: master -> its gradient, of its shape and device, dense or sparse, in its dtype or a shorter one.
                Parameters without a gradient are not updated. Each gradient is released when its part has run.
            places: the result of `places_of`, if it is known already.
            rounding: rounds the state to the 16 bits in which it is kept; None keeps it as the step makes it.
            state: that of the masters; None is the optimizer's.
        """
        self._rounding = rounding
        self._state = optimizer.state if state is None else state
        self._places = places = places_of(optimizer) if places is None else places
        self._mutable = _mutable_attributes(optimizer)
        self._base = _hookless_copy(optimizer, [], defaultdict(dict), places, self._mutable)
        self._groups = [_snapshots(group) for group in optimizer.param_groups]
        self._copied = [not all(map(_is_immutable, group.values())) for group in self._groups]
        """For each group, whether a part must copy the values too, and not only the dict."""
        self._gradients = dict(gradients)
        self._without_state: set[torch.Tensor] = set()
        """Masters that had no state before this step."""
        if not places.keys() <= self._state.keys():
            new = [p for p in gradients if p in places and p not in self._state]
            self._without_state.update(new)
            # In group order and before any part runs: the state dict then has the order of one whole step.
            for p in sorted(new, key=lambda p: places[p][0]):
                self._state[p] = {}

    def part(self, masters: Iterable[torch.Tensor]) -> Part:
        """The update of all `masters` that have a gradient in this step and are in no part yet."""
        gradients, places = self._gradients, self._places
        return Part(
            self,
            [
                (p, gradient, p.requires_grad)
                for p in masters
                if (gradient := gradients.pop(p, None)) is not None and p in places
            ],
        )

    def _shares_of(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor, bool]]
    ) -> list[tuple[torch.Tensor, _Share]]:
        """The masters and their shares, in the order of the groups."""
        state, places, new = self._state, self._places, self._without_state
        shares = [(p, _Share(g, *places[p], state[p], p not in new, trains)) for p, g, trains in pairs]
        return sorted(shares, key=lambda pair: pair[1].place)

    def run(self, masters: Iterable[torch.Tensor]) -> None:
        """Make the part for `masters` and run it; see `Part.run`."""
        self.part(masters).run()

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer) -> None:
        type(optimizer).step(optimizer)  # not the wrapper that a scheduler sets on the instance


def _nothing(num_bytes: int) -> None:
    """Count nothing."""


def _rounded_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the fp32 tensors of a state that is kept in 16 bits."""
    return sum(value.nbytes for value in state.values() if is_rounded(value))


class Part:
    """The update of some masters, to be run once, on any thread."""

    def __init__(self, step: SplitStep, pairs: list[tuple[torch.Tensor, torch.Tensor, bool]]) -> None:
        """Of masters, their gradients, and whether they require a gradient; the rest is left to the thread that runs
        it."""
        self._step = step
        self._pairs = pairs

    def _groups_of(self, pairs: Iterable[tuple[tuple[torch.Tensor, _Share], torch.Tensor]]) -> list[dict[str, Any]]:
        """The groups of the optimizer with the stand-ins of this part, and the hyper-parameters of the step."""
        groups: dict[int, dict[str, Any]] = {}
        for (_, share), stand_in in pairs:
            number = share.place[0]
            group = groups.get(number)
            if group is None:
                recorded = self._step._groups[number]
                if self._step._copied[number]:
                    recorded = _snapshots(recorded)
                group = groups[number] = {"params": [], **recorded}
            group["params"].append(stand_in)
            if share.name is not None:
                group.setdefault("param_names", []).append(share.name)
        return list(groups.values())

    def run(
        self,
        factors: Mapping[torch.Tensor, torch.Tensor] | None = None,
        allocated: Callable[[int], None] = _nothing,
    ) -> None:
        """Update the masters.

        Args:
            factors: master -> the number that its gradient is multiplied by first, a 0-dim host tensor.
            allocated: told the bytes of gradients and state in fp32 that exist until this update is over.

        Raises:
            Exception: the exception of the optimizer; the part stays as the optimizer left it, and cannot run again.
        """
        shares, self._pairs = self._step._shares_of(self._pairs), []
        if not shares:
            return
        stand_ins = _stand_ins(shares)
        pairs = list(zip(shares, stand_ins, strict=True))
        allocated(_set_gradients(shares, stand_ins, factors or {}))
        rounding = self._step._rounding
        # Some optimizers check whether a parameter is in the state: before its first step, it must not be.
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for (master, share), stand_in in pairs:
            if share.has_state:
                wide = rounding is not None and master.dtype == torch.float32 and keeps_16_bits(master)
                state[stand_in] = widened(share.state) if wide else share.state
                allocated(_rounded_bytes(state[stand_in]) if wide else 0)
        step = self._step
        optimizer = _hookless_copy(step._base, self._groups_of(pairs), state, step._places, step._mutable)
        self._step._step(optimizer)
        for (master, share), stand_in in pairs:
            made = optimizer.state.get(stand_in)
            if made is None:
                # An optimizer without state, such as SGD without momentum, has no entries either.
                del self._step._state[master]
                continue
            if rounding is not None and keeps_16_bits(master):
                allocated(0 if share.has_state else _rounded_bytes(made))
                made = rounding.narrowed(made, share.place, share.state)
            if made is not share.state:
                share.state.clear()
                share.state.update(made)


def _hookless_copy(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: defaultdict[torch.Tensor, Any],
    parameters: Iterable[torch.Tensor],
    mutable: Sequence[str],
) -> torch.optim.Optimizer:
    """An optimizer with the attributes of this one, and without its hooks (`copy.copy` would lose most attributes).

    Attributes that a step may write to are copied, such as a list that it fills and empties, since other parts may run
    concurrently: those named in `mutable`. The `parameters` are not copied.
    """
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    if mutable:
        memo: dict[int, Any] = {id(p): p for p in parameters}
        memo |= {id(optimizer): other, id(optimizer.param_groups): groups, id(optimizer.state): state}
        vars(other).update({name: copy.deepcopy(vars(optimizer)[name], memo) for name in mutable})
    other.param_groups, other.state = groups, state
    drop_step_hooks(other)
    return other


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


def _stand_ins(shares: list[tuple[torch.Tensor, _Share]]) -> list[torch.Tensor]:
    """One tensor per master, which replaces it in the optimizer: with its memory and version, without a gradient."""
    with without_interception():  # the masters are held until this update is over
        tensors = [master.detach().requires_grad_(share.requires_grad) for master, share in shares]
    for tensor, (master, _) in zip(tensors, shares, strict=True):
        vars(tensor).update(vars(master))  # some optimizers read attributes that the program set on parameters
        vars(tensor).pop("_l2l_pending", None)  # the EPS sets one, too, which is of the parameter alone
    return tensors


@torch.no_grad()
def _set_gradients(
    shares: Iterable[tuple[torch.Tensor, _Share]],
    stand_ins: Iterable[torch.Tensor],
    factors: Mapping[torch.Tensor, torch.Tensor],
) -> int:
    """Set the `grad` of each stand-in: the gradient of this step, times its factor, in the dtype of the master.

    Returns the bytes of gradients that were converted."""
    scaled, converted = [], 0
    for (master, share), stand_in in zip(shares, stand_ins, strict=True):
        gradient, factor = share.gradient, factors.get(master)
        if gradient.dtype == master.dtype:
            if factor is not None:
                scaled.append((gradient, factor))
        elif factor is None:
            gradient = gradient.to(master.dtype)
        else:  # in fp32: one exact pass that both widens and scales
            gradient = torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=master.dtype))
        if gradient is not share.gradient:
            converted += gradient.nbytes
        stand_in.grad = gradient
    if scaled:
        torch._foreach_mul_(*map(list, zip(*scaled, strict=True)))
    return converted


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
