"""The optimizers that are computed in one pass: what each keeps of a parameter, and the numbers of its step.

Each class says when a group of the optimizer can be computed so, and makes of its hyper-parameters and of a number of
steps the nine numbers that `kernels` reads, with the arithmetic of torch in double precision. `step` is the same on a
chunk of a parameter, by torch's fused functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from hf_l2l.compat import fused_adam, fused_adamw, fused_sgd
from hf_l2l.optim.eight_bits import BLOCK
from hf_l2l.optim.rounded_state import CHUNK, Keys

_AT_ONCE = 2**20
"""Elements of a temporary tensor beside one like the parameter."""

Numbers = tuple[float, float, float, float, float, float, float, float, float]


@dataclass(slots=True, eq=False)
class ParameterUpdate:
    """The update of one parameter."""

    master: torch.Tensor
    """float32, contiguous, on the host."""
    gradient: torch.Tensor
    """Like it, or in 16 bits."""
    factor: float
    """What the gradient is multiplied by first."""
    group: Mapping[str, Any]
    """The hyper-parameters."""
    state: dict[str, Any]
    """Its state in the optimizer, which is written to; empty before its first step."""
    copy: torch.Tensor | None
    """Of the same shape, bfloat16 or float16: gets the new values of the master; None if there is none."""
    keys: Keys
    """Those of its random bits in this step."""
    moments: Sequence[torch.Tensor] = ()
    """The tensors of its state that are like the parameter."""
    exponents: Sequence[torch.Tensor] = ()
    """Of moments in 8 bits."""
    step: float = 0.0
    """The number of this step, from 1 on."""
    numbers: Numbers = (0.0,) * 9
    """Those of this step."""

    def part(self, begin: int, end: int) -> ParameterUpdate:
        """The update of some elements; `begin` is a multiple of `CHUNK`, so that each is computed as in the whole."""
        first, second = self.keys

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().view(-1)[begin:end]

        return replace(
            self,
            master=cut(self.master),
            gradient=cut(self.gradient),
            copy=None if self.copy is None else cut(self.copy),
            moments=[cut(each) for each in self.moments],
            exponents=[each[begin // BLOCK : -(-end // BLOCK)] for each in self.exponents],
            keys=((first + begin // CHUNK) % 2**32, second),  # random bits are told by the number of an element
        )


class Chunk(NamedTuple):
    """A part of a parameter in a step: tensors of one dimension, float32."""

    master: torch.Tensor
    gradient: torch.Tensor
    """Multiplied by its factor."""
    moments: Sequence[torch.Tensor]
    update: ParameterUpdate


class Form(Protocol):
    """One kind of optimizer."""

    is_ours: bool
    """Whether its step is this package's own in any case, and not one of torch's."""
    counts: bool
    """Whether the state of a parameter counts its steps."""
    has_norms: bool
    """Whether the step needs norms of the parameter, and so a second pass."""

    def covers(self, group: Mapping[str, Any]) -> bool:
        """Whether a group with these hyper-parameters can be computed in one pass."""

    def moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        """The keys of the state's tensors that are like the parameter, the first with signs, the second without."""

    def numbers(self, group: Mapping[str, Any], factor: float, step: float) -> Numbers:
        """What the kernel reads in step number `step`, from 1 on, of a gradient that is multiplied by `factor`."""

    def step(self, chunk: Chunk) -> None:
        """The step of a chunk of a parameter."""


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def _is_plain(group: Mapping[str, Any]) -> bool:
    return not any(group.get(name) for name in ("amsgrad", "capturable", "differentiable"))


class _Adam:
    """Adam and AdamW."""

    is_ours, counts, has_norms = False, True, False

    def covers(self, group: Mapping[str, Any]) -> bool:
        beta1, beta2 = group["betas"]
        numbers = _are_numbers(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        # For smaller ones, torch's interpolation has another form.
        return _is_plain(group) and numbers and beta1 > 0.5

    def moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any], factor: float, step: float) -> Numbers:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        is_apart = group.get("decoupled_weight_decay", False)
        return (
            -factor if group["maximize"] else factor,
            0.0 if is_apart else decay,
            1 - lr * decay if is_apart else 1.0,
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
            lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
        )

    def step(self, chunk: Chunk) -> None:
        group = chunk.update.group
        (beta1, beta2), (mean, square) = group["betas"], chunk.moments
        call = fused_adamw if group.get("decoupled_weight_decay", False) else fused_adam
        call(
            [chunk.master],
            [chunk.gradient],
            [mean],
            [square],
            [],
            [chunk.update.state["step"]],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class _Sgd:
    """SGD with and without momentum."""

    is_ours, counts, has_norms = False, False, False

    def covers(self, group: Mapping[str, Any]) -> bool:
        names = ("lr", "momentum", "dampening", "weight_decay")
        return _is_plain(group) and _are_numbers(*(group[name] for name in names))

    def moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def numbers(self, group: Mapping[str, Any], factor: float, step: float) -> Numbers:
        factor = -factor if group["maximize"] else factor
        momentum, weight = group["momentum"], 1 - group["dampening"]
        flags = float(step == 1), float(group["nesterov"])
        return (factor, group["weight_decay"], -group["lr"], momentum, weight, *flags, 0.0, 0.0)

    def step(self, chunk: Chunk) -> None:
        group = chunk.update.group
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        numbers_of_group = {name: group[name] for name in names}
        is_first = chunk.update.step == 1 and bool(chunk.moments)
        fused_sgd([chunk.master], [chunk.gradient], [*chunk.moments], is_first_step=is_first, **numbers_of_group)


class _Lamb:
    """`Lamb`. Each operation is rounded by itself, so that kernels and torch compute the same bits."""

    is_ours, counts, has_norms = True, True, True

    def covers(self, group: Mapping[str, Any]) -> bool:
        return _are_numbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"])

    def moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any], factor: float, step: float) -> Numbers:
        beta1, beta2 = group["betas"]
        correction, root = 1 - beta1**step, math.sqrt(1 - beta2**step)
        # The step size is known after the first pass.
        return (
            factor,
            group["weight_decay"],
            correction,
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
            0.0,
            root,
        )

    def step(self, chunk: Chunk) -> None:
        chunk.master.sub_(self.direction(chunk).mul_(chunk.update.numbers[7]))

    @staticmethod
    def direction(chunk: Chunk) -> torch.Tensor:
        """What the parameter is moved by, before that is scaled: new memory. The moments become those of this step."""
        master, gradient, (mean, square), update = chunk
        _, decay, correction, weight, beta2, weight2, eps, _, root = update.numbers
        direction = torch.sub(gradient, mean).mul_(weight)
        mean.add_(direction)
        square.mul_(beta2).add_(torch.mul(gradient, weight2, out=direction).mul_(gradient))
        flat = (each.view(-1).split(_AT_ONCE) for each in (direction, square, mean, master))
        for part, squares, means, weights in zip(*flat, strict=True):
            # From float64, since torch's root of many float32 numbers is not always the nearest one.
            part.copy_(squares.double().sqrt()).div_(root).add_(eps).mul_(correction)
            torch.div(means, part, out=part)
            if decay:
                part.add_(weights * decay)
        return direction

    @staticmethod
    def size(group: Mapping[str, Any], of_weights: float, of_directions: float) -> float:
        """The step size, from the norms of the weights, and of what they are moved by."""
        ratio = of_weights / of_directions if of_weights > 0 and of_directions > 0 else 1.0
        return float(group["lr"]) * ratio


ADAM, SGD, LAMB = _Adam(), _Sgd(), _Lamb()
