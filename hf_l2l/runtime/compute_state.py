"""Autocast settings, carried from the thread of a forward to the one that recomputes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hf_l2l.runtime.stream import HOST


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of the thread that ran the forward, to be entered again by the one that recomputes.

    Autograd runs the backward of a custom function outside the model's autocast region, and on accelerators in a
    thread of its own.
    """

    settings: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls, device: torch.device) -> AutocastState:
        """The settings for `device` and for the host, as they are now."""
        types = {device.type, HOST.type}
        return cls(tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in sorted(types)))

    @property
    def enabled_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that autocast computes in, empty where it is off."""
        return tuple(dtype for _, enabled, dtype in self.settings if enabled)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run under these settings, with the cache of cast weights off.

        The cache would keep every layer's cast weights on the device until the outermost region ends.
        """
        before = AutocastState(
            tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t, _, _ in self.settings)
        )
        cache_before = torch.is_autocast_cache_enabled()
        self._set()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache_before)
            before._set()

    def _set(self) -> None:
        for device_type, enabled, dtype in self.settings:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
