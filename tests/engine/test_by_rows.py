"""Embeddings that run by micro-batches have the values and gradients of plain ones, and hold one sum per table."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import models
from hf_l2l.engine.by_rows import ByRows
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
def _apart() -> Iterator[None]:
    """The device has memory of its own."""
    with forced_copies():
        yield


def bert_mlm() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def frozen_table() -> nn.Module:
    model = bert()
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model


def noisy() -> nn.Module:
    """Has a hook that adds to the embedding, as NEFTune does."""
    model = llama()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 0.25)
    return model


def embedded_by(kind: Callable[..., nn.Module]) -> nn.Module:
    model = llama()
    model.model.embed_tokens = kind(VOCAB, 16)
    return model


class WithSpare(nn.Embedding):
    """Has a weight that it does not use."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.spare = nn.Parameter(torch.ones(16))


class MixedRows(nn.Embedding):
    """Subtracts the mean of all rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        return found - found.mean(0, keepdim=True)


class SaysFrequency(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight, None, None, 2.0, True)


class EvenRows(nn.Embedding):
    """Takes an even number of rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) % 2:
            raise ValueError("rows come in pairs")
        return super().forward(ids)


class Counting(nn.Embedding):
    """Counts its rows in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rows += len(ids)
        return super().forward(ids)


class ReadsTheNorm(nn.Module):
    """Reads a weight of the model around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.owner = nn.Embedding(VOCAB, 16), [inner]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * self.owner[0].norm.weight


def reads_the_norm() -> nn.Module:
    model = llama()
    model.model.embed_tokens = ReadsTheNorm(model.model)
    return model


BY_UBATCH: dict[str, Callable[[], nn.Module]] = {
    "bert, tied": bert_mlm,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2, which adds positions": gpt2,
    "t5, a table of two stacks": t5,
    "vit": vit,
    "frozen table": frozen_table,
    "a weight that is not used": lambda: embedded_by(WithSpare),
    "a hook that adds noise": noisy,
    "rows are counted": lambda: embedded_by(Counting),
    "roberta, whose positions follow padding": models.roberta,
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "rows are mixed": lambda: embedded_by(MixedRows),
    "gradients are scaled by frequency": lambda: embedded_by(SaysFrequency),
    "rows come in pairs": lambda: embedded_by(EvenRows),
    "weights of others are read": reads_the_norm,
}
MODELS = {**BY_UBATCH, **WHOLE}


class Kinds:
    """What the calls of embeddings return, and what was needed on the device as a whole. Few tokens make a chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.found: list[type] = []
        self.caplog = caplog
        monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
        run = ByRows.run

        def noted(by_rows: ByRows, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            result = run(by_rows, module, forward, args, kwargs)
            call = by_rows.shell.call
            is_part = self.runs > 0 or call is None or call.replay is not None
            if module in by_rows.embeddings and not is_part and torch.is_grad_enabled():
                self.found.append(type(result))
            return result

        self.runs, inside = 0, ByRows.inside

        @contextmanager
        def running(by_rows: ByRows) -> Iterator[None]:
            self.runs += 1
            try:
                with inside(by_rows):
                    yield
            finally:
                self.runs -= 1

        monkeypatch.setattr(ByRows, "inside", running)
        monkeypatch.setattr(ByRows, "run", noted)

    @property
    def made_real(self) -> list[str]:
        return [each.getMessage() for each in self.caplog.records if "they stay on the device" in each.getMessage()]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Kinds:
    return Kinds(monkeypatch, caplog)


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
@pytest.mark.parametrize("name", BY_UBATCH)
def test_models_whose_embeddings_run_by_micro_batches(name, kinds):
    assert_as_plain(MODELS[name]().double())
    assert set(kinds.found) == {HostRows} and kinds.made_real == []


@cpu_suffices
@pytest.mark.parametrize("name", WHOLE)
def test_models_whose_embeddings_run_whole(name, kinds):
    assert_as_plain(MODELS[name]().double())
    assert set(kinds.found) == {torch.Tensor}


@pytest.mark.parametrize(("make", "ubatch_size"), [(bert_mlm, 5), (MODELS["llama, tied"], 3)])
def test_a_loss_of_ones_own_in_float64(make, ubatch_size, kinds):
    model = make().double()
    batch = batch_for(model)
    labels = batch.pop("labels")

    def loss(found: Any) -> torch.Tensor:
        logits = found.logits[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1).to(logits.device))

    assert_steps_as_plain(model, [batch] * 2, loss, ubatch_size=ubatch_size)
    assert kinds.made_real == []


@cpu_suffices
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_has_the_same_mask_in_the_recompute(name, kinds):
    """Within the embeddings, or between them and the layers: the gradient of a table of positions, or of a bias, is
    the sum of what dropout let through, which the first hidden states show."""
    model = gpt2() if name == "gpt2" else bert(dropout=0.5)
    inner = model.double().train().base_model
    if name == "gpt2":
        inner.drop.p = 0.5
    ids = batch_for(model)["input_ids"]
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
    assert set(kinds.found) == {HostRows}


class Sums(nn.Module):
    """Computes with its embedding in a way that is not known to keep rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **rest: Any) -> Any:
        embedded = self.model.model.embed_tokens(input_ids)
        return self.model(inputs_embeds=embedded.cumsum(1), labels=labels)


@cpu_suffices
def test_what_is_needed_as_a_whole_stays_on_the_device_and_is_told_once(kinds):
    assert_as_plain(Sums().double(), steps=3)
    assert kinds.made_real == [
        "all rows of what Embedding returns are needed at once, so they stay on the device from now on (6.0 KiB)"
    ]


@cpu_suffices
@pytest.mark.parametrize("name", ["gpt2, which adds positions", "t5, a table of two stacks"])
def test_generation_between_steps_is_that_of_the_plain_model(name):
    model = MODELS[name]().double()
    plain, batch = copy.deepcopy(model), batch_for(model, masked=False)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = plain.generate(batch["input_ids"], **given)
    attached(model, **ON_HOST)
    for _ in range(2):
        model(**batch).loss.backward()
        assert torch.equal(model.generate(batch["input_ids"], **given), expected)


# ---- modules after the layers


class Between(nn.Module):
    """An encoder, something after its layers, and a loss of both."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.model, self.part = bert().bert, part
        self.model.pooler = None

    def forward(self, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return self.part(hidden, **given).square().mean() + hidden.mean(1).square().mean()


class Shifted(nn.Module):
    """Adds positions that are given without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        return hidden + self.scale.weight * given.get("places", torch.zeros(hidden.shape[1]))[:, None]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)


class Cut(Norm):
    """Cuts each row to a length of a list."""

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return self.norm(torch.stack([row[:n].mean(0) for row, n in zip(hidden, lengths, strict=False)]))


class MixesInTraining(Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden - hidden.mean(0) if self.training else hidden)


class Noting(Norm):
    """Leaves a statistic of its rows behind, which it uses."""

    seen: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden.detach().max()
        return self.norm(hidden) * self.seen


class Checkpointed(Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: self.norm(x).tanh() * x, hidden, use_reentrant=False)


class Tabled(Between):
    """Adds a table of positions (tokens, width) that trains to what its layers return."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 16))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return ((hidden + self.part.weight) * 2)[:, 0].square().mean()


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


def ids(tokens: int = 6) -> torch.Tensor:
    return torch.randint(5, VOCAB, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


CALLS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "positions, then as many tokens as rows": (
        lambda: Between(Shifted()),
        [{"input_ids": ids(n), "places": torch.arange(n).double()} for n in (6, ROWS, 6)],
    ),
    "a list with an entry per row": (
        lambda: Between(Cut()),
        [{"input_ids": ids(), "lengths": [3] * ROWS}, {"input_ids": ids(), "lengths": list(range(1, 5)) * 2}],
    ),
    "mixed in training alone": (
        lambda: Between(MixesInTraining()),
        [{"input_ids": ids(), "train": train} for train in (False, True, False)],
    ),
    "statistics": (lambda: Between(Noting()), [{"input_ids": ids()}] * 2),
    "activation checkpointing": (lambda: Between(Checkpointed()), [{"input_ids": ids()}] * 2),
    "a table without rows": (Tabled, [{"input_ids": ids()}] * 2),
    "a backward inside the forward": (Twice, [{"input_ids": ids(), "labels": ids()}] * 2),
    "layers that take tokens first": (Turned, [{"input_ids": ids(5)}] * 2),
}


@cpu_suffices
@pytest.mark.parametrize("name", CALLS)
def test_what_runs_by_micro_batches_is_found_for_each_kind_of_call(name, kinds):
    make, batches = CALLS[name]
    options = {"layer_classes": ("TransformerEncoderLayer",)} if make is Turned else {}
    assert_steps_as_plain(make().double(), batches, **options)
    assert kinds.made_real == [] or make is not Tabled


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
