"""The optimizer's state of all hosts, for a checkpoint: each host has that of the parameters it owns; then all hosts
have all of it, or one does.

What is gathered is in memory that the ranks of a host share, for as long as anything refers to it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch

from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.ranks.messages import STATE
from hf_l2l.ranks.shared_pages import SharedPages
from hf_l2l.ranks.team import Team
from hf_l2l.runtime.flat_memory import Layout, placed

_ROOMS = struct.Struct("<2Q")
_WHY = "all hosts gather the optimizer's state"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Entry = tuple[int, str, Any]
"""The number of a parameter in the model, a key of its state, and the value; of a tensor dtype, shape and strides."""


class FarState:
    """Lets ranks have the state of all, until the next step."""

    def __init__(self, team: Team, masters: Sequence[Master]) -> None:
        """`masters` are those of the model, the same in all ranks."""
        assert team.counterparts is not None, "on one host, the ranks share all state"
        self._team, self._masters, self._counterparts = team, masters, team.counterparts
        self._times = 0
        self._there: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers of which all state is there, on all hosts."""

    def gather(self, optimizer: torch.optim.Optimizer, only: int | None = None, *, values: bool = True) -> None:
        """Add the state of other hosts to `optimizer.state`, if it is not there: in all ranks, or in those of one host
        only, which then needs memory for it. All ranks call this, with the same host. Without `values`, which takes no
        memory, that host gets tensors with the right shapes."""
        if optimizer in self._there:
            return
        own = self._counterparts.host
        with without_interception(), torch.no_grad():
            entries, tensors = self._own(optimizer)
            told = self._counterparts.exchange(json.dumps(entries).encode(), _WHY)
            given = [each for each in tensors if each.numel()]
            if only is None:
                self._there.add(optimizer)
            if only in (None, own):
                self._receive(optimizer, [json.loads(each) for each in told], given, only, values=values)
            elif values:
                self._counterparts.send(given, only, _WHY)

    def _receive(
        self,
        optimizer: torch.optim.Optimizer,
        of_hosts: Sequence[Sequence[Entry]],
        given: Sequence[torch.Tensor],
        only: int | None,
        *,
        values: bool,
    ) -> None:
        """Add the state of other hosts, which they describe (`of_hosts`), to `optimizer.state`; with all hosts, give
        them this rank's. Without `values`, nothing passes between hosts."""
        self._times += 1
        team, own = self._team, self._counterparts.host
        far = [(host, entry) for host, found in enumerate(of_hosts) if host != own for entry in found]
        text = json.dumps([entry for _, entry in far]).encode()
        layout = Layout(_like([entry for _, entry in far]))
        rooms = team.peers.gather(STATE, self._times, _ROOMS.pack(len(text), layout.num_bytes), _WHY)
        sizes = [_ROOMS.unpack(rooms[rank]) for rank in team.near]
        starts = [0, *accumulate(-(-size // 64) * 64 for each in sizes for size in each)]
        pages = team.share(starts[-1], "the optimizer's state of other hosts")
        at = starts[2 * team.place :]
        pages.bytes_at(at[0], len(text)).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        views = layout.views(pages.bytes_at(at[1], layout.num_bytes))
        hosts = [host for host, (_, _, value) in far if isinstance(value, dict)]
        theirs = {
            host: [v for v, of in zip(views, hosts, strict=True) if of == host and v.numel()]
            for host in range(len(of_hosts))
        }
        theirs[own] = list(given)
        if only is None:
            for host, tensors in theirs.items():
                self._counterparts.broadcast(tensors, host, _WHY)
        elif values:
            self._counterparts.receive({host: tensors for host, tensors in theirs.items() if host != own}, _WHY)
        team.barrier(_WHY)
        for place, (length, _) in enumerate(sizes):
            content = pages.bytes_at(starts[2 * place], length).numpy().tobytes()
            self._take(optimizer, json.loads(content), pages, starts[2 * place + 1])

    def _own(self, optimizer: torch.optim.Optimizer) -> tuple[list[Entry], list[torch.Tensor]]:
        """What this rank has to give."""
        entries: list[Entry] = []
        tensors: list[torch.Tensor] = []
        for number, master in enumerate(self._masters):
            if master.owner != self._team.rank:
                continue
            for key, value in optimizer.state.get(master.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    entries.append((number, key, _described(value)))
                    tensors.append(value)
                else:
                    entries.append((number, key, value))
        return entries, tensors

    def _take(self, optimizer: torch.optim.Optimizer, entries: Sequence[Entry], pages: SharedPages, at: int) -> None:
        tensors = iter([room.tensor_of(part.piece) for part, room in placed(pages, Layout(_like(entries)), at)])
        for number, key, value in entries:
            state = optimizer.state[self._masters[number].parameter]
            state[key] = next(tensors) if isinstance(value, dict) else value

    def release(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give the optimizers all state, each rank its own: what one rank writes to it must not reach the others."""
        for optimizer in optimizers:
            self.gather(optimizer)
            with without_interception(), torch.no_grad():
                for state in (optimizer.state.get(m.parameter, {}) for m in self._masters):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor):
                            state[key] = value.clone()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of the state of other hosts: it is saved, or changes in a step, or is loaded anew."""
        self._there.discard(optimizer)
        for master in self._masters:
            if master.owner not in self._team.near and master.parameter in optimizer.state:
                optimizer.state[master.parameter] = {}


def _described(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}


def _like(entries: Sequence[Entry]) -> list[torch.Tensor]:
    """Tensors without values, as the entries describe them."""
    found: list[Mapping[str, Any]] = [value for _, _, value in entries if isinstance(value, dict)]
    return [
        torch.empty_strided(each["shape"], each["stride"], dtype=_DTYPES[each["dtype"]], device="meta")
        for each in found
    ]
