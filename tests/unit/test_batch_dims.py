"""Batch dimensions are found by doubling, and calls of one kind by their keys; leaves in all kinds of mappings."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_l2l.model.batch_dims import (
    BatchDims,
    NoConsistentSplit,
    batch_rows,
    call_key,
    cannot_split,
    compare_shapes,
    ubatches,
)
from hf_l2l.model.precision import Precision
from hf_l2l.model.units import LayerUnit
from hf_l2l.runtime.tensors import flatten, leaves_of, map_tensors
from tiers import times

SIZES = st.lists(st.integers(1, 7), max_size=3)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[torch.Size], list[torch.Size], int, int, tuple[int | None, ...]]:
    """Shapes of some tensors with `rows` rows and with `factor` times as many, and where the rows are."""
    rows, factor = draw(st.integers(1, 6)), draw(st.integers(2, 4))
    small, large, dims = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        sizes = draw(SIZES)
        dim = draw(st.none() | st.integers(0, len(sizes)))
        per_row = draw(st.integers(1, 3))
        small.append(torch.Size(sizes if dim is None else [*sizes[:dim], per_row * rows, *sizes[dim:]]))
        large.append(torch.Size(sizes if dim is None else [*sizes[:dim], per_row * rows * factor, *sizes[dim:]]))
        dims.append(dim)
    return small, large, rows, factor * rows, tuple(dims)


@settings(max_examples=times(30, 100))
@given(shapes())
def test_the_dimension_that_grows_with_the_rows_carries_them(drawn):
    small, large, rows, more, dims = drawn
    assert compare_shapes(small, large, rows, more).dims == dims
    assert compare_shapes(large, small, more, rows).dims == dims


@settings(max_examples=times(30, 100))
@given(shapes(), st.data())
def test_inconsistent_shapes_are_refused(drawn, data):
    """Another number of tensors, or of dimensions; two that grow; a size that is not in proportion."""
    small, large, rows, more, dims = drawn
    kind = data.draw(st.sampled_from(["count", "rank", "second", "proportion"]))
    changeable = [i for i, d in enumerate(dims) if d is not None and (kind != "second" or len(small[i]) > 1)]
    if kind == "count" or not changeable:
        large = [*large, torch.Size([rows])]
    else:
        index = data.draw(st.sampled_from(changeable))
        sizes, dim = list(large[index]), dims[index]
        if kind == "rank":
            sizes.append(1)
        elif kind == "second":
            other = data.draw(st.sampled_from([d for d in range(len(sizes)) if d != dim]))
            sizes[other] += 1
        else:
            sizes[dim] += data.draw(st.integers(1, 5))
        large[index] = torch.Size(sizes)
    with pytest.raises(NoConsistentSplit, match="rows"):
        compare_shapes(small, large, rows, more)
    with pytest.raises(NoConsistentSplit, match=r"a tensor is \[3\] for 2 rows and \[6\] for 4"):
        compare_shapes([torch.Size([3])], [torch.Size([6])], 2, 4)  # no whole number of entries per row


@settings(max_examples=times(30, 100))
@given(shapes(), st.integers(1, 7))
def test_ubatches_cover_all_rows_exactly_once(drawn, size):
    small, _, rows, _, places = drawn
    tensors, dims = [torch.arange(s.numel()).reshape(s) for s in small], BatchDims(places)
    assert dims.fits(tensors, rows)
    pieces = [dims.rows_of(tensors, rows, *ubatch) for ubatch in ubatches(rows, size)]
    for index, (tensor, dim) in enumerate(zip(tensors, dims.dims, strict=True)):
        if dim is None:
            assert all(piece[index] is tensor for piece in pieces)
        else:
            assert torch.equal(torch.cat([piece[index] for piece in pieces], dim), tensor)
            assert all(p[index].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in pieces)


def test_rows_of_a_batch():
    rows, objects = torch.zeros(5, 3), [{"boxes": torch.zeros(1, 4), "classes": torch.zeros(1)} for _ in range(5)]
    assert batch_rows(((), {"flag": True})) is None
    for args, kwargs in (
        ((), {"flag": True, "scale": torch.tensor(1.0), "input_ids": rows}),
        ((), {"position_ids": torch.zeros(1, 3), "input_ids": rows}),
        ((torch.zeros(9, 4), rows, torch.zeros(5)), {}),
        ((), {"pixel_values": torch.zeros(5, 3, 8, 8), "labels": objects}),
        ((hf.BatchEncoding({"ids": rows}),), {}),
    ):
        assert batch_rows((args, kwargs)) == 5


def test_what_cannot_be_split():
    assert cannot_split([torch.zeros(1), None, 1, 2.5, "text", torch.float32, len], {"cu_seqlens": None}) is None
    assert cannot_split([torch.zeros(1), hf.DynamicCache()], {}) == "it is given a key-value cache"
    assert cannot_split([SimpleNamespace()], {}) == "it is given a SimpleNamespace, whose rows are unknown"
    assert cannot_split([UserDict(a=1)], {}) == "it is given a UserDict, whose rows are unknown"
    packed = {"cu_seqlens": torch.tensor([0, 4])}
    assert cannot_split([], packed) == "it is given sequences packed into one (cu_seqlens)"


def key(layer: nn.Module, rows: int = 4, **kwargs: object) -> tuple[object, ...]:
    leaves, spec = flatten(((torch.zeros(rows, 3),), kwargs))
    unit = LayerUnit(layer, layer.modules(), "a layer", Precision(layer))
    return call_key(unit, spec, leaves, rows)


def test_calls_of_one_kind_have_one_key_and_others_have_others():
    layer = nn.Linear(3, 3)
    assert key(layer, mask=torch.zeros(4, 5), scale=2.0) == key(nn.Linear(3, 3), mask=torch.zeros(4, 7), scale=3.0)
    assert key(layer, mask=torch.zeros(4, 5)) == key(layer, rows=6, mask=torch.zeros(6, 5))
    assert key(nn.Sequential(layer)) == key(nn.Sequential(nn.Linear(3, 3))) != key(nn.Sequential(nn.Identity()))
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"mask": None}, {"mask": torch.zeros(4, 5)}),
        ({"mask": None}, {}),
        ({"positions": torch.zeros(1, 5)}, {"positions": torch.zeros(4, 5)}),
        ({"positions": torch.zeros(5)}, {"positions": torch.zeros(4)}),
        ({"mask": torch.zeros(4, 5)}, {"mask": torch.zeros(4, 1, 5)}),
        ({"mask": torch.zeros(4, 5)}, {"mask": torch.zeros(4, 5, dtype=torch.bool)}),
        ({"option": True}, {"option": None}),
        ({"option": True}, {"option": False}),
        ({"option": "one"}, {"option": "other"}),
    ]
    for one, other in pairs:
        assert key(layer, **one) != key(layer, **other), (one, other)
    training = key(layer)
    assert key(layer.eval()) != training


class Labelled(dict):
    """A dict that is no node of pytree, with an attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.label = "mine"


class Locked(dict):
    """Made once, and then read only."""

    def update(self, *args, **kwargs):
        raise RuntimeError("this mapping is locked")


def test_leaves_in_mappings_are_seen_and_the_callers_object_stays():
    for make in (hf.BatchEncoding, UserDict, Labelled, MappingProxyType, Locked):
        ids, mask = torch.ones(3, 2), torch.zeros(3, 2)
        given = make({"ids": ids, "more": [make({"mask": mask})], "text": "x"})
        [changed], five = map_tensors(lambda tensor: tensor + 1, ([given], 5))
        assert type(changed) is (dict if make is Locked else make) and five == 5, make
        assert torch.equal(changed["ids"], ids + 1) and torch.equal(changed["more"][0]["mask"], mask + 1), make
        assert changed["text"] == "x" and getattr(changed, "label", None) == getattr(given, "label", None), make
        assert given["ids"] is ids and given["more"][0]["mask"] is mask, make
        assert [leaf for leaf in leaves_of(([given], 5)) if isinstance(leaf, torch.Tensor)] == [ids, mask], make
    flat = hf.BatchEncoding({"ids": torch.ones(2), "text": "x"})
    assert map_tensors(lambda tensor: tensor, {"batch": flat})["batch"] is flat, "nothing changes in it"
