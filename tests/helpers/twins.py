"""Twins: a model that trains layer to layer, and the same one in plain torch with activation checkpointing.

Both do the same things in the same order, from the same random numbers. The plain one runs each layer by
micro-batches, too, and in the order of the relay, so that sums are added in the same order and all bits must be equal.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from hf_l2l import L2LConfig, NonFiniteError, attach_l2l, detach_l2l
from models import SMALL, VOCAB, Block
from plain import is_attached
from runs import OPTIMIZERS as MADE
from runs import groups_of

TOKENS = 6
OPTIMIZERS = MADE | {"fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True)}


class CountingConfig(hf.PretrainedConfig):
    """The config of `Counting`."""

    model_type = "counting"

    def __init__(
        self, vocab_size: int = VOCAB, hidden_size: int = 8, layers: int = 3, dropout: float = 0.1, **more: Any
    ) -> None:
        super().__init__(**{"tie_word_embeddings": True, **more})
        self.vocab_size, self.hidden_size, self.layers, self.dropout = vocab_size, hidden_size, layers, dropout


class Counting(hf.PreTrainedModel):
    """A stack of few operations, and an embedding that is tied to the head."""

    config_class = CountingConfig
    _tied_weights_keys = {"head.weight": "embed.weight"}  # transformers reads it from the class

    def __init__(self, config: CountingConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.blocks = nn.ModuleList(
            Block(config.hidden_size, config.dropout, buffers=True) for _ in range(config.layers)
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head = value

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return ModelOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def _bert(vocab: int, dropout: float) -> nn.Module:
    sizes = {**SMALL, "vocab_size": vocab, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


def _llama(vocab: int, dropout: float) -> nn.Module:
    sizes = {**SMALL, "vocab_size": vocab, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attention_dropout=dropout, use_cache=False))


KINDS: dict[str, Callable[[int, float], nn.Module]] = {
    "counting": lambda vocab, dropout: Counting(CountingConfig(vocab_size=vocab, dropout=dropout)),
    "bert": _bert,
    "llama": _llama,
}
_LAYERS = {"counting": "blocks", "bert": "bert.encoder.layer", "llama": "model.layers"}


def batch_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB - 8, (rows, TOKENS), generator=generator)  # known after any change of the vocabulary
    return {"input_ids": ids, "labels": ids.flip(1).contiguous()}


class _Relayed:
    """Replaces the forward of a layer of the plain twin: micro-batches, checkpointed, in the order of the relay."""

    def __init__(self, layer: nn.Module, ubatch_size: int | None) -> None:
        self.layer, self.ubatch_size = layer, ubatch_size
        self.run = partial(type(layer).forward, layer)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = hidden.shape[0]
        chunks = [
            pytree.tree_map(partial(self._rows, rows, start), ((hidden, *args), kwargs))
            for start in range(0, rows, self.ubatch_size or rows)
        ]
        # Random numbers and buffers are those of one forward of each micro-batch, from the first to the last.
        states, outputs = [], []
        with torch.no_grad():
            for given, named in chunks:
                states.append(torch.get_rng_state())
                outputs.append(self.run(*given, **named))
        if torch.is_grad_enabled():
            after = torch.get_rng_state()
            # Autograd runs first what was made last: the backward of the micro-batches is from the first to the last.
            for number in reversed(range(len(chunks))):
                given, named = chunks[number]
                torch.set_rng_state(states[number])
                outputs[number] = checkpoint(self._once_more, *given, **named, use_reentrant=False)
            torch.set_rng_state(after)
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def _rows(self, rows: int, start: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows > 1:
            return value[start : start + (self.ubatch_size or rows)]
        return value

    def _once_more(self, *args: Any, **kwargs: Any) -> Any:
        buffers = [(buffer, buffer.clone()) for buffer in self.layer.buffers()]
        try:
            return self.run(*args, **kwargs)
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


class Saved(NamedTuple):
    """What a program keeps of one of the twins."""

    vocab: int
    optimizer: str
    trained: set[str]
    """Names of the parameters that are not frozen."""
    weights: dict[str, torch.Tensor] | Path
    """In memory, or the folder of `save_pretrained`."""
    rest: dict[str, Any] | bytes
    """State of optimizer, scheduler and scaler; from `torch.save` if the weights are in a folder."""

    def states(self) -> dict[str, Any]:
        if isinstance(self.rest, bytes):
            return torch.load(io.BytesIO(self.rest), weights_only=True)
        return copy.deepcopy(self.rest)


class Side:
    """One of the twins: in plain torch, unless `options` of `L2LConfig` are given."""

    def __init__(self, model: nn.Module, optimizer: str, ubatch_size: int | None) -> None:
        self.model = model.train()
        self.kind = {"Counting": "counting", "BertForMaskedLM": "bert"}.get(type(model).__name__, "llama")
        self.skipped = 0
        self.place(ubatch_size=ubatch_size)
        self.optimize(optimizer)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_submodule(_LAYERS[self.kind])

    def place(self, **options: Any) -> None:
        """Run with other options from now on."""
        for layer in self.layers:
            layer.forward = _Relayed(layer, options["ubatch_size"])

    def optimize(self, name: str) -> None:
        """A new optimizer of all parameters, and a new scheduler."""
        self.name = name
        self.optimizer = self.wrapped(OPTIMIZERS[name](groups_of(self.model)))
        self.scheduler: LRScheduler = StepLR(self.optimizer, 2, 0.75)

    def wrapped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    # ---- training

    def backward(self, batch: dict[str, torch.Tensor], factor: float, *, is_last: bool) -> str:
        """One forward and backward; returns the loss, in which one that is no number equals none."""
        loss = self.model(**batch).loss * factor
        loss.backward()
        return repr(loss.item())

    def clip(self, max_norm: float, *, by_torch: bool) -> str:
        return repr(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item())

    def step(self, *, skips: bool) -> None:
        """A step, which a gradient that is not finite makes an error or `skips`."""
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters()):
            self.optimizer.step()
        elif not skips:
            raise NonFiniteError(0, "the plain twin")
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        self.scheduler.step()

    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            logits = self.model(**batch).logits
        self.model.train()
        return logits.detach().cpu()

    # ---- what is kept

    def save(self, folder: Path | None) -> Saved:
        rest: Any = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        rest["scaler"] = self.scaler_state()
        weights: Any = folder
        if folder is None:
            weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            rest = copy.deepcopy(rest)
        else:
            self.model.save_pretrained(folder)
            buffer = io.BytesIO()
            torch.save(rest, buffer)
            rest = buffer.getvalue()
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return Saved(self.model.config.vocab_size, self.name, trained, weights, rest)

    def load(self, saved: Saved) -> None:
        """Go on from what was saved, with the same objects."""
        if saved.optimizer != self.name:
            self.optimize(saved.optimizer)
        weights = saved.weights
        if isinstance(weights, Path):
            weights = type(self.model).from_pretrained(weights).state_dict()
        self.model.load_state_dict(weights)
        states = saved.states()
        self.optimizer.load_state_dict(states["optimizer"])
        self.scheduler.load_state_dict(states["scheduler"])
        self.load_scaler(states["scaler"])
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in saved.trained)

    def scaler_state(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_scaler(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]


class Layered(Side):
    """The twin that runs layer to layer."""

    def __init__(self, model: nn.Module, optimizer: str, options: dict[str, Any]) -> None:
        self.options = options
        super().__init__(model, optimizer, options["ubatch_size"])

    def place(self, **options: Any) -> None:
        options = {**self.options, **options}
        was_attached = is_attached(self.model)
        detach_l2l(self.model)
        self.options = options
        classes = ("Block",) if self.kind == "counting" else None
        self.eps = attach_l2l(self.model, L2LConfig(**options, layer_classes=classes))
        if was_attached:
            self.eps.wrap(self.optimizer)

    def wrapped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.eps.wrap(optimizer)

    def backward(self, batch: dict[str, torch.Tensor], factor: float, *, is_last: bool) -> str:
        with nullcontext() if is_last else self.eps.accumulate():
            return super().backward(batch, factor, is_last=is_last)

    def clip(self, max_norm: float, *, by_torch: bool) -> str:
        return super().clip(max_norm, by_torch=True) if by_torch else repr(self.eps.clip_grad_norm_(max_norm).item())

    def step(self, *, skips: bool) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def scaler_state(self) -> dict[str, Any]:
        return {"skipped": 0} if self.eps.scaler is None else self.eps.scaler.state_dict()

    def load_scaler(self, state: dict[str, Any]) -> None:
        if self.eps.scaler is not None:
            self.eps.scaler.load_state_dict(state)
