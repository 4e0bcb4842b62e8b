"""Finds the layer stacks of a model, by the class of their modules and not by path: the blocks of transformers' models
have a common base class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches

from torch import nn

from hf_l2l.option_names import option
from hf_l2l.runtime.tensors import tensor_bytes

LAYER_BASE_CLASS = "GradientCheckpointingLayer"
"""The base class of the blocks of transformers' models (`transformers.modeling_layers`)."""

LAYER_CLASSES = (
    "AlbertLayerGroup",
    "FunnelLayer",
    "IBertLayer",
    "LxmertLayer",
    "LxmertXLayer",
    "MPNetLayer",
    "PatchTSMixerLayer",
    "PatchTSTEncoderLayer",
    "PerceiverLayer",
    "PvtLayer",
    "ReformerLayer",
    "SqueezeBertModule",
    "XLNetLayer",
    "Zamba2AttentionDecoderLayer",
    "ZambaAttentionDecoderLayer",
    # Of models whose layers have no class: attentions and feed-forward networks are in lists of their own.
    "modeling_flaubert.MultiHeadAttention",
    "modeling_flaubert.TransformerFFN",
    "modeling_xlm.MultiHeadAttention",
    "modeling_xlm.TransformerFFN",
    # Names that other models use for other things.
    "modeling_ctrl.EncoderLayer",
    "modeling_fsmt.DecoderLayer",
    "modeling_fsmt.EncoderLayer",
    "modeling_openai.Block",
)
"""Blocks of transformers' models that lack that base class; with the file that has the class, where its name is too
common."""


@dataclass(frozen=True)
class LayerStack:
    """The layers of one container: the encoder of BERT, or one of the two stacks of T5."""

    path: str
    layers: tuple[nn.Module, ...]
    is_guessed: bool = False
    """Whether it was found by its parameters alone, since no class in the model is known."""

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

    A layer is a member of a module container, or is inside such a member, and its class or a base class is a known
    layer class or named in `layer_classes`. A module that contains layers is not a layer. In a model without any, a
    list of at least two modules of one class that holds most of the parameters is a stack.

    Raises:
        ValueError: if no module of the model has a class named in `layer_classes`.
    """
    if layer_classes is not None:
        _refuse_unknown(model, layer_classes)
        return _stacks(_members_named(model, set(layer_classes), anywhere=True))
    found = _stacks(_members_named(model, {LAYER_BASE_CLASS, *LAYER_CLASSES}, anywhere=False))
    if not found:
        # Hub models with their own code list blocks that must not be split across devices.
        named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        found = _stacks(_members_named(model, named, anywhere=False))
    return found or _largest_lists(model)


def _refuse_unknown(model: nn.Module, layer_classes: Iterable[str]) -> None:
    known = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for name in layer_classes:
        if name not in known:
            there = sorted({type(m).__name__ for m in model.modules()})
            alike = get_close_matches(name, there, n=1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise ValueError(
                f"every name in {option('layer_classes')} must be the class of a module of the model (no module is a "
                f"{name!r}{hint}); the classes in it are {', '.join(there)}"
            )


def _stacks(found: Iterable[tuple[str, nn.Module]]) -> list[LayerStack]:
    stacks: dict[str, list[nn.Module]] = {}
    for container, layer in found:
        stacks.setdefault(container, []).append(layer)
    return [LayerStack(path, tuple(dict.fromkeys(layers))) for path, layers in stacks.items()]


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _members_named(model: nn.Module, names: set[str], *, anywhere: bool) -> list[tuple[str, nn.Module]]:
    """(path of the container, module) of the innermost modules of a class in `names`.

    With `anywhere`, those outside all containers, too; their path is that of the module above.
    """

    def named(module: nn.Module) -> bool:
        return any(base.__name__ in names or _in_its_file(base) in names for base in type(module).__mro__)

    found = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not path or not named(module) or any(named(m) for m in module.modules() if m is not module):
            continue
        above = [path.rpartition(".")[0]]
        while above[-1]:
            above.append(above[-1].rpartition(".")[0])
        container = next((each for each in above if isinstance(modules[each], CONTAINERS)), None)
        # A member of a container, or inside a layer that is one, as the parts of Zamba's hybrid layers.
        if container is not None and all(named(modules[each]) for each in above[: above.index(container)]):
            found.append((container, module))
        elif anywhere:
            found.append((above[0], module))
    return found


def _in_its_file(kind: type) -> str:
    """The name of a class with that of its file, as in "modeling_openai.Block"."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def _largest_lists(model: nn.Module) -> list[LayerStack]:
    """The outermost lists of at least two modules of one class, if those of a class hold most of the parameters."""
    lists: dict[type, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        members = list(module) if isinstance(module, nn.ModuleList) else []
        kinds = {type(member) for member in members}
        if len(members) > 1 and len(kinds) == 1 and not kinds & {*CONTAINERS}:
            lists.setdefault(kinds.pop(), []).extend((path, member) for member in members)
    whole = parameter_bytes([model])
    for found in lists.values():  # outer ones first
        if 2 * parameter_bytes([layer for _, layer in found]) > whole:
            return [replace(stack, is_guessed=True) for stack in _stacks(found)]
    return []


def has_weights(module: nn.Module) -> bool:
    """Whether `module` has parameters or buffers, or a module below it has."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


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
