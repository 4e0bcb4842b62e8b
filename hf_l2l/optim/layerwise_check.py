"""Checks that an optimizer is layer-local: separable by parameter, so that it can step layer by layer
(arXiv:2002.05645, 2.2).

The check goes by behaviour, not by class name: a small copy of the optimizer makes a few whole steps, another copy
makes the same steps in parts, and the results are compared bitwise.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from hf_l2l.compat import unhooked_step
from hf_l2l.optim.bits import are_equal, bits_of, tensor_bits
from hf_l2l.optim.layer_optimizers import LayerOptimizers, SplitStep, places_of
from hf_l2l.optim.rows_step import RowsStep
from hf_l2l.option_names import option

_SCALES = (1.0, 2.0**-10, 2.0**12)
"""Scales of the gradients, per step: what an optimizer does with all of them, as clipping, may need large ones."""

_LR = 2.0**-4
"""Learning rate of the trial: the user's may be 0 in a warm-up, or too small to change 16-bit weights."""

_MATRIX, _CUT = (160, 136), 64
"""Rows and columns of a matrix of which rows are stepped apart, and the row at which they are divided: so large that
optimizers which treat large tensors in another way do so."""


def why_not_layer_local(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why `optimizer` can only step as a whole, or None if `SplitStep` leaves the same bits.

    An optimizer is layer-local if the update of a parameter depends only on its own gradient, weight and state, and on
    hyper-parameters that only the user or a scheduler changes. The trial uses two tiny parameters per group, in host
    memory, with the dtypes and numbers of dimensions of the group. The user's parameters, state and generators do not
    change, and no hook runs. An optimizer that cannot be tried counts as not layer-local.

    Returns:
        A clause such as "its step draws random numbers, which would come in another order".
    """
    if optimizer.state.keys() - {p for group in optimizer.param_groups for p in group["params"]}:
        return "it keeps state that belongs to no parameter"
    failures: list[_NotTriable] = []
    # Most optimizers start without state; some create it in their constructor. Some take sparse gradients only.
    for with_state, sparse in product((False, True), (False, True)):
        try:
            with _generators_restored():
                return _verdict(optimizer, with_state, sparse)
        except _NotTriable as error:
            failures.append(error)
    return f"it cannot be tried on small tensors ({failures[0]})"


def why_in_parts() -> str:
    """Why an optimizer must update layer by layer if gradients or state are kept in 16 bits."""
    return f"{option('grad_dtype')}='16bit' and {option('moment_dtype')}='bf16' are made fp32 a layer at a time"


def can_split(optimizer: torch.optim.Optimizer, *, eager: bool, why: str | None, has_resident: bool = False) -> bool:
    """Whether `optimizer` can update layer by layer; warns if it must update all layers at once.

    Raises:
        ValueError: if it must, and updates are `eager`, or there is a reason `why` it may not, or parameters are on
            the host and on the device (`has_resident`).
    """
    reason = why_not_layer_local(optimizer)
    if reason is None:
        return True
    rule = f"{type(optimizer).__name__} cannot update one layer without the others ({reason})"
    if has_resident:
        raise ValueError(
            f"{option('resident')}='shell' and {option('resident_layers')} have parameters on the host and on the "
            f"device, which are updated apart, but {rule}; use {option('resident')}='none' without "
            f"{option('resident_layers')}, or 'all'"
        )
    if eager:
        raise ValueError(
            f"eps_update='eager' updates a layer as soon as its gradients are there, but {rule}; use "
            "eps_update='serial'"
        )
    if why is not None:
        raise ValueError(f"{why}, but {rule}; leave them out, or use torch.optim.AdamW")
    warnings.warn(f"{rule}: it updates all of them in optimizer.step(), as eps_update='serial' does", stacklevel=5)
    return False


def can_step_rows(optimizer: torch.optim.Optimizer, matrices: Sequence[torch.Tensor]) -> bool:
    """Whether rows of these matrices, of floating point, that are updated apart have the bits of a whole update, as
    with AdamW, and not with Adafactor. The first step, which makes the state, is one of whole parameters.

    An optimizer without state has nothing of which the ranks could tell that a first step was made.

    Rows are divided at multiples of 64 elements: a kernel that computes several elements at once, as that of the fused
    AdamW, rounds those that are left over at the end of a tensor in another way.
    """
    try:
        with _generators_restored():
            whole, divided = (_Trial(optimizer, with_state=False, sparse=False, matrices=matrices) for _ in range(2))
            for number, scale in enumerate(_SCALES):
                whole.step(number, scale)
                divided.step_rows(number, scale)
    except _NotTriable:
        return False
    pairs = list(zip(whole.parameters, divided.parameters, strict=True))
    states = [(whole.optimizer.state[p], divided.optimizer.state[q]) for p, q in pairs]
    return (
        bool(pairs)
        and all(one for one, _ in states)
        and all(map(are_equal, *zip(*pairs, strict=True)))
        and all(
            one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one) for one, other in states
        )
    )


def _verdict(optimizer: torch.optim.Optimizer, with_state: bool, sparse: bool) -> str | None:
    whole, changed, split = (_Trial(optimizer, with_state, sparse) for _ in range(3))
    weights, generators = whole.weights(), _generators()
    for number, scale in enumerate(_SCALES):
        reason = whole.step(number, scale)
        if reason is not None:
            return reason
        changed.step(number, scale, others_seed=1)
        split.step_in_parts(number, scale)
    if _generators() != generators:
        return "its step draws random numbers, which would come in another order"
    if any(after == before for after, before in zip(whole.weights(), weights, strict=True)):
        return "its step leaves parameters as they are"  # it updates other tensors
    if whole.result()[::2] != changed.result()[::2]:
        return "the update of a parameter depends on the gradients of others"
    if whole.result() != split.result():
        return "parts stepped alone end with other bits"
    return None


class _Trial:
    """A small copy of an optimizer, with two tiny parameters for every group that has trainable ones."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        with_state: bool,
        sparse: bool,
        matrices: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """With `matrices`, the groups that have some of these alone, with two matrices of their dtypes (trained
        or not)."""
        self.sparse = sparse
        pairs = [
            (group, _two_of(group["params"]) if matrices is None else _two_matrices(group["params"], matrices))
            for group in optimizer.param_groups
        ]
        pairs = [(group, two) for group, two in pairs if two]
        meant = [p for _, two in pairs for p in two]
        shape = None if matrices is None else _MATRIX
        self.parameters = [_tiny(p, number, shape) for number, p in enumerate(meant)]
        self.optimizer, state, memo = _bare_copy(optimizer, dict(zip(meant, self.parameters, strict=True)))
        groups = [_group_of(group, self.parameters[2 * n : 2 * n + 2], memo) for n, (group, _) in enumerate(pairs)]
        _give(self.optimizer, groups, state)
        self._layers = LayerOptimizers(self.optimizer)
        if with_state:
            for p, tiny in zip(meant, self.parameters, strict=True):
                state[tiny] = {key: _corner(value, tiny, memo) for key, value in optimizer.state.get(p, {}).items()}

    def step(self, number: int, scale: float, others_seed: int = 0) -> str | None:
        """Make a whole step. Return a clause if it did something that a part of a step must not do."""
        groups, attributes = self._groups(), self._attributes()
        gradients = self._gradients(number, scale, others_seed)
        for p in self.parameters:
            p.grad = gradients.get(p)
        _step_quietly(self.optimizer)
        if self._groups() != groups:
            return "its step changes its groups"
        # The first step may set attributes, for instance that the parameters have been checked.
        if number and self._attributes() != attributes:
            return "its step changes its attributes"
        if self.optimizer.state.keys() - set(self.parameters):
            return "it keeps state that belongs to no parameter"
        return None

    def step_in_parts(self, number: int, scale: float) -> None:
        split = _QuietSplitStep(self._layers, self._gradients(number, scale))
        for p in reversed(self.parameters):
            split.run([p])

    def step_rows(self, number: int, scale: float) -> None:
        """Make a step of two parts of the rows of each matrix, each with the numbers that its state had before."""
        places = places_of(self.optimizer)
        for p, gradient in self._gradients(number, scale).items():
            state = self.optimizer.state.get(p)
            if not state:
                _QuietSplitStep(self._layers, {p: gradient}).run([p])
                continue
            numbers = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor) or v.shape != p.shape}
            for rows in (slice(0, _CUT), slice(_CUT, None)):
                state.update(copy.deepcopy(numbers))
                RowsStep(self.optimizer, p, gradient, places, rows, step_type=_QuietSplitStep).run()

    def weights(self) -> list[Any]:
        return [tensor_bits(p) for p in self.parameters]

    def result(self) -> list[Any]:
        states = [bits_of(self.optimizer.state.get(p)) for p in self.parameters]
        return list(zip(self.weights(), states, strict=True))

    def _gradients(self, number: int, scale: float, others_seed: int = 0) -> dict[torch.Tensor, torch.Tensor]:
        """Gradients of one step; `others_seed` changes that of the second of each pair, which has none in step 1."""
        made: dict[torch.Tensor, torch.Tensor] = {}
        for index, p in enumerate(self.parameters):
            if number == 1 and index % 2:
                continue
            generator = torch.Generator().manual_seed(1000 * number + index + (500_000 * others_seed) * (index % 2))
            gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale
            made[p] = gradient.to_sparse(1) if self.sparse else gradient
        return made

    def _groups(self) -> Any:
        return bits_of([{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups])

    def _attributes(self) -> Any:
        # Attributes may refer back to these, which are compared elsewhere.
        within = tuple(map(id, (self.optimizer, self.optimizer.state, self.optimizer.param_groups)))
        return bits_of({k: v for k, v in vars(self.optimizer).items() if k not in ("state", "param_groups")}, within)


def _two_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two trainable parameters: the first, and one with another number of dimensions if the group has one."""
    trained = [p for p in parameters if p.requires_grad]
    others = [p for p in trained if p.dim() != trained[0].dim()] or trained[1:] or trained
    return [trained[0], others[0]] if trained else []


def _two_matrices(parameters: list[torch.Tensor], matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first of `matrices` that a group has, and one of another dtype, or any other one; it may be the same."""
    of_group = set(parameters)
    found = [p for p in matrices if p in of_group]
    others = [p for p in found if p.dtype != found[0].dtype] or found[1:] or found
    return [found[0], others[0]] if found else []


def _tiny(parameter: torch.Tensor, number: int, matrix: tuple[int, int] | None) -> torch.nn.Parameter:
    shape = [max(1, min(size, 4 + number % 2)) for size in parameter.shape] if matrix is None else [*matrix]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=parameter.dtype)
    tiny = torch.nn.Parameter(values)
    vars(tiny).update(vars(parameter))  # some optimizers read tags on the parameters
    return tiny


def _group_of(group: Mapping[str, Any], parameters: list[torch.nn.Parameter], memo: dict[int, Any]) -> dict[str, Any]:
    made = {key: _copied(value, memo) for key, value in group.items() if key not in ("params", "param_names")}
    lr = made.get("lr")
    if isinstance(lr, torch.Tensor):
        made["lr"] = torch.full_like(lr, _LR)
    elif lr is not None:
        made["lr"] = _LR
    if "param_names" in group:
        made["param_names"] = ["first", "second"]
    return {"params": parameters, **made}


def _corner(value: Any, tiny: torch.Tensor, memo: dict[int, Any]) -> Any:
    """State for a tiny parameter: the corner of the user's state with its shape."""
    if isinstance(value, torch.Tensor) and value.dim() == tiny.dim():
        if value.dtype == torch.bfloat16:
            value = value.to(tiny.dtype)  # 16-bit state is widened before a step
        return value[tuple(slice(size) for size in tiny.shape)].clone()
    return _copied(value, memo)


# ---- without side effects for the user


class _NotTriable(ValueError):
    """The optimizer's code failed in the trial; the text says how."""


class _Foreign:
    """A block of third-party code, which may raise anything: schedule-free optimizers raise `Exception` itself."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise _NotTriable(f"{type(error).__name__}: {error}") from error


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    with _Foreign():
        return copy.deepcopy(value, memo)


def _bare_copy(
    optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, torch.Tensor]
) -> tuple[torch.optim.Optimizer, defaultdict[Any, Any], dict[int, Any]]:
    """A copy of an optimizer and its attributes, without hooks, groups and state.

    References to a parameter are replaced by references to its stand-in, or to an empty tensor.

    Returns:
        The copy; an empty state for it; and the memo of `copy.deepcopy`, for copying the rest.

    Raises:
        _NotTriable: if an attribute cannot be copied.
    """
    other = object.__new__(type(optimizer))
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(p): torch.empty(0) for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(p): stand_in for p, stand_in in stand_ins.items()}
    memo |= {id(optimizer): other, id(optimizer.state): state}
    vars(other).update(
        (name, OrderedDict() if name.endswith("_hooks") else _copied(value, memo))
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
    )
    return other, state, memo


def _give(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: defaultdict[Any, Any]) -> None:
    with _Foreign():  # a wrapper of another optimizer may refuse the assignment
        optimizer.state, optimizer.param_groups = state, groups


def state_after_one_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> tuple[dict[str, Any], bool]:
    """The state that `optimizer` creates for `parameter`, a member of `group`, in its first step.

    A copy of the optimizer makes the step on the meta device; the arguments do not change.

    Returns:
        The state, and whether the step completed: not all kernels run on the meta device.
    """
    stand_in = torch.empty_like(parameter, device="meta").requires_grad_()
    stand_in.grad = torch.empty_like(stand_in)
    state: defaultdict[Any, Any] = defaultdict(dict)
    try:
        with _generators_restored():
            trial, state, memo = _bare_copy(optimizer, {parameter: stand_in})
            options = {key: _copied(value, memo) for key, value in group.items() if key != "params"}
            # Fused and foreach kernels have the same state as the plain loop, which runs on meta.
            _give(trial, [{**options, "fused": False, "foreach": False, "params": [stand_in]}], state)
            _step_quietly(trial)
    except _NotTriable:
        return state[stand_in], False
    return state[stand_in], True


class _QuietSplitStep(SplitStep):
    """Without torch's hooks, which must not see it."""

    def call(self, optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]) -> None:
        with _Foreign():
            step(optimizer)


def _step_quietly(optimizer: torch.optim.Optimizer) -> None:
    """Make a step without torch's global optimizer hooks, which must not see it.

    Raises:
        _NotTriable: if the step raises.
    """
    step = unhooked_step(type(optimizer))
    with _Foreign():
        step(optimizer)


def _generators() -> list[Any]:
    return [tensor_bits(torch.get_rng_state()), random.getstate()]


@contextmanager
def _generators_restored() -> Iterator[None]:
    numbers = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(numbers)
