"""What `hf-l2l inspect` knows of a model: everything that shapes and classes tell, without a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_l2l.cli.command import flag
from hf_l2l.hf.preparation import refuse_own_backwards
from hf_l2l.model.quantized import DEQUANTIZED
from hf_l2l.model.stacks import LayerStack, find_stacks, shell_modules
from hf_l2l.runtime.tensors import tensor_bytes


@dataclass(frozen=True)
class Size:
    """Parameters and their bytes; tied ones count once."""

    parameters: int
    bytes: int


@dataclass(frozen=True)
class LayerKind:
    """Layers of a stack that are alike."""

    count: int
    class_name: str
    each: Size
    """Of one of them."""


@dataclass(frozen=True)
class Stack:
    """A stack of layers."""

    path: str
    is_guessed: bool
    """Whether it was found by its parameters alone, since no class in the model is known."""
    num_layers: int
    class_names: tuple[str, ...]
    kinds: tuple[LayerKind, ...]
    """In the order of the first layer of each."""
    total: Size


@dataclass(frozen=True)
class Module:
    """A module outside the layers with parameters of its own."""

    path: str
    """Empty for the model itself."""
    class_name: str
    own: Size
    """Without those that it shares with a module before it."""
    tied_to: tuple[str, ...]
    """The names of the parameters that it shares with a module before it."""


@dataclass(frozen=True)
class Largest:
    """The layer with the most bytes, by which the slots on the device are sized."""

    path: str
    bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """A model as layer-to-layer execution sees it."""

    class_name: str
    model_type: str | None
    architectures: tuple[str, ...]
    dtype: str
    """Of the parameters that are counted: that of the masters."""
    max_position_embeddings: int | None
    stacks: tuple[Stack, ...]
    largest_layer: Largest | None
    non_layer_modules: tuple[Module, ...]
    ties: tuple[tuple[str, ...], ...]
    """Names of one parameter each."""
    buffers: Size
    """All of the model, in layers and outside; `parameters` are their elements."""
    layers_total: Size
    non_layer_total: Size
    total: Size
    refused: tuple[str, ...]
    """Why the model does not run layer to layer, as far as shapes and the config tell."""
    notes: tuple[str, ...]


def facts_of(model: nn.Module, layer_classes: tuple[str, ...] | None = None) -> ModelFacts:
    """The facts of a model, which may be on the meta device.

    Raises:
        ValueError: if no module of the model has a class named in `layer_classes`.
    """
    config: Any = getattr(model, "config", None)
    stacks = find_stacks(model, layer_classes)
    layers = [layer for stack in stacks for layer in stack.layers]
    paths = {module: path for path, module in model.named_modules()}
    largest = max(layers, key=_bytes_of, default=None)
    in_layers = _parameters(layers)
    everything = _parameters([model])
    architectures = tuple(getattr(config, "architectures", None) or ())
    return ModelFacts(
        class_name=type(model).__name__,
        model_type=getattr(config, "model_type", None),
        architectures=architectures,
        dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in everything})),
        max_position_embeddings=_longest(config),
        stacks=tuple(_stack(stack) for stack in stacks),
        largest_layer=None if largest is None else Largest(paths[largest], _bytes_of(largest)),
        non_layer_modules=tuple(_shell(model, layers, paths)),
        ties=_ties(model),
        buffers=_size({*model.buffers()}),
        layers_total=_size(in_layers),
        non_layer_total=_size(everything - in_layers),
        total=_size(everything),
        refused=tuple(_refusals(model, stacks)),
        notes=tuple(_notes(model, stacks, architectures)),
    )


def _parameters(modules: Iterable[nn.Module]) -> set[torch.Tensor]:
    return {p for module in modules for p in module.parameters()}


def _size(tensors: Iterable[torch.Tensor]) -> Size:
    found = list(tensors)
    return Size(sum(t.numel() for t in found), tensor_bytes(found))


def _bytes_of(layer: nn.Module) -> int:
    return tensor_bytes(layer.parameters())


def _stack(stack: LayerStack) -> Stack:
    kinds: dict[tuple[str, Size], int] = {}
    for layer in stack.layers:
        kind = type(layer).__name__, _size(layer.parameters())
        kinds[kind] = kinds.get(kind, 0) + 1
    return Stack(
        stack.path,
        stack.is_guessed,
        len(stack.layers),
        stack.class_names,
        tuple(LayerKind(count, name, each) for (name, each), count in kinds.items()),
        _size(_parameters(stack.layers)),
    )


def _shell(model: nn.Module, layers: Sequence[nn.Module], paths: dict[nn.Module, str]) -> Iterable[Module]:
    """The modules outside the layers that have parameters of their own, in the order of the model."""
    outside = set(shell_modules(model, layers))
    first: dict[torch.Tensor, str] = {}
    for module, path in paths.items():
        if module not in outside:
            continue
        own, tied = [], []
        for name, p in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if first.setdefault(p, full) == full:
                own.append(p)
            else:
                tied.append(first[p])
        if own or tied:
            yield Module(path, type(module).__name__, _size(own), tuple(tied))


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[torch.Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def _longest(config: Any) -> int | None:
    """The longest row that the config says the model is for; that of the text, if it has several parts."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


# ---- what does not run


TRAINED_THROUGH = ("torchao", *DEQUANTIZED)
"""Methods of quantization whose weights travel, or are made ordinary ones; bitsandbytes in 4 bits besides."""


def _refusals(model: nn.Module, stacks: Sequence[LayerStack]) -> Iterable[str]:
    if not stacks:
        yield (
            f"a model must have a stack of layers to be run layer to layer (none was found in a "
            f"{type(model).__name__}); name the classes of its layers with {flag('layer_classes')}"
        )
    try:
        # Any accelerator will do: what is refused there is refused on each.
        refuse_own_backwards([layer for stack in stacks for layer in stack.layers], torch.device("cuda"))
    except ValueError as error:
        yield str(error)
    method, in_4_bits = _quantization(model)
    if method and method not in TRAINED_THROUGH and not in_4_bits:
        yield (
            f"the quantized weights of a checkpoint must be of torchao, or in 4 bits of bitsandbytes (its config says "
            f"{method}); load it without a quantization_config, or take the checkpoint that is not quantized"
        )


def _quantization(model: nn.Module) -> tuple[str, bool]:
    """How the checkpoint is quantized, empty if it is not; and whether that is bitsandbytes in 4 bits."""
    given: Any = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    given = given if isinstance(given, dict) else given.to_dict()
    method: Any = given.get("quant_method", "") or ("bitsandbytes" if "load_in_4bit" in given else "")
    method = str(getattr(method, "value", method))
    return method, method.startswith("bitsandbytes") and bool(given.get("load_in_4bit"))


def _notes(model: nn.Module, stacks: Sequence[LayerStack], architectures: Sequence[str]) -> Iterable[str]:
    if any(stack.is_guessed for stack in stacks):
        yield f"the layers were found by their parameters alone; name others with {flag('layer_classes')}"
    if architectures and type(model).__name__ not in architectures:
        yield f"the config names {', '.join(architectures)}, and this is the {type(model).__name__} of the same config"
    method, _ = _quantization(model)
    if method:
        yield f"the checkpoint is quantized ({method}): the bytes here are those of weights that are not"
