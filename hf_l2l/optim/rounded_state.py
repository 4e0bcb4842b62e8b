"""Optimizer state in fewer bits: bfloat16, or blocks of 8 bits, between steps; fp32 for the arithmetic.

With rounding to nearest, changes of a moment below half a unit in the last place would be lost. Stochastic rounding,
up or down with probabilities by distance, is unbiased. The random bits of the elements of a chunk are a sequence from
a table, which begins at a place that is a hash of a seed, the number of the step, the parameter, and the number of the
chunk; so they do not depend on threads, nor on how the work is cut, and are the same after resuming, since checkpoints
have all of these.

What the kernels of the update do by themselves (`kernels`), this does in torch, to the same bits.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hf_l2l.optim import eight_bits
from hf_l2l.optim.eight_bits import Array
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import elements, is_dense

GROUP_KEY = "l2l_rounding"
"""Key of an optimizer's first group for seed and step number, which makes them part of its state dict."""

CHUNK = 2**16
"""Elements whose random bits are a sequence; `stochastically_rounded` converts as many at once."""

_16 = torch.tensor(16, dtype=torch.int32)

_EXPONENTS = "_exponents"
_UNSIGNED = ("exp_avg_sq",)
"""Keys of state that has no negative values; it is rounded by the upper half of the random bits."""
_OF_KERNELS = ("exp_avg", "momentum_buffer", *_UNSIGNED)
"""Keys of state that is rounded by the random bits of its parameter; other state has bits of its own."""

Kept = Literal["fp32", "bf16", "8bit"]
"""How moments are kept between steps."""

Keys = tuple[int, int]
"""Two numbers of 32 bits, from which the random bits of one parameter in one step are made."""


class _Scratch(threading.local):
    """Memory of one thread, which a cache of its core holds."""

    def __init__(self) -> None:
        self.values = torch.empty(1, CHUNK)


_SCRATCH = _Scratch()


def _hashed(number: Any, key: int = 0, second_key: int = 0) -> Any:
    """lowbias32 of a number or numbers (uint64) below 2**32, with a key added at its beginning and another one in its
    middle."""
    r = (number + key) & 0xFFFFFFFF
    r = ((r ^ (r >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    r = ((r ^ (r >> 15) ^ second_key) * 0x846CA68B) & 0xFFFFFFFF
    return r ^ (r >> 16)


@lru_cache(maxsize=1)
def random_table() -> Array:
    """2**16 numbers of 32 random bits, twice in sequence: uint32. Their lower halves are all numbers of 16 bits in
    random order, and their upper halves in another one. Not to be written to."""
    numbers = np.arange(2 * CHUNK, dtype=np.uint64)
    lower, upper = (np.argsort(_hashed(half)).astype(np.uint32) for half in np.split(numbers, 2))
    return np.tile(lower | (upper << np.uint32(16)), 2)


@lru_cache(maxsize=1)
def _halves() -> torch.Tensor:
    """Two rows of int32: the lower halves of the numbers of the table, and the upper ones."""
    table = random_table()
    return torch.from_numpy(np.stack([table & np.uint32(0xFFFF), table >> np.uint32(16)]).astype(np.int32))


def random_place(start: int, keys: Keys) -> int:
    """The place in the table of the random bits for elements from number `start` on, a multiple of `CHUNK`: a chunk
    takes its bits from there in sequence. Each place is as likely as any other one, so that the 16 bits of an element
    are so, too, and the elements of one chunk never have the same ones."""
    place: int = _hashed(start // CHUNK, *keys) % CHUNK
    return place


def random_bits(start: int, count: int, keys: Keys) -> Array:
    """32 random bits for each of `count` elements of a chunk: uint32, not to be written to."""
    place = random_place(start, keys)
    return random_table()[place : place + count]


def round_to_bf16(
    values: torch.Tensor, start: int, keys: Keys, out: Sequence[torch.Tensor], *, upper: bool = False
) -> None:
    """Round each row of `values` to one of `out`, a number to one of its two neighbours. Infinities, torch's NaN, and
    what bfloat16 can represent do not change; another NaN may become a number.

    Args:
        values: float32, elements from number `start` on, a multiple of `CHUNK`; they are overwritten, since operations
            in place use less of a cache.
        start, keys: say which random bits they get.
        out: bfloat16, one for each row.
        upper: whether the first row gets the upper half of its random bits, as the second one does.
    """
    rounded, noise = values.view(torch.int32), _halves().narrow(0, int(upper), len(out))
    # bfloat16 neighbours are 65536 apart in bits of fp32, and a carry rounds away from zero.
    for number, part in enumerate(rounded.split(CHUNK, 1)):
        part.add_(noise.narrow(1, random_place(start + number * CHUNK, keys), part.shape[1]))
    rounded.bitwise_right_shift_(_16)
    for short, row in zip(out, rounded.unbind(), strict=True):
        short.view(torch.int16).copy_(row)


def round_to_blocks(
    values: torch.Tensor, start: int, keys: Keys, codes: torch.Tensor, exponents: torch.Tensor, *, signed: bool
) -> None:
    """Round `values` (float32, elements from number `start` on, a multiple of `CHUNK`) to `codes` and `exponents` of 8
    bits; see `eight_bits`."""
    parts = (values.split(CHUNK), codes.split(CHUNK), exponents.split(CHUNK // eight_bits.BLOCK))
    for number, (wide, short, shared) in enumerate(zip(*parts, strict=True)):
        drawn = random_bits(start + number * CHUNK, wide.numel(), keys)
        eight_bits.write(wide.numpy(), drawn, short.numpy(), shared.numpy(), signed=signed)


def stochastically_rounded(
    values: torch.Tensor, keys: Keys, *, upper: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Round `values` (float32, host, any shape) to bfloat16: each to one of its two neighbours, unbiased.

    Args:
        values: they do not change.
        keys: those of the random bits, of which the lower 16 are used, or the `upper` ones.
        out: the memory of the result, if it is like that.
    """
    assert values.dtype == torch.float32, "float32 is rounded to 16 bits"
    values = values if is_dense(values) else values.contiguous()
    like = torch.empty_like(values, dtype=torch.bfloat16, device="meta")
    if out is None or (out.dtype, out.shape, out.stride()) != (like.dtype, like.shape, like.stride()):
        out = torch.empty_like(values, dtype=torch.bfloat16)
    chunks = zip(elements(values).split(CHUNK), elements(out).split(CHUNK), strict=True)
    for number, (wide, short) in enumerate(chunks):
        values = _SCRATCH.values[:, : wide.numel()].copy_(wide)
        if math.isnan(values.sum().item()):
            values.masked_fill_(values.isnan(), math.nan)  # a carry could make a number of another NaN
        round_to_bf16(values, number * CHUNK, keys, [short], upper=upper)
    return out


def in_blocks(
    values: torch.Tensor, keys: Keys, *, signed: bool, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `values` (float32, host, any shape) to 8 bits; see `eight_bits`. Blocks are in the order of memory.

    Args:
        values: dense; they do not change.
        keys: those of the random bits.
        signed: whether there may be negative values.
        out: the memory of the result, if it is like that.

    Returns:
        codes (uint8, like the values) and the exponents of their blocks (uint8, one dimension).
    """
    values = values if is_dense(values) else values.contiguous()
    if out is None or (out[0].dtype, out[0].shape, out[0].stride()) != (torch.uint8, values.shape, values.stride()):
        out = torch.empty_like(values, dtype=torch.uint8), eight_bits.exponents_like(values)
    codes, exponents = out
    round_to_blocks(elements(values), 0, keys, elements(codes), exponents, signed=signed)
    return codes, exponents


def from_blocks(codes: torch.Tensor, exponents: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Codes of 8 bits and the exponents of their blocks as float32, in new memory."""
    wide = torch.empty_like(codes, dtype=torch.float32)
    parts = (elements(wide).split(CHUNK), elements(codes).split(CHUNK), exponents.split(CHUNK // eight_bits.BLOCK))
    for out, short, shared in zip(*parts, strict=True):
        eight_bits.read(short.numpy(), shared.numpy(), signed=signed, out=out.numpy())
    return wide


class Rounding(NamedTuple):
    """Seed and number of a step, which determine its random bits, and what moments are rounded to."""

    seed: int
    step: int
    dtype: Kept = "bf16"

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, dtype: Kept = "bf16") -> Rounding:
        """The rounding of the next step of `optimizer`; the first takes the seed of torch's default generator."""
        seed, step = optimizer.param_groups[0].setdefault(GROUP_KEY, (torch.initial_seed(), 0))
        return cls(seed, step, dtype)

    @staticmethod
    def end_step(optimizer: torch.optim.Optimizer) -> None:
        """Advance the step number: the next step rounds with other random bits."""
        seed, step, _ = Rounding.of(optimizer)
        optimizer.param_groups[0][GROUP_KEY] = (seed, step + 1)

    def keys(self, place: tuple[int, int], of: str = "") -> Keys:
        """The keys of the parameter at this place: the number of its group, and its number there. State that kernels
        do not round has keys of its own, by its name."""
        named = repr((self.seed, self.step, *place, *([of] if of else []))).encode()
        digest = hashlib.blake2b(named, digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def narrowed(
        self, state: Mapping[str, Any], place: tuple[int, int], before: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state of one parameter with its float32 tensors rounded; numbers (0-dim) are not changed.

        Args:
            state: the state after a step; the memory of its tensors may be overwritten.
            place: the index of the parameter's group, and its index in that group.
            before: the rounded state of the last step, whose memory is reused.
        """
        kept, made = {} if before is None else before, dict(state)
        for key, value in state.items():
            if not is_rounded(value):
                continue
            keys = self.keys(place, "" if key in _OF_KERNELS else key)
            if self.dtype == "bf16":
                made[key] = stochastically_rounded(value, keys, upper=key in _UNSIGNED, out=kept.get(key))
            else:
                out = (kept[key], kept[exponents_of(key)]) if exponents_of(key) in kept else None
                made[key], made[exponents_of(key)] = in_blocks(value, keys, signed=key not in _UNSIGNED, out=out)
        return made


def exponents_of(key: str) -> str:
    """The key of the exponents of a tensor of 8 bits."""
    return f"{key}{_EXPONENTS}"


def is_rounded(value: Any) -> bool:
    """Whether this part of a state is kept in 16 bits: float32 tensors are, except numbers (0-dim) such as steps."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() > 0


def keeps_16_bits(parameter: torch.Tensor) -> bool:
    """Whether the state of this parameter is kept in 16 bits: that saves host memory, so on the device it is not."""
    return parameter.device == stream.HOST


def kept_bytes(num_bytes: int, dtype: Kept) -> int:
    """Bytes of state that has so many in fp32."""
    if dtype == "8bit":  # and an exponent for each block of 256 elements
        return num_bytes // 4 + -(-num_bytes // (4 * eight_bits.BLOCK))
    return num_bytes // 2 if dtype == "bf16" else num_bytes


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter with its rounded tensors converted to float32, in new memory."""
    wide: dict[str, Any] = {}
    for key, value in state.items():
        exponents = state.get(exponents_of(key))
        if exponents is not None:
            wide[key] = from_blocks(value, exponents, signed=key not in _UNSIGNED)
        elif isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            wide[key] = value.float()
        elif not key.endswith(_EXPONENTS):
            wide[key] = value
    return wide


# ---- the state of a whole optimizer


def keep_rounded(optimizer: torch.optim.Optimizer, dtype: Kept) -> list[RemovableHandle]:
    """Keep state of this dtype in `load_state_dict`, and show it as others can read it in `state_dict`."""
    return _keep_bf16(optimizer) if dtype == "bf16" else _keep_8_bits(optimizer)


class Blocks(NamedTuple):
    """A tensor of 8 bits."""

    codes: torch.Tensor
    exponents: torch.Tensor
    signed: bool

    def pieces(self) -> Iterator[torch.Tensor]:
        """It in fp32 (one dimension, in the order of memory), piece by piece, each in new memory."""
        for number, codes in enumerate(elements(self.codes).split(CHUNK)):
            first = number * CHUNK // eight_bits.BLOCK
            exponents = self.exponents[first : first + CHUNK // eight_bits.BLOCK]
            yield from_blocks(codes, exponents, signed=self.signed)

    def clone(self) -> Blocks:
        """A copy."""
        return Blocks(self.codes.clone(), self.exponents.clone(), self.signed)


class _Unfilled(threading.local):
    """Of one thread: memory for fp32 tensors that nobody has filled -> what they are to be filled with."""

    found: dict[int, Blocks] | None = None


_UNFILLED = _Unfilled()


@contextmanager
def unfilled() -> Iterator[dict[int, Blocks]]:
    """Inside, on this thread, state dicts have fp32 tensors without values in the place of tensors of 8 bits, which
    take no memory as long as nobody touches them. Yields the address of each, and what it is to be filled with."""
    before, found = _UNFILLED.found, dict[int, Blocks]()
    _UNFILLED.found = found
    try:
        yield found
    finally:
        _UNFILLED.found = before


def _placeholders(state: Mapping[str, Any], found: dict[int, Blocks]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in state.items():
        exponents = state.get(exponents_of(key))
        if exponents is not None:
            # Of NumPy: torch may be told to fill new memory.
            memory = torch.from_numpy(np.empty(max(1, value.numel()), np.float32))
            made[key] = memory.as_strided(value.shape, value.stride())
            found[memory.data_ptr()] = Blocks(value, exponents, key not in _UNSIGNED)
        elif not key.endswith(_EXPONENTS):
            made[key] = value
    return made


def _keep_8_bits(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """State dicts have fp32 tensors, which are rounded when they are loaded: what was saved so, to what it was."""

    def shown(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        found = _UNFILLED.found
        of_each = state_dict["state"].items()
        if found is not None:
            return {**state_dict, "state": {number: _placeholders(state, found) for number, state in of_each}}
        return {**state_dict, "state": {number: widened(state) for number, state in of_each}}

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        narrow_all(optimizer, "8bit")

    return [optimizer.register_state_dict_post_hook(shown), optimizer.register_load_state_dict_post_hook(loaded)]


def _keep_bf16(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
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


def widen(state: dict[str, Any]) -> None:
    """Convert the rounded tensors of the state of one parameter to float32."""
    wide = widened(state)
    state.clear()
    state.update(wide)


def widen_all(optimizer: torch.optim.Optimizer) -> None:
    """Convert all gradients and state to fp32 for a whole step, which needs the memory for it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            widen_gradient(p)
            if p in optimizer.state and p.dtype == torch.float32 and keeps_16_bits(p):
                widen(optimizer.state[p])


def widen_gradient(parameter: torch.Tensor) -> None:
    """Convert the gradient of `parameter`, and all that autograd adds from now on, to the dtype of the parameter."""
    gradient, dtype = parameter.grad, parameter.dtype
    if parameter.is_leaf and parameter.requires_grad and parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)


def narrow_all(optimizer: torch.optim.Optimizer, dtype: Kept) -> None:
    """Round the state of all parameters on the host, after a whole step to the same bits as a step in parts."""
    rounding = Rounding.of(optimizer, dtype)
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if p in optimizer.state and keeps_16_bits(p):
                optimizer.state[p].update(rounding.narrowed(optimizer.state[p], (number, index)))
