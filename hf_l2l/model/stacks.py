"""Finds the layer stacks of a model, by the class of their modules and not by path: the blocks of transformers' models
have a common base class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hf_l2l.config import option
from hf_l2l.runtime.tensors import tensor_bytes

LAYER_BASE_CLASS = "GradientCheckpointingLayer"
"""The base class of the blocks of transformers' models (`transformers.modeling_layers`)."""

LAYER_CLASSES = ("AlbertLayerGroup",)
"""Blocks of transformers' models that lack that base class."""


@dataclass(frozen=True)
class LayerStack:
    """The layers of one container: the encoder of BERT, or one of the two stacks of T5."""

    path: str
    layers: tuple[nn.Module, ...]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of the layers, in order of first appearance."""
        return tuple(dict.fromkeys(type(layer).__name__ for layer in self.layers))

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's parameters."""
        return [parameter_bytes([layer]) for layer in self.layers]


def parameter_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the parameters of `modules`; tied parameters count once."""
    return tensor_bytes({p for module in modules for p in module.parameters()})


def find_stacks(model: nn.Module, layer_classes: tuple[str, ...] | None = None) -> list[LayerStack]:
    """The layer stacks of `model`, in module order; an empty list if it has none.

    A layer is a member of a module container, and its class or a base class is a known layer class or named in
    `layer_classes`. A module that contains layers is not a layer.

    Raises:
        ValueError: if no module of the model has a class named in `layer_classes`.
    """
    names = set(layer_classes or (LAYER_BASE_CLASS, *LAYER_CLASSES))
    found = _members_named(model, names, anywhere=layer_classes is not None)
    if not found and layer_classes is None:
        # Hub models with their own code list blocks that must not be split across devices.
        found = _members_named(model, set(getattr(model, "_no_split_modules", None) or ()), anywhere=False)
    if layer_classes is not None:
        classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        missing = [name for name in layer_classes if name not in classes]
        if missing:
            raise ValueError(
                f"every name in {option('layer_classes')} must be the class of a module of the model (no module is a "
                f"{missing[0]!r}); the classes in it are "
                f"{', '.join(sorted({type(m).__name__ for m in model.modules()}))}"
            )
    stacks: dict[str, list[nn.Module]] = {}
    for container, _, layer in found:
        stacks.setdefault(container, []).append(layer)
    return [LayerStack(path, tuple(dict.fromkeys(layers))) for path, layers in stacks.items()]


def _members_named(model: nn.Module, names: set[str], *, anywhere: bool) -> list[tuple[str, str, nn.Module]]:
    """(container path, name in it, module) of the innermost modules of a class in `names`."""

    def named(module: nn.Module) -> bool:
        return any(base.__name__ in names for base in type(module).__mro__)

    found = []
    for path, module in model.named_modules():
        container, _, name = path.rpartition(".")
        if not path or not named(module) or any(named(m) for m in module.modules() if m is not module):
            continue
        if anywhere or isinstance(model.get_submodule(container), nn.ModuleList | nn.ModuleDict | nn.Sequential):
            found.append((container, name, module))
    return found


def shell_modules(root: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """`root` and the modules below it that are not inside a layer (the shell), each once."""
    inside = set(layers)
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in inside or module in seen:
            return
        seen.add(module)
        yield module
        for child in module.children():
            yield from walk(child)

    return walk(root)
