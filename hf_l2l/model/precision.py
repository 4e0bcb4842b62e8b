"""Cross mixed precision (CMP, arXiv:2002.05645, 2.3): which tensors are 16 bits, and which stay in 32.

The device gets 16-bit weights and activations; masters, sums of gradients, moments and clipping are fp32 on the host.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hf_l2l.compat import is_in_checkpoints, keeps_statistics
from hf_l2l.config import Cmp, GradDtype
from hf_l2l.logits.heads import output_embedding
from hf_l2l.model.stacks import shell_modules
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import is_quantized, map_tensors, parts_of

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing_dtype(cmp: Cmp | None, device: torch.device) -> torch.dtype | None:
    """The 16-bit dtype in which layers compute on `device`; None if they compute in the dtype of their masters.

    Raises:
        ValueError: if the device lacks bfloat16, or only emulates it.
    """
    if cmp is None:
        return None
    has_bf16 = _computes_in_bf16(device)
    if cmp == "auto":
        return torch.bfloat16 if has_bf16 else torch.float16
    if cmp == "bf16" and not has_bf16:
        raise ValueError(
            f"cmp='bf16' needs a device that computes in bfloat16 (got {device}, which lacks or only emulates it); "
            "use cmp='fp16'"
        )
    return _DTYPES[cmp]


def _computes_in_bf16(device: torch.device) -> bool:
    module: Any = stream.device_module(device)
    check = getattr(module, "is_bf16_supported", None)
    is_here = getattr(module, "is_available", lambda: True)
    if check is None or not is_here():  # what a device of another machine computes in is not known
        return True
    emulated = "including_emulation" in inspect.signature(check).parameters  # CUDA counts emulation by default
    # The answer is about the current device, which may be another GPU. A module without `device` has a single device.
    current: Any = getattr(module, "device", None)
    with nullcontext() if current is None else current(device):
        return bool(check(including_emulation=False) if emulated else check())


class Precision:
    """The dtype of each weight, buffer and gradient of one model on the device and in transfers."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        gradients: GradDtype = "fp32",
        keeps_copies: bool = True,
    ) -> None:
        """Compute floating point in `dtype`; None keeps the dtypes of the host.

        Args:
            model: its modules may declare that they stay fp32.
            dtype: bfloat16 or float16.
            gradients: the dtype of sums of gradients in transfers and in host memory: "16bit" is bfloat16, which has
                the range of float32, for any compute dtype.
            keeps_copies: whether 16-bit copies are kept on the host, or made for each upload of a layer.
        """
        self.dtype = dtype
        self.gradients = gradients
        self.keeps_copies = keeps_copies
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameters and buffers that keep their dtype."""
        self._rounded: set[str] = set()
        """Buffers that a warning has named."""
        if dtype is not None:
            self._kept.update(dict.fromkeys(_kept_in_fp32(model), True))

    @property
    def is_mixed(self) -> bool:
        """Whether the device computes in another dtype than that of the masters."""
        return self.dtype is not None

    def of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype on the device of a weight, or of a persistent buffer. A quantized weight keeps its own."""
        if self.dtype is None or not tensor.is_floating_point() or tensor in self._kept or is_quantized(tensor):
            return tensor.dtype
        return self.dtype

    def of_parts(self, parameter: torch.Tensor) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The parts of a weight (see `parts_of`), each with its dtype on the device: those of a quantized weight,
        its scales included, keep theirs, since its kernels expect them."""
        return [(part, self.of(part) if part is parameter else part.dtype) for part in parts_of(parameter)]

    def of_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> torch.dtype:
        """The dtype on the device of a buffer of `module`.

        As transformers loads a model in 16 bits: frequencies of rotary positions, which are in no checkpoint, stay as
        they are, and so do running statistics, whichever tensor has them now; other buffers follow the weights.
        """
        kept = not is_in_checkpoints(module, name) and ("freq" in name or "Rotary" in type(module).__name__)
        return buffer.dtype if kept or keeps_statistics(module) else self.of(buffer)

    def of_gradient(self, master: torch.Tensor) -> torch.dtype:
        """The dtype of the gradient of `master` on the host."""
        return torch.bfloat16 if self.gradients == "16bit" and master.dtype == torch.float32 else master.dtype

    def of_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of `module`, with floating point cast to the dtype of its weights, except inputs of losses:
        arguments with "label", "target" or "weight" in their names, and with "future", unless the model forecasts
        from features of the future."""
        if self.dtype is None:
            return args, kwargs
        names = list(inspect.signature(module.forward).parameters)
        parts = ("label", "target", "weight", *(() if "future_time_features" in names else ("future",)))

        def is_of_a_loss(name: str) -> bool:
            return any(part in name for part in parts)

        cast = [
            value if number < len(names) and is_of_a_loss(names[number]) else self._of_input(value)
            for number, value in enumerate(args)
        ]
        return tuple(cast), {k: v if is_of_a_loss(k) else self._of_input(v) for k, v in kwargs.items()}

    def _of_input(self, value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor, value)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the dtype of `tensor` from now on."""
        self._kept[tensor] = True

    def warn_of_rounded(self, buffers: Iterable[str]) -> None:
        """Warn of buffers with these names, once of each: the forward of a layer has written to them, in 16 bits."""
        new = [name for name in buffers if name not in self._rounded]
        self._rounded.update(new)
        if new:
            warnings.warn(
                f"a buffer that a layer writes to is rounded to {str(self.dtype)[6:]} in each call with cmp, and so "
                f"loses small changes (got {', '.join(new)}); let the class of its module declare it, by "
                "_keep_in_fp32_modules_strict = [name], and convert it where it is used, or train without cmp",
                stacklevel=2,
            )

    def release(self) -> None:
        """Forget all tensors."""
        self._kept.clear()


_HEADS = {
    "classifier",
    "classification_head",
    "score",
    "qa_outputs",
    "lm_head",
    "cls",
    "logits_proj",
    "lm_loss",
    "output_projection",
    "vocab_projector",
    "generator_lm_head",
    "discriminator_predictions",
    "predictions",
}
"""Names of the modules in transformers that compute logits, besides those that `get_output_embeddings` returns."""


def let_heads_return_fp32(model: nn.Module, layers: Iterable[nn.Module] = ()) -> list[RemovableHandle]:
    """Convert the outputs of heads to fp32, so that losses are computed in fp32. Layers contain no heads."""
    outside = set(shell_modules(model, layers))
    heads = {m: None for name, m in model.named_modules() if m in outside and name.rpartition(".")[2] in _HEADS}
    for module in outside:
        output = output_embedding(module, outside)
        if output is not None:
            heads[output] = None
            before: Any = getattr(module, "lm_head", None)  # a part of the head, which another module follows
            if before in heads and output not in set(before.modules()):
                del heads[before]
    return [head.register_forward_hook(_InFp32()) for head in heads]


class _InFp32:
    """A hook that converts the outputs of a module to fp32. A copy or pickle of it does nothing."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return in_fp32(output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AsItIs, ()


class _AsItIs:
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        return None


def in_fp32(value: Any) -> Any:
    """`value` with every 16-bit tensor in it converted to float32, except in key-value caches."""
    short = set(_DTYPES.values())
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in short else tensor, value)


def _kept_in_fp32(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of modules declared to stay fp32, as T5's `wo`, and of batch norms, whose running
    statistics accumulate small numbers."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        if keeps_statistics(module):
            found += [*module.parameters(), *module.buffers()]
        declared: list[Any] = [
            getattr(module, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        ]
        names = sorted({name for each in declared for name in each or ()})
        if names:
            pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in names))
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            found += [tensor for name, tensor in tensors if pattern.search(name)]
    return found


def copy_as(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An ordinary copy of `model` in 16 bits, for saving: `copy_as(model, torch.bfloat16).save_pretrained(...)`.

    Tied parameters stay tied, and modules declared to stay fp32 do. The model itself, attached or not, does not
    change. The copy takes 2 bytes of host memory per parameter.

    Args:
        model: any model; the copy is on the host.
        dtype: `torch.bfloat16` or `torch.float16`.

    Raises:
        ValueError: for another dtype.
    """
    if dtype not in _DTYPES.values():
        raise ValueError(
            f"dtype must be torch.bfloat16 or torch.float16 (got {dtype}); for the weights as they are, save "
            "the model itself"
        )
    precision = Precision(model, dtype)
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to(stream.HOST, precision.of(p), copy=True), p.requires_grad)
    for module in model.modules():
        for name, b in module._buffers.items():
            if b is not None and is_in_checkpoints(module, name):
                memo[id(b)] = b.detach().to(stream.HOST, precision.of(b), copy=True)
    return copy.deepcopy(model, memo).to(stream.HOST)  # with the other buffers
