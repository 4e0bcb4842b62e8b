"""Switches of `hf_l2l.runtime.stream` for tests: copies where memory is shared, NaN in memory that was released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from hf_l2l.runtime import stream


@contextmanager
def forced_copies() -> Iterator[None]:
    """Make uploads and downloads real copies even where host and device share memory.

    Code that is right with views and with copies depends on neither.
    """
    with mock.patch.object(stream, "shares_host_memory", lambda device: False):
        yield


@contextmanager
def poisoned_releases() -> Iterator[None]:
    """Fill released memory with NaN, so that a read after the release shows."""

    def poison(memory: torch.Tensor) -> None:
        memory.fill_(0xFF)  # all bits set is NaN in every floating-point dtype

    with mock.patch.object(stream, "released", poison):
        yield
