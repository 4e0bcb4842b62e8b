"""What passes between layers in host memory, and what is computed before, between and after them by micro-batches, has
the values and gradients of the plain model, whoever reads the rows."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import models
from hf_l2l.logits import chunks
from hf_l2l.rows.host_rows import HostRows
from hf_l2l.rows.row_modules import input_embeddings
from memory_switches import forced_copies
from models import (
    EXACT,
    ROWS,
    SMALL,
    TOLERANCE,
    VOCAB,
    WITHOUT_DROPOUT,
    assert_same_bits,
    attached,
    batch_for,
    bert,
    gpt2,
    gradients,
    llama,
    relative_error,
    t5,
    vit,
)
from tiers import cpu_suffices

ON_HOST = {"stash": "host", "boundary": "host", "ubatch_size": 3}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device has memory of its own, and few tokens make a chunk of a loss."""
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
    with forced_copies():
        yield


def frozen_table() -> nn.Module:
    model = bert()
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model


def noisy() -> nn.Module:
    """Has a hook that adds to the embedding, as NEFTune does."""
    model = llama()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 0.25)
    return model


class Table(nn.Embedding):
    """Is asked for its rows in another way. It counts them in a buffer, and has a weight that it may not use."""

    def __init__(self, rows_of: Callable[..., torch.Tensor]) -> None:
        super().__init__(VOCAB, 16)
        self.rows_of, self.spare = rows_of, nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += len(ids)
        return self.rows_of(self, ids, super().forward(ids))


def by_frequency(table: nn.Embedding, ids: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(ids, table.weight, None, None, 2.0, True)


def even(table: nn.Embedding, ids: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    if len(ids) % 2:
        raise ValueError("rows come in pairs")
    return found


def embedded_by(rows_of: Callable[..., torch.Tensor]) -> nn.Module:
    model = llama()
    model.model.embed_tokens = Table(rows_of)
    return model


def reads_the_norm() -> nn.Module:
    """Its embedding reads a weight of the model around it."""
    model = llama()
    model.model.embed_tokens = Table(lambda table, ids, found: found * table.owner[0].norm.weight)
    model.model.embed_tokens.owner = [model.model]
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "bert, tied": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **WITHOUT_DROPOUT)), True),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), True),
    "gpt2, which adds positions": (gpt2, True),
    "t5, a table of two stacks": (t5, True),
    "vit": (vit, True),
    "frozen table": (frozen_table, True),
    "rows are counted, and a weight not used": (lambda: embedded_by(lambda table, ids, found: found), True),
    "a hook that adds noise": (noisy, True),
    "roberta, whose positions follow padding": (models.roberta, True),
    "rows are mixed": (lambda: embedded_by(lambda table, ids, found: found - found.mean(0)), False),
    "gradients are scaled by frequency": (lambda: embedded_by(by_frequency), False),
    "rows come in pairs": (lambda: embedded_by(even), False),
    "weights of others are read": (reads_the_norm, False),
}
"""Models, and whether their embeddings run by micro-batches: then these return `HostRows`."""


def kinds_of(model: nn.Module) -> list[type]:
    """Collects what the calls of the embeddings of a model return, and of its copies."""
    found: list[type] = []
    module = getattr(model.base_model, "embeddings", None) or model.get_input_embeddings()
    module.register_forward_hook(lambda *call: found.append(type(call[2])) if torch.is_grad_enabled() else None)
    return found


@pytest.fixture
def made_real(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was told of rows that were needed on the device as a whole."""
    return lambda: [text for text in caplog.messages if "they stay on the device" in text]


def assert_steps_as_plain(
    model: nn.Module,
    batches: list[dict[str, Any]],
    loss_of: Callable[[Any], torch.Tensor] = lambda loss: loss,
    **options: Any,
) -> nn.Module:
    """One step after the other; returns the plain model."""
    plain = copy.deepcopy(model)
    attached(model, **{**ON_HOST, **options})
    for batch in batches:
        given, losses = {**batch}, []
        is_training = given.pop("train", True)
        for each in (model, plain):
            each.train(is_training).zero_grad()
            losses.append(loss_of(each(**given)))
            losses[-1].backward()
        # Losses of transformers are fp32, and those of chunks are added in another order.
        tolerance = TOLERANCE[losses[1].dtype]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=tolerance)
        assert relative_error(gradients(model), gradients(plain)) < tolerance
        assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    return plain


def assert_as_plain(model: nn.Module, steps: int = 2) -> None:
    """Losses and gradients, and the logits of an evaluation after them."""
    batch = batch_for(model)
    if "input_ids" in batch:
        batch["input_ids"][:, -1] = 1  # padding of RoBERTa
    plain = assert_steps_as_plain(model, [batch] * steps, lambda out: out.loss)
    with torch.no_grad():
        found, expected = (each.eval()(**batch).logits for each in (model, plain))
    torch.testing.assert_close(found.cpu(), expected, rtol=EXACT, atol=EXACT)


@cpu_suffices
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_run_by_micro_batches_where_their_rows_are_independent(name, made_real):
    make, runs_by_rows = MODELS[name]
    model = make().double()
    kinds = kinds_of(model)
    assert_as_plain(model)
    plain_calls = len(kinds) // 2
    assert kinds.count(HostRows) == (plain_calls if runs_by_rows else 0)
    assert not runs_by_rows or made_real() == []


@pytest.mark.parametrize(("name", "ubatch_size"), [("bert, tied", 5), ("llama, tied", 3)])
def test_a_loss_of_ones_own_in_float64(name, ubatch_size, made_real):
    model = MODELS[name][0]().double()
    batch = batch_for(model)
    labels = batch.pop("labels")

    def loss(found: Any) -> torch.Tensor:
        logits = found.logits[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1).to(logits.device))

    assert_steps_as_plain(model, [batch] * 2, loss, ubatch_size=ubatch_size)
    assert made_real() == []


@cpu_suffices
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_has_the_same_mask_in_the_recompute(name):
    """Within the embeddings, or between them and the layers: the gradient of a table of positions, or of a bias, is
    the sum of what dropout let through, which the first hidden states show."""
    model = gpt2() if name == "gpt2" else bert(dropout=0.5)
    inner = model.double().train().base_model
    if name == "gpt2":
        inner.drop.p = 0.5
    ids, kinds = batch_for(model)["input_ids"], kinds_of(model)
    attached(model, **ON_HOST)
    for _ in range(2):
        model.zero_grad()
        states = inner(ids, output_hidden_states=True).hidden_states
        states[0].sum().backward()
        let_through = (states[0].cpu() != 0).double().sum(0) * 2
        if name == "gpt2":
            torch.testing.assert_close(inner.wpe.weight.grad[: ids.shape[1]], let_through)
        else:
            torch.testing.assert_close(inner.embeddings.LayerNorm.bias.grad, let_through.sum(0))
    assert set(kinds) == {HostRows}


class Sums(nn.Module):
    """Computes with its embedding in a way that is not known to keep rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **rest: Any) -> Any:
        embedded = self.model.model.embed_tokens(input_ids)
        return self.model(inputs_embeds=embedded.cumsum(1), labels=labels)


@cpu_suffices
def test_what_is_needed_as_a_whole_stays_on_the_device_and_is_told_once(made_real):
    assert_as_plain(Sums().double(), steps=3)
    assert made_real() == [
        "all rows of what Embedding returns are needed at once, so they stay on the device from now on (6.0 KiB)"
    ]


# ---- modules after the layers


class After(nn.Module):
    """An encoder, a part after its layers that computes in a way of its own, and a loss of both."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.part = bert().bert, Part(compute)
        self.model.pooler = None

    def forward(self, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return self.part(hidden, **given).square().mean() + hidden.mean(1).square().mean()


class Part(nn.Module):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.compute = nn.LayerNorm(16), compute

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.compute(self, hidden, **given)


def shifted(part: Part, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """By positions that are given without rows."""
    return hidden + part.norm.weight * places[:, None]


def cut(part: Part, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each row to a length of a list."""
    return part.norm(torch.stack([row[:n].mean(0) for row, n in zip(hidden, lengths, strict=False)]))


def mixed_in_training(part: Part, hidden: torch.Tensor) -> torch.Tensor:
    return part.norm(hidden - hidden.mean(0) if part.training else hidden)


def noting(part: Part, hidden: torch.Tensor) -> torch.Tensor:
    """Leaves a statistic of its rows behind, which it uses."""
    part.seen = hidden.detach().max()
    return part.norm(hidden) * part.seen


def checkpointed(part: Part, hidden: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: part.norm(x).tanh() * x, hidden, use_reentrant=False)


class Tabled(nn.Module):
    """Adds a table of positions (tokens, width) that trains to what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.table = bert().bert, nn.Embedding(6, 16)
        self.model.pooler = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return ((hidden + self.table.weight) * 2)[:, 0].square().mean()


class Turned(nn.Module):
    """Gives its layers tokens first, as FSMT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class Twice(nn.Module):
    """Runs a backward in the midst of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        self.model(**batch).loss.backward()
        return self.model(**batch).loss


class BetweenLayers(nn.Module):
    """Computes with the outputs of its layers before the next one gets them."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.model, self.in_place = llama(), in_place
        self.model.model.norm.requires_grad_(False)  # it is not used

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(input_ids)
        places = inner.rotary_emb(hidden, torch.arange(input_ids.shape[1], device=hidden.device)[None])
        for layer in inner.layers:
            hidden = layer(hidden, position_embeddings=places)
            hidden = hidden.mul_(1.5) if self.in_place else hidden * 1.5
        return self.model.lm_head(hidden).square().mean()


def ids(tokens: int = 6) -> torch.Tensor:
    return torch.randint(5, VOCAB, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


TWICE = [{"input_ids": ids()}] * 2
CALLS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "positions, then as many tokens as rows": (
        lambda: After(shifted),
        [{"input_ids": ids(n), "places": torch.arange(n).double()} for n in (6, ROWS, 6)],
    ),
    "a list with an entry per row": (
        lambda: After(cut),
        [{"input_ids": ids(), "lengths": lengths} for lengths in ([3] * ROWS, list(range(1, 5)) * 2)],
    ),
    "mixed in training alone": (
        lambda: After(mixed_in_training),
        [{"input_ids": ids(), "train": train} for train in (False, True, False)],
    ),
    "statistics": (lambda: After(noting), TWICE),
    "activation checkpointing": (lambda: After(checkpointed), TWICE),
    "a table without rows": (Tabled, TWICE),
    "a backward inside the forward": (Twice, [{"input_ids": ids(), "labels": ids()}] * 2),
    "layers that take tokens first": (Turned, [{"input_ids": ids(5)}] * 2),
    "computed with between layers": (lambda: BetweenLayers(in_place=False), TWICE),
    "changed in place between layers": (lambda: BetweenLayers(in_place=True), TWICE),
}


@cpu_suffices
@pytest.mark.parametrize("name", CALLS)
def test_what_runs_by_micro_batches_is_found_for_each_kind_of_call(name, made_real):
    make, batches = CALLS[name]
    model = make().double()
    classes = {"TransformerEncoderLayer", "BertLayer", "LlamaDecoderLayer"} & {
        type(m).__name__ for m in model.modules()
    }
    assert_steps_as_plain(model, batches, layer_classes=tuple(classes))
    assert made_real() == [] or make is not Tabled


@cpu_suffices
def test_hidden_states_that_the_program_reads_have_the_gradients_of_plain_ones():
    """From the second time on, the last one is on the device: it is what programs read."""
    read: list[list[bool]] = []

    def loss(found: Any) -> torch.Tensor:
        states = found.hidden_states
        read.append([isinstance(state, HostRows) for state in states])
        assert all(state.is_waiting for state in states if isinstance(state, HostRows))
        return sum(state[:, 0].square().mean() * (i + 1) for i, state in enumerate(states))

    model = bert(num_hidden_layers=4).double()
    batch = {**batch_for(model), "output_hidden_states": True}
    assert_steps_as_plain(model, [batch] * 2, loss)
    assert read[::2] == [[True] * 5, [True] * 4 + [False]]


def test_hidden_states_that_are_not_cut_stay_on_the_device():
    model = attached(bert(num_hidden_layers=3), stash="host", boundary="host")
    for mode in (nullcontext(), torch.no_grad()):
        with mode:
            states = model(**batch_for(model), output_hidden_states=True).hidden_states
        assert not any(isinstance(state, HostRows) for state in states)


# ---- programs


@cpu_suffices
def test_activation_checkpointing_around_the_model():
    model = bert().double()
    plain, batch = copy.deepcopy(model), batch_for(model)
    plain(**batch).loss.backward()
    attached(model, **ON_HOST)
    torch.utils.checkpoint.checkpoint(lambda: model(**batch).loss, use_reentrant=False).backward()
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


@cpu_suffices
def test_hidden_states_in_fp32_are_no_use_by_the_model():
    model = attached(bert(num_hidden_layers=3), **ON_HOST, cmp="bf16")
    for _ in range(2):
        states: list[torch.Tensor] = []
        with model.bert.encoder.layer[1].register_forward_hook(lambda m, args, output: states.append(output)):  # noqa: B023
            model(**batch_for(model), output_hidden_states=True)
        assert isinstance(states[0], HostRows)


@cpu_suffices
def test_hooks_inside_a_module_are_called_once_with_all_rows():
    model, shapes = attached(bert().double(), **ON_HOST), []
    model.bert.pooler.dense.register_forward_hook(lambda m, args, output: shapes.append(tuple(output.shape)))
    model(**batch_for(model)).loss.backward()
    assert shapes == [(ROWS, 16)]


@cpu_suffices
def test_a_weight_frozen_after_the_forward_gets_no_gradient():
    model = attached(bert(), **ON_HOST)
    loss = model(**batch_for(model)).loss
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    loss.backward()
    assert model.bert.embeddings.word_embeddings.weight.grad is None
    assert model.bert.embeddings.position_embeddings.weight.grad is not None


@cpu_suffices
def test_tables_whose_rows_cannot_be_added_run_whole():
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        model = llama()
        assert input_embeddings(list(model.modules()), []) == {model.model.embed_tokens}
        setattr(model.model.embed_tokens, option, True)
        assert input_embeddings(list(model.modules()), []) == set()


@cpu_suffices
def test_inputs_do_not_live_as_long_as_the_graph():
    model = attached(vit(), **ON_HOST)
    found: list[weakref.ref[torch.Tensor]] = []
    model.vit.embeddings.register_forward_pre_hook(lambda m, args: found.append(weakref.ref(args[0])))
    loss = model(**batch_for(model)).loss
    loss.backward()
    gc.collect()
    assert found[0]() is None and loss is not None
