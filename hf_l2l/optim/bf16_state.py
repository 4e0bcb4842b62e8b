"""16-bit optimizer state: bfloat16 between steps, fp32 for the arithmetic, rounded stochastically.

With rounding to nearest, changes of a moment below half a unit in the last place would be lost. Stochastic rounding,
up or down with probabilities by distance, is unbiased. The random bits depend on a seed, the number of the step, and
the tensor; so they do not depend on the thread, and are the same after resuming, since checkpoints have all of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import elements, is_dense

GROUP_KEY = "l2l_rounding"
"""Key of an optimizer's first group for seed and step number, which makes them part of its state dict."""


def stochastically_rounded(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Round `values` (float32, host) to bfloat16: each to one of its two neighbours, unbiased.

    Non-finite values, and values that bfloat16 can represent, do not change.

    Args:
        values: float32, any shape; their memory is overwritten.
        seed: of the random bits, from 0 to 2**64 - 1.
    """
    assert values.dtype == torch.float32, "float32 is rounded to 16 bits"
    values = values if is_dense(values) else values.contiguous()
    flat = elements(values)
    generator = torch.Generator().manual_seed(seed)
    # Four elements share one draw, since drawing dominates the time.
    drawn = torch.empty(-(-flat.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    # From 0 to 65535; bfloat16 neighbours are 65536 apart, and a carry rounds away from zero.
    step = drawn.view(torch.int16)[: flat.numel()].to(torch.int32).add_(2**15)
    step.mul_(flat.isfinite())  # a carry could turn a NaN into a number
    flat.view(torch.int32).add_(step).bitwise_and_(-(2**16))
    return values.to(torch.bfloat16)


class Rounding(NamedTuple):
    """Seed and number of a step, which determine its random bits."""

    seed: int
    step: int

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Rounding:
        """The rounding of the next step of `optimizer`; the first takes the seed of torch's default generator."""
        group = optimizer.param_groups[0]
        return cls(*group.setdefault(GROUP_KEY, (torch.initial_seed(), 0)))

    @staticmethod
    def end_step(optimizer: torch.optim.Optimizer) -> None:
        """Advance the step number: the next step rounds with other random bits."""
        seed, step = Rounding.of(optimizer)
        optimizer.param_groups[0][GROUP_KEY] = (seed, step + 1)

    def narrowed(
        self, state: Mapping[str, Any], place: tuple[int, int], before: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state of one parameter with its float32 tensors rounded to bfloat16; numbers (0-dim) are not changed.

        Args:
            state: the state after a step; the memory of its tensors may be overwritten.
            place: the index of the parameter's group, and its index in that group.
            before: the rounded state of the last step, whose memory is reused.
        """
        kept = {} if before is None else before
        return {key: self._narrowed(key, value, place, kept.get(key)) for key, value in state.items()}

    def _narrowed(self, key: str, value: Any, place: tuple[int, int], kept: Any) -> Any:
        if not is_rounded(value):
            return value
        named = repr((self.seed, self.step, *place, key)).encode()
        rounded = stochastically_rounded(value, int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big"))
        alike = isinstance(kept, torch.Tensor) and kept.dtype == rounded.dtype and kept.shape == rounded.shape
        return kept.copy_(rounded) if alike else rounded


def is_rounded(value: Any) -> bool:
    """Whether this part of a state is kept in 16 bits: float32 tensors are, except numbers (0-dim) such as steps."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() > 0


def keeps_16_bits(parameter: torch.Tensor) -> bool:
    """Whether the state of this parameter is kept in 16 bits: that saves host memory, so on the device it is not."""
    return parameter.device == stream.HOST


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter with its bfloat16 tensors converted to float32, in new memory."""
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
        for key, value in state.items()
    }


# ---- the state of a whole optimizer


def keep_loaded_dtypes(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Keep bfloat16 state in `load_state_dict`, which would convert it to fp32 like the parameters."""
    apart: list[dict[Any, dict[str, torch.Tensor]]] = []

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        whole: dict[Any, Any] = state_dict["state"]
        short = {
            number: {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16}
            for number, state in whole.items()
        }
        rest = {n: {k: v for k, v in state.items() if k not in short[n]} for n, state in whole.items()}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        apart[:] = [{place: short.get(number, {}) for place, number in enumerate(numbers)}]
        return {**state_dict, "state": rest}

    def after(optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, state in apart.pop().items() if apart else ():
            p = parameters[place]
            if state and not keeps_16_bits(p):
                state = {key: value.to(p.device, p.dtype) for key, value in state.items()}
            if state:
                optimizer.state[p].update(state)

    return [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]


def widen_all(optimizer: torch.optim.Optimizer) -> None:
    """Convert all gradients and state to fp32 for a whole step, which needs the memory for it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            widen_gradient(p)
            if p in optimizer.state and p.dtype == torch.float32 and keeps_16_bits(p):
                optimizer.state[p].update(widened(optimizer.state[p]))


def widen_gradient(parameter: torch.Tensor) -> None:
    """Convert the gradient of `parameter`, and all that autograd adds from now on, to the dtype of the parameter."""
    gradient, dtype = parameter.grad, parameter.dtype
    if parameter.is_leaf and parameter.requires_grad and parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)


def narrow_all(optimizer: torch.optim.Optimizer) -> None:
    """Round the state of all parameters after a whole step, to the same bits as a step in parts."""
    rounding = Rounding.of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if p in optimizer.state and keeps_16_bits(p):
                optimizer.state[p].update(rounding.narrowed(optimizer.state[p], (number, index)))
