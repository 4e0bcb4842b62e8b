"""Layers are found by class in every kind of model, and batch dimensions by doubling."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_l2l.model.batch_dims import (
    BatchDims,
    NoConsistentSplit,
    batch_rows,
    call_key,
    cannot_split,
    compare_shapes,
    doubled,
    ubatches,
)
from hf_l2l.model.precision import Precision
from hf_l2l.model.stacks import find_stacks, parameter_bytes, shell_modules
from hf_l2l.model.units import LayerUnit
from hf_l2l.runtime.tensors import flatten, leaves_of, map_tensors, narrow
from models import SMALL, bert, llama, t5, vit


def albert() -> nn.Module:
    return hf.AlbertModel(hf.AlbertConfig(**SMALL, embedding_size=8))


def swin() -> nn.Module:
    """Its stages carry the base class of layers, and contain the layers."""
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4)
    return hf.SwinModel(config)


class Adapter(nn.Module):
    """Wraps a model as PEFT does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.lora = nn.Linear(2, 2)


def adapted() -> nn.Module:
    return Adapter(llama())


def openai() -> nn.Module:
    """Its layers have a name that other models use for other things."""
    return hf.OpenAIGPTModel(hf.OpenAIGPTConfig(n_embd=16, n_layer=2, n_head=2, vocab_size=60, n_positions=16))


STACKS = {
    openai: [("h", "Block", 2)],
    bert: [("bert.encoder.layer", "BertLayer", 2)],
    t5: [("encoder.block", "T5Block", 2), ("decoder.block", "T5Block", 2)],
    albert: [("encoder.albert_layer_groups", "AlbertLayerGroup", 1)],
    vit: [(None, "ViTLayer", 2)],
    llama: [("model.layers", "LlamaDecoderLayer", 2)],
    swin: [("encoder.layers.0.blocks", "SwinLayer", 1), ("encoder.layers.1.blocks", "SwinLayer", 2)],
    adapted: [("base_model.model.model.layers", "LlamaDecoderLayer", 2)],
}


@pytest.mark.parametrize("make", STACKS, ids=lambda make: make.__name__)
def test_stacks_of_a_model(make):
    model = make()
    stacks = find_stacks(model)
    for stack, (path, name, count) in zip(stacks, STACKS[make], strict=True):
        assert path is None or stack.path == path  # the path in ViT differs among versions of transformers
        assert stack.class_names == (name,)
        assert len(stack.layers) == count
        assert list(stack.layers) == list(model.get_submodule(stack.path).children())
        assert stack.layer_bytes == [4 * sum(p.numel() for p in layer.parameters()) for layer in stack.layers]


def test_parts_of_hybrid_layers_are_layers():
    """The attention of a hybrid layer, and the Mamba layer in it, are each a layer; they share no container."""
    config = hf.Zamba2Config(
        hidden_size=16,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=60,
        mamba_d_state=8,
        n_mamba_heads=2,
        mamba_headdim=16,
        num_mem_blocks=1,
    )
    (stack,) = find_stacks(hf.Zamba2Model(config))
    assert (stack.path, len(stack.layers)) == ("layers", 4)
    assert set(stack.class_names) == {"Zamba2MambaDecoderLayer", "Zamba2AttentionDecoderLayer"}


def test_families_whose_layers_are_in_lists_by_part():
    sizes = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_words": 60, "vocab_size": 60}
    for model in (hf.XLMModel(hf.XLMConfig(**sizes)), hf.FlaubertModel(hf.FlaubertConfig(**sizes))):
        assert [s.class_names for s in find_stacks(model)] == [("MultiHeadAttention",), ("TransformerFFN",)]


def test_a_model_without_layers_has_no_stack():
    assert find_stacks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Special(Block):
    pass


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Special(), Block()])
        self.single = Block()
        self.head = nn.Linear(2, 2)


def test_named_layer_classes_are_found_by_class_or_base_and_anywhere():
    model = Custom()
    assert find_stacks(model) == []
    blocks, single = find_stacks(model, ("Block",))
    assert (blocks.path, single.path) == ("blocks", "")
    assert blocks.layers == tuple(model.blocks) and single.layers == (model.single,)
    assert blocks.class_names == ("Block", "Special")
    (special,) = find_stacks(model, ("Special",))
    assert special.layers == (model.blocks[1],)


def test_a_model_may_name_its_blocks_itself():
    model = Custom()
    model._no_split_modules = ["Block"]
    (stack,) = find_stacks(model)
    assert stack.layers == tuple(model.blocks)  # and not the one outside a container


class Stage(Block):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])


def test_a_module_that_contains_layers_is_none():
    stages = nn.ModuleList([Stage(), Stage()])
    assert [s.path for s in find_stacks(stages, ("Block",))] == ["0.inner", "1.inner"]


def test_a_layer_used_twice_is_one_layer():
    block = Block()
    (stack,) = find_stacks(nn.ModuleDict({"blocks": nn.ModuleList([block, block])}), ("Block",))
    assert stack.layers == (block,)


@pytest.mark.parametrize("names", [("Blok",), ("Block", "Blok"), ("Blok", "Block")])
def test_wrong_layer_classes_name_the_right_ones(names):
    with pytest.raises(ValueError) as error:
        find_stacks(Custom(), names)
    assert str(error.value) == (
        "every name in layer_classes must be the class of a module of the model (no module is a 'Blok'; did you mean "
        "'Block'?); the classes in it are Block, Custom, Linear, ModuleList, Special"
    )


def test_a_name_like_no_class_of_the_model():
    with pytest.raises(ValueError, match=r"\(no module is a 'xyz'\); the classes in it are"):
        find_stacks(Custom(), ("xyz",))


class Listed(nn.Module):
    """Layers of an unknown class, in a list."""

    def __init__(self, count: int, width: int = 8, rest: int = 1):
        super().__init__()
        self.inner = nn.ModuleList([Heavy(width) for _ in range(count)])
        self.rest = nn.Linear(width, rest)


class Heavy(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])


def test_a_list_that_holds_most_of_the_parameters_is_a_stack():
    model = Listed(3)
    (stack,) = find_stacks(model)
    assert (stack.path, stack.layers, stack.is_guessed) == ("inner", tuple(model.inner), True)  # and not their parts
    assert not find_stacks(model, ("Heavy",))[0].is_guessed


@pytest.mark.parametrize("model", [Listed(1, rest=100), Listed(2, rest=100)], ids=["one layer", "few parameters"])
def test_a_list_that_is_no_stack(model):
    assert find_stacks(model) == []


def test_lists_of_one_class_count_together():
    two = nn.ModuleDict({"encoder": Listed(2, rest=20), "decoder": Listed(2, rest=20)})
    assert [s.path for s in find_stacks(two)] == ["encoder.inner", "decoder.inner"]


def test_parameter_bytes_counts_ties_once():
    first, second = nn.Linear(2, 3, bias=False), nn.Linear(2, 3).half()
    assert parameter_bytes([first]) == 24
    assert parameter_bytes([first, second]) == 24 + 18
    second.weight = first.weight
    assert parameter_bytes([first, second]) == 24 + 6


def test_the_shell_is_what_is_not_inside_a_layer():
    model = Custom()
    model.other = nn.Sequential(model.head)
    layers = [layer for stack in find_stacks(model, ("Block",)) for layer in stack.layers]
    assert list(shell_modules(model, layers)) == [model, model.blocks, model.head, model.other]
    assert list(shell_modules(model.head, layers)) == [model.head]
    assert list(shell_modules(model.single, layers)) == []


@pytest.mark.parametrize("make", STACKS, ids=lambda make: make.__name__)
def test_shell_and_layers_share_no_module_and_miss_none(make):
    model = make()
    layers = [layer for stack in find_stacks(model) for layer in stack.layers]
    shell = list(shell_modules(model, layers))
    inside = [m for layer in layers for m in layer.modules()]
    assert len(set(shell)) == len(shell)
    assert set(shell).isdisjoint(inside)
    assert set(shell) | set(inside) == set(model.modules())


# ---- batch dimensions

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


@given(shapes())
def test_the_dimension_that_grows_with_the_rows_carries_them(drawn):
    small, large, rows, more, dims = drawn
    assert compare_shapes(small, large, rows, more).dims == dims
    assert compare_shapes(large, small, more, rows).dims == dims


@given(shapes(), st.data())
def test_inconsistent_shapes_are_refused(drawn, data):
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


def test_a_size_that_holds_no_whole_number_of_entries_per_row_is_refused():
    with pytest.raises(NoConsistentSplit, match=r"a tensor is \[3\] for 2 rows and \[6\] for 4"):
        compare_shapes([torch.Size([3])], [torch.Size([6])], 2, 4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[torch.Tensor], BatchDims, int, int]:
    small, _, rows, _, dims = draw(shapes())
    tensors = [torch.arange(s.numel()).reshape(s) for s in small]
    return tensors, BatchDims(dims), rows, draw(st.integers(1, 7))


@given(batches())
def test_ubatches_cover_all_rows_exactly_once(drawn):
    tensors, dims, rows, size = drawn
    assert dims.fits(tensors, rows)
    pieces = [dims.rows_of(tensors, rows, *ubatch) for ubatch in ubatches(rows, size)]
    for index, (tensor, dim) in enumerate(zip(tensors, dims.dims, strict=True)):
        if dim is None:
            assert all(piece[index] is tensor for piece in pieces)
        else:
            assert torch.equal(torch.cat([piece[index] for piece in pieces], dim), tensor)
            assert all(p[index].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for p in pieces)


def test_fits_needs_whole_rows():
    tensors = [torch.zeros(2, 6), torch.zeros(5)]
    assert BatchDims((1, None)).fits(tensors, 3)
    assert not BatchDims((1, None)).fits(tensors, 4)


def test_entries_of_one_row_lie_together():
    heads = torch.arange(6)  # two rows of three heads
    assert narrow(heads, 0, 2, 1, 2).tolist() == [3, 4, 5]


def test_doubled_repeats_what_has_the_rows():
    ids, positions, scale = torch.arange(4).reshape(2, 2), torch.arange(3), torch.tensor(2.0)
    args, kwargs = doubled(((ids, "text"), {"nested": [positions, {"labels": ids[:, 0]}], "scale": scale}), 2)
    assert args[0].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert args[1] == "text"
    assert kwargs["nested"][0] is positions and kwargs["scale"] is scale
    assert kwargs["nested"][1]["labels"].tolist() == [0, 2, 0, 2]


def test_doubled_leaves_a_cache_alone():
    cache = hf.DynamicCache()
    assert doubled({"past_key_values": cache}, 2)["past_key_values"] is cache


def test_rows_of_a_batch():
    assert batch_rows(((), {"flag": True, "scale": torch.tensor(1.0), "input_ids": torch.zeros(5, 3)})) == 5
    assert batch_rows(((), {"flag": True})) is None
    assert batch_rows(((), {"position_ids": torch.zeros(1, 3), "input_ids": torch.zeros(5, 3)})) == 5
    assert batch_rows(((torch.zeros(9, 4), torch.zeros(5, 3), torch.zeros(5)), {})) == 5
    objects = [{"boxes": torch.zeros(1, 4), "classes": torch.zeros(1)} for _ in range(5)]
    assert batch_rows(((), {"pixel_values": torch.zeros(5, 3, 8, 8), "labels": objects})) == 5
    assert batch_rows((({"input_ids": torch.zeros(5, 3)},), {})) == 5


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


def test_calls_of_one_kind_have_one_key():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    assert key(first, mask=torch.zeros(4, 5), scale=2.0) == key(second, mask=torch.zeros(4, 7), scale=3.0)
    assert key(first, rows=4, mask=torch.zeros(4, 5)) == key(first, rows=6, mask=torch.zeros(6, 5))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mask": None}, {"mask": torch.zeros(4, 5)}),
        ({"mask": None}, {}),
        ({"positions": torch.zeros(1, 5)}, {"positions": torch.zeros(4, 5)}),
        ({"positions": torch.zeros(5)}, {"positions": torch.zeros(4)}),
        ({"mask": torch.zeros(4, 5)}, {"mask": torch.zeros(4, 1, 5)}),
        ({"mask": torch.zeros(4, 5)}, {"mask": torch.zeros(4, 5, dtype=torch.bool)}),
        ({"option": True}, {"option": None}),
        ({"option": True}, {"option": False}),
        ({"option": "one"}, {"option": "other"}),
    ],
    ids=str,
)
def test_calls_of_different_kinds_have_different_keys(one, other):
    layer = nn.Linear(3, 3)
    assert key(layer, **one) != key(layer, **other)


def test_the_key_knows_the_classes_and_the_mode():
    layer = nn.Linear(3, 3)
    assert key(layer) != key(nn.Identity())
    assert key(nn.Sequential(layer)) == key(nn.Sequential(nn.Linear(3, 3))) != key(nn.Sequential(nn.Identity()))
    training = key(layer)
    assert key(layer.eval()) != training


# ---- leaves


class Labelled(dict):
    """A dict that is no node of pytree, with an attribute."""

    label = "none"


class Frozen(Mapping):
    """What can be read only, and shares its storage with shallow copies of it."""

    def __init__(self, data):
        self._data = dict(data)

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Particular(Frozen):
    """Cannot be made of its items."""

    def __init__(self, *, of):
        super().__init__(of)


class Locked(dict):
    """Made once, and then read only."""

    def update(self, *args, **kwargs):
        raise RuntimeError("this mapping is locked")


class Checked(Frozen):
    """Takes certain values only."""

    def __init__(self, data, *, error=None):
        if error is None and any(isinstance(value, torch.Tensor) and value.sum() for value in data.values()):
            raise ValueError("values must be zero")
        super().__init__(data)


def labelled(data):
    made = Labelled(data)
    made.label = "mine"
    return made


MAPPINGS = {
    "BatchEncoding": (hf.BatchEncoding, hf.BatchEncoding),
    "UserDict": (UserDict, UserDict),
    "dict": (labelled, Labelled),
    "proxy": (MappingProxyType, MappingProxyType),
    "frozen": (Frozen, Frozen),
    "locked": (Locked, dict),
    "checked": (lambda data: Checked(data, error="none"), dict),
    "particular": (lambda data: Particular(of=data), dict),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_leaves_in_mappings_are_seen_and_the_callers_object_stays(name):
    make, kind = MAPPINGS[name]
    ids, mask = torch.ones(3, 2), torch.zeros(3, 2)
    given = make({"ids": ids, "more": [make({"mask": mask})], "text": "x"})
    found = map_tensors(lambda tensor: tensor + 1, ([given], 5))
    changed = found[0][0]
    assert type(changed) is kind and found[1] == 5
    assert torch.equal(changed["ids"], ids + 1) and torch.equal(changed["more"][0]["mask"], mask + 1)
    assert changed["text"] == "x"
    assert given["ids"] is ids and given["more"][0]["mask"] is mask
    assert getattr(changed, "label", None) == getattr(given, "label", None)
    assert [leaf for leaf in leaves_of(([given], 5)) if isinstance(leaf, torch.Tensor)] == [ids, mask]


def test_a_mapping_in_which_nothing_changes_stays_the_same_object():
    given = hf.BatchEncoding({"ids": torch.ones(2), "text": "x"})
    assert map_tensors(lambda tensor: tensor, {"batch": given})["batch"] is given


def test_rows_of_a_batch_in_a_mapping():
    batch = hf.BatchEncoding({"ids": torch.ones(3, 2), "mask": torch.ones(3, 2)})
    assert batch_rows(((batch,), {})) == 3
    twice = doubled(((batch,), {}), 3)[0][0]
    assert [t.shape[0] for t in twice.values()] == [6, 6]
    assert [t.shape[0] for t in batch.values()] == [3, 3]
