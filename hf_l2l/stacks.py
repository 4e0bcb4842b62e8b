"""Which modules are layers, and which dimensions of a layer's arguments carry the batch.

Layers are found by class, not by path: transformers marks the blocks of its models by a common base class. The batch
dimensions are found by doubling the batch and looking which sizes double, never by comparing sizes with the batch
size: DeBERTa-v2's relative embeddings may have as many rows as the batch, and they must not be cut.
"""

from __future__ import annotations

import copy
import types
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_l2l.config import option

LAYER_BASE_CLASS = "GradientCheckpointingLayer"
"""The base class of the blocks of transformers' models (`transformers.modeling_layers`)."""

LAYER_CLASSES = ("AlbertLayerGroup",)
"""Blocks of transformers' models that lack that base class."""


@dataclass(frozen=True)
class LayerStack:
    """Layers that stand in one container: the encoder of BERT, or one of the two stacks of T5."""

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
    """Bytes of the parameters of `modules`, tied ones once."""
    return tensor_bytes({p for module in modules for p in module.parameters()})


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors)


def find_stacks(model: nn.Module, layer_classes: tuple[str, ...] | None = None) -> list[LayerStack]:
    """The layer stacks of `model`, in module order; an empty list when it has none.

    A layer is a member of a module container whose class, or a base of it, is known as a layer class or named in
    `layer_classes`. A module that contains layers is none itself.

    Raises:
        ValueError: if `layer_classes` names a class that no module of the model has.
    """
    names = set(layer_classes or (LAYER_BASE_CLASS, *LAYER_CLASSES))
    found = _members_named(model, names, anywhere=layer_classes is not None)
    if not found and layer_classes is None:
        # Models of the Hub that bring their own code name the blocks that must stay whole.
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
    """`root` and the modules below it that are not inside a layer, each once."""
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


def is_cache(value: object) -> bool:
    """Whether `value` is a key-value cache of transformers."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested containers, and their structure. A key-value cache is one leaf: it is changed in place."""
    return pytree.tree_flatten(value, is_leaf=is_cache)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value`, what a model is called with or returns, with `fn` of every tensor in its place.

    Key-value caches are left alone. Mappings that pytree does not know, such as transformers' `BatchEncoding`, are
    copied where something in them changes, and keep their type unless it cannot be made of a dict.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if not isinstance(leaf, Mapping):
            return leaf
        before = dict(leaf.items())
        after = {key: map_tensors(fn, item) for key, item in before.items()}
        return leaf if all(after[key] is before[key] for key in before) else _remade(leaf, after)

    return pytree.tree_map(of_leaf, value, is_leaf=is_cache)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of nested containers, those of every kind of mapping included; a key-value cache is one leaf."""
    for leaf in pytree.tree_leaves(value, is_leaf=is_cache):
        if isinstance(leaf, Mapping):
            yield from leaves_of(dict(leaf.items()))
        else:
            yield leaf


def _remade(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `mapping`, if it can be, with other values."""
    try:
        if not isinstance(mapping, dict | UserDict):  # a shallow copy of others may share what holds the values
            return type(mapping)(items)  # type: ignore[call-arg]
        made = copy.copy(mapping)
        made.update(items)
        return made
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # and what is below them
        return items


_SPLITTABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def is_opaque(leaf: Any) -> bool:
    """Whether an argument of a layer is an object in which there may be tensors that are not flattened."""
    return not isinstance(leaf, (torch.Tensor, *_SPLITTABLE)) and not callable(leaf)


OBJECTS_LOOKED_AT = 4096
"""How many objects `tensors_within` looks at, since a layer's arguments are looked through at each call."""

_WITHOUT_TENSORS = (
    *_SPLITTABLE,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
"""Types whose objects hold no tensors that a layer is given: words and numbers, code, and modules with weights."""


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, in containers and attributes: those of the `OBJECTS_LOOKED_AT` objects that
    are reached in the fewest steps. The order of tensors does not depend on what else the object holds."""
    waiting, seen, taken = deque([value]), dict[int, Any](), 1
    while waiting:
        each = waiting.popleft()
        if isinstance(each, torch.Tensor):
            yield each
        elif not isinstance(each, _WITHOUT_TENSORS) and id(each) not in seen:
            seen[id(each)] = each  # which keeps it alive, so that its id stays its own
            inner = list(islice(_inside(each), OBJECTS_LOOKED_AT - taken))
            taken += len(inner)
            waiting.extend(inner)


def _inside(value: Any) -> Iterator[Any]:
    """What the attributes of an object are, those in slots included, and what it contains."""
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        for slot in vars(base).values():
            if isinstance(slot, types.MemberDescriptorType) and slot.__name__ != "__dict__":
                try:
                    held = slot.__get__(value)
                except AttributeError:  # it has no value yet
                    continue
                yield held
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value


def cannot_split(leaves: Sequence[Any]) -> str | None:
    """Why arguments with these leaves must not be cut into ubatches, or None if they may be."""
    for leaf in leaves:
        if is_cache(leaf):
            return "it is given a key-value cache"
        if is_opaque(leaf):
            return f"it is given a {type(leaf).__name__}, whose rows are unknown"
    return None


@dataclass(frozen=True)
class BatchDims:
    """Which dimension of each tensor carries the batch (None: the tensor is the same for every row).

    A dimension may hold several entries per row, as in flattened (rows x tokens) inputs; entries of one row lie
    together.
    """

    dims: tuple[int | None, ...]

    def rows_of(self, tensors: Sequence[torch.Tensor], rows: int, start: int, stop: int) -> list[torch.Tensor]:
        """Views of rows `start` to `stop` of tensors that hold `rows` rows; tensors without rows as they are."""
        return [narrow(t, d, rows, start, stop) for t, d in zip(tensors, self.dims, strict=True)]

    def fits(self, tensors: Sequence[torch.Tensor], rows: int) -> bool:
        """Whether every batch dimension holds a whole number of entries per row."""
        return all(d is None or t.shape[d] % rows == 0 for t, d in zip(tensors, self.dims, strict=True))


def narrow(tensor: torch.Tensor, dim: int | None, rows: int, start: int, stop: int) -> torch.Tensor:
    """A view of rows `start` to `stop` of a tensor with `rows` rows along `dim`."""
    if dim is None:
        return tensor
    per_row = tensor.shape[dim] // rows
    return tensor.narrow(dim, start * per_row, (stop - start) * per_row)


class NoConsistentSplit(Exception):
    """The batch dimensions could not be found; the text says why."""


def compare_shapes(shapes: Sequence[torch.Size], other: Sequence[torch.Size], rows: int, other_rows: int) -> BatchDims:
    """The batch dimensions of tensors seen once with `rows` rows and once with `other_rows`.

    Raises:
        NoConsistentSplit: if a size changed otherwise than in proportion to the rows, or two of one tensor did.
    """
    if len(shapes) != len(other):
        raise NoConsistentSplit(f"{len(shapes)} tensors for {rows} rows and {len(other)} for {other_rows}")
    dims: list[int | None] = []
    for shape, other_shape in zip(shapes, other, strict=True):
        changed = [d for d, (a, b) in enumerate(zip(shape, other_shape, strict=False)) if a != b]
        if len(shape) != len(other_shape) or len(changed) > 1:
            raise NoConsistentSplit(
                f"a tensor is {list(shape)} for {rows} rows and {list(other_shape)} for {other_rows}"
            )
        dim = changed[0] if changed else None
        if dim is not None and (shape[dim] * other_rows != other_shape[dim] * rows or shape[dim] % rows):
            raise NoConsistentSplit(
                f"a tensor is {list(shape)} for {rows} rows and {list(other_shape)} for {other_rows}"
            )
        dims.append(dim)
    return BatchDims(tuple(dims))


def batch_rows(args: Any) -> int | None:
    """The rows of the batch that a model is called with: the first dimension that most of its tensors have.

    Of sizes equally common the largest: position ids may come as one row for all.
    """
    sizes = Counter(leaf.shape[0] for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


def doubled(args: Any, rows: int) -> Any:
    """`args` of a model with its batch concatenated with itself."""
    return map_tensors(
        lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() > 0 and tensor.shape[0] == rows else tensor, args
    )


def call_key(layer: nn.Module, spec: pytree.TreeSpec, leaves: Sequence[Any], rows: int) -> tuple[object, ...]:
    """What layer calls must have in common to be split alike.

    The classes of the layer and of all modules in it (a dense layer among those with experts has another output
    captured), the structure (None against tensor included), and per tensor its rank, dtype and which sizes are one or
    equal to the rows, so that a tensor that starts to carry rows is not taken for the shared one it was.
    """

    def kind(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, tuple((size == 1, size == rows) for size in leaf.shape)
        # Numbers may differ from call to call; flags and words decide what is computed.
        return (type(leaf), leaf) if isinstance(leaf, bool | str) else type(leaf)

    return tuple(type(m) for m in layer.modules()), layer.training, spec, tuple(kind(leaf) for leaf in leaves)
