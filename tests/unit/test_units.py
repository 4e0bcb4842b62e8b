"""What is known of a unit is right as long as `is_current` says so; and what layers collect for transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import nn

from hf_l2l.model.captured_outputs import CapturedOutputs
from hf_l2l.model.precision import Precision
from hf_l2l.model.quantized import refuse_quantized
from hf_l2l.model.stacks import find_stacks, shell_modules
from hf_l2l.model.units import LayerUnit
from hf_l2l.runtime.tensors import on_meta, parts_of, rebuilt, sharing_memory, tensor_bytes
from models import SMALL, bert, llama, t5, vit
from toy_quantized import quantized
from training import tiny_bert


class Pair(nn.Module):
    """Two linear modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def unit_of(module: nn.Module) -> LayerUnit:
    return LayerUnit(module, module.modules(), "a layer", Precision(module))


CHANGES: dict[str, Callable[[Pair], Any]] = {
    "grow": lambda module: setattr(module.first.weight, "data", torch.zeros(4, 3)),
    "replace a parameter": lambda module: setattr(module.first, "weight", nn.Parameter(torch.zeros(3, 3))),
    "replace a module": lambda module: setattr(module, "second", nn.Linear(3, 3, bias=False)),
    "add a module": lambda module: setattr(module.first, "adapter", nn.Identity()),
    "remove a parameter": lambda module: setattr(module.first, "bias", None),
    "freeze": lambda module: module.first.bias.requires_grad_(False),
    "shorten": lambda module: setattr(module.first.bias, "data", module.first.bias.data.half()),
    "add a buffer": lambda module: module.first.register_buffer("later", torch.zeros(1)),
}


def test_a_unit_that_was_changed_is_not_current():
    for name, change in CHANGES.items():
        module = Pair()
        unit = unit_of(module)
        assert unit.is_current()
        change(module)
        assert not unit.is_current(), name
        assert unit_of(module).is_current()


def test_without_transformers_no_outputs_are_captured(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.utils.output_capturing", raising=False)
    with CapturedOutputs() as captured:
        pass
    assert captured.taken == {} and captured.keys == ()
    CapturedOutputs.deliver({"attentions": [1]})


# ---- which modules are layers


def test_stacks_of_a_model_and_its_shell():
    adapted = nn.ModuleDict({"base_model": nn.ModuleDict({"model": llama()}), "lora": nn.Linear(2, 2)})  # as by PEFT
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    openai = hf.OpenAIGPTConfig(n_embd=16, n_layer=2, n_head=2, vocab_size=60, n_positions=16)
    for model, expected in (
        # Its layers have a name that other models use for other things.
        (hf.OpenAIGPTModel(openai), [("h", "Block", 2)]),
        (bert(), [("bert.encoder.layer", "BertLayer", 2)]),
        (t5(), [("encoder.block", "T5Block", 2), ("decoder.block", "T5Block", 2)]),
        (
            hf.AlbertModel(hf.AlbertConfig(**SMALL, embedding_size=8)),
            [("encoder.albert_layer_groups", "AlbertLayerGroup", 1)],
        ),
        (vit(), [(None, "ViTLayer", 2)]),
        (llama(), [("model.layers", "LlamaDecoderLayer", 2)]),
        # Its stages carry the base class of layers, and contain the layers.
        (
            hf.SwinModel(hf.SwinConfig(**sizes, depths=[1, 2], num_heads=[1, 2])),
            [("encoder.layers.0.blocks", "SwinLayer", 1), ("encoder.layers.1.blocks", "SwinLayer", 2)],
        ),
        (adapted, [("base_model.model.model.layers", "LlamaDecoderLayer", 2)]),
    ):
        stacks = find_stacks(model)
        for stack, (path, name, count) in zip(stacks, expected, strict=True):
            assert path is None or stack.path == path  # the path in ViT differs among versions of transformers
            assert (stack.class_names, len(stack.layers)) == ((name,), count)
            assert list(stack.layers) == list(model.get_submodule(stack.path).children())
            assert stack.layer_bytes == [4 * sum(p.numel() for p in layer.parameters()) for layer in stack.layers]
        layers = [layer for stack in stacks for layer in stack.layers]
        shell, inside = list(shell_modules(model, layers)), [m for layer in layers for m in layer.modules()]
        assert len(set(shell)) == len(shell) and set(shell).isdisjoint(inside)
        assert set(shell) | set(inside) == set(model.modules())


def test_parts_of_hybrid_layers_are_layers():
    """The attention of a hybrid layer, and the Mamba layer in it, are each a layer; they share no container."""
    sizes = {**SMALL, "num_hidden_layers": 3, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_headdim": 16}
    config = hf.Zamba2Config(**sizes, layers_block_type=["mamba", "hybrid", "mamba"], num_mem_blocks=1)
    (stack,) = find_stacks(hf.Zamba2Model(config))
    assert (stack.path, len(stack.layers)) == ("layers", 4)
    assert set(stack.class_names) == {"Zamba2MambaDecoderLayer", "Zamba2AttentionDecoderLayer"}


class Block(nn.Sequential):
    pass


class Special(Block):
    pass


def test_named_layer_classes_are_found_by_class_or_base_and_anywhere():
    blocks = nn.ModuleList([Block(nn.Linear(2, 2)), Special(nn.Linear(2, 2)), Block(nn.Linear(2, 2))])
    model = nn.Module()
    model.blocks, model.single, model.head = blocks, Block(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert find_stacks(model) == []
    blocks, single = find_stacks(model, ("Block",))
    assert (blocks.path, single.path) == ("blocks", "")
    assert blocks.layers == tuple(model.blocks) and single.layers == (model.single,)
    assert blocks.class_names == ("Block", "Special")
    (special,) = find_stacks(model, ("Special",))
    assert special.layers == (model.blocks[1],)
    model._no_split_modules = ["Block"]  # a model may name its blocks itself
    (stack,) = find_stacks(model)
    assert stack.layers == tuple(model.blocks)  # and not the one outside a container
    block = model.single
    (twice,) = find_stacks(nn.ModuleDict({"blocks": nn.ModuleList([block, block])}), ("Block",))
    assert twice.layers == (block,)
    model.other = nn.Sequential(model.head)
    layers = [*model.blocks, model.single]
    assert list(shell_modules(model, layers)) == [model, model.blocks, model.head, model.other]
    assert list(shell_modules(model.single, layers)) == []


def listed(count: int, rest: int = 1) -> nn.ModuleDict:
    """Layers of an unknown class, in a list."""
    heavy = [Block(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])) for _ in range(count)]
    return nn.ModuleDict({"inner": nn.ModuleList(heavy), "rest": nn.Linear(8, rest)})


def test_lists_that_hold_most_of_the_parameters_are_stacks():
    model = listed(3)
    (stack,) = find_stacks(model)
    assert (stack.path, stack.layers, stack.is_guessed) == (
        "inner",
        tuple(model["inner"]),
        True,
    )  # and not their parts
    assert not find_stacks(model, ("Block",))[0].is_guessed
    assert find_stacks(listed(1, rest=100)) == find_stacks(listed(2, rest=100)) == []
    two = nn.ModuleDict({"encoder": listed(2, rest=20), "decoder": listed(2, rest=20)})
    assert [s.path for s in find_stacks(two)] == ["encoder.inner", "decoder.inner"], "those of one class together"


# ---- quantized weights


class State:
    """What a library keeps beside the packed values; `nested` may be another such object."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, nested: State | None = None) -> None:
        self.absmax, self.code, self.offset, self.state2 = absmax, code, None, nested


class Params4bit(nn.Parameter):
    """Stands for the class of this name, for which the package has an adapter."""


def packed() -> Any:
    parameter: Any = Params4bit(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    parameter.quant_state = State(torch.tensor([1, 2]), torch.rand(4), State(torch.rand(2), torch.rand(3)))
    parameter.module = nn.Linear(2, 2)
    return parameter


KINDS: list[tuple[Callable[[], Any], list[torch.dtype]]] = [
    (lambda: nn.Parameter(torch.rand(3, 4)), [torch.float32]),
    (lambda: quantized(torch.rand(3, 4)), [torch.int8, torch.float16, torch.float32]),
    (packed, [torch.uint8, torch.int64, *[torch.float32] * 3]),
]


def test_a_tensor_is_rebuilt_from_copies_of_its_parts():
    for make, dtypes in KINDS:
        before = make()
        parts = parts_of(before)
        assert [part.dtype for part in parts] == dtypes
        assert all(again is part for again, part in zip(parts_of(before), parts, strict=True)), "no copies"
        copies = [part.detach().as_subclass(torch.Tensor).clone() for part in parts]
        remaining = iter([*copies, torch.zeros(0)])
        after = rebuilt(before, remaining)
        assert len(list(remaining)) == 1, "it takes what belongs to it"
        for own, part, of_before in zip(parts_of(after), copies, parts, strict=True):
            assert own.data_ptr() == part.data_ptr() != of_before.data_ptr() and torch.equal(own, of_before)
        assert len(parts) == 1 or type(after) is type(before)
        assert all(again is part for again, part in zip(parts_of(before), parts, strict=True)), "it keeps its own"
        assert after.shape == before.shape and after.dtype == before.dtype
        if isinstance(before, Params4bit):
            assert before.module is not None and after.module is None, "it refers to no module"


def test_bytes_and_units_are_those_of_the_parts():
    weight = quantized(torch.rand(3, 4))
    assert tensor_bytes([weight]) == 12 + 3 * 2 + 4
    assert on_meta(weight, torch.float32).shape == (3, 4)
    values = parts_of(weight)[0]
    assert sharing_memory([weight, values.view(-1)]) and not sharing_memory([weight, quantized(torch.rand(3, 4))])
    module = nn.Linear(4, 3)
    module.weight = quantized(module.weight)
    unit = LayerUnit(module, module.modules(), "a layer", Precision(module, torch.bfloat16))
    assert unit.owners == [0, 0, 0, 1] and unit.part_numbers == [range(3), range(3, 4)]
    # With cmp, ordinary weights travel in 16 bits, and the parts of a quantized one as they are.
    assert unit.dtypes == [torch.int8, torch.float16, torch.float32, torch.bfloat16]
    assert [piece.dtype for piece in unit.layout.pieces] == unit.dtypes and unit.trained == [1]
    versions = unit.versions()
    unit.parts[1].mul_(2)
    assert unit.versions() != versions, "writes to a part are seen"


def test_a_model_whose_file_alone_was_quantized_is_not_refused():
    """One loaded from GGUF says that it is quantized, and has ordinary parameters."""
    model = tiny_bert()
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gguf"))
    refuse_quantized(model)
