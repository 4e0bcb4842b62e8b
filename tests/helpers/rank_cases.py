"""A training that ranks make together, or one process with the same batches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

from hf_l2l import L2LConfig, attach_l2l, detach_l2l
from hf_l2l.eps.server import EagerParamServer
from models import FAMILIES, SMALL, batch_for, bert, llama
from rank_pool import digest


def albert() -> nn.Module:
    """One layer, called three times."""
    sizes = {**SMALL, "num_hidden_layers": 3}
    config = hf.AlbertConfig(
        **sizes,
        embedding_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )
    return hf.AlbertForSequenceClassification(config)


def tied() -> nn.Module:
    """A head that is the embedding."""
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.linear(rows).tanh()


class Skipping(nn.Module):
    """Calls only those of its layers that a batch names, and never its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, rows: torch.Tensor, named: list[int]) -> Any:
        for number in named:
            rows = self.layers[number](rows)
        return (self.head(rows).square().mean(),)


def large() -> nn.Module:
    """A head and an embedding of more than `masters.LARGE` elements, in several pieces."""
    config = hf.LlamaConfig(
        **{**SMALL, "hidden_size": 64, "vocab_size": 20000}, num_key_value_heads=1, max_position_embeddings=32
    )
    return hf.LlamaForCausalLM(config)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank part that is trained, as in LoRA."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.frozen(rows) + self.up(self.down(rows))


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
    "skipping": Skipping,
    "large": large,
    "dropout": lambda: bert(0.2),
}


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


def batches_of(name: str, model: nn.Module, step: int, count: int) -> list[dict[str, Any]]:
    """The batches of a step, one per rank; the last one of the third step has fewer rows."""
    if name == "skipping":
        generator = torch.Generator().manual_seed(step)
        named = [[0, 1, 2, 3], [0, 2], [3, 1], [2]]
        return [{"rows": torch.randn(4, 16, generator=generator), "named": named[n % 4]} for n in range(count)]
    rows = [4 if step % 3 != 2 or n < count - 1 else 3 for n in range(count)]
    return [batch_for(model, rows=rows[n], seed=100 * step + n) for n in range(count)]


@contextmanager
def _attached(model: nn.Module, options: dict[str, Any]) -> Iterator[EagerParamServer]:
    named = {"layer_classes": ("Block",)} if isinstance(model, Skipping) else {}
    yield attach_l2l(model, L2LConfig(**options, **named))
    detach_l2l(model)


def trained(
    name: str, options: dict[str, Any], size: int, steps: int = 3, accumulated: int = 1, max_norm: float | None = 0.5
) -> dict[str, Any]:
    """Train with the batches of `size` ranks: in a process group this rank's, else all of them, accumulated.

    Args:
        name: the model.
        options: of `L2LConfig`.
        size: the ranks.
        steps: of the optimizer.
        accumulated: micro-steps of each rank in a step; the order of batches is then that of the ranks in each.
        max_norm: for clipping; None clips nothing.

    Returns:
        digests of losses, by rank in each step, of norms, weights and state; the last two also when they are saved.
    """
    is_rank = distributed.is_initialized()
    rank = distributed.get_rank() if is_rank else 0
    torch.manual_seed(0)
    model = MODELS[name]()
    if rank:  # whose values do not count
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    found: dict[str, Any] = {"losses": [], "norms": [], "p.grad": []}
    with _attached(model, options) as eps:
        model.train()
        optimizer = eps.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(steps):
            losses: dict[int, list[str]] = {n: [] for n in range(size)}
            for micro in range(accumulated):
                last = micro == accumulated - 1
                given = list(enumerate(batches_of(name, model, step * accumulated + micro, size)))
                mine = [given[rank]] if is_rank else given
                for number, batch in mine:
                    is_last = last and number == mine[-1][0]
                    out = model(**batch)
                    loss = out[0]
                    losses[number].append(digest(loss))
                    with nullcontext() if is_last else eps.accumulate():
                        (loss / accumulated / (1 if is_rank else size)).backward()
            found["losses"].append(losses[rank] if is_rank else losses)
            if max_norm is not None and (eps.team is None or len(eps.team.hosts) == 1):
                found["p.grad"].append(digest(*(p.grad for p in model.parameters() if p.grad is not None)))
            if max_norm is not None:
                found["norms"].append(eps.clip_grad_norm_(max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        found["weights"] = digest(*model.state_dict().values())
        found["state"] = digest(*(each[key] for _, each in sorted(state.items()) for key in sorted(each)))
        found["skipped"] = 0 if eps.loss_scale is None else eps.loss_scale.skipped
    found["detached"] = digest(*model.state_dict().values())
    return found


def trained_on_two(name: str, options: dict[str, Any], size: int) -> dict[str, Any]:
    """`trained`, with two devices for each rank."""
    rank = distributed.get_rank()
    return trained(name, {**options, "device": (f"sim:{rank}", f"sim:{rank + size}")}, size)


def assert_same(of_ranks: list[dict[str, Any]], alone: dict[str, Any], *, on_one_host: bool = True) -> None:
    """Whether all ranks have the bits of one process."""
    for rank, found in enumerate(of_ranks):
        assert found["losses"] == [losses[rank] for losses in alone["losses"]], f"rank {rank}"
        for what in ("norms", "p.grad", "weights", "state", "skipped", "detached"):
            if what == "p.grad" and not on_one_host:
                continue  # each host has its own part
            assert found[what] == alone[what], f"{what} of rank {rank}"
