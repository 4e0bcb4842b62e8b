"""Files of a checkpoint that have room for tensors, and all else of their content: the values are written later.

They are files of safetensors and `torch.save`, to the byte but for the check sums of records in the latter, which
torch does not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from hf_l2l.compat import storages_in_file, without_interception
from hf_l2l.optim.rounded_state import Blocks
from hf_l2l.runtime import stream
from hf_l2l.runtime.flat_memory import elements

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes and their names in safetensors, in the order in which its files have them."""


class Region(NamedTuple):
    """Bytes of a file, and where their values are."""

    file: Path
    offset: int
    values: torch.Tensor
    """uint8, one dimension, on the host; the memory of the tensor itself, or a copy if the tensor is elsewhere."""
    blocks: Blocks | None = None
    """Set if the values are the codes of a tensor of 8 bits, which is written in fp32."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the file."""
        return self.values.numel() * (1 if self.blocks is None else 4)

    def clone(self) -> Region:
        """The same bytes of the file, for a copy of the present values."""
        if self.blocks is None:
            return self._replace(values=self.values.clone())
        blocks = self.blocks.clone()
        return self._replace(values=elements(blocks.codes), blocks=blocks)

    def write(self, descriptor: int) -> None:
        """Write the values to the open file.

        Raises:
            OSError: if that is impossible, such as on a full disk.
        """
        offset = self.offset
        for part in [self.values] if self.blocks is None else self.blocks.pieces():
            left = memoryview(cast(Any, part.view(torch.uint8).numpy()))
            while left:
                written = os.pwrite(descriptor, left, offset)
                left, offset = left[written:], offset + written


@contextmanager
def locked(descriptor: int, region: Region) -> Iterator[None]:
    """Inside, no other host writes to these bytes of the open file. On a network file system, that also has this host
    read what others have written before, where it writes a part of a page, and give away what it has written.

    Raises:
        OSError: if the file system has no such locks.
    """
    assert fcntl is not None, "hosts with several ranks have Linux"
    place = region.num_bytes, region.offset
    fcntl.lockf(descriptor, fcntl.LOCK_EX, *place)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, *place)


def reserve_safetensors(tensors: Mapping[str, torch.Tensor], file: Path, metadata: Mapping[str, str]) -> list[Region]:
    """Write a file of safetensors with room for these contiguous tensors.

    Returns the regions of the file that are to be written.

    Raises:
        OSError: if the disk has no room.
    """
    order = {dtype: number for number, dtype in enumerate(_DTYPES)}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    placed, end = [], 0
    for name in sorted(tensors, key=lambda name: (order[tensors[name].dtype], name)):
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        placed.append((begin, tensor))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.flush()
        _allocate(opened.fileno(), 8 + len(text) + end)
    return [Region(file, 8 + len(text) + begin, _bytes_of(tensor)) for begin, tensor in placed if tensor.numel()]


def can_write_places() -> bool:
    """Whether values can be written to their places in a file: not on Windows."""
    return hasattr(os, "pwrite")


def can_reserve(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether safetensors' name of each dtype is known here."""
    return all(tensor.dtype in _DTYPES and tensor.layout is torch.strided for tensor in tensors)


def reserve_torch(state: Any, file: Path, blocks: Mapping[int, Blocks] | None = None) -> list[Region]:
    """Write `state` as `torch.save` does, with room for the values of its tensors. `blocks` are those of tensors that
    nobody has filled, by their addresses (see `rounded_state.unfilled`).

    Tensors that are on a device are saved as tensors of the host.

    Returns the regions of the file that are to be written, one per storage; none if tensors are in other objects than
    dicts, lists and tuples: then all is written.

    Raises:
        OSError: if the disk has no room.
    """
    with torch.no_grad():
        state = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(stream.HOST), state)
    with torch.serialization.skip_data():
        torch.save(state, file)
    with file.open("rb+") as opened:
        _allocate(opened.fileno(), file.stat().st_size)
    storages: dict[int, torch.Tensor] = {}  # in the order of pickling, which is that of the leaves
    for tensor in pytree.tree_leaves(state):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            with without_interception():
                storages.setdefault(StorageWeakRef(storage).cdata, torch.empty(0, dtype=torch.uint8).set_(storage))
    offsets = storages_in_file(str(file))
    if len(offsets) != len(storages):  # some are in objects that are no containers of pytree
        torch.save(state, file)
        return []
    pairs = [(at, values) for at, values in zip(offsets, storages.values(), strict=True) if values.numel()]
    found = [(at, values, (blocks or {}).get(values.data_ptr())) for at, values in pairs]
    return [Region(file, at, values if of is None else elements(of.codes), of) for at, values, of in found]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    with without_interception(), torch.no_grad():
        return elements(tensor.detach().to(stream.HOST)).view(torch.uint8)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Make the file so long, with room for all of it on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, max(1, num_bytes))
    else:
        os.ftruncate(descriptor, num_bytes)
