"""Moments in 8 bits: numbers that share a power of two in blocks of 256 elements of one parameter.

A block has one byte for its exponent, that of the smallest power of two that it can show. A number of a tensor with
signs has a sign, 4 bits of exponent above that, and 3 of fraction; one of a tensor without signs (second moments) has
5 and 3. Code 0 is zero, and there are no subnormal numbers. So a code is a few bits of the fp32 number, which is read
and written by shifts, and all that it can show is exact in fp32: state that was widened and is rounded again is the
same.

    fp32        s eeeeeeee fff xxxxxxxxxxxxxxxxxxxx
    signed      s     eeee fff                        eeee: exponent, less that of the block
    unsigned         eeeee fff

What is larger than the largest number is that; a first moment below the smallest is 0, a second moment is the smallest
number, since a root of 0 would make steps of any size. A block with a NaN is read as NaN.
`kernels` does the same, to the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BLOCK = 256
"""Elements that share an exponent."""

Array = np.ndarray[Any, np.dtype[Any]]

_SIGNLESS, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def exponents_like(values: torch.Tensor) -> torch.Tensor:
    """Exponents for blocks of zeros: uint8, one for every 256 elements of `values`."""
    return torch.ones(-(-values.numel() // BLOCK), dtype=torch.uint8)


def read(codes: Array, exponents: Array, *, signed: bool, out: Array) -> None:
    """Widen `codes` (uint8), which begin a block, to `out` (float32); `exponents` are those of their blocks."""
    bases = np.repeat(exponents.astype(np.uint32) << np.uint32(3), BLOCK)[: len(codes)]
    wide = codes.astype(np.uint32)
    sizes = wide & np.uint32(0x7F) if signed else wide
    bits = np.where(sizes != 0, (sizes + bases) << np.uint32(20), np.uint32(0))
    if signed:
        bits |= (wide & np.uint32(0x80)) << np.uint32(24)
    out.view(np.uint32)[:] = bits


def write(values: Array, drawn: Array, codes: Array, exponents: Array, *, signed: bool) -> None:
    """Round `values` (float32), which begin a block, stochastically by the random bits `drawn` to `codes` (uint8) and
    the `exponents` of their blocks."""
    bits = values.view(np.uint32)
    sizes = bits & _SIGNLESS
    starts = np.arange(0, len(values), BLOCK)
    largest = np.maximum.reduceat(sizes, starts)
    is_nan = largest > _INFINITY
    tops = np.minimum((np.where(is_nan, np.uint32(0), largest) + np.uint32(0xFFFFF)) >> np.uint32(23), np.uint32(254))
    found = np.maximum(tops.astype(np.int32) - (15 if signed else 31), 1)
    exponents[:] = np.where(is_nan, 255, found)
    bases = np.repeat(found * 8, BLOCK)[: len(values)]
    noise = drawn & np.uint32(0xFFFFF) if signed else drawn >> np.uint32(12)
    rounded = ((sizes + noise) >> np.uint32(20)).astype(np.int32) - bases
    if signed:
        made = np.clip(rounded, 0, 127).astype(np.uint32) | ((bits >> np.uint32(24)) & np.uint32(0x80))
    else:
        made = np.where(bits != 0, np.clip(rounded, 1, 255), 0)
    codes[:] = np.where(np.repeat(is_nan, BLOCK)[: len(values)], 1, made)
