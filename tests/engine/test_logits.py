"""Models whose loss is computed in chunks: loss and gradients are those of the plain model, and no logits are made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from devices import DEVICE
from hf_l2l import L2LTrainer, L2LTrainingArguments, detach_l2l
from hf_l2l.logits.deferred import DeferredLogits
from memory_switches import forced_copies
from models import (
    EXACT,
    SMALL,
    TOLERANCE,
    VOCAB,
    WITHOUT_DROPOUT,
    assert_bits_of_plain,
    attached,
    batch_for,
    gpt2,
    gradients,
    has_bits_of_plain,
    llama,
    relative_error,
    t5,
)
from runs import attach
from tiers import more, on_a_device
from training import arguments, settled_memory

ROWS = 60
"""Of six tokens: two chunks of 128, and a part of one."""


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """The device has memory of its own: where it is that of the host, logits are those of plain torch."""
    with forced_copies() if DEVICE == "cpu" else nullcontext():
        yield


def _causal(name: str, **more: object) -> nn.Module:
    config = getattr(hf, f"{name}Config")(**{**SMALL, "num_key_value_heads": 1, **more})
    return getattr(hf, f"{name}ForCausalLM")(config)


def bart() -> nn.Module:
    of_each = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in of_each.items()}
    config = hf.BartConfig(d_model=16, vocab_size=VOCAB, max_position_embeddings=32, dropout=0.0, **sizes)
    return hf.BartForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "gemma2": lambda: _causal("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "cohere": lambda: _causal("Cohere", logit_scale=0.3),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **WITHOUT_DROPOUT)),
    "t5": t5,
    "bart": bart,
}


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor | None]]:
    found = model(**batch)
    found.loss.backward()
    return found, gradients(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "bert", "t5", "bart", *more("llama, tied", "gpt2")])
def test_a_loss_in_chunks(name, caplog):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batch = batch_for(model, rows=ROWS)
    if name == "llama":
        batch["num_items_in_batch"] = 17
    plain, expected = run(copy.deepcopy(model), batch)
    found, grads = run(attached(model, ubatch_size=None if name == "llama" else 25), batch)
    assert isinstance(found.logits, DeferredLogits) and not found.logits.deferred.is_there
    assert [record for record in caplog.records if record.name == "hf_l2l" and record.levelname == "WARNING"] == []
    # Losses in transformers are fp32 in float64 models, too.
    assert found.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert relative_error(grads, expected) < TOLERANCE[torch.float32]
    logits = found.logits.cpu()  # afterwards, for whoever asks
    torch.testing.assert_close(logits, plain.logits, rtol=EXACT, atol=EXACT)


@on_a_device
def test_logits_that_were_read_are_free_with_the_last_reference():
    model = attached(MODELS["gemma2"]())  # whose tanh saves its result
    held = []
    for _ in range(2):
        assert model(**batch_for(model, rows=ROWS)).logits.sum().item() != 0.0
        held.append(settled_memory())
    assert held[0] == held[1]


def test_logits_of_the_program_are_part_of_the_graph():
    """A loss of one's own, of what the model has returned."""
    torch.manual_seed(0)
    model = llama().double()
    ids = batch_for(model, masked=False, rows=ROWS)["input_ids"]

    def loss(each: nn.Module) -> torch.Tensor:
        found = each(input_ids=ids).logits[:, :-1]
        value = nn.functional.cross_entropy(found.reshape(-1, VOCAB), ids[:, 1:].reshape(-1).to(found.device))
        (value + found.logsumexp(-1).mean()).backward()
        return value.detach()

    plain = copy.deepcopy(model)
    assert loss(attached(model)).item() == pytest.approx(loss(plain).item(), rel=EXACT)
    assert relative_error(gradients(model), gradients(plain)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("options", "defers"),
    [({"chunked_loss": "off"}, False), ({"cmp": "fp16"}, True), *more(({"cmp": "bf16"}, True))],
)
def test_logits_wait_unless_told_otherwise(options, defers):
    torch.manual_seed(0)
    model = llama()
    plain, batch = copy.deepcopy(model), batch_for(model, rows=ROWS)
    model, _, optimizer, _ = attach(model, ubatch_size=None, **options)
    found, grads = run(model, batch)
    assert isinstance(found.logits, DeferredLogits) is defers
    assert found.logits.dtype == torch.float32 and optimizer is not None
    expected, others = run(plain, batch)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=2e-2 if "cmp" in options else 1e-5)
    assert relative_error(grads, others) < (0.1 if "cmp" in options else 1e-5)


@pytest.mark.parametrize("shares_memory", [False, True] if DEVICE == "cpu" else [False])
def test_few_tokens_and_shared_memory_leave_the_bits_of_plain_torch(shares_memory, monkeypatch):
    torch.manual_seed(0)
    model = llama()
    batch = batch_for(model, rows=ROWS if shares_memory else 8)
    plain, expected = run(copy.deepcopy(model), batch)
    if shares_memory:
        monkeypatch.setattr("hf_l2l.runtime.stream.shares_host_memory", lambda device: True)
    found, grads = run(attached(model), batch)
    assert not isinstance(found.logits, DeferredLogits) and has_bits_of_plain(found.loss, plain.loss)
    assert_bits_of_plain(grads, expected)


# ---- without gradients


def test_without_gradients_logits_are_there():
    model = attached(llama())
    batch = batch_for(model, rows=ROWS)
    with torch.no_grad():
        assert not isinstance(model(**batch).logits, DeferredLogits)
    ids = batch["input_ids"][:2]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    found = model.generate(ids, **options).cpu()
    assert torch.equal(found, detach_l2l(model).generate(ids, **options).cpu())


@pytest.mark.parametrize("loss_alone", [True, False])
def test_an_evaluation_of_the_loss_alone_makes_no_logits(loss_alone, tmp_path):
    torch.manual_seed(0)
    model = llama()
    batch = batch_for(model, rows=ROWS)
    rows = [{name: values[i] for name, values in batch.items()} for i in range(ROWS)]
    same = {"per_device_eval_batch_size": ROWS, "use_cpu": DEVICE == "cpu"}
    args = arguments(hf.TrainingArguments, tmp_path / "a", **same)
    plain = hf.Trainer(copy.deepcopy(model), args, eval_dataset=rows).evaluate()
    trainer = L2LTrainer(
        model,
        arguments(L2LTrainingArguments, tmp_path / "b", **same),
        eval_dataset=rows,
        compute_metrics=None if loss_alone else lambda prediction: {"count": len(prediction.predictions)},
    )
    waiting = []
    model.register_forward_hook(lambda _, args, out: waiting.append(isinstance(out.logits, DeferredLogits)))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert waiting == [loss_alone]


# ---- heads of another kind


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 2


def test_a_head_of_another_kind_is_said_once(caplog):
    torch.manual_seed(0)
    model = llama().double()
    model.lm_head = _Scaled(16, VOCAB, bias=False).double()
    batch = batch_for(model, rows=ROWS)
    _, expected = run(copy.deepcopy(model), batch)
    attached(model)
    for _ in range(2):
        model.zero_grad()
        found, grads = run(model, batch)
    assert not isinstance(found.logits, DeferredLogits)
    assert relative_error(grads, expected) < TOLERANCE[torch.float32]
    assert [record.getMessage().split(" are computed")[0] for record in caplog.records] == ["logits of a _Scaled"]
