"""Embeddings that run by micro-batches have the values and gradients of plain ones, and hold one sum per table."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import models
from hf_l2l import L2LConfig, attach_l2l
from hf_l2l.engine.by_rows import ByRows
from hf_l2l.logits import chunks
from hf_l2l.rows.host_rows import HostRows
from hf_l2l.rows.row_modules import input_embeddings
from hf_l2l.rows.weight_sums import WeightSums
from memory_switches import forced_copies
from models import (
    EXACT,
    ROWS,
    SMALL,
    TOLERANCE,
    VOCAB,
    batch_for,
    bert,
    electra,
    gpt2,
    gradients,
    llama,
    relative_error,
    t5,
    vit,
)
from tiers import ALL, combinations, cpu_suffices

ON_HOST = {"stash": "host", "boundary": "host", "ubatch_size": 3}


def roberta() -> nn.Module:
    config = hf.RobertaConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1)
    return hf.RobertaForMaskedLM(config)


def bert_mlm() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def bert_tokens() -> nn.Module:
    return hf.BertForTokenClassification(
        hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    )


def decoder(kind: str, task: str = "CausalLM", **more: Any) -> nn.Module:
    config = getattr(hf, f"{kind}Config")(
        **SMALL, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0, **more
    )
    return getattr(hf, f"{kind}For{task}")(config)


def gemma() -> nn.Module:
    return decoder("Gemma")


def cohere() -> nn.Module:
    return decoder("Cohere", logit_scale=0.5)


def llama_classification() -> nn.Module:
    return decoder("Llama", "SequenceClassification")


def t5_of(**more: Any) -> nn.Module:
    """With dropout where it drops nothing."""
    model = t5()
    model.config.update(more)
    return type(model)(model.config)


def frozen_table() -> nn.Module:
    model = bert()
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model


def frozen_embeddings() -> nn.Module:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    return model


BY_UBATCH = {
    "bert": bert,
    "bert, tied": bert_mlm,
    "roberta, whose positions follow padding": roberta,
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "t5, without dropout": t5,
    "vit": vit,
    "frozen table": frozen_table,
    "frozen embeddings": frozen_embeddings,
    "gpt2, which adds positions": gpt2,
    "electra, which projects": electra,
    "roberta, whose head takes one token": models.roberta,
    "gemma, which scales": gemma,
    "t5, shared and untied": lambda: t5_of(tie_word_embeddings=False),
    "token classification": bert_tokens,
    "llama, classification": llama_classification,
    "cohere, whose logits are scaled": cohere,
}


class Kinds:
    """What the calls of embeddings return, and what was needed on the device as a whole. Few tokens make a chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[type] = []
        self.made_real: list[str] = []

        class Told(logging.Handler):
            def emit(told, record: logging.LogRecord) -> None:
                if "they stay on the device" in record.getMessage():
                    self.made_real.append(record.getMessage())

        logger = logging.getLogger("hf_l2l")
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, Told()])
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


def assert_as_plain(model: nn.Module, steps: int = 2, **options: object) -> None:
    plain, batch = copy.deepcopy(model), batch_for(model)
    if "input_ids" in batch:
        batch["input_ids"][:, -1] = 1  # padding of RoBERTa
    if "Token" in type(model).__name__:
        batch["labels"] = batch["labels"].clamp(max=2)
    expected = plain(**batch).loss
    expected.backward()
    # Losses of transformers are fp32, and those of chunks are added in another order.
    tolerance = TOLERANCE[torch.float64 if expected.dtype == torch.float64 else torch.float32]
    with forced_copies():
        attach_l2l(model, L2LConfig(**{**ON_HOST, **options}))
        for _ in range(steps):
            model.zero_grad()
            found = model(**batch).loss
            found.backward()
            assert found.item() == pytest.approx(expected.item(), rel=1e-6)
            assert relative_error(gradients(model), gradients(plain)) < tolerance


@pytest.mark.parametrize("name", [*BY_UBATCH][:: 1 if ALL else 3])
def test_gradients_are_those_of_the_plain_model(name, monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    assert_as_plain(BY_UBATCH[name]().double())
    assert set(kinds.found) == {HostRows} and kinds.made_real == []


@pytest.mark.parametrize(
    ("name", "options"),
    combinations(
        ["bert, tied", "llama, tied", "llama", "gpt2, which adds positions"],
        [{}, {"ubatch_size": 5}, {"prefetch": False}],
        together=1,
    ),
)
def test_a_loss_in_float64(name, options, monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = BY_UBATCH[name]().double()
    plain, batch = copy.deepcopy(model), batch_for(model)
    labels = batch.pop("labels")

    def loss(each: nn.Module) -> torch.Tensor:
        logits = each(**batch).logits[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1).to(logits.device))

    expected = loss(plain)
    expected.backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(**{**ON_HOST, **options}))
        for _ in range(2):
            model.zero_grad()
            found = loss(model)
            found.backward()
            assert found.item() == pytest.approx(expected.item(), rel=EXACT)
            assert relative_error(gradients(model), gradients(plain)) < EXACT
    assert kinds.made_real == []


def masks_of(model: nn.Module, table: nn.Embedding, **batch: torch.Tensor) -> None:
    """The gradient of `table` counts what dropout let through, which the first hidden states show."""
    states = model(**batch, output_hidden_states=True).hidden_states
    states[0].sum().backward()
    let_through = (states[0].cpu() != 0).double().sum(0) * 2
    torch.testing.assert_close(table.weight.grad[: len(let_through)], let_through)


def test_dropout_between_embedding_and_layers_has_the_same_mask_in_the_recompute(monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = gpt2().double().train()
    model.transformer.drop.p = 0.5
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        for _ in range(2):
            model.zero_grad()
            masks_of(model.transformer, model.transformer.wpe, input_ids=batch_for(model)["input_ids"])
    assert set(kinds.found) == {HostRows}


class Sums(nn.Module):
    """Computes with its embedding in a way that is not known to keep rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
        embedded = self.model.model.embed_tokens(input_ids)
        return self.model(inputs_embeds=embedded.cumsum(1), labels=labels)


def test_what_is_needed_as_a_whole_stays_on_the_device_and_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 8)
    torch.manual_seed(0)
    model = Sums().double()
    plain, ids = copy.deepcopy(model), batch_for(model.model)["input_ids"]
    plain(ids, ids).loss.backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        for _ in range(3):
            model.zero_grad()
            model(ids, ids).loss.backward()
            assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float32]
    assert [each.message for each in caplog.records if "stay on the device" in each.message] == [
        "all rows of what Embedding returns are needed at once, so they stay on the device from now on (6.0 KiB)"
    ]


@pytest.mark.parametrize("name", [*BY_UBATCH][:: 1 if ALL else 3])
def test_evaluation_is_that_of_the_plain_model(name):
    torch.manual_seed(0)
    model = BY_UBATCH[name]().double().eval()
    plain, batch = copy.deepcopy(model), batch_for(model)
    labels = batch.pop("labels")
    if "T5" in type(model).__name__:
        batch["labels"] = labels
    with torch.no_grad(), forced_copies():
        expected = plain(**batch).logits
        attach_l2l(model, L2LConfig(**ON_HOST))
        torch.testing.assert_close(model(**batch).logits.cpu(), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["llama, tied", "gpt2, which adds positions", "t5, without dropout"])
def test_generation_between_steps_is_that_of_the_plain_model(name):
    torch.manual_seed(0)
    model = BY_UBATCH[name]().double()
    plain, batch = copy.deepcopy(model), batch_for(model, masked=False)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = plain.generate(batch["input_ids"], **given)
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        for _ in range(2):
            model(**batch).loss.backward()
            assert torch.equal(model.generate(batch["input_ids"], **given), expected)


class Noisy(nn.Module):
    """Has a hook that adds to the embedding, as NEFTune does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 0.25)

    def forward(self, **batch: torch.Tensor) -> object:
        return self.model(**batch)


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


class Cut(nn.Module):
    """Cuts each row to a length of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return self.norm(torch.stack([row[:n].mean(0) for row, n in zip(hidden, lengths, strict=False)]))


class MixesInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden - hidden.mean(0) if self.training else hidden)


class Noting(nn.Module):
    """Leaves a statistic of its rows behind, which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.LayerNorm(16), torch.zeros(())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden.detach().max()
        return self.norm(hidden) * self.seen


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: self.norm(x).tanh() * x, hidden, use_reentrant=False)


def assert_steps_as_plain(model: nn.Module, batches: list[dict[str, Any]], **options: Any) -> None:
    model.double()
    plain = copy.deepcopy(model)
    with forced_copies():
        attach_l2l(model, L2LConfig(**{**ON_HOST, **options}))
        for batch in batches:
            for each in (plain, model):
                each.train(batch.get("train", True))
                each.zero_grad()
                each(**{name: value for name, value in batch.items() if name != "train"}).backward()
            assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


def ids(tokens: int = 6) -> torch.Tensor:
    return torch.randint(5, VOCAB, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))


CHANGING = {
    "positions, then as many tokens as rows": (
        Shifted,
        [{"input_ids": ids(n), "places": torch.arange(n).double()} for n in (6, ROWS, 6)],
    ),
    "a list with an entry per row": (
        Cut,
        [{"input_ids": ids(), "lengths": [3] * ROWS}, {"input_ids": ids(), "lengths": list(range(1, 5)) * 2}],
    ),
    "mixed in training alone": (
        MixesInTraining,
        [{"input_ids": ids(), "train": train} for train in (False, True, False)],
    ),
    "statistics": (Noting, [{"input_ids": ids()}] * 2),
    "activation checkpointing": (Checkpointed, [{"input_ids": ids()}] * 2),
}


@pytest.mark.parametrize(("name", "ubatch_size"), combinations(CHANGING, [3, 1], together=1))
def test_what_runs_by_micro_batches_is_found_for_each_kind_of_call(name, ubatch_size):
    kind, batches = CHANGING[name]
    torch.manual_seed(0)
    assert_steps_as_plain(Between(kind()), batches, ubatch_size=ubatch_size)


def test_hooks_inside_a_module_are_called_once_with_all_rows():
    torch.manual_seed(0)
    model, shapes = bert().double(), []
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        model.bert.pooler.dense.register_forward_hook(lambda m, args, output: shapes.append(tuple(output.shape)))
        model(**batch_for(model)).loss.backward()
    assert shapes == [(ROWS, 16)]


@cpu_suffices
def test_a_weight_frozen_after_the_forward_gets_no_gradient():
    for options in ({}, ON_HOST):
        model = bert()
        with forced_copies():
            attach_l2l(model, L2LConfig(**options))
            loss = model(**batch_for(model)).loss
            model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
            loss.backward()
        assert model.bert.embeddings.word_embeddings.weight.grad is None
        assert model.bert.embeddings.position_embeddings.weight.grad is not None


class AddsTable(nn.Module):
    """Adds a table of positions (tokens, width) that trains to what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Tabled(Between):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return ((hidden + self.part.table.weight) * 2)[:, 0].square().mean()


def test_a_table_without_rows_is_added_by_micro_batches(monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    assert_steps_as_plain(Tabled(AddsTable()), [{"input_ids": ids()}] * 2)
    assert kinds.made_real == []


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


@cpu_suffices
def test_layers_that_take_tokens_first():
    torch.manual_seed(0)
    model = Turned().double()
    plain, ids = copy.deepcopy(model), torch.randint(VOCAB, (ROWS, 5))
    plain(ids).backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(layer_classes=("TransformerEncoderLayer",), **ON_HOST))
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids).backward()
            assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


class WithSpare(nn.Embedding):
    """Has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 16)
        self.spare = nn.Parameter(torch.ones(16))


@cpu_suffices
def test_a_weight_that_an_embedding_does_not_use_gets_no_gradient(monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = llama()
    model.model.embed_tokens = WithSpare()
    assert_as_plain(model.double())
    assert set(kinds.found) == {HostRows} and model.model.embed_tokens.spare.grad is None


@cpu_suffices
def test_a_hook_that_adds_noise():
    torch.manual_seed(0)
    assert_as_plain(Noisy().double(), steps=2)


@cpu_suffices
def test_embeddings_that_the_program_computes():
    torch.manual_seed(0)
    model = llama().double()
    plain, ids = copy.deepcopy(model), batch_for(model, masked=False)["input_ids"]
    states = torch.randn(*ids.shape, 16, dtype=torch.float64)
    grads = []
    for each in (plain, model):
        inputs = states.clone().requires_grad_()
        if each is model:
            with forced_copies():
                attach_l2l(model, L2LConfig(**ON_HOST))
                each(inputs_embeds=inputs, labels=ids).loss.backward()
        else:
            each(inputs_embeds=inputs, labels=ids).loss.backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=EXACT, atol=EXACT)


def test_dropout_has_the_same_mask_in_the_recompute():
    """The gradient of a bias is the sum of what dropout let through, which the loss shows."""
    torch.manual_seed(0)
    model = bert(dropout=0.5).double().train()
    batch = batch_for(model)
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        for _ in range(2):
            model.zero_grad()
            states = model.bert(batch["input_ids"], output_hidden_states=True).hidden_states
            states[0].sum().backward()
            let_through = (states[0].cpu() != 0).double().sum((0, 1)) * 2
            torch.testing.assert_close(model.bert.embeddings.LayerNorm.bias.grad, let_through)


def test_rows_are_added_to_one_sum_and_padding_gets_none():
    table = torch.randn(7, 3, requires_grad=True)
    ids, sums = torch.tensor([[1, 1, 4], [2, 6, 2]]), WeightSums([table], [True])
    for _ in range(2):
        with sums:
            out = nn.functional.embedding(ids, table, padding_idx=-1)
        assert torch.equal(out, nn.functional.embedding(ids, table))
        sums.add(out, torch.ones_like(out), [])
    assert table.grad is None
    [total] = sums.results()
    assert total.tolist() == [[0.0] * 3, [4.0] * 3, [4.0] * 3, [0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_tables_whose_rows_cannot_be_added_run_whole(option):
    model = llama()
    setattr(model.model.embed_tokens, option, True)
    assert input_embeddings(list(model.modules()), []) == set()


def test_what_are_input_embeddings():
    for make, names in (
        (bert, {"BertEmbeddings", "Embedding"}),
        (llama, {"Embedding"}),
        (t5, {"Embedding"}),
        (vit, {"ViTEmbeddings", "ViTPatchEmbeddings"}),
    ):
        found = input_embeddings(list(make().modules()), [])
        assert {type(module).__name__ for module in found} == names, make


class MixedRows(nn.Embedding):
    """Subtracts the mean of all rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        return found - found.mean(0, keepdim=True)


@cpu_suffices
def test_an_embedding_that_mixes_rows_runs_whole(monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = llama()
    model.model.embed_tokens = MixedRows(VOCAB, 16)
    assert_as_plain(model.double())
    assert set(kinds.found) == {torch.Tensor}


class ReadsTheNorm(nn.Module):
    """Reads a weight of the model around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.owner = nn.Embedding(VOCAB, 16), [inner]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * self.owner[0].norm.weight


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

    def __init__(self) -> None:
        super().__init__(VOCAB, 16)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rows += len(ids)
        return super().forward(ids)


@cpu_suffices
def test_an_embedding_that_reads_weights_of_others_runs_whole(monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = llama()
    model.model.embed_tokens = ReadsTheNorm(model.model)
    model.double()
    batch = batch_for(model)
    model(**batch).loss.backward()
    expected = gradients(model)
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        model.zero_grad()
        model(**batch).loss.backward()
        assert relative_error(gradients(model), expected) < TOLERANCE[torch.float64]
    assert kinds.found == [torch.Tensor]


@cpu_suffices
@pytest.mark.parametrize("kind", [SaysFrequency, EvenRows])
def test_embeddings_that_cannot_run_by_ubatches(kind, monkeypatch):
    kinds = Kinds(monkeypatch)
    torch.manual_seed(0)
    model = llama()
    model.model.embed_tokens = kind(VOCAB, 16)
    assert_as_plain(model.double())
    assert set(kinds.found) == {torch.Tensor}


@cpu_suffices
def test_trials_write_to_no_buffer():
    model = llama()
    model.model.embed_tokens = Counting()
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        for step in (1, 2):
            model(**batch_for(model)).loss.backward()
            assert model.model.embed_tokens.rows == step * ROWS


@cpu_suffices
def test_activation_checkpointing_around_the_model():
    torch.manual_seed(0)
    model = bert().double()
    plain, batch = copy.deepcopy(model), batch_for(model)
    plain(**batch).loss.backward()

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels).loss

    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        found = torch.utils.checkpoint.checkpoint(loss, batch["input_ids"], batch["labels"], use_reentrant=False)
        found.backward()
        assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


class Twice(nn.Module):
    """Runs a backward in the midst of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, **batch: torch.Tensor) -> object:
        self.model(**batch).loss.backward()
        return self.model(**batch)


@cpu_suffices
def test_a_backward_inside_the_forward():
    torch.manual_seed(0)
    model = Twice().double()
    plain, batch = copy.deepcopy(model), batch_for(model.model)
    plain(**batch).loss.backward()
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        model(**batch).loss.backward()
        assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


@cpu_suffices
def test_hidden_states_in_fp32_are_no_use_by_the_model():
    model = bert(num_hidden_layers=3)
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST, cmp="bf16"))
        for _ in range(2):
            states: list[torch.Tensor] = []
            handle = model.bert.encoder.layer[1].register_forward_hook(lambda m, a, output: states.append(output))  # noqa: B023
            model(**batch_for(model), output_hidden_states=True)
            handle.remove()
            assert isinstance(states[0], HostRows)


def test_inputs_do_not_live_as_long_as_the_graph():
    model = vit()
    found: list[weakref.ref[torch.Tensor]] = []
    with forced_copies():
        attach_l2l(model, L2LConfig(**ON_HOST))
        model.vit.embeddings.register_forward_pre_hook(lambda m, args: found.append(weakref.ref(args[0])))
        loss = model(**batch_for(model)).loss
        loss.backward()
        gc.collect()
    assert found[0]() is None and loss is not None
