"""The optimizer's state in shared memory: each rank makes that of its own share, and all ranks can read all of it.

So a checkpoint that one rank saves has everything, and the state exists once per host. Memory is taken when it is
written first; what is reserved here are addresses.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.ranks.shared_pages import SharedPages, return_freed_memory
from hf_l2l.ranks.team import Team
from hf_l2l.runtime.flat_memory import ALIGNMENT, Layout
from hf_l2l.runtime.tensors import size_text

_RESERVED = 64
"""Bytes of addresses per element of a parameter: 16 tensors like it in fp32. AdamW needs two."""
_SMALL = 2**12
"""Bytes of addresses per parameter beside that, for numbers such as its steps."""
_PLAIN = (bool, int, float, str, type(None))

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class SharedState:
    """Shared memory for the optimizer state of all ranks; each writes to its own part."""

    def __init__(self, team: Team, masters: Sequence[Master]) -> None:
        """For parameters of the size of `masters`, whoever owns them."""
        self.team = team
        with without_interception():
            elements = sum(m.parameter.numel() for m in masters)
        self._capacity = -(-(_RESERVED * elements + _SMALL * len(masters)) // ALIGNMENT) * ALIGNMENT
        self.pages: SharedPages = team.share(self._capacity * len(team.near), "optimizer state")
        self._used = 0
        self._returned_at = 0
        """`_used` when memory that has been freed since was returned."""
        self._lock = threading.Lock()
        """Several updates at a time take memory."""
        self._kept: WeakKeyDictionary[torch.optim.Optimizer, _Kept] = WeakKeyDictionary()
        """Optimizer -> parameter and key -> the tensor in shared memory, and what the others are told of it."""

    def shared(self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], *, anew: bool = False) -> bytes:
        """Move the state of `masters`, which this rank has just updated, to shared memory.

        Returns:
            what `taken` needs to know in the other ranks; what they have been told before only if they have forgotten
            it (`anew`).

        Raises:
            ValueError: if the state has values of other kinds than tensors, numbers and text, or is too large.
        """
        news: dict[int, dict[str, Any]] = {}
        kept = self._kept.setdefault(optimizer, {})
        for place, master in enumerate(masters):
            state = optimizer.state.get(master.parameter) or {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found = self._tensor(kept, state, master, key, value, anew=anew)
                elif isinstance(value, _PLAIN):
                    found = value
                else:
                    raise ValueError(
                        "ranks share optimizer state of tensors, numbers and text (got a "
                        f"{type(value).__name__} at {key!r} in that of a {type(optimizer).__name__}); use another "
                        "optimizer, or train in one process"
                    )
                if found is not _KNOWN:
                    news.setdefault(place, {})[key] = found
        return json.dumps(news, separators=(",", ":")).encode() if news else b""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        first = self.pages.bytes_at(0, 1).data_ptr()
        return first <= tensor.data_ptr() < first + len(self.pages)

    @torch.no_grad()
    def release(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give the optimizers state of their own: what one rank writes to it must not reach the others."""
        with without_interception():
            for state in (each for optimizer in optimizers for each in optimizer.state.values()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and self.has(value):
                        state[key] = value.clone()
        self._kept.clear()

    def return_freed_memory(self) -> None:
        """Return the memory in which optimizers have made state that has moved."""
        if self._returned_at != self._used:
            self._returned_at = self._used
            return_freed_memory()

    def _tensor(
        self, of_optimizer: _Kept, state: dict[str, Any], master: Master, key: str, value: torch.Tensor, *, anew: bool
    ) -> Any:
        """Move one tensor; returns where it is, or that the others know it."""
        kept, told = of_optimizer.get((master.parameter, key), (None, None))
        if kept is value:
            return told if anew else _KNOWN
        with torch.no_grad(), without_interception():
            if kept is not None and (kept.dtype, kept.shape) == (value.dtype, value.shape):
                state[key] = kept.copy_(value)  # made anew by the step, or last by another rank, elsewhere
                return told
            layout = Layout([value])
            piece, start = layout.pieces[0], self._take(layout.num_bytes, key, master)
            memory = self.pages.bytes_at(self.team.place * self._capacity + start, max(piece.stop, 1))
            kept = piece.view_of(memory[: piece.stop]) if piece.stop else torch.empty_like(value)
            state[key] = kept.copy_(value)
        stride = None if piece.stride is None else list(piece.stride)
        told = {"dtype": str(piece.dtype), "shape": list(piece.shape), "stride": stride, "start": start}
        of_optimizer[master.parameter, key] = kept, told
        return told

    def _take(self, num_bytes: int, key: str, master: Master) -> int:
        """Where new memory of this rank begins."""
        with self._lock:
            start = self._used
            if start + num_bytes > self._capacity:
                raise ValueError(
                    f"the optimizer's state of one rank may take {size_text(self._capacity)} (got more at {key!r} of "
                    f"{master.name}, with that of optimizers before this one); detach the model and attach it again, "
                    "or use an optimizer with less"
                )
            self._used = start + num_bytes
            return start

    def taken(self, rank: int, optimizer: torch.optim.Optimizer, masters: Sequence[Master], message: bytes) -> None:
        """Let the state of `masters`, which `rank` has updated, be what that rank has told in `message`."""
        if not message:
            return
        news: Mapping[str, Mapping[str, Any]] = json.loads(message)
        for place, entries in news.items():
            state = optimizer.state[masters[int(place)].parameter]
            for key, value in entries.items():
                state[key] = self._view(rank, value) if isinstance(value, dict) else value

    def _view(self, rank: int, value: Mapping[str, Any]) -> torch.Tensor:
        dtype, shape = _DTYPES[value["dtype"]], torch.Size(value["shape"])
        num_bytes, start = shape.numel() * dtype.itemsize, value["start"]
        if not 0 <= start <= start + num_bytes <= self._capacity:
            raise ValueError(f"state of rank {rank} must be in its own memory (got bytes {start} on)")
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        flat = self.pages.bytes_at(self.team.near.index(rank) * self._capacity + start, num_bytes).view(dtype)
        return flat.view(shape) if value["stride"] is None else flat.as_strided(shape, value["stride"])


_Kept = dict[tuple[torch.Tensor, str], tuple[torch.Tensor, dict[str, Any]]]
_KNOWN = object()
"""Nothing is to be told."""
