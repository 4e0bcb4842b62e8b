"""Which bytes of a checkpoint each rank writes: the values of what it updates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hf_l2l.checkpoint.reserved import Region
from hf_l2l.compat import without_interception
from hf_l2l.eps.masters import Master
from hf_l2l.shared_eps.server import SharedEagerParamServer


class Share(NamedTuple):
    """Bytes of a file that one rank writes."""

    file: str
    """Its name in the folder of the checkpoint."""
    offset: int
    number: int
    """Of a master of the model."""
    optimizer: int
    """The number of the optimizer whose state has the values; -1 for those of the master itself."""
    key: str
    """Of that state."""
    start: int
    """The first byte in the memory of that tensor."""
    num_bytes: int


def deal(
    eps: SharedEagerParamServer, folder: Path, regions: Iterable[Region]
) -> tuple[list[list[Share]], list[Region]]:
    """Divide what is to be written of the files in `folder` among the ranks. Rank 0 calls this, while it knows the
    state of all hosts (`SharedUpdates.state_gathered`).

    Returns the shares of each rank, and what is of no master, or of several: rank 0 has these values.
    """
    shares: list[list[Share]] = [[] for _ in range(eps.team.size)]
    others: list[Region] = []
    masters = eps.masters.all()
    with without_interception():
        known = _by_storage(eps)
        for region in regions:
            found = known.get(region.values.untyped_storage().data_ptr())
            if found is None:
                others.append(region)
                continue
            number, optimizer, key, tensor = found
            first, name = int(region.values.storage_offset()), region.file.relative_to(folder).as_posix()
            for rank, start, stop in _writers(eps, masters[number], tensor, region.values.numel()):
                at = region.offset + start
                shares[rank].append(Share(name, at, number, optimizer, key, first + start, stop - start))
    return shares, others


_Found = tuple[int, int, str, torch.Tensor]
"""The number of a master, and of an optimizer, the key of a state, and the tensor."""


def _by_storage(eps: SharedEagerParamServer) -> dict[int, _Found | None]:
    """Address of memory -> whose values it has; None for memory that several share."""
    found: dict[int, _Found | None] = {}
    for number, master in enumerate(eps.masters.all()):
        if not master.can_be_held:
            continue
        for optimizer, key, tensor in _tensors(eps, master):
            address = tensor.untyped_storage().data_ptr()
            found[address] = None if address in found else (number, optimizer, key, tensor)
    return found


def _tensors(eps: SharedEagerParamServer, master: Master) -> Iterator[tuple[int, str, torch.Tensor]]:
    yield -1, "", master.parameter
    for number, optimizer in enumerate(eps.updates.optimizers):
        for key, value in optimizer.state.get(master.parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield number, key, value


def _writers(
    eps: SharedEagerParamServer, master: Master, tensor: torch.Tensor, num_bytes: int
) -> list[tuple[int, int, int]]:
    """The ranks that write so many bytes of a tensor, and from which byte to which each of them does."""
    rows = eps.updates.rows_of(master)
    # Of numbers, each rank has its own; state that is not contiguous is updated by the owner alone.
    if rows is None or tensor.shape != master.gradient_like.shape or not tensor.is_contiguous():
        return [(master.owner, 0, num_bytes)]
    assert num_bytes == tensor.nbytes, "files have whole matrices"
    width = num_bytes // len(tensor)
    return [(rank, each.start * width, each.stop * width) for rank, each in zip(eps.team.near, rows, strict=True)]


def write_shares(file: Path, shares: list[Share]) -> None:
    """Tell a rank what it writes."""
    file.write_text(json.dumps(shares, separators=(",", ":")))


def read_regions(eps: SharedEagerParamServer, folder: Path, file: Path) -> list[Region]:
    """What this rank writes of the files in `folder`, as rank 0 has told it in `file`."""
    found: list[Region] = []
    masters, optimizers = eps.masters.all(), eps.updates.optimizers
    with without_interception():
        for share in (Share(*each) for each in json.loads(file.read_text())):
            parameter = masters[share.number].parameter
            own = parameter if share.optimizer < 0 else optimizers[share.optimizer].state[parameter][share.key]
            values = torch.empty(0, dtype=torch.uint8).set_(own.untyped_storage())
            values = values[share.start : share.start + share.num_bytes]
            assert len(values) == share.num_bytes, "all ranks have tensors of the same kind"
            found.append(Region(folder / share.file, share.offset, values))
    return found
