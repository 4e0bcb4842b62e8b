"""A training that ranks make together, or one process with the same batches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

from hf_l2l import EagerParamServer, L2LConfig, Lamb, attach_l2l, detach_l2l
from host_cases import on_hosts
from models import FAMILIES, SMALL, batch_for, bert, llama
from rank_pool import digest


def albert() -> nn.Module:
    """One layer, called three times."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    sizes = {**SMALL, "num_hidden_layers": 3}
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**sizes, **none, embedding_size=8))


def tied() -> nn.Module:
    """A head that is the embedding."""
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class Block(nn.Module):
    """A layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.linear(rows).tanh()


class Two(nn.Module):
    """A layer with two weights of one size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.second(self.first(rows).tanh())


class Many(nn.Module):
    """A layer with many small weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(400))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(4, dim=-1)
        return rows + torch.cat(parts, -1) * sum(expert(parts[0]).mean() for expert in self.experts)


class Layers(nn.Module):
    """Calls those of its layers that a batch names, and a head; `unused` is a module that it never calls."""

    def __init__(
        self, count: int, layer: Callable[..., nn.Module] = Block, width: int = 16, outputs: int = 3, adapters: int = 0
    ) -> None:
        super().__init__()
        layers = [layer(width) for _ in range(count)]
        if layer is Two:
            self.alias = layers[0].second.weight  # the model has a weight before its layers
        self.layers = nn.ModuleList(layers)
        self.unused = nn.Linear(16, 16)
        self.adapters = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(adapters))
        self.head = nn.Linear(width, outputs, bias=False)

    def forward(self, rows: torch.Tensor, named: Iterable[int] | None = None) -> Any:
        for number in range(len(self.layers)) if named is None else named:
            rows = self.layers[number](rows)
        for adapter in self.adapters:
            rows = adapter(rows)
        return (self.head(rows),)


class Skipping(Layers):
    """Returns the loss: at the outputs of a model, 1/n enters, which is no power of two for three ranks."""

    def forward(self, rows: torch.Tensor, named: Iterable[int] | None = None) -> Any:
        return (super().forward(rows, named)[0].square().mean(),)


def large() -> nn.Module:
    """A head and an embedding of more than `masters.LARGE` elements, in several pieces."""
    sizes = {**SMALL, "hidden_size": 64, "vocab_size": 16500}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=32))


class Adapted(nn.Sequential):
    """The output of a frozen linear layer, and of a low-rank part that is trained, as in LoRA."""

    def __init__(self, frozen: nn.Linear) -> None:
        width = frozen.in_features, frozen.out_features
        super().__init__(nn.Linear(width[0], 2, bias=False), nn.Linear(2, width[1], bias=False))
        self.frozen = frozen

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.frozen(rows) + self[1](self[0](rows))


def adapted() -> nn.Module:
    """A frozen Llama, of which two projections of each layer have parts that are trained."""
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **FAMILIES,
    "adapted": adapted,
    "albert": albert,
    "tied": tied,
    "skipping": lambda: Skipping(5),
    "large": large,
    "dropout": lambda: bert(0.2),
}
PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Layers(4),
    "two": lambda: Layers(3, Two),
    "many": lambda: Layers(1, Many),
    "24 layers": lambda: Layers(24),
    "large head": lambda: Layers(8, width=256, outputs=4200),
}
"""Models of programs that call them by themselves."""


MODES: dict[str, dict[str, Any]] = {
    "serial": {"eps_update": "serial"},
    "deferred": {"eps_update": "deferred"},
    "ubatches": {"ubatch_size": 2, "eps_update": "deferred"},
    "bf16": {"cmp": "bf16", "eps_update": "deferred"},
    "bf16 per sweep": {"cmp": "bf16", "host_copies": "per_sweep"},
    "16-bit gradients and state": {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "eps_update": "deferred"},
    "host stash": {"stash": "host", "ubatch_size": 2},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "without state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adafactor": lambda p: hf.Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
    "lamb": lambda p: Lamb(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def mapped() -> int:
    """Maps of this process of memory that ranks share."""
    return Path("/proc/self/maps").read_text().count("memfd:hf_l2l")


def rank_here() -> int:
    """The number of this rank; 0 in one process."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def state_digest(state: dict[Any, dict[str, Any]]) -> str:
    """The bits of an optimizer's state."""
    values = [each[key] for _, each in sorted(state.items()) for key in sorted(each)]
    return digest(*(torch.as_tensor(value) for value in values if value is not None))


class Ranked:
    """A model of this rank; or of one process that plays all ranks, one after the other."""

    def __init__(
        self, model: str | Callable[[], nn.Module] = "bert", size: int = 2, *, optimizer: str = "adamw", **options: Any
    ) -> None:
        """`model` is one of MODELS or PROGRAMS, or makes one; `options` are of `L2LConfig`."""
        is_rank = distributed.is_initialized()
        self.rank = rank_here()
        self.numbers = [self.rank] if is_rank else list(range(size))
        """The ranks that this process plays."""
        self.share = 1 if is_rank else size
        torch.manual_seed(0)
        self.model = ({**MODELS, **PROGRAMS}[model] if isinstance(model, str) else model)().train()
        if isinstance(self.model, Layers):
            options.setdefault("layer_classes", (type(self.model.layers[0]).__name__,))
        self.options = options
        self.eps: EagerParamServer = attach_l2l(self.model, L2LConfig(**options))
        self.wrap(optimizer)

    def wrap(self, kind: str = "adamw", parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Take an optimizer, of all parameters unless others are given."""
        given = self.model.parameters() if parameters is None else parameters
        self.optimizer = self.eps.wrap(OPTIMIZERS[kind](given))

    def loss(self, seed: int, number: int, named: Iterable[int] | None = None) -> torch.Tensor:
        """Of the batch of a rank."""
        if isinstance(self.model, Layers):
            generator = torch.Generator().manual_seed(10 * seed + number)
            rows = torch.randn(4, self.model.head.in_features, generator=generator)
            return self.model(rows, named)[0].square().mean()
        found: torch.Tensor = self.model(**batch_for(self.model, rows=4, seed=100 * seed + number)).loss
        return found

    def backward(
        self, seed: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss, **batch: Any
    ) -> None:
        """Of all batches of a micro-step, the last one of its step."""
        for number in self.numbers:
            with nullcontext() if number == self.numbers[-1] else self.eps.accumulate():
                (change(self.loss(seed, number, **batch)) / self.share).backward()

    def step(self, max_norm: float | None = None) -> None:
        if max_norm is not None:
            self.eps.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, seeds: Iterable[int], max_norm: float | None = None) -> None:
        """One for each seed of its batches."""
        for seed in seeds:
            self.backward(seed)
            self.step(max_norm)

    def gradients(self) -> str:
        """The bits of all that are there."""
        return digest(*(p.grad for p in self.model.parameters() if p.grad is not None))

    def ended(self) -> tuple[str, str]:
        """Digests of weights and state; the model is detached."""
        found = state_digest(self.optimizer.state_dict()["state"])
        detach_l2l(self.model)
        return digest(*self.model.parameters()), found


def batches_of(name: str, model: nn.Module, step: int, count: int) -> list[dict[str, Any]]:
    """The batches of a step, one per rank; the last one of the third step has fewer rows."""
    if name == "skipping":
        generator = torch.Generator().manual_seed(step)
        named = [[0, 1, 2, 3], [0, 2], [3, 1], [2]]
        return [{"rows": torch.randn(4, 16, generator=generator), "named": named[n % 4]} for n in range(count)]
    rows = [4 if step % 3 != 2 or n < count - 1 else 3 for n in range(count)]
    return [batch_for(model, rows=rows[n], seed=100 * step + n) for n in range(count)]


def trained(
    name: str, options: dict[str, Any], size: int, steps: int = 3, accumulated: int = 1, max_norm: float | None = 0.5
) -> dict[str, Any]:
    """Train with the batches of `size` ranks: in a process group this rank's, else all of them, accumulated. Digests
    of losses, by rank in each step, of norms, weights and state.

    Of `options`, "devices" is how many devices each rank has. With several `accumulated` micro-steps in a step, the
    order of batches is that of the ranks in each. Without `max_norm` nothing is clipped.
    """
    options = dict(options)
    if count := options.pop("devices", 0):
        apart = size if distributed.is_initialized() else 1
        options["device"] = tuple(f"sim:{rank_here() + place * apart}" for place in range(count))
    of = Ranked(partial(_with_other_values, MODELS[name]) if rank_here() else name, size, **options)
    model, eps = of.model, of.eps
    found: dict[str, Any] = {"losses": [], "norms": [], "p.grad": []}
    for step in range(steps):
        losses: dict[int, list[str]] = {n: [] for n in range(size)}
        for micro in range(accumulated):
            batches = batches_of(name, model, step * accumulated + micro, size)
            for number in of.numbers:
                loss = model(**batches[number])[0]
                losses[number].append(digest(loss))
                is_last = micro == accumulated - 1 and number == of.numbers[-1]
                with nullcontext() if is_last else eps.accumulate():
                    (loss / accumulated / of.share).backward()
        found["losses"].append(losses[of.rank] if distributed.is_initialized() else losses)
        if max_norm is not None and (eps.team is None or len(eps.team.hosts) == 1):
            found["p.grad"].append(of.gradients())
        if max_norm is not None:
            found["norms"].append(eps.clip_grad_norm_(max_norm).item())
        of.step()
    found["weights"] = digest(*model.state_dict().values())
    found["state"] = state_digest(of.optimizer.state_dict()["state"])
    found["skipped"] = 0 if eps.loss_scale is None else eps.loss_scale.skipped
    detach_l2l(model)
    found["detached"] = digest(*model.state_dict().values())
    return found


@torch.no_grad()
def _with_other_values(make: Callable[[], nn.Module]) -> nn.Module:
    """The model of a rank whose values do not count."""
    model = make()
    for p in model.parameters():
        p.add_(1.0)
    return model


def assert_same(of_ranks: list[dict[str, Any]], alone: dict[str, Any], *, on_one_host: bool = True) -> None:
    """Whether all ranks have the bits of one process."""
    for rank, found in enumerate(of_ranks):
        assert found["losses"] == [losses[rank] for losses in alone["losses"]], f"rank {rank}"
        for what in ("norms", "p.grad", "weights", "state", "skipped", "detached"):
            if what == "p.grad" and not on_one_host:
                continue  # each host has its own part
            assert found[what] == alone[what], f"{what} of rank {rank}"


def same(pool: Any, function: Callable[..., Any], *args: Any, size: int = 2, sim: bool = False, hosts: int = 1) -> Any:
    """What one process returns, and each of so many ranks, too."""
    alone = pool(1, sim=sim).run(function, *args)[0]
    assert pool(size, sim=sim).run(on_hosts, hosts, function, *args) == [alone] * size
    return alone
