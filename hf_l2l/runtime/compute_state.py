"""State that a layer computes under, the same in its forward and its recompute: autocast settings, random generators,
and grad mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from hf_l2l.runtime.stream import HOST, device_module


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of the thread that ran the forward, re-entered by the thread that recomputes.

    Autograd runs the backward of a custom function outside the model's autocast region, and on accelerators in a
    thread of its own.
    """

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls, device: torch.device) -> AutocastState:
        """The settings for `device` and for the host, as they are now."""
        types = sorted({device.type, HOST.type})
        return cls(tuple([(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]))

    @classmethod
    def off(cls, device: torch.device) -> AutocastState:
        """Settings without autocast for `device` and for the host."""
        return cls(tuple([(t, False, dtype) for t, _, dtype in cls.current(device).settings]))

    @property
    def enabled_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that autocast computes in; empty if it is off."""
        return tuple(dtype for _, enabled, dtype in self.settings if enabled)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block under these settings, with the cache of cast weights off.

        The cache would keep every layer's cast weights on the device until the outermost region ends.
        """
        # Not `torch.autocast`: the end of a thread's outermost region clears the cache of cast weights of all threads.
        # The forward of another thread would then cast a weight twice, and sum its two gradients in another dtype.
        before = AutocastState(
            tuple([(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t, _, _ in self.settings])
        )
        cache_before = torch.is_autocast_cache_enabled()
        if self != before:
            self.set()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache_before)
            if self != before:
                before.set()

    def set(self) -> None:
        """Let them be those of this thread, from now on."""
        for device_type, enabled, dtype in self.settings:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for `device`, in this thread now; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@dataclass(frozen=True)
class RngState:
    """State of the random generators that a layer can draw from: the host's, and the device's if it has its own."""

    host: torch.Tensor
    device: torch.Tensor | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState):
            return NotImplemented
        if not torch.equal(self.host, other.host):
            return False
        if self.device is None or other.device is None:
            return self.device is other.device
        return torch.equal(self.device, other.device)


def get_rng_state(device: torch.device) -> RngState:
    """The current state of the generators (two small host tensors)."""
    module = device_module(device)
    if module is None:
        return RngState(torch.get_rng_state(), None)
    # torch.mps has one device, and functions that take none.
    where = () if device.type == "mps" else (device,)
    return RngState(torch.get_rng_state(), module.get_rng_state(*where))


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Set the state of the generators."""
    torch.set_rng_state(state.host)
    module = device_module(device)
    if module is not None and state.device is not None:
        module.set_rng_state(state.device, *(() if device.type == "mps" else (device,)))


@contextmanager
def rng_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the state of the generators after the block."""
    # Not `torch.random.fork_rng`, which passes a device to the functions of every device module, torch.mps included.
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


class ProgramRng(NamedTuple):
    """State of the generators that all parts of a program share on the host."""

    python: tuple[Any, ...]
    """Of the module `random`."""
    numpy: tuple[Any, ...] | None
    """Of `numpy.random`; None if the program has no NumPy, or has put another kind of generator there."""
    torch: torch.Tensor
    """On the host, uint8."""

    @classmethod
    def now(cls) -> ProgramRng:
        """The state as it is now."""
        numpy: Any = sys.modules.get("numpy")
        found: Any = None if numpy is None else numpy.random.get_state()
        return cls(random.getstate(), found if isinstance(found, tuple) else None, torch.get_rng_state())

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def plain(self) -> ProgramRng:
        """The same, of numbers, texts and a tensor: what `torch.load` reads, weights only."""
        if self.numpy is None:
            return self
        kind, key, *rest = self.numpy
        return self._replace(numpy=(kind, tuple(map(int, key)), *rest))

    def moved_since(self, before: ProgramRng) -> set[str]:
        """The fields whose generators have another state than `before`."""
        ours, theirs = self.plain(), before.plain()
        same = {
            "python": ours.python == theirs.python,
            "numpy": ours.numpy == theirs.numpy,
            "torch": torch.equal(ours.torch, theirs.torch),
        }
        return {name for name, value in same.items() if not value}


@contextmanager
def all_rng_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators that a program may draw from, those of Python and NumPy included, after the block."""
    program = ProgramRng.now()
    try:
        with rng_state_kept(device):
            yield
    finally:
        program.restore()


@contextmanager
def graph_without_tensors() -> Iterator[None]:
    """Run the block in grad mode, with a graph that keeps no tensors; outputs must be detached from it.

    The forward of non-reentrant activation checkpointing runs like this, too.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep_nothing, refuse_backward):
        yield


def _keep_nothing(tensor: torch.Tensor) -> None:
    return None


def refuse_backward(kept: Any) -> NoReturn:
    """Called by a backward that goes through the inside of a layer instead of its outputs.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "a backward must go through the outputs of a layer, since the graph inside its forward keeps no tensors (got "
        "one through a tensor that a layer computed and did not return, or that a forward hook inside it has kept "
        "where it is not found); make the layer return it, let the hook append it to a list, put the hook on the "
        "layer itself, or train this model without L2L"
    )
