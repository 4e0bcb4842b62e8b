"""Layers are found by class in every kind of model, and what is in no layer is the shell."""

from __future__ import annotations

import transformers as hf
from torch import nn

from hf_l2l.model.stacks import find_stacks, shell_modules
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


def test_stacks_of_a_model_and_its_shell():
    for make, expected in STACKS.items():
        model = make()
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
    model._no_split_modules = ["Block"]  # a model may name its blocks itself
    (stack,) = find_stacks(model)
    assert stack.layers == tuple(model.blocks)  # and not the one outside a container
    block = model.single
    (twice,) = find_stacks(nn.ModuleDict({"blocks": nn.ModuleList([block, block])}), ("Block",))
    assert twice.layers == (block,)


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


def test_lists_that_hold_most_of_the_parameters_are_stacks():
    model = Listed(3)
    (stack,) = find_stacks(model)
    assert (stack.path, stack.layers, stack.is_guessed) == ("inner", tuple(model.inner), True)  # and not their parts
    assert not find_stacks(model, ("Heavy",))[0].is_guessed
    assert find_stacks(Listed(1, rest=100)) == find_stacks(Listed(2, rest=100)) == []
    two = nn.ModuleDict({"encoder": Listed(2, rest=20), "decoder": Listed(2, rest=20)})
    assert [s.path for s in find_stacks(two)] == ["encoder.inner", "decoder.inner"], "those of one class together"


def test_the_shell_is_what_is_not_inside_a_layer():
    model = Custom()
    model.other = nn.Sequential(model.head)
    layers = [layer for stack in find_stacks(model, ("Block",)) for layer in stack.layers]
    assert list(shell_modules(model, layers)) == [model, model.blocks, model.head, model.other]
    assert list(shell_modules(model.head, layers)) == [model.head]
    assert list(shell_modules(model.single, layers)) == []
