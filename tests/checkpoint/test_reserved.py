"""Files with room for values that are written later are those of safetensors and `torch.save`."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_l2l.checkpoint.reserved import Region, can_reserve, reserve_safetensors, reserve_torch

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.int8,
)


def fill(regions: list[Region]) -> None:
    for region in regions:
        descriptor = os.open(region.file, os.O_WRONLY)
        region.write(descriptor)
        os.close(descriptor)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


tables = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
    st.builds(
        tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 9)
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(tables, st.sampled_from([{}, {"format": "pt"}]))
def test_a_file_of_weights_is_the_one_of_safetensors(tmp_path_factory, tensors, metadata):
    folder = tmp_path_factory.mktemp("files")
    save_file(tensors, folder / "theirs.safetensors", metadata=metadata or None)
    fill(reserve_safetensors(tensors, folder / "ours.safetensors", metadata))
    assert (folder / "ours.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()


def test_a_file_of_state_is_read_as_the_one_of_torch(tmp_path):
    shared = torch.randn(6)
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4), "half": torch.randn(5).bfloat16()}},
        "views": [shared[:2], shared[2:]],
        "empty": [torch.empty(0), torch.empty(0, 2)],
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
    }
    regions = reserve_torch(state, tmp_path / "ours.pt")
    assert len(regions) == 4, "one per storage that has bytes"
    before = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert not before["state"][0]["exp_avg"].any(), "values are written later"
    fill(regions)
    torch.save(state, tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "theirs"))
    assert str(ours) == str(theirs)
    assert torch.equal(ours["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert ours["views"][0].untyped_storage().data_ptr() == ours["views"][1].untyped_storage().data_ptr()


class Holder:
    """An object of the program that has a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


def test_state_in_other_objects_is_written_at_once(tmp_path):
    assert reserve_torch({"a": torch.ones(2), "b": Holder()}, tmp_path / "s.pt") == []
    with torch.serialization.safe_globals([Holder]):
        assert torch.load(tmp_path / "s.pt", weights_only=True)["b"].tensor.tolist() == [1, 1, 1]


def test_values_are_read_when_they_are_written(tmp_path):
    weight = torch.zeros(4)
    regions = reserve_safetensors({"w": weight}, tmp_path / "w", {})
    weight.fill_(2.0)
    fill(regions)
    assert (tmp_path / "w").read_bytes().endswith(weight.numpy().tobytes())


def test_dtypes_that_are_not_known_are_left_to_safetensors():
    assert can_reserve([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    assert not can_reserve([torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    assert not can_reserve([torch.ones(2, 2).to_sparse()])


@pytest.mark.parametrize("reserve", ["weights", "state"])
def test_a_disk_without_room_is_known_at_once(tmp_path, monkeypatch, reserve):
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        if reserve == "weights":
            reserve_safetensors({"w": torch.ones(4)}, Path(tmp_path / "w"), {})
        else:
            reserve_torch({"w": torch.ones(4)}, Path(tmp_path / "w"))


def test_nothing_of_a_file_stays_in_memory(tmp_path):
    """torch keeps what it has looked up for tensors without values as long as the process lives."""
    counts = []
    for _ in range(4):
        regions = reserve_torch({"w": [torch.ones(4) for _ in range(20)]}, tmp_path / "w")
        del regions
        gc.collect()
        counts.append(len([each for each in gc.get_objects() if type(each) is torch.UntypedStorage]))
    assert counts[-1] <= counts[1]
